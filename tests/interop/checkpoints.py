"""Checkpoints of small models of transformers, and the bits in a folder of safetensors files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file


def gpt2() -> Any:
    """A model with a tied head, whose file has the names of the model."""
    config = transformers.GPT2Config(
        n_layer=2, n_embd=64, n_head=2, vocab_size=256, n_positions=32, bos_token_id=None, eos_token_id=None,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    torch.manual_seed(1)
    return transformers.GPT2LMHeadModel(config)


def mixtral() -> Any:
    """A model whose file has each expert's matrices, which the model has as one."""
    config = transformers.MixtralConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(1)
    return transformers.MixtralForCausalLM(config)


def bert() -> Any:
    """A model with a buffer that no file has, and a new head beside a tied one."""
    config = transformers.BertConfig(
        vocab_size=128, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    torch.manual_seed(1)
    return transformers.BertForMaskedLM(config)


MODELS: dict[str, Callable[[], Any]] = {"gpt2": gpt2, "mixtral": mixtral, "bert": bert}


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of the safetensors files in ``folder``."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def assert_same_tensors(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    different = [name for name, value in expected.items() if not torch.equal(found[name], value)]
    assert not different, different
    assert all(found[name].dtype == value.dtype for name, value in expected.items())


def assert_same_files(found: Path, expected: Path) -> None:
    """Assert that both folders have files of the same names, small ones of the same text, and the same tensors."""
    assert sorted(path.name for path in found.iterdir()) == sorted(path.name for path in expected.iterdir())
    for path in expected.glob("*.json"):
        assert (found / path.name).read_text() == path.read_text(), path.name
    for path in expected.glob("*.safetensors"):
        assert_same_tensors(load_file(found / path.name), load_file(path))

"""Tiny models of transformers, their data, and what a Trainer says of its training: the material of these tests."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    TrainingArguments,
)

__all__ = ["MODELS", "Masked", "Tokens", "build", "history", "same_state", "state_of", "training_arguments"]

VOCAB = 64
NUM_ITEMS = 22  # with batches of 2 and windows of 2: six steps in an epoch, the last one of a single batch


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences of 12 random tokens."""

    def __init__(self, num_items: int = NUM_ITEMS, seed: int = 0) -> None:
        self._num_items = num_items
        self._seed = seed

    def __len__(self) -> int:
        return self._num_items

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        draw = torch.Generator().manual_seed(1000 * self._seed + index)
        tokens = torch.randint(VOCAB, (12,), generator=draw)
        return {"input_ids": tokens, "labels": tokens}


class Masked(Tokens):
    """Items that draw which tokens they hide, from all three generators of the process."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = super().__getitem__(index)
        tokens = row["input_ids"].clone()
        tokens[[int(torch.randint(12, ())), random.randrange(12), np.random.randint(12)]] = 0
        return row | {"input_ids": tokens}


def _gpt2() -> nn.Module:
    """With dropout, and a head that is tied to the embedding."""
    sizes = {"n_embd": 32, "n_layer": 3, "n_head": 2, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, bos_token_id=0, eos_token_id=0, **sizes))


_SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
          "num_attention_heads": 2, "max_position_embeddings": 16}  # fmt: skip


def _llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(num_key_value_heads=1, attention_dropout=0.1, **_SIZES))


def _bert() -> nn.Module:
    return BertForMaskedLM(BertConfig(**_SIZES))


def _mixtral() -> nn.Module:
    more = {"num_key_value_heads": 1, "num_local_experts": 3, "num_experts_per_tok": 2, "attention_dropout": 0.1}
    return MixtralForCausalLM(MixtralConfig(**_SIZES, **more))


MODELS: Mapping[str, Callable[[], nn.Module]] = {"gpt2": _gpt2, "llama": _llama, "bert": _bert, "mixtral": _mixtral}


def build(name: str) -> Any:
    """Return the model of this name, with the same values each time."""
    torch.manual_seed(3)
    return MODELS[name]()


def training_arguments(output_dir: Path, **options: Any) -> TrainingArguments:
    """Return arguments with clipping, accumulation, a scheduler with warm-up, and evaluation; ``options`` win."""
    chosen: dict[str, Any] = {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_grad_norm": 1.0, "max_steps": 9,
        "learning_rate": 1e-2, "weight_decay": 0.1, "lr_scheduler_type": "cosine", "warmup_steps": 2,
        "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 4, "save_strategy": "steps", "save_steps": 2,
        "report_to": "none", "use_cpu": True, "disable_tqdm": True, "seed": 5, "dataloader_pin_memory": False,
    }  # fmt: skip
    return TrainingArguments(output_dir=str(output_dir), **chosen | options)


def history(trainer: Any) -> list[dict[str, float]]:
    """Return what was logged, but for times and rates: the bits of losses, norms and learning rates."""
    names = ("step", "loss", "grad_norm", "learning_rate", "eval_loss")
    return [found for log in trainer.state.log_history if len(found := {k: log[k] for k in names if k in log}) > 1]


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of all parameters and buffers."""
    return {name: value.clone() for name, value in model.state_dict().items()}


def same_state(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)

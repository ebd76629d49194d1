"""Models of transformers and adapters of PEFT on three tiers: the bits of the same model in the device's memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import tiered
from tests.accelerator.training import DEVICE, ROOMY_NBYTES

pytestmark = [pytest.mark.filterwarnings(f"ignore::{word}") for word in ("UserWarning", "FutureWarning")]

VOCAB = 97
SIZES = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 0}


def gpt2() -> nn.Module:
    """With dropout, and a head that is tied to the embedding."""
    return GPT2LMHeadModel(GPT2Config(n_layer=3, n_head=2, n_embd=32, n_positions=32, **SIZES))


def llama() -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=2,
            max_position_embeddings=32, **SIZES,
        )
    )  # fmt: skip


def lora() -> nn.Module:
    """Adapters over a frozen base."""
    return get_peft_model(llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


def train(build: Callable[[], nn.Module], prepare: Callable[[nn.Module], Any], *, is_split: bool) -> tuple[Any, Any]:
    """Return the losses and the state of three steps; where ``is_split``, of two micro-batches each."""
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = build()
    optimizer = prepare(model)
    model.train()
    torch.manual_seed(1)
    losses = []
    for step in range(3):
        tokens = torch.randint(0, VOCAB, (4, 12), generator=torch.Generator().manual_seed(step)).to(DEVICE)
        batches = [{"input_ids": part, "labels": part} for part in (tokens.split(2) if is_split else [tokens])]
        for number, batch in enumerate(batches, 1):
            only_adds = isinstance(optimizer, tiered.AdamW) and number < len(batches)
            with tiered.accumulate(model) if only_adds else nullcontext():
                loss = model(**batch).loss
                loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses), {name: value.cpu().clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    ("build", "update", "is_split"),
    [(gpt2, "step", False), (gpt2, "backward", True), (llama, "backward", False), (lora, "step", True)],
)
def test_bits(build: Any, update: str, is_split: bool, accelerator: Any, tmp_path: Path) -> None:
    def trained(model: nn.Module) -> list[nn.Parameter]:
        return [parameter for parameter in model.parameters() if parameter.requires_grad]

    def in_memory(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(trained(model), lr=1e-2, fused=True)

    losses, state = train(build, in_memory, is_split=is_split)
    accelerator.reset()
    with tiered.Store(tmp_path, dram=ROOMY_NBYTES, device_memory=ROOMY_NBYTES // 2) as store:

        def on_tiers(model: nn.Module) -> torch.optim.Optimizer:
            tiered.shard(model, store, device=DEVICE, hold=0)
            return tiered.AdamW(trained(model), lr=1e-2, update=update)

        ours, values = train(build, on_tiers, is_split=is_split)
    assert torch.equal(ours, losses)
    assert all(torch.equal(values[name], state[name]) for name in state)


@pytest.mark.parametrize("around", [nullcontext, tiered.unsharded])
@pytest.mark.parametrize("update_on", ["cpu", "device"])
def test_adapters_that_are_merged_and_taken_out_again_change_the_base_on_the_device(
    around: Callable[[Any], Any], update_on: str, accelerator: Any, tmp_path: Path
) -> None:
    tokens = torch.randint(0, VOCAB, (2, 12), generator=torch.Generator().manual_seed(3)).to(DEVICE)

    def outputs(model: Any, optimizer: Any, around: Callable[[Any], Any]) -> list[torch.Tensor]:
        found = []
        for is_merged in (False, True, False, True):
            if is_merged:
                with around(model):
                    model.merge_adapter()
                model.eval()
                with torch.no_grad():
                    found.append(model(input_ids=tokens).logits.cpu())
                with around(model):
                    model.unmerge_adapter()
                model.train()
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach().cpu())
        return found

    def made() -> Any:
        torch.manual_seed(0)
        with torch.device(DEVICE):
            return lora()

    plain, model = made(), made()
    expected = outputs(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True), nullcontext)
    with tiered.Store(tmp_path, dram=ROOMY_NBYTES, device_memory=ROOMY_NBYTES) as store:
        tiered.shard(model, store, device=DEVICE, hold=0, update_on=update_on)
        ours = outputs(model, tiered.AdamW(model.parameters(), lr=1e-2), around)
        assert all(torch.equal(one, other) for one, other in zip(ours, expected, strict=True))

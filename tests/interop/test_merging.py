"""Adapters of PEFT merge into a sharded base as into one in memory, a layer at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch

import tiered
from tests.interop.checkpoints import assert_same_tensors, gpt2
from tests.zero.training import ROOMY_NBYTES, debug_store
from tiered.errors import UsageError

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' and PEFT's own


def adapted(model: Any, **options: Any) -> Any:
    torch.manual_seed(3)
    options = {"r": 4, "target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True} | options
    return peft.get_peft_model(model, peft.LoraConfig(**options, init_lora_weights=False))


def loss_of(model: Any) -> torch.Tensor:
    ids = torch.arange(32).view(2, 16)
    loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
    return loss


@pytest.mark.parametrize("options", [{}, {"use_dora": True}], ids=["lora", "dora"])
@pytest.mark.parametrize("is_safe", [False, True])
@pytest.mark.parametrize("adapts_before", [True, False])
def test_merged_values_are_those_of_the_model_in_memory(
    adapts_before: bool, is_safe: bool, options: dict[str, Any], tmp_path: Path
) -> None:
    plain = adapted(gpt2(), **options).merge_and_unload(safe_merge=is_safe)
    with debug_store(tmp_path / "run") as store:
        if adapts_before:
            model = tiered.shard(adapted(gpt2(), **options), store)
        else:
            model = adapted(tiered.shard(gpt2(), store), **options)
        merged = model.merge_and_unload(safe_merge=is_safe)
        del model
        assert_same_tensors(merged.state_dict(), plain.state_dict())
        with torch.no_grad():
            assert torch.equal(loss_of(merged), loss_of(plain))
        store.commit()
        tiered.save_pretrained(merged, tmp_path / "merged")
    again = type(plain).from_pretrained(tmp_path / "merged")
    assert_same_tensors(again.state_dict(), plain.state_dict())


def test_a_base_that_does_not_fit_is_merged_into_and_trained_on(tmp_path: Path) -> None:
    """The masters of a bf16 base follow; its units go out between layers."""
    plain = adapted(gpt2().to(torch.bfloat16)).merge_and_unload()
    with debug_store(tmp_path / "run", ROOMY_NBYTES // 4, durable=False) as store:
        base = tiered.shard(gpt2(), store, param_dtype=torch.bfloat16, hold=0)
        merged = adapted(base).merge_and_unload()
        assert_same_tensors(merged.state_dict(), plain.state_dict())
        for parameter in merged.parameters():
            parameter.requires_grad_(True)
        optimizer = tiered.AdamW(merged.parameters(), lr=1e-2)
        loss_of(merged).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.isfinite(loss_of(merged))


def test_merging_and_unmerging_in_place_goes_between_steps_alone(tmp_path: Path) -> None:
    plain = adapted(gpt2())
    with debug_store(tmp_path / "run", durable=False) as store:
        model = adapted(tiered.shard(gpt2(), store))
        for each in (plain, model):
            each.merge_adapter()
        assert_same_tensors(model.state_dict(), plain.state_dict())
        for each in (plain, model):
            each.unmerge_adapter()
        assert_same_tensors(model.state_dict(), plain.state_dict())
        hook = model.base_model.model.lm_head.register_forward_pre_hook(lambda *_: model.merge_adapter())
        with pytest.raises(UsageError, match=r"\.data"):
            loss_of(model)
        hook.remove()
        assert torch.isfinite(loss_of(model))

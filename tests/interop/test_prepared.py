"""A plain Trainer with tiered.hf.Factory, and accelerate's own loop: nothing is subclassed, the bits are plain ones."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

import tiered
from tests.interop.small_models import Tokens, build, history, same_state, state_of, training_arguments
from tests.interop.test_trainer import Outcome, Stop, StoppedError, reference
from tests.zero.training import ROOMY_NBYTES, debug_store
from tiered.errors import UsageError


def train(path: Path, stop: Stop, *, resume: bool = False, is_constructed: bool = False) -> Outcome:
    with debug_store(path / "store", ROOMY_NBYTES) as store:
        with tiered.construct(store) if is_constructed else contextlib.nullcontext():
            model = build("llama")
        arguments = training_arguments(path / "out")
        options = {"args": arguments, "tiered": tiered.hf.Arguments(store=store)}
        trainer = transformers.Trainer(
            model=model, args=arguments, train_dataset=Tokens(), eval_dataset=Tokens(6, 1),
            optimizer_cls_and_kwargs=(tiered.hf.Factory, options), callbacks=[stop, tiered.hf.Callback(store)],
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=resume)
        assert trainer.optimizer.param_groups[0]["weight_decay"] == 0.1
        return history(trainer), state_of(model)


def test_a_factory_shards_a_model_whose_parameters_were_constructed_in_the_store(tmp_path: Path) -> None:
    logged, state = train(tmp_path, Stop(), is_constructed=True)
    assert logged == reference("llama")[0] and same_state(state, reference("llama")[1])


def test_a_factory_shards_the_model_when_it_trains_and_the_run_resumes(tmp_path: Path) -> None:
    with pytest.raises(StoppedError):
        train(tmp_path, Stop(3))
    logged, state = train(tmp_path, Stop(), resume=True)
    assert logged == reference("llama")[0] and same_state(state, reference("llama")[1])


def test_a_factory_needs_an_open_store(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"expected Arguments\(store=tiered.Store"):
        options: dict[str, Any] = {"args": training_arguments(tmp_path), "tiered": {"store": tmp_path / "store"}}
        tiered.hf.Factory()(build("llama"), **options)


def accelerated(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[list[torch.Tensor], Any]:
    """Train by accelerate's loop; return the losses and the state."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    loader = DataLoader(Tokens(8), batch_size=2)  # type: ignore[arg-type]
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    prepared, stepper, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    if isinstance(optimizer, tiered.AdamW):
        assert prepared is model and stepper is optimizer
    losses = []
    torch.manual_seed(1)
    for batch in loader:
        with accelerator.accumulate(prepared):
            loss = prepared(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
            stepper.step()  # accelerate lets none through but in the last of the accumulated micro-steps
            assert not accelerator.optimizer_step_was_skipped
            scheduler.step()
            stepper.zero_grad()
        losses.append(loss.detach())
    return losses, state_of(model)


def test_prepare_returns_model_and_optimizer_untouched(tmp_path: Path) -> None:
    model = build("gpt2")
    losses, state = accelerated(model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True))
    with debug_store(tmp_path) as store:
        model = tiered.shard(build("gpt2"), store)
        found, values = accelerated(model, tiered.AdamW(model.parameters(), lr=1e-2))
    assert all(map(torch.equal, found, losses)) and same_state(values, state)


def test_accelerate_with_fp16_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(cpu=True)
    monkeypatch.setitem(accelerator.state._shared_state, "_mixed_precision", "fp16")
    with debug_store(tmp_path, durable=False) as store:
        model = tiered.shard(build("gpt2"), store)
        with pytest.raises(UsageError, match="fp16"):
            accelerator.prepare(tiered.AdamW(model.parameters()))

"""A plain Trainer over a sharded model, and accelerate's own loop: nothing is subclassed, the bits are plain ones."""

from __future__ import annotations

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


def train(path: Path, store: Path, stop: Stop, *, resume: bool = False) -> Outcome:
    with debug_store(store, ROOMY_NBYTES) as opened:
        model = tiered.shard(build("gpt2"), opened)
        decayed = transformers.Trainer.get_decay_parameter_names(None, model)
        groups = [
            {"params": [p for n, p in model.named_parameters() if (n in decayed) is is_decayed], "weight_decay": decay}
            for is_decayed, decay in ((True, 0.1), (False, 0.0))
        ]
        trainer = transformers.Trainer(
            model=model, args=training_arguments(path / "out"), train_dataset=Tokens(), eval_dataset=Tokens(6, 1),
            optimizers=(tiered.AdamW(groups, lr=1e-2), None), callbacks=[stop],
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=resume)
        return history(trainer), state_of(model)


def test_a_plain_trainer_trains_a_sharded_model_and_resumes_from_its_own_files(tmp_path: Path) -> None:
    with pytest.raises(StoppedError):
        train(tmp_path, tmp_path / "store", Stop(6))
    logged, state = train(tmp_path, tmp_path / "other", Stop(), resume=True)
    assert logged == reference("gpt2")[0] and same_state(state, reference("gpt2")[1])


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


def test_a_loader_that_is_resumable_is_so_before_it_is_prepared() -> None:
    accelerator, loader = Accelerator(cpu=True), DataLoader(Tokens(8), batch_size=2)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"DataLoaderShard.*tiered.resumable\(loader\) of the loader before"):
        tiered.resumable(accelerator.prepare(loader))
    resumable = tiered.resumable(loader)
    assert accelerator.prepare(resumable) is resumable

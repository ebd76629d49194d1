"""The training loop: build or resume the model in the store, step, commit.

It is the loop that any user would write around a model of their own, with a stopwatch and an ear for Ctrl-C.
"""

from __future__ import annotations

import math
import random
from contextlib import nullcontext, suppress
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

import tiered
from tiered.console.interruption import Interruption
from tiered.errors import CapacityError, TieredError, UsageError
from tiered.train.existing_run import find_run, holds_any_file, remove_store
from tiered.train.peak import matrix_flop_per_s
from tiered.train.plan import Plan
from tiered.train.progress import Display, StepRecord, open_display
from tiered.train.stopwatch import Stopwatch
from tiered.train.summary import RunSummary
from tiered.train.task import GPT, Loader
from tiered.train.timeline import CAPACITY, write_timeline

__all__ = ["ResumeHint", "TrainingLoop"]

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class ResumeHint:
    """The advice for a user whose run stops now. ``step`` is the last one known to be committed, -1 before the first.

    ``sealed_step`` is that of the last commit that was begun, which may be on its way still.
    """

    def __init__(self, plan: Plan, *, resume: str, start: str) -> None:
        self.step = self.sealed_step = plan.first_step or -1
        self._durable = plan.durable
        self._resume = resume
        self._start = start

    def __str__(self) -> str:
        if not self._durable:
            return "nothing is kept of a run with --no-durable"
        later = f", or from step {self.sealed_step} if its commit came through" if self.sealed_step > self.step else ""
        if self.step < 0:
            nothing = "" if later else "nothing was committed yet, "
            return f"{nothing}the run is resumable from step 0{later}: {self._start}"
        return f"the run is resumable from step {self.step}{later}: {self._resume}"


class _StoppedError(Exception):
    """Leaves the store's block before the first step, so that no half-built model is committed on the way out."""


class TrainingLoop:
    """One process's part of a run, used by the main thread; after ``run`` the store is closed in any case.

    A step is either committed whole or does not count: the run is always resumable from its last commit.
    """

    def __init__(
        self,
        plan: Plan,
        loader: Loader,
        interruption: Interruption,
        hint: ResumeHint,
        *,
        timeline: Path | None = None,
    ) -> None:
        """``timeline`` is the file to write one to, if any."""
        self._plan = plan
        self._timeline = timeline
        self._config = plan.config
        self._loader = loader
        self._interruption = interruption
        self._hint = hint
        self._is_built = False
        self._sealed_step = -1
        self._step_of: dict[int, int] = {}  # by generation sealed in this process

    def run(self, *, quiet: bool) -> RunSummary | None:
        """Train to the plan's last step or to Ctrl-C; return the summary, None when no step was begun.

        Once the model stands, an error names the command to go on with. Before, a new store that lacks room is removed.
        """
        plan, is_new = self._plan, not holds_any_file(self._plan.directories)
        if plan.device.index is not None:  # for good: what the run leaves is freed as the process ends
            torch.accelerator.set_device_index(plan.device.index)
        made = {path for each in plan.directories for path in (each, *each.parents) if not path.exists()}
        try:
            with tiered.Store(
                *plan.directories, dram=plan.dials.dram, device_memory=_device_memory(plan), durable=plan.durable
            ) as store:
                with open_display(plan.dials.steps, first_step=plan.first_step, quiet=quiet) as display:
                    return self._train(store, display)
        except _StoppedError:
            return None
        except TieredError as error:
            if self._is_built:
                error.add_note(str(self._hint))
            elif is_new and isinstance(error, CapacityError):
                with suppress(OSError, TieredError):
                    if find_run(plan.directories) is None:  # nobody else has committed there since
                        remove_store(plan.directories)
                    for path in sorted(made, reverse=True):  # inner ones first; none that is not empty
                        path.rmdir()
            raise

    def _train(self, store: tiered.Store, display: Display) -> RunSummary:
        display.note(f"{'going on with' if self._plan.first_step else 'building'} the model")
        model, optimizer, step = self._build(store)
        self._is_built = True
        device, peak = self._plan.device, 0.0
        if device.type != "cpu":
            peak = matrix_flop_per_s(device, _DTYPES[self._config.dtype])
        if self._interruption.requested:
            raise _StoppedError
        records: list[StepRecord] = []
        if self._timeline is not None:
            store.working_set.recorder.start(CAPACITY)
        stopwatch = Stopwatch(store)
        while step < self._plan.dials.steps and not self._interruption.requested:
            loss = self._step(model, optimizer, step)
            step += 1
            if step % self._plan.dials.commit_every == 0:
                self._commit(store, step)
            records.append(stopwatch.lap(step, loss, self._config.tokens_per_step))
            display.step(records[-1])
        self._finish(store, step)
        return RunSummary.of(self._plan, records, store, peak_flop_per_s=peak, timeline=self._write_timeline(store))

    def _write_timeline(self, store: tiered.Store) -> str:
        """Write the timeline if one was asked for; return a line about it."""
        return "" if self._timeline is None else write_timeline(self._timeline, *store.working_set.recorder.stop())

    def _build(self, store: tiered.Store) -> tuple[torch.nn.Module, torch.optim.Optimizer, int]:
        """Return the model, its optimizer and the number of steps done, all as the last commit left them."""
        config = self._config
        random.seed(config.seed)
        np.random.seed(config.seed % 2**32)
        torch.manual_seed(config.seed)
        dials, device = self._plan.dials, self._plan.device
        with tiered.construct(store, device=device):
            built = GPT(config.shape)
        model = tiered.shard(
            built, store, param_dtype=_DTYPES[config.dtype], device=device, activations=dials.activations,
            hold=dials.hold, update_on=dials.update_on,
        )  # fmt: skip
        optimizer = tiered.AdamW(model.parameters(), lr=config.lr, update=config.update, state=config.state)
        if not self._plan.durable:
            return model, optimizer, 0
        store.register("loader", self._loader)
        return model, optimizer, store.resume().get("step", 0)

    def _step(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
        """Make one optimizer step and return the mean loss of its micro-steps."""
        config, total = self._config, 0.0
        for micro_step in range(config.accumulate):
            only_adds = config.update == "backward" and micro_step < config.accumulate - 1
            with tiered.accumulate(model) if only_adds else nullcontext():
                tokens, targets = self._next_batch()
                loss = model(tokens, targets)
                total += _checked(loss, step)
                (loss if config.accumulate == 1 else loss / config.accumulate).backward()
        if config.clip:
            tiered.clip_grad_norm_(model, config.clip)
        optimizer.step()
        optimizer.zero_grad()
        return total / config.accumulate

    def _next_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the next tokens and targets where the model computes, each int64 (batch, context)."""
        tokens, targets = next(self._loader)
        device = self._plan.device
        if device.type == "cpu":
            return tokens, targets
        return tuple(each.pin_memory().to(device, non_blocking=True) for each in (tokens, targets))  # type: ignore[return-value]

    def _commit(self, store: tiered.Store, step: int) -> None:
        """Seal ``step``, and note which step is durable by now."""
        if self._plan.durable:
            state = {"step": step, "config": asdict(self._config), "dials": asdict(self._plan.dials)}
            self._hint.sealed_step = step  # order: from here on a second Ctrl-C may find it there
            self._step_of[store.commit(state, wait=False)] = self._sealed_step = step
            self._note_durable(store)

    def _note_durable(self, store: tiered.Store) -> None:
        self._hint.step = self._step_of.get(store.generation, self._hint.step)

    def _finish(self, store: tiered.Store, step: int) -> None:
        """Make the steps done so far durable, also between two commits."""
        if self._sealed_step != step:
            self._commit(store, step)
        if self._plan.durable:
            store.wait_for_commit()
            self._note_durable(store)


def _device_memory(plan: Plan) -> int | None:
    """Return the budget of the store on the plan's device, in bytes; None: from what is free there."""
    return 0 if plan.device.type == "cpu" else plan.dials.device_memory


def _checked(loss: torch.Tensor, step: int) -> float:
    """Return the value of a loss. Raises UsageError for a loss that teaches nothing, infinite or NaN."""
    value = float(loss.item())
    if not math.isfinite(value):
        raise UsageError(f"the loss of step {step + 1} is {value}: start again with a lower --lr")
    return value

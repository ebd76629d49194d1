"""Ctrl-C anywhere in training, which its caller catches as a notebook does: after a rollback it goes on, same bits."""

from __future__ import annotations

import contextlib
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tiered
from tests.devices.simulated_disk import SimulatedDisk
from tests.interrupts import interrupt_at
from tests.store.rig import simulated_store
from tiered.errors import TieredError, UsageError
from tiered.store.store import Store
from tiered.units import KiB, MiB

NUM_TRIED = 5  # places for each case; any number may be tried


class Training:
    """A model of three units in a store, one step of it committed."""

    def __init__(self, store: Store, update: str, activations: str, num_micro_steps: int) -> None:
        torch.manual_seed(3)
        block = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
        model = nn.Sequential(nn.Linear(64, 64), block, nn.Linear(64, 8))
        self.store = store
        self.model = tiered.shard(model, store, activations=activations)
        self.optimizer = tiered.AdamW(self.model.parameters(), lr=1e-2, update=update)
        self.is_clipped = update == "step"
        self.num_micro_steps = num_micro_steps
        if store.generation:
            store.resume()
        else:
            self.step(0)
            store.wait_for_commit()

    def step(self, number: int) -> None:
        inputs = torch.randn(128, 64, generator=torch.Generator().manual_seed(number))
        for part in inputs.chunk(self.num_micro_steps):
            (self.model(part).square().mean() / self.num_micro_steps).backward()
        if self.is_clipped:
            tiered.clip_grad_norm_(self.model, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.store.commit({"step": number + 1}, wait=False)

    def values(self) -> dict[str, torch.Tensor]:
        return dict(self.model.state_dict())


@contextmanager
def training(
    update: str = "step", activations: str = "keep", num_micro_steps: int = 1, disk: SimulatedDisk | None = None
) -> Iterator[Training]:
    disk = disk or SimulatedDisk(capacity_nbytes=32 * MiB, can_lose_power=False)
    with simulated_store(disk, budget_nbytes=768 * KiB, deadline_s=5.0) as store:
        yield Training(store, update, activations, num_micro_steps)


def _step(trained: Training) -> None:
    trained.step(1)


def _look(trained: Training) -> None:
    with torch.no_grad():
        trained.model(torch.zeros(2, 64))
    trained.model.state_dict()
    trained.optimizer.load_state_dict(trained.optimizer.state_dict())
    with tiered.unsharded(trained.model[1]) as module, torch.no_grad():
        module[0].weight.add_(1.0)


CASES: list[tuple[Callable[[Training], None], dict[str, Any]]] = [
    (_look, {}),
    (_step, {}),
    (_step, {"update": "backward"}),
    (_step, {"activations": "recompute"}),
    (_step, {"activations": "swap"}),
    (_step, {"num_micro_steps": 2}),
]


def _finish(trained: Training) -> dict[str, torch.Tensor]:
    for number in range(trained.store.state["step"], 3):
        trained.step(number)
    trained.store.wait_for_commit()
    return trained.values()


def _undisturbed(act: Callable[[Training], None], case: dict[str, Any]) -> tuple[int, dict[str, torch.Tensor]]:
    """Return the number of places in ``act``, and the values at the end of a training that goes on after it."""
    with training(**case) as trained:
        with interrupt_at() as places:
            act(trained)
        trained.store.rollback()
        return places.number, _finish(trained)


@pytest.mark.parametrize(("act", "case"), CASES)
def test_an_interrupt_anywhere_leaves_a_training_that_goes_on_after_a_rollback(
    act: Callable[[Training], None], case: dict[str, Any]
) -> None:
    most, expected = _undisturbed(act, case)
    stride = most // NUM_TRIED
    for number in range(stride // 2, most, stride):
        with training(**case) as trained:
            caught: KeyboardInterrupt | None = None
            try:
                with interrupt_at(number) as places:
                    act(trained)
            except KeyboardInterrupt as error:
                caught = error  # lifetime: with its frames, as a notebook keeps it
            assert caught is not None or not places.hits
            trained.store.rollback()
            values = _finish(trained)
            assert all(torch.equal(values[name], value) for name, value in expected.items()), places.hits
            trained.store.commit({"step": 3})
            assert trained.store.verify().is_clean
            if caught is not None:
                caught.__traceback__ = None


class TimeLimit(BaseException):
    pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # what strikes a finalizer goes nowhere
@pytest.mark.parametrize(("act", "case"), CASES)
def test_a_time_limit_anywhere_leaves_a_training_that_goes_on_or_a_store_that_resumes(
    act: Callable[[Training], None], case: dict[str, Any]
) -> None:
    most, expected = _undisturbed(act, case)
    stride = most // NUM_TRIED
    for number in range(stride // 3, most, stride):
        disk = SimulatedDisk(capacity_nbytes=32 * MiB, can_lose_power=False)
        values: dict[str, torch.Tensor] | None = None
        with training(**case, disk=disk) as trained:
            with interrupt_at(number, error=TimeLimit) as places:
                with contextlib.suppress(TimeLimit):
                    act(trained)
            try:
                trained.store.rollback()
            except UsageError as error:
                assert "cut short by TimeLimit()" in str(error), places.hits
            else:
                values = _finish(trained)
        if values is None:
            with training(**case, disk=disk) as trained:
                values = _finish(trained)
        assert all(torch.equal(values[name], value) for name, value in expected.items()), places.hits


def test_an_interrupted_evaluation_needs_no_rollback() -> None:
    def evaluate(trained: Training) -> None:
        with torch.no_grad():
            trained.model(torch.zeros(2, 64))

    with training() as trained:
        with interrupt_at() as places:
            evaluate(trained)
        for number in range(1, places.number, places.number // (2 * NUM_TRIED)):
            try:
                with interrupt_at(number):
                    evaluate(trained)
            except KeyboardInterrupt:
                pass
            evaluate(trained)
        trained.step(1)
        trained.step(2)
        values = trained.values()
    with training() as undisturbed:
        undisturbed.step(1)
        undisturbed.step(2)
        expected = undisturbed.values()
    assert all(torch.equal(values[name], value) for name, value in expected.items())


def test_a_step_left_by_an_interrupt_is_done_or_says_what_to_do() -> None:
    with training() as trained:
        with interrupt_at() as places:
            trained.step(1)
        for number in range(2, places.number, places.number // NUM_TRIED):
            trained.store.rollback()
            try:
                with interrupt_at(number):
                    trained.step(2)
            except KeyboardInterrupt:
                pass
            try:
                trained.optimizer.zero_grad()
                trained.step(3)
            except TieredError as error:
                assert "rollback" in str(error)


def test_time_limits_by_signals_leave_a_training_that_goes_on(quick_path: Path) -> None:
    """At any instant, updates that the training thread itself makes among them; here it is the action that raises."""

    class TimeLimit(Exception):
        pass

    def refuse(*arguments: object) -> None:
        raise TimeLimit

    draws, num_struck = random.Random(1), 0
    before = signal.signal(signal.SIGALRM, refuse)
    try:
        with tiered.Store(quick_path / "run", dram="8MiB") as store:
            train = Training(store, "step", "keep", 1)
            for number in range(200):
                try:
                    signal.setitimer(signal.ITIMER_REAL, draws.random() * 0.03 + 1e-4)
                    try:
                        train.step(number)
                    finally:
                        signal.setitimer(signal.ITIMER_REAL, 0)
                except (TimeLimit, TieredError):
                    num_struck += 1
                    store.resume()  # raises where a mark stays
    finally:
        signal.signal(signal.SIGALRM, before)
    assert num_struck

"""The openings of units, each of them a gather where there are ranks: program order, budget and sizes decide alone."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.models import CASES
from tests.reference import Recipe
from tests.zero.training import assert_same, debug_store, reference, smallest_budget, start
from tiered.tiers.compute_tier import UnitBuffer
from tiered.zero.engine import Engine
from tiered.zero.parameters.module_calls import ModuleCalls
from tiered.zero.parameters.parameter import TieredParameter

CASE, RECIPE = CASES["gpt"], Recipe(num_steps=3)
Openings = list[Counter[str]]
"""By step: how often each unit was opened."""


@contextmanager
def noted_openings() -> Iterator[list[str]]:
    opened: list[str] = []
    real = UnitBuffer.gather

    def gather(buffer: UnitBuffer, mode: str) -> None:
        opened.append(buffer.keys[0])
        real(buffer, mode)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UnitBuffer, "gather", gather)
        yield opened


def openings(directory: Path, budget_bytes: int, update: str, *, keeps: bool = False, sleeps: bool = False) -> Openings:
    """Train and return the openings.

    A hook of the caller's looks at a weight of one block, and ``keeps`` the view until the step after the next. With
    ``sleeps`` the store's threads run as long as they want, before every other step.
    """
    found: Openings = []
    views: deque[torch.Tensor] = deque(maxlen=1)

    def look(module: nn.Module, *_: object) -> None:
        view = next(module.parameters()).detach()
        if keeps:
            views.append(view)

    with debug_store(directory, budget_bytes, durable=False) as store, noted_openings() as opened:
        session = start(CASE, RECIPE, store, update)
        session.model.blocks[1].register_forward_pre_hook(look)
        for step in range(RECIPE.num_steps):
            opened.clear()
            time.sleep(0.05 * (step % 2) if sleeps else 0)
            session.run_step(step)
            found.append(Counter(opened))
        views.clear()
    return found


def budgets(directory: Path, update: str) -> list[int]:
    smallest = smallest_budget(CASE, RECIPE, update, directory)
    return [smallest, smallest * 3 // 2, 2 * smallest, 8 * smallest]


@pytest.mark.parametrize("update", ["step", "backward"])
def test_openings_are_those_of_the_program(update: str, quick_path: Path) -> None:
    seen = set()
    for number, budget_bytes in enumerate(budgets(quick_path / "probe", update)):
        plain = openings(quick_path / f"plain-{number}", budget_bytes, update)
        assert all(step == plain[0] for step in plain), "equal programs, from the first step on"
        assert openings(quick_path / f"alias-{number}", budget_bytes, update, keeps=True) == plain
        assert openings(quick_path / f"sleep-{number}", budget_bytes, update, sleeps=True) == plain
        seen.add(plain[0].total())
    assert len(seen) == 2, "units that stay open from forward to backward, and units that do not"


@pytest.mark.parametrize("update", ["step", "backward"])
def test_one_operation_on_all_units_works_with_the_smallest_budget(update: str, quick_path: Path) -> None:
    """Units beyond the slots go as the operation ends."""

    most: list[int] = []

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        parameters, of_forward = list(model.parameters()), CASE.loss(model, batch)
        norms = torch.stack(torch._foreach_norm(parameters))  # type: ignore[arg-type]
        if isinstance(parameters[0], TieredParameter):
            most.append(len(parameters[0].segment.unit.engine.plan.gathered))
        return of_forward + norms.sum()

    case = replace(CASE, loss=loss)
    budget_bytes = smallest_budget(CASE, RECIPE, update, quick_path / "probe")
    with debug_store(quick_path / "store", budget_bytes, durable=False) as store:
        assert_same(start(case, RECIPE, store, update).run(), reference(case, RECIPE))
    assert max(most) <= 2, "the root, and the unit in the slot"


def memory_decides(patch: pytest.MonkeyPatch) -> None:
    """A mutant: units stay open where DRAM has all keys by now."""
    real = ModuleCalls.keep_until_backward

    def keep_until_backward(calls: ModuleCalls) -> bool:
        engine = calls._engine
        engine.plan.keeps = engine.schedule.is_settled
        return real(calls)

    patch.setattr(ModuleCalls, "keep_until_backward", keep_until_backward)


def pressure_parks(patch: pytest.MonkeyPatch) -> None:
    """A mutant: a unit that is gathered is parked where the working set has little left."""
    real = Engine.opened

    def opened(engine: Engine, unit: object, idle: object) -> None:
        real(engine, unit, idle)  # type: ignore[arg-type]
        if engine.working_set.left_bytes < engine.working_set.budget_bytes // 2:
            engine.open_units.park_all()

    patch.setattr(Engine, "opened", opened)


@pytest.mark.parametrize("mutant", [memory_decides, pressure_parks])
def test_a_mutant_that_asks_memory_dies(
    mutant: Callable[[pytest.MonkeyPatch], None], quick_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    with pytest.raises((AssertionError, IndexError)):
        test_openings_are_those_of_the_program("step", quick_path)

"""Faults of a compute device: a step raises, nothing that was committed is lost, and a rollback goes on."""

from __future__ import annotations

import logging
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import tiered
from tests.accelerator.training import ROOMY_NBYTES, case_on, reference_on, smallest_device_memory
from tests.reference import Recipe
from tests.zero.training import Session, assert_same, start
from tiered.errors import DeadlineError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

OPTIONS: dict[str, Any] = {"device": "sim", "update_on": "cpu", "activations": "keep", "hold": 0}


def go_on_after_rollback(session: Session) -> None:
    """Roll the step back that failed, do it again, and see the bits of a run that nothing disturbed."""
    session.store.rollback()
    tier = next(session.model.parameters()).segment.unit.tier  # type: ignore[attr-defined]
    assert tier.memory.allocated_bytes == 0, "a buffer was lost"
    session.trained.losses = session.trained.losses[:2]
    for step in (2, 3):
        session.run_step(step)
    assert_same(session.collect(), reference_on("sim", "gpt", session.recipe))


def begun(store: tiered.Store, **options: Any) -> Session:
    """Return a session that has made and committed two steps."""
    session = start(case_on("sim", "gpt"), Recipe(), store, **(OPTIONS | options))
    for step in range(2):
        session.run_step(step)
    store.commit({"step": 2})
    return session


@pytest.mark.parametrize("update_on", ["cpu", "device"])
@pytest.mark.parametrize("at", [1, 3, 8, 13])
def test_a_failed_copy_costs_one_step(at: int, update_on: str, sim: ModuleType, tmp_path: Path) -> None:
    budget = smallest_device_memory("gpt", Recipe(), tmp_path / "refused", **(OPTIONS | {"update_on": update_on}))
    with tiered.Store(tmp_path / "store", dram=ROOMY_NBYTES, device_memory=budget) as store:
        session = begun(store, update_on=update_on)
        sim.fail_copy(at)
        with pytest.raises((RuntimeError, tiered.TieredError)):
            session.run_step(2)
            store.commit({"step": 3})
        sim.fail_copy(0)
        go_on_after_rollback(session)


def test_a_copy_that_never_ends_is_an_error_at_the_deadline(sim: ModuleType, tmp_path: Path) -> None:
    with tiered.Store(tmp_path, dram=ROOMY_NBYTES, device_memory=ROOMY_NBYTES) as store:
        store.working_set.deadline_s = 1.0
        session = begun(store)
        sim.hang_events()
        with pytest.raises(DeadlineError, match="within 1 s"):
            session.run_step(2)
            store.commit({"step": 3})
        sim.reset()
        go_on_after_rollback(session)


def test_a_device_without_memory_costs_one_step(sim: ModuleType, tmp_path: Path) -> None:
    with tiered.Store(tmp_path, dram=ROOMY_NBYTES, device_memory=ROOMY_NBYTES) as store:
        session = begun(store)
        sim.set_memory_limit(torch.accelerator.memory_allocated() + 4096)
        with pytest.raises(torch.OutOfMemoryError):
            session.run_step(2)
        sim.set_memory_limit(None)
        go_on_after_rollback(session)


def test_memory_that_cannot_be_page_locked_is_said_once_and_has_the_same_bits(
    sim: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sim.fail_registration(1)
    with caplog.at_level(logging.WARNING, "tiered"):
        with tiered.Store(tmp_path, dram=ROOMY_NBYTES, device_memory=ROOMY_NBYTES) as store:
            session = start(case_on("sim", "gpt"), Recipe(), store, **OPTIONS)
            assert_same(session.run(), reference_on("sim", "gpt", Recipe()))
    assert sum("is not page-locked" in message for message in caplog.messages) == 1

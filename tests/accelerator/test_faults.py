"""Faults of a compute device: a step raises, nothing that was committed is lost, and a rollback goes on."""

from __future__ import annotations

import logging
import re
from collections import Counter
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import tiered
from tests.accelerator.training import ROOMY_NBYTES, case_on, reference_on, smallest_device_memory
from tests.reference import Recipe
from tests.zero.training import Session, assert_same, start
from tiered.errors import DeadlineError, StepAbandonedError
from tiered.zero.activations import swapped_activations

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


def begun(store: tiered.Store, update: str = "step", **options: Any) -> Session:
    """Return a session that has made and committed two steps."""
    session = start(case_on("sim", "gpt"), Recipe(), store, update, **(OPTIONS | options))
    for step in range(2):
        session.run_step(step)
    store.commit({"step": 2})
    return session


@pytest.mark.parametrize(
    ("at", "update_on"), [*product([1, 3, 8, 13], ["cpu"]), *product([1, 3, 8, 13, 15, 17, 19], ["device"])]
)
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


DIALS = (
    r"budget device_memory= of .* has .* \(at most so far .*smaller batch.*recompute.*swap.*device_memory=.*update_on"
)
"""The words beside torch's own, whoever asked for the memory."""


def try_step(session: Session, store: tiered.Store, batch: Any) -> str:
    """Try a step; return the part of it that ran out of memory, "" where none did."""
    part = "forward"
    try:
        loss = session.case.loss(session.model, batch)
        part = "backward"
        loss.backward()
        part = "update"
        session.optimizer.step()
        session.optimizer.zero_grad()
        store.commit({"step": 3})
    except torch.OutOfMemoryError as error:
        assert re.search(DIALS, "\n".join(error.__notes__)), error.__notes__
        return part
    return ""


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize(("update_on", "activations"), [("cpu", "swap"), ("device", "recompute")])
def test_an_allocation_that_fails_costs_one_step_and_names_the_dials(
    update: str, update_on: str, activations: str, sim: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swapped_activations, "SMALLEST_NBYTES", 1)
    failed: Counter[str] = Counter()
    with tiered.Store(tmp_path, dram=ROOMY_NBYTES, device_memory=ROOMY_NBYTES) as store:
        session = begun(store, update, update_on=update_on, activations=activations)
        batch = session.case.batch(2)
        forward, backward = (1, 170) if update == "step" else (14, 179)  # every second place, in turns
        for at in (*range(forward, 170, 26), *range(backward, 360, 18)):  # the first of a backward is about the 165th
            store.rollback()
            sim.fail_allocation(at)
            part = try_step(session, store, batch)
            sim.fail_allocation(0)
            assert part, f"allocation {at}"
            failed[part] += 1
        go_on_after_rollback(session)
    assert failed["forward"] > 5 and failed["backward"] > 5


@pytest.mark.parametrize("update", ["step", "backward"])
def test_an_update_without_memory_abandons_the_step_with_the_dials_in_the_message(
    update: str, sim: ModuleType, tmp_path: Path
) -> None:
    with tiered.Store(tmp_path, dram=ROOMY_NBYTES, device_memory=ROOMY_NBYTES) as store:
        session = begun(store, update, update_on="device")
        batch = session.case.batch(2)
        for at in range(1, 4):
            store.rollback()
            place = next(session.model.parameters()).segment.unit.gradients.model.place  # type: ignore[attr-defined]
            place.memory.close()  # or it would ask for none
            loss = session.case.loss(session.model, batch)
            if update == "step":
                loss.backward()
            sim.fail_allocation(at if update == "step" else 130 + at)
            with pytest.raises(torch.OutOfMemoryError, match=DIALS):
                loss.backward() if update == "backward" else None
                session.optimizer.step()
                store.commit({"step": 3})
            for call in (lambda: session.case.loss(session.model, batch), session.optimizer.step, store.commit):
                with pytest.raises(StepAbandonedError, match=DIALS):
                    call()
        go_on_after_rollback(session)


@pytest.mark.parametrize("at", [1, 30, 100, 170, 200, 280])
def test_a_forward_or_backward_without_memory_can_be_done_again(at: int, sim: ModuleType, tmp_path: Path) -> None:
    with tiered.Store(tmp_path, dram=ROOMY_NBYTES, device_memory=ROOMY_NBYTES) as store:
        session = begun(store)
        store.rollback()
        batch = session.case.batch(2)
        device_module = torch.get_device_module("sim")
        random = torch.get_rng_state(), device_module.get_rng_state()
        sim.fail_allocation(at)
        assert try_step(session, store, batch) == ("forward" if at < 160 else "backward")
        session.optimizer.zero_grad()
        torch.set_rng_state(random[0])  # of dropout
        device_module.set_rng_state(random[1])
        for step in (2, 3):
            session.run_step(step)
        assert_same(session.collect(), reference_on("sim", "gpt", session.recipe))


def test_a_device_without_memory_costs_one_step(sim: ModuleType, tmp_path: Path) -> None:
    with tiered.Store(tmp_path, dram=ROOMY_NBYTES, device_memory=ROOMY_NBYTES) as store:
        session = begun(store)
        batch = session.case.batch(2)
        sim.set_memory_limit(torch.accelerator.memory_allocated() + 4096)
        assert try_step(session, store, batch) == "forward"
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


@pytest.mark.parametrize("at", range(1, 14, 2))
def test_values_whose_copy_out_of_unsharded_fails_are_trained_on_by_no_step(
    at: int, sim: ModuleType, tmp_path: Path
) -> None:
    """Or the masters would be those of before, and the next step would bring their values back."""

    rows = torch.linspace(-1, 1, 64).view(8, 8).to("sim").to(torch.bfloat16)

    def trained(at: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        plain = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]).to("sim")
        with tiered.Store(tmp_path / str(at), dram=ROOMY_NBYTES, device_memory=ROOMY_NBYTES) as store:
            model = tiered.shard(plain, store, unit=nn.Linear, device="sim", param_dtype=torch.bfloat16)
            optimizer = tiered.AdamW(model.parameters(), lr=1e-3)
            store.commit()
            sim.fail_copy(at)
            for _ in range(2):
                try:
                    with tiered.unsharded(model), torch.no_grad():
                        for parameter in model.parameters():
                            parameter.fill_(0.125)
                    sim.fail_copy(0)
                    model(rows).float().square().mean().backward()
                    optimizer.step()
                    break
                except (RuntimeError, tiered.TieredError):
                    sim.fail_copy(0)
                    store.rollback()
            return {name: value.cpu() for name, value in model.state_dict().items()}

    expected = trained(0)
    assert all(torch.equal(value, expected[name]) for name, value in trained(at).items())


@pytest.mark.parametrize("at", range(1, 15, 3))
def test_a_load_whose_copy_fails_loses_what_its_message_names_alone(at: int, sim: ModuleType, tmp_path: Path) -> None:
    with tiered.Store(tmp_path, dram=ROOMY_NBYTES, device_memory=ROOMY_NBYTES) as store:
        model = tiered.shard(
            nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]).to("sim"), store, unit=nn.Linear, device="sim"
        )
        wanted = {name: value * 2 for name, value in model.state_dict().items()}
        sim.fail_copy(at)
        with pytest.raises(RuntimeError, match="While copying the parameter") as failure:
            model.load_state_dict(wanted)
        sim.fail_copy(0)
        for name, value in model.state_dict().items():
            assert torch.equal(value, wanted[name]) != (f'"{name}"' in str(failure.value)), name
        model.load_state_dict(wanted)
        assert all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())
        store.commit()

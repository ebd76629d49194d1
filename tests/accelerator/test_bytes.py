"""The bytes that cross between DRAM and a compute device in a step of the steady state, as equations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiered
from tests.accelerator.training import ROOMY_NBYTES, device_memory_named_in
from tests.models import Case
from tests.reference import Recipe
from tests.zero.training import Session, start
from tiered.errors import CapacityError
from tiered.tiers.copies import Copies

WIDTH = 32
OPTIONS: dict[str, Any] = {"device": "sim", "activations": "keep", "hold": 0}


class Layers(nn.Module):
    """A root of one parameter, and ``num`` units of one size."""

    def __init__(self, num: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num))

    def forward(self, rows: Tensor) -> Tensor:
        rows = rows * self.scale
        for layer in self.layers:
            rows = layer(rows).tanh()
        return rows.square().mean()


def build(num: int) -> nn.Module:
    with torch.device("sim"):
        return Layers(num)


def batch(index: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(index)).to("sim")


class Sizes:
    """The bytes of a model's root and of each other unit; those of its gradients and its state."""

    def __init__(self, session: Session) -> None:
        root, *others = next(session.model.parameters()).segment.unit.engine.units  # type: ignore[attr-defined]
        assert len({unit.nbytes for unit in others}) == 1
        self.root, self.unit, self.num = root.nbytes, others[0].nbytes, len(others)
        self.smallest_budget = 2 * self.root + 4 * self.unit  # gradients are as large
        records = session.store.records()
        self.state = sum(record.nbytes for record in records if record.name.startswith("model/state/"))


@contextmanager
def training(
    directory: Path, num: int, device_memory: int, num_micro_steps: int = 1, **options: Any
) -> Iterator[Session]:
    """Give a session of ``num`` layers that has made two steps."""
    recipe = Recipe(num_micro_steps=num_micro_steps)
    case = Case(partial(build, num), batch, lambda model, rows: model(rows), unit=(nn.Linear,))
    with tiered.Store(directory, dram=ROOMY_NBYTES, device_memory=device_memory, durable=False) as store:
        session = start(case, recipe, store, **(OPTIONS | options))
        for step in range(2):
            session.run_step(step)
        yield session


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the bytes that cross, by direction and by what they are."""
    bytes_of: Counter[str] = Counter()

    def counting(word: str, copy: Callable[..., Any]) -> Callable[..., Any]:
        def counted(self: Copies, buffer: Any, lease: Any, *more: Any) -> Any:
            bytes_of[f"{lease.key.split('/')[1]} {word}"] += buffer.nbytes
            return copy(self, buffer, lease, *more)

        return counted

    monkeypatch.setattr(Copies, "fill", counting("in", Copies.fill))
    monkeypatch.setattr(Copies, "empty", counting("out", Copies.empty))
    return bytes_of


def sizes_of(num: int, directory: Path) -> Sizes:
    """Return the sizes of a model of ``num`` layers."""
    with training(directory, num, ROOMY_NBYTES, update_on="cpu") as session:
        return Sizes(session)


@pytest.mark.parametrize(("num", "num_micro_steps"), [(4, 1), (8, 1), (8, 2), (5, 3)])
def test_the_smallest_budget_turns_three_units_around_in_each_pass(
    num: int, num_micro_steps: int, sim: ModuleType, tmp_path: Path, moved: Counter[str]
) -> None:
    """2 M passes use p each, less what stayed of the pass before.

    Beside the root and its gradient the smallest budget has room for two units and the gradients of two: four buffers
    of one size. A backward needs one of them for gradients, since each unit's gradients leave as they are final; a
    forward after it finds the same three units. All of the first forward comes in, for the update has changed it.
    """
    sizes = sizes_of(num, tmp_path / "sizes")
    with pytest.raises(CapacityError):
        with training(tmp_path / "refused", num, sizes.smallest_budget - 1, num_micro_steps, update_on="cpu"):
            pass
    with training(tmp_path / "store", num, sizes.smallest_budget, num_micro_steps, update_on="cpu") as session:
        moved.clear()
        session.run_step(2)
        session.optimizer.state_dict()  # all updates have ended
    num_units = num + (2 * num_micro_steps - 1) * (num - 3)
    assert moved["parameters in"] == sizes.root + num_units * sizes.unit
    assert_gradients_cross(moved, sizes, num_micro_steps)


def assert_gradients_cross(moved: Counter[str], sizes: Sizes, num_micro_steps: int) -> None:
    """M micro-steps take g out M times and in M - 1 times; the root's stay on the device until the step."""
    layers = sizes.num * sizes.unit
    assert moved["gradient out"] == sizes.root + num_micro_steps * layers
    assert moved["gradient in"] == (num_micro_steps - 1) * layers


@pytest.mark.parametrize("num_micro_steps", [1, 3])
def test_with_room_for_all_units_parameters_cross_once(
    num_micro_steps: int, sim: ModuleType, tmp_path: Path, moved: Counter[str]
) -> None:
    with training(tmp_path, 6, ROOMY_NBYTES, num_micro_steps, update_on="cpu") as session:
        sizes = Sizes(session)
        sim.reset()
        moved.clear()
        session.run_step(2)
        assert moved["parameters in"] == sizes.root + 6 * sizes.unit
        assert_gradients_cross(moved, sizes, num_micro_steps)
        counts = sim.counts()
        assert (counts.host_to_device.nbytes, counts.device_to_host.nbytes) == (
            moved["parameters in"] + moved["gradient in"],
            moved["gradient out"],
        )


def test_a_norm_that_was_asked_before_reads_no_gradient(sim: ModuleType, tmp_path: Path, moved: Counter[str]) -> None:
    """A question about stored gradients is answered as they leave, from the second step on: g less a unit and the root.

    The gradients of the unit that a backward ends with, and the root's, are on the device still.
    """

    def clip(session: Session, *norm_types: float) -> float:
        session.case.loss(session.model, session.case.batch(0)).backward()
        moved.clear()
        for norm_type in norm_types:
            torch.nn.utils.clip_grad_norm_(session.model.parameters(), 0.1, norm_type)
        num_units = moved["gradient in"] / sizes.unit
        session.optimizer.step()
        session.optimizer.zero_grad()
        return num_units

    with training(tmp_path, 6, ROOMY_NBYTES, update_on="cpu") as session:
        sizes = Sizes(session)
        assert clip(session, 2.0) == 5  # asked for the first time
        assert clip(session, 2.0) == 0
        assert clip(session, float("inf")) == 5
        assert clip(session, float("inf")) == 0
        assert clip(session, 2.0) == 0
        assert clip(session, 3.0) == 5
        assert clip(session, 2.0, 2.0) == 5  # the second one is of clipped gradients, which are in DRAM as they were
        assert clip(session, 2.0, float("inf"), 2.0) == 10


@pytest.mark.parametrize("is_tight", [False, True])
def test_an_update_on_the_device_takes_the_state_in_and_out_and_parameters_out(
    is_tight: bool, sim: ModuleType, tmp_path: Path, moved: Counter[str]
) -> None:
    budget = ROOMY_NBYTES
    if is_tight:
        with pytest.raises(CapacityError) as refusal, training(tmp_path / "refused", 6, 1, update_on="device"):
            pass
        budget = device_memory_named_in(refusal.value)
    with training(tmp_path / "store", 6, budget, update_on="device") as session:
        sizes = Sizes(session)
        session.optimizer.state_dict()  # all updates have ended
        moved.clear()
        session.run_step(2)
        session.optimizer.state_dict()
        assert sizes.state > 0
        assert moved["state in"] == moved["state out"] == sizes.state
        assert moved["parameters out"] == sizes.root + 6 * sizes.unit
        layers = sizes.root + 6 * sizes.unit
        assert moved["gradient in"] == moved["gradient out"] <= (layers if is_tight else 0)


@pytest.mark.parametrize("update", ["step", "backward"])
def test_gradients_of_an_update_on_the_device_stay_there_as_far_as_units_have_room_beside(
    update: str, sim: ModuleType, tmp_path: Path, moved: Counter[str]
) -> None:
    """A budget between the smallest and a roomy one: some gradients leave, and those come back once."""
    with pytest.raises(CapacityError) as refusal, training(tmp_path / "refused", 8, 1, update_on="device"):
        pass
    smallest = device_memory_named_in(refusal.value)
    left = []
    for number in range(4):
        with training(tmp_path / str(number), 8, smallest, update_on="device", update=update) as session:
            sizes = Sizes(session)
            session.optimizer.state_dict()  # all updates have ended
            moved.clear()
            session.run_step(2)
            session.optimizer.state_dict()
            assert moved["gradient in"] == moved["gradient out"]
            left.append(moved["gradient out"] // sizes.unit)
        smallest += 3 * sizes.unit
    assert max(left) <= 8 and left[-1] == 0, left  # before, it depends on how far the update before them has come


def test_memory_that_updates_get_is_given_up_by_units_that_have_filled_it(sim: ModuleType, tmp_path: Path) -> None:
    """A forward before the optimizer is made fills the budget with units that are kept."""
    case = Case(partial(build, 12), batch, lambda model, rows: model(rows), unit=(nn.Linear,))
    with pytest.raises(CapacityError) as refusal, training(tmp_path / "refused", 12, 1, update_on="device"):
        pass
    budget = device_memory_named_in(refusal.value)
    with tiered.Store(tmp_path / "store", dram=ROOMY_NBYTES, device_memory=budget, durable=False) as store:
        model = tiered.shard(case.build(), store, unit=nn.Linear, update_on="device", **OPTIONS)
        with torch.no_grad():
            model(batch(0))
        memory = next(model.parameters()).segment.unit.tier.memory  # type: ignore[attr-defined]
        filled = memory.allocated_bytes
        tiered.AdamW(model.parameters(), update="step")
        assert memory.allocated_bytes <= memory.budget_bytes < filled <= budget


def test_gradients_that_have_arrived_at_once_are_not_written(
    sim: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = Copies.empty

    def empty_and_sweep(self: Copies, buffer: Any, lease: Any) -> None:
        empty(self, buffer, lease)
        self.sweep()  # as the update thread may do at any time

    monkeypatch.setattr(Copies, "empty", empty_and_sweep)
    with training(tmp_path, 6, ROOMY_NBYTES, update_on="cpu", hold="auto") as session:
        session.optimizer.state_dict()  # all updates have ended
        before = session.store.statistics().write_bytes
        for step in range(2, 4):
            session.run_step(step)
        session.optimizer.state_dict()
        assert session.store.statistics().write_bytes == before

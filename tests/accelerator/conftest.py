"""The device of each test: the simulated one, without a race that the test did not ask for, or a real one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.accelerator import simulated
from tests.accelerator.registrar import SimulatedRegistrar
from tests.accelerator.training import DEVICE
from tests.store.places import quick_directory, short_files
from tiered.bytes import pinned_arena
from tiered.bytes.pinned_arena import add_registrar
from tiered.units import MiB


class _Real:
    """A real device: it needs no reset, and neither delays an event nor tells of a race."""

    def reset(self) -> None: ...

    def set_query_delay(self, num_queries: int) -> None: ...

    def races(self) -> list[str]:
        return []


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """On a real device leave those tests out that plant faults in the simulated one, or count its calls."""
    if DEVICE == "sim":
        return
    others = [item for item in items if "accelerator" not in getattr(item, "fixturenames", ())]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in others]


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A directory in memory where that is offered: the subject is the device, not the drive below."""
    with quick_directory() as path, short_files():
        yield path


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """DRAM is page-locked in many pieces, as if it were terabytes: a copy over two of them is refused by the device."""
    monkeypatch.setattr(pinned_arena, "PIECE_NBYTES", 1 * MiB)


@pytest.fixture
def sim(small_pieces: None) -> Iterator[ModuleType]:
    """Enable the simulated device for the test; races that the test does not take itself fail it.

    Accesses of the host to page-locked memory in flight are among them.
    """
    if simulated.refusal() is not None:
        pytest.skip(str(simulated.refusal()))
    simulated.enable()
    simulated.guard_pinned()
    add_registrar("sim", SimulatedRegistrar())
    try:
        yield simulated
        assert simulated.races() == []
    finally:
        simulated.disable()


@pytest.fixture
def accelerator(request: pytest.FixtureRequest, small_pieces: None) -> Iterator[Any]:
    """Return the device of type ``DEVICE``: what a test asks of it that a real one cannot do does nothing there."""
    if DEVICE == "sim":
        yield request.getfixturevalue("sim")
        return
    torch.use_deterministic_algorithms(True, warn_only=True)  # where an operation has such a kernel
    try:
        yield _Real()
    finally:
        torch.use_deterministic_algorithms(False)

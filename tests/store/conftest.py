"""Stores to test with: over a simulated disk, and with a device and a catalog in the test's hands."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.bytes.fresh_arena import FreshArena
from tests.bytes.registrars import WatchedRegistrar
from tests.devices.simulated_disk import SimulatedDisk
from tests.store import rig
from tests.store.catalogs import SqliteHome
from tests.store.places import quick_directory, short_files
from tests.store.rig import BUDGET_NBYTES, GatedStore, pinned_arena, simulated_store
from tiered.store.residency.residency import Residency
from tiered.store.store import Store
from tiered.units import MiB


@pytest.fixture
def quick_path() -> Iterator[Path]:
    """A new directory, in memory where that is offered: for tests to which flushes are nothing but time."""
    with quick_directory() as path, short_files():
        yield path


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the tests of a module that says ``BOTH_ARENAS`` with a page-locked arena, too."""
    if getattr(metafunc.module, "BOTH_ARENAS", False):
        metafunc.parametrize("arena_of_the_rig", ["plain", "pinned"], indirect=True)


@pytest.fixture(autouse=True)
def arena_of_the_rig(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Which arena the rig's stores have."""
    registrar = WatchedRegistrar()
    if getattr(request, "param", "plain") == "pinned":
        monkeypatch.setattr(rig, "Arena", partial(pinned_arena, registrar))
    yield
    assert not registrar.registered


@pytest.fixture
def disk() -> SimulatedDisk:
    return SimulatedDisk(capacity_nbytes=1 * MiB, can_lose_power=False)


@pytest.fixture
def file(tmp_path: Path) -> SqliteHome:
    """The place of a catalog in a file."""
    return SqliteHome(tmp_path)


@pytest.fixture
def budget_nbytes(request: pytest.FixtureRequest) -> int:
    """What the test's module calls ``BUDGET``, if it does."""
    found: int = getattr(request.module, "BUDGET", BUDGET_NBYTES)
    return found


@pytest.fixture
def store(disk: SimulatedDisk, budget_nbytes: int) -> Iterator[Store]:
    with simulated_store(disk, budget_nbytes=budget_nbytes) as made:
        yield made


@pytest.fixture
def working_set(store: Store) -> Residency:
    return store.working_set


@pytest.fixture
def gated(budget_nbytes: int) -> Iterator[GatedStore]:
    made = GatedStore(budget_nbytes=budget_nbytes)
    yield made
    made.close()


@pytest.fixture(params=["durable", "durable=False", "memory", "two directories", "16 MiB, debug arena"])
def any_store(request: pytest.FixtureRequest) -> Iterator[Store]:
    """Every kind of store, with one contract; the plainest one on a drive."""
    kind = request.param
    tmp_path = request.getfixturevalue("tmp_path" if kind == "durable" else "quick_path")
    if kind == "memory":
        made = Store(engine="memory", dram="16MiB")
    elif kind == "two directories":
        made = Store(tmp_path / "one", tmp_path / "two", dram="16MiB")
    elif kind == "durable=False":
        made = Store(tmp_path / "swap", dram="16MiB", durable=False)
    else:
        arena = FreshArena(16 * MiB) if "debug" in kind else None
        made = Store(tmp_path / "run", dram="16MiB", _arena=arena)
    yield made
    made.close()


@pytest.fixture(scope="module")
def two_tiers_of_the_module() -> Iterator[Store]:
    with Store(engine="memory", dram="8MiB") as made:
        yield made


@pytest.fixture
def two_tiers(two_tiers_of_the_module: Store) -> Store:
    return two_tiers_of_the_module

"""Stores with a page-locked arena: which ones have it, and memory that is free but scattered."""

from __future__ import annotations

import functools
import logging
import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.bytes.registrars import WatchedRegistrar
from tests.store.rig import WAIT_S, await_true, beside, numbers, read_key, simulated_store, write_key
from tiered.bytes.arena import Arena
from tiered.bytes.pinned_arena import PinnedArena, add_registrar
from tiered.errors import CapacityError, DeadlineError
from tiered.store.residency.residency import Lease, Residency
from tiered.store.store import Store
from tiered.units import GiB, KiB, MiB

PAGE = 4 * KiB
BUDGET = 16 * PAGE
DEVICE = torch.device("xpu", 0)  # that torch knows the name; nothing is there
QUARTERS = [f"quarter {index}" for index in range(4)]


# Which stores have it


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """An accelerator of type "sim", which torch says is there."""
    device = SimpleNamespace(type="sim")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: device)
    return device


def test_a_store_beside_an_accelerator_is_page_locked_from_a_devices_first_use_until_it_is_closed(
    accelerator: SimpleNamespace,
) -> None:
    registrar = WatchedRegistrar()
    add_registrar("sim", registrar)
    with Store(engine="memory", dram="16MiB", device_memory="1GiB") as store:
        assert store.device_memory == 1 * GiB
        arena = store._parts.arena
        store["a"] = numbers(10_000)
        assert isinstance(arena, PinnedArena) and not arena.is_pinned and not registrar.registered
        arena.lock_pages(DEVICE)
        assert arena.is_pinned and "PinnedArena(open" in repr(store)
        assert sum(registrar.registered.values()) == 16 * MiB
        view = store.working_set.lease("a", "r").tensor
    assert registrar.registered  # a tensor outlives the store
    assert view[:3].tolist() == numbers(10_000)[:3].tolist()
    del view
    await_true(lambda: not registrar.registered)
    assert registrar.num_unregistered == 1


@pytest.mark.parametrize("device_memory", [0, "0GiB"])
def test_a_store_without_device_memory_serves_no_accelerator(
    accelerator: SimpleNamespace, device_memory: int | str
) -> None:
    with Store(engine="memory", dram="8MiB", device_memory=device_memory) as store:
        assert store.device_memory == 0 and type(store._parts.arena) is Arena


def test_an_accelerator_without_a_registrar_is_one_warning(
    accelerator: SimpleNamespace, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    accelerator.type = "other"
    with caplog.at_level(logging.WARNING, "tiered"), Store(tmp_path / "run", dram="8MiB") as store:
        store["a"] = numbers(10_000)
        assert torch.equal(store["a"], numbers(10_000)) and not caplog.records
        for _ in range(2):
            store._parts.arena.lock_pages(DEVICE)
    (record,) = [record for record in caplog.records if "page-locked" in record.message]
    assert "no registrar is known for devices of type 'other'" in record.message


# Scattered memory


@contextmanager
def store_of(arena: Arena, deadline_s: float = WAIT_S) -> Iterator[Store]:
    """A store over a simulated disk with ``arena``."""
    with simulated_store(arena=arena, deadline_s=deadline_s) as store:
        yield store


def arena_of(num_pages: int) -> PinnedArena:
    arena = PinnedArena(num_pages * PAGE, WatchedRegistrar(), large_nbytes=3 * PAGE)
    arena.lock_pages(DEVICE)
    return arena


@pytest.fixture
def working_set() -> Iterator[Residency]:
    """A working set in which four keys of a quarter of the budget lie side by side, clean, the first one oldest."""
    with store_of(arena_of(16)) as store:
        for key in QUARTERS:
            write_key(store.working_set, key, 4 * PAGE, 1)
        fill(store.working_set)
        yield store.working_set


def fill(working_set: Residency) -> None:
    working_set.swap_out(QUARTERS)
    working_set.unreserve(working_set.reserve(BUDGET))
    leases = [working_set.lease(key, "r") for key in QUARTERS]
    addresses = [lease.buffer.address for lease in leases]
    assert addresses == [addresses[0] + index * 4 * PAGE for index in range(4)]
    for lease in leases:
        lease.release()


def resident(working_set: Residency) -> list[int]:
    return [index for index, key in enumerate(QUARTERS) if working_set.is_resident(key)]


def test_leases_between_free_bytes_are_a_capacity_error_that_says_scattered(working_set: Residency) -> None:
    held = [working_set.lease(QUARTERS[index], "r") for index in (1, 3)]
    with pytest.raises(CapacityError, match=r"no room for 32\.0 KiB .*enough bytes are free, but scattered"):
        working_set.reserve(8 * PAGE)
    working_set.unreserve(working_set.reserve(4 * PAGE))
    held.pop(0).release()
    working_set.unreserve(working_set.reserve(8 * PAGE))
    held.pop().release()


def test_no_more_is_evicted_than_is_in_the_way(working_set: Residency) -> None:
    """The two oldest do not touch: one more goes, and not all of them."""
    read_key(working_set, QUARTERS[1])
    read_key(working_set, QUARTERS[3])
    working_set.unreserve(working_set.reserve(8 * PAGE))
    assert resident(working_set) == [3]


def test_dirty_keys_between_free_bytes_are_written_and_evicted(working_set: Residency) -> None:
    for index in (1, 3):
        working_set.lease(QUARTERS[index], "rw").release()
    working_set.unreserve(working_set.reserve(4 * PAGE))
    working_set.unreserve(working_set.reserve(12 * PAGE))
    assert len(resident(working_set)) <= 1
    assert [read_key(working_set, key) for key in QUARTERS] == [1] * 4


class Keeping:
    """Evicts for a prefetch only the keys it may, the last one by name first."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def victim(self, evictable: Mapping[str, int], incoming: str | None) -> str | None:
        allowed = [name for name in evictable if incoming is None or name in self.names]
        return max(allowed, default=None)

    def is_worth_waiting(self, victim: str, leaving: Iterable[str]) -> bool:
        return False


def test_a_prefetch_evicts_only_what_the_policy_offers(working_set: Residency) -> None:
    write_key(working_set, "half", 8 * PAGE, 2)
    working_set.swap_out(["half"])
    fill(working_set)
    policy = Keeping(QUARTERS[0], QUARTERS[2])
    working_set.set_policy(policy)
    assert working_set.prefetch(["half"]) == 0  # there are enough bytes now, and no place
    assert resident(working_set) == [1, 3]
    policy.names = (QUARTERS[3],)
    assert working_set.prefetch(["half"]) == 8 * PAGE
    assert resident(working_set) == [1] and read_key(working_set, "half") == 2


@pytest.mark.parametrize("seed", range(4))
def test_threads_with_leases_of_every_size_go_on_or_are_told_that_there_is_no_room(seed: int) -> None:
    with store_of(arena_of(40), deadline_s=0.2) as store:  # threads that hold something may wait for each other
        working_set = store.working_set
        sizes = [1, 2, 3, 5, 7, 8, 11, 13, 2, 3, 5, 4]
        for index, size in enumerate(sizes):
            write_key(working_set, f"k{index}", size * PAGE, index)

        def work(number: int) -> None:
            rng = random.Random(seed * 10 + number)
            held: list[Lease] = []
            try:
                for _ in range(120):
                    index = rng.randrange(len(sizes))
                    if held and rng.random() < 0.5:
                        held.pop(0).release()
                    if rng.random() < 0.2:
                        working_set.prefetch([f"k{rng.randrange(len(sizes))}"])
                    try:
                        lease = working_set.lease(f"k{index}", "r")
                    except (CapacityError, DeadlineError):
                        while held:
                            held.pop().release()
                        continue
                    assert lease.tensor[0] == lease.tensor[-1] == index
                    held.append(lease)
                    if len(held) > 2:
                        held.pop(0).release()
            finally:
                while held:
                    held.pop().release()

        with beside(*(functools.partial(work, number) for number in range(3))):
            pass

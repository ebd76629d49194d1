"""Leases for an update: other threads wait for their end, whatever they want of the keys."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.store.rig import await_true, beside, read_key, stored, write_key
from tiered.errors import LeaseError
from tiered.store.residency.residency import Residency
from tiered.store.store import Store
from tiered.store.waiting.recorder import Wait
from tiered.units import KiB

PAGE = 4 * KiB
KEYS = ["a", "b", "c"]


@pytest.fixture
def keys(store: Store) -> list[str]:
    for value, key in enumerate(KEYS):
        store[key] = torch.full((PAGE,), value, dtype=torch.uint8)
    return KEYS


def put(store: Store) -> None:
    store["a"] = torch.full((PAGE,), 7, dtype=torch.uint8)


def delete(store: Store) -> None:
    del store["a"]


def lease(store: Store) -> None:
    with store.lease("a", "rw") as view:
        assert set(view.tolist()) == {9}


def get(store: Store) -> None:
    assert set(store["a"].tolist()) == {9}


def read_part(store: Store) -> None:
    assert set(store.read_part("a", 0, 10).tolist()) == {9}


def write_part(store: Store) -> None:
    store.write_part("a", 0, torch.zeros(10, dtype=torch.uint8))


@pytest.mark.parametrize("use", [put, delete, lease, get, read_part, write_part, Store.commit, Store.rollback])
def test_another_thread_waits_for_the_update(store: Store, keys: list[str], use: Callable[[Store], None]) -> None:
    working_set = store.working_set
    leases = working_set.lease_for_update(keys)
    with beside(lambda: use(store)) as (user,):
        await_true(lambda: bool(working_set.condition._waiters) or not user.is_alive())
        assert user.is_alive()
        leases[0].tensor.fill_(9)
        working_set.end_update(leases)
    assert Wait.UPDATE in {each.reason for each in working_set.recorder.statistics().waits}


def test_the_thread_of_the_update_is_refused(store: Store, keys: list[str]) -> None:
    """It would wait for itself: a signal handler, or a hook."""
    leases = store.working_set.lease_for_update(keys)
    for use in (put, delete, lease, get, read_part, write_part, Store.commit, Store.rollback):
        with pytest.raises(LeaseError, match="'a'"):
            use(store)
    store.working_set.end_update(leases)
    assert read_key(store.working_set, "a") == 0


def test_keys_on_the_device_and_in_dram_are_leased_together(store: Store, keys: list[str]) -> None:
    working_set = store.working_set
    for where in ([], ["a"], ["b"], ["b", "c"], keys):
        stored(working_set, *where) if where else None
        leases = working_set.lease_for_update(keys)
        assert [int(each.tensor[0]) for each in leases] == [0, 1, 2]
        working_set.end_update(leases)
    assert working_set.statistics().num_leases >= 15


@pytest.mark.parametrize("index", range(3))
def test_all_are_leased_or_none(store: Store, keys: list[str], index: int) -> None:
    working_set = store.working_set
    with store.lease(keys[index], "r"), pytest.raises(LeaseError, match=f"'{keys[index]}' is leased for reading"):
        working_set.lease_for_update(keys)
    working_set.end_update(working_set.lease_for_update(keys))
    with pytest.raises(KeyError, match="unknown"):
        working_set.lease_for_update([*keys, "unknown"])
    working_set.end_update(working_set.lease_for_update(keys))
    assert [read_key(working_set, key) for key in keys] == [0, 1, 2]


def test_leases_that_changed_nothing_when_another_was_refused_leave_nothing_to_write(
    working_set: Residency,
) -> None:
    for key in ("a", "b"):
        write_key(working_set, key, PAGE, 1)
    stored(working_set, "a", "b")
    read_key(working_set, "a"), read_key(working_set, "b")
    reading = working_set.lease("b", "r")
    with pytest.raises(LeaseError):
        working_set.lease_for_update(["a", "b"])
    reading.release()
    assert working_set.statistics().dirty_bytes == 0

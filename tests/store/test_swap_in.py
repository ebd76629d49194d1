"""Reads ahead: a few at a time with the devices, the rest in line, and at the head of it when somebody waits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.store.rig import WAIT_S, GatedStore, beside, numbers, stored
from tiered.bytes.device.base import IOClass
from tiered.errors import DeviceError
from tiered.units import KiB, MiB

BOTH_ARENAS = True

KEYS = [f"k{i}" for i in range(8)]
NBYTES = 8 * KiB


@pytest.fixture
def gated() -> Iterator[GatedStore]:
    made = GatedStore(budget_nbytes=1 * MiB)
    made.store.put_many({key: numbers(NBYTES, i) for i, key in enumerate(KEYS)})
    stored(made.store.working_set, *KEYS)
    made.store.working_set._most_ahead_nbytes = 2 * NBYTES
    made.device.hold = lambda operation: not operation.is_write
    yield made
    made.close()


def test_no_more_is_read_ahead_at_a_time_than_keeps_the_drive_busy(gated: GatedStore) -> None:
    working_set = gated.store.working_set
    assert working_set.prefetch(KEYS) == len(KEYS) * NBYTES
    assert len(gated.device.held) == 2
    assert {operation.io_class for operation in gated.device.held} == {IOClass.PREFETCH}
    gated.device.device.submit([gated.device.held.pop(0)])
    assert len(gated.device.held) == 2
    gated.device.open()
    assert all(map(working_set.is_resident, KEYS))
    assert working_set.statistics().swaps.num_prefetches == len(KEYS)


@pytest.mark.parametrize("io_class", [IOClass.DEMAND, IOClass.UPDATE])
def test_who_waits_for_a_read_ahead_makes_it_a_demand_read_or_an_updates(gated: GatedStore, io_class: IOClass) -> None:
    store, working_set = gated.store, gated.store.working_set
    store.prefetch(KEYS)
    gated.device.has_held.clear()
    found: list[torch.Tensor] = []

    def wait() -> None:
        if io_class is IOClass.DEMAND:
            found.append(store["k7"])
        else:
            leases = working_set.lease_for_update(["k7"])
            found.append(leases[0].tensor.clone())
            working_set.end_update(leases)

    with beside(wait):
        assert gated.device.has_held.wait(WAIT_S)
        demand = gated.device.held.pop()
        assert demand.io_class is io_class
        gated.device.device.submit([demand])
    assert torch.equal(found[0], numbers(NBYTES, 7))
    assert len(gated.device.held) == 2  # the others are where they were
    assert not store.working_set.is_resident("k6")
    gated.device.open()
    assert all(map(store.working_set.is_resident, KEYS))
    swaps = store.working_set.statistics().swaps
    assert (swaps.num_demands, swaps.num_prefetches) == (1, 7)


def test_a_failed_read_ahead_lets_the_next_ones_go(gated: GatedStore) -> None:
    gated.device.hold = lambda operation: False
    gated.device.fail = lambda operation: DeviceError("no such block")
    gated.store.prefetch(KEYS)
    assert not any(map(gated.store.working_set.is_resident, KEYS))
    assert gated.store.working_set.statistics().arena_bytes == 0
    gated.device.fail = lambda operation: None
    gated.store.prefetch(KEYS)
    assert all(map(gated.store.working_set.is_resident, KEYS))


def test_a_store_closes_with_reads_in_line(gated: GatedStore) -> None:
    gated.store.commit()
    gated.store.prefetch(KEYS)
    gated.device.open()
    with beside(gated.store.close):
        pass

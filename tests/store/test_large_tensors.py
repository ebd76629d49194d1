"""Tensors of several blocks, resident and streamed: as safe as any others while some of their blocks are held up."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

from tests.devices.simulated_disk import SimulatedDisk
from tests.store.rig import WAIT_S, GatedDevice, await_true, numbers, simulated_store, stored
from tiered.bytes.device.base import Operation
from tiered.errors import CorruptionError, DeadlineError, DeviceError
from tiered.store.format.checksum import BLOCK_NBYTES
from tiered.store.residency.entry import EntryState
from tiered.store.store import Store
from tiered.units import KiB, MiB

BOTH_ARENAS = True

NBYTES = 2 * BLOCK_NBYTES + 100 * KiB + 5  # three blocks, the last one short
SIZE = 2 * BLOCK_NBYTES + 104 * KiB  # on the device
OLD, NEW = numbers(NBYTES, 1), numbers(NBYTES, 2)


class Rig:
    """A store in which tensors of three blocks are more than may stay unwritten, and a thread for a get."""

    def __init__(self, *, durable: bool = True, budget_nbytes: int = 40 * MiB) -> None:
        gates: list[GatedDevice] = []
        self.disk = SimulatedDisk(capacity_nbytes=128 * MiB, can_lose_power=False)
        self.store = simulated_store(
            self.disk,
            budget_nbytes=budget_nbytes,
            durable=durable,
            wrap=lambda device: gates.append(GatedDevice(device)) or gates[-1],  # type: ignore[func-returns-value]
        )
        self.gate = gates[0]
        self.out = torch.zeros(NBYTES, dtype=torch.uint8)
        self._pool = ThreadPoolExecutor(1)

    @property
    def used_nbytes(self) -> int:
        return self.store.statistics().used_bytes

    def state(self, key: str) -> EntryState:
        return self.store.working_set.entries[key].state

    def put_out(self) -> None:
        """Put and commit "a" and "b", none of which is in DRAM then."""
        self.store.put_many({"a": OLD, "b": NEW})
        self.store.commit()
        stored(self.store.working_set, "a", "b")

    def hold_from(self, block: int) -> None:
        """Hold up the reads of blocks from ``block`` on, wherever the key lies."""
        entries = self.store.working_set.entries
        starts = [extent.offset for key in "ab" for extent in entries[key].row.extents]  # type: ignore[union-attr]

        def is_late(operation: Operation) -> bool:
            first = max(start for start in starts if start <= operation.offset)
            return not operation.is_write and operation.offset - first >= block * BLOCK_NBYTES

        self.gate.hold = is_late

    def get(self) -> Future[torch.Tensor]:
        return self._pool.submit(self.store.get, "a", out=self.out)

    def await_held(self) -> None:
        """Return when a block is held up."""
        await_true(lambda: bool(self.gate.held))

    def reopen(self) -> Store:
        self.store.close()
        self.store = simulated_store(self.disk, budget_nbytes=40 * MiB)
        return self.store

    def close(self) -> None:
        self.gate.open()
        self._pool.shutdown()
        self.store.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()


# -- resident puts -----------------------------------------------------------------------------------------------------


def test_a_put_can_be_read_and_sealed_while_it_is_on_its_way(rig: Rig) -> None:
    rig.gate.hold = lambda operation: operation.is_write and len(operation.memory) < BLOCK_NBYTES
    rig.store["a"] = NEW
    assert rig.gate.has_held.wait(WAIT_S)
    assert rig.state("a") is EntryState.DEPARTING
    assert torch.equal(rig.store["a"], NEW)
    rig.store.commit(wait=False)  # its sealed bytes have not landed
    rig.gate.open()
    rig.store.wait_for_commit()
    assert torch.equal(rig.reopen()["a"], NEW)


def test_a_key_has_two_sets_of_extents_at_most(rig: Rig) -> None:
    for seed in range(3):
        rig.store["a"] = numbers(NBYTES, seed)
        assert rig.used_nbytes <= 2 * SIZE
        rig.store["a"] = numbers(NBYTES, 10 + seed)
        rig.store.working_set.swap_out(["a"])
        assert rig.used_nbytes <= 2 * SIZE
        rig.store.commit()
        assert rig.used_nbytes == SIZE
    assert torch.equal(rig.store["a"], numbers(NBYTES, 12))
    rig.store["a"] = OLD
    rig.store.rollback()
    assert torch.equal(rig.store["a"], numbers(NBYTES, 12))
    assert rig.used_nbytes == SIZE


# -- resident gets -----------------------------------------------------------------------------------------------------


def test_blocks_may_come_in_any_order(rig: Rig) -> None:
    rig.put_out()
    rig.hold_from(0)
    found = rig.get()
    await_true(lambda: len(rig.gate.held) == 3)
    last = rig.gate.held.pop()
    rig.gate.device.submit([last])
    assert not found.done()
    rig.gate.open()
    assert torch.equal(found.result(WAIT_S), OLD)


def test_a_read_ahead_that_fails_while_it_is_waited_for_is_tried_again(rig: Rig) -> None:
    rig.put_out()
    rig.hold_from(1)
    rig.store.prefetch(["a"])
    found = rig.get()
    rig.await_held()
    for operation in [rig.gate.held.pop() for _ in list(rig.gate.held)]:
        operation.error = DeviceError("no such block")
        operation.on_done(operation)
        operation.error = None
        rig.gate.hold = lambda operation: False
    assert torch.equal(found.result(WAIT_S), OLD)


# -- streamed ----------------------------------------------------------------------------------------------------------


def test_bytes_that_are_being_read_stay_until_the_read_has_ended() -> None:
    rig = Rig(budget_nbytes=4 * MiB)
    rig.store["a"] = numbers(6 * MiB)
    rig.store.commit()
    rig.gate.hold = lambda operation: not operation.is_write
    rig.store.working_set.deadline_s = 0.05
    with pytest.raises(DeadlineError, match="transfer of slab 0 of 'a'"):
        rig.store["a"]
    rig.store.working_set.deadline_s = WAIT_S  # order: a commit takes longer than that on a busy machine
    used = rig.used_nbytes
    del rig.store["a"]
    rig.store.commit()
    assert rig.used_nbytes == used
    rig.gate.open()
    await_true(lambda: rig.used_nbytes == 0)
    rig.close()


def test_a_failed_read_a_damaged_block_and_an_out_that_does_not_fit_end_the_stream() -> None:
    rig = Rig(budget_nbytes=4 * MiB)
    store, many = rig.store, {name: numbers(9 * MiB, seed) for seed, name in enumerate("abc")}
    store.put_many(many)
    store.commit()
    rig.gate.fail = lambda operation: DeviceError("no such block") if operation.offset >= 4 * MiB else None
    for _ in range(2):
        with pytest.raises((DeviceError, CorruptionError)):
            store["a"]
        with pytest.raises((DeviceError, CorruptionError)):
            store.get_many(["a", "b", "c"])
    with pytest.raises(ValueError, match="expected out of"):
        store.get("a", out=torch.empty(1))
    rig.gate.fail = lambda operation: None
    assert all(torch.equal(store[name], value) for name, value in many.items())
    store.clear()
    store.commit()
    await_true(lambda: rig.used_nbytes == 0)
    rig.close()

"""Tensors of several blocks, resident and streamed: as safe as any others while some of their blocks are held up."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.devices.simulated_disk import SimulatedDisk
from tests.store.rig import WAIT_S, GatedDevice, await_true, numbers, simulated_store, stored, written
from tiered.bytes.device.base import Operation
from tiered.errors import ClosedError, CorruptionError, DeadlineError, DeviceError
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


def test_what_was_put_stays_resident_and_clean(rig: Rig) -> None:
    rig.store["a"] = NEW
    rig.store.commit()
    rig.gate.events.clear()
    assert rig.state("a") is EntryState.CLEAN
    assert torch.equal(rig.store["a"], NEW)
    assert rig.gate.events == []
    stored(rig.store.working_set, "a")
    assert torch.equal(rig.store["a"], NEW)
    assert rig.store.statistics().working_set.swaps.swap_out_bytes == NBYTES


def test_after_a_failed_write_the_tensor_is_written_elsewhere(rig: Rig) -> None:
    rig.store["a"] = OLD
    rig.store.commit()
    rig.store.working_set.space.close()
    failures: list[Exception] = [DeviceError("no such block")]
    rig.gate.fail = lambda operation: failures.pop() if operation.is_write and failures else None
    rig.store["b"] = NEW
    assert rig.state("b") is EntryState.DIRTY
    with pytest.raises(DeviceError, match="no such block"):
        rig.store["a"]
    assert torch.equal(rig.store["b"], NEW)
    rig.store.commit()
    stored(rig.store.working_set, "b")
    assert torch.equal(rig.store["b"], NEW)
    assert rig.store.statistics().quarantined_bytes == SIZE


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


def test_a_held_tensor_is_written_by_commits_only(rig: Rig) -> None:
    rig.store["a"] = OLD
    rig.store.commit()
    rig.store.working_set.hold(["a"])
    rig.gate.events.clear()
    rig.store["a"] = NEW
    assert rig.state("a") is EntryState.DIRTY and rig.gate.events == []
    rig.store.commit()
    assert rig.gate.events.count("write") == 3


def test_swap_space_has_one_set_of_extents() -> None:
    rig = Rig(durable=False)
    for seed in range(3):
        rig.store["a"] = numbers(NBYTES, seed)
        assert rig.used_nbytes <= SIZE
        stored(rig.store.working_set, "a")
        assert torch.equal(rig.store["a"], numbers(NBYTES, seed))
    rig.close()


def test_put_many_writes_at_once_what_single_puts_leave_for_later() -> None:
    rig = Rig(budget_nbytes=16 * NBYTES)
    rig.store["single"] = OLD
    assert rig.state("single") is EntryState.DIRTY
    rig.store.put_many({"a": OLD, "b": NEW})
    rig.store.working_set.space.close()  # waits for what is on its way
    assert {rig.state(key) for key in "ab"} == {EntryState.CLEAN}
    assert rig.gate.events.count("write") == 6
    rig.store.put_many({"a": NEW})  # written once before a commit, as often as it is put
    assert rig.state("a") is EntryState.DIRTY and rig.state("single") is EntryState.DIRTY
    assert rig.used_nbytes == 2 * SIZE
    rig.store.commit()
    store = rig.reopen()
    assert torch.equal(store["single"], OLD) and torch.equal(store["a"], NEW) and torch.equal(store["b"], NEW)
    rig.close()


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


def test_two_threads_wait_for_the_same_read(rig: Rig) -> None:
    rig.put_out()
    rig.hold_from(1)
    num_demands = rig.store.working_set.statistics().swaps.num_demands
    first = rig.get()
    rig.await_held()
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(rig.store.__getitem__, "a")
        residents = rig.store.working_set
        await_true(lambda: residents.num_claims == 3)  # two of the first, which reads, and one of the second
        rig.gate.open()
        assert torch.equal(second.result(WAIT_S), OLD)
    assert torch.equal(first.result(WAIT_S), OLD)
    assert rig.store.working_set.statistics().swaps.num_demands == num_demands + 1


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


def test_past_the_deadline_the_buffer_stays_with_the_read(rig: Rig) -> None:
    rig.put_out()
    rig.hold_from(1)
    rig.store.working_set.deadline_s = 0.1
    with pytest.raises(DeadlineError, match="lease of 'a'"):
        rig.store.get("a", out=rig.out)
    rig.store.working_set.deadline_s = WAIT_S  # order: another read takes longer than that on a busy machine
    assert rig.store.working_set.statistics().arena_bytes >= NBYTES
    rig.gate.open()
    await_true(lambda: rig.store.working_set.is_resident("a"))
    stored(rig.store.working_set, "a")
    assert torch.equal(rig.store["a"], OLD)


def test_a_store_that_is_closed_meanwhile_gives_the_buffer_back(rig: Rig) -> None:
    rig.put_out()
    rig.hold_from(1)
    found = rig.get()
    rig.await_held()
    rig.gate.open()
    rig.store.close()  # while the last blocks are checked and copied
    try:
        assert torch.equal(found.result(WAIT_S), OLD)
    except ClosedError:
        pass  # also an answer; wrong bytes are not
    arena = rig.store.working_set.arena
    await_true(lambda: not arena.leased_nbytes)


# -- streamed ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64])
@pytest.mark.parametrize("num_devices", [1, 3])
def test_streamed_tensors_come_whole_in_memory_of_their_own(
    dtype: torch.dtype, num_devices: int, tmp_path: Path
) -> None:
    with Store(*(tmp_path / str(number) for number in range(num_devices)), dram="16MiB") as store:
        value = (numbers(6 * MiB) % 2).to(dtype).view(3, -1)[:, 1:].contiguous()
        store["a"] = value
        found = store["a"]
        assert torch.equal(found, value)
        assert (found.dtype, found.shape, found.storage_offset()) == (value.dtype, value.shape, 0)
        assert found.untyped_storage().nbytes() == value.nbytes
        found.zero_()
        assert torch.equal(store["a"], value)
        assert store.working_set.statistics().arena_bytes == 0
        many = {f"k{i}": numbers(5 * MiB, i) for i in range(7)} | {"small": numbers(5000)}
        store.put_many(many)
        written(store)
        got = store.get_many(reversed(list(many)))
        assert list(got) == list(reversed(list(many)))
        assert all(torch.equal(got[name], value) for name, value in many.items())


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
            store.get_many("abc")
    with pytest.raises(ValueError, match="expected out of"):
        store.get("a", out=torch.empty(1))
    rig.gate.fail = lambda operation: None
    assert all(torch.equal(store[name], value) for name, value in many.items())
    store.clear()
    store.commit()
    await_true(lambda: rig.used_nbytes == 0)
    rig.close()

"""Gets of large tensors that are not in DRAM, while some of their blocks are held up."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

from tests.devices.simulated_disk import SimulatedDisk
from tests.store.rig import WAIT_S, GatedDevice, await_true, numbers, simulated_store
from tiered.bytes.device.base import Operation
from tiered.errors import ClosedError, CorruptionError, DeadlineError, DeviceError
from tiered.store.format.checksum import BLOCK_NBYTES
from tiered.store.store import Store
from tiered.units import MiB

BOTH_ARENAS = True

NBYTES = 2 * BLOCK_NBYTES + 1000
BUDGET_NBYTES = 64 * MiB


class Rig:
    """A store with "a" and "b" on its device, none of it in DRAM, and a thread for a get."""

    def __init__(self) -> None:
        gates: list[GatedDevice] = []
        self.store = simulated_store(
            SimulatedDisk(capacity_nbytes=128 * MiB, can_lose_power=False),
            budget_nbytes=BUDGET_NBYTES,
            wrap=lambda device: gates.append(GatedDevice(device)) or gates[-1],  # type: ignore[func-returns-value]
        )
        self.device = gates[0]
        self.values = {"a": numbers(NBYTES, 1), "b": numbers(NBYTES, 2)}
        self.store.put_many(self.values)
        self.store.commit()
        buffer = self.store.working_set.reserve(BUDGET_NBYTES)
        self.store.working_set.unreserve(buffer)
        self.out = torch.zeros(NBYTES + 1, dtype=torch.uint8)[1:]  # not aligned: nothing can be read into it
        self._pool = ThreadPoolExecutor(1)

    def hold_from(self, block: int) -> None:
        """Hold up the reads of blocks from ``block`` on, wherever the key lies."""
        (start, end) = (extent_of(self.store, "a").offset, extent_of(self.store, "b").offset)
        starts = [start, end]

        def is_late(operation: Operation) -> bool:
            first = max(place for place in starts if place <= operation.offset)
            return not operation.is_write and operation.offset - first >= block * BLOCK_NBYTES

        self.device.hold = is_late

    def get(self, key: str = "a") -> Future[torch.Tensor]:
        return self._pool.submit(self.store.get, key, out=self.out)

    def await_held(self) -> None:
        """Return when a block is held up."""
        await_true(lambda: bool(self.device.held))

    def close(self) -> None:
        self.device.open()
        self._pool.shutdown()
        self.store.close()


def extent_of(store: Store, key: str):  # type: ignore[no-untyped-def]
    (extent,) = store.working_set.records.entries[key].row.extents  # type: ignore[union-attr]
    return extent


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()


def test_blocks_may_come_in_any_order(rig: Rig) -> None:
    rig.hold_from(0)
    found = rig.get()
    await_true(lambda: len(rig.device.held) == 3)
    last = rig.device.held.pop()
    rig.device.device.submit([last])
    assert not found.done()
    rig.device.open()
    assert torch.equal(found.result(WAIT_S), rig.values["a"])


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        (torch.float64, (3, 349527)),
        (torch.bfloat16, (1, 4194305)),
        (torch.bool, (8388609, 1)),
        (torch.complex64, (1048577,)),
    ],
)
def test_any_dtype_and_shape_comes_whole(rig: Rig, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    numel = torch.Size(shape).numel()
    value = (numbers(numel, 3) % 2).to(dtype).view(shape)
    assert value.nbytes > 2 * BLOCK_NBYTES or value.nbytes % 4096
    rig.store["odd"] = value
    rig.store.commit()
    rig.store.working_set.unreserve(rig.store.working_set.reserve(BUDGET_NBYTES))
    for _ in range(2):  # swapped in, then resident
        found = rig.store["odd"]
        assert (found.dtype, found.shape) == (dtype, torch.Size(shape))
        assert torch.equal(found, value)


def test_two_threads_wait_for_the_same_read(rig: Rig) -> None:
    rig.hold_from(1)
    first = rig.get()
    rig.await_held()
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(rig.store.__getitem__, "a")
        residents = rig.store.working_set.residents
        await_true(lambda: residents.num_claims == 3)  # two of the first, which reads, and one of the second
        rig.device.open()
        assert torch.equal(second.result(WAIT_S), rig.values["a"])
    assert torch.equal(first.result(WAIT_S), rig.values["a"])
    assert rig.store.working_set.statistics().swaps.num_demands == 1


@pytest.mark.parametrize("error", [DeviceError("no such block"), None], ids=["device", "digest"])
def test_a_fault_in_the_middle_is_raised_and_leaves_nothing(rig: Rig, error: DeviceError | None) -> None:
    extent = extent_of(rig.store, "a")
    damaged = extent.offset + BLOCK_NBYTES

    def fail(operation: Operation) -> Exception | None:
        if operation.is_write or operation.offset != damaged:
            return None
        if error is None:  # what arrives is something else
            operation.offset += BLOCK_NBYTES
            operation.memory = operation.memory[:4096]
        return error

    rig.device.fail = fail
    with pytest.raises(DeviceError if error else CorruptionError, match="no such block" if error else "'a' is damaged"):
        rig.store.get("a", out=rig.out)
    working_set = rig.store.working_set
    assert not working_set.is_resident("a")
    assert working_set.statistics().arena_bytes == 0 and not working_set.residents.num_arriving
    rig.device.fail = lambda operation: None
    assert torch.equal(rig.store["a"], rig.values["a"])


def test_a_read_ahead_that_fails_while_it_is_waited_for_is_tried_again(rig: Rig) -> None:
    rig.hold_from(1)
    rig.store.prefetch(["a"])
    found = rig.get()
    rig.await_held()
    for operation in [rig.device.held.pop() for _ in list(rig.device.held)]:
        operation.error = DeviceError("no such block")
        operation.on_done(operation)
        operation.error = None
        rig.device.hold = lambda operation: False
    assert torch.equal(found.result(WAIT_S), rig.values["a"])
    assert rig.store.working_set.statistics().swaps.num_demands == 1


def test_past_the_deadline_the_buffer_stays_with_the_read(rig: Rig) -> None:
    rig.hold_from(1)
    rig.store.working_set.deadline_s = 0.1
    with pytest.raises(DeadlineError, match="lease of 'a'"):
        rig.store.get("a", out=rig.out)
    rig.store.working_set.deadline_s = WAIT_S  # order: another read takes longer than that on a busy machine
    held = rig.store.working_set.statistics().arena_bytes
    assert held >= NBYTES
    rig.device.open()
    await_true(lambda: rig.store.working_set.is_resident("a"))
    rig.store.working_set.unreserve(rig.store.working_set.reserve(BUDGET_NBYTES))
    assert torch.equal(rig.store["a"], rig.values["a"])


def test_what_replaces_it_meanwhile_shows_whole_or_not_at_all(rig: Rig) -> None:
    rig.hold_from(1)
    found = rig.get()
    rig.await_held()
    new = numbers(NBYTES, 9)
    with ThreadPoolExecutor(1) as pool:
        put = pool.submit(rig.store.__setitem__, "a", new)
        rig.device.open()
        put.result(WAIT_S)
    got = found.result(WAIT_S)
    assert torch.equal(got, rig.values["a"]) or torch.equal(got, new)
    assert torch.equal(rig.store["a"], new)


def test_an_out_that_does_not_fit_is_refused_and_the_lease_ends(rig: Rig) -> None:
    with pytest.raises(ValueError, match="expected out of"):
        rig.store.get("a", out=torch.zeros(NBYTES - 1, dtype=torch.uint8))
    with rig.store.lease("a", mode="rw") as view:
        assert torch.equal(view, rig.values["a"])


def test_a_store_that_is_closed_meanwhile_gives_the_buffer_back(rig: Rig) -> None:
    rig.hold_from(1)
    found = rig.get()
    rig.await_held()
    rig.device.open()
    rig.store.close()  # while the last blocks are checked and copied
    try:
        assert torch.equal(found.result(WAIT_S), rig.values["a"])
    except ClosedError:
        pass  # also an answer; wrong bytes are not
    arena = rig.store.working_set.residents.arena
    await_true(lambda: not arena.leased_nbytes)

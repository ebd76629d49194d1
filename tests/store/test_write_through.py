"""Large puts whose first blocks are on their way while the next are copied: as safe as any other put."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from tests.store.rig import WAIT_S, GatedDevice, numbers, simulated_store, stored
from tiered.bytes.device.base import Operation
from tiered.bytes.device.memory import SimulatedDisk
from tiered.errors import DeviceError, LeaseError
from tiered.store.format.checksum import BLOCK_NBYTES
from tiered.store.records.entry import Residency
from tiered.store.residency.lease import Lease
from tiered.store.store import Store
from tiered.store.values import write_through
from tiered.units import KiB, MiB

NBYTES = 2 * BLOCK_NBYTES + 100 * KiB + 5  # three blocks, the last one short
SIZE = 2 * BLOCK_NBYTES + 104 * KiB  # on the device
OLD, NEW = numbers(NBYTES, 1), numbers(NBYTES, 2)


class Rig:
    """A store in which tensors of three blocks are more than may stay unwritten."""

    def __init__(self, *, durable: bool = True, budget_nbytes: int = 40 * MiB) -> None:
        gates: list[GatedDevice] = []

        def gated(device: object) -> GatedDevice:
            gates.append(GatedDevice(device))  # type: ignore[arg-type]
            return gates[-1]

        self.disk = SimulatedDisk(capacity_nbytes=64 * MiB, can_lose_power=False)
        self.store = simulated_store(self.disk, budget_nbytes=budget_nbytes, durable=durable, wrap=gated)
        self.gate = gates[0]

    @property
    def used_nbytes(self) -> int:
        return self.store.statistics().used_bytes

    def state(self, key: str) -> Residency:
        return self.store.working_set.records.entries[key].state

    def reopen(self) -> Store:
        self.store.close()
        self.store = simulated_store(self.disk, budget_nbytes=40 * MiB)
        return self.store


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.gate.open()
    made.store.close()


def test_blocks_are_written_before_the_tensor_is_whole(rig: Rig) -> None:
    rig.store["a"] = OLD
    rig.store.working_set.space.close()  # digests are the caller's business now: what follows is deterministic
    seen: list[bool] = []

    def watch(operation: Operation) -> bool:
        seen.append(torch.equal(rig.store["a"], OLD) and "b" in rig.store)
        return False

    rig.gate.hold = watch
    rig.store["b"] = NEW
    assert seen == [False, False, True]
    rig.gate.hold = lambda operation: False
    rig.store.commit()
    store = rig.reopen()
    assert torch.equal(store["a"], OLD) and torch.equal(store["b"], NEW)
    assert store.verify().is_clean


def test_it_can_be_read_and_sealed_while_it_is_on_its_way(rig: Rig) -> None:
    rig.gate.hold = lambda operation: operation.is_write and len(operation.memory) < BLOCK_NBYTES
    rig.store["a"] = NEW
    assert rig.gate.has_held.wait(WAIT_S)
    assert rig.state("a") is Residency.DEPARTING
    assert torch.equal(rig.store["a"], NEW)
    rig.store.commit(wait=False)  # its sealed bytes have not landed
    rig.gate.open()
    rig.store.wait_for_commit()
    store = rig.reopen()
    assert torch.equal(store["a"], NEW)


def test_it_stays_resident_and_clean(rig: Rig) -> None:
    rig.store["a"] = NEW
    rig.store.commit()
    rig.gate.events.clear()
    assert rig.state("a") is Residency.CLEAN
    assert torch.equal(rig.store["a"], NEW)
    assert rig.gate.events == []
    stored(rig.store.working_set, "a")
    assert torch.equal(rig.store["a"], NEW)
    assert rig.store.statistics().working_set.swaps.swap_out_bytes == NBYTES


@pytest.mark.parametrize("has_failed", [False, True])
def test_a_put_that_cannot_take_its_place_leaves_nothing(rig: Rig, has_failed: bool) -> None:
    rig.store["a"] = OLD
    rig.store.commit()
    rig.store.working_set.space.close()
    leases: list[Lease] = []

    def lease(operation: Operation) -> Exception | None:
        if operation.is_write and not leases:  # the first block of the new tensor
            leases.append(rig.store.working_set.lease("a", "rw"))
        return DeviceError("no such block") if has_failed else None

    rig.gate.fail = lease
    with pytest.raises(LeaseError, match="put of 'a', which is leased for writing"):
        rig.store["a"] = NEW
    rig.gate.fail = lambda operation: None
    leases.pop().release()
    assert torch.equal(rig.store["a"], OLD)
    statistics = rig.store.statistics()
    assert statistics.quarantined_bytes == (SIZE if has_failed else 0)
    assert statistics.working_set.arena_bytes == SIZE
    rig.store["a"] = NEW
    rig.store.commit()
    assert rig.used_nbytes == SIZE


def test_after_a_failed_write_the_tensor_is_written_elsewhere(rig: Rig) -> None:
    rig.store["a"] = OLD
    rig.store.commit()
    rig.store.working_set.space.close()
    failures: list[Exception] = [DeviceError("no such block")]
    rig.gate.fail = lambda operation: failures.pop() if operation.is_write and failures else None
    rig.store["b"] = NEW
    assert rig.state("b") is Residency.CLEAN
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
    assert rig.state("a") is Residency.DIRTY and rig.gate.events == []
    rig.store.commit()
    assert rig.gate.events.count("write") == 3


def test_swap_space_has_one_set_of_extents() -> None:
    rig = Rig(durable=False)
    for seed in range(3):
        rig.store["a"] = numbers(NBYTES, seed)
        assert rig.used_nbytes <= SIZE
        stored(rig.store.working_set, "a")
        assert torch.equal(rig.store["a"], numbers(NBYTES, seed))
    rig.store.close()


def test_put_many_writes_at_once_what_single_puts_leave_for_later() -> None:
    rig = Rig(budget_nbytes=16 * NBYTES)
    rig.store["single"] = OLD
    assert rig.state("single") is Residency.DIRTY
    rig.store.put_many({"a": OLD, "b": NEW})
    rig.store.working_set.space.close()  # waits for what is on its way
    assert {rig.state(key) for key in "ab"} == {Residency.CLEAN}
    assert rig.gate.events.count("write") == 6
    rig.store.put_many({"a": NEW})  # written once before a commit, as often as it is put
    assert rig.state("a") is Residency.DIRTY and rig.state("single") is Residency.DIRTY
    assert rig.used_nbytes == 2 * SIZE
    rig.store.commit()
    store = rig.reopen()
    assert torch.equal(store["single"], OLD) and torch.equal(store["a"], NEW) and torch.equal(store["b"], NEW)
    store.close()


def test_whoever_copies_digests_while_the_drives_are_behind(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_through, "_BEHIND_NBYTES", NBYTES)
    writers: list[bool] = []

    def hold(operation: Operation) -> bool:
        writers.append(threading.current_thread() is threading.main_thread())
        return True

    rig.gate.hold = hold
    rig.store["a"] = OLD
    rig.store["b"] = NEW
    assert writers.count(True) == 4  # all of the second, and the last of the first, which is too short for a thread
    rig.gate.open()
    rig.store.commit()
    writers.clear()
    monkeypatch.setattr(write_through, "_BEHIND_NBYTES", 8 * NBYTES)
    rig.gate.hold = lambda operation: bool(hold(operation)) and False
    rig.store["a"] = NEW
    rig.store.commit()
    assert sorted(writers) == [False, False, True]
    store = rig.reopen()
    assert torch.equal(store["a"], NEW) and torch.equal(store["b"], NEW)
    assert store.verify().is_clean

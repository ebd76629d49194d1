"""Large puts, whose digests are made of what is copied: as safe as any other put."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.devices.simulated_disk import SimulatedDisk
from tests.store.rig import WAIT_S, GatedDevice, numbers, simulated_store, stored
from tiered.errors import DeviceError
from tiered.store.format.checksum import BLOCK_NBYTES
from tiered.store.records.entry import EntryState
from tiered.store.store import Store
from tiered.store.transfers import transfer as transfer_module
from tiered.store.values import values
from tiered.units import KiB, MiB

BOTH_ARENAS = True

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

    def state(self, key: str) -> EntryState:
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


def test_it_can_be_read_and_sealed_while_it_is_on_its_way(rig: Rig) -> None:
    rig.gate.hold = lambda operation: operation.is_write and len(operation.memory) < BLOCK_NBYTES
    rig.store["a"] = NEW
    assert rig.gate.has_held.wait(WAIT_S)
    assert rig.state("a") is EntryState.DEPARTING
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
    rig.store.close()


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
    store.close()


def test_what_is_written_after_a_put_has_digests_of_its_own(rig: Rig) -> None:
    rig.store["a"] = OLD
    with rig.store.lease("a", mode="rw") as view:
        view.copy_(NEW)
    rig.store.commit()
    assert torch.equal(rig.store["a"], NEW)
    rig.store["a"] = OLD
    rig.store["a"] = NEW
    rig.store.commit()
    store = rig.reopen()
    assert torch.equal(store["a"], NEW)
    assert store.verify().is_clean


def test_a_put_across_a_seal_has_digests_of_the_generation_it_is_in(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.store["a"] = OLD
    copy_and_digest = values._copy_and_digest

    def commit_first(*args: Any) -> bytes:
        digests = copy_and_digest(*args)
        rig.store.commit()
        return digests

    monkeypatch.setattr(values, "_copy_and_digest", commit_first)
    rig.store["a"] = NEW
    rig.store["b"] = NEW
    rig.store.commit()
    store = rig.reopen()
    assert torch.equal(store["a"], NEW) and torch.equal(store["b"], NEW)
    assert store.verify().is_clean


def test_a_key_that_is_deleted_while_it_is_put_again_has_an_id_of_its_own(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.store["a"] = OLD
    rig.store.commit()
    old_id = rig.store.working_set.records.entries["a"].key_id
    copy_and_digest = values._copy_and_digest

    def delete_first(*args: Any) -> bytes:
        digests = copy_and_digest(*args)
        del rig.store["a"]
        return digests

    monkeypatch.setattr(values, "_copy_and_digest", delete_first)
    rig.store["a"] = NEW
    assert rig.store.working_set.records.entries["a"].key_id > old_id
    rig.store.commit()
    store = rig.reopen()
    assert torch.equal(store["a"], NEW)
    assert store.verify().is_clean


def test_no_thread_digests_what_a_put_has_digested(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> bytes:
        raise AssertionError("a block is digested again")

    monkeypatch.setattr(transfer_module, "block_digests", refuse)
    rig.store["a"] = OLD
    rig.store.commit()
    monkeypatch.undo()
    store = rig.reopen()
    assert torch.equal(store["a"], OLD)

"""What hardly ever happens to commits, extents and opening: races forced, ends interrupted, files of no use."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.devices.simulated_disk import SimulatedDisk
from tests.store.rig import WAIT_S, GatedStore, filled, numbers, simulated_store, stored, write_key
from tiered.bytes.arena import Arena
from tiered.bytes.device.base import SCRATCH
from tiered.bytes.device.memory import MemoryDevice
from tiered.errors import CapacityError, DeadlineError, DeviceError, LeaseError, UsageError
from tiered.store.format.row import Extent
from tiered.store.generations import commit as commit_module
from tiered.store.lifetime import opening
from tiered.store.lifetime.opening import Parts, dram_budget
from tiered.store.residency.residency import Lease
from tiered.store.store import Store
from tiered.store.waiting.deadline import Deadline
from tiered.units import KiB, MiB

# -- commits -------------------------------------------------------------------------------------------------------


def test_a_commit_that_another_thread_overtakes_waits_for_it(gated: GatedStore) -> None:
    committer = gated.store._generations._committer
    assert committer is not None
    real, num_waits = committer.wait, 0

    def wait() -> None:
        nonlocal num_waits
        num_waits += 1
        if num_waits == 3:  # 2 was the other one's own
            gated.catalog.may_apply.set()
        real()
        if num_waits == 1:  # just after the first has seen that none runs
            gated.catalog.may_apply.clear()
            with committer.attempt({}) as other:
                committer.start("{}", other)

    committer.wait = wait  # type: ignore[method-assign]
    gated.store["a"] = numbers(10)
    assert gated.store.commit() == 2
    assert num_waits > 2


def test_a_rollback_waits_for_the_write_of_what_it_gives_up(gated: GatedStore) -> None:
    filled(gated.store)
    gated.store.commit()
    gated.device.hold = lambda operation: operation.is_write
    gated.store["ordinary"] = numbers(12 * KiB, 5)
    gated.store.working_set.swap_out(["ordinary"])
    assert gated.device.has_held.is_set()
    wait_for = gated.store.working_set.wait_for_entry

    def let_it_land(entry: Any, deadline: Deadline) -> None:
        gated.store._condition.release()
        gated.device.open()
        gated.store._condition.acquire()
        if not entry.is_settled:
            wait_for(entry, deadline)

    gated.store.working_set.wait_for_entry = let_it_land  # type: ignore[method-assign]
    gated.store.rollback()
    assert gated.store["ordinary"].equal(numbers(12 * KiB, 0))


def test_a_commit_whose_thread_is_interrupted_is_lost(gated: GatedStore) -> None:
    filled(gated.store)
    gated.catalog.failure = KeyboardInterrupt()  # type: ignore[assignment]
    with pytest.raises(DeviceError, match="was interrupted"):
        gated.store.commit()


def test_what_the_catalog_writes_is_not_counted_where_the_kernel_does_not_tell(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any, **options: Any) -> Any:
        raise PermissionError

    monkeypatch.setattr(commit_module, "open", refuse, raising=False)
    store["a"] = numbers(10)
    store.commit()
    assert store.statistics().catalog_write_bytes == 0


def test_the_end_of_the_process_waits_for_a_commit_or_says_that_it_is_lost(
    gated: GatedStore, caplog: pytest.LogCaptureFixture
) -> None:
    gated.store["a"] = numbers(10)
    gated.store.commit(wait=False)
    gated.store._generations.finish_at_exit()
    assert gated.store.generation == 1 and not caplog.records
    gated.catalog.failure = DeviceError("scripted")
    gated.store["a"] = numbers(11)
    gated.store.commit(wait=False)
    with caplog.at_level(logging.ERROR):
        gated.store._generations.finish_at_exit()
    assert "the process ends before generation 2 is durable" in caplog.text


def test_a_store_without_commits_has_none_to_wait_for() -> None:
    with simulated_store(durable=False) as store:
        store.wait_for_commit()


# -- records -------------------------------------------------------------------------------------------------------


def test_a_rollback_brings_back_a_key_whose_name_a_scratch_key_took(store: Store) -> None:
    values = filled(store)
    store.commit()
    del store["ordinary"]
    write_key(store.working_set, "ordinary", 8 * KiB, 1, scratch=True)
    store.working_set.create("undefined", 8 * KiB)
    store.rollback()
    assert set(store) == set(values)
    assert store["ordinary"].equal(values["ordinary"])
    assert "undefined" not in store.working_set.entries


def test_what_a_running_commit_supersedes_counts_as_freed_by_the_next(gated: GatedStore) -> None:
    filled(gated.store)
    gated.store.commit()
    filled(gated.store, seed=1)
    gated.catalog.may_apply.clear()
    gated.store.commit(wait=False)
    with gated.store._condition:
        names = {entry.name for entry in gated.store.working_set.superseded()}
    gated.catalog.may_apply.set()
    assert names == {"inline", "ordinary", "streamed"}


# -- space ---------------------------------------------------------------------------------------------------------


def test_a_scratch_file_that_is_there_brings_no_space() -> None:
    disk = SimulatedDisk(capacity_nbytes=1 * MiB, can_lose_power=False)
    MemoryDevice(disk, 0).grow(SCRATCH, 64 * KiB)
    with simulated_store(disk) as store:
        assert store.working_set.space.free_nbytes == 0


def test_extents_that_two_streams_read_are_given_back_after_the_second(store: Store) -> None:
    filled(store)
    store.commit()
    space = store.working_set.space
    rows = [store.working_set.entries[name].row for name in ("inline", "ordinary")]
    inline, row = (row for row in rows if row is not None)
    extents = row.extents
    with store._condition:
        for none in (space.begin_stream, space.end_stream):
            none(inline)
        used = space.used_nbytes
        space.begin_stream(row)
        space.begin_stream(row)
        space.give_back(extents)
        space.end_stream(row)
        assert space.used_nbytes == used and space.is_streaming(extents)
        space.end_stream(row)
        assert space.used_nbytes == used - sum(extent.nbytes for extent in extents)
        taken = space.take_nowait(12 * KiB, scratch=False)  # the key's again, or its bytes would be nobody's
    assert taken == (Extent(*extents[0]),)


def test_bytes_that_a_stream_still_reads_stay_when_their_key_is_written_again(store: Store) -> None:
    store["key"] = numbers(12 * KiB, 1)
    stored(store.working_set, "key")
    space, extents = store.working_set.space, store.working_set.entries["key"].landing
    assert extents is not None
    row = store.working_set.entries["key"].row
    assert row is not None and row.extents == extents
    with store._condition:
        space.begin_stream(row)
    store["key"] = numbers(12 * KiB, 2)
    stored(store.working_set, "key")
    landing = store.working_set.entries["key"].landing
    assert landing is not None and not {*landing} & {*extents}
    used = space.used_nbytes
    with store._condition:
        space.end_stream(row)
    assert space.used_nbytes == used - sum(extent.nbytes for extent in extents)
    assert store["key"].equal(numbers(12 * KiB, 2))


def test_a_streamed_put_that_cannot_take_its_place_gives_its_extents_back(gated: GatedStore) -> None:
    store = gated.store
    store["a"] = numbers(100)
    used = store.statistics().used_bytes
    gated.device.hold = lambda operation: operation.is_write
    lease: list[Lease] = []

    def lease_meanwhile() -> None:
        assert gated.device.has_held.wait(WAIT_S)
        lease.append(store.working_set.lease("a", "rw"))
        gated.device.open()

    thread = threading.Thread(target=lease_meanwhile)
    thread.start()
    with pytest.raises(LeaseError, match="put of 'a', which is leased for writing"):
        store["a"] = numbers(40 * KiB)
    thread.join(WAIT_S)
    assert store.statistics().used_bytes == used
    assert lease[0].release()
    assert torch.equal(store["a"], numbers(100))


def test_one_grows_after_the_other(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    space = store.working_set.space
    space._is_growing = True
    num_waits = 0

    def end_of_the_other(deadline: Deadline, condition: Any, *arguments: Any) -> None:
        nonlocal num_waits
        num_waits += 1
        space._is_growing = False

    monkeypatch.setattr(Deadline, "wait", end_of_the_other)
    space.grow(8 * KiB, scratch=False)
    assert num_waits == 1 and space.free_nbytes >= 8 * KiB


def test_scratch_space_can_be_reserved(store: Store) -> None:
    store.reserve_space(64 * KiB, scratch=True)
    assert store.working_set.space.free_nbytes >= 64 * KiB


# -- opening -------------------------------------------------------------------------------------------------------


def test_parts_are_closed_although_a_device_does_not_answer(disk: SimulatedDisk) -> None:
    class Stuck(MemoryDevice):
        is_stuck = True

        def close(self) -> None:
            if self.is_stuck:
                raise DeadlineError("scripted")
            super().close()

    arena, stuck, other, closed = Arena(1 * MiB), Stuck(disk, 0), MemoryDevice(disk, 1), list[str]()
    parts = Parts(arena, [stuck, other], None)
    with pytest.raises(DeadlineError, match="scripted"):
        parts.close(lambda: closed.append("arena"))
    assert "closed" in repr(other) and not closed
    stuck.is_stuck = False
    parts.close(arena.close)


def test_there_is_nothing_to_read_without_commits(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match='mode="r"'):
        Store(tmp_path / "swap", dram="8MiB", durable=False, mode="r")


def test_the_budget_must_be_given_where_the_kernel_does_not_say_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "free_memory", lambda: 0)
    with pytest.raises(CapacityError, match="give a larger dram="):
        dram_budget(None)


def test_a_budget_of_more_than_the_memory_there_is_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CapacityError, match=r"2.0 TiB; this process can have .* of memory in all"):
        Store(tmp_path / "store", dram="2000GiB")
    assert not (tmp_path / "store").exists()

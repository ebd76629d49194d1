"""What is in DRAM under the budget, what goes first, and who gets memory when there is none."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from tests.devices.simulated_disk import SimulatedDisk
from tests.store.rig import WAIT_S, await_true, beside, numbers, read_key, simulated_store, stored, write_key
from tiered.bytes.arena import Buffer
from tiered.errors import CapacityError, DeadlineError, UsageError
from tiered.store.residency.residency import Residency
from tiered.store.store import Store
from tiered.units import KiB

BOTH_ARENAS = True

PAGE = 4 * KiB
BUDGET = 16 * PAGE  # of the stores here


# The budget


def test_more_tensors_than_the_budget_swap_in_and_out(working_set: Residency) -> None:
    for i in range(50):
        write_key(working_set, f"k{i}", 2 * PAGE, i)
    assert [read_key(working_set, f"k{i}") for i in range(50)] == list(range(50))
    statistics = working_set.statistics()
    assert statistics.peak_bytes <= BUDGET
    assert 98 * PAGE <= statistics.swaps.swap_out_bytes <= 100 * PAGE  # each once, the last perhaps not yet
    assert statistics.swaps.demand_bytes >= 80 * PAGE


def test_clean_tensors_are_dropped_without_being_written_again(working_set: Residency) -> None:
    for i in range(12):
        write_key(working_set, f"k{i}", 2 * PAGE, i)
    stored(working_set, *(f"k{i}" for i in range(12)))
    before = working_set.statistics().swaps.swap_out_bytes
    for _ in range(3):
        for i in range(12):
            read_key(working_set, f"k{i}")
    assert working_set.statistics().swaps.swap_out_bytes == before


def test_the_least_recently_used_goes_first(working_set: Residency) -> None:
    for key in "abcd":
        write_key(working_set, key, 4 * PAGE, 1)
    stored(working_set, *"abcd")
    for key in "abcd":
        read_key(working_set, key)
    read_key(working_set, "a")
    working_set.unreserve(working_set.reserve(4 * PAGE))
    assert [key for key in "abcd" if working_set.is_resident(key)] == ["a", "c", "d"]


def test_what_was_swapped_out_by_hint_goes_first(working_set: Residency) -> None:
    for key in "abcd":
        write_key(working_set, key, 4 * PAGE, 1)
    working_set.swap_out("abcd")
    for key in "abcd":
        read_key(working_set, key)
    working_set.swap_out(["d"])
    working_set.unreserve(working_set.reserve(4 * PAGE))
    assert [key for key in "abcd" if working_set.is_resident(key)] == ["a", "b", "c"]


@pytest.mark.parametrize("place", ["leased", "seen", "in DRAM", "on NVMe"])
def test_bytes_that_are_dropped_leave_a_key_without_bytes_and_are_not_written(
    place: str, working_set: Residency
) -> None:
    working_set.create("a", 4 * PAGE, scratch=True)  # more than an eighth of the budget: it would be written ahead
    for content in range(3):
        before = working_set.statistics()
        lease = working_set.lease_anew("a")
        lease.tensor.fill_(content)
        seen = lease.tensor if place == "seen" else None
        if place == "in DRAM" or place == "on NVMe":
            lease.release()
        if place == "on NVMe":
            stored(working_set, "a")
            working_set.unreserve(working_set.reserve(BUDGET))
            assert working_set.entries["a"].landing
        assert working_set.has_bytes("a")
        working_set.drop_bytes("a", lease if place in ("leased", "seen") else None)
        assert working_set.has("a") and not working_set.has_bytes("a")
        entry = working_set.entries["a"]
        assert entry.residence is entry.row is entry.landing is None
        with pytest.raises(UsageError, match="no bytes yet"):
            working_set.lease("a", "r")
        after = working_set.statistics()
        if place in ("leased", "seen"):
            assert after.swaps.swap_out_bytes == before.swaps.swap_out_bytes
        if seen is not None:
            assert after.orphan_bytes == 4 * PAGE and bool((seen == content).all())
            del seen
        assert working_set.statistics().arena_bytes == before.arena_bytes


def test_prefetch_leaves_room_for_what_is_leased_before_its_use(working_set: Residency) -> None:
    for key in "ab":
        write_key(working_set, key, 6 * PAGE, 1)
    stored(working_set, *"ab")
    working_set.unreserve(working_set.reserve(BUDGET))  # drives both out
    assert working_set.prefetch("ab", {"a": 10 * PAGE, "b": 5 * PAGE}) == 6 * PAGE
    working_set.unreserve(working_set.reserve(BUDGET))
    assert working_set.prefetch("ab", {"a": 4 * PAGE, "b": 4 * PAGE}) == 12 * PAGE


def test_prefetch_stops_at_the_first_that_does_not_fit(working_set: Residency) -> None:
    for key in "abc":
        write_key(working_set, key, 6 * PAGE, 1)
    write_key(working_set, "small", 2 * PAGE, 1)
    stored(working_set, *"abc", "small")
    lease = working_set.lease("a", "r")
    working_set.hold("a")
    before = working_set.statistics().swaps
    assert working_set.prefetch(["a", "no such key", "b", "c", "small"]) >= 12 * PAGE
    after = working_set.statistics().swaps
    assert after.num_prefetches - before.num_prefetches >= 1
    assert working_set.statistics().arena_bytes <= BUDGET
    lease.release()


def test_held_keys_are_neither_evicted_nor_written_before_a_commit(store: Store, working_set: Residency) -> None:
    working_set.create("held", 4 * PAGE)
    working_set.hold(["held"])
    working_set.lease("held", "w").release()
    working_set.swap_out(["held"])
    for i in range(20):
        write_key(working_set, f"k{i}", 2 * PAGE, i)
    assert working_set.is_resident("held")
    record = next(record for record in store.records() if record.name == "held")
    assert record.residency == "dirty"
    assert record.held
    store.commit()
    assert next(record for record in store.records() if record.name == "held").residency == "clean"
    with pytest.raises(CapacityError, match=r"16\.0 KiB held"):
        working_set.reserve(BUDGET)
    working_set.release_hold(["held"])
    working_set.unreserve(working_set.reserve(BUDGET))
    assert not working_set.is_resident("held")


def test_a_full_budget_is_a_capacity_error_that_names_who_has_it(working_set: Residency) -> None:
    leases = []
    for i in range(4):
        working_set.create(f"k{i}", 4 * PAGE)
        leases.append(working_set.lease(f"k{i}", "w"))
    write_more = lambda: working_set.create("more", PAGE) or working_set.lease("more", "w")  # noqa: E731
    with pytest.raises(CapacityError, match=r"no room for 4.0 KiB in the DRAM budget of 64.0 KiB.*'k0', 'k1'"):
        write_more()
    leases.pop().release()
    assert write_more().release()
    for lease in leases:
        lease.release()


def test_a_tensor_larger_than_the_budget_cannot_be_leased(working_set: Residency) -> None:
    working_set.create("huge", BUDGET + 1)
    with pytest.raises(CapacityError, match=r"no room .* even when nothing else is in it; give dram= of 69,632 bytes"):
        working_set.lease("huge", "w")


def test_reclaimers_are_asked_when_nothing_else_helps_and_without_locks(working_set: Residency) -> None:
    leases = []
    for i in range(4):
        working_set.create(f"k{i}", 4 * PAGE)
        leases.append(working_set.lease(f"k{i}", "w"))
    asked: list[int] = []

    def reclaim(nbytes: int) -> bool:
        asked.append(nbytes)
        working_set.statistics()  # would deadlock under the lock
        if not leases:
            return False
        return leases.pop().release()

    working_set.add_reclaimer(lambda nbytes: False)
    working_set.add_reclaimer(reclaim)
    write_key(working_set, "more", 7 * PAGE, 9)
    assert asked == [7 * PAGE] * 2
    assert read_key(working_set, "k3") is not None
    for lease in leases:
        lease.release()


def test_who_needs_memory_waits_for_another_threads_lease(working_set: Residency) -> None:
    write_key(working_set, "a", 12 * PAGE, 1)
    has_it, may_go = threading.Event(), threading.Event()

    def hold_it() -> None:
        lease = working_set.lease("a", "rw")
        has_it.set()
        assert may_go.wait(WAIT_S)
        lease.release()

    with beside(hold_it):
        assert has_it.wait(WAIT_S)
        with beside(lambda: working_set.unreserve(working_set.reserve(8 * PAGE))):
            await_true(lambda: working_set.num_waiting == 1)
            assert working_set.prefetch([]) == 0
            may_go.set()


def test_the_thread_that_all_others_wait_for_does_not_wait_for_them(working_set: Residency) -> None:
    working_set.create("kept", 12 * PAGE)
    lease = working_set.lease("kept", "w")
    view = lease.tensor[:1]
    lease.release()
    may_ask = threading.Event()

    def ask() -> None:
        assert may_ask.wait(WAIT_S)
        working_set.reserve(8 * PAGE)

    with pytest.raises(CapacityError, match=r"48\.0 KiB \('kept'\) kept alive by tensors made from past leases"):
        with beside(ask) as (worker,), working_set.waiting_for(worker):  # the view is this thread's, which only waits
            may_ask.set()
            worker.join(WAIT_S)
    del view


def test_waiting_for_another_threads_lease_has_an_end_that_says_who_has_the_memory() -> None:
    with simulated_store(budget_nbytes=BUDGET, deadline_s=0.2) as store:
        working_set = store.working_set
        working_set.create("kept", 12 * PAGE)
        lease = working_set.lease("kept", "w")
        with pytest.raises(DeadlineError, match=r"Other threads did not give back.* 48\.0 KiB \('kept'\) leased"):
            with beside(lambda: working_set.reserve(8 * PAGE)):
                pass
        lease.release()


def test_nobody_waits_for_what_another_thread_reserved_for_good(working_set: Residency) -> None:
    buffers: list[Buffer] = []
    with beside(lambda: buffers.append(working_set.reserve(12 * PAGE, is_lasting=True))):
        pass
    with pytest.raises(CapacityError, match=r"48\.0 KiB reserved"):
        working_set.reserve(8 * PAGE)
    working_set.unreserve(buffers[0])


def test_what_lingers_in_a_cycle_of_references_is_collected_for_want_of_room(working_set: Residency) -> None:
    working_set.create("kept", 12 * PAGE)
    lease = working_set.lease("kept", "w")
    cycle: list[object] = [lease.tensor[:1]]
    cycle.append(cycle)
    lease.release()
    del cycle
    gc.disable()
    try:
        working_set.unreserve(working_set.reserve(8 * PAGE))
    finally:
        gc.enable()


# What there is room for


def test_a_shortage_is_what_finds_no_room_beside_what_is_leased_and_held(working_set: Residency) -> None:
    """Whatever else is resident, dirty or clean, would make way, and so would the keys that are asked for."""
    for key in ("a", "b", "c", "d"):
        write_key(working_set, key, 4 * PAGE, 1)
    assert working_set.shortage({"a": 4 * PAGE, "x": 12 * PAGE}) == 0
    assert working_set.shortage({"a": 4 * PAGE, "x": 12 * PAGE, "y": PAGE}) == PAGE
    lease = working_set.lease("a", "r")
    working_set.lease("b", "r").release()
    working_set.hold(["b"])
    keys = {"a": 4 * PAGE, "b": 4 * PAGE, "c": 4 * PAGE}
    assert working_set.shortage({**keys, "x": 4 * PAGE}) == 0  # a and b have their room
    assert working_set.shortage({"c": 4 * PAGE, "x": 4 * PAGE, "y": 3 * PAGE}) == 3 * PAGE
    lease.release()
    del lease
    assert working_set.shortage({"c": 4 * PAGE, "x": 8 * PAGE}) == 0
    assert working_set.has("a") and not working_set.has("x")


# Scratch


def test_scratch_keys_are_in_no_commit_and_not_in_the_mapping(store: Store, working_set: Residency) -> None:
    write_key(working_set, "gradient", 4 * PAGE, 3, scratch=True)
    stored(working_set, "gradient")
    assert "gradient" not in store
    assert len(store) == 0
    store.commit()
    assert store.statistics().used_bytes == 4 * PAGE
    assert read_key(working_set, "gradient") == 3
    working_set.delete(["gradient"])
    assert store.statistics().used_bytes == 0


def test_a_scratch_key_is_rewritten_in_place(working_set: Residency, store: Store) -> None:
    for value in range(5):
        write_key(working_set, "a", 4 * PAGE, value, scratch=True)
        lease = working_set.lease("a", "rw")
        lease.tensor.add_(1)
        assert lease.release()
        stored(working_set, "a")
        assert store.statistics().used_bytes == 4 * PAGE
        assert read_key(working_set, "a") == value + 1


def test_a_store_without_commits_makes_every_key_scratch() -> None:
    disk = SimulatedDisk()
    with simulated_store(disk, durable=False, budget_nbytes=BUDGET) as store:
        write_key(store.working_set, "a", 4 * PAGE, 1)
        store["b"] = numbers(3 * PAGE)
        stored(store.working_set, "a", "b")
        assert set(store) == {"a", "b"}
        assert torch.equal(store["b"], numbers(3 * PAGE))
        for call in (store.commit, store.rollback, store.resume):
            with pytest.raises(UsageError, match="durable=False"):
                call()

"""What is in DRAM, who may use it, what goes first, and what happens when a device is slow or fails."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator, Mapping

import pytest
import torch

from tests.store.rig import WAIT_S, GatedDevice, numbers, simulated_store
from tiered.bytes.device.base import Device, IOClass
from tiered.bytes.device.memory import SimulatedDisk
from tiered.errors import (
    CapacityError,
    ClosedError,
    DeadlineError,
    DeviceError,
    LeaseError,
    UsageError,
)
from tiered.store.store import Store
from tiered.store.working_set import WorkingSet
from tiered.units import KiB

PAGE = 4 * KiB
BUDGET = 16 * PAGE


class Gated:
    """A store over one gated device."""

    def __init__(self, *, deadline_s: float = WAIT_S, durable: bool = True) -> None:
        self.gate: GatedDevice
        self.store = simulated_store(budget_nbytes=BUDGET, deadline_s=deadline_s, durable=durable, wrap=self._wrap)
        self.working_set = self.store.working_set

    def _wrap(self, device: Device) -> Device:
        self.gate = GatedDevice(device)
        return self.gate


@pytest.fixture
def gated() -> Iterator[Gated]:
    made = Gated()
    yield made
    made.gate.fail = lambda operation: None
    made.gate.open()
    made.store.close()


@pytest.fixture
def store() -> Iterator[Store]:
    with simulated_store(budget_nbytes=BUDGET) as made:
        yield made


@pytest.fixture
def working_set(store: Store) -> WorkingSet:
    return store.working_set


def write(working_set: WorkingSet, key: str, nbytes: int, value: int, *, scratch: bool = False) -> None:
    working_set.create(key, nbytes, scratch=scratch)
    lease = working_set.lease(key, "w")
    lease.tensor.fill_(value)
    assert lease.release()


def read(working_set: WorkingSet, key: str) -> int:
    lease = working_set.lease(key, "r")
    found = lease.tensor.unique().tolist()
    assert lease.release()
    assert len(found) == 1, f"{key} holds {found}"
    return int(found[0])


def stored(working_set: WorkingSet, *keys: str) -> None:
    """Bring ``keys`` to the device and out of DRAM."""
    working_set.swap_out(keys)
    buffer = working_set.reserve(working_set.budget_bytes)
    working_set.unreserve(buffer)
    assert not any(working_set.is_resident(key) for key in keys if working_set.records.entries[key].nbytes)


# Leases


def test_a_lease_is_typed_and_shaped_and_starts_on_a_page(working_set: WorkingSet) -> None:
    working_set.create("a", 24, dtype=torch.float32, shape=(2, 3))
    lease = working_set.lease("a", "w")
    assert lease.tensor.dtype == torch.float32
    assert lease.tensor.shape == (2, 3)
    assert lease.tensor.is_contiguous()
    assert lease.tensor.data_ptr() % PAGE == 0
    assert not lease.tensor._is_view()
    assert lease.release()


@pytest.mark.parametrize(("nbytes", "shape"), [(0, (0, 5)), (4, ()), (4, (1,)), (40_000, (100, 100))])
def test_odd_shapes_can_be_leased_and_come_back_from_the_device(
    working_set: WorkingSet, nbytes: int, shape: tuple[int, ...]
) -> None:
    working_set.create("a", nbytes, dtype=torch.float32, shape=shape)
    lease = working_set.lease("a", "w")
    lease.tensor.fill_(7)
    assert lease.release()
    stored(working_set, "a")
    lease = working_set.lease("a", "r")
    assert torch.equal(lease.tensor, torch.full(shape, 7.0))
    assert lease.release()


def test_bytes_that_do_not_fit_the_shape_are_refused(working_set: WorkingSet) -> None:
    with pytest.raises(ValueError, match="expected 24 bytes"):
        working_set.create("a", 23, dtype=torch.float32, shape=(2, 3))


def test_an_unknown_mode_is_refused(working_set: WorkingSet) -> None:
    with pytest.raises(ValueError, match="expected mode"):
        working_set.lease("a", "x")


def test_a_key_without_bytes_can_only_be_written(working_set: WorkingSet) -> None:
    working_set.create("a", PAGE)
    for mode in ("r", "rw"):
        with pytest.raises(UsageError, match="never written"):
            working_set.lease("a", mode)
    with pytest.raises(KeyError):
        working_set.lease("b", "r")


def test_create_replaces_an_existing_key(working_set: WorkingSet) -> None:
    write(working_set, "a", PAGE, 1)
    working_set.create("a", 2 * PAGE)
    with pytest.raises(UsageError, match="never written"):
        working_set.lease("a", "r")
    write(working_set, "a", 3 * PAGE, 2)
    assert read(working_set, "a") == 2


@pytest.mark.parametrize(
    ("open_mode", "mode"), [("r", "w"), ("r", "rw"), ("w", "r"), ("rw", "r"), ("rw", "rw"), ("w", "w")]
)
def test_leases_that_conflict_are_refused_until_the_first_is_released(
    working_set: WorkingSet, open_mode: str, mode: str
) -> None:
    write(working_set, "a", PAGE, 1)
    lease = working_set.lease("a", open_mode)
    with pytest.raises(LeaseError, match="'a' is leased for"):
        working_set.lease("a", mode)
    lease.release()
    assert working_set.lease("a", mode).release()


def test_leases_for_reading_share_bytes(working_set: WorkingSet) -> None:
    write(working_set, "a", PAGE, 1)
    first, second = working_set.lease("a", "r"), working_set.lease("a", "r")
    assert first.tensor.data_ptr() == second.tensor.data_ptr()
    first.release()
    second.release()


def test_release_says_whether_the_lease_has_ended_and_is_idempotent(working_set: WorkingSet) -> None:
    write(working_set, "a", PAGE, 1)
    lease = working_set.lease("a", "rw")
    alias = lease.tensor[3:5]
    assert not lease.release()
    assert not lease.release()
    del alias
    assert lease.release()
    with pytest.raises(LeaseError, match="was released"):
        lease.tensor.zero_()


def test_a_dropped_lease_is_a_released_one(working_set: WorkingSet) -> None:
    write(working_set, "a", PAGE, 1)
    lease = working_set.lease("a", "rw")
    del lease
    assert working_set.lease("a", "rw").release()


def test_lingering_readers_keep_their_bytes_when_the_key_is_written(working_set: WorkingSet) -> None:
    write(working_set, "a", PAGE, 1)
    lease = working_set.lease("a", "r")
    alias = lease.tensor[:8]
    lease.release()
    lease = working_set.lease("a", "rw")
    assert lease.tensor[0] == 1  # copied
    lease.tensor.fill_(2)
    assert lease.release()
    assert alias.tolist() == [1] * 8
    assert read(working_set, "a") == 2
    assert working_set.statistics().orphan_bytes == PAGE
    del alias, lease
    assert working_set.statistics().orphan_bytes == 0


def test_lingering_writers_are_joined(working_set: WorkingSet) -> None:
    write(working_set, "a", PAGE, 1)
    first = working_set.lease("a", "rw")
    alias = first.tensor[:1]
    first.release()
    second = working_set.lease("a", "rw")
    third_party = second.tensor.data_ptr()
    assert third_party == alias.data_ptr()
    assert second.release()
    reader = working_set.lease("a", "r")
    assert reader.tensor.data_ptr() == third_party
    assert reader.release()
    working_set.swap_out(["a"])
    assert working_set.statistics().writing_bytes == working_set.statistics().swaps.swap_out_bytes == 0
    del alias
    working_set.swap_out(["a"])
    assert working_set.statistics().swaps.swap_out_bytes == PAGE


def test_the_end_of_a_lease_is_noticed_from_a_garbage_collection(working_set: WorkingSet) -> None:
    write(working_set, "a", PAGE, 1)
    lease = working_set.lease("a", "rw")
    cycle: list[object] = [lease.tensor]
    cycle.append(cycle)
    lease.release()
    del cycle
    gc.collect()
    assert lease.release()


def test_two_threads_that_write_different_keys_do_not_meet(working_set: WorkingSet) -> None:
    failures: list[BaseException] = []

    def work(key: str) -> None:
        try:
            for i in range(100):
                write(working_set, key, 3 * PAGE, i)
                assert read(working_set, key) == i
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(key,)) for key in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert not failures


# The budget


def test_more_tensors_than_the_budget_swap_in_and_out(working_set: WorkingSet) -> None:
    for i in range(50):
        write(working_set, f"k{i}", 2 * PAGE, i)
    assert [read(working_set, f"k{i}") for i in range(50)] == list(range(50))
    statistics = working_set.statistics()
    assert statistics.peak_bytes <= BUDGET
    assert 98 * PAGE <= statistics.swaps.swap_out_bytes <= 100 * PAGE  # each once, the last perhaps not yet
    assert statistics.swaps.demand_bytes >= 80 * PAGE


def test_clean_tensors_are_dropped_without_being_written_again(working_set: WorkingSet) -> None:
    for i in range(12):
        write(working_set, f"k{i}", 2 * PAGE, i)
    stored(working_set, *(f"k{i}" for i in range(12)))
    before = working_set.statistics().swaps.swap_out_bytes
    for _ in range(3):
        for i in range(12):
            read(working_set, f"k{i}")
    assert working_set.statistics().swaps.swap_out_bytes == before


def test_the_least_recently_used_goes_first(working_set: WorkingSet) -> None:
    for key in "abcd":
        write(working_set, key, 4 * PAGE, 1)
    stored(working_set, *"abcd")
    for key in "abcd":
        read(working_set, key)
    read(working_set, "a")
    working_set.unreserve(working_set.reserve(4 * PAGE))
    assert [key for key in "abcd" if working_set.is_resident(key)] == ["a", "c", "d"]


def test_what_was_swapped_out_by_hint_goes_first(working_set: WorkingSet) -> None:
    for key in "abcd":
        write(working_set, key, 4 * PAGE, 1)
    working_set.swap_out("abcd")
    for key in "abcd":
        read(working_set, key)
    working_set.swap_out(["d"])
    working_set.unreserve(working_set.reserve(4 * PAGE))
    assert [key for key in "abcd" if working_set.is_resident(key)] == ["a", "b", "c"]


class _Stubborn:
    """Evicts the largest name, and nothing for a prefetch of "x"."""

    def victim(self, evictable: Mapping[str, int], incoming: str | None) -> str | None:
        assert all(nbytes == 4 * PAGE for nbytes in evictable.values())
        return None if incoming == "x" else max(evictable, default=None)


def test_a_policy_chooses_the_victim_and_may_refuse_a_prefetch(working_set: WorkingSet) -> None:
    for key in "abcdx":
        write(working_set, key, 4 * PAGE, 1)
    stored(working_set, *"abcdx")
    working_set.set_policy(_Stubborn())
    assert working_set.prefetch("abcd") == 16 * PAGE
    assert working_set.prefetch("x") == 0
    assert read(working_set, "x") == 1
    assert [key for key in "abcd" if working_set.is_resident(key)] == ["a", "b", "c"]


def test_prefetch_stops_at_the_first_that_does_not_fit(working_set: WorkingSet) -> None:
    for key in "abc":
        write(working_set, key, 6 * PAGE, 1)
    write(working_set, "small", 2 * PAGE, 1)
    stored(working_set, *"abc", "small")
    lease = working_set.lease("a", "r")
    working_set.hold("a")
    before = working_set.statistics().swaps
    assert working_set.prefetch(["a", "no such key", "b", "c", "small"]) >= 12 * PAGE
    after = working_set.statistics().swaps
    assert after.num_prefetches - before.num_prefetches >= 1
    assert working_set.statistics().arena_bytes <= BUDGET
    lease.release()


def test_held_keys_are_neither_evicted_nor_written_before_a_commit(store: Store, working_set: WorkingSet) -> None:
    working_set.create("held", 4 * PAGE)
    working_set.hold(["held"])
    working_set.lease("held", "w").release()
    working_set.swap_out(["held"])
    for i in range(20):
        write(working_set, f"k{i}", 2 * PAGE, i)
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


def test_a_full_budget_is_a_capacity_error_that_names_who_has_it(working_set: WorkingSet) -> None:
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


def test_a_tensor_larger_than_the_budget_cannot_be_leased(working_set: WorkingSet) -> None:
    working_set.create("huge", BUDGET + 1)
    with pytest.raises(CapacityError, match="no room"):
        working_set.lease("huge", "w")


def test_reclaimers_are_asked_when_nothing_else_helps_and_without_locks(working_set: WorkingSet) -> None:
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
    write(working_set, "more", 7 * PAGE, 9)
    assert asked == [7 * PAGE] * 2
    assert read(working_set, "k3") is not None
    for lease in leases:
        lease.release()


def test_who_needs_memory_waits_for_another_threads_lease(working_set: WorkingSet) -> None:
    write(working_set, "a", 12 * PAGE, 1)
    has_it, may_go = threading.Event(), threading.Event()

    def hold_it() -> None:
        lease = working_set.lease("a", "rw")
        has_it.set()
        assert may_go.wait(WAIT_S)
        lease.release()

    thread = threading.Thread(target=hold_it)
    thread.start()
    assert has_it.wait(WAIT_S)
    got: list[object] = []
    waiter = threading.Thread(target=lambda: got.append(working_set.reserve(8 * PAGE)))
    waiter.start()
    while not working_set.room.num_waiting:
        assert waiter.is_alive()
    assert working_set.prefetch([]) == 0
    may_go.set()
    thread.join(WAIT_S)
    waiter.join(WAIT_S)
    assert got
    working_set.unreserve(got[0])  # type: ignore[arg-type]


def test_who_needs_memory_notices_that_another_threads_tensor_has_died(working_set: WorkingSet) -> None:
    write(working_set, "a", 12 * PAGE, 1)
    working_set.hold(["a"])
    kept: list[torch.Tensor] = []

    def linger() -> None:
        lease = working_set.lease("a", "rw")
        kept.append(lease.tensor[:1])
        lease.release()

    thread = threading.Thread(target=linger)
    thread.start()
    thread.join(WAIT_S)
    working_set.release_hold(["a"])
    got: list[object] = []
    waiter = threading.Thread(target=lambda: got.append(working_set.reserve(8 * PAGE)))
    waiter.start()
    while not working_set.room.num_waiting:
        assert waiter.is_alive()
    kept.clear()  # a finalizer cannot wake the waiter: it looks
    waiter.join(WAIT_S)
    working_set.unreserve(got[0])  # type: ignore[arg-type]


def test_reserved_bytes_count_and_come_back(working_set: WorkingSet) -> None:
    buffer = working_set.reserve(5 * PAGE - 1)
    assert buffer.nbytes == 5 * PAGE
    assert working_set.statistics().arena_bytes == 5 * PAGE
    with pytest.raises(CapacityError, match=r"20\.0 KiB reserved"):
        working_set.reserve(12 * PAGE)
    working_set.unreserve(buffer)
    assert working_set.statistics().arena_bytes == 0


# Write-back


def test_dirty_bytes_above_an_eighth_of_the_budget_are_written(working_set: WorkingSet) -> None:
    write(working_set, "a", 2 * PAGE, 1)
    assert working_set.statistics().dirty_bytes == 2 * PAGE  # an eighth
    write(working_set, "b", PAGE, 2)
    assert working_set.statistics().dirty_bytes == PAGE
    assert working_set.statistics().swaps.swap_out_bytes == 2 * PAGE
    assert working_set.is_resident("a")


def test_bytes_are_not_written_while_somebody_may_change_them(gated: Gated) -> None:
    write(gated.working_set, "a", PAGE, 1)
    lease = gated.working_set.lease("a", "rw")
    gated.working_set.swap_out(["a"])
    assert "write" not in gated.gate.events
    lease.release()
    gated.working_set.swap_out(["a"])
    assert gated.gate.events.count("write") == 1


def test_a_writer_waits_for_the_write_in_flight_and_readers_do_not(gated: Gated) -> None:
    write(gated.working_set, "a", PAGE, 1)
    gated.gate.hold = lambda operation: operation.is_write
    gated.working_set.swap_out(["a"])
    assert gated.gate.has_held.wait(WAIT_S)
    assert read(gated.working_set, "a") == 1
    leased = threading.Event()

    def change() -> None:
        lease = gated.working_set.lease("a", "rw")
        leased.set()
        lease.tensor.fill_(2)
        lease.release()

    thread = threading.Thread(target=change)
    thread.start()
    assert not leased.is_set()
    gated.gate.open()
    thread.join(WAIT_S)
    assert leased.is_set()
    assert read(gated.working_set, "a") == 2


def test_at_most_one_write_of_a_key_is_in_flight(gated: Gated) -> None:
    write(gated.working_set, "a", PAGE, 1)
    gated.gate.hold = lambda operation: operation.is_write
    gated.working_set.swap_out(["a"])
    gated.working_set.swap_out(["a"])
    assert len(gated.gate.held) == 1


def test_a_failed_write_leaves_the_tensor_resident_and_is_raised_by_the_next_call(gated: Gated) -> None:
    write(gated.working_set, "a", PAGE, 1)
    gated.gate.fail = lambda operation: DeviceError("the drive said no") if operation.is_write else None
    gated.working_set.swap_out(["a"])
    gated.gate.fail = lambda operation: None
    assert gated.working_set.is_resident("a")
    with pytest.raises(DeviceError, match="said no"):
        gated.working_set.lease("a", "r")
    assert read(gated.working_set, "a") == 1
    gated.working_set.swap_out(["a"])
    stored(gated.working_set, "a")
    assert read(gated.working_set, "a") == 1
    assert gated.store.statistics().quarantined_bytes == PAGE  # where the failed write went, nobody writes again


def test_a_full_budget_of_unwritable_bytes_raises_why(gated: Gated) -> None:
    gated.gate.fail = lambda operation: DeviceError("the drive said no") if operation.is_write else None
    with pytest.raises(DeviceError, match="said no"):
        for i in range(20):
            write(gated.working_set, f"k{i}", 2 * PAGE, i)


# Swapping in


def test_a_failed_read_gives_its_buffer_back_and_can_be_tried_again(gated: Gated) -> None:
    write(gated.working_set, "a", 2 * PAGE, 1)
    stored(gated.working_set, "a")
    gated.gate.fail = lambda operation: None if operation.is_write else DeviceError("cannot read")
    with pytest.raises(DeviceError, match="cannot read"):
        gated.working_set.lease("a", "r")
    assert gated.working_set.statistics().arena_bytes == 0
    assert gated.working_set.prefetch(["a"]) == 2 * PAGE  # a hint does not raise
    assert gated.working_set.statistics().arena_bytes == 0
    gated.gate.fail = lambda operation: None
    assert read(gated.working_set, "a") == 1


def test_a_prefetch_is_joined_by_the_lease_that_needs_it(gated: Gated) -> None:
    write(gated.working_set, "a", PAGE, 1)
    stored(gated.working_set, "a")
    gated.gate.events.clear()
    gated.gate.hold = lambda operation: operation.io_class is IOClass.PREFETCH
    assert gated.working_set.prefetch(["a"]) == PAGE
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(read(gated.working_set, "a")))
    thread.start()
    gated.gate.open()
    thread.join(WAIT_S)
    assert found == [1]
    assert gated.gate.events == ["read"]


def test_waiting_for_a_read_ends_with_the_deadline(caplog: pytest.LogCaptureFixture) -> None:
    gated = Gated(deadline_s=0.05)
    write(gated.working_set, "a", PAGE, 1)
    stored(gated.working_set, "a")
    gated.gate.hold = lambda operation: True
    with pytest.raises(DeadlineError, match=r"lease of 'a' for 'r' did not happen within 0.05 s"):
        gated.working_set.lease("a", "r")
    assert "takes long" in caplog.text
    assert gated.working_set.statistics().arena_bytes == PAGE  # the buffer belongs to the read until it completes
    gated.gate.open()
    assert read(gated.working_set, "a") == 1
    gated.store.close()


def test_waiting_for_memory_ends_with_the_deadline() -> None:
    gated = Gated(deadline_s=0.05)
    gated.gate.hold = lambda operation: True
    write(gated.working_set, "a", 10 * PAGE, 1)
    assert gated.gate.held
    with pytest.raises(DeadlineError, match=r"reservation of 40.0 KiB"):
        gated.working_set.reserve(10 * PAGE)
    gated.gate.open()
    gated.store.close()


def test_a_claimed_tensor_is_not_evicted_before_its_caller_has_it() -> None:
    # Four threads want two tensors at a time out of a budget of two: each read must reach its caller.
    with simulated_store(budget_nbytes=BUDGET) as store:
        for i in range(8):
            write(store.working_set, f"k{i}", 8 * PAGE, i)
        failures: list[object] = []

        def work(start: int) -> None:
            for i in range(60):
                key = (start + i) % 8
                if read(store.working_set, f"k{key}") != key:
                    failures.append(key)

        threads = [threading.Thread(target=work, args=(start,)) for start in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert not failures
        assert not any(thread.is_alive() for thread in threads)


# Scratch


def test_scratch_keys_are_in_no_commit_and_not_in_the_mapping(store: Store, working_set: WorkingSet) -> None:
    write(working_set, "gradient", 4 * PAGE, 3, scratch=True)
    stored(working_set, "gradient")
    assert "gradient" not in store
    assert len(store) == 0
    store.commit()
    assert store.statistics().used_bytes == 4 * PAGE
    assert read(working_set, "gradient") == 3
    working_set.delete(["gradient"])
    assert store.statistics().used_bytes == 0


def test_a_scratch_key_is_rewritten_in_place(working_set: WorkingSet, store: Store) -> None:
    for value in range(5):
        write(working_set, "a", 4 * PAGE, value, scratch=True)
        lease = working_set.lease("a", "rw")
        lease.tensor.add_(1)
        assert lease.release()
        stored(working_set, "a")
        assert store.statistics().used_bytes == 4 * PAGE
        assert read(working_set, "a") == value + 1


def test_a_store_without_commits_makes_every_key_scratch() -> None:
    disk = SimulatedDisk()
    with simulated_store(disk, durable=False, budget_nbytes=BUDGET) as store:
        write(store.working_set, "a", 4 * PAGE, 1)
        store["b"] = numbers(3 * PAGE)
        stored(store.working_set, "a", "b")
        assert set(store) == {"a", "b"}
        assert torch.equal(store["b"], numbers(3 * PAGE))
        for call in (store.commit, store.rollback, store.resume):
            with pytest.raises(UsageError, match="durable=False"):
                call()


# The end


def test_bytes_return_when_the_last_tensor_dies_also_after_close() -> None:
    store = simulated_store(budget_nbytes=BUDGET)
    write(store.working_set, "a", PAGE, 5)
    lease = store.working_set.lease("a", "r")
    alias = lease.tensor[2:4]
    lease.release()
    arena = store.working_set.residents.arena
    store.close()
    assert alias.tolist() == [5, 5]
    assert arena.leased_nbytes == PAGE
    del alias
    assert arena.leased_nbytes == 0


def test_an_open_lease_survives_close_and_can_be_released_after() -> None:
    store = simulated_store(budget_nbytes=BUDGET)
    write(store.working_set, "a", PAGE, 5)
    lease = store.working_set.lease("a", "r")
    store.close()
    assert lease.tensor[0] == 5
    assert lease.release()
    for call in (
        lambda: store.working_set.lease("a", "r"),
        lambda: store.working_set.reserve(1),
        lambda: store.working_set.create("b", 1),
        lambda: store.working_set.prefetch(["a"]),
    ):
        with pytest.raises(ClosedError):
            call()

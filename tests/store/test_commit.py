"""What a commit contains, and in which order it becomes durable."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from tests.devices.simulated_disk import SimulatedDisk
from tests.store.rig import WAIT_S, Counter, GatedStore, assert_holds, filled, numbers, simulated_store
from tiered.errors import (
    LeaseError,
)
from tiered.store.store import Store
from tiered.units import KiB

PAGE = 4 * KiB


# What is in a commit


def test_a_commit_survives_and_what_came_after_does_not(disk: SimulatedDisk) -> None:
    store = simulated_store(disk)
    values = filled(store)
    assert store.generation == 0
    assert store.commit({"step": 7}) == 1
    assert (store.generation, store.state) == (1, {"step": 7})
    filled(store, seed=1)
    store["new"] = numbers(PAGE)
    del store["ordinary"]
    with pytest.raises(ZeroDivisionError), store:
        raise ZeroDivisionError
    with simulated_store(disk) as store:
        assert_holds(store, values)
        assert (store.generation, store.state, store.resume()) == (1, {"step": 7}, {"step": 7})


def test_close_and_a_normal_exit_commit_what_changed(disk: SimulatedDisk) -> None:
    with simulated_store(disk) as store:
        values = filled(store)
        store.commit({"step": 1})
        values["inline"] = store["inline"] = numbers(90)
    with simulated_store(disk) as store:
        assert_holds(store, values)
        assert (store.generation, store.state) == (2, {"step": 1})
    with simulated_store(disk) as store:
        assert store.generation == 2  # nothing had changed


def test_leaving_by_an_exception_says_what_is_dropped(disk: SimulatedDisk, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ZeroDivisionError), simulated_store(disk) as store:
        filled(store)
        raise ZeroDivisionError
    assert "changes to 3 keys, 52.1 KiB, since generation 0 are dropped" in caplog.text


def test_an_unchanged_store_still_advances_with_its_state_and_writes_nothing(store: Store) -> None:
    filled(store)
    store.commit({"step": 1})
    before = store.statistics()
    assert store.commit({"step": 2}) == 2
    assert store.commit() == 3
    assert store.state == {"step": 2}
    assert store.statistics().write_bytes == before.write_bytes


def test_each_changed_byte_is_written_once_per_commit(store: Store) -> None:
    for i in range(5):
        store["a"] = numbers(3 * PAGE, i)
        with store.lease("a", "rw") as view:
            view.add_(1)
        before = store.statistics().write_bytes
        store.commit()
        assert store.statistics().write_bytes - before == 3 * PAGE


def test_a_state_that_cannot_be_kept_seals_nothing(store: Store) -> None:
    filled(store)
    with pytest.raises(TypeError, match=r"state\['model'\]"):
        store.commit({"model": object()})
    with pytest.raises(TypeError):
        store.commit([1])  # type: ignore[arg-type]
    assert store.generation == 0
    assert store.commit({"ok": (1, float("inf"), b"x")}) == 1
    assert store.state == {"ok": (1, float("inf"), b"x")}


def test_created_and_never_written_keys_are_in_no_commit(disk: SimulatedDisk) -> None:
    with simulated_store(disk) as store:
        store.working_set.create("nothing", PAGE)
        store["a"] = numbers(PAGE)
        assert set(store) == {"a"}
    with simulated_store(disk) as store:
        assert set(store) == {"a"}


@pytest.mark.parametrize("mode", ["w", "rw"])
def test_an_open_lease_for_writing_refuses_commit_rollback_put_and_delete(store: Store, mode: str) -> None:
    values = filled(store)
    store.commit()
    lease = store.working_set.lease("ordinary", mode)
    lease.tensor.copy_(values["ordinary"])
    calls: list[Callable[[], object]] = [
        store.commit,
        store.rollback,
        lambda: store.__setitem__("ordinary", numbers(1)),
        lambda: store.__delitem__("ordinary"),
        lambda: store["ordinary"],
    ]
    for call in calls:
        with pytest.raises(LeaseError, match="'ordinary'"):
            call()
    lease.release()
    assert_holds(store, values)
    store.commit()


def test_a_lingering_lease_for_writing_refuses_commit_and_not_rollback(store: Store) -> None:
    values = filled(store)
    store.commit()
    lease = store.working_set.lease("ordinary", "rw")
    alias = lease.tensor[:1]
    lease.release()
    with pytest.raises(LeaseError, match="'ordinary'"):
        store.commit()
    store.rollback()
    alias.fill_(1)
    assert_holds(store, values)
    del alias, lease


def test_leases_for_reading_do_not_block_a_commit(store: Store) -> None:
    values = filled(store)
    lease = store.working_set.lease("ordinary", "r")
    assert store.commit() == 1
    store["ordinary"] = numbers(2 * PAGE, 5)
    store.rollback()
    assert torch.equal(lease.tensor, values["ordinary"])
    lease.release()
    assert_holds(store, values)


# The order of things


def test_the_catalog_is_written_last_and_after_every_flush(gated: GatedStore) -> None:
    filled(gated.store)
    gated.events.clear()
    gated.store.commit()
    assert gated.events[-2:] == ["flush", "apply"]
    assert set(gated.events[:-2]) == {"write"}


def test_a_commit_in_the_background_contains_the_moment_it_was_asked_for(gated: GatedStore) -> None:
    store = gated.store
    counter = Counter(1)
    store.register("counter", counter)
    values = filled(store, seed=1)
    gated.catalog.may_apply.clear()
    assert store.commit({"step": 1}, wait=False) == 1
    counter.count = 2
    filled(store, seed=2)
    store["later"] = numbers(PAGE)
    del store["inline"]
    assert store.generation == 0
    gated.catalog.may_apply.set()
    store.wait_for_commit()
    assert store.generation == 1
    store.rollback()
    assert_holds(store, values)
    assert counter.count == 1


def test_a_writer_waits_until_its_sealed_bytes_have_landed(gated: GatedStore) -> None:
    store = gated.store
    store["a"] = numbers(PAGE, 1)
    gated.device.hold = lambda operation: operation.is_write
    store.commit(wait=False)
    assert gated.device.has_held.wait(WAIT_S)
    assert torch.equal(store["a"], numbers(PAGE, 1))  # readers do not wait

    def write(done: Callable[[], None]) -> None:
        with store.lease("a", "rw") as view:
            view.zero_()
        done()

    gated.let_through(write)
    store.rollback()
    assert torch.equal(store["a"], numbers(PAGE, 1))


def with_both_sets_in_use(gated: GatedStore) -> Store:
    """Return the store with one set of "a" committed and another sealed, whose commit waits for the catalog."""
    store = gated.store
    store["a"] = numbers(4 * PAGE, 1)
    store.commit()
    store["a"] = numbers(4 * PAGE, 2)
    gated.catalog.may_apply.clear()
    store.commit(wait=False)
    assert gated.catalog.reached.wait(WAIT_S)
    return store


def test_a_third_set_is_never_written(gated: GatedStore) -> None:
    store = with_both_sets_in_use(gated)
    store["a"] = numbers(4 * PAGE, 3)  # in DRAM
    store.working_set.swap_out(["a"])
    assert store.statistics().used_bytes == 8 * PAGE
    assert store.records()[0].residency == "dirty"
    gated.catalog.may_apply.set()
    store.wait_for_commit()
    store.working_set.swap_out(["a"])
    assert store.statistics().used_bytes == 8 * PAGE
    assert store.records()[0].residency == "clean"
    assert torch.equal(store["a"], numbers(4 * PAGE, 3))


def test_memory_is_had_by_waiting_for_the_commit_that_blocks_a_write(gated: GatedStore) -> None:
    store, full = with_both_sets_in_use(gated), gated.budget_nbytes
    store["a"] = numbers(4 * PAGE, 3)
    got: list[object] = []
    thread = threading.Thread(target=lambda: got.append(store.working_set.reserve(full)))
    thread.start()
    while not store.working_set.num_waiting:
        assert thread.is_alive()
    gated.catalog.may_apply.set()
    thread.join(WAIT_S)
    store.working_set.unreserve(got[0])  # type: ignore[arg-type]
    assert torch.equal(store["a"], numbers(4 * PAGE, 3))


def test_a_second_commit_waits_for_the_first(gated: GatedStore) -> None:
    store = gated.store
    gated.catalog.may_apply.clear()
    store.commit(wait=False)
    thread = threading.Thread(target=lambda: store.commit(wait=False))
    thread.start()
    assert gated.catalog.reached.wait(WAIT_S)
    assert not gated.events.count("apply")
    gated.catalog.may_apply.set()
    thread.join(WAIT_S)
    store.wait_for_commit()
    assert store.generation == 2

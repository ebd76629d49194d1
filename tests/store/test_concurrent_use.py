"""Many threads on one store with a budget for a few tensors, over real files: every reader sees what was written."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.devices.simulated_disk import SimulatedDisk
from tests.store.rig import (
    WAIT_S,
    GatedStore,
    await_true,
    beside,
    numbers,
    simulated_store,
    stored,
)
from tiered.bytes.device.base import Operation
from tiered.errors import ClosedError, LeaseError
from tiered.store.residency.entry import Granted
from tiered.store.store import Store
from tiered.store.values.streaming import VerifyReport
from tiered.units import KiB, MiB

PAGE = 4 * KiB


@pytest.mark.parametrize("commit", [True, False])
def test_what_is_being_verified_is_not_overwritten(commit: bool) -> None:
    gated = GatedStore()
    store = gated.store
    store["a"] = numbers(PAGE, 1)
    store["b"] = numbers(PAGE, 1)
    store.working_set.swap_out(store)
    store.working_set.unreserve(store.working_set.reserve(gated.budget_nbytes))
    gated.device.hold = lambda operation: not operation.is_write
    reports: list[VerifyReport] = []
    with beside(lambda: reports.append(store.verify())):
        assert gated.device.has_held.wait(WAIT_S)
        with store.lease("a", "w") as view:  # open bytes, which a write may go over again; not written at once
            view.copy_(numbers(PAGE, 2))
        store["b"] = numbers(3 * PAGE, 2)  # larger than what verify has seen so far
        if commit:
            store.commit()
        else:
            store.working_set.swap_out(store)
        gated.device.open()
    assert reports[0].is_clean
    assert torch.equal(store["a"], numbers(PAGE, 2))
    assert torch.equal(store["b"], numbers(3 * PAGE, 2))
    assert store.statistics().used_bytes == 4 * PAGE
    gated.close()


def test_a_get_in_another_thread_keeps_nobody_from_writing(store: Store) -> None:
    store["a"] = torch.zeros(6 * PAGE, dtype=torch.uint8)
    is_over = threading.Event()
    found: list[int] = []

    def get() -> None:
        while not is_over.is_set():
            try:
                found.append(int(store["a"].unique().numel()))
            except LeaseError:  # it is being written
                pass

    with beside(get):
        for value in range(50):
            with store.lease("a", mode="rw") as view:
                view.fill_(value)
        is_over.set()
    assert set(found) <= {1}
    assert int(store["a"].unique()) == 49


READS: dict[str, Callable[[Store], torch.Tensor]] = {
    "get": lambda store: store["a"],
    "get_many": lambda store: store.get_many(["a"])["a"],
    "read_part": lambda store: store.read_part("a", 0, 1000),
}


@pytest.mark.parametrize("read", READS)
def test_a_read_finds_a_key_that_has_become_too_large_for_the_budget(
    monkeypatch: pytest.MonkeyPatch, read: str
) -> None:
    """It had seen the small one in DRAM, and was about to copy that."""
    disk, large = SimulatedDisk(capacity_nbytes=16 * MiB, can_lose_power=False), numbers(10 * MiB, 1)
    with simulated_store(disk, budget_nbytes=9 * MiB) as store:
        store["a"] = numbers(12 * KiB)
        obtain = store.working_set.obtain

        def late(*arguments: Any, **options: Any) -> Granted:
            if store.working_set.entries["a"].nbytes == 12 * KiB:
                store["a"] = large  # as another thread may, here
            return obtain(*arguments, **options)

        monkeypatch.setattr(store.working_set, "obtain", late)
        found = READS[read](store)
        assert torch.equal(found, large[:1000] if read == "read_part" else large)


def test_what_comes_too_late_for_the_last_commit_is_refused(gated: GatedStore) -> None:
    store = gated.store
    store["a"] = numbers(12 * KiB)
    gated.catalog.may_apply.clear()
    late: list[Callable[[], object]] = [
        lambda: store.__setitem__("b", numbers(12 * KiB)),
        lambda: store.__setitem__("b", numbers(100)),
        lambda: store.__setitem__("b", numbers(60 * KiB)),
        lambda: store.put_many({"b": numbers(100), "c": numbers(100)}),
        lambda: store.pop("a"),
        lambda: store.lease("a", mode="rw").__enter__(),
    ]
    with beside(store.close):
        assert gated.catalog.reached.wait(WAIT_S)  # it is sealed
        for write in late:
            with pytest.raises(ClosedError, match="being closed"):
                write()
        assert torch.equal(store["a"], numbers(12 * KiB))
        gated.catalog.may_apply.set()
    gated.open()
    assert list(gated.store) == ["a"]


def test_closing_waits_for_a_commit_that_another_thread_has_sealed_meanwhile(gated: GatedStore) -> None:
    store = gated.store
    generations = store._generations
    real = generations._end_unchanged

    def commit_first() -> bool:
        gated.device.hold = lambda operation: operation.is_write
        assert store.commit({"n": 1}, wait=False) == 1
        return real()

    generations._end_unchanged = commit_first  # type: ignore[method-assign]
    store["a"] = numbers(PAGE)
    with beside(store.close):
        await_true(lambda: store.working_set.is_ending)
        assert store.generation == 0 and gated.device.has_held.wait(WAIT_S)
        gated.device.open()
    gated.open()
    assert gated.store.generation == 1
    assert torch.equal(gated.store["a"], numbers(PAGE))


@pytest.mark.parametrize("is_write", [True, False])
def test_closing_leaves_memory_to_a_transfer_that_another_thread_is_about_to_begin(is_write: bool) -> None:
    gated = GatedStore()
    store, arena = gated.store, gated.store._parts.arena
    leased: list[int] = []

    def close_meanwhile(operation: Operation) -> None:
        with beside(lambda: store._close(commit=False)):
            pass
        leased.append(arena.leased_nbytes)

    store["a"] = numbers(PAGE)
    if not is_write:
        stored(store.working_set, "a")
    gated.device.fail = close_meanwhile
    (store.working_set.swap_out if is_write else store.prefetch)(["a"])
    assert leased == [PAGE]
    assert arena.leased_nbytes == 0


def test_what_comes_while_a_store_without_changes_is_closed_is_refused(gated: GatedStore) -> None:
    store = gated.store
    refused: list[str] = []

    def close_devices() -> None:
        with pytest.raises(ClosedError) as caught:
            store["b"] = numbers(100)
        refused.append(str(caught.value))
        with pytest.raises(ClosedError, match="being closed"):
            store.commit({"late": 1})
        real()

    generations = store._generations
    real = generations.report_dropped
    generations.report_dropped = close_devices  # type: ignore[method-assign, assignment]
    store.close()
    assert len(refused) == 1
    gated.open()
    assert not list(gated.store)

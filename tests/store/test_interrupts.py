"""Ctrl-C anywhere inside of a call, which its caller catches: the store goes on as if it had come before or after."""

from __future__ import annotations

import gc
import signal
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.devices.adaptor import Adaptor
from tests.devices.simulated_disk import SimulatedDisk
from tests.interrupts import ctrl_c_once_it_waits, interrupt_at
from tests.store.rig import WAIT_S, GatedStore, numbers, simulated_store
from tiered.bytes.condition import Condition
from tiered.store.store import Store
from tiered.units import KiB, MiB

BUDGET_NBYTES = 128 * KiB
NUM_TRIED = 6  # places for each call; any number may be tried
STORED = {"inline": numbers(100), "a": numbers(12 * KiB, 1), "b": numbers(9 * KiB, 2), "large": numbers(40 * KiB, 3)}

Call = Callable[[Store], object]


def _lease(mode: str) -> Call:
    def lease(store: Store) -> None:
        with store.lease("a", mode=mode) as view:  # type: ignore[arg-type]
            if mode != "r":
                view.fill_(7)

    return lease


def _delete(store: Store) -> None:
    if "b" in store:
        del store["b"]


def _commit(store: Store) -> None:
    store["a"] = numbers(12 * KiB, 15)
    store.commit({"step": 1}, wait=False)
    store.wait_for_commit()


def _swap_out(store: Store) -> None:
    store["a"] = numbers(12 * KiB, 16)
    store.working_set.swap_out(["a"])


def _fill(store: Store) -> None:
    for i in range(14):
        store[f"more {i}"] = numbers(12 * KiB, i)


def _roll_back(store: Store) -> None:
    store["a"] = numbers(12 * KiB, 17)
    store.rollback()


CALLS: dict[str, Call] = {
    "put": lambda store: store.__setitem__("a", numbers(12 * KiB, 11)),
    "put of a large one": lambda store: store.__setitem__("large", numbers(100 * KiB, 12)),
    "puts that evict": _fill,
    "put_many": lambda store: store.put_many({f"small {i}": numbers(4 * KiB, i) for i in range(40)}),
    "get": lambda store: store["a"],
    "get of a large one": lambda store: store["large"],
    "get into": lambda store: store.get("a", out=torch.empty(12 * KiB, dtype=torch.uint8, device="cpu")),
    "get_many": lambda store: store.get_many(STORED),
    "lease r": _lease("r"),
    "lease w": _lease("w"),
    "lease rw": _lease("rw"),
    "delete": _delete,
    "clear": lambda store: store.clear(),
    "prefetch": lambda store: store.prefetch(["a", "b"]),
    "swap out": _swap_out,
    "commit": _commit,
    "rollback": _roll_back,
    "verify": lambda store: store.verify(),
}


@pytest.fixture(autouse=True)
def few_objects() -> Iterator[None]:
    """Keep what there is out of the collections that come after each interrupt."""
    gc.collect()
    gc.freeze()
    yield


def stored_disk() -> SimulatedDisk:
    disk = SimulatedDisk(capacity_nbytes=8 * MiB, can_lose_power=False)
    with simulated_store(disk, budget_nbytes=BUDGET_NBYTES) as store:
        store.put_many(STORED)
    return disk


def num_places(call: Call) -> int:
    with simulated_store(stored_disk(), budget_nbytes=BUDGET_NBYTES) as store:
        with interrupt_at() as places:
            call(store)
        return places.number


@pytest.mark.parametrize("name", CALLS)
def test_an_interrupt_anywhere_leaves_a_store_that_goes_on(name: str) -> None:
    """Every other one is followed by another, a few places later."""
    call = CALLS[name]
    most, num_hits = num_places(call), 0
    for number in range(1, most, max(1, most // NUM_TRIED)):
        disk = stored_disk()
        with simulated_store(disk, budget_nbytes=BUDGET_NBYTES, deadline_s=2.0) as store:
            try:
                with interrupt_at(number, *([number + 7] if number % 2 else [])) as places:
                    call(store)
            except KeyboardInterrupt:
                pass
            num_hits += bool(places.hits)  # some calls have fewer places when the device is faster
            call(store)
            after = store.get_many(store)
            for key in store:
                with store.lease(key, mode="rw"):
                    pass
            store.commit({"step": 2})
            assert store.verify().is_clean, places.hits
            store.working_set.unreserve(store.working_set.reserve(BUDGET_NBYTES))
            store.rollback()
            _assert_holds(store, after, places.hits)
            store.commit()
            used = sum(-(-value.nbytes // (4 * KiB)) * 4 * KiB for value in after.values() if value.nbytes > KiB)
            assert store.statistics().used_bytes == used, places.hits
        with simulated_store(disk, budget_nbytes=BUDGET_NBYTES) as store:
            _assert_holds(store, after, places.hits)
    assert num_hits > NUM_TRIED // 2


def _assert_holds(store: Store, values: dict[str, torch.Tensor], hits: list[str]) -> None:
    assert set(store) == set(values), hits
    assert all(torch.equal(store[key], value) for key, value in values.items()), hits


@pytest.mark.parametrize("name", ["put", "puts that evict", "lease rw", "commit"])
def test_an_action_that_is_set_after_the_opening_waits_for_the_end_of_the_next_call(name: str) -> None:
    class TimeLimit(Exception):
        pass

    def act(number: int, frame: object) -> None:
        raise TimeLimit

    most, num_raised = num_places(CALLS[name]), 0
    before = signal.getsignal(signal.SIGINT)
    with simulated_store(stored_disk(), budget_nbytes=BUDGET_NBYTES, deadline_s=2.0) as store:
        for number in range(1, most, max(1, most // 20)):
            signal.signal(signal.SIGINT, act)
            try:
                with interrupt_at(number):
                    CALLS[name](store)
            except TimeLimit:
                num_raised += 1
        signal.signal(signal.SIGINT, act)
        with pytest.raises(TimeLimit), interrupt_at(10):
            store.close()
        store.close()
    assert num_raised > 5 and signal.getsignal(signal.SIGINT) is act
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_anywhere_in_close_leaves_a_store_that_can_be_closed() -> None:
    """And that commits then what the first close would have."""
    new, has_changed = numbers(12 * KiB, 18), False

    def change_and_close(store: Store) -> None:
        nonlocal has_changed
        has_changed = False
        store["a"] = new
        has_changed = True
        store.close()

    most = num_places(change_and_close)
    for number in range(1, most, max(1, most // (5 * NUM_TRIED))):
        disk = stored_disk()
        store = simulated_store(disk, budget_nbytes=BUDGET_NBYTES, deadline_s=2.0)
        try:
            with interrupt_at(number) as places:
                change_and_close(store)
        except KeyboardInterrupt:
            pass
        store.close()
        with simulated_store(disk) as store:
            assert torch.equal(store["a"], new) or not has_changed, places.hits
            assert store.verify().is_clean


def test_a_close_that_was_interrupted_as_it_waited_can_be_made_again(gated: GatedStore) -> None:
    store = gated.store
    store["a"] = numbers(12 * KiB)
    gated.catalog.may_apply.clear()
    store.commit({"step": 1}, wait=False)
    assert gated.catalog.reached.wait(WAIT_S)
    store["b"] = numbers(12 * KiB, 1)
    with ctrl_c_once_it_waits(), pytest.raises(KeyboardInterrupt):
        store.close()
    gated.catalog.may_apply.set()
    store["c"] = numbers(12 * KiB, 2)  # it was not closed
    store.close()
    gated.open()
    assert all(torch.equal(gated.store[name], numbers(12 * KiB, i)) for i, name in enumerate("abc"))


@pytest.mark.filterwarnings("ignore:the store memory.* was not closed:ResourceWarning")  # struck before close begins
def test_an_interrupt_of_an_opening_leaves_nothing_open() -> None:
    """Which the check for leaks says, and that the next one opens it."""
    with interrupt_at() as places:
        Store(engine="memory", dram="8MiB").close()
    for number in range(1, places.number, max(1, places.number // (2 * NUM_TRIED))):
        try:
            with interrupt_at(number):
                store = Store(engine="memory", dram="8MiB")
                store.close()
        except KeyboardInterrupt:
            pass


def test_an_interrupt_when_a_file_has_grown_does_not_keep_it_from_growing() -> None:
    class Interrupted(Adaptor):
        is_due = True

        def grow(self, file: int, nbytes: int) -> None:
            self.upstream.grow(file, nbytes)
            is_due, Interrupted.is_due = Interrupted.is_due, False
            if is_due:
                signal.raise_signal(signal.SIGINT)

    with simulated_store(wrap=Interrupted) as store:
        store["a"] = numbers(12 * KiB)
        with pytest.raises(KeyboardInterrupt):
            store.commit()
        file_nbytes = store.statistics().file_bytes
        store.commit()
        store["b"] = numbers(12 * KiB, 1)
        store.commit()
        statistics = store.statistics()
        assert statistics.file_bytes == file_nbytes == statistics.used_bytes + statistics.free_bytes
        assert torch.equal(store["a"], numbers(12 * KiB)) and torch.equal(store["b"], numbers(12 * KiB, 1))


def test_no_line_of_python_lies_between_the_lock_and_its_block() -> None:
    """Where an interrupt could come that leaves it held."""
    condition = Condition()
    with interrupt_at() as places:
        with condition:
            pass
    assert not places.number

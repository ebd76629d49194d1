"""An exception from outside, anywhere in a call: the store is right, or refuses all but close and is right later."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.interrupts import interrupt_at
from tests.store.rig import numbers, simulated_store
from tests.store.test_interrupts import BUDGET_NBYTES, CALLS, NUM_TRIED, STORED, Call, num_places, stored_disk
from tiered.errors import CapacityError, DeviceError, UsageError
from tiered.store.store import Store
from tiered.store.waiting.mark import CallMark
from tiered.units import KiB


class TimeLimit(BaseException):
    pass


@pytest.fixture(autouse=True)
def few_objects() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    yield


def _strike(store: Store, call: Call, number: int) -> str:
    """Make ``call``, struck at its place ``number``; return where that was, "" where it has fewer places."""
    with interrupt_at(number, error=TimeLimit) as places:
        try:
            call(store)
        except TimeLimit:
            pass
    return "".join(places.hits)


def _goes_on(store: Store, call: Call) -> bool:
    """Use the store on; False where it refuses that, and then all else but close."""
    try:
        store.get_many(store)
    except UsageError as error:
        assert "cut short by TimeLimit()" in str(error)
        for refused in (call, Store.commit, Store.rollback, Store.verify, lambda store: store["a"]):
            with pytest.raises(UsageError, match="Nothing can be done with this store but close"):
                refused(store)
        return False
    call(store)
    after = store.get_many(store)
    store.commit({"step": 2})
    assert store.verify().is_clean
    store.working_set.unreserve(store.working_set.reserve(BUDGET_NBYTES))
    assert all(torch.equal(store[key], value) for key, value in after.items())
    return True


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # what strikes a finalizer goes nowhere
@pytest.mark.parametrize("name", CALLS)
def test_wherever_it_strikes_no_committed_key_is_lost_and_no_byte_is_wrong(name: str) -> None:
    call, most, num_refused = CALLS[name], num_places(CALLS[name]), 0
    for number in range(1, most, max(1, most // NUM_TRIED)):
        disk = stored_disk()
        store = simulated_store(disk, budget_nbytes=BUDGET_NBYTES, deadline_s=2.0)
        place = _strike(store, call, number)
        is_right = _goes_on(store, call)
        num_refused += not is_right
        store.close()
        with simulated_store(disk, budget_nbytes=BUDGET_NBYTES) as store:
            assert store.verify().is_clean, place
            if is_right:
                continue
            found = {key: store[key] for key in STORED}
            if name == "commit" and torch.equal(found["a"], numbers(12 * KiB, 15)):  # it came after the last step
                found["a"] = STORED["a"]
            assert all(torch.equal(found[key], value) for key, value in STORED.items()), place
    assert num_refused or name in {"clear", "delete"}


def test_another_thread_is_refused_as_well_and_hears_of_it_before_its_close_is_silent() -> None:
    number = 1
    while True:
        store = simulated_store(stored_disk(), budget_nbytes=BUDGET_NBYTES)
        thread = threading.Thread(target=_strike, args=(store, CALLS["put"], number))
        thread.start()
        thread.join()
        if store.working_set.mark.reason:
            break
        store.close()
        number += 1
    with pytest.raises(UsageError, match="a call of the store was cut short by TimeLimit"):
        store["b"]
    store.close()


def test_a_close_by_who_has_not_heard_of_it_says_it_and_closes() -> None:
    store = simulated_store(stored_disk(), budget_nbytes=BUDGET_NBYTES)
    store.working_set.mark.reason = "TimeLimit()"
    with pytest.raises(UsageError, match="opened again it holds the last committed generation"):
        store.close()
    store.close()


MEANT: dict[str, Callable[[], BaseException]] = {
    "no memory": MemoryError,
    "its own": lambda: DeviceError("the drive"),
    "a missing key": lambda: KeyError("a"),
    "a wrong argument": lambda: TypeError("a"),
}


@pytest.mark.parametrize("how", MEANT)
def test_an_error_that_a_call_means_leaves_no_mark(how: str) -> None:
    mark = CallMark()
    namespace = {"__name__": "tiered.imagined", "mark": mark, "error": MEANT[how]()}
    with pytest.raises(type(MEANT[how]())):
        exec("with mark:\n    raise error", namespace)
    assert not mark.reason


def test_an_error_of_its_own_that_follows_one_from_outside_does_not_hide_it() -> None:
    mark = CallMark()
    namespace = {"__name__": "tiered.imagined", "mark": mark, "limit": TimeLimit(), "own": CapacityError("full")}
    source = "with mark:\n    try:\n        raise limit\n    finally:\n        raise own"
    with pytest.raises(TimeLimit):
        exec(source, namespace)
    assert mark.reason == "TimeLimit()"

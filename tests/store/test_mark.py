"""An exception from outside, anywhere in a call: the store is right, or refuses all but close and is right later."""

from __future__ import annotations

import ctypes
import gc
import signal
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.interrupts import in_ours, interrupt_at
from tests.store.rig import numbers, simulated_store
from tests.store.test_interrupts import BUDGET_NBYTES, CALLS, NUM_TRIED, STORED, Call, num_places, stored_disk
from tiered.errors import CapacityError, DeviceError, UsageError
from tiered.store.store import Store
from tiered.store.waiting.refusals import CallMark
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


def test_the_outermost_of_nested_blocks_raises_the_one_from_outside_too() -> None:
    mark = CallMark()
    namespace = {"__name__": "tiered.imagined", "mark": mark, "limit": TimeLimit()}
    source = "with mark, mark:\n    try:\n        raise limit\n    finally:\n        {}.pop('half done')"
    with pytest.raises(TimeLimit):
        exec(source, namespace)
    assert mark.reason == "TimeLimit()"


def raised_by_a_thread(mark: CallMark, error: type[BaseException]) -> None:
    """Go on with ``mark`` set until another thread has ``error`` raised here, which no line of ours does."""
    me = threading.get_ident()
    namespace: dict[str, object] = {"__name__": "tiered.imagined", "mark": mark}
    thread = threading.Thread(
        target=lambda: ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(me), ctypes.py_object(error))
    )
    namespace["start"] = thread.start
    try:
        exec("with mark:\n    start()\n    while True:\n        len('')", namespace)
    finally:
        thread.join()


def test_one_that_comes_while_a_failed_lookup_is_handled_is_the_one_raised() -> None:
    mark = CallMark()
    with pytest.raises(TimeLimit), mark:
        try:
            {}["nothing"]
        except KeyError:
            raise TimeLimit  # noqa: B904 - as another thread does
    assert mark.reason == "TimeLimit()"


@pytest.mark.parametrize("error", [ValueError, KeyError, IndexError, TimeoutError, MemoryError, SystemExit, TimeLimit])
def test_what_another_thread_raises_leaves_the_mark_whatever_its_type(error: type[BaseException]) -> None:
    mark = CallMark()
    with pytest.raises(error):
        raised_by_a_thread(mark, error)
    assert mark.reason.startswith(error.__name__)


def test_an_error_that_was_handled_before_the_call_is_none_of_it() -> None:
    store = simulated_store(stored_disk(), budget_nbytes=BUDGET_NBYTES)
    try:
        raise TimeLimit
    except TimeLimit as error:
        error.with_traceback(None)
        assert store.get("absent", "default") == "default"
    assert "a" in store
    store.close()


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit, ValueError, TimeLimit])
def test_errors_of_the_callers_own_code_leave_a_store_that_goes_on(error: type[BaseException]) -> None:
    def values() -> Iterator[tuple[str, torch.Tensor]]:
        yield "new", numbers(4 * KiB)
        raise error

    class Failing:
        def state_dict(self) -> dict[str, int]:
            if is_failing:
                raise error
            return {}

        def load_state_dict(self, state: dict[str, int]) -> None:
            raise error

    is_failing = False
    with simulated_store(stored_disk(), budget_nbytes=BUDGET_NBYTES) as store:
        with pytest.raises(error):
            store.put_many(values())
        assert torch.equal(store["new"], numbers(4 * KiB))
        store.register("failing", Failing())
        store.commit()
        is_failing = True
        with pytest.raises(error):
            store.commit()
        with pytest.raises((error, UsageError)) as raised:
            store.rollback()
        assert isinstance(raised.value, error) or "cannot load the state" in str(raised.value)
        is_failing = False
        store.commit()


def test_a_signal_acts_at_once_in_the_callers_own_code() -> None:
    seen: list[int] = []

    def values() -> Iterator[tuple[str, torch.Tensor]]:
        signal.raise_signal(signal.SIGUSR1)
        assert seen == [signal.SIGUSR1]
        assert in_ours(raise_and_count)() == 1  # of a call of ours in there, at its end
        assert len(seen) == 2
        yield "new", numbers(4 * KiB)

    def raise_and_count() -> int:
        signal.raise_signal(signal.SIGUSR1)
        return len(seen)

    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    try:
        with simulated_store(stored_disk(), budget_nbytes=BUDGET_NBYTES) as store:
            store.put_many(values())
    finally:
        signal.signal(signal.SIGUSR1, before)

"""Ctrl-C, and other signals, inside a call of ours: when the action runs, and when it is left to the program."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import FrameType
from typing import Any

import pytest

from tests.interrupts import ctrl_c_once_it_waits, in_ours, interrupt_at
from tiered.bytes.condition import Condition
from tiered.bytes.interrupt import INTERRUPTS, outside


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


class User:
    """What has interrupts wait, as an open store has."""


@pytest.fixture(autouse=True)
def user() -> Iterator[User]:
    user = User()
    INTERRUPTS.begin(user)
    yield user
    INTERRUPTS.end(user)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert sys.gettrace() is None or "coverage" in repr(sys.gettrace())


def test_it_is_raised_at_the_end_of_the_outermost_call() -> None:
    done = []

    @in_ours
    def inner() -> None:
        ctrl_c()
        done.append("inside")

    @in_ours
    def outer() -> None:
        inner()
        done.append("between")
        ctrl_c()
        done.append("at the end")

    with pytest.raises(KeyboardInterrupt):
        outer()
        done.append("after")
    assert done == ["inside", "between", "at the end"]


def test_it_is_raised_at_once_in_the_programs_own_code() -> None:
    with pytest.raises(KeyboardInterrupt):
        ctrl_c()


def test_it_is_raised_by_a_call_that_c_code_makes_not_when_that_code_ends() -> None:
    seen = []

    @in_ours
    def hook(number: int) -> int:
        seen.append(number)
        ctrl_c()
        return number

    with pytest.raises(KeyboardInterrupt):
        list(map(hook, range(3)))
    assert seen == [0]


def test_an_error_of_the_call_is_its_context() -> None:
    @in_ours
    def fail() -> None:
        with contextlib.suppress(KeyError):
            raise KeyError("handled")
        ctrl_c()
        raise ValueError("on the way")

    with pytest.raises(KeyboardInterrupt) as raised:
        fail()
    assert str(raised.value.__context__) == "on the way"


def test_a_call_that_looks_gets_it_there_and_only_there() -> None:
    @in_ours
    def call() -> int:
        INTERRUPTS.look()
        ctrl_c()
        with pytest.raises(KeyboardInterrupt):
            INTERRUPTS.look()
        INTERRUPTS.look()
        return 7

    assert call() == 7


@pytest.mark.parametrize("is_early", [True, False])
def test_a_call_that_waits_gets_it_at_once_and_the_lock_is_as_it_was(is_early: bool) -> None:
    condition = Condition()

    @in_ours
    def wait() -> None:
        with condition:
            if is_early:
                ctrl_c()
            with pytest.raises(KeyboardInterrupt):
                condition.wait(30)
            assert condition.is_held_here()
            assert not condition._waiters

    with nullcontext() if is_early else ctrl_c_once_it_waits():
        wait()
    assert condition.acquire(blocking=False)
    condition.release()


def test_wherever_two_interrupts_strike_a_wait_its_lock_is_as_it_was() -> None:
    @in_ours
    def wait() -> None:
        with condition:
            condition.wait(0.0)

    number = 1
    while True:
        condition = Condition()
        try:
            with interrupt_at(number, number + 3) as places:
                wait()
        except KeyboardInterrupt:
            pass
        assert not condition.is_held_here() and not condition._waiters, number
        if places.number < number:
            assert number > 5
            return
        number += 1


def test_code_of_the_programs_inside_of_a_call_gets_it_at_once() -> None:
    done = []

    def programs_own() -> None:
        done.append("before")
        ctrl_c()
        done.append("after")

    @in_ours
    def call() -> None:
        with pytest.raises(KeyboardInterrupt):
            outside(programs_own)
        done.append("the call goes on")

    call()
    assert done == ["before", "the call goes on"]


OPEN: list[object] = []


class Block:
    """A block of ours, which must be left once it is entered."""

    @in_ours
    def __enter__(self) -> object:
        OPEN.append(self)
        len("")
        return self

    @in_ours
    def __exit__(self, *_: object) -> None:
        len("")
        OPEN.remove(self)


@in_ours
def of_a_generator() -> Iterator[None]:
    OPEN.append(0)
    try:
        yield
    finally:
        OPEN.remove(0)


def _with(block: Any) -> None:
    with block:
        len("")


def _with_a_stack(block: Any) -> None:
    with ExitStack() as stack:
        stack.enter_context(block)
        len("")


@pytest.mark.parametrize("use", [_with, _with_a_stack])
@pytest.mark.parametrize("make", [Block, contextmanager(of_a_generator)])
def test_a_block_that_was_begun_ends_wherever_it_strikes(
    use: Callable[[Any], None], make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.interrupts._FILES", {__file__, contextlib.__file__})
    OPEN.clear()
    number = num_raised = 0
    while True:
        number += 1
        try:
            with interrupt_at(number) as places:
                use(make())
        except KeyboardInterrupt:
            num_raised += 1
        assert not OPEN, places.hits
        if places.number < number:
            break
    assert num_raised == number - 1 > 5


def test_a_generator_that_has_yielded_goes_on_when_its_user_has_handled_it() -> None:
    @in_ours
    def numbers() -> Iterator[int]:
        try:
            yield 1
            ctrl_c()
            yield 2
            yield 3
        finally:
            seen.append(0)

    seen: list[int] = []
    generator = numbers()
    with pytest.raises(KeyboardInterrupt):
        for number in generator:
            seen.append(number)
    assert [seen, list(generator), seen] == [[1, 0], [3], [1, 0]]


class TimeLimit(Exception):
    pass


@pytest.fixture(params=[signal.SIGINT, signal.SIGALRM, signal.SIGTERM], ids=str)
def own_action(request: pytest.FixtureRequest, user: User) -> Iterator[tuple[int, list[FrameType | None]]]:
    """Give a signal an action of the program's own, which raises: the signal, and the frames that it was given."""
    frames: list[FrameType | None] = []

    def act(number: int, frame: FrameType | None) -> None:
        frames.append(frame)
        raise TimeLimit

    before = signal.signal(request.param, act)
    INTERRUPTS.acquire(threading.Lock())  # from a wait on it waits, too
    yield request.param, frames
    INTERRUPTS.end(user)
    assert signal.getsignal(request.param) is act
    signal.signal(request.param, signal.default_int_handler if request.param == signal.SIGINT else before)


def test_an_action_of_the_programs_own_waits_for_the_end_of_the_call(
    own_action: tuple[int, list[FrameType | None]],
) -> None:
    number, frames = own_action

    @in_ours
    def call() -> None:
        signal.raise_signal(number)
        signal.raise_signal(number)
        assert frames == []

    with pytest.raises(TimeLimit):
        call()
    assert frames == [sys._getframe()]  # not the call's
    with pytest.raises(TimeLimit):
        signal.raise_signal(number)


def test_an_action_of_the_programs_own_comes_where_a_call_waits(
    own_action: tuple[int, list[FrameType | None]],
) -> None:
    number, frames = own_action
    timer = threading.Timer(0.01, signal.pthread_kill, [threading.main_thread().ident, number])
    lock = threading.Lock()

    @in_ours
    def call() -> None:
        with lock:
            timer.start()
            with pytest.raises(TimeLimit):
                INTERRUPTS.acquire(lock, 30)

    call()
    timer.join()
    assert frames == [sys._getframe()]


def test_an_action_that_calls_the_one_before_it_runs_once_and_so_does_that() -> None:
    before = signal.getsignal(signal.SIGINT)
    assert callable(before) and before is not signal.default_int_handler
    seen = []

    def act(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        before(number, frame)

    @in_ours
    def call() -> None:
        ctrl_c()
        seen.append(0)

    signal.signal(signal.SIGINT, act)
    INTERRUPTS.acquire(threading.Lock())
    with pytest.raises(KeyboardInterrupt):
        call()
    assert seen == [0, signal.SIGINT]
    signal.signal(signal.SIGINT, before)


def test_all_actions_run_even_where_the_first_raises(user: User) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    INTERRUPTS.begin(user)

    @in_ours
    def call() -> None:
        ctrl_c()
        signal.raise_signal(signal.SIGUSR1)
        assert not seen

    with pytest.raises(KeyboardInterrupt):
        call()
    assert seen == [signal.SIGUSR1]
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("set_tool", [sys.settrace, sys.setprofile, None])
def test_a_debugger_or_profiler_keeps_its_place_and_it_is_raised_all_the_same(
    set_tool: Callable[[Any], None] | None,
) -> None:
    before = sys.gettrace(), sys.getprofile()

    def tool(frame: FrameType, event: str, argument: object) -> Any:
        return tool

    def set_both(tool: Any) -> None:
        sys.settrace(tool)
        sys.setprofile(tool)

    done = []

    @in_ours
    def call() -> None:
        ctrl_c()
        done.append(1)

    @in_ours
    def calm() -> None:
        signal.raise_signal(signal.SIGUSR1)

    old = signal.signal(signal.SIGUSR1, lambda number, frame: done.append(2))
    INTERRUPTS.acquire(threading.Lock())
    (set_tool or set_both)(tool)
    try:
        calm()
        tools = sys.gettrace(), sys.getprofile()
        with pytest.raises(KeyboardInterrupt):
            call()
        trace = sys.gettrace()
    finally:
        sys.settrace(before[0])
        sys.setprofile(before[1])
        signal.signal(signal.SIGUSR1, old)
    assert done == [2, 1]
    assert tools[0 if set_tool is sys.settrace else 1] is tool
    assert set_tool is sys.setprofile or trace is tool


def test_wherever_an_exception_strikes_a_call_the_next_ctrl_c_is_heard() -> None:
    @in_ours
    def call() -> None:
        ctrl_c()

    number = 1
    while True:
        try:
            with interrupt_at(number, error=TimeLimit) as places:
                call()
        except (TimeLimit, KeyboardInterrupt):
            pass
        sys.settrace(None)
        with pytest.raises(KeyboardInterrupt):
            ctrl_c()
        if places.number < number:
            break
        number += 1
    assert number > 5


def test_an_action_that_the_program_takes_meanwhile_stays(user: User) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    INTERRUPTS.begin(User())
    INTERRUPTS.end(user)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_actions_are_given_back_with_the_last_user_of_whatever_thread(user: User) -> None:
    def begin_and_end() -> None:
        other = User()
        INTERRUPTS.begin(other)
        INTERRUPTS.end(other)

    INTERRUPTS.end(user)
    thread = threading.Thread(target=begin_and_end)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    first, second = User(), User()
    INTERRUPTS.begin(first)
    INTERRUPTS.begin(second)
    INTERRUPTS.end(first)
    assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    INTERRUPTS.end(second)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

"""Ctrl-C inside what must be whole: when it is raised, and when it is left to the program."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from tests.interrupts import ctrl_c_once_it_waits, interrupt_at
from tiered.bytes.condition import Condition
from tiered.bytes.interrupt import INTERRUPTS, uninterrupted, uninterrupted_block


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with INTERRUPTS:
        pass  # raises what was noted and forgotten


def test_it_is_raised_at_the_end_of_the_outermost_block() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), INTERRUPTS:
        with INTERRUPTS:
            ctrl_c()
            done.append("inside")
        done.append("between")
        ctrl_c()
        done.append("outside")
    assert done == ["inside", "between", "outside"]


def test_an_error_of_the_block_is_its_context() -> None:
    with pytest.raises(KeyboardInterrupt) as raised, INTERRUPTS:
        ctrl_c()
        raise ValueError("on the way")
    assert str(raised.value.__context__) == "on the way"


def test_who_looks_gets_it_there_and_only_there() -> None:
    with INTERRUPTS:
        INTERRUPTS.look()
        ctrl_c()
        with pytest.raises(KeyboardInterrupt):
            INTERRUPTS.look()
        INTERRUPTS.look()


@pytest.mark.parametrize("is_early", [True, False])
def test_who_waits_gets_it_at_once_and_the_lock_is_as_it_was(is_early: bool) -> None:
    condition = Condition()
    with nullcontext() if is_early else ctrl_c_once_it_waits(), INTERRUPTS, condition:
        if is_early:
            ctrl_c()
        with pytest.raises(KeyboardInterrupt):
            condition.wait(30)
        assert condition.is_held_here()
        assert not condition._waiters
    assert condition.acquire(blocking=False)
    condition.release()


def test_wherever_two_interrupts_strike_a_wait_its_lock_is_as_it_was() -> None:
    number = 1
    while True:
        condition = Condition()
        try:
            with interrupt_at(number, number + 3) as places, INTERRUPTS, condition:
                condition.wait(0.0)
        except KeyboardInterrupt:
            pass
        assert not condition.is_held_here() and not condition._waiters, number
        if places.number < number:
            assert number > 5
            return
        number += 1


class TimeLimit(Exception):
    pass


@pytest.fixture(params=[signal.SIGINT, signal.SIGALRM, signal.SIGTERM], ids=str)
def own_action(request: pytest.FixtureRequest) -> Iterator[tuple[int, list[int]]]:
    """Give a signal an action of the program's own, which raises: the signal, and what it has come by."""
    seen: list[int] = []

    def act(number: int, frame: object) -> None:
        seen.append(number)
        raise TimeLimit

    before = signal.signal(request.param, act)
    yield request.param, seen
    assert signal.getsignal(request.param) is act
    signal.signal(request.param, before)


def test_an_action_of_the_programs_own_waits_for_the_end_of_the_block(own_action: tuple[int, list[int]]) -> None:
    number, seen = own_action
    with pytest.raises(TimeLimit), INTERRUPTS:
        signal.raise_signal(number)
        signal.raise_signal(number)
        assert seen == []
    assert seen == [number]
    with pytest.raises(TimeLimit):
        signal.raise_signal(number)


def test_an_action_of_the_programs_own_comes_where_a_block_waits(own_action: tuple[int, list[int]]) -> None:
    number, seen = own_action
    timer = threading.Timer(0.01, signal.pthread_kill, [threading.main_thread().ident, number])
    lock = threading.Lock()
    with INTERRUPTS, lock:
        timer.start()
        with pytest.raises(TimeLimit):
            INTERRUPTS.acquire(lock, 30)
    timer.join()
    assert seen == [number]


def test_all_actions_run_even_where_the_first_raises() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    try:
        with pytest.raises(KeyboardInterrupt), INTERRUPTS:
            ctrl_c()
            signal.raise_signal(signal.SIGUSR1)
        assert seen == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_wherever_an_exception_strikes_a_block_the_next_ctrl_c_is_heard() -> None:
    @uninterrupted
    def call() -> None:
        pass

    number, kept_open = 1, 0
    while True:
        try:
            with interrupt_at(number, error=TimeLimit) as places:
                call()
        except TimeLimit:
            pass
        kept_open += INTERRUPTS.num_blocks
        with pytest.raises(KeyboardInterrupt):
            ctrl_c()
        with INTERRUPTS:
            pass
        assert not INTERRUPTS.num_blocks and signal.getsignal(signal.SIGINT) is signal.default_int_handler, number
        if places.number < number:
            break
        number += 1
    assert number > 10 and kept_open


def test_an_action_that_the_program_takes_meanwhile_stays() -> None:
    with INTERRUPTS:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_other_threads_have_no_part_in_it() -> None:
    found = []

    @uninterrupted
    def look() -> None:
        found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]
    with pytest.raises(KeyboardInterrupt), INTERRUPTS:
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        assert found[1] is not signal.default_int_handler
        ctrl_c()


def test_a_block_that_was_begun_ends() -> None:
    """But for one place: the first of its ``__exit__``, before any line of it has run."""
    open_blocks: list[int] = []

    @uninterrupted_block
    def block() -> Iterator[int]:
        open_blocks.append(1)
        try:
            yield 7
        finally:
            open_blocks.pop()

    number, left_open = 1, 0
    while True:
        try:
            with interrupt_at(number) as places, block() as value:
                assert value == 7
        except KeyboardInterrupt:
            pass
        left_open += len(open_blocks)
        open_blocks.clear()
        if places.number < number:
            break
        number += 1
    assert number > 10 and left_open <= 1

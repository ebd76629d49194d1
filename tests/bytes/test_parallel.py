"""Calls made at the same time: all are made, errors keep their order, no thread is left or needed."""

import threading
from collections.abc import Callable

import pytest

from tests.bytes.moving import WAIT_S
from tiered.store.space.space import in_parallel


def test_calls_run_at_the_same_time() -> None:
    meeting = threading.Barrier(3)
    met: list[int] = []
    assert in_parallel([lambda: met.append(meeting.wait(WAIT_S))] * 3) == []
    assert sorted(met) == [0, 1, 2]


def test_errors_come_in_the_order_of_the_calls_and_stop_no_other_call() -> None:
    made: list[int] = []

    def call(index: int) -> Callable[[], None]:
        def make() -> None:
            made.append(index)
            if index % 2:
                raise ValueError(index)

        return make

    errors = in_parallel([call(index) for index in range(4)])
    assert [error.args for error in errors] == [(1,), (3,)] and sorted(made) == [0, 1, 2, 3]


def test_one_call_and_none_take_no_thread() -> None:
    used: list[threading.Thread] = []
    assert in_parallel([]) == []
    assert in_parallel([lambda: used.append(threading.current_thread())]) == []
    assert used == [threading.current_thread()]


def test_where_no_thread_can_be_started_the_calls_are_made_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    made: list[int] = []
    assert in_parallel([lambda: made.append(0), lambda: made.append(1)]) == []
    assert made == [0, 1]

"""The update worker when the main thread is interrupted, or the system has no thread for it."""

from __future__ import annotations

import linecache
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from tests.zero.test_pipeline import Rig, assert_same, every_update, expected, rig
from tiered.errors import DeviceError
from tiered.zero.optimizer.update_worker import UpdateWorker

Act = Callable[[Rig], object]


@contextmanager
def interrupt_in(*functions: str, number: int) -> Iterator[list[int]]:
    """Raise KeyboardInterrupt before line ``number`` of what ``functions`` of the worker, and its lock, run here.

    Not before a ``with``: tracing shows the way out of its block as that line, too, where no signal is handled.
    """
    codes = {getattr(UpdateWorker, name).__code__ for name in functions}
    locking = {value.__code__ for value in vars(threading.Condition).values() if hasattr(value, "__code__")}
    seen: list[int] = []

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        is_locking = frame.f_code in locking and frame.f_back is not None and frame.f_back.f_code in codes
        if frame.f_code not in codes and not is_locking:
            return None
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and not line.lstrip().startswith("with "):
            seen.append(frame.f_lineno)
            if len(seen) == number:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield seen
    finally:
        sys.settrace(before)


def _step(r: Rig) -> None:
    r.session.run_step(1)


def _wait(r: Rig) -> None:
    r.session.run_step(1)
    r.worker.wait_for_all()


def _roll_back(r: Rig) -> None:
    r.session.run_step(1)
    r.store.rollback()


@pytest.mark.parametrize(
    ("act", "functions"),
    [
        (_step, ("submit", "_start_thread")),
        (_wait, ("wait_for_all", "_wait", "_wait_once")),
        (_roll_back, ("cancel", "_drop", "_wait", "_wait_once")),
    ],
)
def test_an_interrupt_anywhere_leaves_a_worker_that_goes_on_after_a_rollback(
    act: Act, functions: tuple[str, ...]
) -> None:
    with rig("step") as r:
        r.session.run_step(0)
        r.store.commit({"step": 1})
        for number in range(1, 41):  # beyond, it is the same for the next unit
            try:
                with interrupt_in(*functions, number=number) as seen:
                    act(r)
            except KeyboardInterrupt:
                pass
            r.store.rollback()
            assert not r.worker.is_busy and r.worker._condition.acquire(timeout=30), number
            r.worker._condition.release()
            del r.session.trained.losses[1:]
            if len(seen) < number:
                break
        assert number > 10
        r.session.run_step(1)
        assert_same(r.session.collect(), expected(2))


@every_update
@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), KeyboardInterrupt()])
def test_a_thread_that_cannot_be_started_ends_the_step_and_no_more(
    update: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "tiered-update":
            raise error
        start(thread)

    with rig(update) as r:
        r.session.run_step(0)
        r.store.commit({"step": 1})
        with monkeypatch.context() as patch, pytest.raises((DeviceError, KeyboardInterrupt)) as raised:
            patch.setattr(threading.Thread, "start", refuse)
            r.session.run_step(1)
        assert isinstance(raised.value, KeyboardInterrupt) or "can't start new thread" in str(raised.value)
        r.store.rollback()
        del r.session.trained.losses[1:]
        r.session.run_step(1)
        assert_same(r.session.collect(), expected(2))


def test_a_thread_whose_start_was_interrupted_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == "tiered-update" and not started:
            started.append(thread)
            raise KeyboardInterrupt

    with rig("step") as r:
        r.session.run_step(0)
        r.store.commit({"step": 1})
        monkeypatch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            r.session.run_step(1)
        r.store.rollback()
        del r.session.trained.losses[1:]
        r.session.run_step(1)
        assert_same(r.session.collect(), expected(2))
        started[0].join(30)
        assert not started[0].is_alive()

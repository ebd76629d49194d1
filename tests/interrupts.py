"""Ctrl-C at the n-th place where the interpreter would take notice of one, in what tiered runs in this thread.

CPython looks for signals on the way into a function of Python, and when a function of C has returned: what it tells a
profiler of. The action in force is called, with the frame, so that whoever has a say in SIGINT has it here.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import FrameType, FunctionType, ModuleType
from typing import Any, ParamSpec, TypeVar, cast

import tiered
from tiered.bytes.interrupt import Interrupts

__all__ = ["ctrl_c_once_it_waits", "in_ours", "interrupt_at"]

_P = ParamSpec("_P")
_T = TypeVar("_T")
_PACKAGE = os.path.dirname(tiered.__file__) + os.sep
_CALLED: tuple[ModuleType, ...] = (contextlib, threading, weakref)  # whose code does tiered's work in between
_FILES = {module.__file__ for module in _CALLED}


class interrupt_at:
    """``with interrupt_at(3, 8) as places``: send SIGINT at these, counted from 1. ``places.number`` came by.

    With ``error`` that is raised there instead, as another thread's time limit has it, once.
    """

    def __init__(self, *numbers: int, error: type[BaseException] | None = None) -> None:
        self.number = 0
        self.hits: list[str] = []  # where signals were sent
        self._numbers = numbers
        self._error = error
        self._is_due = False
        self._before: Any = None
        self._hook = self._look  # lifetime: the interpreter goes on with one that has raised

    def __enter__(self) -> interrupt_at:
        self._before = sys.getprofile()
        sys.setprofile(self._hook)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(self._before)

    def _look(self, frame: FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        if event not in ("call", "c_return"):
            return
        if not code.co_filename.startswith(_PACKAGE) and code.co_filename not in _FILES:
            return
        self.number += 1
        self._is_due |= self.number in self._numbers
        if self._is_due and not _is_in_finalizer(frame):
            self._is_due = False
            after = f", after {getattr(arg, '__name__', arg)}" if event == "c_return" else ""
            self.hits.append(f"{os.path.basename(code.co_filename)}:{frame.f_lineno} {code.co_qualname}{after}")
            if self._error is not None:
                raise self._error
            action = signal.getsignal(signal.SIGINT)
            assert callable(action)
            action(signal.SIGINT, frame)  # as the interpreter calls it there


def _is_in_finalizer(frame: FrameType | None) -> bool:
    """Whether a ``weakref.finalize`` runs: what is raised there is printed and raised nowhere."""
    while frame is not None and frame.f_code is not weakref.finalize.__call__.__code__:
        frame = frame.f_back
    return frame is not None


def in_ours(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Return ``function`` as if a module of tiered's had it, so that interrupts wait for the end of its calls."""
    assert isinstance(function, FunctionType)
    names = function.__globals__ | {"__name__": "tiered.bytes.imagined"}
    ours = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    return cast("Callable[_P, _T]", ours)


@contextlib.contextmanager
def ctrl_c_once_it_waits() -> Iterator[None]:
    """Send SIGINT to this thread, from another one, once it waits in a call of ours in the block: nowhere else."""
    is_over, me = threading.Event(), threading.get_ident()

    def send() -> None:
        while sys._current_frames()[me].f_code is not Interrupts.acquire.__code__:
            if is_over.wait(0.001):
                return
        signal.pthread_kill(me, signal.SIGINT)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()

"""Interrupts: the action of a signal, such as Ctrl-C's, waits for the end of the call that it strikes.

Between any two lines of Python such an action may run and raise. No code that changes several facts can undo all of
what it has done at each of them; so none runs there, but at the end of the call, or where the call waits.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # what signal wraps, which makes enums of numbers and costs ten times
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from signal import SIGALRM, SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2
from threading import get_ident
from types import FrameType, TracebackType
from typing import Any, ParamSpec, Protocol, TypeVar

__all__ = ["INTERRUPTS", "Acquirable", "Interrupts", "Lifted", "uninterrupted", "uninterrupted_block"]

_P = ParamSpec("_P")
_T = TypeVar("_T")
_NUMBERS = tuple(map(int, (SIGINT, SIGALRM, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2)))  # what programs have actions for


class Acquirable(Protocol):
    """A lock, or another object that threads wait for in the same way."""

    def acquire(self, *, timeout: float = -1) -> bool: ...


class Interrupts:
    """``with INTERRUPTS:`` around code that no action of a signal may cut short. Nests; costs a microsecond.

    In the outermost block the signals whose actions are functions of Python, KeyboardInterrupt's or the program's own,
    have an action of ours, which notes them. Theirs run, and may raise, at the end of that block, or inside of it in
    ``look`` and ``acquire``, where the block says that they may. Nothing else is changed, and in other threads, in
    which Python runs no such action, it does nothing.
    """

    __slots__ = ("_actions", "_is_waiting", "_note_it", "_noted", "_outermost", "lifted_at", "num_blocks", "thread")

    def __init__(self) -> None:
        self.num_blocks = 0  # that are open; the main thread's, as all of this
        self.lifted_at = 0  # how many are open around code of the caller, in which actions run at once
        self._actions: dict[int, Callable[[int, FrameType | None], Any]] = {}  # by number, where ours is in its place
        self._noted: dict[int, None] = {}  # in the order in which they came
        self._is_waiting = False  # inside of ``acquire``
        self._outermost: FrameType | None = None  # the frame with the outermost block
        self.thread = threading.main_thread().ident  # no other thread ever has it, nor does one in a forked child
        self._note_it = self._note  # one object, to be known by

    def __enter__(self) -> None:
        if get_ident() != self.thread:
            return
        if not self.num_blocks:
            self._noted.clear()
            self.lifted_at = 0
            self._outermost = sys._getframe(1)
            try:
                for number in _NUMBERS:
                    action = _signal.getsignal(number)
                    if action is not None and action.__class__ is not int and action is not self._note_it:
                        self._actions[number] = action
                        _signal.signal(number, self._note_it)  # order: from here on nothing of it is raised
            except BaseException:  # an action that came before
                self._outermost = None
                self._restore()
                raise
        self.num_blocks += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.num_blocks or get_ident() != self.thread:
            return
        self.num_blocks -= 1
        if self.num_blocks:
            if self._noted and self.num_blocks == self.lifted_at:
                self._act()
            return
        try:
            self._restore()
        except BaseException:  # an action that came once it was restored
            self._restore()
            raise
        finally:
            self._outermost = None
            if self._noted:
                self._act()

    def _restore(self) -> None:
        for number, action in self._actions.items():
            if _signal.getsignal(number) is self._note_it:  # or the program has given it another one meanwhile
                _signal.signal(number, action)  # order: one that comes from here on runs by itself

    def look(self) -> None:
        """Run the actions that were noted, which may raise: for blocks that take long, where they can be left."""
        if self._noted and self.num_blocks and get_ident() == self.thread:
            self._act()

    def acquire(self, lock: Acquirable, timeout_s: float | None = None) -> bool:
        """Acquire ``lock`` as itself does; in a block of the main thread, the action of a signal may raise instead."""
        timeout_s = -1 if timeout_s is None else timeout_s
        if not self.num_blocks or get_ident() != self.thread:
            return lock.acquire(timeout=timeout_s)
        try:
            self._is_waiting = True  # order: an earlier signal is noted and looked for, a later one acts at once
            self.look()
            return lock.acquire(timeout=timeout_s)
        finally:
            self._is_waiting = False

    def _act(self) -> None:
        """Run what was noted, each once, all of it even where one raises."""
        number = next(iter(self._noted))
        del self._noted[number]
        try:
            self._actions[number](number, sys._getframe())
        finally:
            if self._noted:
                self._act()

    def _note(self, number: int, frame: FrameType | None) -> None:
        is_inside = self._is_inside(frame)
        if not is_inside:  # an exception of another kind may have kept a block from its end
            self.num_blocks = self.lifted_at = 0
        if is_inside and not self._is_waiting and self.num_blocks != (self.lifted_at or -1):
            self._noted[number] = None  # lifetime: not the frame, which keeps whatever it calls
            return
        waiting, self._is_waiting = self._is_waiting, False
        self._actions[number](number, frame)
        self._is_waiting = waiting  # order: not where it raises

    def _is_inside(self, frame: FrameType | None) -> bool:
        """Whether ``frame``, which a signal has struck, has the outermost block, or one that begins, or runs in it."""
        while frame is not None and frame is not self._outermost:
            frame = frame.f_back
        return frame is not None


INTERRUPTS = Interrupts()


class Lifted:
    """``with Lifted():`` around code of the caller's within a block: there actions run at once, and may raise."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = INTERRUPTS.lifted_at
        if INTERRUPTS.num_blocks and get_ident() == INTERRUPTS.thread:
            INTERRUPTS.look()
            INTERRUPTS.lifted_at = INTERRUPTS.num_blocks

    def __exit__(self, *_: object) -> None:
        if INTERRUPTS.num_blocks and get_ident() == INTERRUPTS.thread:
            INTERRUPTS.lifted_at = self._before


def uninterrupted(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Defer the actions of signals in ``function`` to the end of the call: see ``Interrupts``."""

    @functools.wraps(function)
    def whole(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if INTERRUPTS.num_blocks > INTERRUPTS.lifted_at or get_ident() != INTERRUPTS.thread:  # less than one more block
            return function(*args, **kwargs)
        with INTERRUPTS:
            return function(*args, **kwargs)

    return whole


def uninterrupted_block(function: Callable[_P, Iterator[_T]]) -> Callable[_P, AbstractContextManager[_T]]:
    """Work as ``contextlib.contextmanager``, with interrupts deferred at the two ends of the block, not in it."""
    make = contextmanager(function)

    @functools.wraps(function)
    def block(*args: _P.args, **kwargs: _P.kwargs) -> AbstractContextManager[_T]:
        return _UninterruptedBlock(make(*args, **kwargs))

    return block


class _UninterruptedBlock(AbstractContextManager[_T]):
    """One block around another, which defers interrupts at its two ends."""

    def __init__(self, inner: AbstractContextManager[_T]) -> None:
        self._inner = inner

    def __enter__(self) -> _T:
        has_begun = False
        try:
            with INTERRUPTS:
                value = self._inner.__enter__()
                has_begun = True
            return value
        except BaseException as error:
            if has_begun:  # else the block would never be left
                self.__exit__(type(error), error, error.__traceback__)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        with INTERRUPTS:
            return self._inner.__exit__(kind, error, trace)

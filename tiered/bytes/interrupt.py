"""Interrupts: a Ctrl-C in the main thread waits for the end of the call of tiered that it strikes.

Between any two lines of Python a KeyboardInterrupt may strike. No code that changes several facts can undo all of what
it has done at each of them; so none strikes there, but at the end of the call, or where the call waits.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # what signal wraps, which makes enums of numbers and costs ten times
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from signal import SIGINT, default_int_handler
from threading import get_ident
from types import FrameType, TracebackType
from typing import ParamSpec, Protocol, TypeVar

__all__ = ["INTERRUPTS", "Acquirable", "Interrupts", "uninterrupted", "uninterrupted_block"]

_P = ParamSpec("_P")
_T = TypeVar("_T")
_SIGINT = int(SIGINT)


class Acquirable(Protocol):
    """A lock, or another object that threads wait for in the same way."""

    def acquire(self, *, timeout: float = -1) -> bool: ...


class Interrupts:
    """``with INTERRUPTS:`` around code that a KeyboardInterrupt must not cut short. Nests; costs half a microsecond.

    In the outermost block SIGINT has an action of ours, which notes it. KeyboardInterrupt is raised by the end of that
    block, or inside of it by ``look`` and ``acquire``, where the block says that it may be. Nothing else is changed: in
    other threads, which Python never interrupts, and where the program has an action of its own for SIGINT, it does
    nothing.
    """

    __slots__ = ("_is_noted", "_is_waiting", "_note_it", "num_blocks", "thread")

    def __init__(self) -> None:
        self.num_blocks = 0  # that are open and have SIGINT; the main thread's, as all of this
        self._is_noted = False
        self._is_waiting = False  # inside of ``acquire``
        self.thread = threading.main_thread().ident  # no other thread ever has it, nor does one in a forked child
        self._note_it = self._note  # one object, to be known by

    def __enter__(self) -> None:
        if get_ident() != self.thread:
            return
        if not self.num_blocks:
            if _signal.getsignal(_SIGINT) is not default_int_handler:
                return
            self._is_noted = False
            _signal.signal(_SIGINT, self._note_it)  # order: nothing is raised from here on
        self.num_blocks += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.num_blocks or get_ident() != self.thread:
            return
        self.num_blocks -= 1
        if self.num_blocks:
            return
        if _signal.getsignal(_SIGINT) is self._note_it:  # or the program has taken another one meanwhile
            _signal.signal(_SIGINT, default_int_handler)  # order: an interrupt from here on is raised by itself
        if self._is_noted:
            raise KeyboardInterrupt

    def look(self) -> None:
        """Raise a KeyboardInterrupt that was noted: for blocks that take long, where they can be left."""
        if self._is_noted and self.num_blocks and get_ident() == self.thread:
            self._is_noted = False
            raise KeyboardInterrupt

    def acquire(self, lock: Acquirable, timeout_s: float | None = None) -> bool:
        """Acquire ``lock`` as itself does; in a block of the main thread, KeyboardInterrupt may be raised instead."""
        timeout_s = -1 if timeout_s is None else timeout_s
        if not self.num_blocks or get_ident() != self.thread:
            return lock.acquire(timeout=timeout_s)
        try:
            self._is_waiting = True  # order: an earlier interrupt is noted and looked for, a later one is raised
            self.look()
            return lock.acquire(timeout=timeout_s)
        finally:
            self._is_waiting = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._is_waiting:
            self._is_waiting = False
            raise KeyboardInterrupt
        self._is_noted = True


INTERRUPTS = Interrupts()


def uninterrupted(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Defer a KeyboardInterrupt in ``function`` to the end of the call: see ``Interrupts``."""

    @functools.wraps(function)
    def whole(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if INTERRUPTS.num_blocks or get_ident() != INTERRUPTS.thread:  # costs less than one more block
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
        except KeyboardInterrupt as error:
            if has_begun:  # else the block would never be left
                self.__exit__(type(error), error, error.__traceback__)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        with INTERRUPTS:
            return self._inner.__exit__(kind, error, trace)

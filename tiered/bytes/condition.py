"""Condition: a lock to wait on that no interrupt leaves held, and that knows whether the calling thread holds it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from tiered.bytes.interrupt import INTERRUPTS, Acquirable

__all__ = ["Condition", "Waiter"]


class Waiter(Acquirable, Protocol):
    """A lock that waiting threads acquire, once for each time that it was released."""

    def release(self) -> None: ...


class Condition(threading.Condition):
    """A condition over a lock of its own, for ``with`` as any other.

    The standard one enters and leaves its lock in Python functions. An exception from a signal handler, such as
    Ctrl-C, between the lock and the block would leave the lock held for ever. Here ``with`` finds the methods of the
    lock itself, in slots, and no line of Python lies between.

    A signal handler or a finalizer may run in the middle of a block, in the thread that holds the lock. Entering there
    does not block, but finds the block's work half done: code that may be called so asks ``is_held_here`` first.
    """

    __slots__ = ("__enter__", "__exit__", "is_held_here")

    is_held_here: Callable[[], bool]

    _waiters: deque[Waiter]  # the standard one's

    def __init__(self) -> None:
        lock = threading.RLock()
        super().__init__(lock)
        self.__enter__ = lock.__enter__  # type: ignore[method-assign]
        self.__exit__ = lock.__exit__  # type: ignore[method-assign]
        self.is_held_here = lock._is_owned  # type: ignore[attr-defined]

    def wait(self, timeout: float | None = None, waiter: Waiter | None = None) -> bool:
        """Wait for a notification, as the standard one does. An interrupt that waits is raised here.

        A ``waiter`` is released by the next notification, and may be by something else, too.
        """
        if waiter is None:
            waiter = self.waiter()
        else:
            self._waiters.append(waiter)
        held = self._release_save()  # type: ignore[attr-defined]  # the standard one has both
        try:
            return INTERRUPTS.acquire(waiter, None if timeout is None else max(timeout, 0.0))
        finally:
            self._acquire_restore(held)  # type: ignore[attr-defined]
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    def notify_all(self) -> None:
        """Wake all waiting threads. Most often there is none, which the standard one takes two calls to find out."""
        if self._waiters:
            super().notify_all()

    def waiter(self) -> threading.Lock:
        """Return, with the lock held, a lock that can be acquired from the next ``notify_all`` on.

        Use it to wait without the lock. ``wait`` gives the lock back and takes it again in lines of Python: an
        exception from outside between them would leave the caller's block to release a lock that it does not hold.
        """
        waiter = threading.Lock()
        waiter.acquire()
        self._waiters.append(waiter)
        return waiter

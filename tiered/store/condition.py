"""Condition: a lock to wait on that no interrupt leaves held."""

from __future__ import annotations

import threading

__all__ = ["Condition"]


class Condition(threading.Condition):
    """A condition over a lock of its own, for ``with`` as any other.

    The standard one enters and leaves its lock in Python functions: an exception from a signal handler, such as Ctrl-C,
    that comes between the lock and the block leaves the lock held for ever. Here ``with`` finds the methods of the lock
    itself, in slots, and no line of Python lies between.
    """

    __slots__ = ("__enter__", "__exit__")

    def __init__(self) -> None:
        lock = threading.Lock()
        super().__init__(lock)
        self.__enter__ = lock.__enter__  # type: ignore[method-assign]
        self.__exit__ = lock.__exit__  # type: ignore[method-assign]

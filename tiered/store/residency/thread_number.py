"""The number of a thread, by which the store knows whose a lease is."""

from __future__ import annotations

import itertools
import threading

__all__ = ["be_thread", "this_thread"]


class _Thread(threading.local):
    """A number of its own for each thread: the system's are used again, and tensors outlive threads."""

    numbers = itertools.count()

    def __init__(self) -> None:
        self.number = next(self.numbers)


_thread = _Thread()


def this_thread() -> int:
    """Return the number of the calling thread; no other thread of this process ever has it."""
    return _thread.number


def be_thread(number: int) -> None:
    """Count the calling thread's leases as those of the thread of that number, which waits while this one runs."""
    _thread.number = number

"""EndedLeases: the queue of leases whose last tensor has died, and a way to wait for it."""

from __future__ import annotations

import functools
import queue
from collections.abc import Iterator

from tiered.bytes.condition import Condition
from tiered.store.records.entry import Alias

__all__ = ["EndedLeases"]


class EndedLeases:
    """The leases that finalizers report as ended, in a queue that is a waiter of the store's condition.

    A finalizer must not take the store's lock to notify. So one thread at a time waits for the queue instead, which a
    notification reaches as well, by None. The items that it finds stay in the queue.
    """

    def __init__(self, condition: Condition) -> None:
        self.queue: queue.SimpleQueue[Alias | None] = queue.SimpleQueue()
        self._condition = condition
        self._is_awaited = False

    def wait(self, timeout: float) -> None:
        """Wait for an end or a notification, with the store's lock held."""
        if self._is_awaited:
            self._condition.wait(timeout)
            return
        self._is_awaited = True
        try:
            self._condition.wait(timeout, self)
        finally:
            self._is_awaited = False
            self._condition.notify_all()  # another waiting thread takes this one's place

    def take(self) -> Iterator[Alias]:
        """Take the leases out of the queue, under the lock; leave a notification to the thread that waits for one."""
        was_notified = False
        while not self.queue.empty():
            try:
                alias = self.queue.get_nowait()
            except queue.Empty:  # the waiting thread has it in hand, and puts it back before it goes on
                break
            if alias is not None:
                yield alias
            was_notified |= alias is None
        if was_notified and self._is_awaited:
            self.queue.put(None)

    def release(self) -> None:
        """Note that the condition was notified."""
        self.queue.put(None)

    def acquire(self, *, timeout: float = -1) -> bool:
        """Wait until the queue has something; return False where the time is over."""
        get = functools.partial(self.queue.get, True, None if timeout < 0 else timeout)
        try:
            # Order: no line of Python between taking an end and putting it back, where an interrupt would lose it.
            next(map(self.queue.put, iter(get, None)), None)
        except queue.Empty:
            return False
        return True

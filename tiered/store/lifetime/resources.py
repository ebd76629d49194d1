"""Resources: the system's resources in an open store, given back by ``close`` or once the store is garbage."""

from __future__ import annotations

import logging
import os
import threading
import warnings
import weakref

from tiered.bytes.condition import Condition
from tiered.errors import TieredError
from tiered.store.lifetime.opening import Parts
from tiered.store.records.records import Records
from tiered.store.residency.residents import Residents
from tiered.store.space.space import Space
from tiered.store.waiting.calling_thread import NestedCalls
from tiered.store.waiting.mark import CallMark

__all__ = ["Resources"]

_log = logging.getLogger("tiered")


class Resources:
    """Threads, descriptors, locks and memory of one store.

    They refer neither to the store nor to objects of its user (models, registered objects, policies).
    """

    def __init__(
        self,
        parts: Parts,
        space: Space,
        residents: Residents,
        records: Records,
        nested_calls: NestedCalls,
        mark: CallMark,
        *,
        condition: Condition,
        deadline_s: float,
    ) -> None:
        """``deadline_s`` bounds how long a store that is garbage waits for its commit."""
        self.name = ", ".join(device.name for device in parts.devices)
        self._pid = os.getpid()
        self._parts = parts
        self._space = space
        self._residents = residents
        self._records = records
        self._condition = condition
        self._nested_calls = nested_calls
        self._mark = mark
        self._deadline_s = deadline_s
        self._end: weakref.finalize[..., object] | None = None

    def watch(self, store: object) -> None:
        """Warn, and give everything back without a commit, should ``store`` be garbage before ``give_back``."""
        self._end = weakref.finalize(store, self._give_back_unclosed)
        self._end.atexit = False  # at the end of the process each part has its own end

    def give_back(self) -> None:
        """Close everything; blocks. Raises DeadlineError while something in flight does not complete: call it again."""
        self._space.close()
        self._parts.close(self._close_arena)
        if self._end is not None:
            self._end.detach()

    def _close_arena(self) -> None:
        with self._condition:  # which keeps finalizers, that a collection may run here, from the arena's own lock
            try:
                self._residents.close()
            except Exception:
                if not self._mark.reason:
                    raise  # else what was cut short is half done, and some memory stays with the process
            self._parts.arena.close()
        self._residents.reap()

    def _give_back_unclosed(self) -> None:
        if self._pid != os.getpid():
            return  # nothing of it is the child's to close
        is_idle = self._can_wait() and self._has_committed()  # else a thread may still write
        if is_idle:
            self._give_back_uncommitted()
        fate = "" if is_idle else ", and its directories stay locked until the process ends"
        warnings.warn(
            f"the store {self.name} was not closed: nothing is committed by that{fate}; close it, as in with"
            " tiered.Store(...) as store",
            ResourceWarning,
            stacklevel=2,
        )

    def _has_committed(self) -> bool:
        """Wait until a sealed generation is durable; return whether that, or its failure, came within the deadline."""
        sealed = self._records.sealed
        if sealed is None or sealed.thread is None:
            return True
        sealed.thread.join(self._deadline_s)
        return not sealed.thread.is_alive()

    def _give_back_uncommitted(self) -> None:
        self._records.report_dropped()
        try:
            self.give_back()
        except TieredError as error:
            _log.error("the store %s was not closed, and could not be: %s", self.name, error)

    def _can_wait(self) -> bool:
        """Whether the calling thread may wait for others, which a finalizer that interrupted them must not."""
        # Up to Python 3.12 threads start and end under this lock, and a collection may run under it.
        threads_lock: threading.Lock | None = getattr(threading, "_shutdown_locks_lock", None)
        return not self._nested_calls.is_inside() and not (threads_lock is not None and threads_lock.locked())

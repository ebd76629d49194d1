"""Digest threads: where digests are computed, so that neither a device's thread nor the caller's waits for them.

The submitter (checked_transfer.py) defines the jobs and their completion.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable

from tiered.bytes.condition import Condition
from tiered.bytes.critical_section import CRITICAL_SECTION, ServiceThread
from tiered.bytes.device.base import IOClass
from tiered.bytes.exit_and_fork import at_exit, this_process
from tiered.errors import CapacityError

__all__ = ["WORTHWHILE_NBYTES", "DigestThreads"]

WORTHWHILE_NBYTES = 256 * 1024
"""From here on a digest (10 us) takes longer than handing it to another thread."""

_MOST_THREADS = 2  # one digests for four drives; with two, awaited reads pass a burst of writes
_log = logging.getLogger("tiered")


class DigestThreads:
    """At most two threads, made when there is work for them, and their jobs: the most urgent class first, then oldest.

    The invariant: each job runs once; in a thread, or in the submitter's own where there is none: after ``close``, and
    where none can be started. All methods are thread-safe.
    """

    def __init__(self, *, num_threads: int | None = None) -> None:
        """``num_threads``: the most there may be; by default two, on a single core one."""
        self._most = min(_MOST_THREADS, os.cpu_count() or 1) if num_threads is None else num_threads
        self._process = this_process()
        self._changed = Condition()  # guards all below
        self._jobs: tuple[deque[Callable[[], object]], ...] = tuple(deque() for _ in IOClass)
        self._threads: list[threading.Thread] = []
        self._num_idle = 0
        self._is_closed = False
        # Order: after the store's own end, which waits for writes; before the devices', added earlier.
        at_exit(self, DigestThreads.close)

    def submit(self, io_class: IOClass, job: Callable[[], object]) -> None:
        """Have ``job()`` called soon. It must not raise, and not wait for another job."""
        with CRITICAL_SECTION.lock, self._changed:
            is_taken = not self._is_closed and self._has_thread()
            if is_taken:
                self._jobs[io_class].append(job)
                self._changed.notify()
        if not is_taken:
            job()

    def close(self) -> None:
        """Do the submitted jobs, then end the threads; blocks. Idempotent; does nothing in a forked child."""
        if not self._process.is_here:
            return
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _has_thread(self) -> bool:
        """Whether there is a thread; starts one where all are busy and one more is allowed. Under the lock."""
        num_queued = sum(map(len, self._jobs))
        if self._num_idle <= num_queued and len(self._threads) < self._most:
            thread = ServiceThread(target=self._run, name=f"tiered-digest-{len(self._threads)}")
            try:
                thread.start()
            except CapacityError:
                return bool(self._threads)
            self._threads.append(thread)
        return True

    def _run(self) -> None:
        while (job := self._next()) is not None:
            try:
                job()
            except Exception:  # ours or the store's bug; this thread still has others to serve
                _log.exception("a digest job raised")
            job = None  # lifetime: it holds buffers, and the next one may come much later

    def _next(self) -> Callable[[], object] | None:
        """Wait for the next job; None at the end."""
        with self._changed:
            while True:
                for jobs in self._jobs:
                    if jobs:
                        return jobs.popleft()
                if self._is_closed:
                    return None
                self._num_idle += 1
                self._changed.wait()
                self._num_idle -= 1

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "open"
        return f"DigestThreads({state}, {len(self._threads)} threads, {sum(map(len, self._jobs))} jobs queued)"

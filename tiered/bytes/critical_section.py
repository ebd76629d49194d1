"""The critical section: code in which other threads wait for the calling thread, so it must not wait for a store.

A signal handler or a finalizer may interrupt such code. A call of a store from there would wait for its own thread.
"""

from __future__ import annotations

import threading

__all__ = ["CRITICAL_SECTION", "ServiceThread"]


class _CriticalSection(threading.local):
    """``with CRITICAL_SECTION.lock:`` marks a block that takes locks. Each thread has its own, so it never blocks.

    It is a lock and not a counter, because no interrupt comes between the entry of a lock and its block.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.is_inside = self.lock._is_owned  # type: ignore[attr-defined]


CRITICAL_SECTION = _CriticalSection()


class ServiceThread(threading.Thread):
    """A thread of tiered's own that other threads wait for: all of its life is a critical section."""

    def run(self) -> None:
        """Run the thread's target in the critical section."""
        with CRITICAL_SECTION.lock:
            super().run()

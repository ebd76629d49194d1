"""Inside: whether the calling thread is where others wait for it, so that it may wait for nobody.

A signal handler or a finalizer may run there. It must not use a store, which would wait for its own thread.
"""

from __future__ import annotations

import threading

__all__ = ["HERE", "ServiceThread"]


class _Here(threading.local):
    """``with HERE.inside:`` for a block that takes locks; a lock of each thread's own, so nobody waits for it.

    A lock and no counter: no interrupt comes between what is entered and the block.
    """

    def __init__(self) -> None:
        self.inside = threading.RLock()
        self.is_inside = self.inside._is_owned  # type: ignore[attr-defined]


HERE = _Here()


class ServiceThread(threading.Thread):
    """A thread of tiered's own that others wait for: it is inside from its start to its end."""

    def run(self) -> None:
        """Do what the thread is for."""
        with HERE.inside:
            super().run()

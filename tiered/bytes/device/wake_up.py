"""WakeUp wakes a ring's thread while it waits in the kernel: an eventfd that the ring itself reads."""

from __future__ import annotations

import ctypes
import os
import threading

from tiered.bytes.device.ring import READ, Ring

__all__ = ["WakeUp"]


class WakeUp:
    """Order: the thread says that it waits, then looks for work. A submitter queues its work, then wakes the thread.

    ``wake`` and ``close`` from any thread, the others from the ring's alone.
    """

    def __init__(self) -> None:
        self.is_waiting = False
        self.fd = -1
        self._lock = threading.Lock()  # guards the descriptor's life
        self._buffer = ctypes.c_uint64()  # lifetime: the kernel writes here

    def open(self) -> None:
        """Open the descriptor. Raises OSError."""
        self.fd = os.eventfd(0, os.EFD_CLOEXEC)

    def arm(self, ring: Ring, slot: int, tag: int) -> None:
        """Let ``ring`` have a completion tagged ``tag`` when it is woken; ``slot`` is that of the descriptor there."""
        ring.prepare(READ, slot, ctypes.addressof(self._buffer), 8, 0, tag)

    def wake(self) -> None:
        """Wake the thread if it waits."""
        if self.is_waiting:
            with self._lock:  # order: never into a descriptor that was closed, and may be another file's by now
                if self.fd >= 0:
                    self.is_waiting = False
                    os.eventfd_write(self.fd, 1)

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        with self._lock:
            self._close()

    def close_in_child(self) -> None:
        """Close it in a forked child, where some thread of the parent may have held the lock."""
        self._close()

    def _close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

"""InFlight: one operation that an engine has begun, its progress, and the meaning of the kernel's results for it.

All engines share it, so that short transfers, retries and refusals are the same on all of them.
"""

from __future__ import annotations

import ctypes
import errno
import time

from tiered.bytes.device.base import IOClass, Operation
from tiered.bytes.device.files import translate
from tiered.errors import DeviceError

__all__ = ["InFlight"]

_NUM_RETRIES = 3
_TRY_AGAIN = frozenset({errno.EAGAIN, errno.EINTR})


class InFlight:
    """``operation`` from the moment an engine takes it: ``moved`` of ``nbytes`` bytes are done.

    Its engine alone uses it, one thread at a time. The queue made it, and keeps its place until ``IOQueue.done``.
    A ring cuts a large one into parts; each part is an InFlight with the large one as its ``whole``.
    """

    __slots__ = (
        "address", "file_slot", "given", "io_class", "is_slow", "left", "moved", "nbytes", "num_overtaken",
        "num_retries", "offset", "operation", "padding", "pinned", "request_nbytes", "start", "whole",
    )  # fmt: skip

    def __init__(self, operation: Operation, io_class: IOClass, start: float) -> None:
        self.operation = operation
        self.io_class = io_class  # as it was queued: the operation's own may be raised meanwhile
        self.nbytes = operation.nbytes
        self.offset = operation.offset  # in the file
        self.start = start  # s, of time.monotonic
        self.moved = 0
        self.padding = 0  # bytes of these that lie behind the end of an external file: its read ends before them
        self.num_retries = 0  # after EIO, and of less than one granule
        self.is_slow = False  # a warning has been logged
        self.pinned: ctypes.c_char | None = None  # lifetime: holds the memory while the kernel has its address
        self.address = self.file_slot = 0  # a ring's: of the memory, and of the file
        self.whole: InFlight | None = None  # that this is a part of
        self.request_nbytes = 0  # of its parts, where it is cut; then also:
        self.given = 0  # bytes that the kernel has been given, from the operation's start
        self.left = 0  # bytes that neither moved nor were given up
        self.num_overtaken = 0  # later ones that were put before it

    def next_part(self, now: float) -> InFlight:
        """Return the next part that the kernel is given, ``now``; there must be one."""
        part = InFlight(self.operation, self.io_class, now)
        part.whole = self
        part.nbytes = min(self.request_nbytes, self.nbytes - self.given)
        part.offset = self.offset + self.given
        part.address = self.address + self.given
        part.file_slot = self.file_slot
        self.given += part.nbytes
        part.padding = max(0, self.padding - (self.nbytes - self.given))
        return part

    def advance(self, moved: int, granularity: int, what: str) -> bool:
        """Count ``moved`` more bytes; return whether all are done.

        A short transfer goes on at a multiple of ``granularity`` (bytes), and moves the rest of a granule again. One of
        less than a granule is repeated 3 times. Raises DeviceError, which begins with ``what``, for a transfer that
        stopped.
        """
        left = self.nbytes - self.moved
        if left - self.padding <= moved < left:  # the end of an external file
            moved = left
        if moved < left:
            if 0 < moved < granularity and self.num_retries < _NUM_RETRIES:
                self.num_retries += 1
                return False
            moved -= moved % granularity
        if moved <= 0 < left or moved > left:
            raise DeviceError(f"{what} failed: it stopped after {self.moved} bytes")
        self.moved += moved
        return self.moved == self.nbytes

    def retry(self, error: OSError, deadline_s: float, what: str) -> None:
        """Return when the rest may be tried again after ``error``; else raise its TieredError, beginning with ``what``.

        An interruption is tried again until ``deadline_s`` have passed since the start, a read 3 times after EIO, a
        write never.
        """
        if error.errno in _TRY_AGAIN and time.monotonic() < self.start + deadline_s:
            return
        if self.operation.is_write or error.errno != errno.EIO or self.num_retries == _NUM_RETRIES:
            raise translate(error, f"{what} failed") from error
        self.num_retries += 1

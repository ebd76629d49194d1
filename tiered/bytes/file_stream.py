"""Files of the user's own, read and written past the page cache, in a few pieces at a time.

These are no devices: nothing here outlives its call, and every buffer is this room's own.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_all
from types import TracebackType
from typing import Self

from tiered.bytes.device.files import allocate, translate
from tiered.bytes.host_tensor import empty_aligned
from tiered.units import MiB, format_bytes, round_up

__all__ = ["PIECE_NBYTES", "FileReader", "FileWriter"]

PIECE_NBYTES = 4 * MiB
_READ_NBYTES = 1 * MiB
_NUM_READERS = 8  # with pieces of 1 MiB: what a drive that is a virtual one wants in flight
_NUM_THREADS = 4
_NUM_PIECES = 2 * _NUM_THREADS
_ALIGNMENT = 4096


def _open(path: str, flags: int) -> int:
    """Return a descriptor of ``path`` for direct I/O, or for buffered where the file system has no other."""
    try:
        return os.open(path, flags | os.O_CLOEXEC | os.O_DIRECT, 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        if flags & os.O_CREAT:  # some kernels made the file before they looked at O_DIRECT
            flags &= ~os.O_EXCL
        return os.open(path, flags | os.O_CLOEXEC, 0o666)


class FileWriter:
    """Writes a new file from its start to its end. One thread calls it; others move the pieces.

    The space is allocated first, so a full drive is found before a byte is written. ``finish`` makes the bytes durable
    under the name they have; leaving the block without it keeps an unfinished file, which is the caller's to remove.
    """

    def __init__(self, path: str, nbytes: int) -> None:
        """Create ``path``, of ``nbytes`` in all. Raises CapacityError where they do not fit, DeviceError."""
        self.path = path
        self._nbytes = nbytes
        self._done = 0  # bytes that were handed to the threads
        self._held = 0  # bytes in the present piece
        self._number = 0  # of the present piece
        self._writes: list[Future[None] | None] = [None] * _NUM_PIECES
        try:
            self._fd = _open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        except OSError as error:
            raise translate(error, f"cannot create {path}") from error
        try:
            allocate(self._fd, 0, round_up(max(nbytes, 1), _ALIGNMENT))  # ``finish`` cuts the rest off
            self._memory = empty_aligned(_NUM_PIECES * PIECE_NBYTES, _ALIGNMENT)[1]
        except OSError as error:
            os.close(self._fd)
            raise translate(error, f"cannot allocate {format_bytes(nbytes)} for {path}") from error
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "tiered-file-writer")

    def write(self, content: memoryview) -> None:
        """Add ``content``, bytes; it may change again when this returns. Blocks while all pieces are on their way."""
        while content:
            num = min(PIECE_NBYTES - self._held, len(content))
            start = self._number * PIECE_NBYTES + self._held
            self._memory[start : start + num] = content[:num]
            content = content[num:]
            self._held += num
            if self._held == PIECE_NBYTES:
                self._send()

    def finish(self) -> None:
        """Write the rest and make all of it durable; blocks. The file has exactly the bytes that were written."""
        if self._held:
            end = self._number * PIECE_NBYTES + self._held
            padding = -self._held % _ALIGNMENT
            self._memory[end : end + padding] = bytes(padding)
            written = self._done + self._held
            self._send()
        else:
            written = self._done
        for write in self._writes:
            if write is not None:
                write.result()
        assert written == self._nbytes, f"{written} bytes instead of {self._nbytes}"
        try:
            os.ftruncate(self._fd, written)
            os.fsync(self._fd)
        except OSError as error:
            raise translate(error, f"cannot make {self.path} durable") from error

    def _send(self) -> None:
        nbytes = round_up(self._held, _ALIGNMENT)
        start = self._number * PIECE_NBYTES
        memory, offset = self._memory[start : start + nbytes], self._done
        self._writes[self._number] = self._threads.submit(self._write, memory, offset)
        self._done += self._held
        self._held = 0
        self._number = (self._number + 1) % _NUM_PIECES
        earlier = self._writes[self._number]
        if earlier is not None:  # lifetime: its piece is filled next
            earlier.result()

    def _write(self, memory: memoryview, offset: int) -> None:
        try:
            while memory:
                num = os.pwrite(self._fd, memory, offset)
                memory, offset = memory[num:], offset + num
        except OSError as error:
            raise translate(error, f"cannot write {self.path} at byte {offset}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._threads.shutdown()  # order: the threads use the descriptor
        os.close(self._fd)


class FileReader:
    """Reads ranges of a file, of any alignment, into memory. One thread calls it; others move the pieces."""

    def __init__(self, path: str) -> None:
        """Open ``path``. Raises DeviceError."""
        self.path = path
        try:
            self._fd = _open(path, os.O_RDONLY)
        except OSError as error:
            raise translate(error, f"cannot open {path}") from error
        self._local = threading.local()
        self._threads = ThreadPoolExecutor(_NUM_READERS, "tiered-file-reader")

    def begin(self, offset: int, memory: memoryview) -> Callable[[], None]:
        """Start to fill ``memory`` with the bytes from ``offset`` on; return the call that waits for them.

        That raises DeviceError, or EOFError past the end. The memory is this reader's until then, or until ``close``.
        """
        end = offset + len(memory)
        reads = []
        for start in range(offset - offset % _ALIGNMENT, end, _READ_NBYTES) if memory else ():
            begin, stop = max(start, offset), min(start + _READ_NBYTES, end)
            part = memory[begin - offset : stop - offset]
            reads.append(self._threads.submit(self._read_and_let_go, start, begin, part))

        def wait() -> None:
            try:
                for read in reads:
                    read.result()
            finally:
                for read in reads:
                    read.cancel()
                wait_for_all(reads)  # lifetime: the caller's memory may be gone after an error

        return wait

    def _read_and_let_go(self, start: int, begin: int, target: memoryview) -> None:
        try:
            self._read(start, begin, target)
        finally:
            target.release()  # lifetime: the pool keeps it for a moment after the result, and a lease would linger

    def _read(self, start: int, begin: int, target: memoryview) -> None:
        """Fill ``target`` with the bytes from ``begin`` on, by a read from ``start``, which is aligned."""
        address, stop = ctypes.addressof(ctypes.c_char.from_buffer(target)), begin + len(target)
        if begin == start and not (address | len(target)) % _ALIGNMENT:
            self._fill(target, start, stop)
            return
        piece = getattr(self._local, "piece", None)
        if piece is None:
            piece = self._local.piece = empty_aligned(_READ_NBYTES, _ALIGNMENT)
        tensor, memory = piece
        self._fill(memory[: round_up(stop - start, _ALIGNMENT)], start, stop)
        ctypes.memmove(address, tensor.data_ptr() + begin - start, stop - begin)

    def _fill(self, memory: memoryview, start: int, stop: int) -> None:
        """Read from ``start`` into aligned ``memory`` until the byte before ``stop`` is there."""
        found = 0
        try:
            while found < stop - start:
                num = os.preadv(self._fd, [memory[found:]], start + found)
                if not num:
                    raise EOFError(f"{self.path} ends at byte {start + found}, {stop} were expected")
                found += num
        except OSError as error:
            raise translate(error, f"cannot read {self.path} at byte {start + found}") from error

    def close(self) -> None:
        """End the reads that were begun, and give the threads and the descriptor back. Idempotent."""
        self._threads.shutdown()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

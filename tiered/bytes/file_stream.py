"""Files that are no device's: the user's own, streamed past the page cache in a few pieces, and unnamed memory.

Every buffer is this room's own. FileMemory lies in an unnamed file: the kernel writes its pages there when it needs
them for something else.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_all
from typing import Self

import torch

from tiered.bytes.arena import map_file
from tiered.bytes.device.direct_io import open_unnamed
from tiered.bytes.device.files import allocate, translate, translating
from tiered.bytes.host_tensor import empty_aligned
from tiered.bytes.private_file import opened
from tiered.errors import CapacityError
from tiered.units import MiB, format_bytes, round_up

__all__ = ["PIECE_NBYTES", "FileMemory", "FileReader", "FileWriter"]


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
        with translating(f"cannot create {path}"):
            self._fd = _open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
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
        written = self._done + self._held
        if self._held:
            end = self._number * PIECE_NBYTES + self._held
            padding = -self._held % _ALIGNMENT
            self._memory[end : end + padding] = bytes(padding)
            self._send()
        for write in self._writes:
            if write is not None:
                write.result()
        assert written == self._nbytes, f"{written} bytes instead of {self._nbytes}"
        with translating(f"cannot make {self.path} durable"):
            os.ftruncate(self._fd, written)
            os.fsync(self._fd)

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

    def __exit__(self, *error: object) -> None:
        self._threads.shutdown()  # order: the threads use the descriptor
        os.close(self._fd)


class FileReader:
    """Reads ranges of a file, of any alignment, into memory. One thread calls it; others move the pieces."""

    def __init__(self, path: str) -> None:
        """Open ``path``. Raises DeviceError."""
        self.path = path
        with translating(f"cannot open {path}"):
            self._fd = _open(path, os.O_RDONLY)
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


# -- memory in a file --------------------------------------------------------------------------------------------------


_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_PAGE_NBYTES = 4096


class FileMemory:
    """Room for tensors in an unnamed file of ``directory``: page cache, which the kernel takes back.

    The space is allocated at once, so that no later write to a tensor finds the drive full. It is given back with the
    last tensor, or with the process. One thread at a time fills it.
    """

    def __init__(self, directory: str, nbytes: Sequence[int]) -> None:
        """Allocate space for tensors of ``nbytes`` each. Raises CapacityError where the drive is full, OSError."""
        self._directory = directory
        total = sum(round_up(each, _PAGE_NBYTES) for each in nbytes)
        with opened(directory, os.O_RDONLY | os.O_DIRECTORY) as folder:
            self._fd = open_unnamed(folder, 0)
        self._end = 0
        try:
            os.posix_fallocate(self._fd, 0, max(total, 1))
            self._memory = map_file(self._fd, max(total, 1))
        except OSError as error:
            self.close()
            if error.errno in _FULL:
                raise CapacityError(f"{directory} has no room for {format_bytes(total)} more") from error
            raise

    def empty(self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of zeros, dense in memory; it keeps the file's space."""
        return self._take(shape, strides, dtype)[0]

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of ``tensor``, dense on any device, with its shape, strides and dtype.

        The bytes are written to the file, not through the mapping: no page of the copy counts as this process's before
        it is touched. Raises DeviceError.
        """
        copied, start = self._take(tensor.shape, tensor.stride(), tensor.dtype)
        flat = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        content = memoryview(flat.cpu().numpy())  # type: ignore[arg-type]  # numpy's arrays are buffers
        try:
            while content:
                num_written = os.pwrite(self._fd, content, start)
                content, start = content[num_written:], start + num_written
        except OSError as error:
            raise translate(error, f"cannot write byte {start} of a copy's file in {self._directory}") from error
        return copied

    def close(self) -> None:
        """Make no more tensors; those that there are stay. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _take(self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> tuple[torch.Tensor, int]:
        numel, start = torch.Size(shape).numel(), self._end
        if not numel:
            return torch.empty_strided(shape, strides, dtype=dtype, device="cpu"), start
        flat = torch.frombuffer(self._memory, dtype=dtype, count=numel, offset=start)
        self._end += round_up(flat.nbytes, _PAGE_NBYTES)
        return flat.as_strided(shape, strides), start

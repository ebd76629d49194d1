"""The one seam for I/O: Device, and the Operation that a device carries out.

A device is one directory's worth of numbered files (or a stand-in in RAM). It moves aligned bytes; it knows nothing of
keys, digests or commits. Throttling, counting and injected faults are devices over another device in tests.
"""

from __future__ import annotations

import enum
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["SCRATCH", "Device", "DeviceStatistics", "IOClass", "Operation", "OperationList"]


SCRATCH = -1
"""The number of a device's unnamed scratch file: never durable, gone with the process."""


class IOClass(enum.IntEnum):
    """The urgency of an operation: a lower value is served first."""

    DEMAND = 0  # a read that a caller waits for
    UPDATE = 1  # a read that an update of parameters waits for
    PREFETCH = 2  # a read ahead of need
    WRITE = 3  # a write-back


class Operation:
    """One read or write of ``len(memory)`` bytes at ``offset`` of ``file``.

    ``memory`` and the range in the file belong to the operation from ``submit`` until ``on_done`` is called, even if
    the submitter gives up. ``on_done(operation)`` is called exactly once, from any thread (also from inside
    ``submit``), never under a lock of the device; ``error`` is then None or a TieredError. It must be brief and must
    not raise. From then on the operation is the submitter's again, and may be submitted once more.
    """

    __slots__ = ("error", "file", "io_class", "is_write", "memory", "nbytes", "offset", "on_done")

    def __init__(
        self,
        *,
        is_write: bool,
        file: int,
        offset: int,
        memory: memoryview,
        io_class: IOClass,
        on_done: Callable[[Operation], None],
    ) -> None:
        self.is_write = is_write
        self.file = file
        self.offset = offset
        self.memory = memory
        self.nbytes = len(memory)
        self.io_class = io_class
        self.on_done = on_done
        self.error: Exception | None = None

    def __repr__(self) -> str:
        verb = "write" if self.is_write else "read"
        return f"Operation({verb} {self.nbytes} B at {self.offset} of file {self.file}, error={self.error!r})"


class OperationList:
    """Reads, or writes, that are done together: of ``nbytes[i]`` bytes at ``offset[i]`` of ``file[i]`` each.

    They go to ``memory`` from ``start[i]`` on, or come from there. The four are arrays of int64, (n,), n > 0. Memory
    and ranges belong to the list, as to an Operation, until ``on_done(list)`` is called, exactly once; ``error`` is
    then None, or that of one of them.
    """

    __slots__ = ("error", "file", "io_class", "is_write", "memory", "nbytes", "offset", "on_done", "start")

    def __init__(
        self,
        *,
        is_write: bool,
        file: NDArray[np.int64],
        offset: NDArray[np.int64],
        nbytes: NDArray[np.int64],
        start: NDArray[np.int64],
        memory: memoryview,
        io_class: IOClass,
        on_done: Callable[[OperationList], None],
    ) -> None:
        self.is_write = is_write
        self.file, self.offset, self.nbytes, self.start = file, offset, nbytes, start
        self.memory = memory
        self.io_class = io_class
        self.on_done = on_done
        self.error: Exception | None = None

    def operation(self, index: int, on_done: Callable[[Operation], None]) -> Operation:
        """Return number ``index`` of them as an Operation by itself, which ends with ``on_done``."""
        start = int(self.start[index])
        return Operation(
            is_write=self.is_write, file=int(self.file[index]), offset=int(self.offset[index]),
            memory=self.memory[start : start + int(self.nbytes[index])], io_class=self.io_class, on_done=on_done,
        )  # fmt: skip

    def one_by_one(self) -> list[Operation]:
        """Return all as Operations; with the last that ends the list has ended."""
        lock, left = threading.Lock(), len(self.start)

        def end(operation: Operation) -> None:
            nonlocal left
            with lock:
                self.error = self.error or operation.error
                left -= 1
                is_last = not left
            if is_last:
                self.on_done(self)

        # Order: few objects for each, and none that lives on but these: the garbage collector looks at them all.
        columns = (self.file.tolist(), self.offset.tolist(), self.start.tolist(), (self.start + self.nbytes).tolist())
        memory, is_write, io_class = self.memory, self.is_write, self.io_class
        return [
            Operation(
                is_write=is_write, file=file, offset=offset, memory=memory[start:stop], io_class=io_class, on_done=end
            )
            for file, offset, start, stop in zip(*columns, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class DeviceStatistics:
    """Counters since the device was opened; bytes are those that reached or left the device."""

    read_bytes: int
    write_bytes: int
    num_reads: int
    num_writes: int
    num_flushes: int
    num_in_flight: int
    file_bytes: int  # allocated to files, used or not


class Device(ABC):
    """Raw aligned bytes at offsets of numbered files.

    Offsets, lengths and buffer addresses are multiples of ``alignment``. All methods are thread-safe. Every error is a
    TieredError that names the path and the offset; the OSError is its cause.
    """

    name: str  # the directory, or another name for messages
    alignment: int  # bytes; a power of two, at least 4096

    @abstractmethod
    def files(self) -> dict[int, int]:
        """Return the number of each file that exists and its size in bytes (SCRATCH included once it exists)."""

    @abstractmethod
    def grow(self, file: int, nbytes: int) -> None:
        """Make ``file`` at least ``nbytes`` long, creating it where it is missing; blocks.

        The space is really allocated. A new named file and its directory are durable after the next ``flush``.
        Raises CapacityError when the space is not there, and leaves the file as it was.
        """

    @abstractmethod
    def punch(self, file: int, start: int, end: int) -> bool:
        """Give the space of the aligned [start, end) of ``file`` to the file system; blocks. False: it takes none back.

        The range must be filled before it is written again; until then its bytes are undefined. Raises DeviceError.
        """

    @abstractmethod
    def fill(self, file: int, start: int, end: int) -> None:
        """Allocate the aligned [start, end) of ``file``, where there may be holes; blocks. Raises CapacityError."""

    @abstractmethod
    def holes(self, file: int) -> list[tuple[int, int]]:
        """Return start and end of each range of ``file`` that has, or may have, no space of its own; blocks."""

    @abstractmethod
    def submit(self, operations: Sequence[Operation]) -> None:
        """Start all ``operations``; does not block on them. Raises ClosedError, and then starts none of them.

        Reads and writes are complete or an error: short ones are resubmitted, a read is retried 3 times after EIO, a
        write never.
        """

    def submit_list(self, operations: OperationList) -> None:
        """Start all of a list, as ``submit``; an engine may have a shorter way than an Operation for each."""
        self.submit(operations.one_by_one())

    @abstractmethod
    def flush(self) -> None:
        """Make every write that completed before this call, every growth and every new file durable; blocks.

        Raises DeviceError. After a failure every later flush fails too: the contents of the device are unknown then.
        """

    @abstractmethod
    def free_bytes(self) -> int:
        """Return how many more bytes ``grow`` could allocate on this device now."""

    @abstractmethod
    def path(self, file: int) -> str:
        """Return the name of ``file`` for messages."""

    @abstractmethod
    def statistics(self) -> DeviceStatistics:
        """Return the counters."""

    @abstractmethod
    def close(self) -> None:
        """Wait for operations in flight, then release threads and descriptors. Idempotent."""

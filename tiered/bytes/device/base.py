"""The one seam for I/O: Device, the Operation that a device carries out, and Adaptor, a device over another device.

A device is one directory's worth of numbered files (or a stand-in in RAM). It moves aligned bytes; it knows nothing of
keys, digests or commits. Throttling, counting and injected faults are adaptors over another device.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tiered.bytes.exit_and_fork import this_process

__all__ = ["SCRATCH", "Adaptor", "Device", "DeviceStatistics", "IOClass", "Operation", "relay"]


SCRATCH = -1
"""The number of a device's unnamed scratch file: never durable, gone with the process."""


class IOClass(enum.IntEnum):
    """The urgency of an operation: a lower value is served first."""

    DEMAND = 0  # a read that a thread waits for
    PREFETCH = 1  # a read ahead of need
    WRITE = 2  # a write-back


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
    def submit(self, operations: Sequence[Operation]) -> None:
        """Start all ``operations``; does not block on them. Raises ClosedError, and then starts none of them.

        Reads and writes are complete or an error: short ones are resubmitted, a read is retried 3 times after EIO, a
        write never.
        """

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


# -- adaptor -----------------------------------------------------------------------------------------------------------


class Adaptor(Device):
    """Hands everything on to ``upstream``, which it owns: closing the adaptor closes it.

    Subclasses override ``submit`` and other methods that they change. Like every device it is refused in a forked
    child, before any lock is taken that some thread of the parent may have held.
    """

    def __init__(self, upstream: Device) -> None:
        self.upstream = upstream
        self.name = upstream.name
        self.alignment = upstream.alignment
        self._process = this_process()

    def files(self) -> dict[int, int]:
        """Return the number and size of each file."""
        return self.upstream.files()

    def grow(self, file: int, nbytes: int) -> None:
        """Make ``file`` at least ``nbytes`` long; blocks."""
        self.upstream.grow(file, nbytes)

    def submit(self, operations: Sequence[Operation]) -> None:
        """Start all ``operations``; does not block on them."""
        self.upstream.submit(operations)

    def flush(self) -> None:
        """Make completed writes, growth and new files durable; blocks."""
        self.upstream.flush()

    def free_bytes(self) -> int:
        """Return how many more bytes ``grow`` could allocate."""
        return self.upstream.free_bytes()

    def path(self, file: int) -> str:
        """Return the name of ``file`` for messages."""
        return self.upstream.path(file)

    def statistics(self) -> DeviceStatistics:
        """Return the upstream's counters."""
        return self.upstream.statistics()

    def close(self) -> None:
        """Wait for operations in flight, then close the upstream. Idempotent."""
        self.upstream.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.upstream!r})"


def relay(
    operation: Operation,
    on_done: Callable[[Operation], None],
    *,
    file: int | None = None,
    offset: int | None = None,
    memory: memoryview | None = None,
) -> Operation:
    """Return an operation for an upstream in the place of ``operation``, equal but for the arguments given.

    The caller completes ``operation`` itself, once, in ``on_done`` or after it.
    """
    return Operation(
        is_write=operation.is_write,
        file=operation.file if file is None else file,
        offset=operation.offset if offset is None else offset,
        memory=operation.memory if memory is None else memory,
        io_class=operation.io_class,
        on_done=on_done,
    )

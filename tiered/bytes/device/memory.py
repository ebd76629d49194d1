"""A device in RAM: a share of a simulated disk that can lose power (simulated_disk.py).

``engine="memory"`` runs on it, and so do the crash tests. All I/O happens inside ``submit``, so that a run is
deterministic.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence

from tiered.bytes.device.base import SCRATCH, Device, DeviceStatistics, Operation
from tiered.bytes.device.simulated_disk import PowerCutError, SimulatedDisk
from tiered.errors import ClosedError, DeviceError

__all__ = ["MemoryDevice", "PowerCutError", "SimulatedDisk"]

_ALIGNMENT = 4096  # bytes


class MemoryDevice(Device):
    """Device number ``index`` of a simulated disk. Not durable beyond the disk object, as fast as memcpy.

    Closing it leaves the disk's named files; scratch bytes go. An unaligned operation is an assertion.
    """

    def __init__(self, disk: SimulatedDisk, index: int) -> None:
        self.name = f"memory:{index}"
        self.alignment = _ALIGNMENT
        self._disk = disk
        self._index = index
        self._lock = threading.Lock()
        self._is_closed = False
        self._flush_error: Exception | None = None
        self._read_bytes = self._write_bytes = 0
        self._num_reads = self._num_writes = self._num_flushes = self._num_in_flight = 0

    def files(self) -> dict[int, int]:
        """Return the number and size of each file."""
        return self._disk.sizes(self._index)

    def grow(self, file: int, nbytes: int) -> None:
        """Make ``file`` at least ``nbytes`` long."""
        self._check_open()
        assert nbytes % self.alignment == 0, f"{self.path(file)} cannot be {nbytes} bytes: unaligned"
        if nbytes > self.files().get(file, -1):
            self._disk.grow(self._index, file, nbytes, self.path(file))

    def submit(self, operations: Sequence[Operation]) -> None:
        """Carry out ``operations`` in order, here and now."""
        self._check_open()
        with self._lock:
            self._num_in_flight += len(operations)
        for operation in operations:
            self._check_aligned(operation)
            path = self.path(operation.file)
            operation.error = None
            try:
                (self._disk.write if operation.is_write else self._disk.read)(self._index, operation, path)
            except Exception as error:
                operation.error = error
            self._count(operation)
            operation.on_done(operation)

    def flush(self) -> None:
        """Make every write and growth so far survive a power cut."""
        self._check_open()
        if self._flush_error is not None:
            raise DeviceError(f"{self.name}: an earlier flush failed, so no later one can succeed") from (
                self._flush_error
            )
        try:
            self._disk.flush(self._index, self.name)
        except Exception as error:
            self._flush_error = error
            raise
        with self._lock:
            self._num_flushes += 1

    def free_bytes(self) -> int:
        """Return how many more bytes ``grow`` could allocate."""
        return self._disk.free_nbytes(self._index)

    def path(self, file: int) -> str:
        """Return the name of ``file`` for messages."""
        return f"{self.name}/scratch" if file == SCRATCH else f"{self.name}/data-{file:03d}"

    def statistics(self) -> DeviceStatistics:
        """Return the counters."""
        with self._lock:
            return DeviceStatistics(
                read_bytes=self._read_bytes,
                write_bytes=self._write_bytes,
                num_reads=self._num_reads,
                num_writes=self._num_writes,
                num_flushes=self._num_flushes,
                num_in_flight=self._num_in_flight,
                file_bytes=sum(self.files().values()),
            )

    def close(self) -> None:
        """Drop the scratch file. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._disk.drop_scratch(self._index)

    def __repr__(self) -> str:
        return f"MemoryDevice({self.name}, {'closed' if self._is_closed else 'open'}, {self._disk!r})"

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError(f"{self.name} is closed")

    def _check_aligned(self, operation: Operation) -> None:
        memory = operation.memory
        assert operation.offset % self.alignment == len(memory) % self.alignment == 0, f"unaligned: {operation!r}"
        if not memory.readonly and len(memory):
            address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            assert address % self.alignment == 0, f"memory at 0x{address:x} is not aligned: {operation!r}"

    def _count(self, operation: Operation) -> None:
        with self._lock:
            self._num_in_flight -= 1
            if operation.error is not None:
                pass
            elif operation.is_write:
                self._write_bytes += len(operation.memory)
                self._num_writes += 1
            else:
                self._read_bytes += len(operation.memory)
                self._num_reads += 1

"""A device in RAM, which ``engine="memory"`` runs on. All I/O happens inside ``submit``, so a run is deterministic."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence

from tiered.bytes.device.base import SCRATCH, Device, DeviceStatistics, Operation
from tiered.errors import CapacityError, ClosedError, DeviceError
from tiered.units import TiB, format_bytes

__all__ = ["MemoryDevice", "MemoryDisk"]

_ALIGNMENT = 4096  # bytes
_File = tuple[int, int]  # device, file


class MemoryDisk:
    """The files of several devices, all in RAM. Thread-safe.

    It lasts as long as the object. ``device`` is the index of a MemoryDevice, ``path`` a file's name for messages.
    """

    def __init__(self, *, capacity_nbytes: int = TiB) -> None:
        """Make an empty disk; each device's files may be ``capacity_nbytes`` in all."""
        self._capacity_nbytes = capacity_nbytes
        self._lock = threading.Lock()
        self._files: dict[_File, bytearray] = {}
        self._punched: dict[int, int] = {}  # device -> bytes in holes

    def read(self, device: int, operation: Operation, path: str) -> None:
        """Copy the range of ``operation`` into its memory. Raises DeviceError beyond the file's end."""
        with self._lock:
            image = self._range(device, operation, path)
            operation.memory[:] = memoryview(image)[operation.offset : operation.offset + len(operation.memory)]

    def write(self, device: int, operation: Operation, path: str) -> None:
        """Copy the memory of ``operation`` into its range. Raises DeviceError beyond the file's end."""
        with self._lock:
            image = self._range(device, operation, path)
            image[operation.offset : operation.offset + len(operation.memory)] = operation.memory

    def grow(self, device: int, file: int, nbytes: int, path: str) -> None:
        """Extend a file with zeros. Raises CapacityError."""
        with self._lock:
            self._grow(device, file, nbytes, path)

    def punch(self, device: int, file: int, start: int, end: int, path: str) -> None:
        """Count [start, end) of a file as free, and make it zeros."""
        with self._lock:
            self._files[device, file][start:end] = bytes(end - start)
            self._punched[device] = self._punched.get(device, 0) + end - start

    def fill(self, device: int, start: int, end: int, path: str) -> None:
        """Count [start, end) of a file as used again. Raises CapacityError."""
        with self._lock:
            self._check_room(device, end - start, f"cannot fill [{start}, {end}) of {path}")
            self._punched[device] -= end - start

    def flush(self, device: int, path: str) -> None:
        """Make the changes of one device durable: as durable as RAM is."""

    def sizes(self, device: int) -> dict[int, int]:
        """Return the size of each file."""
        with self._lock:
            return {file: len(image) for (owner, file), image in self._files.items() if owner == device}

    def free_nbytes(self, device: int) -> int:
        """Return how much the files may still grow."""
        with self._lock:
            return self._free_nbytes(device)

    def drop_scratch(self, device: int) -> None:
        """Forget the scratch file, if there is one."""
        with self._lock:
            self._files.pop((device, SCRATCH), None)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self._files)} files, {sum(map(len, self._files.values()))} bytes)"

    # Below: under the lock

    def _range(self, device: int, operation: Operation, path: str) -> bytearray:
        image = self._files.get((device, operation.file))
        end = operation.offset + len(operation.memory)
        if image is None or end > len(image):
            size = 0 if image is None else len(image)
            verb = "write" if operation.is_write else "read"
            raise DeviceError(f"{verb} of {operation.offset} to {end} of {path} failed: the file has {size} bytes")
        return image

    def _grow(self, device: int, file: int, nbytes: int, path: str) -> None:
        old_size = len(self._files.get((device, file), b""))
        self._check_room(
            device, nbytes - old_size, f"cannot grow {path} from {format_bytes(old_size)} to {format_bytes(nbytes)}"
        )
        image = self._files.setdefault((device, file), bytearray())
        image.extend(bytes(max(0, nbytes - len(image))))

    def _check_room(self, device: int, nbytes: int, what: str) -> None:
        free_nbytes = self._free_nbytes(device)
        if nbytes > free_nbytes:
            raise CapacityError(f"{what}: {format_bytes(free_nbytes)} are free on the disk in memory")

    def _free_nbytes(self, device: int) -> int:
        used = sum(len(image) for (owner, _), image in self._files.items() if owner == device)
        return self._capacity_nbytes - used + self._punched.get(device, 0)


class MemoryDevice(Device):
    """Device number ``index`` of a disk in RAM. Not durable beyond the disk object, as fast as memcpy.

    Closing it leaves the disk's named files; scratch bytes go. An unaligned operation is an assertion.
    """

    def __init__(self, disk: MemoryDisk, index: int) -> None:
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
        return self._disk.sizes(self._index)

    def grow(self, file: int, nbytes: int) -> None:
        self._check_open()
        assert nbytes % self.alignment == 0, f"{self.path(file)} cannot be {nbytes} bytes: unaligned"
        if nbytes > self.files().get(file, -1):
            self._disk.grow(self._index, file, nbytes, self.path(file))

    def punch(self, file: int, start: int, end: int) -> bool:
        self._check_open()
        self._disk.punch(self._index, file, start, end, self.path(file))
        return True

    def fill(self, file: int, start: int, end: int) -> None:
        self._check_open()
        self._disk.fill(self._index, start, end, self.path(file))

    def holes(self, file: int) -> list[tuple[int, int]]:
        """Return nothing: a disk in memory forgets its holes."""
        return []

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
        return self._disk.free_nbytes(self._index)

    def path(self, file: int) -> str:
        return f"{self.name}/scratch" if file == SCRATCH else f"{self.name}/data-{file:03d}"

    def statistics(self) -> DeviceStatistics:
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

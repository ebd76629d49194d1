"""A device in RAM over a simulated disk that can lose power.

``engine="memory"`` runs on it, and so do the crash tests: the disk counts what would reach hardware, can fail or stop
at any of it, and can say what a real disk might hold after a power cut: everything flushed, and any part of the rest.
All I/O happens inside ``submit``, so that a run is deterministic.
"""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Sequence
from typing import Literal, NamedTuple

from tiered.bytes.device.base import SCRATCH, Device, DeviceStatistics, Operation
from tiered.errors import CapacityError, ClosedError, DeviceError
from tiered.units import TiB, format_bytes

__all__ = ["MemoryDevice", "PowerCutError", "SimulatedDisk"]

Kind = Literal["read", "write", "grow", "flush", "transact"]
Policy = Literal["drop", "keep", "subset", "torn"]

_ALIGNMENT = 4096  # bytes
_SECTOR_NBYTES = 512  # what a disk writes whole or not at all


class PowerCutError(DeviceError):
    """The simulated power is off: nothing reaches this disk any more."""


class _Change(NamedTuple):
    """A write or a growth that no flush has made durable: enough to take it back and to do it again."""

    device: int
    file: int
    offset: int  # of a growth: the old size (0 for a new file)
    before: bytes | None  # None: a growth
    after: bytes
    new_size: int  # of a growth


class _Transaction(NamedTuple):
    name: str
    payload: object


class SimulatedDisk:
    """The files of several devices, and small named values with atomic durable replacement; all in RAM.

    The invariant: what is durable = the live image with ``unsynced`` changes taken back, newest first.

    Operations are writes, growths, flushes and transactions, numbered from 0 as they begin; ``num_operations`` is how
    many there were. Set ``crash_at`` to a number: that operation and everything after it raise PowerCutError (a write
    delivers it as its error). Whether the operation it hit took effect is for ``power_cut`` to decide.
    """

    def __init__(self, *, capacity_nbytes: int = TiB, can_lose_power: bool = True) -> None:
        """Make an empty disk; each device's files may be ``capacity_nbytes`` in all.

        ``can_lose_power=False`` saves the memory that ``power_cut`` needs: twice what was written since the last flush.
        """
        self.num_operations = 0
        self.crash_at: int | None = None
        self._capacity_nbytes = capacity_nbytes
        self._can_lose_power = can_lose_power
        self._lock = threading.Lock()
        self._is_dead = False
        self._files: dict[tuple[int, int], bytearray] = {}  # (device, file) -> live image
        self._unsynced: list[_Change] = []  # oldest first
        self._values: dict[str, object] = {}
        self._hit_transaction: _Transaction | None = None  # the one under way when the power went
        self._failures: dict[Kind, list[Exception]] = {}

    def transact(self, name: str, payload: object) -> None:
        """Replace the value ``name``, atomically and durably. ``payload`` is kept, not copied: never change it."""
        with self._lock:
            self._begin("transact", name, _Transaction(name, payload))
            self._values[name] = payload

    def load(self, name: str) -> object | None:
        """Return the value ``name``, or None where none was ever stored."""
        with self._lock:
            self._check_power(f"load of {name}")
            return self._values.get(name)

    def fail_next(self, kind: Kind, error: Exception) -> None:
        """Make the next operation of ``kind`` raise ``error`` (a TieredError) and do nothing; calls queue up."""
        self._failures.setdefault(kind, []).append(error)

    def image(self, device: int, file: int) -> bytearray:
        """Return the live bytes of a file, for a test to flip some. Never keep a memoryview of it."""
        return self._files[device, file]

    @property
    def num_unsynced(self) -> int:
        """Number of writes and growths that no flush has made durable."""
        return len(self._unsynced)

    def power_cut(self, rng: random.Random, policy: Policy) -> SimulatedDisk:
        """Return what the disk might hold when power comes back: the durable bytes and part of what was unsynced.

        ``"drop"``: nothing of it; ``"keep"``: all; ``"subset"``: each change or not; ``"torn"``: each write not, all,
        or some of its 512-byte sectors. Scratch files are gone. This disk is dead from now on.
        """
        assert self._can_lose_power, "this disk was made with can_lose_power=False"

        def survives() -> bool:
            return policy == "keep" or (policy != "drop" and _coin(rng))

        with self._lock:
            self._is_dead = True
            survivor = SimulatedDisk(capacity_nbytes=self._capacity_nbytes)
            survivor._values = dict(self._values)
            survivor._files = {key: bytearray(image) for key, image in self._files.items() if key[1] != SCRATCH}
            for change in reversed(self._unsynced):
                survivor._undo(change)
            for change in self._unsynced:
                if survives():
                    survivor._redo(change, rng if policy == "torn" else None)
            if self._hit_transaction is not None and survives():
                survivor._values[self._hit_transaction.name] = self._hit_transaction.payload
            return survivor

    def __repr__(self) -> str:
        state = "dead" if self._is_dead else "live"
        return f"SimulatedDisk({state}, {self.num_operations} operations, {self.num_unsynced} unsynced)"

    # Below: what MemoryDevice calls; ``device`` is its index

    def read(self, device: int, operation: Operation, path: str) -> None:
        """Copy the range of ``operation`` into its memory."""
        with self._lock:
            self._check_power(f"read of {path}")
            self._fail("read")
            image = self._range(device, operation, path)
            operation.memory[:] = memoryview(image)[operation.offset : operation.offset + len(operation.memory)]

    def write(self, device: int, operation: Operation, path: str) -> None:
        """Copy the memory of ``operation`` into its range, not yet durably."""
        with self._lock:
            image = self._range(device, operation, path)
            start, end = operation.offset, operation.offset + len(operation.memory)
            change = None
            if operation.file != SCRATCH and self._can_lose_power:
                after = bytes(operation.memory)
                change = _Change(device, operation.file, start, bytes(image[start:end]), after, 0)
            self._begin("write", path, change)
            if change is not None:
                self._unsynced.append(change)
            image[start:end] = operation.memory

    def grow(self, device: int, file: int, nbytes: int, path: str) -> None:
        """Extend a file with zeros, not yet durably."""
        with self._lock:
            old_size = len(self._files.get((device, file), b""))
            change = None
            if file != SCRATCH and self._can_lose_power:
                change = _Change(device, file, old_size, None, b"", nbytes)
            self._begin("grow", path, change)
            if nbytes - old_size > self._free_nbytes(device):
                raise CapacityError(
                    f"cannot grow {path} from {format_bytes(old_size)} to {format_bytes(nbytes)}: "
                    f"{format_bytes(self._free_nbytes(device))} are free on the simulated disk"
                )
            if change is not None:
                self._unsynced.append(change)
            self._grow_image(device, file, nbytes)

    def flush(self, device: int, path: str) -> None:
        """Make the changes of one device durable."""
        with self._lock:
            self._begin("flush", path)
            self._unsynced = [change for change in self._unsynced if change.device != device]

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

    # Below: under the lock

    def _begin(self, kind: Kind, what: str, change: _Change | _Transaction | None = None) -> None:
        """Count an operation; raise what the test's script has for it. ``change`` is what it is about to do."""
        number = self.num_operations
        self.num_operations += 1
        if self.crash_at is not None and number >= self.crash_at and not self._is_dead:
            self._is_dead = True
            # The operation that the power cut hits may have happened, or not: noted, for ``power_cut`` to decide.
            if isinstance(change, _Transaction):
                self._hit_transaction = change
            elif change is not None:
                self._unsynced.append(change)
                if change.before is None:
                    self._grow_image(change.device, change.file, change.new_size)
        self._check_power(f"{kind} (operation {number}) of {what}")
        self._fail(kind)

    def _fail(self, kind: Kind) -> None:
        if self._failures.get(kind):
            raise self._failures[kind].pop(0)

    def _check_power(self, what: str) -> None:
        if self._is_dead:
            raise PowerCutError(f"{what} failed: the simulated power is off")

    def _range(self, device: int, operation: Operation, path: str) -> bytearray:
        image = self._files.get((device, operation.file))
        end = operation.offset + len(operation.memory)
        if image is None or end > len(image):
            size = 0 if image is None else len(image)
            verb = "write" if operation.is_write else "read"
            raise DeviceError(f"{verb} of {operation.offset} to {end} of {path} failed: the file has {size} bytes")
        return image

    def _free_nbytes(self, device: int) -> int:
        used = sum(len(image) for (owner, _), image in self._files.items() if owner == device)
        return self._capacity_nbytes - used

    def _grow_image(self, device: int, file: int, size: int) -> None:
        image = self._files.setdefault((device, file), bytearray())
        image.extend(bytes(size - len(image)))

    def _undo(self, change: _Change) -> None:
        image = self._files[change.device, change.file]
        if change.before is not None:
            image[change.offset : change.offset + len(change.before)] = change.before
        elif change.offset:
            del image[change.offset :]
        else:
            del self._files[change.device, change.file]

    def _redo(self, change: _Change, rng: random.Random | None) -> None:
        image = self._files.get((change.device, change.file), bytearray())
        if change.before is None:
            self._grow_image(change.device, change.file, max(change.new_size, len(image)))
            return
        is_torn = rng is not None and _coin(rng)
        for start in range(0, len(change.after), _SECTOR_NBYTES if is_torn else len(change.after)):
            end = start + _SECTOR_NBYTES if is_torn else len(change.after)
            offset = change.offset + start
            if offset >= len(image):  # the growth that made room for it did not survive
                return
            if not is_torn or (rng is not None and _coin(rng)):
                image[offset : offset + end - start] = change.after[start:end]


def _coin(rng: random.Random) -> bool:
    return rng.getrandbits(1) == 1


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

"""A simulated disk: it counts what would reach hardware, can fail or stop at any of it, and can lose power.

What it may hold when power comes back is everything flushed, and any part of the rest: a write stays in the page cache
or in the drive's own volatile cache until a flush, may be lost, whole or torn, and those before and after it too.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from tiered.bytes.device.base import SCRATCH, Operation
from tiered.bytes.device.memory import MemoryDisk
from tiered.errors import DeviceError
from tiered.units import TiB

__all__ = ["Kind", "Moment", "Policy", "PowerCutError", "SimulatedDisk"]

Kind = Literal["read", "write", "grow", "punch", "flush", "transact"]
Policy = Literal["drop", "keep", "subset", "torn", "torn pages"]

_TEAR_NBYTES = {"torn": 512, "torn pages": 4096}  # what a drive, or the page cache, writes whole or not at all
_File = tuple[int, int]  # device, file


class PowerCutError(DeviceError):
    """The simulated power is off: nothing reaches this disk any more."""


@dataclass(slots=True)
class _Change:
    """A write or a growth that no flush has made durable."""

    device: int
    file: int
    offset: int
    after: bytes | None  # None: a growth
    new_size: int  # of a growth
    is_forgotten: bool = False  # a flush of it has failed: no later one makes it durable

    def overlaps(self, other: _Change) -> bool:
        if self.after is None or other.after is None or (self.device, self.file) != (other.device, other.file):
            return False
        return self.offset < other.offset + len(other.after) and other.offset < self.offset + len(self.after)


class _Transaction(NamedTuple):
    name: str
    payload: object


class Moment:
    """One instant of a disk, as operation ``number`` was about to happen: enough to say what a power cut then leaves.

    It never changes, and any number of survivors can be made of it.
    """

    __slots__ = ("_capacity_nbytes", "_durable", "_hit", "_unsynced", "_values", "number")

    def __init__(self, disk: SimulatedDisk, number: int, hit: _Change | _Transaction | None) -> None:
        """``hit`` is what the operation does: it may have happened, or not, or in part."""
        self.number = number
        self._capacity_nbytes = disk._capacity_nbytes
        self._durable: Mapping[_File, bytes] = dict(disk._durable)
        self._unsynced = (*disk._unsynced, *([hit] if isinstance(hit, _Change) else ()))
        self._values = dict(disk._values)
        self._hit = hit if isinstance(hit, _Transaction) else None

    def survivor(self, rng: random.Random, policy: Policy) -> SimulatedDisk:
        """Return what the disk might hold when power comes back: the durable bytes and part of what was unsynced.

        ``"drop"``: nothing of it; ``"keep"``: all; ``"subset"``: each change or not; ``"torn"``: each write not, all,
        or some of its 512-byte sectors, and of a growth, which makes the file if there is none, the first ones;
        ``"torn pages"``: the same with pages of 4096. Scratch files are gone.
        """

        def survives() -> bool:
            return policy == "keep" or (policy != "drop" and _coin(rng))

        files = {key: bytearray(content) for key, content in self._durable.items()}
        for change in self._unsynced:
            if survives():
                tear_nbytes = _TEAR_NBYTES.get(policy, 0)
                _redo(files, change, rng if tear_nbytes and _coin(rng) else None, tear_nbytes)
        values = dict(self._values)
        if self._hit is not None and survives():
            values[self._hit.name] = self._hit.payload
        return SimulatedDisk._of(files, values, self._capacity_nbytes)


class SimulatedDisk(MemoryDisk):
    """A disk in RAM whose power a test can cut. It holds small named values, too, that are replaced atomically.

    The invariant: the live image = the durable one with the unsynced changes made again, oldest first.

    Operations are writes, growths, flushes and transactions, numbered from 0 as they begin; ``num_operations`` is how
    many there were. Set ``crash_at`` to a number: that operation and everything after it raise PowerCutError (a write
    delivers it as its error). Whether the operation it hit took effect is for ``power_cut`` to decide. Or set
    ``watch``: it is called with the Moment of each operation, before it happens, and must not use the disk.
    """

    def __init__(self, *, capacity_nbytes: int = TiB, can_lose_power: bool = True) -> None:
        """Make an empty disk; each device's files may be ``capacity_nbytes`` in all.

        ``can_lose_power=False`` saves the memory that ``power_cut`` needs: the files once more, and what was written
        since the last flush.
        """
        super().__init__(capacity_nbytes=capacity_nbytes)
        self.num_operations = 0
        self.crash_at: int | None = None
        self.watch: Callable[[Moment], None] | None = None
        self._can_lose_power = can_lose_power
        self._is_dead = False
        self._durable: dict[_File, bytes] = {}  # replaced at each flush, never changed
        self._unsynced: list[_Change] = []  # oldest first
        self._at_crash: Moment | None = None
        self._values: dict[str, object] = {}
        self._failures: dict[Kind, list[Exception]] = {}

    @classmethod
    def _of(cls, files: dict[_File, bytearray], values: dict[str, object], capacity_nbytes: int) -> SimulatedDisk:
        disk = cls(capacity_nbytes=capacity_nbytes)
        disk._files, disk._values = files, values
        disk._durable = {key: bytes(image) for key, image in files.items()}
        return disk

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
        """Make the next operation of ``kind`` raise ``error`` (a TieredError) and do nothing; calls queue up.

        After a flush that failed, what it was to cover may be lost even if a later flush does not fail.
        """
        self._failures.setdefault(kind, []).append(error)

    def image(self, device: int, file: int) -> bytearray:
        """Return the live bytes of a file, for a test to flip some. Never keep a memoryview of it."""
        return self._files[device, file]

    @property
    def num_unsynced(self) -> int:
        """Number of writes and growths that no flush has made durable."""
        return len(self._unsynced)

    def moment(self) -> Moment:
        """Return this instant, between two operations."""
        assert self._can_lose_power, "this disk was made with can_lose_power=False"
        with self._lock:
            return Moment(self, self.num_operations, None)

    def power_cut(self, rng: random.Random, policy: Policy) -> SimulatedDisk:
        """Return a survivor of this instant, or of the one that ``crash_at`` named. This disk is dead from now on."""
        moment = self._at_crash or self.moment()
        self._is_dead = True
        return moment.survivor(rng, policy)

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
                change = _Change(device, operation.file, start, bytes(operation.memory), 0)
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
                change = _Change(device, file, old_size, None, nbytes)
            self._begin("grow", path, change)
            self._grow(device, file, nbytes, path)
            if change is not None:
                self._unsynced.append(change)

    def punch(self, device: int, file: int, start: int, end: int, path: str) -> None:
        """Make a range of a file zeros, not yet durably, and count it as free."""
        with self._lock:
            change = _Change(device, file, start, bytes(end - start), 0) if self._can_lose_power else None
            self._begin("punch", path, change)
            self._unsynced += [change] if change is not None else []
        super().punch(device, file, start, end, path)

    def flush(self, device: int, path: str) -> None:
        """Make the changes of one device durable."""
        with self._lock:
            try:
                self._begin("flush", path)
            except PowerCutError:
                raise
            except Exception:  # the kernel marks the pages clean all the same, and tells it once; sizes it still knows
                for change in self._unsynced:
                    change.is_forgotten |= change.device == device and change.after is not None
                raise
            covered = [change for change in self._unsynced if change.device == device and not change.is_forgotten]
            self._unsynced = [
                change
                for change in self._unsynced
                if change.device != device or (change.is_forgotten and not any(map(change.overlaps, covered)))
            ]
            self._make_durable(covered)

    # Below: under the lock

    def _begin(self, kind: Kind, what: str, hit: _Change | _Transaction | None = None) -> None:
        """Count an operation; raise what the test's script has for it. ``hit`` is what it is about to do."""
        number = self.num_operations
        self.num_operations += 1
        is_last = self.crash_at is not None and number >= self.crash_at and not self._is_dead
        if (is_last or self.watch is not None) and self._can_lose_power and not self._is_dead:
            moment = Moment(self, number, hit)
            if is_last:
                self._at_crash = moment
            if self.watch is not None:
                self.watch(moment)
        self._is_dead |= is_last
        self._check_power(f"{kind} (operation {number}) of {what}")
        self._fail(kind)

    def _fail(self, kind: Kind) -> None:
        if self._failures.get(kind):
            raise self._failures[kind].pop(0)

    def _check_power(self, what: str) -> None:
        if self._is_dead:
            raise PowerCutError(f"{what} failed: the simulated power is off")

    def _make_durable(self, changes: Sequence[_Change]) -> None:
        touched = {(change.device, change.file) for change in changes}
        files = {key: bytearray(self._durable[key]) for key in touched if key in self._durable}
        for change in changes:
            _redo(files, change, None, 0)
        self._durable.update((key, bytes(image)) for key, image in files.items())


def _redo(files: dict[_File, bytearray], change: _Change, rng: random.Random | None, tear_nbytes: int) -> None:
    """Make ``change`` in ``files``; with ``rng``, only some parts of ``tear_nbytes``, of a growth the first ones."""
    key = change.device, change.file
    if change.after is None:
        num_parts = max(0, change.new_size - len(files.get(key, b""))) // max(1, tear_nbytes)
        lost_nbytes = rng.randint(0, num_parts) * tear_nbytes if rng else 0
        _grow_image(files, key, change.new_size - lost_nbytes)
        return
    image = files.get(key, bytearray())
    part_nbytes = max(1, len(change.after)) if rng is None else tear_nbytes
    for start in range(0, len(change.after), part_nbytes):
        offset = change.offset + start
        if offset >= len(image):  # the growth that made room for it did not survive
            return
        if rng is None or _coin(rng):
            part = change.after[start : start + min(part_nbytes, len(image) - offset)]
            image[offset : offset + len(part)] = part


def _grow_image(files: dict[_File, bytearray], key: _File, size: int) -> None:
    image = files.setdefault(key, bytearray())
    image.extend(bytes(max(0, size - len(image))))


def _coin(rng: random.Random) -> bool:
    return rng.getrandbits(1) == 1

"""Space: the bytes of all devices, taken and given back in extents; files grow here.

Taking and giving back is bookkeeping under the store's lock; growing and flushing is I/O and happens without it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

from tiered.bytes.arena import Buffer
from tiered.bytes.device.base import SCRATCH, Device, IOClass
from tiered.errors import CapacityError, CorruptionError
from tiered.store.deadline import Deadline
from tiered.store.extents import Extent, ExtentAllocator
from tiered.store.row import Row
from tiered.store.transfer import Transfer
from tiered.units import format_bytes, round_up

__all__ = ["Space"]

Extents = tuple[Extent, ...]


class Space:
    """Extents over the devices' files, and the transfers to and from them.

    The invariant: an extent is free, or has exactly one owner; one that a stream still reads is given back only when
    the stream ends.
    """

    def __init__(
        self, devices: Sequence[Device], store_uuid: bytes, condition: threading.Condition, *, deadline_s: float
    ) -> None:
        self.devices = tuple(devices)
        self.alignment = max((device.alignment for device in devices), default=4096)
        self._store_uuid = store_uuid
        self._condition = condition
        self._deadline_s = deadline_s
        self._is_growing = False
        self._promises: dict[bool, tuple[int, int]] = {}  # scratch -> bytes reserved, bytes in use before that
        self._streams: dict[Extents, int] = {}  # extents that streams read now
        self._freed: set[Extents] = set()  # of these, the ones to give back after
        self._allocator = ExtentAllocator(len(self.devices), self.alignment)
        for index, device in enumerate(self.devices):
            for file, nbytes in sorted(device.files().items()):
                if file != SCRATCH:
                    self._allocator.add_space(index, file, 0, nbytes)

    @property
    def used_nbytes(self) -> int:
        return self._allocator.used_nbytes + self._allocator.used_scratch_nbytes

    @property
    def free_nbytes(self) -> int:
        return self._allocator.free_nbytes + self._allocator.free_scratch_nbytes

    @property
    def quarantined_nbytes(self) -> int:
        return self._allocator.quarantined_nbytes

    def round_up(self, nbytes: int) -> int:
        """Return the bytes that ``nbytes`` take on the devices, and in a buffer that is to be read or written."""
        return round_up(nbytes, self.alignment)

    # Below: under the lock

    def claim(self, row: Row) -> None:
        """Mark a committed row's extents used. Raises CorruptionError naming key, file and offset."""
        for extent in row.extents:
            try:
                self._allocator.claim(extent, row.name)
            except CorruptionError as error:
                known = 0 <= extent.device < len(self.devices)
                file = self.devices[extent.device].path(extent.file) if known else error.file
                raise CorruptionError(f"{file}: {error}", key=row.name, file=file, offset=extent.offset) from error

    def take_nowait(self, nbytes: int, *, scratch: bool) -> Extents | None:
        return self._allocator.allocate_nowait(nbytes, scratch=scratch)

    def give_back(self, extents: Extents) -> None:
        if extents in self._streams:
            self._freed.add(extents)
        else:
            self._allocator.free(extents)

    def quarantine(self, extents: Extents) -> None:
        """Never use ``extents`` again: a write to them failed, and what they hold is unknown."""
        self._allocator.quarantine(extents)

    def is_streaming(self, extents: Extents) -> bool:
        return extents in self._streams

    def begin_stream(self, extents: Extents) -> None:
        """Keep ``extents`` as they are until ``end_stream``."""
        if extents:
            self._streams[extents] = self._streams.get(extents, 0) + 1

    def end_stream(self, extents: Extents) -> None:
        if not extents:
            return
        self._streams[extents] -= 1
        if not self._streams[extents]:
            del self._streams[extents]
            if extents in self._freed:
                self._freed.remove(extents)
                self._allocator.free(extents)

    # Below: without the lock

    def grow(self, nbytes: int, *, scratch: bool) -> None:
        """Grow files until ``nbytes`` are free; blocks. Raises CapacityError, DeviceError, DeadlineError."""
        deadline = Deadline(f"growing the files by {format_bytes(nbytes)}", self._deadline_s)
        with self._condition:
            while self._is_growing:
                deadline.wait(self._condition)
            self._is_growing = True
        try:
            room = [device.free_bytes() for device in self.devices]
            with self._condition:
                plan = self._allocator.plan_growth(nbytes, scratch=scratch, room=room)
            for index, file, size in plan:
                device = self.devices[index]
                old_size = device.files().get(file, 0)
                device.grow(file, size)
                with self._condition:
                    self._allocator.add_space(index, file, old_size, size)
        finally:
            with self._condition:
                self._is_growing = False
                self._condition.notify_all()

    def flush(self) -> None:
        """Make all that has landed durable; blocks. Raises DeviceError."""
        for device in self.devices:
            device.flush()

    def transfer(
        self,
        row: Row,
        buffer: Buffer,
        io_class: IOClass,
        on_done: Callable[[Transfer], None],
        *,
        first_block: int = 0,
    ) -> Transfer:
        """Return the transfer, not yet started, of as much of ``row`` as ``buffer`` holds from ``first_block`` on."""
        return Transfer(
            self.devices,
            self._store_uuid,
            row,
            memory=buffer.memory,
            io_class=io_class,
            on_done=on_done,
            first_block=first_block,
        )

    def reserve(self, nbytes: int, *, scratch: bool) -> None:
        """Grow files until ``nbytes`` can be written on top of what earlier calls promised. Raises CapacityError."""
        with self._condition:
            used, free = self._used_and_free(scratch)
            promised, base = self._promises.get(scratch, (0, used))
            self._promises[scratch] = (promised + nbytes, base)
            short = promised + nbytes - (used - base) - free
        try:
            if short > 0:
                self.grow(free + short, scratch=scratch)
        except BaseException:
            with self._condition:
                promised, base = self._promises[scratch]
                self._promises[scratch] = (promised - nbytes, base)
            raise

    def _used_and_free(self, scratch: bool) -> tuple[int, int]:
        allocator = self._allocator
        if scratch:
            return allocator.used_scratch_nbytes, allocator.free_scratch_nbytes
        return allocator.used_nbytes, allocator.free_nbytes

    def explain(self, error: CapacityError, rows: Iterable[Row | None]) -> CapacityError:
        """Return ``error`` with what a commit would free: the extents of ``rows``."""
        freed = sum(extent.nbytes for row in rows if row is not None for extent in row.extents)
        return CapacityError(f"{error}; a commit would free {format_bytes(freed)}")

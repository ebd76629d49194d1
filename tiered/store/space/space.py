"""Space: the bytes of all devices, taken and given back in extents; files grow here.

Taking and giving back is bookkeeping under the store's lock; growing and flushing is I/O and happens without it.
Flushes of several devices happen at the same time. No extent or page goes under those who read it.
"""

from __future__ import annotations

import heapq
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tiered.bytes.critical_section import ServiceThread
from tiered.bytes.device.base import SCRATCH, Device, IOClass
from tiered.errors import CapacityError, CorruptionError, DeviceError, TieredError, UsageError
from tiered.store.format.committed_rows import CommittedRows
from tiered.store.format.row import Extent, Page, Row, join
from tiered.store.space.extents import ExtentAllocator, ExtentError
from tiered.store.transfers.checked_transfer import Progress, Transfer
from tiered.store.transfers.digest_threads import DigestThreads
from tiered.store.transfers.external_read import ExternalRead
from tiered.store.waiting.deadline import Deadline
from tiered.units import KiB, MiB, format_bytes, round_up

__all__ = ["LEAST_HOLE_NBYTES", "Readers", "Space", "in_parallel"]

LEAST_HOLE_NBYTES = 64 * KiB
"""Shorter free ranges are not given to the file system: the list of a file's parts would grow for little."""

_log = logging.getLogger("tiered")


class Readers:
    """The readers of each version of a record, and the extents that wait for them. The store's lock guards it.

    The invariant: an extent that a version gave up is free only when nobody reads a version older than that one.
    """

    __slots__ = ("_active", "_waiting", "last_version", "origin", "stamps")

    def __init__(self, origin: tuple[Extent, ...] = ()) -> None:
        """``origin``: the extents of the row that the first version was before it had pages, which may be read, too."""
        self.last_version = 0
        self.origin = origin
        self.stamps: dict[int, int] = {}  # page -> the version that the catalog's was made for
        self._active: dict[Any, int] = {}  # how many read each version, which is a Pages of paged_rows.py
        self._waiting: list[tuple[int, list[Extent]]] = []  # a heap: the version that gave them up, the extents

    def begin(self, version: Any) -> None:
        """Note one more reader of ``version``."""
        self._active[version] = self._active.get(version, 0) + 1

    def end(self, version: Any) -> list[Extent]:
        """Note one less; return the extents that nobody reads any more."""
        self._active[version] -= 1
        if not self._active[version]:
            del self._active[version]
        return self._released()

    def keep(self, pages: Mapping[int, Page]) -> None:
        """Have ``pages``, which are about to change, in the memory of all versions that are read.

        Those that have others by then were read before an earlier change of them.
        """
        for version in self._active:
            version.keep(pages)

    @property
    def are_there(self) -> bool:
        """Whether anybody reads any version."""
        return bool(self._active)

    def give_up(self, extents: Iterable[Extent], version: int | None = None) -> list[Extent]:
        """Take ``extents``, which ``version``, by default the next, does not have; return those that nobody reads."""
        waiting = list(extents)
        if waiting:
            heapq.heappush(self._waiting, (self.last_version + 1 if version is None else version, waiting))
        return self._released()

    def _released(self) -> list[Extent]:
        oldest = min((version.version for version in self._active), default=self.last_version + 1)
        free: list[Extent] = []
        while self._waiting and self._waiting[0][0] <= oldest:
            free += heapq.heappop(self._waiting)[1]
        return free


def in_parallel(calls: Sequence[Callable[[], None]]) -> list[Exception]:
    """Make all ``calls`` at the same time, the last one here; return the errors, in the order of the calls.

    Blocks until all have returned; no thread is left. Where no thread can be started (limits, the end of the
    interpreter) a call is made here.
    """
    errors: list[Exception | None] = [None] * len(calls)

    def make(index: int) -> None:
        try:
            calls[index]()
        except Exception as error:
            errors[index] = error

    started: list[ServiceThread] = []
    try:
        for index in range(len(calls) - 1):
            thread = ServiceThread(target=make, args=(index,), name=f"tiered-flush-{index}")
            try:
                thread.start()
            except CapacityError:
                make(index)
            else:
                started.append(thread)
        if calls:
            make(len(calls) - 1)
    finally:
        for thread in started:
            thread.join()
    return [error for error in errors if error is not None]


# -- space -------------------------------------------------------------------------------------------------------------


Extents = tuple[Extent, ...]


class Space:
    """Extents over the devices' files, and the transfers to and from them.

    The invariant: an extent is free, or has exactly one owner; an extent that a stream reads is given back only when
    the stream ends.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        store_uuid: bytes,
        condition: threading.Condition,
        *,
        deadline_s: float,
        spared_nbytes: int = 0,
        external: Device | None = None,
        external_indices: Mapping[int, int] | None = None,
    ) -> None:
        """Files do not grow into the last ``spared_nbytes`` of a device: a full one could not commit a deletion."""
        self.devices = tuple(devices)
        self.external = external  # the user's own files, that records may lie in
        self.external_indices = {} if external_indices is None else external_indices  # by the numbers that rows have
        self.alignment = max((device.alignment for device in devices), default=4096)
        if external is not None and external.alignment > self.alignment:
            raise UsageError(
                f"external files are on a drive that is read in units of {external.alignment} bytes, the store's own in"
                f" {self.alignment}; copy the files to the store's drive, and give the copies"
            )
        self.store_uuid = store_uuid
        self.digest_threads = DigestThreads()
        self.progress = Progress()  # of all transfers
        self.quarantined_nbytes = 0  # lost to this process
        self.deleted_nbytes = 0  # of keys that commits deleted, less those that they added; since some was given back
        self.least_given_nbytes = 256 * MiB  # of these, so that it is given any
        self._has_holes = True
        self._condition = condition
        self._deadline_s = deadline_s
        self._spared_nbytes = spared_nbytes
        self._is_growing = False
        self._promises: dict[bool, tuple[int, int]] = {}  # scratch -> bytes reserved, bytes in use before that
        self._streams: dict[Extents, int] = {}  # extents that streams read now
        self._freed: set[Extents] = set()  # of these, the ones to give back after
        self._derived: dict[Extents, Readers] = {}  # extents of rows that versions with pages stand on
        self._late: dict[Extents, list[Extent]] = {}  # of these, parts to give back after
        self._allocator = ExtentAllocator(len(self.devices), self.alignment)
        self._holes: list[tuple[int, int, int, int]] = []  # that were found; some of them records may have
        for index, device in enumerate(self.devices):
            for file, nbytes in sorted(device.files().items()):
                if file != SCRATCH:
                    self._allocator.add_space(index, file, 0, nbytes)
                    self._holes += ((index, file, *each) for each in device.holes(file))

    @property
    def used_nbytes(self) -> int:
        used = self._allocator.used_nbytes() + self._allocator.used_nbytes(scratch=True)
        return used - self.quarantined_nbytes

    @property
    def free_nbytes(self) -> int:
        return self._allocator.free_nbytes() + self._allocator.free_nbytes(scratch=True)

    def round_up(self, nbytes: int) -> int:
        """Return the bytes that ``nbytes`` take on the devices, and in a buffer that is to be read or written."""
        return round_up(nbytes, self.alignment)

    # Below: under the lock

    def count_keys(self, *, added: int = 0, deleted: int = 0) -> None:
        """Note the bytes of keys that a commit added, or deleted."""
        self.deleted_nbytes = max(0, self.deleted_nbytes + deleted - added)

    def claim_all(self, rows: CommittedRows) -> None:
        """Mark the extents of all committed rows used. Raises CorruptionError naming key, file and offset."""
        try:
            self._allocator.claim_all(rows.extents)
            for hole in self._holes:
                self._allocator.dig_range(*hole)
        except ExtentError as error:
            name, extent = rows.owner(error.index), error.extent
            known = extent.device < len(self.devices)
            file = self.devices[extent.device].path(extent.file) if known else f"device {extent.device}"
            raise CorruptionError(
                f"{file}: extent of {name!r} at [{extent.offset}, {extent.offset + extent.nbytes}) of file "
                f"{extent.file} on device {extent.device} {error.problem}: catalog and data do not belong together",
                key=name,
                file=file,
                offset=extent.offset,
            ) from None

    def take_nowait(self, nbytes: int, *, scratch: bool) -> Extents | None:
        """Return extents of ``nbytes``; None where the files have to grow first."""
        return self._allocator.allocate_nowait(nbytes, scratch=scratch)

    def derive(self, extents: Extents, readers: Readers | None) -> None:
        """Note that versions with ``readers`` stand on the ``extents`` of a row without pages; None: no more."""
        if readers is None:
            self._derived.pop(extents, None)
        else:
            self._derived[extents] = readers

    def derived(self, extents: Extents) -> Readers | None:
        """Return the readers of the versions that stand on ``extents``, if there are such."""
        return self._derived.get(extents)

    def give_back(self, extents: Extents) -> None:
        readers = self._derived.pop(extents, None)
        if readers is not None and readers.are_there:
            self.give_back_when_read(extents, readers)
        elif extents in self._streams:
            self._freed.add(extents)
        else:
            self._allocator.free(extents)

    def give_back_when_read(self, extents: Iterable[Extent], readers: Readers, version: int | None = None) -> None:
        """Give back ``extents``, which ``version`` does not have, once nobody reads an older one."""
        self._free(readers.give_up(extents, version), readers)

    def _free(self, extents: Sequence[Extent], readers: Readers) -> None:
        """Free ``extents``, or have those who read the row that the record was before it had pages free them."""
        if readers.origin and readers.origin in self._streams:
            self._late.setdefault(readers.origin, []).extend(extents)
        else:
            self._allocator.free(join(sorted(extents)))  # each one costs a search under the lock

    def quarantine(self, extents: Extents) -> None:
        """Never use ``extents`` again: a write to them failed, and their contents are unknown."""
        self.quarantined_nbytes += sum(extent.nbytes for extent in extents)  # and they stay taken

    def is_streaming(self, extents: Extents) -> bool:
        return extents in self._streams

    def begin_stream(self, row: Row) -> None:
        """Keep the extents of ``row`` as they are until ``end_stream``."""
        extents = row.extents
        if row.pages is not None:
            row.pages.begin()
        elif extents:
            self._streams[extents] = self._streams.get(extents, 0) + 1

    def end_stream(self, row: Row) -> None:
        """Note that what was begun has ended."""
        extents = row.extents
        if row.pages is not None:
            self._free(row.pages.end(), row.pages.readers)
        if not extents:
            return
        self._streams[extents] -= 1
        if not self._streams[extents]:
            del self._streams[extents]
            self._allocator.free(join(sorted(self._late.pop(extents, ()))))
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
            self._grow_by(nbytes, scratch=scratch)
        finally:
            with self._condition:
                self._is_growing = False
                self._condition.notify_all()

    def _grow_by(self, nbytes: int, *, scratch: bool) -> None:
        """Grow files until ``nbytes`` are free, by another plan where a device has less room than it said."""
        full: set[int] = set()  # directories may share one file system's room
        while True:
            room = [
                0 if index in full else max(0, device.free_bytes() - self._spared_nbytes)
                for index, device in enumerate(self.devices)
            ]
            with self._condition:
                holes = self._allocator.holes(nbytes, room, scratch=scratch)
                plan = [] if holes else self._allocator.plan_growth(nbytes, room, scratch=scratch)
            try:
                for hole in holes:
                    index = hole.device
                    self.devices[index].fill(hole.file, hole.offset, hole.offset + hole.nbytes)
                    with self._condition:
                        self._allocator.fill([hole])
                for index, file, size in plan:
                    self._grow(index, file, size)
                if not holes:
                    return
            except CapacityError:
                full.add(index)
                if len(full) == len(self.devices):
                    raise

    def give_up_deleted(self) -> None:
        """Give the file system the space of deleted keys, once it is a quarter of the files and the least; blocks.

        The space that ``reserve`` promised stays. A drive that takes nothing back, or fails, is in the log, once.
        """
        with self._condition:
            used, free = self._allocator.used_nbytes(), self._allocator.free_nbytes()
            promised, base = self._promises.get(False, (0, used))
            nbytes = min(self.deleted_nbytes, free - max(0, promised - max(0, used - base)))
            if not self._has_holes or self._is_growing or nbytes < max(self.least_given_nbytes, (used + free) // 4):
                return
            self._is_growing = True
            self.deleted_nbytes = 0
            left = self._allocator.dig(nbytes, min(LEAST_HOLE_NBYTES, self.least_given_nbytes))
        try:
            while left:
                extent = left.pop()  # order: what an error leaves half given back stays a hole
                device = self.devices[extent.device]
                if not device.punch(extent.file, extent.offset, extent.offset + extent.nbytes):
                    left.append(extent)
                    raise DeviceError(f"the file system of {device.name} has no holes")
        except TieredError as error:
            self._has_holes = False
            _log.warning("what deleted keys had stays with the store's files: %s", error)
        finally:
            with self._condition:
                self._allocator.fill(left)
                self._is_growing = False
                self._condition.notify_all()

    def _grow(self, index: int, file: int, size: int) -> None:
        self.devices[index].grow(file, size)
        with self._condition:
            self._allocator.add_space(index, file, self._allocator.file_nbytes(index, file), size)

    def flush(self) -> None:
        """Make all that has landed durable, on all devices at the same time; blocks. Raises DeviceError."""
        errors = in_parallel([device.flush for device in self.devices])
        try:
            if errors:
                raise errors[0]
        finally:
            del errors  # lifetime: an error that its own frames hold keeps them all until the next collection

    def close(self) -> None:
        """End the digest threads. Their jobs are with the devices then, which are to be closed next. Idempotent."""
        self.digest_threads.close()

    def transfer(
        self,
        row: Row,
        memory: memoryview,
        io_class: IOClass,
        on_done: Callable[[Transfer], None],
        **options: Any,
    ) -> Transfer:
        """Return the transfer, not yet started, of as much of ``row`` as ``memory`` has room for; ``options`` are its.

        Records in external files are read from there.
        """
        options |= {"memory": memory, "io_class": io_class, "on_done": on_done}
        options |= {"threads": self.digest_threads, "progress": self.progress}
        if not row.ranges:
            return Transfer(self.devices, self.store_uuid, row, **options)
        assert self.external is not None, row
        return ExternalRead(self.external, self.external_indices, self.store_uuid, row, **options)

    def reserve(self, nbytes: int, *, scratch: bool) -> None:
        """Grow files until ``nbytes`` can be written on top of earlier promises. Raises CapacityError."""
        with self._condition:
            used, free = self._allocator.used_nbytes(scratch=scratch), self._allocator.free_nbytes(scratch=scratch)
            promised, base = self._promises.get(scratch, (0, used))
            base = min(base, used)  # what was in use and is free again serves promises, too
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

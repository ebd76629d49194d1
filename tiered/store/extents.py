"""The allocator over a store's files: which aligned ranges are free, and which files to grow.

Pure arithmetic: no I/O and no lock. What an extent in use stands for (open, sealed, committed) is the store's
business; the free list is rebuilt from the catalog at every open and never stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from tiered.bytes.device.base import SCRATCH
from tiered.errors import CapacityError, CorruptionError
from tiered.store.checksum import BLOCK_NBYTES
from tiered.store.free_ranges import FreeRanges
from tiered.units import MiB, TiB, divide_up, format_bytes, round_up

__all__ = ["GROWTH_NBYTES", "Extent", "ExtentAllocator", "pieces"]

GROWTH_NBYTES = 64 * MiB
"""The smallest step by which a file grows where there is room for it."""

# A device's files lie one after another on one number line, this far apart: a range never reaches the next file.
_FILE_STRIDE = 1 << 52


class Extent(NamedTuple):
    """A contiguous range of one file: the device's index, the file's number, offset and length in bytes."""

    device: int
    file: int
    offset: int
    nbytes: int


def pieces(extents: Iterable[Extent], start: int, nbytes: int) -> Iterator[Extent]:
    """Yield, in order, the parts of ``extents`` that hold the logical bytes [start, start + nbytes) of their record.

    Raises ValueError when the extents end before that.
    """
    skip, wanted = start, nbytes
    for extent in extents:
        if wanted == 0:
            return
        if skip >= extent.nbytes:
            skip -= extent.nbytes
            continue
        length = min(extent.nbytes - skip, wanted)
        yield extent._replace(offset=extent.offset + skip, nbytes=length)
        skip, wanted = 0, wanted - length
    if wanted:
        raise ValueError(f"bytes [{start}, {start + nbytes}) end {wanted} bytes beyond their extents")


class ExtentAllocator:
    """Free ranges of every device's files, best fit, coalesced.

    Every byte that ``add_space`` brought is free, used or quarantined, never two of them. Named files (durable) and
    the scratch files are counted apart. Not thread-safe: its owner's lock guards it.
    """

    def __init__(self, num_devices: int, alignment: int, *, max_file_nbytes: int = TiB) -> None:
        if num_devices < 1 or alignment < 1 or BLOCK_NBYTES % alignment or max_file_nbytes % alignment:
            raise ValueError(
                f"expected at least one device and an alignment that divides {BLOCK_NBYTES} and {max_file_nbytes}, "
                f"got {num_devices} devices and {alignment}"
            )
        self.alignment = alignment
        self._max_file_nbytes = max_file_nbytes
        self._named = [_Space(alignment, device) for device in range(num_devices)]
        self._scratch = [_Space(alignment, device) for device in range(num_devices)]
        self._rotation = 0  # the device that the next allocation starts with

    def __repr__(self) -> str:
        return (
            f"<ExtentAllocator {len(self._named)} devices: {format_bytes(self.used_nbytes)} used, "
            f"{format_bytes(self.free_nbytes)} free, {format_bytes(self.quarantined_nbytes)} quarantined>"
        )

    @property
    def free_nbytes(self) -> int:
        """Bytes of the named files that can be allocated without growing."""
        return sum(space.free_nbytes for space in self._named)

    @property
    def used_nbytes(self) -> int:
        """Bytes of the named files that are allocated or claimed."""
        return sum(space.used_nbytes for space in self._named)

    @property
    def free_scratch_nbytes(self) -> int:
        """Bytes of the scratch files that can be allocated without growing."""
        return sum(space.free_nbytes for space in self._scratch)

    @property
    def used_scratch_nbytes(self) -> int:
        """Bytes of the scratch files that are allocated."""
        return sum(space.used_nbytes for space in self._scratch)

    @property
    def quarantined_nbytes(self) -> int:
        """Bytes that are lost to this process, named and scratch."""
        return sum(space.quarantined_nbytes for space in (*self._named, *self._scratch))

    def add_space(self, device: int, file: int, start: int, end: int) -> None:
        """Make [start, end) of a file free: it grew from ``start``, or was found at open (``start`` 0).

        A length off the alignment counts up to the last aligned byte.
        """
        self._space(device, file).extend(file, start, end)

    def claim(self, extent: Extent, key: str = "") -> None:
        """Mark a range in use, as a catalog row says; ``key`` names the row in the error.

        Raises CorruptionError when the range is not aligned, not inside a known file, or in use already.
        """
        problem = self._problem(extent)
        if problem is None and not self._space(extent.device, extent.file).take(extent):
            problem = "overlaps a range that is in use"
        if problem is not None:
            raise CorruptionError(
                f"extent of {key!r} at [{extent.offset}, {extent.offset + extent.nbytes}) of file {extent.file} on "
                f"device {extent.device} {problem}: the catalog and the data files do not belong together",
                key=key,
                file=f"device {extent.device} file {extent.file}",
                offset=extent.offset,
            )

    def allocate_nowait(self, nbytes: int, *, scratch: bool = False) -> tuple[Extent, ...] | None:
        """Return extents of ``nbytes`` rounded up to the alignment, in logical order; None when free bytes are short.

        From 4 MiB per device on, the bytes are spread evenly over the devices in contiguous shares of whole blocks.
        A share is one extent (best fit) wherever one is long enough, else the longest free ranges.
        """
        spaces = self._scratch if scratch else self._named
        needed = round_up(nbytes, self.alignment)
        if needed > sum(space.free_nbytes for space in spaces):
            return None
        extents: list[Extent] = []
        for device, share in self._shares(needed) if needed else ():
            preferred = spaces[device:] + spaces[:device]
            for extent in _take_share(preferred, share):
                _append(extents, extent)
        self._rotation = (self._rotation + 1) % len(spaces)
        return tuple(extents)

    def plan_growth(
        self, nbytes: int, *, scratch: bool = False, room: Sequence[int] | None = None
    ) -> list[tuple[int, int, int]]:
        """Return the files to grow, as (device, file, new size), so that ``nbytes`` can be allocated; [] if they can.

        A file grows by what is needed, but at least by 64 MiB and by an eighth of its length; named files end at
        ``max_file_nbytes`` and the next number follows. ``room`` says how many bytes each device can still give:
        steps stay within it, and what one device lacks the others take. Raises CapacityError when all rooms together
        are short.
        """
        spaces = self._scratch if scratch else self._named
        needed = round_up(nbytes, self.alignment)
        missing = needed - sum(space.free_nbytes for space in spaces)
        if missing <= 0:
            return []
        short = [0] * len(spaces)
        for device, share in self._shares(needed):
            short[device] = max(0, share - spaces[device].free_nbytes)
        limits: list[int | None] = [None] * len(spaces)
        if room is not None:
            aligned = [nbytes_left // self.alignment * self.alignment for nbytes_left in room]
            short = _fit(short, missing, aligned)
            limits = [*aligned]
        cap = None if scratch else self._max_file_nbytes
        plan: list[tuple[int, int, int]] = []
        for space, growth, limit in zip(spaces, short, limits, strict=True):
            first = SCRATCH if scratch else 0
            plan += [(space.device, file, size) for file, size in space.growth(growth, first, cap, limit)]
        return plan

    def free(self, extents: Iterable[Extent]) -> None:
        """Give extents back; freeing what is not in use is an assertion."""
        for extent in extents:
            self._space(extent.device, extent.file).give_back(extent)

    def quarantine(self, extents: Iterable[Extent]) -> None:
        """Take extents in use out of circulation: this process never hands them out again."""
        for extent in extents:
            self._space(extent.device, extent.file).quarantine(extent)

    def _space(self, device: int, file: int) -> _Space:
        return (self._scratch if file == SCRATCH else self._named)[device]

    def _problem(self, extent: Extent) -> str | None:
        if not 0 <= extent.device < len(self._named) or extent.file < 0:
            return "is on no device of this store"
        if extent.offset < 0 or extent.nbytes <= 0:
            return "is no range of bytes"
        if extent.offset % self.alignment or extent.nbytes % self.alignment:
            return f"is not aligned to {self.alignment} bytes"
        if extent.offset + extent.nbytes > self._named[extent.device].file_nbytes(extent.file):
            return f"ends behind the file's {self._named[extent.device].file_nbytes(extent.file)} bytes"
        return None

    def _shares(self, needed: int) -> Iterator[tuple[int, int]]:
        """Yield (device, bytes) in logical order; the first device rotates from one allocation to the next."""
        num_devices = len(self._named)
        if num_devices == 1 or needed < num_devices * BLOCK_NBYTES:
            yield self._rotation, needed
            return
        blocks, extra = divmod(divide_up(needed, BLOCK_NBYTES), num_devices)
        for i in range(num_devices):
            share = min((blocks + (i < extra)) * BLOCK_NBYTES, needed)
            needed -= share
            yield (self._rotation + i) % num_devices, share


class _Space:
    """One device's named files, or its scratch file: their lengths and their free ranges."""

    __slots__ = ("_alignment", "_ends", "_free", "_quarantined", "device", "nbytes", "quarantined_nbytes")

    def __init__(self, alignment: int, device: int) -> None:
        self.device = device
        self.nbytes = 0
        self.quarantined_nbytes = 0
        self._alignment = alignment
        self._ends: dict[int, int] = {}  # file -> its length in whole alignments
        self._free = FreeRanges()
        self._quarantined: list[tuple[int, int]] = []

    @property
    def free_nbytes(self) -> int:
        return self._free.nbytes

    @property
    def used_nbytes(self) -> int:
        return self.nbytes - self._free.nbytes - self.quarantined_nbytes

    def file_nbytes(self, file: int) -> int:
        return self._ends.get(file, 0)

    def extend(self, file: int, start: int, end: int) -> None:
        old = self.file_nbytes(file)
        new = end // self._alignment * self._alignment
        if start // self._alignment * self._alignment != old or not old <= new < _FILE_STRIDE:
            raise ValueError(f"file {file} of device {self.device} has {old} bytes; [{start}, {end}) does not follow")
        self._ends[file] = new
        self.nbytes += new - old
        if new > old:
            self._free.add(file * _FILE_STRIDE + old, file * _FILE_STRIDE + new)

    def growth(self, growth: int, first: int, cap: int | None, room: int | None) -> Iterator[tuple[int, int]]:
        """Yield (file, new size) that bring at least ``growth`` bytes, from the last file on."""
        file = max(self._ends, default=first)
        while growth > 0:
            size = self.file_nbytes(file)
            step = max(growth, GROWTH_NBYTES, round_up(size // 8, self._alignment))
            if room is not None:
                step = min(step, room)
            if cap is not None:
                step = min(step, max(0, cap - size))
            if step > 0:
                yield file, size + step
                growth -= step
                room = None if room is None else room - step
            file += 1

    def take(self, extent: Extent) -> bool:
        start = extent.file * _FILE_STRIDE + extent.offset
        return self._free.take(start, start + extent.nbytes)

    def take_best(self, nbytes: int) -> Extent | None:
        start = self._free.take_best(nbytes)
        return None if start is None else Extent(self.device, *divmod(start, _FILE_STRIDE), nbytes)

    def take_longest(self, nbytes: int) -> Extent:
        start, length = self._free.take_longest(nbytes)
        return Extent(self.device, *divmod(start, _FILE_STRIDE), length)

    def give_back(self, extent: Extent) -> None:
        start, end = self._range_in_use(extent)
        self._free.add(start, end)

    def quarantine(self, extent: Extent) -> None:
        start, end = self._range_in_use(extent)
        assert not self._free.overlaps(start, end), f"{extent} is quarantined while it is free"
        self._quarantined.append((start, end))
        self.quarantined_nbytes += extent.nbytes

    def _range_in_use(self, extent: Extent) -> tuple[int, int]:
        assert 0 <= extent.offset <= extent.offset + extent.nbytes <= self.file_nbytes(extent.file), f"{extent}: where?"
        assert (extent.offset | extent.nbytes) % self._alignment == 0, f"{extent} is not aligned to {self._alignment}"
        start = extent.file * _FILE_STRIDE + extent.offset
        end = start + extent.nbytes
        quarantined = any(s < end and start < e for s, e in self._quarantined)
        assert not quarantined, f"{extent} is given back from quarantine"
        return start, end


def _take_share(spaces: Sequence[_Space], share: int) -> Iterator[Extent]:
    """Take ``share`` bytes that the spaces together hold, from the first of them where it can."""
    for space in spaces:
        extent = space.take_best(share)
        if extent is not None:
            yield extent
            return
    for space in spaces:
        while share and space.free_nbytes:
            extent = space.take_longest(share)
            share -= extent.nbytes
            yield extent


def _append(extents: list[Extent], extent: Extent) -> None:
    """Append ``extent``, joined with the last one where it goes on from there."""
    if extents:
        last = extents[-1]
        if last[:2] == extent[:2] and last.offset + last.nbytes == extent.offset:
            extents[-1] = last._replace(nbytes=last.nbytes + extent.nbytes)
            return
    extents.append(extent)


def _fit(short: Sequence[int], missing: int, room: Sequence[int]) -> list[int]:
    """Return ``short`` cut to ``room``, and what then is missing laid on the devices with the most room left."""
    if sum(room) < missing:
        raise CapacityError(
            f"{format_bytes(missing)} more are needed on the devices, which have room for {format_bytes(sum(room))}: "
            "free some space, or give the store another directory on another drive when it is created"
        )
    fitted = [min(need, limit) for need, limit in zip(short, room, strict=True)]
    left = missing - sum(fitted)
    for device in sorted(range(len(room)), key=lambda device: fitted[device] - room[device]):
        extra = min(max(0, left), room[device] - fitted[device])
        fitted[device] += extra
        left -= extra
    return fitted

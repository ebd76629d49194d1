"""The allocator over a store's files: which aligned ranges are free, which files to grow, what each device gets.

Pure arithmetic: no I/O and no lock. The store knows the meaning of an extent in use (open, sealed, committed). The free
list is rebuilt from the catalog at every open and never stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NoReturn

import numpy as np
from sortedcontainers import SortedList

from tiered.bytes.device.base import SCRATCH
from tiered.errors import CapacityError
from tiered.store.format.checksum import BLOCK_NBYTES
from tiered.store.format.row import Extent, join
from tiered.units import MiB, TiB, divide_up, format_bytes, round_up

__all__ = [
    "GROWTH_NBYTES", "DeviceSpace", "ExtentAllocator", "ExtentError", "FreeRanges", "Stripes", "block_order",
]  # fmt: skip


class FreeRanges:
    """Disjoint ranges of one number line, never adjacent, ordered by start and by length."""

    __slots__ = ("_by_length", "_ends", "_starts", "nbytes")

    def __init__(self) -> None:
        self.nbytes = 0
        self._ends: dict[int, int] = {}  # start -> end
        self._starts: SortedList[int] = SortedList()
        self._by_length: SortedList[tuple[int, int]] = SortedList()  # length and start

    def fill(self, starts: Sequence[int], ends: Sequence[int]) -> None:
        """Add many ranges at once, disjoint, and adjacent to none that there is."""
        self._ends.update(zip(starts, ends, strict=True))
        self._starts = SortedList(self._ends)
        self._by_length = SortedList((end - start, start) for start, end in self._ends.items())
        self.nbytes += sum(ends) - sum(starts)

    def add(self, start: int, end: int) -> None:
        before = self._last_before(end)
        assert before is None or self._ends[before] <= start, f"double free of [{start}, {end})"
        self.nbytes += end - start
        if before is not None and self._ends[before] == start:
            self._remove(before)
            start = before
        if end in self._ends:
            end = self._remove(end)
        self._insert(start, end)

    def take(self, start: int, end: int) -> None:
        """Cut [start, end) out of the range that holds it."""
        first = start if start in self._ends else self._last_before(start)
        assert first is not None and self._ends[first] >= end, f"[{start}, {end}) is not free"
        rest = self._remove(first)
        if first < start:
            self._insert(first, start)
        if end < rest:
            self._insert(end, rest)
        self.nbytes -= end - start

    def take_best(self, nbytes: int) -> int | None:
        """Cut ``nbytes`` from the shortest range that has them; return where."""
        index = self._by_length.bisect_left((nbytes, 0))
        if index == len(self._by_length):
            return None
        start: int = self._by_length[index][1]
        self.take(start, start + nbytes)
        return start

    def between(self, start: int, end: int) -> list[tuple[int, int]]:
        """Return the start and the end of each range that has some of [start, end)."""
        before = self._last_before(start)
        found = [(first, self._ends[first]) for first in self._starts.irange(start, end, (True, False))]
        return found if before is None or self._ends[before] <= start else [(before, self._ends[before]), *found]

    def longest_first(self) -> Iterator[tuple[int, int]]:
        """Yield the length and the start of each range, the longest first; it must not change meanwhile."""
        yield from reversed(self._by_length)

    def take_longest(self, nbytes: int) -> tuple[int, int]:
        """Cut at most ``nbytes`` from the longest range; return their start and length."""
        length, start = self._by_length[-1]
        length = min(length, nbytes)
        self.take(start, start + length)
        return start, length

    @property
    def longest_nbytes(self) -> int:
        """Length of the longest range; 0 when there is none."""
        return self._by_length[-1][0] if self._by_length else 0

    def _last_before(self, place: int) -> int | None:
        """Return the last start below ``place``."""
        index = self._starts.bisect_left(place)
        return self._starts[index - 1] if index else None

    def _insert(self, start: int, end: int) -> None:
        self._ends[start] = end
        self._starts.add(start)
        self._by_length.add((end - start, start))

    def _remove(self, start: int) -> int:
        """Take the range that begins at ``start`` out; return its end."""
        end = self._ends.pop(start)
        self._starts.remove(start)
        self._by_length.remove((end - start, start))
        return end


# -- device space ------------------------------------------------------------------------------------------------------


GROWTH_NBYTES = 64 * MiB
"""The smallest step by which a file grows where four times that is free."""

# A device's files lie one after another on one number line, this far apart: a range never reaches the next file.
_FILE_STRIDE = 1 << 52


class DeviceSpace:
    """One device's named files, or its scratch file: their lengths, their free ranges and their holes.

    ``nbytes`` are in use, or free: what lies in holes is neither until it is filled.
    """

    __slots__ = ("_alignment", "_ends", "_free", "_holes", "device", "nbytes")

    def __init__(self, alignment: int, device: int) -> None:
        self.device = device
        self.nbytes = 0
        self._alignment = alignment
        self._ends: dict[int, int] = {}  # file -> its length in whole alignments
        self._free = FreeRanges()
        self._holes = FreeRanges()

    @property
    def free_nbytes(self) -> int:
        return self._free.nbytes

    @property
    def used_nbytes(self) -> int:
        return self.nbytes - self._free.nbytes

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

    def growth(self, nbytes: int, first: int, cap: int, room: int) -> Iterator[tuple[int, int]]:
        """Yield (file, new size) that bring at least ``nbytes`` out of ``room``, from the last file on.

        Growth that no caller has asked for takes at most a quarter of ``room``: others may need it sooner.
        """
        file = max(self._ends, default=first)
        while nbytes > 0:
            size = self.file_nbytes(file)
            ahead = max(GROWTH_NBYTES, round_up(size // 8, self._alignment))
            step = max(nbytes, min(ahead, room // 4 // self._alignment * self._alignment))
            step = min(step, room, max(0, cap - size))
            if step:
                yield file, size + step
                nbytes -= step
                room -= step
            file += 1

    def files(self) -> list[int]:
        return sorted(self._ends)

    def claim(self, file: int, offsets: np.ndarray, nbytes: np.ndarray) -> int | None:
        """Take ranges of a file that is all free and behind every other; return the index of one that cannot be."""
        if not len(offsets):
            return None  # such a file may be empty: a process died when it had made it and was to grow it
        size = self._ends[file]
        fits = (nbytes > 0) & (nbytes <= size) & (offsets <= size - nbytes)
        fits &= (offsets | nbytes) % self._alignment == 0
        if not fits.all():
            return int(np.argmin(fits))
        order = np.argsort(offsets, kind="stable")
        starts, ends = offsets[order], offsets[order] + nbytes[order]
        overlaps = np.flatnonzero(ends[:-1] > starts[1:])
        if len(overlaps):
            return int(order[overlaps[0] : overlaps[0] + 2].max())
        # The free ranges lie between the end of one and the start of the next.
        base = file * _FILE_STRIDE
        free_starts, free_ends = np.append(np.int64(0), ends), np.append(starts, np.int64(size))
        is_free = free_starts < free_ends
        self._free.take(base, base + size)
        self._free.fill(
            [base + start for start in free_starts[is_free].tolist()],
            [base + end for end in free_ends[is_free].tolist()],
        )
        return None

    def take_best(self, nbytes: int) -> Extent | None:
        start = self._free.take_best(nbytes)
        return None if start is None else self._extent(start, nbytes)

    @property
    def longest_nbytes(self) -> int:
        return self._free.longest_nbytes

    def take_longest(self, nbytes: int) -> Extent:
        return self._extent(*self._free.take_longest(nbytes))

    def dig_range(self, file: int, start: int, end: int) -> None:
        """Make what is free of [start, end) of a file holes, and of the aligned bytes around it."""
        low = file * _FILE_STRIDE + start // self._alignment * self._alignment
        high = file * _FILE_STRIDE + round_up(min(end, self.file_nbytes(file)), self._alignment)
        for begin, stop in self._free.between(low, high):
            begin, stop = max(begin, low), min(stop, high)
            self._free.take(begin, stop)
            self._add_hole(begin, stop)

    def dig_longest(self, nbytes: int) -> Extent:
        """Make at most ``nbytes`` of the longest free range a hole, and return it."""
        start, length = self._free.take_longest(nbytes)
        self._add_hole(start, start + length)
        return self._extent(start, length)

    def holes(self, nbytes: int) -> Iterator[Extent]:
        """Yield holes, or their beginnings, of ``nbytes`` in all, as far as there are such; the longest first."""
        for length, start in self._holes.longest_first():
            if not nbytes:
                return
            yield self._extent(start, min(length, nbytes))
            nbytes -= min(length, nbytes)

    def fill(self, extent: Extent) -> None:
        """Note that a hole, or the beginning of one, is free space."""
        start = extent.file * _FILE_STRIDE + extent.offset
        self._holes.take(start, start + extent.nbytes)
        self.nbytes += extent.nbytes
        self._free.add(start, start + extent.nbytes)

    def _add_hole(self, start: int, end: int) -> None:
        self.nbytes -= end - start
        self._holes.add(start, end)

    def _extent(self, start: int, nbytes: int) -> Extent:
        return Extent(self.device, *divmod(start, _FILE_STRIDE), nbytes)

    def give_back(self, extent: Extent) -> None:
        assert 0 <= extent.offset <= extent.offset + extent.nbytes <= self.file_nbytes(extent.file), f"{extent}: where?"
        assert (extent.offset | extent.nbytes) % self._alignment == 0, f"{extent} is not aligned to {self._alignment}"
        start = extent.file * _FILE_STRIDE + extent.offset
        self._free.add(start, start + extent.nbytes)


# -- stripes -----------------------------------------------------------------------------------------------------------


class Stripes:
    """Deals out allocations over devices in equal parts.

    An allocation of at least 4 MiB per device is cut into shares of whole blocks, a smaller one goes to one device
    whole: the one that was given least so far.
    """

    __slots__ = ("_first", "_given")

    def __init__(self, num_devices: int) -> None:
        self._first = 0  # the device that the next shares begin with
        self._given = [0] * num_devices  # bytes

    def take(self, nbytes: int) -> list[tuple[int, int]]:
        """Return the shares of an allocation, (device, bytes) in logical order, and count them as given."""
        shares = self.shares(nbytes)
        for device, share in shares:
            self._given[device] += share
        self._first = (self._first + 1) % len(self._given)
        return shares

    def shares(self, nbytes: int) -> list[tuple[int, int]]:
        """Return (device, bytes), in logical order, of the next allocation; the device that begins rotates."""
        num_devices, num_blocks = len(self._given), divide_up(nbytes, BLOCK_NBYTES)
        order = sorted(range(num_devices), key=lambda device: self._given[device])  # least first
        if nbytes < num_devices * BLOCK_NBYTES:
            return [(order[0], nbytes)] if nbytes else []
        each, more = divmod(num_blocks, num_devices)
        left, shares = nbytes, []
        for i in range(num_devices):
            device = (self._first + i) % num_devices
            share = min(left, (each + (device in order[:more])) * BLOCK_NBYTES)  # the last block of all may be short
            shares.append((device, share))
            left -= share
        return shares


def block_order(shares: Sequence[tuple[int, int]]) -> list[int]:
    """Return the blocks of a record in an order in which a window over a few of them keeps every device busy.

    ``shares`` are (device, bytes) in logical order, as the record's extents lie. Devices take turns, each as often as
    its share calls for; the blocks of one device stay in order.
    """
    devices: list[int] = []  # of each block: where it begins
    end = 0
    for device, nbytes in shares:
        end += nbytes
        devices += [device] * (divide_up(end, BLOCK_NBYTES) - len(devices))
    counts: dict[int, int] = {}
    ranks: list[int] = []
    for device in devices:
        ranks.append(counts.get(device, 0))
        counts[device] = ranks[-1] + 1
    return sorted(range(len(devices)), key=lambda block: (ranks[block] + 0.5) / counts[devices[block]])


# -- extents -----------------------------------------------------------------------------------------------------------


class ExtentError(Exception):
    """Extent number ``index`` of those to claim cannot be in use, because of ``problem``."""

    def __init__(self, index: int, extent: Extent, problem: str) -> None:
        super().__init__(f"{extent} {problem}")
        self.index = index
        self.extent = extent
        self.problem = problem


class ExtentAllocator:
    """Free ranges of every device's files, best fit, coalesced.

    Every byte that ``add_space`` brought is free, used, or in a hole. Named files (durable) and the scratch files are
    counted apart. Not thread-safe: its owner's lock guards it.
    """

    def __init__(self, num_devices: int, alignment: int, *, max_file_nbytes: int = TiB) -> None:
        assert BLOCK_NBYTES % alignment == max_file_nbytes % alignment == 0, alignment
        self.alignment = alignment
        self._max_file_nbytes = max_file_nbytes
        self._named = [DeviceSpace(alignment, device) for device in range(num_devices)]
        self._scratch = [DeviceSpace(alignment, device) for device in range(num_devices)]
        self._stripes = {is_scratch: Stripes(num_devices) for is_scratch in (False, True)}

    def __repr__(self) -> str:
        return (
            f"<ExtentAllocator {len(self._named)} devices: {format_bytes(self.used_nbytes())} used, "
            f"{format_bytes(self.free_nbytes())} free>"
        )

    def free_nbytes(self, *, scratch: bool = False) -> int:
        """Return the bytes of the named files, or of the scratch files, that can be allocated without growing."""
        return sum(space.free_nbytes for space in (self._scratch if scratch else self._named))

    def used_nbytes(self, *, scratch: bool = False) -> int:
        """Return the bytes of the named files, or of the scratch files, that are allocated or claimed."""
        return sum(space.used_nbytes for space in (self._scratch if scratch else self._named))

    def file_nbytes(self, device: int, file: int) -> int:
        """Return the length of a file as far as ``add_space`` brought it."""
        return self._space(device, file).file_nbytes(file)

    def add_space(self, device: int, file: int, start: int, end: int) -> None:
        """Make [start, end) of a file free: it grew from ``start``, or was found at open (``start`` 0).

        A length off the alignment counts up to the last aligned byte.
        """
        self._space(device, file).extend(file, start, end)

    def claim_all(self, extents: np.ndarray) -> None:
        """Mark ranges in use as the catalog says, before any other is: (n,) of device, file, offset, nbytes < 2**63.

        Raises ExtentError for an extent that is not aligned, not inside a known file, or overlaps another.
        """
        assert not self.used_nbytes()
        known = np.zeros(len(extents), dtype=bool)
        for space in self._named:
            for file in space.files():  # few: a file grows to a TiB
                chosen = np.flatnonzero((extents["device"] == space.device) & (extents["file"] == file))
                known[chosen] = True
                offsets, nbytes = (extents[name][chosen].astype(np.int64) for name in ("offset", "nbytes"))
                bad = space.claim(file, offsets, nbytes)
                if bad is not None:
                    self._refuse(extents, int(chosen[bad]))
        if not known.all():
            self._refuse(extents, int(np.argmin(known)))

    def _refuse(self, extents: np.ndarray, index: int) -> NoReturn:
        extent = Extent(*extents[index].tolist())
        raise ExtentError(index, extent, self._problem(extent) or "overlaps a range that is in use")

    def allocate_nowait(self, nbytes: int, *, scratch: bool = False) -> tuple[Extent, ...] | None:
        """Return extents of ``nbytes`` rounded up to the alignment, in logical order; None when free bytes are short.

        From 4 MiB per device on, the bytes are spread over the devices in equal, contiguous shares of whole blocks. A
        share is one extent (best fit) wherever one is long enough, else the longest free ranges. Other devices take the
        bytes that one lacks room for.
        """
        spaces = self._scratch if scratch else self._named
        needed = round_up(nbytes, self.alignment)
        if needed > self.free_nbytes(scratch=scratch):
            return None
        extents: list[Extent] = []
        for device, share in self._stripes[scratch].take(needed):
            extents += _take_share(spaces[device:] + spaces[:device], share)
        return join(extents)

    def plan_growth(self, nbytes: int, room: Sequence[int], *, scratch: bool = False) -> list[tuple[int, int, int]]:
        """Return the files to grow, as (device, file, new size), so that ``nbytes`` can be allocated; [] if they can.

        All devices grow alike, so that small tensors use each of them. A file grows by the bytes needed, but at least
        by 64 MiB and by an eighth of its length, or by a quarter of the device's room where that is less; named files
        end at ``max_file_nbytes`` and the next number follows. ``room`` says how many bytes each device can still give:
        steps stay within it, and what one device lacks the others take. Raises CapacityError when all rooms together
        are short.
        """
        spaces = self._scratch if scratch else self._named
        needed = round_up(nbytes, self.alignment)
        missing = needed - self.free_nbytes(scratch=scratch)
        if missing <= 0:
            return []
        room = [each // self.alignment * self.alignment for each in room]
        if sum(room) < missing:
            raise CapacityError(
                f"{format_bytes(missing)} more are needed on the devices, which have room for {format_bytes(sum(room))}"
                ": free some space, or give the store another directory on another drive when it is created"
            )
        shares, even = dict(self._stripes[scratch].shares(needed)), divide_up(needed, len(spaces))
        growth = []
        for space, limit in zip(spaces, room, strict=True):
            wanted = round_up(max(shares.get(space.device, 0), even), self.alignment)
            growth.append(min(max(0, wanted - space.free_nbytes), limit))
        left = missing - sum(growth)
        for device in sorted(range(len(room)), key=lambda device: growth[device] - room[device]):  # most room first
            extra = min(max(0, left), room[device] - growth[device])
            growth[device] += extra
            left -= extra
        first, cap = (SCRATCH, _FILE_STRIDE) if scratch else (0, self._max_file_nbytes)
        plan: list[tuple[int, int, int]] = []
        for space, wanted, limit in zip(spaces, growth, room, strict=True):
            plan += [(space.device, file, size) for file, size in space.growth(wanted, first, cap, limit)]
        return plan

    def dig(self, nbytes: int, least_nbytes: int) -> list[Extent]:
        """Make at most ``nbytes`` of the named files' free ranges holes, the longest first, none below the least."""
        dug: list[Extent] = []
        nbytes = nbytes // self.alignment * self.alignment
        while nbytes and nbytes >= least_nbytes:
            space = max(self._named, key=lambda space: space.longest_nbytes)
            if space.longest_nbytes < least_nbytes:
                break
            dug.append(space.dig_longest(nbytes))
            nbytes -= dug[-1].nbytes
        return dug

    def dig_range(self, device: int, file: int, start: int, end: int) -> None:
        """Make what is free of [start, end) of a named file holes."""
        self._named[device].dig_range(file, start, end)

    def holes(self, nbytes: int, room: Sequence[int], *, scratch: bool) -> list[Extent]:
        """Return the holes to fill so that ``nbytes`` can be allocated, as far as there are any.

        Each device has its part of what is missing, 64 MiB at least where ``room`` is four times that.
        """
        missing = round_up(nbytes, self.alignment) - self.free_nbytes(scratch=scratch)
        if missing <= 0 or scratch:
            return []
        part, found = round_up(divide_up(missing, len(room)), self.alignment), list[Extent]()
        for space, limit in zip(self._named, room, strict=True):
            wanted = min(limit, max(part, min(GROWTH_NBYTES, limit // 4)))
            found += space.holes(wanted // self.alignment * self.alignment)
        return found

    def fill(self, extents: Iterable[Extent]) -> None:
        """Note that holes, as ``holes`` or ``dig`` returned them, are free space."""
        for extent in extents:
            self._named[extent.device].fill(extent)

    def free(self, extents: Iterable[Extent]) -> None:
        """Give extents back; freeing an extent that is not in use is an assertion."""
        for extent in extents:
            self._space(extent.device, extent.file).give_back(extent)

    def _space(self, device: int, file: int) -> DeviceSpace:
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


def _take_share(spaces: Sequence[DeviceSpace], share: int) -> Iterator[Extent]:
    """Take ``share`` bytes that the spaces together hold, from the first of them where it can."""
    own = spaces[0].take_best(share)
    while own is None and share >= BLOCK_NBYTES <= spaces[0].longest_nbytes:  # whole blocks lose nothing by a split
        piece = spaces[0].take_longest(share)
        yield piece
        share -= piece.nbytes
        own = spaces[0].take_best(share) if share else None
    if own is not None:
        yield own
        return
    for space in spaces[1:] if share else ():
        extent = space.take_best(share)
        if extent is not None:
            yield extent
            return
    for space in spaces:
        while share and space.free_nbytes:
            extent = space.take_longest(share)
            share -= extent.nbytes
            yield extent

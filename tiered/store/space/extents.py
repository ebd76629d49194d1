"""The allocator over a store's files: which aligned ranges are free, and which files to grow.

Pure arithmetic: no I/O and no lock. The store knows the meaning of an extent in use (open, sealed, committed). The free
list is rebuilt from the catalog at every open and never stored. Search, insertion and removal take O(log n) comparisons
and move at most one short run, so that a million ranges are built up in seconds.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, NoReturn, TypeVar

import numpy as np

from tiered.bytes.device.base import SCRATCH
from tiered.errors import CapacityError
from tiered.store.format.checksum import BLOCK_NBYTES
from tiered.store.format.row import Extent, join
from tiered.store.space.stripes import Stripes
from tiered.units import MiB, TiB, divide_up, format_bytes, round_up

__all__ = ["GROWTH_NBYTES", "DeviceSpace", "ExtentAllocator", "ExtentError", "FreeRanges"]


_Key = TypeVar("_Key", int, tuple[int, ...])


class FreeRanges:
    """Disjoint ranges of one number line, never adjacent, ordered by start and by length."""

    __slots__ = ("_ends", "_lengths", "_starts", "nbytes")

    def __init__(self) -> None:
        self.nbytes = 0
        self._ends: dict[int, int] = {}  # start -> end
        self._starts: _SortedKeys[int] = _SortedKeys()
        self._lengths: _SortedKeys[tuple[int, ...]] | None = None  # (length, start); built by the first allocation

    def fill(self, starts: Sequence[int], ends: Sequence[int]) -> None:
        """Add many ranges at once: disjoint, not adjacent, ascending, and behind all that there are."""
        self._ends.update(zip(starts, ends, strict=True))
        self._starts = _SortedKeys(self._ends)
        self._lengths = None
        self.nbytes += sum(ends) - sum(starts)

    def add(self, start: int, end: int) -> None:
        assert not self.overlaps(start, end), f"double free of [{start}, {end})"
        if start == end:
            return
        self.nbytes += end - start
        before = self._starts.last_before(start)
        if before is not None and self._ends[before] == start:
            self._remove(before)
            start = before
        after = self._ends.get(end)
        if after is not None:
            self._remove(end)
            end = after
        self._insert(start, end)

    def overlaps(self, start: int, end: int) -> bool:
        last = self._starts.last_before(end)
        return last is not None and self._ends[last] > start

    def take(self, start: int, end: int) -> bool:
        """Cut [start, end) out of the range that holds all of it; False, and nothing done, when none does."""
        first = self._starts.last_before(start + 1)
        if first is None or self._ends[first] < end:
            return False
        rest = self._ends[first]
        self._remove(first)
        if first < start:
            self._insert(first, start)
        if end < rest:
            self._insert(end, rest)
        self.nbytes -= end - start
        return True

    def take_best(self, nbytes: int) -> int | None:
        found = self._by_length().first_from((nbytes,))
        if found is None:
            return None
        self.take(found[1], found[1] + nbytes)
        return found[1]

    def take_longest(self, nbytes: int) -> tuple[int, int]:
        """Cut at most ``nbytes`` from the longest range; return their start and length."""
        length, start = self._by_length().last()
        length = min(length, nbytes)
        self.take(start, start + length)
        return start, length

    @property
    def longest_nbytes(self) -> int:
        """Length of the longest range; 0 when there is none."""
        return self._by_length().last()[0] if self.nbytes else 0

    def _by_length(self) -> _SortedKeys[tuple[int, ...]]:
        if self._lengths is None:
            self._lengths = _SortedKeys((end - start, start) for start, end in self._ends.items())
        return self._lengths

    def _insert(self, start: int, end: int) -> None:
        self._ends[start] = end
        self._starts.add(start)
        if self._lengths is not None:
            self._lengths.add((end - start, start))

    def _remove(self, start: int) -> None:
        end = self._ends.pop(start)
        self._starts.remove(start)
        if self._lengths is not None:
            self._lengths.remove((end - start, start))


class _SortedKeys(Generic[_Key]):
    """Distinct keys in order, in short runs: no operation moves more than one run."""

    __slots__ = ("_lasts", "_runs")

    _RUN = 512

    def __init__(self, keys: Iterable[_Key] = ()) -> None:
        ordered = sorted(keys)
        self._runs: list[list[_Key]] = [ordered[i : i + self._RUN] for i in range(0, len(ordered), self._RUN)]
        self._lasts: list[_Key] = [run[-1] for run in self._runs]

    def add(self, key: _Key) -> None:
        if not self._runs:
            self._runs.append([key])
            self._lasts.append(key)
            return
        i = min(bisect_left(self._lasts, key), len(self._runs) - 1)
        run = self._runs[i]
        insort(run, key)
        if len(run) > 2 * self._RUN:
            self._runs.insert(i + 1, run[self._RUN :])
            del run[self._RUN :]
            self._lasts[i] = self._runs[i + 1][-1]
            self._lasts.insert(i, run[-1])
        else:
            self._lasts[i] = run[-1]

    def remove(self, key: _Key) -> None:
        i = bisect_left(self._lasts, key)
        run = self._runs[i]
        del run[bisect_left(run, key)]
        if run:
            self._lasts[i] = run[-1]
        else:
            del self._runs[i], self._lasts[i]

    def first_from(self, key: _Key) -> _Key | None:
        """The smallest key that is not below ``key``."""
        i = bisect_left(self._lasts, key)
        if i == len(self._runs):
            return None
        run = self._runs[i]
        return run[bisect_left(run, key)]

    def last_before(self, key: _Key) -> _Key | None:
        """The largest key below ``key``."""
        i = bisect_left(self._lasts, key)
        if i < len(self._runs):
            j = bisect_left(self._runs[i], key)
            if j:
                return self._runs[i][j - 1]
        return self._lasts[i - 1] if i else None

    def last(self) -> _Key:
        return self._lasts[-1]


# -- device space ------------------------------------------------------------------------------------------------------


GROWTH_NBYTES = 64 * MiB
"""The smallest step by which a file grows where four times that is free."""

# A device's files lie one after another on one number line, this far apart: a range never reaches the next file.
_FILE_STRIDE = 1 << 52


class DeviceSpace:
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
        """Yield (file, new size) that bring at least ``growth`` bytes, from the last file on.

        Growth that no caller has asked for takes at most a quarter of ``room``: others may need it sooner.
        """
        file = max(self._ends, default=first)
        while growth > 0:
            size = self.file_nbytes(file)
            step = max(GROWTH_NBYTES, round_up(size // 8, self._alignment))
            if room is not None:
                step = min(step, room // 4 // self._alignment * self._alignment)
            step = max(step, growth)
            if room is not None:
                step = min(step, room)
            if cap is not None:
                step = min(step, max(0, cap - size))
            if step > 0:
                yield file, size + step
                growth -= step
                room = None if room is None else room - step
            file += 1

    def files(self) -> list[int]:
        return sorted(self._ends)

    def claim(self, file: int, offsets: np.ndarray, nbytes: np.ndarray) -> int | None:
        """Take ranges of a file that is all free and behind every other; return the index of one that cannot be."""
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
        return None if start is None else Extent(self.device, *divmod(start, _FILE_STRIDE), nbytes)

    @property
    def longest_nbytes(self) -> int:
        return self._free.longest_nbytes

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
        self._named = [DeviceSpace(alignment, device) for device in range(num_devices)]
        self._scratch = [DeviceSpace(alignment, device) for device in range(num_devices)]
        self._stripes = {is_scratch: Stripes(num_devices) for is_scratch in (False, True)}

    def __repr__(self) -> str:
        return (
            f"<ExtentAllocator {len(self._named)} devices: {format_bytes(self.used_nbytes())} used, "
            f"{format_bytes(self.free_nbytes())} free, {format_bytes(self.quarantined_nbytes)} quarantined>"
        )

    def free_nbytes(self, *, scratch: bool = False) -> int:
        """Return the bytes of the named files, or of the scratch files, that can be allocated without growing."""
        return sum(space.free_nbytes for space in (self._scratch if scratch else self._named))

    def used_nbytes(self, *, scratch: bool = False) -> int:
        """Return the bytes of the named files, or of the scratch files, that are allocated or claimed."""
        return sum(space.used_nbytes for space in (self._scratch if scratch else self._named))

    @property
    def quarantined_nbytes(self) -> int:
        """Bytes that are lost to this process, named and scratch."""
        return sum(space.quarantined_nbytes for space in (*self._named, *self._scratch))

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
        assert not self.used_nbytes() and not self.quarantined_nbytes
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

    def plan_growth(
        self, nbytes: int, *, scratch: bool = False, room: Sequence[int] | None = None
    ) -> list[tuple[int, int, int]]:
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
        shares, even = dict(self._stripes[scratch].shares(needed)), divide_up(needed, len(spaces))
        short = [
            max(0, round_up(max(shares.get(device, 0), even), self.alignment) - space.free_nbytes)
            for device, space in enumerate(spaces)
        ]
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
        """Give extents back; freeing an extent that is not in use is an assertion."""
        for extent in extents:
            self._space(extent.device, extent.file).give_back(extent)

    def quarantine(self, extents: Iterable[Extent]) -> None:
        """Take extents in use out of circulation: this process never hands them out again."""
        for extent in extents:
            self._space(extent.device, extent.file).quarantine(extent)

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


def _fit(short: Sequence[int], missing: int, room: Sequence[int]) -> list[int]:
    """Return ``short`` cut to ``room``, with the missing bytes laid on the devices with the most room left."""
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

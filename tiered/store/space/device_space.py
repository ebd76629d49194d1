"""One device's share of a store: how long its files are, and which of their aligned ranges are free.

Pure arithmetic: no I/O and no lock. The allocator over all devices (extents.py) owns one of these for each device.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tiered.store.format.row import Extent
from tiered.store.space.free_ranges import FreeRanges
from tiered.units import MiB, round_up

__all__ = ["GROWTH_NBYTES", "DeviceSpace"]

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

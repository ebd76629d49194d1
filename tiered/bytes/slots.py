"""Places in memory of a fixed size: where a buffer goes, and which buffers stand in its way. Pure arithmetic."""

from __future__ import annotations

import bisect
from collections.abc import Iterable

from tiered.bytes.address_ranges import AddressRanges

__all__ = ["Slots"]


class Slots:
    """Free addresses [start, end) in which large places grow from the low end and small ones from the high end.

    A place that is given back is a *slot*. The next request of just its size takes it again, so equal sizes reuse each
    other's places. Other sizes take what was never leased, the *middle*, and after that the best fit among all free
    addresses: neighbouring slots then count as one range. The invariant: slots and middle are free and overlap nowhere.
    """

    def __init__(self, start: int, end: int, *, large_nbytes: int) -> None:
        self.free = AddressRanges()
        self._whole = (start, end)
        self._large_nbytes = large_nbytes
        self._starts: list[int] = []  # of the slots, sorted
        self._sizes: dict[int, int] = {}  # start -> bytes
        self._by_size: dict[int, list[int]] = {}  # bytes -> sorted starts
        self._middle = self._whole
        if start < end:
            self.free.insert(start, end, is_warm=True)

    def take(self, nbytes: int) -> int | None:
        """Take a place of ``nbytes`` > 0 and return its start; None where no free range is as long."""
        is_large = nbytes >= self._large_nbytes
        low, high = self._middle
        if nbytes in self._by_size:
            place = self._by_size[nbytes][0 if is_large else -1]
        elif high - low >= nbytes:
            place = low if is_large else high - nbytes
        else:
            found = self.free.best_fit(nbytes, is_high=not is_large)
            if found is None:
                return None
            place = found[0] if is_large else found[1] - nbytes
        self.free.take(place, place + nbytes)
        self._break_slots(place, place + nbytes)
        self._shrink_middle(place, place + nbytes)
        return place

    def give_back(self, start: int, end: int) -> None:
        """Make a place that ``take`` returned a slot."""
        self.free.insert(start, end, is_warm=True)
        if self.free.warm_nbytes == self._whole[1] - self._whole[0]:  # all is free: the next load may be another
            self._starts, self._sizes, self._by_size, self._middle = [], {}, {}, self._whole
            return
        bisect.insort(self._starts, start)
        self._sizes[start] = end - start
        bisect.insort(self._by_size.setdefault(end - start, []), start)

    def in_the_way(self, nbytes: int, evictable: Iterable[tuple[int, int]]) -> list[int] | None:
        """Return which of ``evictable``, (address, bytes) of taken places, to give back for a place of ``nbytes``.

        Those of fewest bytes in all; of equals those whose last one comes first in ``evictable``. None: not even all
        of them leave such a place.
        """
        ranges = [(start, end, -1) for start, end in self.free.largest_warm()]
        ranges += [(start, start + size, rank) for rank, (start, size) in enumerate(evictable) if size]
        ranges.sort()
        best: tuple[int, int, list[int]] | None = None  # (bytes, last rank, addresses)
        first = cost = 0  # of the window of neighbours that ends with the current range
        for last, (start, end, rank) in enumerate(ranges):
            if last and ranges[last - 1][1] != start:
                first, cost = last, 0
            cost += end - start if rank >= 0 else 0
            while first <= last and end - ranges[first][0] >= nbytes:
                if best is None or cost <= best[0]:
                    window = [each for each in ranges[first : last + 1] if each[2] >= 0]
                    found = (cost, max((each[2] for each in window), default=-1), [each[0] for each in window])
                    best = found if best is None else min(best, found)
                cost -= ranges[first][1] - ranges[first][0] if ranges[first][2] >= 0 else 0
                first += 1
        return None if best is None else best[2]

    def _break_slots(self, start: int, end: int) -> None:
        """Forget the slots that overlap [start, end)."""
        index = max(0, bisect.bisect_right(self._starts, start) - 1)
        while index < len(self._starts) and self._starts[index] < end:
            slot = self._starts[index]
            if slot + self._sizes[slot] <= start:
                index += 1
                continue
            del self._starts[index]
            of_size = self._by_size[size := self._sizes.pop(slot)]
            del of_size[bisect.bisect_left(of_size, slot)]
            if not of_size:
                del self._by_size[size]

    def _shrink_middle(self, start: int, end: int) -> None:
        low, high = self._middle
        if start < high and low < end:
            self._middle = (min(end, high), high) if start <= low else (low, start)

"""The free addresses of an arena, and which of them occupy memory. Pure arithmetic: no lock, no system call."""

import bisect

__all__ = ["AddressRanges"]


class AddressRanges:
    """The free addresses of an arena: ranges, warm (occupying memory) or cold, neighbours of one kind always merged."""

    __slots__ = ("_by_size", "_ends", "_starts", "warm_nbytes")

    def __init__(self) -> None:
        self._starts: list[int] = []  # sorted
        self._ends: dict[int, tuple[int, bool]] = {}  # start -> (end, is_warm)
        self._by_size: list[tuple[int, int]] = []  # sorted (nbytes, start) of the warm ones
        self.warm_nbytes = 0

    def insert(self, start: int, end: int, *, is_warm: bool) -> None:
        """Add a range that overlaps none."""
        index = bisect.bisect_left(self._starts, start)
        if index < len(self._starts):
            following = self._starts[index]
            assert end <= following, "a range was freed twice"
            if following == end and self._ends[following][1] == is_warm:
                end = self._remove(index)
        if index:
            previous = self._starts[index - 1]
            previous_end, previous_is_warm = self._ends[previous]
            assert previous_end <= start, "a range was freed twice"
            if previous_end == start and previous_is_warm == is_warm:
                index -= 1
                self._remove(index)
                start = previous
        self._starts.insert(index, start)
        self._ends[start] = (end, is_warm)
        if is_warm:
            bisect.insort(self._by_size, (end - start, start))
            self.warm_nbytes += end - start

    def take(self, start: int, end: int) -> None:
        """Remove [start, end), which may be part of a range or span neighbours of both kinds."""
        index = bisect.bisect_right(self._starts, start) - 1
        while start < end:
            first = self._starts[index]
            is_warm = self._ends[first][1]
            last = self._remove(index)
            assert first <= start < last, "a range was taken that is not free"
            if first < start:
                self.insert(first, start, is_warm=is_warm)
                index += 1
            if end < last:
                self.insert(end, last, is_warm=is_warm)
            start = last

    def find_warm(self, nbytes: int) -> int | None:
        """Return the start of the smallest warm range of at least ``nbytes``, the lowest of equals."""
        found = self.best_fit(nbytes)
        return None if found is None else found[0]

    def best_fit(self, nbytes: int, *, is_high: bool = False) -> tuple[int, int] | None:
        """Return (start, end) of the smallest warm range of at least ``nbytes``; of equals the lowest, or highest."""
        index = bisect.bisect_left(self._by_size, (nbytes, 0))
        if index == len(self._by_size):
            return None
        if is_high:
            index = bisect.bisect_left(self._by_size, (self._by_size[index][0] + 1, 0)) - 1
        size, start = self._by_size[index]
        return start, start + size

    def find_any(self, nbytes: int) -> int | None:
        """Return where ``nbytes`` fit with the most warm bytes among them, the lowest of equals; None if nowhere."""
        best: tuple[int, int] | None = None  # (-warm bytes, start)
        run: list[tuple[int, int, bool]] = []  # ranges that touch
        for start in [*self._starts, -1]:
            if run and start != run[-1][1]:
                if run[-1][1] - run[0][0] >= nbytes:
                    for window in (run[0][0], run[-1][1] - nbytes):
                        warm = sum(min(e, window + nbytes) - max(s, window) for s, e, is_warm in run
                                   if is_warm and s < window + nbytes and e > window)  # fmt: skip
                        best = min(best or (1, 0), (-warm, window))
                run = []
            if start >= 0:
                run.append((start, *self._ends[start]))
        return best[1] if best else None

    def largest_warm(self) -> list[tuple[int, int]]:
        """Return (start, end) of the warm ranges, the largest first."""
        return [(start, start + nbytes) for nbytes, start in reversed(self._by_size)]

    def _remove(self, index: int) -> int:
        start = self._starts.pop(index)
        end, is_warm = self._ends.pop(start)
        if is_warm:
            del self._by_size[bisect.bisect_left(self._by_size, (end - start, start))]
            self.warm_nbytes -= end - start
        return end

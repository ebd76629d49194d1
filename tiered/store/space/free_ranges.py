"""Free ranges on one number line, ordered by start and by length, for the extent allocator.

Search, insertion and removal take O(log n) comparisons and move at most one short run, so that a million ranges are
built up in seconds.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

__all__ = ["FreeRanges"]

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

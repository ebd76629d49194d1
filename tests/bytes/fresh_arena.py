"""FreshArena: an arena that leases no address twice, so that a use after release shows."""

from __future__ import annotations

import ctypes
from collections import deque

from tiered.bytes.arena import DONTNEED, Arena, advise
from tiered.units import GiB, MiB

_RANGE_NBYTES = 64 * GiB  # address space that is mapped at a time
_POISONED_NBYTES = 256 * MiB  # released bytes that stay filled with 0xFF


class FreshArena(Arena):
    """Fills a released buffer with 0xFF, and never leases its addresses again."""

    def __init__(self, nbytes: int) -> None:
        self._poisoned: deque[tuple[int, int]] = deque()  # (start, end) of released ranges, oldest first
        self._poisoned_nbytes = 0
        super().__init__(nbytes)

    def _first_sizes(self) -> list[int]:
        return [_RANGE_NBYTES + self.nbytes]

    def _place(self, size: int) -> int:
        start = self._free.find_any(size)
        if start is None:
            self._map([_RANGE_NBYTES + size])
            start = self._mappings[-1].start
        self._free.take(start, start + size)
        return start

    def _take_back(self, start: int, end: int) -> None:
        ctypes.memset(start, 0xFF, end - start)
        self._poisoned.append((start, end))
        self._poisoned_nbytes += end - start
        while self._poisoned_nbytes > _POISONED_NBYTES:
            start, end = self._poisoned.popleft()
            advise(start, end - start, DONTNEED)
            self._poisoned_nbytes -= end - start

    def _unmap(self) -> None:
        super()._unmap()
        self._poisoned.clear()

"""Histories: what threads asked of a store and what it answered, in one order of time, and whether that can be right.

Every value is told by its key and version, so a torn one shows by itself. A write is an interval from its call to its
return: a read may see any version that was current at some time between its own call and return, and a generation
holds what was there at some time within its commit.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

__all__ = ["History", "Write", "content"]

_NEVER = 1 << 62
_LEAST_NBYTES = 8  # a value that has room for its version


@dataclass(slots=True, eq=False)
class Write:
    """One put, in-place change or deletion (``nbytes`` None) of ``key``; it may have happened if it never returned."""

    key: str
    version: int
    nbytes: int | None
    called: int
    returned: int = _NEVER


def content(key: str, version: int, nbytes: int) -> torch.Tensor:
    """Return (nbytes,) uint8 that only this version of this key has, where it has 8 bytes; these are the version."""
    words = torch.arange(nbytes // 8 + 1) * 0x9E3779B97F4A7C1 + version * 1_000_003 + sum(map(ord, key)) * 31
    words[0] = version
    return words.view(torch.uint8)[:nbytes].clone()


class History:
    """All that happened to one store. Keys that begin with a thread's number and "/" are written by that one alone."""

    def __init__(self) -> None:
        self.wrong: list[str] = []
        self._clock = itertools.count(1)
        self._versions = itertools.count(1)
        self._lock = threading.Lock()
        self._writes: dict[str, list[Write]] = {}
        self._by_thread: dict[str, list[Write]] = {}
        self._reads: dict[str, list[tuple[int, int, bytes | None]]] = {}  # called, returned, what the value begins with

    def now(self) -> int:
        """Return an instant later than all before."""
        return next(self._clock)

    def begin(self, key: str, nbytes: int | None) -> Write:
        """Note that ``key`` is about to be written; ``end`` must follow when that is acknowledged."""
        with self._lock:
            write = Write(key, next(self._versions), nbytes, self.now())
            self._writes.setdefault(key, []).append(write)
            self._by_thread.setdefault(key.partition("/")[0], []).append(write)
            return write

    def end(self, write: Write) -> None:
        write.returned = self.now()

    def read(self, key: str, called: int, value: torch.Tensor | None) -> None:
        """Note what a read of ``key`` has returned just now; None for a key that was not there."""
        returned = self.now()
        found = None if value is None else self._recognised(key, value)
        with self._lock:
            self._reads.setdefault(key, []).append((called, returned, found))

    def _recognised(self, key: str, value: torch.Tensor) -> bytes:
        """Return how the value is told: its first 8 bytes and its length; notes one that is no version of ``key``."""
        flat = value.contiguous().view(-1).view(torch.uint8) if value.numel() else torch.empty(0, dtype=torch.uint8)
        head = bytes(flat[:_LEAST_NBYTES].tolist())
        version = int.from_bytes(head, "little")
        if flat.numel() >= _LEAST_NBYTES and not (
            version < 1 << 40 and torch.equal(flat, content(key, version, flat.numel()))
        ):
            self.wrong.append(f"{key} is torn: {flat.numel()} bytes of version {version}")
        return head + flat.numel().to_bytes(8, "little")

    # Below: afterwards

    def check_reads(self) -> None:
        """Note every read that no order of the writes explains."""
        for key, reads in self._reads.items():
            if "/" in key:
                for called, returned, found in reads:
                    if not self._is_possible(self._writes.get(key, []), called, returned, found):
                        self.wrong.append(f"{key}: a read in [{called}, {returned}] got {found!r}, another's time")
            else:
                self._check_zones(key, reads)

    def _is_possible(self, writes: list[Write], called: int, returned: int, found: bytes | None) -> bool:
        """Whether ``found`` was current in [called, returned], where one thread has made all ``writes``."""
        possible = [_told(None)]
        for write in writes:
            if write.called > returned:
                break
            possible = ([] if write.returned < called else possible) + [_told(write)]
        return found in possible

    def _check_zones(self, key: str, reads: list[tuple[int, int, bytes | None]]) -> None:
        """Of a key that many threads write and none deletes: P. Gibbons, E. Korach, Testing Shared Memories (1997).

        The zone of a version is from the first return of its write and reads to the last call. There is an order if and
        only if no two forward zones overlap and no backward zone lies within a forward one.
        """
        writes = self._writes.get(key, [])
        spans = {_told(write): [(write.called, write.returned)] for write in writes}
        spans[None] = [(0, 0)]
        for called, returned, found in reads:
            if found not in spans or spans[found][0][0] > returned:
                self.wrong.append(f"{key}: {found!r} was read before it was written, or never was")
                return
            spans[found].append((called, returned))
        zones = [(min(r for _, r in span), max(c for c, _ in span)) for span in spans.values()]
        forward = sorted(zone for zone in zones if zone[0] < zone[1])
        is_wrong = any(second[0] < first[1] for first, second in itertools.pairwise(forward))
        for end, start in (zone for zone in zones if zone[0] >= zone[1] and zone[0] < _NEVER):
            is_wrong |= any(first < start and end < last for first, last in forward)
        if is_wrong:
            self.wrong.append(f"{key}: its reads and writes have no order")

    def check_state(self, what: str, values: Mapping[str, torch.Tensor], begun: int, ended: int) -> None:
        """Note where ``values``, all that the store holds, were not there at one time in [begun, ended].

        For each thread that is: its first n writes and no others, for one n.
        """
        told = {key: self._recognised(key, value) for key, value in values.items()}
        for thread, writes in self._by_thread.items():
            if any("/" not in write.key for write in writes):
                continue
            first = max((i for i, write in enumerate(writes, 1) if write.returned < begun), default=0)
            last = max((i for i, write in enumerate(writes, 1) if write.called < ended), default=0)
            possible: dict[str, list[bytes | None]] = {write.key: [None] for write in writes}
            is_right = False
            for number, write in enumerate([None, *writes[:last]]):
                if write is not None:  # one that failed may have left the one before it
                    kept = possible[write.key] if write.returned == _NEVER else []
                    possible[write.key] = [*kept, _told(write)]
                is_right |= number >= first and all(told.get(key) in each for key, each in possible.items())
            if not is_right:
                self.wrong.append(f"{what}: what thread {thread} wrote is of no one moment in [{begun}, {ended}]")
        for key in told:
            if "/" not in key:
                self._check_shared(what, self._writes.get(key, []), told[key], begun, ended)

    def _check_shared(self, what: str, writes: Iterable[Write], found: bytes, begun: int, ended: int) -> None:
        write = next((write for write in writes if _told(write) == found), None)
        if write is None or write.called > ended:
            self.wrong.append(f"{what}: {found!r} was not written by then")
        elif any(write.returned < other.called and other.returned < begun for other in writes):
            self.wrong.append(f"{what}: {found!r} had been overwritten by then")


def _told(write: Write | None) -> bytes | None:
    """Return what tells the value of ``write``, as of a read; None for none."""
    if write is None or write.nbytes is None:
        return None
    return bytes(content(write.key, write.version, min(write.nbytes, 8)).tolist()) + write.nbytes.to_bytes(8, "little")

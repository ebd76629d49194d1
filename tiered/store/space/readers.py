"""Readers: who reads which version of a record, so that neither its extents nor its pages go under them."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from typing import Protocol

from tiered.store.format.row import Extent, Page

__all__ = ["Readers", "Version"]


class Version(Protocol):
    """One version of a record, as its readers see it."""

    version: int

    def keep(self, pages: Mapping[int, Page]) -> None:
        """Have ``pages`` in memory, unless these are there."""


class Readers:
    """The readers of each version of a record, and the extents that wait for them. The store's lock guards it.

    The invariant: an extent that a version gave up is free only when nobody reads a version older than that one.
    """

    __slots__ = ("_active", "_waiting", "last_version", "origin")

    def __init__(self, origin: tuple[Extent, ...] = ()) -> None:
        """``origin``: the extents of the row that the first version was before it had pages, which may be read, too."""
        self.last_version = 0
        self.origin = origin
        self._active: dict[Version, int] = {}  # how many read it
        self._waiting: list[tuple[int, list[Extent]]] = []  # a heap: the version that gave them up, the extents

    def begin(self, version: Version) -> None:
        """Note one more reader of ``version``."""
        self._active[version] = self._active.get(version, 0) + 1

    def end(self, version: Version) -> list[Extent]:
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

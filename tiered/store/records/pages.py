"""Pages: extents and digests of the records that have too many blocks for a row, version by version.

A version is what one row says. Pages that no commit has written are in memory, all others are read from the catalog
when they are needed: a record of 64 GiB in blocks of 4 KiB costs no memory while nobody uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

from tiered.errors import CorruptionError
from tiered.store.format.checksum import DIGEST_NBYTES, PAGE_BLOCKS
from tiered.store.format.row import Extent, Page, Row, cut, pages_of
from tiered.store.space.space import Readers
from tiered.units import divide_up

__all__ = ["PageChange", "Pages", "ReadPage", "num_pages", "paged", "places_of"]

ReadPage = Callable[[Row, int], Page]


def num_pages(row: Row) -> int:
    """Return how many pages a paged row has."""
    return divide_up(row.num_blocks, PAGE_BLOCKS)


class Pages:
    """The pages of one version of a record.

    The invariant: a page is in memory here as long as the catalog has it not, or not so, and somebody may read it. So
    a version begins with all pages that the one before has in memory, and a commit hands out those that the catalog is
    about to lose, before it writes, to all versions that are read.
    """

    __slots__ = ("_own", "_read", "changed", "readers", "version")

    def __init__(self, read: ReadPage | None, readers: Readers) -> None:
        """``read`` reads a page of the catalog; None where there is none, and all pages stay in memory."""
        readers.last_version += 1
        self.version = readers.last_version
        self.readers = readers
        self.changed: dict[int, Page] = {}  # that no commit has written
        self._own: dict[int, Page] = {}  # that are not, or not as here, in the catalog
        self._read = read

    def begin(self) -> None:
        """Note one more reader of this version."""
        self.readers.begin(self)

    def end(self) -> list[Extent]:
        """Note one less; return the extents that are free by that."""
        return self.readers.end(self)

    def page(self, row: Row, number: int) -> Page:
        """Return a page of ``row``, whose version this is; may block. Raises CorruptionError, DeviceError."""
        found = self._own.get(number)
        if found is None:
            assert self._read is not None, f"page {number} of {row.name!r} is not in memory, and there is no catalog"
            try:
                found = self._read(row, number)
            except CorruptionError:
                kept = self._own.get(number)
                if kept is None:
                    raise
                return kept
            # Order: a commit that put another page there, or none, had kept this one before.
            found = self._own.get(number, found)
        return found

    def all(self, row: Row) -> Iterator[Page]:
        """Yield all pages in order; may block."""
        return (self.page(row, number) for number in range(num_pages(row)))

    def keep(self, pages: Mapping[int, Page]) -> None:
        """Have ``pages`` in memory, as they are in this version, because the catalog will not have them."""
        for number, page in pages.items():
            self._own.setdefault(number, page)

    def change(self, pages: Mapping[int, Page]) -> None:
        """Make ``pages`` this version's own."""
        self.changed.update(pages)
        self._own.update(pages)

    def inherit(self, before: Pages, *, is_sealed: bool) -> None:
        """Begin as ``before`` is; its changes are in this version's commit, too, unless they were sealed."""
        self._own.update(before._own)
        if not is_sealed:
            self.changed.update(before.changed)

    def written(self) -> None:
        """Note that the catalog has all pages of this version."""
        self.changed, self._own = {}, {}

    def __repr__(self) -> str:
        return f"<Pages version {self.version}, {len(self._own)} in memory, {len(self.changed)} to be written>"


def paged(row: Row, read: ReadPage | None, readers: Readers) -> Row:
    """Return ``row``, which has all its extents and digests, with these in pages."""
    pages = Pages(read, readers)
    pages.change(dict(enumerate(pages_of(row))))
    return replace(row, extents=(), digests=b"", written=b"", is_paged=True, pages=pages)


def places_of(page: Page, block_nbytes: int, runs: Iterable[range]) -> Iterator[tuple[Extent, ...]]:
    """Yield where each of ``runs``, ascending ranges of blocks of ``page``, lies; the last one with what is behind."""
    blocks = len(page.digests) // DIGEST_NBYTES
    stored = sum(extent.nbytes for extent in page.extents)
    sizes, end = [], 0
    for run in runs:
        start, stop = run.start * block_nbytes, stored if run.stop == blocks else run.stop * block_nbytes
        sizes += [start - end, stop - start]
        end = stop
    return islice(cut(page.extents, sizes), 1, None, 2)


class PageChange(NamedTuple):
    """A page before and after some of its blocks went to other places."""

    before: Page
    after: Page
    blocks: range  # of the page

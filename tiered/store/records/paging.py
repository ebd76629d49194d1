"""Paging: records of many blocks, whose rows have pages, and blocks of them that are written by themselves.

Bookkeeping under the store's lock, but for ``look_up``. The rule of records.py holds block by block: a block that
is written goes to fresh extents, and those it had stay as they are until the commit that has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from tiered.store.format.checksum import DIGEST_NBYTES, PAGE_BLOCKS
from tiered.store.format.row import Extent, Page, Row, join
from tiered.store.records.entry import BlockWrites, Entry, EntryState
from tiered.store.records.pages import PageChange, Pages, ReadPage, paged, places_of
from tiered.store.space.space import Readers, Space

__all__ = ["Paging", "Replaced"]


class Replaced(NamedTuple):
    """A committed row, with pages, that a commit replaces: which pages the catalog will not have as they are."""

    entry: Entry
    row: Row
    pages: Pages
    numbers: Iterable[int]
    is_whole: bool  # none of its blocks stays


class Paging:
    """The pages of a store's records, and where their blocks go."""

    def __init__(self, space: Space, read_page: ReadPage | None) -> None:
        """``read_page`` reads a page of a row of the last committed generation, and blocks; None: nothing is."""
        self.read_page = read_page
        self._space = space

    def kept(self, row: Row) -> Row:
        """Return ``row``, which has all its extents and digests, as an entry keeps it: in pages, if there are many."""
        if row.nbytes <= row.block_nbytes * PAGE_BLOCKS or row.inline is not None:
            return row
        return paged(row, self.read_page, Readers())

    def begin(self, entry: Entry) -> Row:
        """Return the row of ``entry``, whose bytes are on the device, as one with pages."""
        row = entry.row
        assert row is not None and row.inline is None and entry.state is EntryState.STORED, entry
        if not row.is_paged:
            # Order: versions that were rolled back may be read still, and stand on the same extents.
            pages = Pages(self.read_page, self._space.derived(row.extents) or Readers(row.extents))
            pages.keep({0: Page(row.generation, row.extents, row.digests, b"")})
            row = replace(row, is_paged=True, extents=(), digests=b"", pages=pages)
        return row

    def written(
        self, entry: Entry, row: Row, changes: Mapping[int, PageChange], *, is_sealed: bool, generation: int
    ) -> None:
        """Note that some blocks of ``entry`` are no more where ``row``, its newest, has them.

        ``row`` is from ``begin``, ``changes`` are of the pages that the blocks are in.
        ``is_sealed``: ``row`` belongs to a generation that was sealed, so its extents stay.
        """
        before = row.pages
        assert isinstance(before, Pages)
        later = Pages(self.read_page, before.readers)
        later.inherit(before, is_sealed=is_sealed)
        later.change({number: change.after for number, change in changes.items()})
        if entry.parts is None:
            entry.parts = BlockWrites(owns_all=not is_sealed)
            if is_sealed and entry.row is not None and not entry.row.is_paged:
                self._space.derive(entry.row.extents, before.readers)
            entry.landing = None  # its extents are those of all blocks
        parts = entry.parts
        free: list[Extent] = []
        superseded: list[Extent] = []
        for number, change in changes.items():
            runs = parts.runs(number, change.blocks)
            places = places_of(change.before, row.block_nbytes, (run for _, run in runs))
            for (is_fresh, _), place in zip(runs, places, strict=True):
                (free if is_fresh else superseded).extend(place)
            parts.add(number, change.blocks)
        parts.superseded += join(superseded)
        self._space.give_back_when_read(free, before.readers, later.version)
        entry.row = replace(row, generation=generation, pages=later)

    def free(self, entry: Entry) -> None:
        """Give back the extents of blocks that were written by themselves: another version takes their place."""
        parts, entry.parts = entry.parts, None
        if parts is None:
            return
        row = entry.row
        assert row is not None and isinstance(row.pages, Pages)
        if parts.owns_all:
            self._space.give_back_when_read(_extents(row.pages.all(row)), row.pages.readers)
        else:
            self._space.give_back_when_read(_fresh(row, row.pages, parts), row.pages.readers)

    @staticmethod
    def look_up(replaced: Iterable[Replaced]) -> dict[Entry, dict[int, Page]]:
        """Return the pages that a commit is about to take out of the catalog, as they are. Blocks, and not locked.

        Raises CorruptionError, DeviceError.
        """
        return {each.entry: {number: each.pages.page(each.row, number) for number in each.numbers} for each in replaced}

    @staticmethod
    def looked_up(replaced: Iterable[Replaced], found: Mapping[Entry, Mapping[int, Page]]) -> dict[Entry, list[Extent]]:
        """Hand the pages ``found`` to those who read them; return the extents of rows that are given up as a whole."""
        freed: dict[Entry, list[Extent]] = {}
        for entry, _, pages, _, is_whole in replaced:
            pages.readers.keep(found[entry])
            if is_whole:
                freed[entry] = list(_extents(found[entry].values()))
        return freed

    def give_back(self, old: Row | None, row: Row | None, parts: BlockWrites | None, freed: Iterable[Extent]) -> None:
        """Give back what of the committed ``old`` a generation with ``row`` has superseded: all, or some ``parts``.

        ``freed`` are the extents of ``old``, where they had to be looked up.
        """
        if parts is not None and not parts.owns_all:
            assert row is not None and isinstance(row.pages, Pages)
            if old is not None and not old.is_paged:
                self._space.derive(old.extents, None)
            self._space.give_back_when_read(parts.superseded, row.pages.readers, row.pages.version)
        elif old is not None and isinstance(old.pages, Pages):
            self._space.give_back_when_read(freed, old.pages.readers)
        elif old is not None:
            self._space.give_back(old.extents)


def _fresh(row: Row, pages: Pages, parts: BlockWrites) -> Iterator[Extent]:
    """Yield where the fresh blocks of ``row`` lie."""
    for number in parts.fresh:
        page = pages.changed[number]
        runs = parts.runs(number, range(len(page.digests) // DIGEST_NBYTES))
        for place in places_of(page, row.block_nbytes, (run for is_fresh, run in runs if is_fresh)):
            yield from place


def _extents(pages: Iterable[Page]) -> Iterator[Extent]:
    return (extent for page in pages for extent in page.extents)

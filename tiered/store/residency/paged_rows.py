"""Pages: extents and digests of the records that have too many blocks for a row, version by version.

A version is what one row says. Pages that no commit has written are in memory, all others are read from the catalog
when they are needed: a record of 64 GiB in blocks of 4 KiB costs no memory while nobody uses it.
All is bookkeeping under the store's lock, but for ``look_up_pages``. The rule of key_table.py holds block by block: a
block that is written goes to fresh extents, and those it had stay as they are until the commit that has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from tiered.errors import CorruptionError
from tiered.store.format.checksum import PAGE_BLOCKS
from tiered.store.format.places import AnyPage, Ints, Places, extents_of
from tiered.store.format.row import Extent, Page, Row, join, pack, pages_of
from tiered.store.residency.entry import BlockWrites, Entry, EntryState
from tiered.store.space.space import Readers, Space
from tiered.store.waiting.deferred_seal import DeferredSeal
from tiered.units import divide_up

__all__ = [
    "BlockChange",
    "PagedRows",
    "Pages",
    "ReadPages",
    "Replaced",
    "hand_out_pages",
    "look_up_pages",
    "num_pages",
]


ReadPages = Callable[[Row, Sequence[int]], list[Page]]


def num_pages(row: Row) -> int:
    """Return how many pages a paged row has."""
    return divide_up(row.num_blocks, PAGE_BLOCKS)


class Pages:
    """The pages of one version of a record.

    The invariant: a page is in memory here as long as the catalog has it not, or not so, and somebody may read it. So
    a version begins with all pages that the one before has in memory, and a commit hands out those that the catalog is
    about to lose, before it writes, to all versions that are read.
    """

    __slots__ = ("_own", "_read", "_stamps", "changed", "readers", "version")

    def __init__(self, read: ReadPages | None, readers: Readers) -> None:
        """``read`` reads pages of the catalog; None where there is none, and all pages stay in memory."""
        readers.last_version += 1
        self.version = readers.last_version
        self.readers = readers
        self.changed: dict[int, AnyPage] = {}  # that no commit has written
        self._own: dict[int, AnyPage] = {}  # that are not, or not as here, in the catalog
        self._stamps: dict[int, int] = {}  # of these
        self._read = read

    def begin(self) -> None:
        """Note one more reader of this version."""
        self.readers.begin(self)

    def end(self) -> list[Extent]:
        """Note one less; return the extents that are free by that."""
        return self.readers.end(self)

    def page(self, row: Row, number: int) -> Page:
        """Return a page of ``row``, whose version this is; may block. Raises CorruptionError, DeviceError."""
        return self.some(row, (number,))[0]

    def some(self, row: Row, numbers: Sequence[int]) -> list[Page]:
        """Return the pages ``numbers`` of ``row``, whose version this is; may block. CorruptionError, DeviceError."""
        own = self._own  # order: the same one throughout, for a commit that has these pages begins another
        missing = [number for number in numbers if number not in own]
        found: dict[int, Page] = {}
        if missing:
            assert self._read is not None, f"pages {missing} of {row.name!r} are not in memory, and there is no catalog"
            try:
                found = dict(zip(missing, self._read(row, missing), strict=True))
            except CorruptionError:
                if not all(number in own for number in missing):
                    raise
        # Order: a commit that put other pages there, or none, had kept these before.
        return [(own.get(number) or found[number]).packed() for number in numbers]

    def own(self, number: int) -> AnyPage | None:
        """Return page ``number`` where it is in memory."""
        return self._own.get(number)

    def stamp(self, number: int) -> int:
        """Return a number that the page ``number`` of this version shares with no other page of that number.

        It is the version that the page was made for, 0 for one that was there when the record's first use began.
        """
        stamp = self._stamps.get(number)
        return self.readers.stamps.get(number, 0) if stamp is None else stamp

    def all(self, row: Row) -> Iterator[Page]:
        """Yield all pages in order; may block."""
        return (self.page(row, number) for number in range(num_pages(row)))

    def keep(self, pages: Mapping[int, Page]) -> None:
        """Have ``pages`` in memory, as they are in this version, because the catalog will not have them."""
        for number, page in pages.items():
            # Order: the catalog, and with it the common stamp, changes later.
            self._stamps.setdefault(number, self.readers.stamps.get(number, 0))
            self._own.setdefault(number, page)

    def change(self, pages: Mapping[int, AnyPage]) -> None:
        """Make ``pages`` this version's own."""
        self._stamps.update(dict.fromkeys(pages, self.version))
        self.changed.update(pages)
        self._own.update(pages)

    def inherit(self, before: Pages, *, is_sealed: bool) -> None:
        """Begin as ``before`` is; its changes are in this version's commit, too, unless they were sealed."""
        self._own.update(before._own)
        self._stamps.update(before._stamps)
        if not is_sealed:
            self.changed.update(before.changed)

    def written(self) -> None:
        """Note that the catalog has all pages of this version."""
        # Order: the stamps stay those of the same pages all the while.
        self.readers.stamps.update((number, self._stamps[number]) for number in self.changed)
        self._stamps, self.changed, self._own = {}, {}, {}


class BlockChange(NamedTuple):
    """Some blocks of a record that went to other places."""

    pages: Mapping[int, AnyPage]  # that these are in, as they are to be
    blocks: Ints
    old: Places  # where these were


# -- paging ------------------------------------------------------------------------------------------------------------


class Replaced(NamedTuple):
    """A committed row, with pages, that a commit replaces: which pages the catalog will not have as they are."""

    entry: Entry
    row: Row
    pages: Pages
    numbers: Iterable[int]
    is_whole: bool  # none of its blocks stays


class PagedRows(DeferredSeal):
    """The pages of a store's records, and where their blocks go."""

    space: Space
    read_pages: ReadPages | None  # reads pages of a row of the last committed generation, and blocks; None: nothing is

    def kept_row(self, row: Row) -> Row:
        """Return ``row``, which has all its extents and digests, as an entry keeps it: in pages, if there are many."""
        if row.nbytes <= row.block_nbytes * PAGE_BLOCKS or row.inline is not None:
            return row
        pages = Pages(self.read_pages, Readers())
        pages.change(dict(enumerate(pages_of(row))))
        return replace(row, extents=(), digests=b"", written=b"", is_paged=True, pages=pages)

    def row_in_pages(self, entry: Entry) -> Row:
        """Return the row of ``entry``, whose bytes are on the device, as one with pages."""
        row = entry.row
        assert row is not None and row.inline is None and entry.state is EntryState.STORED, entry
        if not row.is_paged:
            # Order: versions that were rolled back may be read still, and stand on the same extents.
            pages = Pages(self.read_pages, self.space.derived(row.extents) or Readers(row.extents))
            pages.keep({0: Page(row.generation, pack(row.extents), row.digests, b"")})
            row = replace(row, is_paged=True, extents=(), digests=b"", pages=pages)
        return row

    def _note_blocks(self, entry: Entry, row: Row, change: BlockChange, *, is_sealed: bool, generation: int) -> None:
        """Note that some blocks of ``entry`` are no more where ``row``, its newest, has them.

        ``row`` is from ``row_in_pages``. ``is_sealed``: it belongs to a generation that was sealed: its extents stay.
        """
        before = row.pages
        assert isinstance(before, Pages)
        later = Pages(self.read_pages, before.readers)
        later.inherit(before, is_sealed=is_sealed)
        later.change(change.pages)
        if entry.parts is None:
            entry.parts = BlockWrites(row.num_blocks, owns_all=not is_sealed)
            if is_sealed and entry.row is not None and not entry.row.is_paged:
                self.space.derive(entry.row.extents, before.readers)
            entry.landing = None  # its extents are those of all blocks
        parts = entry.parts
        is_fresh = parts.are_fresh(change.old.start // row.block_nbytes)
        parts.add(change.blocks)
        free, superseded = extents_of(change.old.take(is_fresh)), extents_of(change.old.take(~is_fresh))
        parts.superseded += join(superseded)
        self.space.give_back_when_read(free, before.readers, later.version)
        entry.row = replace(row, generation=generation, pages=later)

    def free_blocks(self, entry: Entry) -> None:
        """Give back the extents of blocks that were written by themselves: another version takes their place."""
        parts, entry.parts = entry.parts, None
        if parts is None:
            return
        row = entry.row
        assert row is not None and isinstance(row.pages, Pages)
        if parts.owns_all:
            self.space.give_back_when_read(_extents(row.pages.all(row)), row.pages.readers)
        else:
            self.space.give_back_when_read(_fresh(row, row.pages, parts), row.pages.readers)

    def _give_back_superseded(
        self, old: Row | None, row: Row | None, parts: BlockWrites | None, freed: Iterable[Extent]
    ) -> None:
        """Give back what of the committed ``old`` a generation with ``row`` has superseded: all, or some ``parts``.

        ``freed`` are the extents of ``old``, where they had to be looked up.
        """
        if parts is not None and not parts.owns_all:
            assert row is not None and isinstance(row.pages, Pages)
            if old is not None and not old.is_paged:
                self.space.derive(old.extents, None)
            self.space.give_back_when_read(parts.superseded, row.pages.readers, row.pages.version)
        elif old is not None and isinstance(old.pages, Pages):
            self.space.give_back_when_read(freed, old.pages.readers)
        elif old is not None:
            self.space.give_back(old.extents)


def look_up_pages(replaced: Iterable[Replaced]) -> dict[Entry, dict[int, Page]]:
    """Return the pages that a commit is about to take out of the catalog, as they are. Blocks, and not locked.

    Raises CorruptionError, DeviceError.
    """
    return {
        each.entry: dict(zip(each.numbers, each.pages.some(each.row, list(each.numbers)), strict=True))
        for each in replaced
    }


def hand_out_pages(
    replaced: Iterable[Replaced], found: Mapping[Entry, Mapping[int, Page]]
) -> dict[Entry, list[Extent]]:
    """Give open readers the pages ``found``; return the extents of rows that are replaced as a whole."""
    freed: dict[Entry, list[Extent]] = {}
    for entry, _, pages, _, is_whole in replaced:
        pages.readers.keep(found[entry])
        if is_whole:
            freed[entry] = list(_extents(found[entry].values()))
    return freed


def _fresh(row: Row, pages: Pages, parts: BlockWrites) -> Iterator[Extent]:
    """Yield where the fresh blocks of ``row`` lie."""
    blocks = parts.fresh()
    for number in np.unique(blocks // PAGE_BLOCKS).tolist():
        places = Places.of(pages.changed[number].packed().places, row.block_nbytes)
        yield from extents_of(places.take(parts.are_fresh(places.start // row.block_nbytes + number * PAGE_BLOCKS)))


def _extents(pages: Iterable[Page]) -> Iterator[Extent]:
    return (extent for page in pages for extent in page.extents)

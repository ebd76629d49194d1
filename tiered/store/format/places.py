"""Places: where the blocks of a record lie, as arrays; and the arithmetic of pages whose blocks move.

Pure arithmetic: no I/O, no lock. A place is a part of one block in one extent; almost always it is the whole block.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiered.store.format.checksum import DIGEST_NBYTES, PAGE_BLOCKS
from tiered.store.format.row import EXTENT_DTYPE, Extent, Page

__all__ = ["AnyPage", "ChangedPage", "Ints", "Moved", "Places", "extents_of", "generations_of", "pages_of_blocks"]

Ints = NDArray[np.int64]


class Places(NamedTuple):
    """Places in ascending order of ``start``, in the record or page that has them. Arrays of int64, (n,)."""

    start: Ints
    device: Ints
    file: Ints
    offset: Ints
    nbytes: Ints

    @classmethod
    def of(cls, packed: bytes, block_nbytes: int) -> Places:
        """Return the places of a record, or page, that begins with a block and lies in the ``packed`` extents."""
        extents = np.frombuffer(packed, EXTENT_DTYPE)
        sizes = extents["nbytes"].astype(np.int64)
        ends = np.cumsum(sizes)
        total = int(ends[-1]) if len(ends) else 0
        start = np.arange(0, total, block_nbytes)
        if (sizes[:-1] % block_nbytes).any():  # a block that goes on in another extent
            start = np.union1d(start, ends[:-1])
        which = np.searchsorted(ends, start, "right")
        offset = extents["offset"].astype(np.int64)[which] + start - (ends - sizes)[which]
        device, file = extents["device"].astype(np.int64)[which], extents["file"].astype(np.int64)[which]
        return cls(start, device, file, offset, np.diff(start, append=total))

    @classmethod
    def in_turn(cls, extents: Iterable[Extent]) -> Places:
        """Return ``extents`` as the places of what lies in them one after another."""
        device, file, offset, nbytes = np.array(list(extents), np.int64).reshape(-1, 4).T
        return cls(np.cumsum(nbytes) - nbytes, device, file, offset, nbytes)

    def take(self, which: NDArray[np.bool_] | Ints) -> Places:
        """Return the places ``which``, a mask or ascending indices."""
        return Places(*(each[which] for each in self))

    def runs(self) -> Places:
        """Return them with those that go on where the one before ends, in the record and on the device, made one."""
        if not len(self.start):
            return self
        goes_on = (self.start[1:] == (self.start + self.nbytes)[:-1]) & self.follows()
        first = np.concatenate(([0], np.flatnonzero(~goes_on) + 1))
        return self.take(first)._replace(nbytes=np.add.reduceat(self.nbytes, first))

    def follows(self) -> NDArray[np.bool_]:
        """Return whether each but the first begins on the device where the one before ends."""
        follows: NDArray[np.bool_] = self.offset[1:] == (self.offset + self.nbytes)[:-1]
        follows &= (self.device[1:] == self.device[:-1]) & (self.file[1:] == self.file[:-1])
        return follows


def extents_of(places: Places) -> list[Extent]:
    """Return the extents that ``places`` fill, in the order of these."""
    found = places.runs()
    return list(map(Extent, *(each.tolist() for each in found[1:])))


def generations_of(page: Page) -> NDArray[np.uint64]:
    """Return the generation that each block of ``page`` was written for."""
    if page.written:
        return np.frombuffer(page.written, "<u8")
    return np.full(len(page.digests) // DIGEST_NBYTES, page.generation, np.uint64)


def pages_of_blocks(
    places: Places, digests: NDArray[np.uint64], generations: NDArray[np.uint64], block_nbytes: int
) -> list[Page]:
    """Return the pages, each whole but for the record's last one, of blocks that lie in ``places``, all ascending."""
    page = places.start // (block_nbytes * PAGE_BLOCKS)
    is_first = np.concatenate(([True], ~places.follows() | (page[1:] != page[:-1])))
    first = np.flatnonzero(is_first)
    extents = np.zeros(len(first), EXTENT_DTYPE)
    for name in ("device", "file", "offset"):
        extents[name] = getattr(places, name)[first]
    extents["nbytes"] = np.add.reduceat(places.nbytes, first)
    bounds = np.flatnonzero(np.diff(page[first], prepend=-1, append=-1)).tolist()
    found = []
    for number, (begin, end) in enumerate(itertools.pairwise(bounds)):
        blocks = slice(number * PAGE_BLOCKS, (number + 1) * PAGE_BLOCKS)
        written = generations[blocks]
        newest = int(written.max())
        of_each = b"" if int(written.min()) == newest else written.tobytes()
        found.append(Page(newest, extents[begin:end].tobytes(), digests[blocks].tobytes(), of_each))
    return found


_MOST_CHANGES, _MOST_CHANGED = 64, PAGE_BLOCKS // 2  # of a page that is not packed


class Moved(NamedTuple):
    """Blocks of a record, ascending, that were written: where to, their digests, and for which generation."""

    blocks: Ints
    places: Places
    digests: NDArray[np.uint64]
    generation: int


class ChangedPage:
    """A page of blocks that moved since it was packed. It never changes; it is packed once somebody asks for it.

    A page that is written over and over between two commits is so packed twice, and not each time.
    """

    __slots__ = ("_base", "_block_nbytes", "_moved", "_num_moved", "_number", "_packed")

    def __init__(self, base: AnyPage, number: int, moved: Moved, num_moved: int, block_nbytes: int) -> None:
        """``base`` is page ``number`` of a record, and ``num_moved`` of the blocks ``moved`` are in it."""
        self._packed: Page | None = None
        self._number, self._block_nbytes = number, block_nbytes
        earlier = base._moved if isinstance(base, ChangedPage) else ()  # order: before it is seen not to be packed
        if isinstance(base, ChangedPage) and base._packed is None:
            self._base: Page = base._base
            self._moved: tuple[Moved, ...] = (*earlier, moved)
            self._num_moved: int = base._num_moved + num_moved
        else:
            self._base, self._moved, self._num_moved = base.packed(), (moved,), num_moved
        if len(self._moved) > _MOST_CHANGES or self._num_moved > _MOST_CHANGED:
            self.packed()

    def packed(self) -> Page:
        """Return the page."""
        moved = self._moved  # order: before it is seen not to be packed
        if self._packed is None:
            self._packed = self._pack(moved)
            self._moved = ()  # lifetime: the arrays of many writes
        return self._packed

    def _pack(self, notes: tuple[Moved, ...]) -> Page:
        page, unit, first = self._base, self._block_nbytes, self._number * PAGE_BLOCKS
        digests, generations = np.frombuffer(page.digests, np.uint64).copy(), generations_of(page).copy()
        is_open = np.ones(len(digests), np.bool_)  # whether no later change has the block
        found: list[Places] = []
        for moved in reversed(notes):
            low, high = np.searchsorted(moved.blocks, (first, first + PAGE_BLOCKS))
            blocks = moved.blocks[low:high] - first
            begin, end = np.searchsorted(moved.places.start, (first * unit, (first + PAGE_BLOCKS) * unit))
            places = Places(*(each[begin:end] for each in moved.places))
            places = places._replace(start=places.start - first * unit)
            found.append(places.take(is_open[places.start // unit]))
            here = is_open[blocks]
            digests[blocks[here]], generations[blocks[here]] = moved.digests[low:high][here], moved.generation
            is_open[blocks] = False
        before = Places.of(page.places, unit)
        found.append(before.take(is_open[before.start // unit]))
        places = Places(*(np.concatenate(columns) for columns in zip(*found, strict=True)))
        return pages_of_blocks(places.take(np.argsort(places.start, kind="stable")), digests, generations, unit)[0]


AnyPage = Page | ChangedPage

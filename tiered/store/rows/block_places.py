"""BlockPlaces: where any blocks of a record lie, and their digests; pages that were looked up stay decoded.

A decoded page takes 24 KiB of the DRAM budget, at most an eighth of it in all; a caller that waits for memory gets all
of that back. The pages lie in one array, so that the blocks of many pages cost one look at it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiered.bytes.arena import Buffer
from tiered.store.format.checksum import DIGEST_NBYTES, PAGE_BLOCKS
from tiered.store.format.places import Ints, Places, generations_of
from tiered.store.format.row import Page, Row, pack
from tiered.store.residency.paged_rows import Pages
from tiered.store.residency.residency import Residency
from tiered.store.space.space import Readers
from tiered.units import round_up

__all__ = ["BlockPlaces", "Located"]

_WORDS = 3  # of 8 bytes for each block: its place, digest and generation
_UNIT, _FILE_AT, _DEVICE_AT = 4096, 36, 52  # a place is device, file + 1 and offset / 4096 in one number
_PAGE_NBYTES = 8 * _WORDS * PAGE_BLOCKS
_FEWEST_PAGES = 32


class Located(NamedTuple):
    """Some blocks of a record, ascending: the places of them all, and the digest and generation of each, uint64.

    ``places.start`` counts from the record's first byte. There are no digests of external bytes that were never read.
    """

    places: Places
    digests: NDArray[np.uint64] | None
    generations: NDArray[np.uint64]


class BlockPlaces:
    """The blocks of a store's records, looked up. All methods are thread-safe.

    The invariant: a decoded page is that of all versions for which it has the same ``Pages.stamp``.
    """

    def __init__(self, working_set: Residency) -> None:
        self._working_set = working_set
        self._most_pages = working_set.budget_bytes // 8 // _PAGE_NBYTES
        self._lock = threading.Lock()  # guards all below
        # Where each page is in the array, and its stamp; least recently used first.
        self._decoded: OrderedDict[tuple[Readers, int], tuple[int, int]] = OrderedDict()
        self._free: list[int] = []
        self._buffer: Buffer | None = None
        self._words = np.empty((_WORDS, 0, PAGE_BLOCKS), np.int64)  # in the buffer
        working_set.add_reclaimer(self.give_back)

    def locate(self, row: Row, blocks: Ints) -> Located:
        """Return where ``blocks``, ascending, of ``row`` lie; may block. A stream was begun on the row.

        Raises CorruptionError, DeviceError.
        """
        if not row.is_paged:
            return _of_page(Page(row.generation, pack(row.extents), row.digests, row.written), row, 0, blocks)
        numbers = blocks // PAGE_BLOCKS
        bounds = [0, *(np.flatnonzero(numbers[1:] != numbers[:-1]) + 1).tolist(), len(numbers)]
        needed = numbers[bounds[:-1]].tolist()
        found: list[Located] = []
        with self._lock:
            self._grow(len(needed))
            step = max(1, len(self._words[0]))
            for first in range(0, len(needed), step):
                some = needed[first : first + step]
                found += self._locate(row, blocks[bounds[first] : bounds[first + len(some)]], some)
        return found[0] if len(found) == 1 else _together(found)

    def give_back(self, nbytes: int) -> bool:
        """Give all memory back, to a caller that waits for some; return whether there was any."""
        with self._lock:  # whose holder waits for the catalog, and never for memory
            buffer, self._buffer = self._buffer, None
            self._decoded.clear()
            self._free.clear()
            self._words = np.empty((_WORDS, 0, PAGE_BLOCKS), np.int64)
        if buffer is not None:
            self._working_set.unreserve(buffer)
        return buffer is not None

    def moved(self, before: Row, after: Row, blocks: Ints, located: Located) -> None:
        """Note that ``blocks`` of ``before`` lie elsewhere in ``after``, as ``located`` says: else all is the same."""
        places, digests = located.places, located.digests
        fits = len(places.start) == len(blocks) and _are_packable(places) and digests is not None
        numbers, first = np.unique(blocks // PAGE_BLOCKS, return_index=True)
        bounds = [*first.tolist(), len(blocks)]
        packed = _packed(places) if fits else None
        with self._lock:
            slots = np.full(len(numbers), -1)
            for place, number in enumerate(numbers.tolist()):
                key = (before.pages.readers, number)
                slot, stamp = self._decoded.get(key, (None, 0))
                if slot is None or stamp != before.pages.stamp(number):
                    continue
                if packed is None or digests is None:
                    self._free.append(self._decoded.pop(key)[0])
                    continue
                slots[place] = slot
                self._decoded[key] = (slot, after.pages.stamp(number))
            if packed is None or digests is None:
                return
            of_each = np.repeat(slots, np.diff(bounds))
            is_known = of_each >= 0
            new = np.stack((packed, digests.view(np.int64), located.generations.view(np.int64)))
            self._words[:, of_each[is_known], blocks[is_known] % PAGE_BLOCKS] = new[:, is_known]

    # Below: under the lock

    def _grow(self, num_pages: int) -> None:
        """Have room for ``num_pages``, or as many as there may be, where the budget has memory that nobody needs."""
        before = len(self._words[0])
        if before == self._most_pages or (self._free and num_pages <= before):
            return
        wanted = min(self._most_pages, max(_FEWEST_PAGES, num_pages, 2 * before))
        buffer = self._working_set.reserve_nowait(wanted * _PAGE_NBYTES, is_lasting=True)
        if buffer is None:
            return
        words = np.frombuffer(buffer.memory, np.int64)[: wanted * _WORDS * PAGE_BLOCKS]
        words = words.reshape(_WORDS, wanted, PAGE_BLOCKS)
        words[:, :before] = self._words
        old, self._buffer, self._words = self._buffer, buffer, words
        self._free += range(before, wanted)
        if old is not None:
            self._working_set.unreserve(old)

    def _locate(self, row: Row, blocks: Ints, numbers: list[int]) -> list[Located]:
        """Return where ``blocks``, of the pages ``numbers``, lie; there is room for so many pages, or for none."""
        pages = row.pages
        assert isinstance(pages, Pages)
        slots = self._known_slots(pages, numbers)
        missing = [number for number, slot in zip(numbers, slots, strict=True) if slot is None]
        found = dict(zip(missing, pages.some(row, missing), strict=True)) if missing else {}
        for place, number in enumerate(numbers):
            if number in found:
                slots[place] = self._decode(row, number, found[number])
        if None in slots:
            others = [number for number in numbers if number not in found]
            found |= zip(others, pages.some(row, others), strict=True)
            return [_of_page(found[number], row, number, blocks[blocks // PAGE_BLOCKS == number]) for number in numbers]
        which: Any = slots[0]
        if len(slots) > 1:
            cuts = np.searchsorted(blocks, np.array(numbers, np.int64) * PAGE_BLOCKS)
            which = np.repeat(np.array(slots, np.int64), np.diff(cuts, append=len(blocks)))
        place, digests, generations = self._words[:, which, blocks % PAGE_BLOCKS]
        device, file = place >> _DEVICE_AT, (place >> _FILE_AT & (1 << _DEVICE_AT - _FILE_AT) - 1) - 1
        offset = (place & (1 << _FILE_AT) - 1) * _UNIT
        start = blocks * row.block_nbytes
        nbytes = np.minimum(row.block_nbytes, round_up(row.nbytes, self._working_set.space.alignment) - start)
        places = Places(start, device, file, offset, nbytes)
        return [Located(places, digests.view(np.uint64), generations.view(np.uint64))]

    def _known_slots(self, pages: Pages, numbers: list[int]) -> list[int | None]:
        """Return where in the array the pages are that are decoded as this version has them, and None for the others.

        Those that are of another version are forgotten.
        """
        found: list[int | None] = []
        for number in numbers:
            key = (pages.readers, number)
            slot, stamp = self._decoded.get(key, (None, 0))
            if slot is not None and stamp != pages.stamp(number):
                self._free.append(self._decoded.pop(key)[0])
                slot = None
            elif slot is not None:
                self._decoded.move_to_end(key)
            found.append(slot)
        return found

    def _new_slot(self, row: Row, number: int) -> int:
        """Return a place in the array for page ``number`` of ``row``, which is to be written there; there is room."""
        slot = self._free.pop() if self._free else self._decoded.popitem(last=False)[1][0]
        self._decoded[row.pages.readers, number] = (slot, row.pages.stamp(number))
        return slot

    def _decode(self, row: Row, number: int, page: Page) -> int | None:
        """Decode ``page``; return where in the array it is, None where there is no room or it does not fit."""
        if not self._words.size:
            return None
        places = Places.of(page.places, row.block_nbytes)
        num_blocks = len(page.digests) // DIGEST_NBYTES
        if len(places.start) != num_blocks or not _are_packable(places):  # a block in two extents
            return None
        slot = self._new_slot(row, number)
        words = self._words[:, slot, :num_blocks]
        words[0] = _packed(places)
        words[1] = np.frombuffer(page.digests, np.int64)
        words[2] = generations_of(page).view(np.int64)
        return slot


def _are_packable(places: Places) -> bool:
    return not (((places.file + 1) >> _DEVICE_AT - _FILE_AT).any() or (places.offset // _UNIT >> _FILE_AT).any())


def _packed(places: Places) -> Ints:
    return places.device << _DEVICE_AT | (places.file + 1) << _FILE_AT | places.offset // _UNIT


def _of_page(page: Page, row: Row, number: int, blocks: Ints) -> Located:
    """Return where ``blocks``, of page ``number`` of ``row``, lie."""
    first = number * PAGE_BLOCKS
    places = Places.of(page.places, row.block_nbytes)
    wanted = np.zeros(len(page.digests) // DIGEST_NBYTES, np.bool_)
    wanted[blocks - first] = True
    places = places.take(wanted[places.start // row.block_nbytes])
    places = places._replace(start=places.start + first * row.block_nbytes)
    return Located(places, np.frombuffer(page.digests, np.uint64)[wanted], generations_of(page)[wanted])


def _together(found: list[Located]) -> Located:
    places = Places(*(np.concatenate(each) for each in zip(*(some.places for some in found), strict=True)))
    digests = np.concatenate([some.digests for some in found if some.digests is not None])
    return Located(places, digests, np.concatenate([some.generations for some in found]))

"""Gather: any ranges of a record read by the blocks that hold them, in one round, each block under its digest.

Blocks that are neighbours on the device are one operation. Nothing becomes resident. The bytes are those of the moment
at which the reader began, whoever writes meanwhile.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiered.bytes.arena import Buffer
from tiered.bytes.device.base import Device, IOClass
from tiered.errors import CorruptionError
from tiered.store.format.checksum import DIGEST_NBYTES, scattered_digests
from tiered.store.format.places import Ints, Places
from tiered.store.format.row import ExternalRange, Row, has_unread, learn, part_of, pieces
from tiered.store.residency.residency import Residency
from tiered.store.rows.block_places import BlockPlaces, Located
from tiered.store.transfers.checked_transfer import SLAB_NBYTES, Transfer
from tiered.store.values.window import Batch, Movement, OnDone, Window, WindowJob
from tiered.units import KiB, round_up

__all__ = ["Bytes", "Gather", "Pieces", "Segments", "part_row", "put_rows", "take_rows"]

Bytes = NDArray[np.uint8]

_NUM_TRIES = 3
_MOST_UNITS = 16
_MOST_EXTERNAL_BLOCK_NBYTES = 64 * KiB  # larger ones are read slab by slab


class Segments(NamedTuple):
    """Ranges of ``nbytes`` bytes of a record, at ascending ``starts``, none over another."""

    starts: Ints
    nbytes: int

    def blocks(self, block_nbytes: int) -> Ints:
        """Return the blocks that hold them, ascending."""
        if not self.nbytes:
            return np.empty(0, np.int64)
        if len(self.starts) == 1:  # without the many small steps of arrays
            start = int(self.starts[0])
            return np.arange(start // block_nbytes, (start + self.nbytes - 1) // block_nbytes + 1)
        first, last = self.starts // block_nbytes, (self.starts + self.nbytes - 1) // block_nbytes
        most = int((last - first).max(initial=0)) + 1
        if most > 1:
            each = first[:, None] + np.arange(most)
            first = each[each <= last[:, None]]
        return first[np.concatenate(([True], first[1:] > first[:-1]))]

    def covered(self, begin: Ints, end: Ints) -> NDArray[np.bool_]:
        """Return for each of the ranges [begin, end) of the record whether they have all of its bytes."""
        are_all: NDArray[np.bool_] = self._before(end) - self._before(begin) == end - begin
        return are_all

    def _before(self, place: Ints) -> Ints:
        """Return how many of their bytes lie before ``place``."""
        number = np.searchsorted(self.starts, place)
        last = np.where(number > 0, np.minimum(place - self.starts[number - 1], self.nbytes), 0)
        return np.maximum(number - 1, 0) * self.nbytes + last

    def all_pieces(self) -> Pieces:
        """Return them as pieces where the record is in memory from its first byte on."""
        nothing = np.zeros_like(self.starts)
        return Pieces(0, self.starts, nothing, nothing + self.nbytes)

    def pieces(self, blocks: Ints, at: Ints, block_nbytes: int) -> Pieces:
        """Return what of them is in ``blocks``, some of their blocks one after another, at the places ``at``."""
        low, high = int(blocks[0]) * block_nbytes, (int(blocks[-1]) + 1) * block_nbytes
        first = int(np.searchsorted(self.starts, low - self.nbytes, "right"))
        starts = self.starts[first : int(np.searchsorted(self.starts, high))]
        begin, end = np.maximum(starts, low), np.minimum(starts + self.nbytes, high)
        index = np.searchsorted(blocks, begin // block_nbytes)
        return Pieces(first, at[index] + begin - blocks[index] * block_nbytes, begin - starts, end - begin)


class Pieces(NamedTuple):
    """Parts of segments from the ``first`` on, each contiguous in memory: where, and which bytes of its segment.

    Only the first and the last may be less than a whole segment.
    """

    first: int
    at: Ints
    skip: Ints
    nbytes: Ints

    def whole(self, nbytes: int) -> slice:
        """Return which of them are whole segments of ``nbytes``."""
        begin = int(len(self.at) and self.nbytes[0] < nbytes)
        return slice(begin, len(self.at) - int(len(self.at) > begin and self.nbytes[-1] < nbytes))

    def cut(self, nbytes: int) -> Iterator[tuple[int, slice, slice]]:
        """Yield the others: the segment, its bytes in memory, and which of its own bytes these are."""
        whole = self.whole(nbytes)
        for index in (*range(whole.start), *range(whole.stop, len(self.at))):
            at, skip, size = int(self.at[index]), int(self.skip[index]), int(self.nbytes[index])
            yield self.first + index, slice(at, at + size), slice(skip, skip + size)


def _units(memory: Bytes, at: Ints, nbytes: int) -> tuple[NDArray[np.void], Ints] | None:
    """Return ``memory`` in units, and which of them each row of ``nbytes`` is; None where these would be many."""
    unit = math.gcd(nbytes, int(np.gcd.reduce(at)))
    if nbytes > unit * _MOST_UNITS:
        return None
    whole = memory[: len(memory) // unit * unit].view(np.dtype((np.void, unit)))
    return whole, at[:, None] // unit + np.arange(nbytes // unit)


def take_rows(memory: Bytes, at: Ints, nbytes: int) -> Bytes:
    """Return the rows of ``nbytes`` that begin ``at`` in ``memory``: a copy, (n, nbytes)."""
    units = _units(memory, at, nbytes)
    if units is not None:
        return units[0][units[1]].view(np.uint8).reshape(len(at), nbytes)
    found = np.empty((len(at), nbytes), np.uint8)
    for row, start in zip(found, at.tolist(), strict=True):
        row[:] = memory[start : start + nbytes]
    return found


def put_rows(memory: Bytes, at: Ints, rows: Bytes) -> None:
    """Write ``rows``, (n, nbytes) and contiguous, to the places ``at`` of ``memory``."""
    nbytes = rows.shape[1]
    units = _units(memory, at, nbytes)
    if units is not None:
        units[0][units[1]] = rows.reshape(-1).view(units[0].dtype).reshape(units[1].shape)
        return
    for row, start in zip(rows, at.tolist(), strict=True):
        memory[start : start + nbytes] = row


def part_row(row: Row, first: int, blocks: int) -> Row:
    """Return a row of ``blocks`` blocks of ``row`` from ``first`` on; blocks where it has pages."""
    if row.is_paged:
        return part_of(row, first, blocks)
    start = first * row.block_nbytes
    nbytes = min(blocks * row.block_nbytes, row.nbytes - start)
    digests = row.digests[DIGEST_NBYTES * first : DIGEST_NBYTES * (first + blocks)]
    if row.ranges:
        return replace(row, nbytes=nbytes, ranges=_cut(row.ranges, start, nbytes), digests=digests, base_block=first)
    stored = sum(extent.nbytes for extent in row.extents) - start
    extents = tuple(pieces(row.extents, start, min(stored, round_up(nbytes, row.block_nbytes))))
    return replace(row, nbytes=nbytes, extents=extents, digests=digests, base_block=first)


def _cut(ranges: Iterable[ExternalRange], start: int, nbytes: int) -> tuple[ExternalRange, ...]:
    """Return the ranges of the bytes [start, start + nbytes) of a record, by their place in these."""
    found = []
    for each in ranges:
        begin, stop = max(start, each.start), min(start + nbytes, each.start + each.nbytes)
        if begin < stop:
            found.append(ExternalRange(begin - start, each.file, each.offset + begin - each.start, stop - begin))
    return tuple(found) or (ExternalRange(0, 0, 0, 0),)


# -- gather ------------------------------------------------------------------------------------------------------------


Use = Callable[[Pieces, Bytes], object]
"""Is called with the pieces that some blocks hold, and the memory they are in."""


class Gather:
    """Reads of blocks, through a window of buffers."""

    def __init__(self, working_set: Residency, places: BlockPlaces) -> None:
        self._working_set = working_set
        self._space = working_set.space
        self.places = places

    def run(self, row: Row, segments: Segments, use: Use, *, row_nbytes: int = 0) -> None:
        """Have ``use`` called with all of ``segments``; blocks. A stream was begun on ``row``; this ends it.

        ``row_nbytes``: where the record is a table, for the error of a damaged block. Raises CorruptionError,
        DeviceError.
        """
        with Window(self._working_set) as window:
            window.at_end = lambda _: self._space.end_stream(row)
            blocks = segments.blocks(row.block_nbytes)
            step = self.num_together(row)
            jobs = (
                self._job(row, blocks[first : first + step], segments, use, row_nbytes)
                for first in range(0, len(blocks), step)
            )
            window.run(jobs)
        with self._working_set.condition:
            self._working_set.streamed_in_bytes += len(segments.starts) * segments.nbytes

    def num_together(self, row: Row) -> int:
        """Return how many blocks of ``row`` one buffer takes."""
        most = min(SLAB_NBYTES, max(row.block_nbytes, self._working_set.budget_bytes // 8))
        return max(1, most // self._room(row))

    def _room(self, row: Row) -> int:
        """Return the bytes of a buffer that one block takes."""
        is_external = row.ranges and not self._is_in_slabs(row)
        return row.block_nbytes + (2 * self._space.alignment if is_external else 0)

    def _is_in_slabs(self, row: Row) -> bool:
        """Whether blocks of a record in external files are read as neighbours, through a Transfer."""
        return bool(row.ranges) and (len(row.ranges) > 1 or row.block_nbytes > _MOST_EXTERNAL_BLOCK_NBYTES)

    def _job(self, row: Row, blocks: Ints, segments: Segments, use: Use, row_nbytes: int) -> WindowJob:
        last_nbytes = min(row.block_nbytes, row.nbytes - int(blocks[-1]) * row.block_nbytes)
        nbytes = self._space.round_up(len(blocks) * self._room(row) - row.block_nbytes + last_nbytes)
        what = f"read of blocks {blocks[0]} to {blocks[-1]} of {row.name!r}"
        return WindowJob(nbytes, what, functools.partial(self._read, row, blocks, segments, use, row_nbytes))

    def _read(
        self, row: Row, blocks: Ints, segments: Segments, use: Use, row_nbytes: int, buffer: Buffer, on_done: OnDone
    ) -> Iterator[Movement]:
        memory = np.frombuffer(buffer.memory, np.uint8)
        at = np.arange(len(blocks)) * row.block_nbytes
        if row.ranges and not self._is_in_slabs(row):
            at = yield from self._read_each(row, blocks, at, buffer, on_done, row_nbytes)
        else:
            yield from self.read(row, blocks, at, buffer, on_done, row_nbytes)
        use(segments.pieces(blocks, at, row.block_nbytes), memory)

    def read(
        self, row: Row, blocks: Ints, at: Ints, buffer: Buffer, on_done: OnDone, row_nbytes: int = 0
    ) -> Iterator[Movement]:
        """Read ``blocks``, ascending, of ``row`` to the places ``at`` in ``buffer``, and check them."""
        way = self._read_slabs if row.ranges else self._read_each
        yield from way(row, blocks, at, buffer, on_done, row_nbytes)

    def _read_each(
        self, row: Row, blocks: Ints, at: Ints, buffer: Buffer, on_done: OnDone, row_nbytes: int
    ) -> Generator[Movement, None, Ints]:
        """As ``read``; return the places: those of external bytes are others, because these are not aligned."""
        for _ in range(_NUM_TRIES):
            located = self._located(row, blocks)
            devices, reads, found = self._plan(row, blocks, at, located)
            batch = Batch(devices, reads, buffer.memory, IOClass.DEMAND, on_done)
            yield batch
            bad = self._first_bad(row, blocks, found, located, buffer.memory, may_learn=batch.error is None)
            if located.digests is None and batch.error is not None:
                raise batch.error
            if bad is None:
                return found
            # A read of that block alone finds the error, its file and offset; or the bytes, and all is read again.
            transfer = self._space.transfer(
                part_row(row, bad, 1), buffer.memory, IOClass.DEMAND, on_done, is_checked_by_owner=True
            )
            yield transfer
            _raise_error(transfer, bad * row.block_nbytes // row_nbytes if row_nbytes else -1)
        raise CorruptionError(f"{row.name!r} is damaged: block {bad} is read as other bytes each time", key=row.name)

    def _located(self, row: Row, blocks: Ints) -> Located:
        if not row.ranges:
            return self.places.locate(row, blocks)
        (only,) = row.ranges
        start = blocks * row.block_nbytes
        nbytes = np.minimum(row.nbytes - start, row.block_nbytes)
        file = np.full(len(blocks), self._space.external_indices[only.file])
        places = Places(start, np.zeros_like(start), file, only.offset + start - only.start, nbytes)
        digests = np.frombuffer(row.digests, np.uint64)[blocks] if row.digests else None
        return Located(places, digests, np.full(len(blocks), row.generation, np.uint64))

    def _plan(self, row: Row, blocks: Ints, at: Ints, located: Located) -> tuple[tuple[Device, ...], Places, Ints]:
        """Return the devices, the reads, which start at their places in memory, and where the blocks are then."""
        places = located.places
        if not row.ranges:
            if len(places.start) == len(blocks):  # each block in one extent
                return self._space.devices, places._replace(start=at).runs(), at
            index = np.searchsorted(blocks, places.start // row.block_nbytes)
            reads = places._replace(start=at[index] + places.start % row.block_nbytes).runs()
            return self._space.devices, reads, at
        runs = places.runs()
        begin, end = runs.offset, runs.offset + runs.nbytes
        unit = self._space.alignment
        low = begin // unit * unit
        sizes = -(-end // unit) * unit - low
        where = np.cumsum(sizes) - sizes
        index = np.searchsorted(runs.start, places.start, "right") - 1
        found = where[index] + places.offset - low[index]
        reads = Places(where, runs.device, runs.file, low, sizes)
        assert self._space.external is not None, row
        return (self._space.external,), reads, found

    def _first_bad(
        self, row: Row, blocks: Ints, at: Ints, located: Located, memory: memoryview, *, may_learn: bool
    ) -> int | None:
        """Return the first of ``blocks`` that is not what was written, or that nobody had read where a read failed."""
        if located.digests is None:
            return None
        sizes = np.minimum(row.nbytes - blocks * row.block_nbytes, row.block_nbytes)
        each = zip(at.tolist(), sizes.tolist(), blocks.tolist(), located.generations.tolist(), strict=True)
        found = scattered_digests(memory, self._space.store_uuid, row.key_id, each)
        digests = np.array(found, np.uint64)
        differs = digests != located.digests
        if may_learn and has_unread(row) and differs.any():
            unread = differs & (located.digests == 0)
            learn(row, blocks[unread], digests[unread])
            self._space.progress.learned[row.name] = None
            differs &= ~unread
        bad = np.flatnonzero(differs)
        return int(blocks[bad[0]]) if len(bad) else None

    def _read_slabs(
        self, row: Row, blocks: Ints, at: Ints, buffer: Buffer, on_done: OnDone, row_nbytes: int
    ) -> Iterator[Movement]:
        bounds = [0, *(np.flatnonzero(np.diff(blocks) > 1) + 1).tolist(), len(blocks)]
        for first, last in itertools.pairwise(bounds):
            part = part_row(row, int(blocks[first]), last - first)
            start = int(at[first])
            memory = buffer.memory[start : start + self._space.round_up(part.nbytes)]
            transfer = self._space.transfer(part, memory, IOClass.DEMAND, on_done, is_checked_by_owner=True)
            yield transfer
            _raise_error(transfer, int(blocks[first]) * row.block_nbytes // row_nbytes if row_nbytes else -1)


def _raise_error(transfer: Transfer, row: int) -> None:
    """Raise the error of ``transfer``, if it has one; of a table's ``row``, unless that is negative."""
    try:
        transfer.raise_error()
    except CorruptionError as error:
        if row < 0:
            raise
        raise CorruptionError(
            f"row {row} of {error}", key=error.key, file=error.file, offset=error.offset, errno=error.errno, row=row
        ) from error

"""Scatter: any ranges of a record written, without the rest of it.

A write takes one run of fresh extents for the blocks it touches; all others stay where they are, and with them their
pages of the catalog. So a commit after it costs the changed blocks and their pages. Blocks that keep some bytes are
read first, into the memory that the new ones are written from. A record in external files gets all of its blocks anew:
it leaves these files.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tiered.bytes.arena import Buffer
from tiered.bytes.device.base import IOClass
from tiered.bytes.interrupt import INTERRUPTS
from tiered.errors import UsageError
from tiered.store.format.checksum import PAGE_BLOCKS, scattered_digests
from tiered.store.format.places import AnyPage, ChangedPage, Ints, Moved, Places, pages_of_blocks
from tiered.store.format.row import Page, Row, Spec, pack, pieces
from tiered.store.residency.entry import Entry, EntryState
from tiered.store.residency.paged_rows import BlockChange
from tiered.store.residency.residency import Residency
from tiered.store.residency.swap_in_out import Shortage
from tiered.store.rows.block_places import Located
from tiered.store.rows.gather import Bytes, Gather, Pieces, Segments
from tiered.store.values.window import Batch, Movement, OnDone, Window, WindowJob
from tiered.store.waiting.deadline import Deadline
from tiered.units import GiB, format_bytes

__all__ = ["NewBytes", "Scatter"]

_NUM_PAGES = 32  # that are changed together: the arrays of their blocks take some MB beside the budget
_MOST_COPIED_NBYTES = GiB  # of an adopted record, which the first write to a row copies


class NewBytes(Protocol):
    """New bytes of a record: where, and what they are."""

    needs_old: bool  # whether they are made of those that are there
    record_nbytes: int  # of a row of the table that they are written to; 0 where it is none

    def segments(self, spec: Spec) -> Segments:
        """Return where they go in a record of ``spec``. Raises ValueError, IndexError where they cannot."""

    def apply(self, pieces: Pieces, memory: Bytes) -> None:
        """Write the bytes of ``pieces``, which are of these segments, to their places in ``memory``."""


class _Target(NamedTuple):
    """Blocks that a write has extents for."""

    entry: Entry
    row: Row  # the entry's, with pages unless it lies in external files; a stream was begun on it
    found: Row  # the entry's as it was found
    segments: Segments
    blocks: Ints
    new: Row  # of the blocks as if they were all, in their new extents, without digests

    @property
    def streams(self) -> tuple[Row, ...]:
        return (self.row,) if self.found is self.row else (self.row, self.found)

    def nbytes_of(self, blocks: Ints) -> Ints:
        """Return the bytes of each of ``blocks``: the record's last one may be shorter."""
        return np.minimum(self.row.nbytes - blocks * self.row.block_nbytes, self.row.block_nbytes)


class Scatter:
    """Writes ``content`` to ``key``.

    The invariant: who has the turn needs no more memory; so who waits for either gets it in the end. All that was
    looked at is looked at again under the lock that installs the blocks; on a difference everything begins anew.
    """

    def __init__(self, working_set: Residency, gather: Gather, writing: set[str], key: str, content: NewBytes) -> None:
        """``writing`` are the keys that blocks are being written of."""
        self._working_set = working_set
        self._space = working_set.space
        self._condition = working_set.condition
        self._gather = gather
        self._places = gather.places
        self._writing = writing
        self._key = key
        self._content = content
        self._deadline = Deadline(f"write of a part of {key!r}", working_set.deadline_s)
        self._written: dict[int, tuple[list[int], Places]] = {}  # by the first block: digests, and where they went
        self._is_installed = False

    def run(self) -> None:
        """Write it; blocks. Raises what ``TensorMapping.write_part`` does, UsageError, DeviceError, DeadlineError."""
        working_set = self._working_set
        while True:
            nbytes = self._await_turn()
            if not nbytes:
                return working_set.write_ahead()
            buffer = working_set.reserve(nbytes)
            try:
                target = self._begin(nbytes)
            except BaseException:
                working_set.unreserve(buffer)
                raise
            if isinstance(target, _Target):
                if self._write(target, buffer):
                    return working_set.write_ahead()
                continue
            working_set.unreserve(buffer)
            if target is not None:
                working_set.grow(target)

    # Below: the turn

    def _await_turn(self) -> int:
        """Wait until it can be written; return the bytes of memory that it takes, 0 where it is written."""
        working_set = self._working_set
        self._deadline.renew()
        while True:
            INTERRUPTS.look()
            working_set.await_seal()
            with self._condition:
                entry, segments = self._find()
                if self._key in self._writing or not self._working_set.may_write(entry):
                    self._wait()
                    continue
                if working_set.must_await_seal:
                    continue
                if not len(segments.starts) or not segments.nbytes:
                    return 0
                if entry.row is not None and not entry.is_inline:
                    return self._buffer_nbytes(entry.row, self._blocks(entry.row, segments))
            self._write_in_dram()
            return 0

    def _write_in_dram(self) -> None:
        """Write it where all of the tensor is in DRAM alone, or in its row; the next commit writes all of it."""
        (lease,) = self._working_set.lease_for_update([self._key])
        try:
            # Order: the looks are those of these bytes; since the caller looked, the key may have become another.
            segments = self._content.segments(Spec.like(lease.tensor))
            self._content.apply(segments.all_pieces(), np.frombuffer(lease.buffer.memory, np.uint8))
        finally:
            self._working_set.end_update([lease])

    def _find(self) -> tuple[Entry, Segments]:
        """Return the entry, settled, and what is to be written of it; may wait."""
        entry = self._working_set.idle_entry(self._key, "write of a part")
        if entry is None or self._working_set.shown(self._key) is not entry:
            raise KeyError(self._key)
        return entry, self._content.segments(entry.spec)

    def _may_write(self, entry: Entry) -> bool:
        """Whether a write now would be in the open generation, and leave those before as they are."""
        return self._working_set.may_write(entry) and not self._working_set.must_await_seal

    def _wait(self) -> None:
        progress = (self._working_set.commit_progress(), self._space.progress.num_blocks)
        self._deadline.wait(self._condition, progress)

    def _blocks(self, row: Row, segments: Segments) -> Ints:
        """Return the blocks to write. Raises UsageError for an adopted record that is too large to copy."""
        if not row.ranges:
            return segments.blocks(row.block_nbytes)
        if row.nbytes > _MOST_COPIED_NBYTES:
            raise UsageError(
                f"a write to a part of {row.name!r}, which is adopted, would copy all {format_bytes(row.nbytes)} of it,"
                f" more than {format_bytes(_MOST_COPIED_NBYTES)}; make a table of the store's own by create_rows, copy "
                "the rows, and write there"
            )
        return np.arange(row.num_blocks)

    def _num_together(self, row: Row) -> int:
        return self._gather.num_together(replace(row, ranges=()))

    def _buffer_nbytes(self, row: Row, blocks: Ints) -> int:
        return self._space.round_up(min(self._num_together(row) * row.block_nbytes, self._stored_nbytes(row, blocks)))

    def _stored_nbytes(self, row: Row, blocks: Ints) -> int:
        """Return how many bytes of the devices ``blocks`` take."""
        start = int(blocks[-1]) * row.block_nbytes
        return (len(blocks) - 1) * row.block_nbytes + self._space.round_up(min(row.nbytes - start, row.block_nbytes))

    def _begin(self, nbytes: int) -> _Target | Shortage | None:
        """Take the turn, with ``nbytes`` of memory in hand: return where to write, with a stream begun on the row.

        Or what the files must grow by first. None: it is to be waited for without memory.
        """
        self._deadline.renew()
        with self._condition:
            entry, segments = self._find()
            while self._key in self._writing:  # who has the turn needs no more memory
                self._wait()
                entry, segments = self._find()
            if entry.is_inline or entry.row is None or not self._may_write(entry):
                return None
            blocks = self._blocks(entry.row, segments)
            if self._buffer_nbytes(entry.row, blocks) > nbytes:
                return None
            if entry.state is EntryState.CLEAN:
                self._working_set.drop(entry)
                entry.state = EntryState.STORED
            found = entry.row
            row = found if found.ranges else self._working_set.row_in_pages(entry)
            needed = self._stored_nbytes(row, blocks)
            extents = self._space.take_nowait(needed, scratch=entry.scratch)
            if extents is None:
                return Shortage(needed, entry.scratch)
            new = replace(
                row, generation=self._working_set.open_generation, extents=extents, digests=b"", written=b"",
                ranges=(), is_paged=False, pages=None,
            )  # fmt: skip
            target = _Target(entry, row, found, segments, blocks, new)
            for each in target.streams:
                self._space.begin_stream(each)
            self._writing.add(self._key)
            return target

    # Below: with the turn

    def _write(self, target: _Target, buffer: Buffer) -> bool:
        """Write the blocks and make them the key's; False where it has changed meanwhile. The buffer goes back."""
        self._is_installed = False
        self._written = {}
        with Window(self._working_set) as window:
            window.at_end = functools.partial(self._end, target)
            window.run(self._jobs(target), buffer)
            after = self._install(target, None if target.row.ranges else self._change(target))
            self._is_installed = after is not None
        if after is not None and after.is_paged and target.row.is_paged:
            self._places.moved(target.row, after, target.blocks, self._located(target))
        return self._is_installed

    def _end(self, target: _Target, window: Window) -> None:
        """Let others write the key. Under the lock, with nothing in flight."""
        self._writing.discard(self._key)
        for each in target.streams:
            self._space.end_stream(each)
        if not self._is_installed:
            (self._space.quarantine if window.has_failed else self._space.give_back)(target.new.extents)
        self._condition.notify_all()

    def _jobs(self, target: _Target) -> Iterator[WindowJob]:
        step = self._num_together(target.row)
        for first in range(0, len(target.blocks), step):
            blocks = target.blocks[first : first + step]
            what = f"write of blocks {blocks[0]} to {blocks[-1]} of {self._key!r}"
            write: Callable[[Buffer, OnDone], Iterator[Movement]]
            write = functools.partial(self._rewrite, target, blocks, first * target.row.block_nbytes)
            yield WindowJob(self._stored_nbytes(target.row, blocks), what, write)

    def _rewrite(
        self, target: _Target, blocks: Ints, start: int, buffer: Buffer, on_done: OnDone
    ) -> Iterator[Movement]:
        """Read those of ``blocks`` that keep bytes; write all, with new bytes, to the new extents from ``start`` on."""
        row, new, segments = target.row, target.new, target.segments
        unit = row.block_nbytes
        at = np.arange(len(blocks)) * unit
        begin, sizes = blocks * unit, target.nbytes_of(blocks)
        keeps = ~segments.covered(begin, begin + sizes) | self._content.needs_old
        if keeps.any():
            record_nbytes = self._content.record_nbytes
            yield from self._gather.read(row, blocks[keeps], at[keeps], buffer, on_done, record_nbytes)
        self._content.apply(segments.pieces(blocks, at, unit), np.frombuffer(buffer.memory, np.uint8))
        end, stored = int(at[-1] + sizes[-1]), self._stored_nbytes(row, blocks)
        buffer.memory[end:stored] = bytes(stored - end)
        each = zip(at.tolist(), sizes.tolist(), blocks.tolist(), [new.generation] * len(blocks), strict=True)
        digests = scattered_digests(buffer.memory, self._space.store_uuid, row.key_id, each)
        extents = tuple(pieces(new.extents, start, stored))
        batch = Batch(self._space.devices, Places.in_turn(extents), buffer.memory, IOClass.WRITE, on_done)
        yield batch
        if batch.error is not None:
            raise batch.error
        places = Places.of(pack(extents), unit)
        places = places._replace(start=begin[places.start // unit] + places.start % unit)
        self._written[int(blocks[0])] = digests, places  # order: those that read first end later

    def _change(self, target: _Target) -> BlockChange:
        """Return the pages of the blocks as they are to be, and what moved; blocks."""
        row, blocks, new = target.row, target.blocks, self._located(target)
        numbers = np.unique(blocks // PAGE_BLOCKS)
        pages: dict[int, AnyPage] = {}
        old: list[Places] = []
        again = self._change_again(target, new, numbers)
        if again:
            pages.update(again)
            numbers = numbers[~np.isin(numbers, list(again))]
            is_again = np.isin(blocks // PAGE_BLOCKS, list(again))
            old.append(self._places.locate(row, blocks[is_again]).places)
            blocks, new = blocks[~is_again], _without(new, row, is_again, list(again))
        for first in range(0, len(numbers), _NUM_PAGES):
            some = numbers[first : first + _NUM_PAGES]
            changed, moved = self._changed_pages(row, blocks, new, some)
            pages.update(zip(some.tolist(), changed, strict=True))
            old.append(moved)
        return BlockChange(pages, target.blocks, Places(*(np.concatenate(each) for each in zip(*old, strict=True))))

    def _change_again(self, target: _Target, new: Located, numbers: Ints) -> dict[int, AnyPage]:
        """Return those of the pages ``numbers`` that are in memory, as they are to be."""
        assert new.digests is not None, target.row
        moved = Moved(target.blocks, new.places, new.digests, target.new.generation)
        edges = np.searchsorted(target.blocks, numbers * PAGE_BLOCKS).tolist()
        pages: dict[int, AnyPage] = {}
        for number, (low, high) in zip(numbers.tolist(), itertools.pairwise([*edges, len(moved.blocks)]), strict=True):
            base = target.row.pages.own(number)
            if base is not None:
                pages[number] = ChangedPage(base, number, moved, high - low, target.row.block_nbytes)
        return pages

    def _changed_pages(self, row: Row, blocks: Ints, new: Located, numbers: Ints) -> tuple[list[Page], Places]:
        """Return the pages ``numbers`` with ``blocks``, in ``new`` places, in them, and the places that these leave."""
        unit = row.block_nbytes
        each = (numbers[:, None] * PAGE_BLOCKS + np.arange(PAGE_BLOCKS)).reshape(-1)
        each = each[: np.searchsorted(each, row.num_blocks)]  # all blocks of these pages
        before = self._places.locate(row, each)
        low, high = numbers[0] * PAGE_BLOCKS, (numbers[-1] + 1) * PAGE_BLOCKS
        ours = slice(*np.searchsorted(blocks, (low, high)))
        index = np.searchsorted(each, blocks[ours])
        moved = np.zeros(len(each), np.bool_)
        moved[index] = True
        is_old = moved[np.searchsorted(each, before.places.start // unit)]
        assert before.digests is not None and new.digests is not None, row
        digests, generations = before.digests.copy(), before.generations.copy()
        digests[index], generations[index] = new.digests[ours], new.generations[ours]
        added = new.places.take(np.arange(*np.searchsorted(new.places.start, (low * unit, high * unit))))
        both = zip(before.places.take(~is_old), added, strict=True)
        places = Places(*(np.concatenate(columns) for columns in both))
        places = places.take(np.argsort(places.start, kind="stable"))
        return pages_of_blocks(places, digests, generations, unit), before.places.take(is_old)

    def _located(self, target: _Target) -> Located:
        """Return where the new blocks lie."""
        written = [self._written[first] for first in sorted(self._written)]
        places = Places(*(np.concatenate(each) for each in zip(*(some for _, some in written), strict=True)))
        digests = np.array([each for some, _ in written for each in some], np.uint64)
        return Located(places, digests, np.full(len(digests), target.new.generation, np.uint64))

    def _install(self, target: _Target, change: BlockChange | None) -> Row | None:
        """Make the blocks the key's, whose row is returned; None where it has changed meanwhile: all is done again."""
        working_set, row = self._working_set, target.row
        with self._condition:
            entry = working_set.idle_entry(self._key, "write of a part")
            if entry is not target.entry or entry.row is not target.found or not self._may_write(entry):
                return None
            working_set.drop(entry)
            if change is None:
                digests = self._located(target).digests
                assert digests is not None
                self._working_set.streamed(entry, replace(target.new, digests=digests.tobytes()))
            else:
                entry.state = EntryState.STORED
                self._working_set.parts_written(entry, row, change)
            working_set.streamed_out_bytes += int(target.nbytes_of(target.blocks).sum())
            return entry.row


def _without(located: Located, row: Row, blocks: NDArray[np.bool_], pages: list[int]) -> Located:
    """Return ``located``, of blocks of ``row``, without those of the mask ``blocks``: all that are in ``pages``."""
    places, digests, generations = located
    assert digests is not None, row
    is_there = np.isin(places.start // (row.block_nbytes * PAGE_BLOCKS), pages)
    return Located(places.take(~is_there), digests[~blocks], generations[~blocks])

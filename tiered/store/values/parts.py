"""Parts: some elements of a tensor read or written, without the rest of it.

A write takes fresh extents for the blocks it touches; all others stay where they are, and with them their pages of the
catalog. So a commit after it costs the changed blocks and their pages. Blocks that keep some bytes are read first, into
the memory that the new ones are written from. A record in external files gets all of its blocks anew: it leaves these
files.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch

from tiered.bytes.arena import Buffer
from tiered.bytes.device.base import IOClass
from tiered.bytes.host_tensor import copy_contiguous
from tiered.bytes.interrupt import INTERRUPTS
from tiered.store.format.checksum import DIGEST_NBYTES, PAGE_BLOCKS
from tiered.store.format.row import Extent, ExternalRange, Page, Row, Spec, cut, join, part_of, pieces
from tiered.store.residency.entry import Entry, EntryState
from tiered.store.residency.paged_rows import PageChange
from tiered.store.residency.residency import ReadPastError, Residency
from tiered.store.residency.swap_in_out import Shortage
from tiered.store.transfers.checked_transfer import SLAB_NBYTES, Transfer
from tiered.store.values.streaming import slab_jobs, slab_transfer
from tiered.store.values.tensors import flat_of, new_tensor, plain_value, read_resident
from tiered.store.values.window import OnDone, Window
from tiered.store.waiting.calling_thread import refuse_modes
from tiered.store.waiting.deadline import Deadline
from tiered.units import divide_up, round_up

__all__ = ["PartValues", "PartWrite"]


def _part_row(row: Row, first: int, blocks: int) -> Row:
    """Return a row of some blocks of ``row``."""
    if row.is_paged:
        return part_of(row, first, blocks)
    start = first * row.block_nbytes
    nbytes = min(blocks * row.block_nbytes, row.nbytes - start)
    if row.ranges:
        digests = row.digests[DIGEST_NBYTES * first : DIGEST_NBYTES * (first + blocks)]
        return replace(row, nbytes=nbytes, ranges=_cut(row.ranges, start, nbytes), digests=digests, base_block=first)
    stored = sum(extent.nbytes for extent in row.extents) - start
    return replace(
        row,
        nbytes=nbytes,
        extents=tuple(pieces(row.extents, start, min(stored, round_up(nbytes, row.block_nbytes)))),
        digests=row.digests[DIGEST_NBYTES * first : DIGEST_NBYTES * (first + blocks)],
        base_block=first,
    )


def _cut(ranges: Iterable[ExternalRange], start: int, nbytes: int) -> tuple[ExternalRange, ...]:
    """Return the ranges of the bytes [start, start + nbytes) of a record, by their place in these."""
    found = []
    for each in ranges:
        begin, stop = max(start, each.start), min(start + nbytes, each.start + each.nbytes)
        if begin < stop:
            found.append(ExternalRange(begin - start, each.file, each.offset + begin - each.start, stop - begin))
    return tuple(found) or (ExternalRange(0, 0, 0, 0),)


def _changed_page(
    page: Page, block_nbytes: int, first: int, places: Iterable[Extent], digests: bytes, generation: int
) -> Page:
    """Return ``page`` with the blocks from ``first`` on in ``places``, written for ``generation``."""
    stored = sum(extent.nbytes for extent in page.extents)
    blocks = len(digests) // DIGEST_NBYTES
    start, stop = first * block_nbytes, min((first + blocks) * block_nbytes, stored)
    is_last = (first + blocks) * DIGEST_NBYTES == len(page.digests)
    stop = stored if is_last else stop
    extents = (*pieces(page.extents, 0, start), *places, *pieces(page.extents, stop, stored - stop))
    new = generation.to_bytes(8, "little") * blocks
    written = page.written or page.generation.to_bytes(8, "little") * (len(page.digests) // DIGEST_NBYTES)
    written = written[: 8 * first] + new + written[8 * (first + blocks) :]
    at = DIGEST_NBYTES * first
    content = page.digests[:at] + digests + page.digests[at + len(digests) :]
    if written == written[:8] * (len(written) // 8):
        return Page(generation, join(extents), content, b"")
    return Page(generation, join(extents), content, written)


# -- part write --------------------------------------------------------------------------------------------------------


def _kept_blocks(begin: int, start: int, stop: int, end: int, block_nbytes: int) -> list[range]:
    """Return the blocks in [begin, end) of a record that keep some bytes beside new ones in [start, stop)."""
    before = range(begin // block_nbytes, divide_up(start, block_nbytes)) if start > begin else range(0)
    behind = range(stop // block_nbytes, divide_up(end, block_nbytes)) if stop < end else range(0)
    if before and behind and behind.start <= before.stop:
        return [range(before.start, behind.stop)]
    return [blocks for blocks in (before, behind) if blocks]


class _Target(NamedTuple):
    """Blocks that a write has extents for."""

    entry: Entry
    row: Row  # the entry's, with pages unless it lies in external files; a stream was begun on it
    found: Row  # the entry's as it was found
    new: Row  # of the blocks, in their new extents, without digests
    start: int  # of the new bytes in the record


class PartWrite:
    """Writes ``value`` over the elements of a flattened tensor from ``start`` on.

    The invariant: who has the turn needs no more memory; so who waits for either gets it in the end. All that was
    looked at is looked at again under the lock that installs the blocks; on a difference everything begins anew.
    """

    def __init__(self, working_set: Residency, writing: set[str], key: str, start: int, value: torch.Tensor) -> None:
        """``value`` is contiguous; ``writing`` are the keys that parts are being written of."""
        self._working_set = working_set
        self._space = working_set.space
        self._condition = working_set.condition
        self._writing = writing
        self._key = key
        self._start = start
        self._value = value
        self._flat = flat_of(value)
        self._deadline = Deadline(f"write of a part of {key!r}", working_set.deadline_s)
        self._digests = bytearray()
        self._is_installed = False

    def run(self) -> None:
        """Write it; blocks.

        Raises KeyError, ValueError for another dtype or for elements that the tensor does not have, LeaseError,
        CapacityError, CorruptionError, DeviceError, DeadlineError.
        """
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
        """Wait until the part can be written; return the bytes of memory that it takes, 0 where it is written."""
        working_set = self._working_set
        self._deadline.renew()
        while True:
            INTERRUPTS.look()
            working_set.await_seal()
            with self._condition:
                entry = self._find()
                if self._key in self._writing or not self._working_set.may_write(entry):
                    self._wait()
                    continue
                if working_set.must_await_seal:
                    continue
                if not self._flat.numel():
                    return 0
                if entry.row is not None and not entry.is_inline:
                    return self._buffer_nbytes(entry.row)
            self._write_in_dram()
            return 0

    def _write_in_dram(self) -> None:
        """Write it where all of the tensor is in DRAM alone, or in its row; the next commit writes all of it."""
        (lease,) = self._working_set.lease_for_update([self._key])
        try:
            spec = Spec.like(lease.tensor)  # since the caller looked, the key may have become another
            self._check(spec)
            copy_contiguous(lease.buffer, self._flat, to_buffer=True, start=self._start * spec.dtype.itemsize)
        finally:
            self._working_set.end_update([lease])

    def _find(self) -> Entry:
        """Return the entry, settled, with the elements to be written; may wait."""
        entry = self._working_set.idle_entry(self._key, "write of a part")
        if entry is None or self._working_set.shown(self._key) is not entry:
            raise KeyError(self._key)
        self._check(entry.spec)
        return entry

    def _check(self, spec: Spec) -> None:
        _check_elements(self._key, spec, self._start, self._start + self._value.numel())
        if self._value.dtype != spec.dtype:
            raise ValueError(f"write of a part of {self._key!r}: expected {spec.dtype}, got {self._value.dtype}")

    def _may_write(self, entry: Entry) -> bool:
        """Whether a write now would be in the open generation, and leave those before as they are."""
        return self._working_set.may_write(entry) and not self._working_set.must_await_seal

    def _wait(self) -> None:
        progress = (self._working_set.commit_progress(), self._space.progress.num_blocks)
        self._deadline.wait(self._condition, progress)

    def _span(self, row: Row) -> tuple[int, int, int]:
        """Return where the new bytes begin in the record, and the first block to write and how many."""
        start = self._start * self._value.dtype.itemsize
        if row.ranges:
            return start, 0, row.num_blocks
        first = start // row.block_nbytes
        return start, first, divide_up(start + self._flat.numel(), row.block_nbytes) - first

    def _buffer_nbytes(self, row: Row) -> int:
        _, first, blocks = self._span(row)
        return min(SLAB_NBYTES, blocks * row.block_nbytes, row.nbytes - first * row.block_nbytes)

    def _begin(self, nbytes: int) -> _Target | Shortage | None:
        """Take the turn, with ``nbytes`` of memory in hand: return where to write, with a stream begun on the row.

        Or what the files must grow by first. None: it is to be waited for without memory.
        """
        self._deadline.renew()
        with self._condition:
            entry = self._find()
            while self._key in self._writing:  # who has the turn needs no more memory
                self._wait()
                entry = self._find()
            if entry.is_inline or entry.row is None or not self._may_write(entry):
                return None
            if self._buffer_nbytes(entry.row) > nbytes:
                return None
            if entry.state is EntryState.CLEAN:
                self._working_set.drop(entry)
                entry.state = EntryState.STORED
            found = entry.row
            row = found if found.ranges else self._working_set.row_in_pages(entry)
            start, first, blocks = self._span(row)
            own = min(blocks * row.block_nbytes, row.nbytes - first * row.block_nbytes)
            needed = self._space.round_up(own)
            extents = self._space.take_nowait(needed, scratch=entry.scratch)
            if extents is None:
                return Shortage(needed, entry.scratch)
            new = replace(
                row, nbytes=own, generation=self._working_set.open_generation, extents=extents, digests=b"",
                written=b"", ranges=(), base_block=first, is_paged=False, pages=None,
            )  # fmt: skip
            target = _Target(entry, row, found, new, start)
            for each in self._streams(target):
                self._space.begin_stream(each)
            self._writing.add(self._key)
            return target

    def _streams(self, target: _Target) -> tuple[Row, ...]:
        return (target.row,) if target.found is target.row else (target.row, target.found)

    # Below: with the turn

    def _write(self, target: _Target, buffer: Buffer) -> bool:
        """Write the blocks and make them the key's; False where it has changed meanwhile. The buffer goes back."""
        self._is_installed = False
        with Window(self._working_set) as window:
            window.at_end = functools.partial(self._end, target)
            self._digests = bytearray(target.new.num_blocks * DIGEST_NBYTES)
            window.run(slab_jobs(target.new, functools.partial(self._rewrite, target)), buffer)
            changes = {} if target.row.ranges else self._changes(target)
            self._is_installed = self._install(target, changes)
        return self._is_installed

    def _end(self, target: _Target, window: Window) -> None:
        """Let others write the key. Under the lock, with nothing in flight."""
        self._writing.discard(self._key)
        for each in self._streams(target):
            self._space.end_stream(each)
        if not self._is_installed:
            (self._space.quarantine if window.has_failed else self._space.give_back)(target.new.extents)
        self._condition.notify_all()

    def _rewrite(self, target: _Target, slab: int, buffer: Buffer, on_done: OnDone) -> Iterator[Transfer]:
        """Read the blocks of a slab of ``target.new`` that keep some bytes; write the slab with the new bytes in it."""
        new, space, content = target.new, self._space, self._flat
        begin = new.base_block * new.block_nbytes + slab * SLAB_NBYTES  # of the slab in the record
        end = min(begin + SLAB_NBYTES, new.base_block * new.block_nbytes + new.nbytes)
        start, stop = (min(max(at, begin), end) for at in (target.start, target.start + content.numel()))
        for blocks in _kept_blocks(begin, start, stop, end, new.block_nbytes):
            row = _part_row(target.row, blocks.start, len(blocks))
            at = blocks.start * new.block_nbytes - begin
            memory = buffer.memory[at : at + space.round_up(row.nbytes)]
            reading = space.transfer(row, memory, IOClass.DEMAND, on_done, is_checked_by_owner=True)
            yield reading
            reading.raise_error()
        piece = content[start - target.start : stop - target.start]
        copy_contiguous(buffer, piece, to_buffer=True, start=start - begin)
        writing = slab_transfer(space, new, slab, buffer, IOClass.WRITE, on_done)
        yield writing
        writing.raise_error()
        place = slab * (SLAB_NBYTES // new.block_nbytes) * DIGEST_NBYTES
        self._digests[place : place + len(writing.digests)] = writing.digests

    def _changes(self, target: _Target) -> dict[int, PageChange]:
        """Return the pages of the blocks as they were and are to be; blocks."""
        row, new = target.row, target.new
        begin, end = new.base_block, new.base_block + new.num_blocks
        assert row.pages is not None
        numbers = range(begin // PAGE_BLOCKS, divide_up(end, PAGE_BLOCKS))
        spans = [range(max(begin, n * PAGE_BLOCKS), min(end, (n + 1) * PAGE_BLOCKS)) for n in numbers]
        sizes = [len(span) * row.block_nbytes for span in spans]
        sizes[-1] += sum(extent.nbytes for extent in new.extents) - sum(sizes)
        found = {}
        for number, span, places in zip(numbers, spans, cut(new.extents, sizes), strict=True):
            before = row.pages.page(row, number)
            first = span.start - number * PAGE_BLOCKS
            at = (span.start - begin) * DIGEST_NBYTES
            digests = bytes(self._digests[at : at + len(span) * DIGEST_NBYTES])
            after = _changed_page(before, row.block_nbytes, first, places, digests, new.generation)
            found[number] = PageChange(before, after, range(first, first + len(span)))
        return found

    def _install(self, target: _Target, changes: Mapping[int, PageChange]) -> bool:
        """Make the blocks the key's; False where it has changed meanwhile, and all is to be done again."""
        working_set, row = self._working_set, target.row
        with self._condition:
            entry = working_set.idle_entry(self._key, "write of a part")
            if entry is not target.entry or entry.row is not target.found or not self._may_write(entry):
                return False
            working_set.drop(entry)
            if row.ranges:
                self._working_set.streamed(entry, replace(target.new, digests=bytes(self._digests)))
            else:
                entry.state = EntryState.STORED
                self._working_set.parts_written(entry, row, changes)
            working_set.streamed_out_bytes += target.new.nbytes
            return True


def _check_elements(key: str, spec: Spec, start: int, stop: int) -> None:
    """Raise ValueError where a tensor of ``spec`` has no such elements."""
    numel = spec.nbytes // spec.dtype.itemsize
    if not 0 <= start <= stop <= numel:
        raise ValueError(f"elements [{start}, {stop}) of {key!r}, which has {numel}; expected a range inside of it")


# -- parts -------------------------------------------------------------------------------------------------------------


class PartValues:
    """Reads and writes of parts, through a window of buffers. One write of a key at a time."""

    def __init__(self, working_set: Residency) -> None:
        self._working_set = working_set
        self._space = working_set.space
        self._condition = working_set.condition
        self._writing: set[str] = set()  # keys

    def read(self, key: str, start: int, stop: int) -> torch.Tensor:
        """Return the elements [start, stop) of the flattened tensor of ``key``, on the CPU; blocks.

        Raises KeyError, ValueError for elements that it does not have, CorruptionError, DeviceError.
        """
        refuse_modes("read_part", key)
        self._working_set.check(writing=False)
        with self._working_set.mark:
            while True:
                with contextlib.suppress(ReadPastError):  # the bytes have left DRAM: look again
                    return self._read(key, start, stop)

    def _read(self, key: str, start: int, stop: int) -> torch.Tensor:
        working_set = self._working_set
        with self._condition:
            working_set.catch_up()
            entry = self._working_set.shown(key)
            if entry is None:
                raise KeyError(key)
            spec = entry.spec
            _check_elements(key, spec, start, stop)
            row = entry.row if entry.state is EntryState.STORED else None
            if row is not None:
                self._space.begin_stream(row)
        if row is None:
            return self._read_resident(key, start, stop)
        with Window(working_set) as window:
            window.at_end = lambda _: self._space.end_stream(row)
            result = new_tensor(Spec(spec.dtype, (stop - start,)), key)
            self._read_row(window, row, start * spec.dtype.itemsize, flat_of(result))
        return result

    def _read_resident(self, key: str, start: int, stop: int) -> torch.Tensor:
        def copy(spec: Spec, buffer: Buffer) -> torch.Tensor:
            # Order: the looks are those of these bytes; since the caller looked, the key may have become another.
            _check_elements(key, spec, start, stop)
            result = new_tensor(Spec(spec.dtype, (stop - start,)), key)
            begin = start * spec.dtype.itemsize
            memory = buffer.memory[begin : begin + result.nbytes]
            if len(memory):
                flat_of(result).copy_(torch.frombuffer(memory, dtype=torch.uint8))
            return result

        return read_resident(self._working_set, key, copy, 0)

    def _read_row(self, window: Window, row: Row, start: int, flat: torch.Tensor) -> None:
        """Read the bytes of ``row`` from ``start`` on into ``flat``, by the blocks that they are in."""
        if not flat.numel():
            return
        if row.inline is not None:
            flat.copy_(torch.frombuffer(bytearray(row.inline), dtype=torch.uint8)[start : start + flat.numel()])
            return
        first = start // row.block_nbytes
        part = _part_row(row, first, (start + flat.numel() - 1) // row.block_nbytes - first + 1)
        skip = start - first * row.block_nbytes

        def read(slab: int, buffer: Buffer, on_done: OnDone) -> Iterator[Transfer]:
            transfer = slab_transfer(self._space, part, slab, buffer, IOClass.DEMAND, on_done)
            yield transfer
            transfer.raise_error()
            begin = slab * SLAB_NBYTES - skip  # of the buffer, in ``flat``
            wanted = flat[max(0, begin) : begin + SLAB_NBYTES]
            source = torch.frombuffer(buffer.memory, dtype=torch.uint8)
            wanted.copy_(source[max(0, -begin) : max(0, -begin) + wanted.numel()])

        window.run(slab_jobs(part, read))
        with self._condition:
            self._working_set.streamed_in_bytes += flat.numel()

    def write(self, key: str, start: int, value: torch.Tensor) -> None:
        """Write ``value`` over the elements of the flattened tensor of ``key`` from ``start`` on; see PartWrite."""
        plain = plain_value(key, value)
        self._working_set.check(writing=True)
        with self._working_set.mark:
            PartWrite(self._working_set, self._writing, key, start, plain).run()

"""Parts: some bytes of a record read or written, without the rest of it.

A write takes fresh extents for the blocks it touches; all others stay where they are, and with them their pages of the
catalog. So a commit after it costs the changed blocks and their pages.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch

from tiered.bytes.arena import Buffer
from tiered.bytes.device.base import IOClass
from tiered.bytes.interrupt import INTERRUPTS, uninterrupted
from tiered.errors import LeaseError
from tiered.store.format.checksum import DIGEST_NBYTES, PAGE_BLOCKS
from tiered.store.format.extent import Extent
from tiered.store.format.row import Page, Row
from tiered.store.format.spec import Spec
from tiered.store.records.entry import Entry, EntryState
from tiered.store.records.pages import cut_blocks
from tiered.store.residency.modes import refuse_modes
from tiered.store.residency.working_set import WorkingSet
from tiered.store.residency.write_back import Shortage
from tiered.store.transfers.transfer import SLAB_NBYTES, Transfer, start_all
from tiered.store.values.part_rows import changed_page, part_row
from tiered.store.values.streaming import SlabJob
from tiered.store.values.tensors import flat_of
from tiered.store.values.window import Window
from tiered.store.waiting.deadline import Deadline

__all__ = ["PartValues"]

Extents = tuple[Extent, ...]


class _Target(NamedTuple):
    """Blocks that a write has extents for."""

    entry: Entry
    row: Row  # the entry's, with pages; a stream was begun on it
    found: Row  # the entry's as it was found
    first: int
    blocks: int
    extents: Extents
    generation: int


class PartValues:
    """Reads and writes of parts, through a window of buffers. One write of a key at a time."""

    def __init__(self, working_set: WorkingSet) -> None:
        self._working_set = working_set
        self._records = working_set.records
        self._space = working_set.space
        self._condition = working_set.condition
        self._writing: set[str] = set()  # keys

    # Below: reading

    @uninterrupted
    def read(self, key: str, start: int, stop: int) -> torch.Tensor:
        """Return the elements [start, stop) of the flattened tensor of ``key``, on the CPU; blocks.

        Raises KeyError, ValueError for elements that it does not have, CorruptionError, DeviceError.
        """
        refuse_modes("read_part", key)
        working_set = self._working_set
        working_set.check(writing=False)
        with self._condition:
            working_set.residents.drain()
            working_set.room.raise_failure()
            entry = self._records.find(key)
            if entry is None:
                raise KeyError(key)
            spec = entry.spec
            _check_elements(key, spec, start, stop)
            row = entry.row if entry.state is EntryState.STORED else None
            if row is not None:
                self._space.begin_stream(row)
        if row is None:
            return self._read_resident(key, start, stop)
        window = Window(working_set)
        try:
            result = torch.empty(stop - start, dtype=spec.dtype, device="cpu")
            self._read_row(window, row, start * spec.dtype.itemsize, flat_of(result))
        finally:
            window.when_idle(lambda: self._space.end_stream(row))
        return result

    def _read_resident(self, key: str, start: int, stop: int) -> torch.Tensor:
        working_set = self._working_set
        deadline = Deadline(f"lease of {key!r} for 'r'", working_set.deadline_s)
        # Order: the looks are those of these bytes; since the caller looked, the key may have become another.
        alias, spec, _ = working_set.obtain(key, "r", deadline, is_brief=True)
        try:
            _check_elements(key, spec, start, stop)
            result = torch.empty(stop - start, dtype=spec.dtype, device="cpu")
            begin = start * spec.dtype.itemsize
            memory = alias.residence.buffer.memory[begin : begin + result.nbytes]
            if len(memory):
                flat_of(result).copy_(torch.frombuffer(memory, dtype=torch.uint8))
        finally:
            working_set.residents.report_end(alias)
            working_set.released(alias)
        return result

    def _read_row(self, window: Window, row: Row, start: int, flat: torch.Tensor) -> None:
        """Read the bytes of ``row`` from ``start`` on into ``flat``."""
        if not flat.numel():
            return
        if row.inline is not None:
            flat.copy_(torch.frombuffer(bytearray(row.inline), dtype=torch.uint8)[start : start + flat.numel()])
            return
        self._read_blocks(window, row, start, flat)
        with self._condition:
            self._working_set.streamed_in_bytes += flat.numel()

    def _read_stored(self, row: Row, start: int, flat: torch.Tensor) -> None:
        """Read from ``row``, on which a stream was begun; this ends it."""
        window = Window(self._working_set)
        try:
            self._read_blocks(window, row, start, flat)
        finally:
            window.when_idle(lambda: self._space.end_stream(row))
        with self._condition:
            self._working_set.streamed_in_bytes += flat.numel()

    def _read_blocks(self, window: Window, row: Row, start: int, flat: torch.Tensor) -> None:
        """Read bytes of ``row`` from ``start`` on into ``flat``, by the blocks that they are in."""
        first = start // row.block_nbytes
        part = part_row(row, first, (start + flat.numel() - 1) // row.block_nbytes - first + 1)
        skip = start - first * row.block_nbytes

        def copy(job: SlabJob, transfer: Transfer, buffer: Buffer) -> None:
            if transfer.error is not None:
                raise transfer.error
            begin = job.slab * SLAB_NBYTES - skip  # of the buffer, in ``flat``
            wanted = flat[max(0, begin) : begin + SLAB_NBYTES]
            source = torch.frombuffer(buffer.memory, dtype=torch.uint8)
            wanted.copy_(source[max(0, -begin) : max(0, -begin) + wanted.numel()])

        slabs = range(-(-part.nbytes // SLAB_NBYTES))
        window.run(SlabJob(self._space, part, slab, IOClass.DEMAND, use=copy) for slab in slabs)

    # Below: writing

    @uninterrupted
    def write(self, key: str, start: int, flat: torch.Tensor, whole: Callable[[], None]) -> None:
        """Write ``flat``, (nbytes,) uint8 on any compute device, over the bytes from ``start`` on; blocks. KeyError.

        Other bytes stay as they are. ``whole`` is called instead for a record without extents. Raises ValueError
        for bytes that the record does not have, LeaseError, CapacityError, CorruptionError, DeviceError.
        """
        working_set = self._working_set
        working_set.check(writing=True)
        working_set.deferred_seal.settle()
        while True:
            target = self._begin(key, start, flat.numel())
            if target is None:
                return self._write_whole(key, whole)
            window = Window(working_set)
            is_own = True  # the extents are this write's to give back
            try:
                digests = self._write_blocks(window, target, start, flat)
                pages, blocks = self._changed_pages(target, digests)
                is_own = not self._install(key, target, pages, blocks)
            finally:
                window.when_idle(functools.partial(self._end, key, target, window, is_own))
            if not is_own:
                return working_set.room.pump()

    def _write_whole(self, key: str, whole: Callable[[], None]) -> None:
        """Call ``whole``; no other write of a part of ``key`` comes in between."""
        try:
            whole()
        finally:
            with self._condition:
                self._writing.discard(key)
                self._condition.notify_all()

    def _begin(self, key: str, start: int, nbytes: int) -> _Target | None:
        """Return where to write, with a stream begun on the row; None for a record that has no extents."""
        working_set, records = self._working_set, self._records
        deadline = Deadline(f"write of a part of {key!r}", working_set.deadline_s)
        while True:
            INTERRUPTS.look()
            transfers: list[Transfer] = []
            with self._condition:
                entry = working_set.keys.settled(key, "write of a part")
                if entry is None or (entry.state is EntryState.UNDEFINED):
                    raise KeyError(key)
                _check_range(key, start, nbytes, entry.nbytes)
                if key in self._writing or not records.may_write(entry):
                    progress = (records.commit_progress(), self._space.progress.num_blocks)
                    deadline.wait(self._condition, progress)
                    continue
                if entry.is_inline or not nbytes or (entry.row is not None and entry.row.ranges):
                    self._writing.add(key)
                    return None
                if entry.state is EntryState.CLEAN:
                    working_set.residents.drop(entry)
                    entry.state = EntryState.STORED
                if entry.state is EntryState.STORED:
                    assert entry.row is not None
                    found, row = entry.row, records.paging.begin(entry)
                    first = start // row.block_nbytes
                    blocks = (start + nbytes - 1) // row.block_nbytes - first + 1
                    needed = self._space.round_up(min(blocks * row.block_nbytes, row.nbytes - first * row.block_nbytes))
                    extents = self._space.take_nowait(needed, scratch=entry.scratch)
                    if extents is not None:
                        for each in (row,) if found is row else (row, found):
                            self._space.begin_stream(each)
                        self._writing.add(key)
                        return _Target(entry, row, found, first, blocks, extents, records.open_generation)
                    shortage: Shortage | None = Shortage(needed, entry.scratch)
                elif entry.residence is not None and entry.residence.writers:
                    raise LeaseError(
                        f"write of a part of {key!r}, and tensors of a lease for writing are alive; release them first"
                    )
                else:  # its bytes are in DRAM alone: all of them go out first
                    transfers, shortage = working_set.room.write_back.plan([entry], entry.nbytes)
                    if not transfers and shortage is None:
                        deadline.wait(self._condition, self._space.progress.num_blocks)
            start_all(transfers)
            if shortage is not None:
                working_set.room.grow(shortage)

    def _end(self, key: str, target: _Target, window: Window, is_own: bool) -> None:
        """Let others write the key. Under the lock, with nothing in flight."""
        self._writing.discard(key)
        for each in (target.row,) if target.found is target.row else (target.row, target.found):
            self._space.end_stream(each)
        if is_own:
            (self._space.quarantine if window.has_failed else self._space.give_back)(target.extents)
        self._condition.notify_all()

    def _write_blocks(self, window: Window, target: _Target, start: int, flat: torch.Tensor) -> bytes:
        """Write the blocks to their new extents; return their digests."""
        row, first = target.row, target.first
        begin = first * row.block_nbytes
        nbytes = min(target.blocks * row.block_nbytes, row.nbytes - begin)
        part = replace(
            row, nbytes=nbytes, generation=target.generation, extents=target.extents, digests=b"", written=b"",
            base_block=first, is_paged=False, pages=None,
        )  # fmt: skip
        skip, rest = start - begin, begin + nbytes - start - flat.numel()
        before, behind = (torch.empty(nbytes, dtype=torch.uint8, device="cpu") for nbytes in (skip, rest))
        for edge, place in ((before, begin), (behind, begin + nbytes - rest)):
            if edge.numel():
                with self._condition:
                    self._space.begin_stream(row)
                self._read_stored(row, place, edge)
        digests = bytearray(target.blocks * DIGEST_NBYTES)
        spans = ((0, before), (skip, flat), (nbytes - rest, behind))

        def fill(slab: int, buffer: Buffer) -> None:
            at = slab * SLAB_NBYTES
            for place, source in spans:
                stop = min(at + SLAB_NBYTES, place + source.numel())
                if stop > max(at, place):
                    content = source[max(at, place) - place : stop - place]
                    destination = torch.frombuffer(buffer.memory, dtype=torch.uint8)
                    destination[max(at, place) - at : stop - at].copy_(content)

        def collect(job: SlabJob, transfer: Transfer, buffer: Buffer) -> None:
            if transfer.error is not None:
                raise transfer.error
            place = job.slab * (SLAB_NBYTES // row.block_nbytes) * DIGEST_NBYTES
            digests[place : place + len(transfer.digests)] = transfer.digests

        slabs = range(-(-nbytes // SLAB_NBYTES))
        window.run(SlabJob(self._space, part, slab, IOClass.WRITE, fill=fill, use=collect) for slab in slabs)
        return bytes(digests)

    def _changed_pages(
        self, target: _Target, digests: bytes
    ) -> tuple[dict[int, Page], dict[int, tuple[Extents, Extents]]]:
        """Return the pages of the blocks as they are to be, and where each block was and is to be; blocks."""
        row, end = target.row, target.first + target.blocks
        assert row.pages is not None
        found, blocks = {}, {}
        new_places = cut_blocks(target.extents, row.block_nbytes, target.blocks)
        for number in range(target.first // PAGE_BLOCKS, -(-end // PAGE_BLOCKS)):
            old = row.pages.page(row, number)
            base = number * PAGE_BLOCKS
            begin, stop = max(target.first, base), min(end, base + PAGE_BLOCKS)
            places = [place for each in new_places[begin - target.first : stop - target.first] for place in each]
            old_places = cut_blocks(old.extents, row.block_nbytes, len(old.digests) // DIGEST_NBYTES)
            for block in range(begin, stop):
                blocks[block] = (old_places[block - base], new_places[block - target.first])
            new = digests[(begin - target.first) * DIGEST_NBYTES : (stop - target.first) * DIGEST_NBYTES]
            found[number] = changed_page(old, row.block_nbytes, begin - base, places, new, target.generation)
        return found, blocks

    def _install(
        self,
        key: str,
        target: _Target,
        pages: Mapping[int, Page],
        blocks: Mapping[int, tuple[Extents, Extents]],
    ) -> bool:
        """Make the blocks the key's; False where it has changed meanwhile, and all is to be done again."""
        working_set, row = self._working_set, target.row
        with self._condition:
            entry = working_set.keys.settled(key, "write of a part")
            if entry is not target.entry or entry.row is not target.found or not self._records.may_write(entry):
                return False
            working_set.residents.drop(entry)
            entry.state = EntryState.STORED
            self._records.parts_written(entry, row, pages, blocks)
            working_set.streamed_out_bytes += target.blocks * row.block_nbytes
            return True


def _check_elements(key: str, spec: Spec, start: int, stop: int) -> None:
    """Raise ValueError where a tensor of ``spec`` has no such elements."""
    numel = spec.nbytes // spec.dtype.itemsize
    if not 0 <= start <= stop <= numel:
        raise ValueError(f"elements [{start}, {stop}) of {key!r}, which has {numel}; expected a range inside of it")


def _check_range(key: str, start: int, nbytes: int, record_nbytes: int) -> None:
    if start < 0 or start + nbytes > record_nbytes:
        raise ValueError(
            f"bytes [{start}, {start + nbytes}) of {key!r}, which has {record_nbytes}; expected a range inside of it"
        )

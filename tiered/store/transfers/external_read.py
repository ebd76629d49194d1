"""ExternalRead: slabs of a record that lies in the user's own files, read from where they are.

Their offsets there are not aligned, the device's operations are. So what is aligned in the file is read to an aligned
place in the record's own memory, within the bytes that it is for, and moved by less than a page; the edges come through
scratch memory of a few pages.
"""

from __future__ import annotations

import ctypes
import mmap
from bisect import bisect_right
from collections.abc import Mapping
from typing import Any, NamedTuple

from tiered.bytes.device.base import Device, Operation
from tiered.bytes.device.file_device import FileDevice
from tiered.errors import CorruptionError
from tiered.store.format.checksum import block_digests
from tiered.store.format.row import Extent, ExternalRange, Row
from tiered.store.transfers.checked_transfer import SLAB_NBYTES, Transfer
from tiered.units import round_up

__all__ = ["ExternalRead"]


_EDGE_PAGES = 4  # shorter ranges come through scratch memory as a whole


class _Edge(NamedTuple):
    """Bytes on their way through scratch memory, in the smallest aligned range of a file that holds them."""

    place: int  # in the transfer's memory
    file: int
    offset: int  # of the aligned range
    nbytes: int  # of it
    skip: int  # bytes of it before the wanted ones
    wanted: int  # bytes

    @classmethod
    def of(cls, place: int, file: int, offset: int, nbytes: int, alignment: int) -> _Edge:
        """Return the edge for ``nbytes`` at ``offset`` of ``file``."""
        start = offset - offset % alignment
        return cls(place, file, start, round_up(offset + nbytes, alignment) - start, offset - start, nbytes)


class _Shift(NamedTuple):
    """Bytes that were read a few bytes behind their place."""

    place: int  # in the transfer's memory, of the bytes and of where they belong
    read_at: int
    nbytes: int


class ExternalRead(Transfer):
    """A read of ``row``, whose bytes are in ``ranges``; else as a Transfer.

    Where the row has no digests yet, ``digests`` are those of what was read.
    """

    __slots__ = ("_edges", "_indices", "_shifts", "_starts")

    def __init__(self, device: Device, indices: Mapping[int, int], store_uuid: bytes, row: Row, **options: Any) -> None:
        """``indices`` has the place on ``device`` of each file that ranges name; ``options`` as of a Transfer."""
        super().__init__((device,), store_uuid, row, **options)
        assert not self.is_write, row
        self._indices = indices
        self._starts = [each.start for each in row.ranges]
        self._edges: dict[int, list[tuple[_Edge, memoryview]]] = {}  # by slab, with scratch memory
        self._shifts: dict[int, list[_Shift]] = {}

    def _operations(self) -> list[list[tuple[int, Operation]]]:
        operations = super()._operations()
        if not self.row.digests and operations:
            self.digests = bytearray(self._digests_end(self._slabs[-1]))
        return operations

    def _pieces(self, slab: int) -> list[tuple[Extent, memoryview]]:
        end = (slab - self.first_slab) * SLAB_NBYTES + min(SLAB_NBYTES, self.row.nbytes - slab * SLAB_NBYTES)
        assert end <= len(self.memory), f"{len(self.memory)} bytes of memory for {self.row}"
        edges: list[_Edge] = []
        shifts: list[_Shift] = []
        pieces: list[tuple[Extent, memoryview]] = []
        for place, each in self._ranges_in(slab):
            self._plan(place, each, edges, shifts, pieces)
        if not edges and not pieces:  # zeros alone: a slab ends when its reads do
            edges.append(_Edge(0, 0, 0, self._alignment, 0, 0))
        scratch = memoryview(mmap.mmap(-1, max(1, sum(edge.nbytes for edge in edges))))
        start = 0
        self._edges[slab], self._shifts[slab] = [], shifts
        for edge in edges:
            memory = scratch[start : start + edge.nbytes]
            pieces.append((Extent(0, edge.file, edge.offset, edge.nbytes), memory))
            self._edges[slab].append((edge, memory))
            start += edge.nbytes
        return pieces

    def _ranges_in(self, slab: int) -> list[tuple[int, ExternalRange]]:
        """Return the parts of the row's ranges in ``slab``, each with its place in the transfer's memory."""
        begin = slab * SLAB_NBYTES
        end = min(begin + SLAB_NBYTES, self.row.nbytes)
        found = []
        for each in self.row.ranges[max(0, bisect_right(self._starts, begin) - 1) :]:
            start, stop = max(begin, each.start), min(end, each.start + each.nbytes)
            if each.start >= end:
                break
            if start < stop:
                file = self._indices[each.file]
                part = ExternalRange(start, file, each.offset + start - each.start, stop - start)
                found.append((start - self.first_slab * SLAB_NBYTES, part))
        return found

    def _plan(
        self,
        place: int,
        each: ExternalRange,
        edges: list[_Edge],
        shifts: list[_Shift],
        pieces: list[tuple[Extent, memoryview]],
    ) -> None:
        """Plan the reads for bytes that belong at ``place`` in the memory: an interior, and what is around it."""
        unit = self._alignment
        _, file, offset, nbytes = each
        if nbytes <= _EDGE_PAGES * unit:
            edges.append(_Edge.of(place, file, offset, nbytes, unit))
            return
        first, last = round_up(offset, unit), (offset + nbytes) // unit * unit
        belongs_at = place + first - offset
        read_at = round_up(belongs_at, unit)
        last -= unit if read_at > belongs_at else 0  # so that it ends within the bytes it is for
        pieces.append((Extent(0, file, first, last - first), self.memory[read_at : read_at + last - first]))
        if read_at > belongs_at:
            shifts.append(_Shift(belongs_at, read_at, last - first))
        if first > offset:
            edges.append(_Edge.of(place, file, offset, first - offset, unit))
        rest = offset + nbytes - last
        if rest:
            edges.append(_Edge.of(place + last - offset, file, last, rest, unit))

    def _assemble(self, slab: int) -> None:
        """Put what was read where it belongs, and zeros between."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        for shift in self._shifts.pop(slab):
            ctypes.memmove(address + shift.place, address + shift.read_at, shift.nbytes)
        for edge, memory in self._edges.pop(slab):
            self.memory[edge.place : edge.place + edge.wanted] = memory[edge.skip : edge.skip + edge.wanted]
        end = (slab - self.first_slab) * SLAB_NBYTES
        for place, each in (*self._ranges_in(slab), (end + len(self._bytes_of(slab)), None)):
            if place > end:
                ctypes.memset(address + end, 0, place - end)
            end = place + (0 if each is None else each.nbytes)

    def _check(self, slab: int) -> CorruptionError | None:
        self._assemble(slab)
        if self.row.digests:
            return super()._check(slab)
        row = self.row
        found = block_digests(
            self._bytes_of(slab), self._store_uuid, row.key_id, row.block_nbytes, self._block(slab), row.generation
        )
        self.digests[self._digests_end(slab) - len(found) : self._digests_end(slab)] = found
        return None

    def _reaches(self, nbytes: int, piece: Extent) -> bool:
        device = self._devices[piece.device]
        assert isinstance(device, FileDevice), device
        return nbytes >= min(piece.offset + piece.nbytes, device.external.nbytes(piece.file))

    def _place_of(self, index: int) -> Extent:
        """Return where in its files the row's block ``index`` begins, or the first bytes behind that."""
        start = index * self.row.block_nbytes
        for each in self.row.ranges:
            if each.start + each.nbytes > start:
                skip = max(0, start - each.start)
                return Extent(0, self._indices[each.file], each.offset + skip, each.nbytes - skip)
        return Extent(0, self._indices[self.row.ranges[-1].file], 0, 0)

"""Parts: some elements of a tensor read or written, without the rest of it."""

from __future__ import annotations

import contextlib

import torch

from tiered.bytes.arena import Buffer
from tiered.bytes.device.base import IOClass
from tiered.bytes.interrupt import uninterrupted
from tiered.store.format.row import Extent, Row, Spec
from tiered.store.records.entry import EntryState
from tiered.store.residency.lease import ReadPastError, refuse_modes
from tiered.store.residency.working_set import WorkingSet
from tiered.store.transfers.transfer import SLAB_NBYTES, Transfer
from tiered.store.values.part_rows import part_row
from tiered.store.values.part_write import PartWrite, check_elements
from tiered.store.values.streaming import SlabJob
from tiered.store.values.tensors import flat_of, new_tensor, plain_value
from tiered.store.values.window import Window
from tiered.store.waiting.deadline import Deadline

__all__ = ["PartValues"]

Extents = tuple[Extent, ...]


class PartValues:
    """Reads and writes of parts, through a window of buffers. One write of a key at a time."""

    def __init__(self, working_set: WorkingSet) -> None:
        self._working_set = working_set
        self._records = working_set.records
        self._space = working_set.space
        self._condition = working_set.condition
        self._writing: set[str] = set()  # keys

    @uninterrupted
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
            working_set.residents.drain()
            working_set.room.raise_failure()
            entry = self._records.find(key)
            if entry is None:
                raise KeyError(key)
            spec = entry.spec
            check_elements(key, spec, start, stop)
            row = entry.row if entry.state is EntryState.STORED else None
            if row is not None:
                self._space.begin_stream(row)
        if row is None:
            return self._read_resident(key, start, stop)
        window = Window(working_set)
        try:
            result = new_tensor(Spec(spec.dtype, (stop - start,)), key)
            self._read_row(window, row, start * spec.dtype.itemsize, flat_of(result))
        finally:
            window.when_idle(lambda: self._space.end_stream(row))
        return result

    def _read_resident(self, key: str, start: int, stop: int) -> torch.Tensor:
        working_set = self._working_set
        deadline = Deadline(f"lease of {key!r} for 'r'", working_set.deadline_s)
        # Order: the looks are those of these bytes; since the caller looked, the key may have become another.
        alias, spec, _ = working_set.grants.obtain(key, "r", deadline, swaps_in=lambda _: False)
        try:
            check_elements(key, spec, start, stop)
            result = new_tensor(Spec(spec.dtype, (stop - start,)), key)
            begin = start * spec.dtype.itemsize
            memory = alias.residence.buffer.memory[begin : begin + result.nbytes]
            if len(memory):
                flat_of(result).copy_(torch.frombuffer(memory, dtype=torch.uint8))
        finally:
            working_set.residents.report_end(alias)
            working_set.released([alias])
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

    @uninterrupted
    def write(self, key: str, start: int, value: torch.Tensor) -> None:
        """Write ``value`` over the elements of the flattened tensor of ``key`` from ``start`` on; see PartWrite."""
        plain = plain_value(key, value)
        self._working_set.check(writing=True)
        with self._working_set.mark:
            PartWrite(self._working_set, self._writing, key, start, plain).run()

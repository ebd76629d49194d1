"""Write through: a large put whose first blocks are written while the next ones are copied; resident afterwards.

For tensors that write-back would begin with as soon as they were copied, and for those of put_many: a drive that waited
until an eighth of the budget is dirty would lose the time of that copy. All others are gathered, and written later.
"""

from __future__ import annotations

import ctypes

import torch

from tiered.bytes.arena import Buffer
from tiered.bytes.device.base import IOClass
from tiered.store.format.checksum import BLOCK_NBYTES
from tiered.store.format.row import Row
from tiered.store.format.spec import Spec
from tiered.store.records.entry import Entry
from tiered.store.residency.working_set import WorkingSet
from tiered.store.transfers.transfer import Transfer
from tiered.store.values.streaming import Streams
from tiered.units import MiB

__all__ = ["WriteThrough"]

_LEAST_NBYTES = 2 * BLOCK_NBYTES  # with less there is nothing to overlap
_BEHIND_NBYTES = 64 * MiB  # on their way: then it is the drives that a put waits for in the end, not the copy


class WriteThrough:
    """Puts into buffers and extents of their own; the old tensor is the key's until the new one is whole in DRAM."""

    def __init__(self, working_set: WorkingSet, streams: Streams) -> None:
        self._working_set = working_set
        self._streams = streams

    def is_due(self, key: str, value: torch.Tensor, *, scratch: bool, is_one_of_many: bool) -> bool:
        """Whether the bytes of ``value`` are to be written at once, and may be written to fresh extents."""
        working_set, nbytes = self._working_set, value.nbytes
        if scratch or not value.is_cpu or nbytes < _LEAST_NBYTES:  # scratch keys have one set of extents
            return False
        with working_set.condition:
            old = working_set.records.entries.get(key)
            if old is not None and (old.held or old.landing is not None):  # a third set
                return False
            is_full = working_set.residents.dirty_bytes + nbytes > working_set.room.write_ahead_bytes
            return is_one_of_many or is_full

    def put(self, key: str, flat: torch.Tensor, spec: Spec) -> None:
        """Make a copy of ``flat``, (nbytes,) uint8 in DRAM, the tensor of ``key``; blocks until it is copied.

        Raises LeaseError, CapacityError, DeviceError, with the old tensor as it was.
        """
        working_set = self._working_set
        buffer = working_set.room.reserve(spec.nbytes)
        try:
            row = self._streams.new_row(key, spec, scratch=False)
        except BaseException:
            working_set.unreserve(buffer)
            raise
        _Put(working_set, row, spec, buffer, flat).run()


class _Put:
    """One put. Buffer and extents are its own until it is installed; then they are the entry's."""

    def __init__(self, working_set: WorkingSet, row: Row, spec: Spec, buffer: Buffer, flat: torch.Tensor) -> None:
        self._working_set = working_set
        self._row = row
        self._spec = spec
        self._buffer = buffer
        self._flat = flat
        self._entry: Entry | None = None  # once it is installed
        self._begun_s = 0.0

    def run(self) -> None:
        memory = self._buffer.memory
        self._begun_s = self._working_set.recorder.begin_move()
        transfer = self._working_set.space.transfer(self._row, memory, IOClass.WRITE, self._done)
        transfer.start(self._fill)

    def _fill(self, block: int) -> bool:
        start = block * BLOCK_NBYTES
        end = min(start + BLOCK_NBYTES, self._row.nbytes)
        # By this thread alone, as in host_tensor.py.
        ctypes.memmove(self._buffer.address + start, self._flat.data_ptr() + start, end - start)
        if end == self._row.nbytes:  # order: before the last block can land
            self._install()
        # A quarter of a put's CPU time is fetching the bytes for their digest in another thread, once they are copied.
        return self._working_set.room.write_back.writing_bytes >= _BEHIND_NBYTES

    def _install(self) -> None:
        working_set, row = self._working_set, self._row
        with working_set.condition:
            old = working_set.settled(row.name, "put")
            entry = working_set.replace(old, row.name, self._spec, scratch=False, key_id=row.key_id)
            working_set.records.touch(entry)
            entry.landing = row.extents
            working_set.room.take_over(self._buffer)
            working_set.residents.admit(entry, self._buffer)
            working_set.room.write_back.depart(entry)
            self._entry = entry

    def _done(self, transfer: Transfer) -> None:
        working_set = self._working_set
        if self._entry is not None:
            working_set.room.write_back.landed(self._entry, self._begun_s, transfer)
            return
        with working_set.condition:  # it could not be installed: nobody has seen it
            space = working_set.space
            (space.give_back if transfer.failed_piece is None else space.quarantine)(self._row.extents)
            working_set.room.drop(self._buffer)

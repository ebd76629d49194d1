"""get_many of small tensors that are not in DRAM: looked up together, read in the order of their places."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence

import torch

from tiered.bytes.arena import Buffer
from tiered.bytes.device.base import IOClass
from tiered.store.format.checksum import block_seed, digest
from tiered.store.format.row import Extent, Row, Spec
from tiered.store.records.entry import EntryState
from tiered.store.residency.working_set import WorkingSet
from tiered.store.values.batch import Batch, batch_nbytes, is_small
from tiered.store.values.tensors import new_tensor
from tiered.store.values.window import Window

__all__ = ["GetBatches"]

_MIN_NUM_KEYS = 8  # fewer are swapped in one by one, and resident afterwards
_NUM_LOOKED_UP = 1024  # keys that are sorted by place at a time


class GetBatches:
    """Reads small records in batches; nothing becomes resident. ``get`` is for single keys of any kind."""

    def __init__(self, working_set: WorkingSet, get: Callable[[str], torch.Tensor]) -> None:
        self._working_set = working_set
        self._get = get

    def get(self, names: Sequence[str], found: dict[str, torch.Tensor]) -> list[str]:
        """Put copies of the small tensors of ``names`` that are not in DRAM into ``found``; return the other names.

        Blocks. Raises KeyError, CorruptionError, DeviceError.
        """
        working_set = self._working_set
        window = Window(working_set)
        others: list[str] = []
        reading: dict[int, Row] = {}  # key id -> row whose extents stay as they are

        def jobs() -> Iterator[_GetBatch]:
            nbytes, align = batch_nbytes(working_set), working_set.space.round_up
            for i in range(0, len(names), _NUM_LOOKED_UP):
                rows = self._look_up(names[i : i + _NUM_LOOKED_UP], others)
                reading.update((row.key_id, row) for row in rows)
                start = size = 0
                for end, row in enumerate(rows):
                    if size + align(row.nbytes) > nbytes:
                        yield _GetBatch(working_set, rows[start:end], size, found, again, reading)
                        start, size = end, 0
                    size += align(row.nbytes)
                if rows:
                    yield _GetBatch(working_set, rows[start:], size, found, again, reading)

        def end_streams() -> None:
            for row in reading.values():
                working_set.space.end_stream(row)

        again: list[str] = []
        try:
            window.run(jobs())
        except BaseException:
            window.when_idle(end_streams)
            raise
        for name in again:  # read once more by itself, which raises its error
            found[name] = self._get(name)
        return others

    def _look_up(self, names: Sequence[str], others: list[str]) -> list[Row]:
        """Return the rows to read, in the order of their places, each with a stream begun; note ``others``."""
        rows: list[Row] = []
        working_set = self._working_set
        working_set.check(writing=False)
        with working_set.condition:
            working_set.residents.drain()
            working_set.room.raise_failure()
            for name in names:
                entry = working_set.records.peek(name)
                if entry is None:
                    raise KeyError(name)
                row = entry.row
                is_here = entry.state is EntryState.STORED and row is not None and len(row.extents) == 1
                if is_here and row is not None and is_small(working_set, row.nbytes) and row.num_blocks == 1:
                    rows.append(row)
                else:
                    others.append(name)
            if len(rows) < _MIN_NUM_KEYS:
                others += [row.name for row in rows]
                return []
            for row in rows:
                working_set.space.begin_stream(row)
        rows.sort(key=_place)
        return rows


class _GetBatch:
    """The job of reading some rows, in the order of their places, and copying them out."""

    def __init__(
        self,
        working_set: WorkingSet,
        rows: list[Row],
        nbytes: int,
        found: dict[str, torch.Tensor],
        again: list[str],
        reading: dict[int, Row],
    ) -> None:
        self.nbytes = nbytes
        self._working_set = working_set
        self._rows = rows
        self._found = found
        self._again = again
        self._reading = reading

    def begin(self, buffer: Buffer, on_done: Callable[[Batch], None]) -> Batch:
        space = self._working_set.space
        places: list[tuple[Extent, memoryview]] = []
        start = end = 0  # of the last place, in the buffer
        last = Extent(-1, 0, 0, 0)
        for row in self._rows:
            (extent,) = row.extents
            nbytes = space.round_up(row.nbytes)
            if extent.offset == last.offset + last.nbytes and extent[:2] == last[:2]:
                places.pop()
                last = last._replace(nbytes=last.nbytes + nbytes)
            else:
                start, last = end, extent._replace(nbytes=nbytes)
            end += nbytes
            places.append((last, buffer.memory[start:end]))
        return Batch(space.devices, places, IOClass.DEMAND, on_done)

    def finish(self, batch: Batch, buffer: Buffer) -> None:
        space = self._working_set.space
        start = 0
        for row in self._rows:
            # The memory of a failed operation does not match either: the next read of the key finds the error.
            expected = int.from_bytes(row.digests, "little")
            seed = block_seed(space.store_uuid, row.key_id, 0, row.generation)
            if digest(buffer.memory[start : start + row.nbytes], seed) == expected:
                copy = new_tensor(Spec.of(row), row.name)
                ctypes.memmove(copy.data_ptr(), buffer.address + start, row.nbytes)
                self._found[row.name] = copy
            else:
                self._again.append(row.name)
            start += space.round_up(row.nbytes)
        with self._working_set.condition:
            self._working_set.streamed_in_bytes += sum(row.nbytes for row in self._rows)
            for row in self._rows:
                space.end_stream(self._reading.pop(row.key_id))

    def __str__(self) -> str:
        return f"read of {self._rows[0].name!r} and {len(self._rows) - 1} more"


def _place(row: Row) -> Extent:
    return row.extents[0]

"""put_many and get_many of small tensors that are not in DRAM: many records in one buffer, straight to the devices.

A record of 4 KiB costs little to move and much to account for: in a batch it has no buffer, no operation and no
completion of its own. put_many makes single puts as long as DRAM has room for dirty bytes. get_many looks its keys up
together, and reads them in the order of their places.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from tiered.bytes.arena import Buffer
from tiered.bytes.device.base import Device, IOClass, Operation
from tiered.bytes.host_tensor import address_of
from tiered.bytes.interrupt import Lifted
from tiered.errors import CapacityError, DeviceError
from tiered.store.format.checksum import DIGEST_NBYTES, block_seed, digest
from tiered.store.format.row import INLINE_NBYTES, Extent, Row, Spec, pieces
from tiered.store.records.entry import EntryState
from tiered.store.residency.working_set import WorkingSet
from tiered.store.residency.write_back import Shortage
from tiered.store.transfers.transfer import submit_all
from tiered.store.values.tensors import new_tensor
from tiered.store.values.window import Window
from tiered.store.waiting.deadline import Deadline
from tiered.units import KiB, MiB

__all__ = ["Batch", "GetBatches", "PutBatches", "PutSource", "batch_nbytes", "is_small"]


_SMALL_NBYTES = 64 * KiB  # a larger record is worth operations of its own
_BATCH_NBYTES = MiB


def batch_nbytes(working_set: WorkingSet) -> int:
    """Return the bytes of a batch's buffer; small against the budget."""
    return working_set.space.round_up(min(_BATCH_NBYTES, working_set.budget_bytes // 32))


def is_small(working_set: WorkingSet, nbytes: int) -> bool:
    """Whether records of ``nbytes`` are moved in batches: too large for a row, too small for a buffer of their own."""
    return INLINE_NBYTES < nbytes <= min(_SMALL_NBYTES, batch_nbytes(working_set))


class Batch:
    """The operations of one batch; a Movement. Extents and memory are its own until ``on_done(batch)`` is called.

    ``error`` is one that an operation ended with. Digests are the owner's business, which knows the records.
    """

    __slots__ = ("_devices", "_io_class", "_lock", "_num_left", "_on_done", "_pieces", "error", "is_done")

    def __init__(
        self,
        devices: Sequence[Device],
        pieces: Iterable[tuple[Extent, memoryview]],
        io_class: IOClass,
        on_done: Callable[[Batch], None],
    ) -> None:
        """``pieces`` are aligned and of equal length each: where on the devices, and where in memory."""
        self.error: Exception | None = None
        self.is_done = False  # for the owner, which sets it under its lock
        self._devices = devices
        self._pieces = list(pieces)
        self._io_class = io_class
        self._on_done = on_done
        self._lock = threading.Lock()
        self._num_left = 0

    @property
    def is_write(self) -> bool:
        return self._io_class is IOClass.WRITE

    def start(self) -> None:
        """Submit everything; raises interrupts only, and ends with an error then."""
        try:
            operations = [(extent.device, self._operation(extent, memory)) for extent, memory in self._pieces]
        except BaseException as error:
            self.error = DeviceError(f"it was not handed to the device: {error!r}")
            self._on_done(self)
            raise
        # Order: the count before the first submit, because a device may complete inside submit.
        self._num_left = len(operations)
        submit_all(self._devices, operations)
        if not operations:
            self._on_done(self)

    def _operation(self, extent: Extent, memory: memoryview) -> Operation:
        return Operation(
            is_write=self.is_write,
            file=extent.file,
            offset=extent.offset,
            memory=memory,
            io_class=self._io_class,
            on_done=self._piece_done,
        )

    def _piece_done(self, operation: Operation) -> None:
        with self._lock:
            self.error = self.error or operation.error
            self._num_left -= 1
            is_last = not self._num_left
        if is_last:
            self._on_done(self)


# -- get batches -------------------------------------------------------------------------------------------------------


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


# -- put batches -------------------------------------------------------------------------------------------------------


class PutSource:
    """The values of put_many, one of them in hand. ``error`` keeps an exception of the caller's iterable."""

    def __init__(
        self,
        values: Iterable[tuple[str, torch.Tensor]],
        plain: Callable[[str, torch.Tensor], torch.Tensor],
        spec_of: Callable[[str, torch.Tensor], Spec],
    ) -> None:
        """``plain`` checks a value and returns the contiguous one to put, ``spec_of`` the looks it has in the store."""
        self.error: BaseException | None = None
        self.key = ""
        self.value: torch.Tensor | None = None  # None at the end
        self.spec = Spec(torch.uint8, (0,))
        self._values = iter(values)
        self._plain = plain
        self._spec_of = spec_of
        self.advance()

    def is_small(self, working_set: WorkingSet) -> bool:
        """Whether the value in hand may be part of a batch: it has one digest."""
        assert self.value is not None
        has_one = self.spec.nbytes <= self.spec.block_nbytes
        return self.value.is_cpu and has_one and is_small(working_set, self.spec.nbytes)

    def advance(self) -> None:
        """Take the next value in hand."""
        self.value = None
        try:
            with Lifted():  # the caller's values may come slowly
                key, value = next(self._values)
            plain = self._plain(key, value)
            self.key, self.spec, self.value = key, self._spec_of(key, plain), plain
        except StopIteration:
            return
        except BaseException as error:  # the caller's: raised when all values before it are put
            self.error = error


class PutBatches:
    """Puts many values in order; ``put`` is for single ones. The last put of a key wins."""

    def __init__(self, working_set: WorkingSet, put: Callable[[str, torch.Tensor], None]) -> None:
        self._working_set = working_set
        self._put = put

    def put(self, source: PutSource) -> None:
        """Put all of ``source``; blocks. Where one fails, all before it are put and none after it."""
        window = Window(self._working_set)
        batches: list[_PutBatch] = []  # that have rows to install, oldest first

        def jobs() -> Iterator[_PutBatch]:
            while source.value is not None:
                batches[:] = [batch for batch in batches if batch.rows]
                if source.is_small(self._working_set) and (batches or not self._has_room(source)):
                    batches.append(_PutBatch(self._working_set, source))
                    yield batches[-1]
                    continue
                # Order: all earlier values are put first, and one that waits for DRAM must not wait for the window's.
                window.drain()
                try:
                    self._put(source.key, source.value)
                except CapacityError as error:
                    raise CapacityError(
                        f"put_many, at {source.key!r}: {error}. Leases that its values come from are open as long as "
                        "the caller keeps them: give pairs of a generator that leases one key at a time"
                    ) from error
                source.advance()

        def give_back() -> None:
            space = self._working_set.space
            for row in (row for batch in batches for row in batch.rows):
                (space.quarantine if window.has_failed else space.give_back)(row.extents)

        with self._working_set.mark:
            try:
                window.run(jobs())
            except BaseException:
                window.when_idle(give_back)
                raise
        if source.error is not None:
            raise source.error

    def _has_room(self, source: PutSource) -> bool:
        """Whether so little else is dirty that the value in hand would not be written soon."""
        working_set = self._working_set
        dirty_bytes = working_set.residents.dirty_bytes + working_set.room.write_back.writing_bytes
        return dirty_bytes + source.spec.nbytes <= working_set.budget_bytes // 8


class _PutBatch:
    """The job of writing the next small values of a source to extents, and under key ids, of their own.

    The old tensors stay readable until all of the new ones have landed.
    """

    def __init__(self, working_set: WorkingSet, source: PutSource) -> None:
        self.nbytes = batch_nbytes(working_set)
        self.keys: dict[str, None] = {}
        self.rows: list[Row] = []  # whose extents are this job's, until they are installed
        self._working_set = working_set
        self._source = source
        self._scratch = not working_set.records.durable
        self._failure: Exception | None = None

    def begin(self, buffer: Buffer, on_done: Callable[[Batch], None]) -> Batch:
        packed = list(self._pack(buffer))
        try:
            extents, generation, key_id = self._place(sum(size for _, _, size in packed), len(packed))
        except Exception as error:  # raised when it is this job's turn: all before it are put
            self._failure = error
            return Batch((), (), IOClass.WRITE, on_done)
        store_uuid = self._working_set.space.store_uuid
        start = 0
        for key, spec, size in packed:
            content = digest(buffer.memory[start : start + spec.nbytes], block_seed(store_uuid, key_id, 0, generation))
            row = Row(
                key_id=key_id,
                name=key,
                dtype=spec.dtype_name,
                shape=spec.shape,
                nbytes=spec.nbytes,
                generation=generation,
                extents=_cut(extents, start, size),
                digests=content.to_bytes(DIGEST_NBYTES, "little"),
                inline=None,
                block_nbytes=spec.block_nbytes,
            )
            self.rows.append(row)
            start += size
            key_id += 1
        places: list[tuple[Extent, memoryview]] = []
        start = 0
        for extent in extents:
            places.append((extent, buffer.memory[start : start + extent.nbytes]))
            start += extent.nbytes
        return Batch(self._working_set.space.devices, places, IOClass.WRITE, on_done)

    def _pack(self, buffer: Buffer) -> Iterator[tuple[str, Spec, int]]:
        """Copy values into the buffer as long as they are small and fit; yield key, spec and bytes in the buffer."""
        source, working_set = self._source, self._working_set
        start = 0
        while source.value is not None and source.is_small(working_set):
            nbytes = source.spec.nbytes
            size = working_set.space.round_up(nbytes)
            if start + size > self.nbytes or source.key in self.keys:
                return
            # Lifetime: now, because the next value may be the same tensor with other numbers in it.
            ctypes.memmove(buffer.address + start, address_of(source.value), nbytes)
            if size > nbytes:
                ctypes.memset(buffer.address + start + nbytes, 0, size - nbytes)
            self.keys[source.key] = None
            yield source.key, source.spec, size
            start += size
            source.advance()

    def _place(self, nbytes: int, num_keys: int) -> tuple[tuple[Extent, ...], int, int]:
        """Return fresh extents, the generation to write for, and the first of ``num_keys`` new key ids; blocks."""
        working_set, records = self._working_set, self._working_set.records
        deadline = Deadline(str(self), working_set.deadline_s)
        working_set.deferred_seal.settle()
        while True:
            with working_set.condition:
                if not all(map(self._may_replace, self.keys)):
                    deadline.wait(working_set.condition, records.commit_progress())
                    continue
                extents = working_set.space.take_nowait(nbytes, scratch=self._scratch)
                if extents is not None:
                    return extents, records.open_generation, records.new_key_ids(num_keys)
            working_set.room.grow(Shortage(nbytes, self._scratch))

    def _may_replace(self, key: str) -> bool:
        old = self._working_set.keys.settled(key, "put")
        return old is None or self._working_set.records.may_write(old)

    def finish(self, batch: Batch, buffer: Buffer) -> None:
        failure = self._failure or batch.error
        if failure is not None:
            raise failure
        working_set, records = self._working_set, self._working_set.records
        specs = [Spec.of(row) for row in reversed(self.rows)]
        self.rows.reverse()
        while specs:
            working_set.deferred_seal.settle()
            with working_set.condition:
                while specs:
                    row = self.rows[-1]
                    old = working_set.keys.settled(row.name, "put")
                    if working_set.deferred_seal.is_closed:  # a commit without these was asked for meanwhile
                        break
                    entry = working_set.keys.replace(
                        old, row.name, specs.pop(), scratch=self._scratch, key_id=row.key_id
                    )
                    records.streamed(entry, row)
                    working_set.streamed_out_bytes += row.nbytes
                    self.rows.pop()

    def __str__(self) -> str:
        first = next(iter(self.keys), "")
        return f"put of {first!r} and {len(self.keys) - 1} more"


def _cut(extents: tuple[Extent, ...], start: int, nbytes: int) -> tuple[Extent, ...]:
    """Return the extents that hold the bytes [start, start + nbytes) of ``extents``."""
    if len(extents) > 1:
        return tuple(pieces(extents, start, nbytes))
    device, file, offset, _ = extents[0]
    return (Extent(device, file, offset + start, nbytes),)

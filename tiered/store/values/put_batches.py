"""put_many: single puts as long as DRAM has room for dirty bytes, then small tensors straight to the devices."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator

import torch

from tiered.bytes.arena import Buffer
from tiered.bytes.device.base import IOClass
from tiered.bytes.host_tensor import address_of
from tiered.bytes.interrupt import Lifted
from tiered.errors import CapacityError
from tiered.store.format.checksum import DIGEST_NBYTES, block_seed, digest
from tiered.store.format.row import Extent, Row, Spec, pieces
from tiered.store.residency.working_set import WorkingSet
from tiered.store.residency.write_back import Shortage
from tiered.store.values.batch import Batch, batch_nbytes, is_small
from tiered.store.values.window import Window
from tiered.store.waiting.deadline import Deadline

__all__ = ["PutBatches", "PutSource"]


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

"""put_many and get_many. Small tensors that are not in DRAM move in batches: many records in one buffer.

A record of 4 KiB costs little to move and much to account for: in a batch it has no buffer, no operation and no
completion of its own. put_many makes single puts as long as DRAM has room for dirty bytes. get_many looks its keys up
together, and reads them in the order of their places.
"""

from __future__ import annotations

import ctypes
import functools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from operator import attrgetter
from typing import Any

import torch

from tiered.bytes.arena import Buffer
from tiered.bytes.device.base import IOClass
from tiered.bytes.host_tensor import address_of
from tiered.bytes.interrupt import INTERRUPTS
from tiered.errors import CapacityError
from tiered.store.format.checksum import DIGEST_NBYTES, block_seed, digest
from tiered.store.format.places import Places
from tiered.store.format.row import INLINE_NBYTES, Extent, Row, Spec, pieces
from tiered.store.residency.entry import EntryState
from tiered.store.residency.key_table import new_row
from tiered.store.residency.residency import Residency
from tiered.store.values.streaming import give_back, install, take_extents
from tiered.store.values.tensors import new_tensor, plain_value
from tiered.store.values.values import Values
from tiered.store.values.window import Batch, OnDone, Window, WindowJob
from tiered.store.waiting.calling_thread import refuse_modes
from tiered.store.waiting.deadline import Deadline
from tiered.units import KiB, MiB

__all__ = ["get_many", "put_many"]


_SMALL_NBYTES = 64 * KiB  # a larger record is worth operations of its own
_BATCH_NBYTES = MiB


def _batch_nbytes(working_set: Residency) -> int:
    """Return the bytes of a batch's buffer; small against the budget."""
    return working_set.space.round_up(min(_BATCH_NBYTES, working_set.budget_bytes // 32))


def _is_small(working_set: Residency, nbytes: int) -> bool:
    """Whether records of ``nbytes`` are moved in batches: too large for a row, too small for a buffer of their own."""
    return INLINE_NBYTES < nbytes <= min(_SMALL_NBYTES, _batch_nbytes(working_set))


# -- get_many ----------------------------------------------------------------------------------------------------------


_MIN_NUM_KEYS = 8  # fewer are swapped in one by one, and resident afterwards
_NUM_LOOKED_UP = 1024  # keys that are sorted by place at a time
_NUM_AHEAD = 64  # keys that are prefetched


def get_many(values: Values, keys: Iterable[str]) -> dict[str, torch.Tensor]:
    """Return copies of the tensors of ``keys``, in their order; blocks. KeyError before anything is read."""
    working_set = values.working_set
    found: dict[str, Any] = dict.fromkeys(keys)  # in order; filled in below
    names = list(found)
    working_set.check(writing=False)
    for name in names[:1]:
        refuse_modes("get_many", name)
    with working_set.condition:
        for name in names:
            if not working_set.is_shown(name):
                raise KeyError(name)
    with working_set.mark:
        others = _SmallGets(working_set, found).run(names)
    for i, name in enumerate(others):
        if i % (_NUM_AHEAD // 2) == 0:
            working_set.prefetch(islice(others, i, i + _NUM_AHEAD))
        INTERRUPTS.look()
        found[name] = values.get(name)
    return found


class _SmallGets:
    """Reads the small tensors of one get_many in batches; nothing becomes resident."""

    def __init__(self, working_set: Residency, found: dict[str, Any]) -> None:
        """Copies go into ``found``."""
        self._working_set = working_set
        self._found = found
        self._others: list[str] = []  # names that are for single gets
        self._again: list[str] = []  # names of bytes that did not match: a single get raises the error
        self._reading: dict[int, Row] = {}  # key id -> row whose extents stay as they are

    def run(self, names: Sequence[str]) -> list[str]:
        """Copy the small tensors of ``names`` that are not in DRAM; return the other names. Blocks."""
        with Window(self._working_set) as window:
            window.at_end = self._end_streams
            window.run(self._jobs(names))
        return self._again + self._others

    def _end_streams(self, window: Window) -> None:
        for row in self._reading.values():
            self._working_set.space.end_stream(row)

    def _jobs(self, names: Sequence[str]) -> Iterator[WindowJob]:
        nbytes, align = _batch_nbytes(self._working_set), self._working_set.space.round_up
        for i in range(0, len(names), _NUM_LOOKED_UP):
            rows = self._look_up(names[i : i + _NUM_LOOKED_UP])
            self._reading.update((row.key_id, row) for row in rows)
            start = size = 0
            for end, row in enumerate(rows):
                if size + align(row.nbytes) > nbytes:
                    yield self._job(rows[start:end], size)
                    start, size = end, 0
                size += align(row.nbytes)
            if rows:
                yield self._job(rows[start:], size)

    def _job(self, rows: list[Row], nbytes: int) -> WindowJob:
        what = f"read of {rows[0].name!r} and {len(rows) - 1} more"
        return WindowJob(nbytes, what, lambda buffer, on_done: self._read(rows, buffer, on_done))

    def _look_up(self, names: Sequence[str]) -> list[Row]:
        """Return the rows to read, in the order of their places, each with a stream begun; note the others."""
        rows: list[Row] = []
        working_set = self._working_set
        with working_set.condition:
            working_set.catch_up()
            for name in names:
                entry = working_set.peek(name)
                if entry is None:
                    raise KeyError(name)
                row = entry.row
                is_here = entry.state is EntryState.STORED and row is not None and len(row.extents) == 1
                if is_here and row is not None and _is_small(working_set, row.nbytes) and row.num_blocks == 1:
                    rows.append(row)
                else:
                    self._others.append(name)
            if len(rows) < _MIN_NUM_KEYS:
                self._others += [row.name for row in rows]
                return []
            for row in rows:
                working_set.space.begin_stream(row)
        rows.sort(key=attrgetter("extents"))
        return rows

    def _read(self, rows: list[Row], buffer: Buffer, on_done: OnDone) -> Iterator[Batch]:
        """Read ``rows``, in the order of their places, and copy them out."""
        space = self._working_set.space
        places: list[Extent] = []  # one after another in the buffer
        last = Extent(-1, 0, 0, 0)
        for row in rows:
            (extent,) = row.extents
            nbytes = space.round_up(row.nbytes)
            if extent.offset == last.offset + last.nbytes and extent[:2] == last[:2]:
                last = places.pop()
                last = last._replace(nbytes=last.nbytes + nbytes)
            else:
                last = extent._replace(nbytes=nbytes)
            places.append(last)
        yield Batch(space.devices, Places.in_turn(places), buffer.memory, IOClass.DEMAND, on_done)
        start = 0
        for row in rows:
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
            self._working_set.streamed_in_bytes += sum(row.nbytes for row in rows)
            for row in rows:
                space.end_stream(self._reading.pop(row.key_id))


# -- put_many ----------------------------------------------------------------------------------------------------------


def put_many(values: Values, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Put each of ``pairs``, in order; blocks. Where one fails, all before it are put and none after it."""
    values.working_set.check(writing=True)
    _Puts(values, pairs).run()


class _Puts:
    """The puts of one put_many, with the next value in hand."""

    def __init__(self, values: Values, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._values = values
        self._working_set = values.working_set
        self._scratch = not values.working_set.durable
        self._pairs = iter(pairs)
        self._error: BaseException | None = None  # the caller's: raised when all values before it are put
        self._key = ""
        self._value: torch.Tensor | None = None  # in hand; None at the end
        self._spec = Spec(torch.uint8, (0,))  # its looks in the store
        self._rows: deque[Row] = deque()  # that are written in batches and not installed, oldest first

    def run(self) -> None:
        self._advance()
        with self._working_set.mark, Window(self._working_set) as window:
            window.at_end = functools.partial(give_back, self._rows, self._working_set.space)
            window.run(self._jobs(window))
        if self._error is not None:
            raise self._error

    def _advance(self) -> None:
        """Take the next value in hand."""
        self._value = None
        try:
            key, value = next(self._pairs)
            plain = plain_value(key, value)
            self._key, self._spec, self._value = key, self._values.spec_of(key, plain), plain
        except StopIteration:
            return
        except BaseException as error:
            self._error = error

    def _is_small(self) -> bool:
        """Whether the value in hand may be part of a batch: it has one digest."""
        assert self._value is not None
        has_one = self._spec.nbytes <= self._spec.block_nbytes
        return self._value.is_cpu and has_one and _is_small(self._working_set, self._spec.nbytes)

    def _has_room(self) -> bool:
        """Whether so little else is dirty that the value in hand would not be written soon."""
        working_set = self._working_set
        dirty_bytes = working_set.dirty_bytes + working_set.writing_bytes
        return dirty_bytes + self._spec.nbytes <= working_set.budget_bytes // 8

    def _jobs(self, window: Window) -> Iterator[WindowJob]:
        while self._value is not None:
            if self._is_small() and (self._rows or not self._has_room()):
                yield WindowJob(_batch_nbytes(self._working_set), f"put of {self._key!r} and more", self._write)
                continue
            # Order: all earlier values are put first, and one that waits for DRAM must not wait for the window's.
            window.drain()
            try:
                self._values.put(self._key, self._value)
            except CapacityError as error:
                raise CapacityError(
                    f"put_many, at {self._key!r}: {error}. Leases that its values come from are open as long as "
                    "the caller keeps them: give pairs of a generator that leases one key at a time"
                ) from error
            self._advance()

    def _write(self, buffer: Buffer, on_done: OnDone) -> Iterator[Batch]:
        """Write the next small values to extents, and under key ids, of their own; then install them.

        The old tensors stay readable until all of the new ones have landed.
        """
        working_set = self._working_set
        space = working_set.space
        packed = self._pack(buffer)
        deadline = Deadline(f"put of {next(iter(packed))!r} and {len(packed) - 1} more", working_set.deadline_s)
        nbytes = sum(size for _, size in packed.values())
        failure: Exception | None = None
        try:
            extents, generation, key_id = take_extents(working_set, packed, nbytes, deadline, scratch=self._scratch)
        except Exception as error:
            failure = error
        if failure is not None:
            yield Batch(
                (), Places.in_turn(()), buffer.memory, IOClass.WRITE, on_done
            )  # order: all values before these are put first
            raise failure
        start = 0
        for key, (spec, size) in packed.items():
            seed = block_seed(space.store_uuid, key_id, 0, generation)
            content = digest(buffer.memory[start : start + spec.nbytes], seed).to_bytes(DIGEST_NBYTES, "little")
            self._rows.append(new_row(key_id, key, spec, generation, tuple(pieces(extents, start, size)), content))
            start += size
            key_id += 1
        batch = Batch(space.devices, Places.in_turn(extents), buffer.memory, IOClass.WRITE, on_done)
        yield batch
        if batch.error is not None:
            raise batch.error
        install(working_set, self._rows, len(packed), scratch=self._scratch)

    def _pack(self, buffer: Buffer) -> dict[str, tuple[Spec, int]]:
        """Copy values into the buffer while they are small and fit; return each key's spec and bytes in the buffer."""
        packed: dict[str, tuple[Spec, int]] = {}
        start = 0
        while self._value is not None and self._is_small():
            nbytes = self._spec.nbytes
            size = self._working_set.space.round_up(nbytes)
            if start + size > _batch_nbytes(self._working_set) or self._key in packed:
                break
            # Lifetime: now, because the next value may be the same tensor with other numbers in it.
            ctypes.memmove(buffer.address + start, address_of(self._value), nbytes)
            if size > nbytes:
                ctypes.memset(buffer.address + start + nbytes, 0, size - nbytes)
            packed[self._key] = (self._spec, size)
            start += size
            self._advance()
        return packed

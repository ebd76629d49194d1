"""Rows: a table in the store, read and written by row; and parts of tensors, which are ranges of one."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from tiered.bytes.arena import Buffer
from tiered.bytes.critical_section import BoundedThread
from tiered.bytes.host_tensor import address_of
from tiered.errors import CapacityError, UsageError
from tiered.store.format.places import Ints
from tiered.store.format.row import Spec
from tiered.store.residency.entry import EntryState
from tiered.store.residency.residency import ReadPastError, Residency
from tiered.store.rows.block_places import BlockPlaces
from tiered.store.rows.gather import Bytes, Gather, Pieces, Segments, put_rows, take_rows
from tiered.store.rows.scatter import NewBytes, Scatter
from tiered.store.values.tensors import new_tensor, plain_value, read_resident, result_for
from tiered.store.waiting.calling_thread import refuse_modes

__all__ = ["NUM_WITH_ADAM", "PartAccess", "Rows"]


class _Sink(Protocol):
    """Ranges of a record that are to be read, and a place for their bytes."""

    def segments(self, spec: Spec) -> Segments:
        """Return the ranges to read of a record of ``spec``. Raises ValueError, UsageError."""

    def use(self, pieces: Pieces, memory: Bytes) -> None:
        """Copy the bytes of ``pieces``, which are of these segments, out of ``memory``."""


class PartAccess:
    """Reads and writes of parts of records. One write of a key at a time; all methods are thread-safe."""

    def __init__(self, working_set: Residency) -> None:
        self._working_set = working_set
        self._space = working_set.space
        self._condition = working_set.condition
        self._gather = Gather(working_set, BlockPlaces(working_set))
        self._writing: set[str] = set()  # keys

    def give_back(self) -> None:
        """Give back the memory of the decoded pages: the store closes, or is garbage."""
        self._gather.places.give_back(0)

    def version(self, key: str) -> int:
        """Return a number that the bytes of ``key`` share with none before them."""
        return self._working_set.version(key)

    def spec(self, key: str) -> Spec:
        """Return the looks of ``key``. KeyError; raises UsageError for a tensor that has no rows."""
        self._working_set.check(writing=False)
        with self._condition:
            entry = self._working_set.shown(key)
        if entry is None:
            raise KeyError(key)
        if not entry.spec.shape:
            raise UsageError(f"rows of {key!r}: it has no dimension; expected (number of rows, ...)")
        return entry.spec

    def read(self, key: str, sink: _Sink, row_nbytes: int = 0) -> None:
        """Give ``sink`` what it wants of ``key``; blocks. KeyError, CorruptionError, DeviceError, LeaseError."""
        refuse_modes("read_part", key)
        self._working_set.check(writing=False)
        with self._working_set.mark:
            while True:
                with contextlib.suppress(ReadPastError):  # the bytes have left DRAM: look again
                    return self._read(key, sink, row_nbytes)

    def _read(self, key: str, sink: _Sink, row_nbytes: int) -> None:
        with self._condition:
            self._working_set.catch_up()
            entry = self._working_set.shown(key)
            if entry is None:
                raise KeyError(key)
            segments = sink.segments(entry.spec)
            row = entry.row if entry.state is EntryState.STORED else None
            if row is not None and row.inline is None and segments.nbytes:
                self._space.begin_stream(row)
        if not segments.nbytes:
            return
        if row is None:
            self._read_resident(key, sink)
        elif row.inline is not None:
            sink.use(segments.all_pieces(), np.frombuffer(row.inline, np.uint8))
        else:
            self._gather.run(row, segments, sink.use, row_nbytes=row_nbytes)

    def _read_resident(self, key: str, sink: _Sink) -> None:
        def copy(spec: Spec, buffer: Buffer) -> None:
            # Order: the looks are those of these bytes; since the caller looked, the key may have become another.
            segments = sink.segments(spec)
            if segments.nbytes:
                sink.use(segments.all_pieces(), np.frombuffer(buffer.memory, np.uint8))

        read_resident(self._working_set, key, copy, 0)

    def write(self, key: str, content: NewBytes) -> None:
        """Write ``content`` to ``key``; see Scatter."""
        self._working_set.check(writing=True)
        with self._working_set.mark:
            Scatter(self._working_set, self._gather, self._writing, key, content).run()

    def read_part(self, key: str, start: int, stop: int) -> torch.Tensor:
        """See ``TensorMapping.read_part``. Raises DeviceError, too."""
        sink = _PartRead(key, start, stop)
        self.read(key, sink)
        return sink.result

    def write_part(self, key: str, start: int, value: torch.Tensor) -> None:
        """See ``TensorMapping.write_part``."""
        self.write(key, _PartWrite(key, start, plain_value(key, value)))


def _bytes_of(tensor: torch.Tensor) -> Bytes:
    """Return the bytes of a contiguous tensor on the CPU, which must live as long: perhaps a view of a lease."""
    if not tensor.nbytes:
        return np.empty(0, np.uint8)
    memory = (ctypes.c_uint8 * tensor.nbytes).from_address(address_of(tensor))
    return np.frombuffer(memoryview(memory), np.uint8)


# -- parts -------------------------------------------------------------------------------------------------------------


def _part(key: str, spec: Spec, start: int, stop: int) -> Segments:
    """Return where the elements [start, stop) are. Raises ValueError where a tensor of ``spec`` has no such."""
    numel = spec.nbytes // spec.dtype.itemsize
    if not 0 <= start <= stop <= numel:
        raise ValueError(f"elements [{start}, {stop}) of {key!r}, which has {numel}; expected a range inside of it")
    return Segments(np.array([start * spec.dtype.itemsize]), (stop - start) * spec.dtype.itemsize)


class _PartRead:
    """Elements of a flattened tensor, to be read into ``result``."""

    def __init__(self, key: str, start: int, stop: int) -> None:
        self.result = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._key = key
        self._start = start
        self._stop = stop

    def segments(self, spec: Spec) -> Segments:
        found = _part(self._key, spec, self._start, self._stop)
        self.result = new_tensor(Spec(spec.dtype, (self._stop - self._start,)), self._key)
        return found

    def use(self, pieces: Pieces, memory: Bytes) -> None:
        target = _bytes_of(self.result)
        for at, skip, nbytes in zip(pieces.at, pieces.skip, pieces.nbytes, strict=True):
            target[skip : skip + nbytes] = memory[at : at + nbytes]


class _PartWrite:
    """New elements of a flattened tensor, from ``start`` on."""

    needs_old = False
    record_nbytes = 0

    def __init__(self, key: str, start: int, value: torch.Tensor) -> None:
        """``value`` is contiguous."""
        self._key = key
        self._start = start
        self._value = value.cpu()
        self._bytes = _bytes_of(self._value)

    def segments(self, spec: Spec) -> Segments:
        found = _part(self._key, spec, self._start, self._start + self._value.numel())
        if self._value.dtype != spec.dtype:
            raise ValueError(f"write of a part of {self._key!r}: expected {spec.dtype}, got {self._value.dtype}")
        return found

    def apply(self, pieces: Pieces, memory: Bytes) -> None:
        for at, skip, nbytes in zip(pieces.at, pieces.skip, pieces.nbytes, strict=True):
            memory[at : at + nbytes] = self._bytes[skip : skip + nbytes]


# -- rows --------------------------------------------------------------------------------------------------------------


class _Selection(NamedTuple):
    """The rows that an index names, ascending, each once.

    It names the k-th of them at its places ``order[bounds[k]:bounds[k + 1]]``, ascending.
    """

    rows: Ints
    order: Ints
    bounds: Ints

    @classmethod
    def of(cls, index: Ints) -> _Selection:
        if len(index) < 2 or (np.diff(index) > 0).all():
            return cls(index, np.arange(len(index)), np.arange(len(index) + 1))
        order = np.argsort(index, kind="stable")
        ascending = index[order]
        first = np.flatnonzero(np.diff(ascending, prepend=-1))
        return cls(ascending[first], order, np.append(first, len(index)))


class _Some:
    """Rows of one key of a table, by a selection of the whole table's: those from ``first`` to ``last`` of it."""

    def __init__(self, table: Rows, shard: _Shard, selection: _Selection, first: int, last: int) -> None:
        self._table = table
        self._shard = shard
        self._selection = selection
        self._first = first
        self._last = last

    def segments(self, spec: Spec) -> Segments:
        shard, table = self._shard, self._table
        expected = (shard.num_rows, *table.record_shape)
        if (spec.dtype, spec.shape) != (table.dtype, expected):
            raise UsageError(
                f"rows of {shard.key!r}: it was {table.dtype} {list(expected)} and is"
                f" {spec.dtype} {list(spec.shape)} by now; call store.rows anew"
            )
        rows = self._selection.rows[self._first : self._last] - shard.start
        return Segments(rows * table.record_nbytes, table.row_nbytes)

    def _whole(self, pieces: Pieces) -> tuple[Ints, int, int]:
        """Return where the whole rows of ``pieces`` are in memory, and which of the selection's they are."""
        whole = pieces.whole(self._table.row_nbytes)
        return pieces.at[whole], self._first + pieces.first + whole.start, self._first + pieces.first + whole.stop


class _RowRead(_Some):
    """Rows to be read into ``target``, (n, row bytes)."""

    def __init__(self, target: Bytes, *where: object) -> None:
        super().__init__(*where)  # type: ignore[arg-type]
        self._target = target

    def use(self, pieces: Pieces, memory: Bytes) -> None:
        _, order, bounds = self._selection
        at, first, last = self._whole(pieces)
        if last > first:
            at = np.repeat(at, np.diff(bounds[first : last + 1]))
            found = take_rows(memory, at, self._table.row_nbytes)
            places = order[bounds[first] : bounds[last]] * self._table.row_nbytes
            put_rows(self._target.reshape(-1), places, found)
        for segment, place, part in pieces.cut(self._table.row_nbytes):
            number = self._first + segment
            self._target[order[bounds[number] : bounds[number + 1]], part] = memory[place]


class _RowWrite(_Some):
    """Rows to be written: ``values``, (n, row bytes), in the place of the old ones or, with ``needs_old``, added."""

    def __init__(self, values: Bytes, *where: object, needs_old: bool) -> None:
        super().__init__(*where)  # type: ignore[arg-type]
        self._values = values
        self.needs_old = needs_old
        self.record_nbytes = self._table.record_nbytes

    def apply(self, pieces: Pieces, memory: Bytes) -> None:
        nbytes = self._table.row_nbytes
        at, first, last = self._whole(pieces)
        if last > first:
            rows = take_rows(memory, at, nbytes) if self.needs_old else np.empty((0, 0), np.uint8)
            put_rows(memory, at, self._new(rows, first, last, slice(None)))
        for segment, place, part in pieces.cut(nbytes):
            number = self._first + segment
            memory[place] = self._new(memory[None, place].copy(), number, number + 1, part)[0]

    def _new(self, old: Bytes, first: int, last: int, part: slice) -> Bytes:
        """Return the bytes ``part`` of the rows from ``first`` to ``last`` of the selection, which were ``old``."""
        _, order, bounds = self._selection
        if not self.needs_old:
            return self._values[order[bounds[first + 1 : last + 1] - 1], part]  # the last put wins
        dtype = self._table.dtype
        source = torch.from_numpy(np.ascontiguousarray(self._values[order[bounds[first] : bounds[last]], part]))
        counts = np.diff(bounds[first : last + 1])
        rows, added = torch.from_numpy(old).view(dtype), source.view(dtype)
        if len(added) == len(rows):
            rows.add_(added)
            return old
        if dtype.itemsize < 4 or not self._table.row_shape:  # whose sums torch rounds once, or in another order
            if not self._table.row_shape:
                rows, added = rows[:, 0], added[:, 0]
            rows.index_add_(0, torch.from_numpy(np.repeat(np.arange(len(counts)), counts)), added)
            return old
        # As index_add_ does, which takes 28 us a row: the first of each row's, all at once, then the second of each.
        starts = np.cumsum(counts) - counts
        for turn in range(int(counts.max())):
            which = np.flatnonzero(counts > turn)
            place = torch.from_numpy(which)
            rows.index_copy_(0, place, rows.index_select(0, place).add_(added[torch.from_numpy(starts[which] + turn)]))
        return old


class _Shard(NamedTuple):
    """One key of a table: its rows are those from ``start`` on."""

    key: str
    start: int
    num_rows: int


class _Ahead:
    """Rows on their way, in a thread of their own, for a ``get`` that comes later."""

    def __init__(self, numbers: torch.Tensor, versions: list[int], read: Callable[[], torch.Tensor]) -> None:
        self._numbers = numbers
        self._versions = versions
        self._read = read
        self._found: torch.Tensor | None = None
        self._thread: BoundedThread | None = BoundedThread(target=self._run, name="tiered-rows-ahead")
        try:
            self._thread.start()
        except CapacityError:  # there can be no thread: the get reads
            self._thread = None

    def _run(self) -> None:
        # Order: an error is the get's own to find, which reads again then.
        with contextlib.suppress(Exception):
            self._found = self._read()

    def take(self, numbers: torch.Tensor, versions: list[int]) -> torch.Tensor | None:
        """Return the rows ``numbers`` once they are there; None where they are others, or of another version."""
        if self._thread is None or versions != self._versions or not torch.equal(numbers, self._numbers):
            return None
        self._thread.join()
        return self._found


class RowStore(Protocol):
    """The store that a table is in, as tables and their optimizers use it."""

    def __contains__(self, key: object) -> bool: ...
    def registered(self, name: str) -> Any: ...
    def registered_state(self, name: str) -> Any | None: ...
    def create_rows(self, key: str, num_rows: int, row_shape: Iterable[int], dtype: torch.dtype) -> Rows: ...
    def rows(self, keys: str) -> Rows: ...
    def register(self, name: str, item: Any) -> None: ...


NUM_WITH_ADAM = 3
"""How many rows a record of a table with ``state="adam"`` is: the row itself, exp_avg, exp_avg_sq."""


class Rows:
    """The rows of a table in the store, ``(len(rows), *row_shape)`` of ``dtype``: of one key or of several, in order.

    ``index``, everywhere, is a tensor of whole numbers of one dimension, or a list or array that makes one; in any
    order, with repeats, negative ones from the end. Only the blocks that hold the rows are read or written, each under
    its digest; blocks of 4 KiB (``create_rows``, ``put(block_size=)``) suit rows best. A call reads each key as it was
    at one moment. Writes are durable with the next commit, and ``rollback`` undoes them. All methods are thread-safe
    and block.

    Raises IndexError with the first index out of range; TypeError for an index of another kind; ValueError for values
    of another shape or dtype; KeyError, LeaseError, CapacityError, DeviceError; CorruptionError with the row.
    """

    row_shape: tuple[int, ...]
    dtype: torch.dtype

    def __init__(
        self,
        store: RowStore,
        access: PartAccess,
        settled: Callable[[str], str],
        keys: Sequence[str],
        state: str | None = None,
    ) -> None:
        """Made by ``Store.rows``. ``settled(key)`` returns ``key`` once no update works with it."""
        self.store = store
        self.keys = list(keys)
        for key in keys:
            if key.startswith("model/") and store.registered("tiered.model") is not None:
                raise UsageError(
                    f"rows of {key!r}: the key is the model's, which is sharded into this store; its parameters are"
                    " read and written under tiered.unsharded"
                )
        self._access = access
        self._settled = settled
        self._ahead: _Ahead | None = None
        self._lock = threading.Lock()  # guards ``_ahead``
        specs = [access.spec(settled(key)) for key in keys]
        if not specs:
            raise ValueError("rows of no keys: expected one key or several")
        self.has_adam = state == "adam"
        if state not in (None, "adam"):
            raise ValueError(f'rows of {keys[0]!r}: expected state None or "adam", got {state!r}')
        self.dtype, self.record_shape = specs[0].dtype, specs[0].shape[1:]
        self.row_shape = self.record_shape[1:] if self.has_adam else self.record_shape
        if self.has_adam and (self.record_shape[:1] != (NUM_WITH_ADAM,) or self.dtype is not torch.float32):
            raise UsageError(
                f"rows of {keys[0]!r}: it is {self.dtype} {list(specs[0].shape)}, and no table that create_rows made"
                ' with state="adam"'
            )
        self.record_nbytes = Spec(self.dtype, self.record_shape).nbytes
        self.row_nbytes = Spec(self.dtype, self.row_shape).nbytes
        self._shards: list[_Shard] = []
        start = 0
        for key, spec in zip(keys, specs, strict=True):
            if (spec.dtype, spec.shape[1:]) != (self.dtype, self.record_shape):
                raise ValueError(
                    f"rows of {key!r}: {spec.dtype} {list(spec.shape[1:])}; expected {self.dtype}"
                    f" {list(self.record_shape)}, as {keys[0]!r} has"
                )
            self._shards.append(_Shard(key, start, spec.shape[0]))
            start += spec.shape[0]
        self._num_rows = start

    def __len__(self) -> int:
        return self._num_rows

    def get(self, index: torch.Tensor | Iterable[int], *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return copies of the rows that ``index`` names: (n, *row_shape), a new tensor on the CPU, or ``out``.

        ``out`` is contiguous, of that shape and dtype, on any device, and does not require grad; page-locked, if it is
        to be copied to a device next.
        """
        numbers = self.numbers(index)
        with self._lock:  # one caller alone gets that tensor
            ahead, self._ahead = self._ahead, None
        found = None if ahead is None else ahead.take(numbers, self._versions())
        if found is not None:
            return found if out is None else result_for(Spec.like(found), self.keys[0], out, out.device).copy_(found)
        return self._get(numbers, out)

    def prefetch(self, index: torch.Tensor | Iterable[int]) -> None:
        """Begin to read the rows that ``index`` names, for the next ``get``: a hint, which does not block.

        A ``get`` of the same rows returns them, unless the table was written meanwhile; a ``get`` of other rows, and
        the next ``prefetch``, drop them. They are in a tensor outside the DRAM budget, as the result of ``get`` is.
        """
        numbers = self.numbers(index)
        ahead = _Ahead(numbers, self._versions(), functools.partial(self._get, numbers, None))
        with self._lock:
            self._ahead = ahead

    def _versions(self) -> list[int]:
        return [self._access.version(key) for key in self.keys]

    def _get(self, numbers: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        selection = _Selection.of(numbers.numpy())
        spec = Spec(self.dtype, (len(selection.order), *self.row_shape))
        result = result_for(spec, self._shards[0].key, out, torch.device("cpu"))
        host = result if result.device.type == "cpu" else new_tensor(spec, self._shards[0].key)
        target = _bytes_of(host).reshape(len(selection.order), self.row_nbytes)
        for shard, first, last in self._parts(selection):
            sink = _RowRead(target, self, shard, selection, first, last)
            self._access.read(self._settled(shard.key), sink, self.record_nbytes)
        return result if result is host else result.copy_(host)

    def put(self, index: torch.Tensor | Iterable[int], values: torch.Tensor) -> None:
        """Write ``values``, (n, *row_shape), to the rows that ``index`` names; of equal indices the last one wins."""
        self._write(index, values, needs_old=False)

    def add(self, index: torch.Tensor | Iterable[int], values: torch.Tensor) -> None:
        """Add ``values``, (n, *row_shape), to the rows that ``index`` names; equal indices in their order.

        The bits are those of ``Tensor.index_add_(0, index, values)``. No other write comes in between. Raises TypeError
        for a dtype that torch does not add.
        """
        one = torch.zeros(1, dtype=self.dtype, device="cpu")
        try:  # order: outside of the store, which a failure in the middle of a change would end
            one.index_add_(0, torch.zeros(1, dtype=torch.int64, device="cpu"), one.clone())
        except RuntimeError as error:
            raise TypeError(f"rows of {self.keys[0]!r}: torch adds no {self.dtype} ({error})") from error
        self._write(index, values, needs_old=True)

    def _write(self, index: torch.Tensor | Iterable[int], values: torch.Tensor, *, needs_old: bool) -> None:
        numbers = self.numbers(index).numpy()
        plain = plain_value(self._shards[0].key, values)
        if plain.dtype != self.dtype or tuple(plain.shape) != (len(numbers), *self.row_shape):
            raise ValueError(
                f"rows of {self._shards[0].key!r}: expected values of {self.dtype} {[len(numbers), *self.row_shape]},"
                f" got {plain.dtype} {list(plain.shape)}"
            )
        selection, host = _Selection.of(numbers), plain.cpu()
        content = _bytes_of(host).reshape(len(numbers), self.row_nbytes)
        for shard, first, last in self._parts(selection):
            some = _RowWrite(content, self, shard, selection, first, last, needs_old=needs_old)
            self._access.write(self._settled(shard.key), some)

    def _parts(self, selection: _Selection) -> Iterable[tuple[_Shard, int, int]]:
        """Yield the keys that have some of the rows, and which of the selection's these are. KeyError."""
        if not self.row_nbytes or not len(selection.rows):
            self._access.spec(self.keys[0])
            return
        for shard in self._shards:
            first, last = np.searchsorted(selection.rows, (shard.start, shard.start + shard.num_rows)).tolist()
            if first < last:
                yield shard, first, last

    def records(self) -> Rows:
        """Return the same table with the moments beside each row: rows of (3, *row_shape)."""
        return Rows(self.store, self._access, self._settled, self.keys)

    def numbers(self, index: torch.Tensor | Iterable[int]) -> torch.Tensor:
        """Return ``index`` as numbers from 0 on, int64 on the CPU. Raises TypeError, IndexError."""
        tensor = index if isinstance(index, torch.Tensor) else _listed(index, self.keys[0])
        if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool or tensor.dim() != 1:
            way = "; mask.nonzero()[:, 0] is one" if tensor.dtype == torch.bool else ""
            raise TypeError(
                f"rows of {self._shards[0].key!r}: expected an index of whole numbers of one dimension, got"
                f" {tensor.dtype} {list(tensor.shape)}{way}"
            )
        numbers = tensor.detach().cpu().to(torch.int64).numpy()
        if tensor.dtype is torch.uint64 and (numbers < 0).any():  # beyond any table
            numbers = np.where(numbers < 0, np.iinfo(np.int64).max, numbers)
        bad = (numbers < -self._num_rows) | (numbers >= self._num_rows)
        if bad.any():
            first = int(np.argmax(bad))
            raise IndexError(
                f"rows of {self._shards[0].key!r}: index {numbers[first]}, at place {first}, of a table of"
                f" {self._num_rows} rows"
            )
        return torch.from_numpy(np.where(numbers < 0, numbers + self._num_rows, numbers))

    def __repr__(self) -> str:
        keys = self.keys[0] if len(self.keys) == 1 else f"{len(self.keys)} keys"
        return f"<Rows of {keys}: {self._num_rows} of {self.dtype} {list(self.row_shape)}>"


def _listed(index: Iterable[int], key: str) -> torch.Tensor:
    """Return a tensor of ``index``; an empty list makes one of whole numbers. Raises TypeError for what makes none."""
    try:
        found = index if isinstance(index, np.ndarray) else list(index)
        return torch.from_numpy(np.ascontiguousarray(found) if len(found) else np.empty(0, np.int64))
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise TypeError(f"rows of {key!r}: expected an index of whole numbers, got {index!r:.80} ({error})") from error

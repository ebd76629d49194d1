"""Streaming: large records block by block through a window of bounce buffers; and verify, which reads all records.

Nothing becomes resident. A stream keeps the extents it reads as they are until it ends.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from tiered.bytes.arena import Buffer
from tiered.bytes.device.base import IOClass
from tiered.bytes.host_tensor import copy_contiguous
from tiered.errors import CorruptionError
from tiered.store.format.checksum import DIGEST_NBYTES, num_blocks
from tiered.store.format.row import Extent, Row, Spec, num_unread, part_of
from tiered.store.residency.key_table import new_row
from tiered.store.residency.residency import Residency
from tiered.store.residency.swap_in_out import Shortage
from tiered.store.space.extents import block_order
from tiered.store.space.space import Space
from tiered.store.transfers.checked_transfer import SLAB_NBYTES, Transfer
from tiered.store.values.window import OnDone, Window, WindowJob
from tiered.store.waiting.deadline import Deadline
from tiered.units import divide_up

__all__ = [
    "StreamedValues", "VerifyReport", "give_back", "install", "slab_jobs", "slab_transfer", "take_extents",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The counts and the errors that ``Store.verify`` returns.

    ``unread``: of keys that were adopted with ``verify="first touch"``, how many blocks nobody had read before, so that
    there was nothing to compare. They have digests now, which the next commit keeps.
    """

    num_keys: int
    num_blocks: int
    nbytes: int
    errors: tuple[CorruptionError, ...]
    unread: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_clean(self) -> bool:
        return not self.errors


class StreamedValues:
    """Reads and writes records block by block, with at most an eighth of the budget in flight (but one buffer)."""

    def __init__(self, working_set: Residency) -> None:
        self._working_set = working_set
        self._space = working_set.space
        self._condition = working_set.condition

    def put(self, key: str, flat: torch.Tensor | None, spec: Spec, *, scratch: bool) -> None:
        """Write ``flat``, (nbytes,) uint8 on any compute device, or zeros, as the new tensor of ``key``; blocks.

        The old tensor stays readable until all of the new one has landed.
        """
        working_set = self._working_set
        deadline = Deadline(f"put of {key!r}", working_set.deadline_s)
        extents, generation, key_id = take_extents(working_set, [key], spec.nbytes, deadline, scratch=scratch)
        row = new_row(key_id, key, spec, generation, extents)
        digests = bytearray(row.num_blocks * DIGEST_NBYTES)

        def write(slab: int, buffer: Buffer, on_done: OnDone) -> Iterator[Transfer]:
            if flat is None:
                ctypes.memset(buffer.address, 0, min(SLAB_NBYTES, spec.nbytes - slab * SLAB_NBYTES))
            else:
                copy_contiguous(buffer, flat[slab * SLAB_NBYTES : (slab + 1) * SLAB_NBYTES], to_buffer=True)
            transfer = slab_transfer(self._space, row, slab, buffer, IOClass.WRITE, on_done)
            yield transfer
            transfer.raise_error()
            first = slab * (SLAB_NBYTES // row.block_nbytes) * DIGEST_NBYTES
            digests[first : first + len(transfer.digests)] = transfer.digests

        rows = deque([row])
        with Window(working_set) as window:
            window.at_end = functools.partial(give_back, rows, self._space)
            window.run(slab_jobs(row, write, _order(row, self._space)))
            rows[0] = dataclasses.replace(row, digests=bytes(digests))
            install(working_set, rows, 1, scratch=scratch)

    def get(self, row: Row, flat: torch.Tensor) -> None:
        """Read ``row`` into ``flat``, (nbytes,) uint8 on any compute device; blocks.

        The caller has begun a stream on its extents; this ends it. Raises CorruptionError, DeviceError.
        """

        def read(slab: int, buffer: Buffer, on_done: OnDone) -> Iterator[Transfer]:
            transfer = slab_transfer(self._space, row, slab, buffer, IOClass.DEMAND, on_done)
            yield transfer
            transfer.raise_error()
            copy_contiguous(buffer, flat[slab * SLAB_NBYTES : (slab + 1) * SLAB_NBYTES], to_buffer=False)

        with Window(self._working_set) as window:
            window.at_end = lambda _: self._space.end_stream(row)
            window.run(slab_jobs(row, read, _order(row, self._space)))
        with self._condition:
            self._working_set.streamed_in_bytes += row.nbytes

    def verify(self, only: Sequence[str] | None = None) -> VerifyReport:
        """Read every block that is on the devices, committed or newer, of every key or of ``only``; blocks.

        A sector that cannot be read is damage as wrong bytes are. Raises DeviceError where a drive does not answer.
        """
        errors: list[CorruptionError] = []
        counts = [0, 0, 0]  # keys, blocks, bytes
        unread: dict[str, int] = {}
        reading: deque[Row] = deque()  # whose blocks are being read, oldest first

        def check(row: Row, slab: int, buffer: Buffer, on_done: OnDone) -> Iterator[Transfer]:
            transfer = slab_transfer(self._space, row, slab, buffer, IOClass.PREFETCH, on_done)
            yield transfer
            transfer.check()
            unreadable = transfer.unreadable()
            if unreadable is not None:
                errors.append(unreadable)
            else:
                nbytes = min(SLAB_NBYTES, row.nbytes - slab * SLAB_NBYTES)
                counts[1] += divide_up(nbytes, row.block_nbytes)
                counts[2] += nbytes
            if isinstance(transfer.error, CorruptionError):
                errors.append(transfer.error)
            elif transfer.error is not None and unreadable is None:
                raise transfer.error
            if slab == num_blocks(row.nbytes, SLAB_NBYTES) - 1:
                with self._condition:
                    self._space.end_stream(reading.popleft())

        def jobs() -> Iterator[WindowJob]:
            for name in names:
                with self._condition:
                    working_set = self._working_set
                    entry = working_set.peek(name)
                    rows = [] if entry is None else [entry.row]
                    if entry is not None and entry.committed is not entry.row and not working_set.is_replaced(entry):
                        rows.append(entry.committed)
                    found = [row for row in rows if row is not None and row.inline is None]
                    for row in found:
                        self._space.begin_stream(row)
                        reading.append(row)
                        if num := num_unread(row):
                            unread[name] = num
                counts[0] += entry is not None
                for row in found:
                    yield from slab_jobs(row, functools.partial(check, row))

        def end_streams(window: Window) -> None:
            for row in reading:
                self._space.end_stream(row)

        with self._condition:
            names = self._working_set.names() if only is None else only
        with self._working_set.mark, Window(self._working_set) as window:
            window.at_end = end_streams
            window.run(jobs())
        return VerifyReport(counts[0], counts[1], counts[2], tuple(errors), unread)


# -- slabs -------------------------------------------------------------------------------------------------------------


def slab_jobs(
    row: Row, move: Callable[[int, Buffer, OnDone], Iterator[Transfer]], slabs: Iterable[int] | None = None
) -> Iterator[WindowJob]:
    """Yield a job for each of ``slabs`` of ``row`` (default: all, in order); its movements are ``move(slab, ...)``."""
    nbytes = min(row.nbytes, SLAB_NBYTES)
    for slab in range(num_blocks(row.nbytes, SLAB_NBYTES)) if slabs is None else slabs:
        yield WindowJob(nbytes, f"transfer of slab {slab} of {row.name!r}", functools.partial(move, slab))


def slab_transfer(space: Space, row: Row, slab: int, buffer: Buffer, io_class: IOClass, on_done: OnDone) -> Transfer:
    """Return the transfer of one slab of ``row`` through ``buffer``; a read is checked by ``raise_error``."""
    return space.transfer(row, buffer.memory, io_class, on_done, first_slab=slab, is_checked_by_owner=True)


def _order(row: Row, space: Space) -> Iterable[int]:
    """Return the slabs of ``row`` in an order that keeps every device busy; blocks where it has pages."""
    extents: Iterable[Extent] = row.extents
    if row.ranges or (row.pages is not None and len(space.devices) == 1):
        return range(num_blocks(row.nbytes, SLAB_NBYTES))
    if row.pages is not None:
        extents = part_of(row, 0, row.num_blocks).extents
    return block_order([(extent.device, extent.nbytes) for extent in extents])


# -- rows past the working set -----------------------------------------------------------------------------------------


def take_extents(
    working_set: Residency, keys: Iterable[str], nbytes: int, deadline: Deadline, *, scratch: bool
) -> tuple[tuple[Extent, ...], int, int]:
    """Return fresh extents, the generation to write for, and the first of new ids, one for each of ``keys``; blocks.

    Waits until each of ``keys`` may be put. Raises LeaseError, CapacityError.
    """
    names = list(keys)
    while True:
        working_set.await_seal()
        with working_set.condition:
            olds = (working_set.idle_entry(name, "put") for name in names)
            if not all(old is None or working_set.may_write(old) for old in olds):
                deadline.wait(working_set.condition, working_set.commit_progress())
                continue
            extents = working_set.space.take_nowait(nbytes, scratch=scratch)
            if extents is not None:
                return extents, working_set.open_generation, working_set.new_key_ids(len(names))
        working_set.grow(Shortage(working_set.space.round_up(nbytes), scratch))


def install(working_set: Residency, rows: deque[Row], number: int, *, scratch: bool) -> None:
    """Make the first ``number`` of ``rows``, whose bytes have landed, the tensors of their names; blocks.

    A row leaves ``rows`` with its installation. Raises LeaseError for a lease that was opened meanwhile.
    """
    last = len(rows) - number
    while len(rows) > last:
        working_set.await_seal()
        with working_set.condition:
            while len(rows) > last:
                old = working_set.idle_entry(rows[0].name, "put")
                if working_set.must_await_seal:  # a commit without these was asked for meanwhile
                    break
                row = rows.popleft()
                entry = working_set.replace_entry(old, row.name, Spec.of(row), scratch=scratch, key_id=row.key_id)
                working_set.streamed(entry, row)
                working_set.streamed_out_bytes += row.nbytes


def give_back(rows: Iterable[Row], space: Space, window: Window) -> None:
    """Give the extents of ``rows``, which are not installed, back at the end of the window that wrote to them."""
    for row in rows:
        (space.quarantine if window.has_failed else space.give_back)(row.extents)

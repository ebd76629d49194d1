"""Streaming: large records block by block through a window of bounce buffers; and verify, which reads all records.

Nothing becomes resident. A stream keeps the extents it reads as they are until it ends.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from tiered.bytes.arena import Buffer
from tiered.bytes.device.base import IOClass
from tiered.bytes.host_tensor import copy_contiguous
from tiered.bytes.interrupt import uninterrupted
from tiered.errors import CorruptionError
from tiered.store.format.checksum import DIGEST_NBYTES, num_blocks
from tiered.store.format.row import Extent, Row, Spec, part_of
from tiered.store.residency.working_set import WorkingSet
from tiered.store.residency.write_back import Shortage
from tiered.store.space.dealing import block_order
from tiered.store.space.space import Space
from tiered.store.transfers.transfer import SLAB_NBYTES, Transfer
from tiered.store.values.window import Window
from tiered.store.waiting.deadline import Deadline
from tiered.units import divide_up

__all__ = ["SlabJob", "StreamedValues", "VerifyReport"]


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The counts and the errors that ``Store.verify`` returns."""

    num_keys: int
    num_blocks: int
    nbytes: int
    errors: tuple[CorruptionError, ...]

    @property
    def is_clean(self) -> bool:
        return not self.errors


class StreamedValues:
    """Reads and writes records block by block, with at most an eighth of the budget in flight (but one buffer)."""

    def __init__(self, working_set: WorkingSet) -> None:
        self._working_set = working_set
        self._records = working_set.records
        self._space = working_set.space
        self._condition = working_set.condition

    def must_stream(self, nbytes: int) -> bool:
        """Whether put and get of so many bytes go through bounce buffers: more than a quarter of the budget."""
        return nbytes > self._working_set.budget_bytes // 4

    def put(self, key: str, flat: torch.Tensor, spec: Spec, *, scratch: bool) -> None:
        """Write ``flat``, (nbytes,) uint8 on any compute device, as the new tensor of ``key``; blocks.

        The old tensor stays readable until all of the new one has landed.
        """
        row = self.new_row(key, spec, scratch=scratch)
        digests = bytearray(row.num_blocks * DIGEST_NBYTES)

        def fill(slab: int, buffer: Buffer) -> None:
            copy_contiguous(buffer, flat[slab * SLAB_NBYTES : (slab + 1) * SLAB_NBYTES], to_buffer=True)

        def collect(job: SlabJob, transfer: Transfer, buffer: Buffer) -> None:
            if transfer.error is not None:
                raise transfer.error
            first = job.slab * (SLAB_NBYTES // row.block_nbytes) * DIGEST_NBYTES
            digests[first : first + len(transfer.digests)] = transfer.digests

        working_set, window = self._working_set, Window(self._working_set)
        is_own = True  # the extents are this put's to give back
        try:
            blocks = _order(row, self._space)
            window.run(SlabJob(self._space, row, slab, IOClass.WRITE, fill=fill, use=collect) for slab in blocks)
            while is_own:
                working_set.deferred_seal.settle()
                with self._condition:
                    old = working_set.keys.settled(key, "put")  # raises for a lease that was opened meanwhile
                    if working_set.deferred_seal.is_closed:
                        continue
                    is_own = False
                    entry = working_set.keys.replace(old, key, spec, scratch=scratch, key_id=row.key_id)
                    self._records.streamed(entry, dataclasses.replace(row, digests=bytes(digests)))
                    working_set.streamed_out_bytes += row.nbytes
        except BaseException:
            if is_own:
                space = self._space
                window.when_idle(lambda: (space.quarantine if window.has_failed else space.give_back)(row.extents))
            raise

    def new_row(self, key: str, spec: Spec, *, scratch: bool) -> Row:
        """Return the row of a tensor to be written to extents, and under a key id, of its own."""
        deadline = Deadline(f"put of {key!r}", self._working_set.deadline_s)
        while True:
            with self._condition:
                old = self._working_set.keys.settled(key, "put")
                if old is not None and not self._records.may_write(old):
                    deadline.wait(self._condition, self._records.commit_progress())
                    continue
                extents = self._space.take_nowait(spec.nbytes, scratch=scratch)
                if extents is not None:
                    return self._records.new_row(key, spec, extents)
            self._working_set.room.grow(Shortage(self._space.round_up(spec.nbytes), scratch))

    def get(self, row: Row, flat: torch.Tensor) -> None:
        """Read ``row`` into ``flat``, (nbytes,) uint8 on any compute device; blocks.

        The caller has begun a stream on its extents; this ends it. Raises CorruptionError, DeviceError.
        """

        def copy(job: SlabJob, transfer: Transfer, buffer: Buffer) -> None:
            if transfer.error is not None:
                raise transfer.error
            copy_contiguous(buffer, flat[job.slab * SLAB_NBYTES : (job.slab + 1) * SLAB_NBYTES], to_buffer=False)

        window = Window(self._working_set)
        try:
            blocks = _order(row, self._space)
            window.run(SlabJob(self._space, row, slab, IOClass.DEMAND, use=copy) for slab in blocks)
        finally:
            window.when_idle(lambda: self._space.end_stream(row))
        with self._condition:
            self._working_set.streamed_in_bytes += row.nbytes

    @uninterrupted
    def verify(self, only: Sequence[str] | None = None) -> VerifyReport:
        """Read every block that is on the devices, committed or newer, of every key or of ``only``; blocks.

        A sector that cannot be read is damage as wrong bytes are. Raises DeviceError where a drive does not answer.
        """
        errors: list[CorruptionError] = []
        counts = [0, 0, 0]  # keys, blocks, bytes
        reading: deque[Row] = deque()  # whose blocks are being read, oldest first

        def check(job: SlabJob, transfer: Transfer, buffer: Buffer) -> None:
            row, slab = job.row, job.slab
            unreadable = transfer.unreadable()
            if unreadable is not None:
                errors.append(unreadable)
            else:
                counts[1] += divide_up(min(SLAB_NBYTES, row.nbytes - slab * SLAB_NBYTES), row.block_nbytes)
                counts[2] += min(SLAB_NBYTES, row.nbytes - slab * SLAB_NBYTES)
            if isinstance(transfer.error, CorruptionError):
                errors.append(transfer.error)
            elif transfer.error is not None and unreadable is None:
                raise transfer.error
            if slab == num_blocks(row.nbytes, SLAB_NBYTES) - 1:
                with self._condition:
                    self._space.end_stream(reading.popleft())

        def jobs() -> Iterator[SlabJob]:
            for name in names:
                with self._condition:
                    entry = self._records.peek(name)
                    rows = [] if entry is None else [entry.row]
                    if entry is not None and entry.committed is not entry.row and not self._records.is_replaced(entry):
                        rows.append(entry.committed)
                    found = [row for row in rows if row is not None and row.inline is None]
                    for row in found:
                        self._space.begin_stream(row)
                        reading.append(row)
                counts[0] += entry is not None
                for row in found:
                    for slab in range(num_blocks(row.nbytes, SLAB_NBYTES)):
                        yield SlabJob(self._space, row, slab, IOClass.PREFETCH, use=check)

        with self._condition:
            names = self._records.names() if only is None else only
        window = Window(self._working_set)
        with self._working_set.mark:
            try:
                window.run(jobs())
            finally:
                window.when_idle(lambda: self._end_streams(reading))
        return VerifyReport(counts[0], counts[1], counts[2], tuple(errors))

    def _end_streams(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self._space.end_stream(row)


class SlabJob:
    """The job of moving one slab of a record through a buffer."""

    __slots__ = ("_fill", "_io_class", "_space", "_use", "nbytes", "row", "slab")

    def __init__(
        self,
        space: Space,
        row: Row,
        slab: int,
        io_class: IOClass,
        *,
        fill: Callable[[int, Buffer], object] | None = None,
        use: Callable[[SlabJob, Transfer, Buffer], object],
    ) -> None:
        """``fill(slab, buffer)`` comes before a write, ``use(job, transfer, buffer)`` after every movement."""
        self.nbytes = min(row.nbytes, SLAB_NBYTES)
        self.row = row
        self.slab = slab
        self._space = space
        self._io_class = io_class
        self._fill = fill
        self._use = use

    def begin(self, buffer: Buffer, on_done: Callable[[Transfer], None]) -> Transfer:
        if self._fill is not None:
            self._fill(self.slab, buffer)
        return self._space.transfer(
            self.row, buffer.memory, self._io_class, on_done, first_slab=self.slab, is_checked_by_owner=True
        )

    def finish(self, transfer: Transfer, buffer: Buffer) -> None:
        transfer.check()
        self._use(self, transfer, buffer)

    def __str__(self) -> str:
        return f"transfer of slab {self.slab} of {self.row.name!r}"


def _order(row: Row, space: Space) -> list[int]:
    """Return the slabs of ``row`` in an order that keeps every device busy; blocks where it has pages."""
    extents: Iterable[Extent] = row.extents
    if row.ranges or (row.pages is not None and len(space.devices) == 1):
        return list(range(num_blocks(row.nbytes, SLAB_NBYTES)))
    if row.pages is not None:
        extents = part_of(row, 0, row.num_blocks).extents
    return block_order([(extent.device, extent.nbytes) for extent in extents])

"""Streaming: blocks of records moved through a few bounce buffers, for tensors larger than the budget and for verify.

Nothing becomes resident. A stream keeps the extents it reads as they are until it ends.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from tiered.bytes.arena import Buffer
from tiered.bytes.device.base import IOClass
from tiered.errors import CorruptionError
from tiered.store.checksum import BLOCK_NBYTES, num_blocks
from tiered.store.deadline import Deadline
from tiered.store.entry import Spec
from tiered.store.row import Row
from tiered.store.transfer import Transfer
from tiered.store.working_set import WorkingSet
from tiered.store.write_back import Shortage

__all__ = ["Streams", "VerifyReport"]

_MAX_WINDOW = 8  # buffers of 4 MiB: the queue depth at which direct I/O reaches its bandwidth (design.md, section 10)

Job = tuple[Row, int]  # and the number of the block


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What ``Store.verify`` read and what it found."""

    num_keys: int
    num_blocks: int
    nbytes: int
    errors: tuple[CorruptionError, ...]

    @property
    def is_clean(self) -> bool:
        return not self.errors


class Streams:
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
        row = self._new_row(key, spec, scratch=scratch)
        digests = bytearray()

        def fill(job: Job, buffer: Buffer) -> None:
            part = flat[job[1] * BLOCK_NBYTES : (job[1] + 1) * BLOCK_NBYTES]
            buffer.alias(part.numel(), _ignore).copy_(part)

        def collect(job: Job, transfer: Transfer) -> None:
            if transfer.error is not None:
                raise transfer.error
            digests.extend(transfer.digests)

        stream = _Stream(self._working_set, IOClass.WRITE, fill, collect)
        try:
            stream.run((row, block) for block in range(num_blocks(row.nbytes)))
        except BaseException:
            is_damaged = stream.has_failed
            stream.when_idle(lambda: (self._space.quarantine if is_damaged else self._space.give_back)(row.extents))
            raise
        with self._condition:
            working_set = self._working_set
            entry = working_set.replace(working_set.settled(key, "put"), key, spec, scratch=scratch, key_id=row.key_id)
            self._records.streamed(entry, dataclasses.replace(row, digests=bytes(digests)))
            working_set.streamed_out_bytes += row.nbytes

    def _new_row(self, key: str, spec: Spec, *, scratch: bool) -> Row:
        """Return the row of a tensor to be written to extents, and under a key id, of its own."""
        deadline = Deadline(f"put of {key!r}", self._working_set.deadline_s)
        while True:
            with self._condition:
                old = self._working_set.settled(key, "put")
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

        def copy(job: Job, transfer: Transfer) -> None:
            if transfer.error is not None:
                raise transfer.error
            part = flat[job[1] * BLOCK_NBYTES : (job[1] + 1) * BLOCK_NBYTES]
            part.copy_(stream.buffer_of(transfer).alias(part.numel(), _ignore))

        stream = _Stream(self._working_set, IOClass.DEMAND, _nothing, copy)
        try:
            stream.run((row, block) for block in range(num_blocks(row.nbytes)))
        finally:
            stream.when_idle(lambda: self._space.end_stream(row.extents))
        with self._condition:
            self._working_set.streamed_in_bytes += row.nbytes

    def verify(self) -> VerifyReport:
        """Read every block of every key that is on the devices, committed or newer, and check its digest; blocks."""
        errors: list[CorruptionError] = []
        counts = [0, 0, 0]  # keys, blocks, bytes
        reading: deque[Row] = deque()  # whose blocks are being read, oldest first

        def check(job: Job, transfer: Transfer) -> None:
            row, block = job
            if isinstance(transfer.error, CorruptionError):
                errors.append(transfer.error)
            elif transfer.error is not None:
                raise transfer.error
            counts[1] += 1
            counts[2] += min(BLOCK_NBYTES, row.nbytes - block * BLOCK_NBYTES)
            if block == num_blocks(row.nbytes) - 1:
                with self._condition:
                    self._space.end_stream(reading.popleft().extents)

        def jobs() -> Iterator[Job]:
            for name in names:
                with self._condition:
                    entry = self._records.find(name)
                    rows = [] if entry is None else [entry.row] + [entry.committed] * (entry.committed is not entry.row)
                    found = [row for row in rows if row is not None and row.inline is None]
                    for row in found:
                        self._space.begin_stream(row.extents)
                        reading.append(row)
                counts[0] += entry is not None
                for row in found:
                    yield from zip(itertools.repeat(row), range(num_blocks(row.nbytes)))

        with self._condition:
            names = [entry.name for entry in self._records.visible()]
        stream = _Stream(self._working_set, IOClass.PREFETCH, _nothing, check)
        try:
            stream.run(jobs())
        finally:
            stream.when_idle(lambda: self._end_streams(reading))
        return VerifyReport(counts[0], counts[1], counts[2], tuple(errors))

    def _end_streams(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self._space.end_stream(row.extents)


class _Stream:
    """A window of transfers in flight, finished in order. The caller's thread does all the work but the I/O."""

    def __init__(
        self,
        working_set: WorkingSet,
        io_class: IOClass,
        prepare: Callable[[Job, Buffer], None],
        finish: Callable[[Job, Transfer], None],
    ) -> None:
        self.has_failed = False  # a transfer has
        self._working_set = working_set
        self._io_class = io_class
        self._prepare = prepare
        self._finish = finish
        self._jobs: deque[tuple[Job, Transfer]] = deque()  # in flight, oldest first
        self._buffers: dict[Transfer, Buffer] = {}
        self._num_done = 0
        self._is_abandoned = False
        self._on_idle: Callable[[], object] | None = None

    def run(self, jobs: Iterable[Job]) -> None:
        """Carry out ``jobs``; the first exception of ``prepare`` or ``finish`` ends it."""
        idle: list[Buffer] = []
        try:
            for job in jobs:
                buffer = self._next_buffer(idle, min(job[0].nbytes, BLOCK_NBYTES))
                idle.append(buffer)
                self._prepare(job, buffer)
                space = self._working_set.space
                transfer = space.transfer(job[0], buffer, self._io_class, self._done, first_block=job[1])
                self._buffers[transfer] = idle.pop()
                self._jobs.append((job, transfer))
                transfer.start()
            while self._jobs:
                idle.append(self._finish_oldest())
        finally:
            for buffer in idle:
                self._working_set.unreserve(buffer)
            self._abandon()

    def buffer_of(self, transfer: Transfer) -> Buffer:
        """Return the buffer of a transfer that ``finish`` is called with."""
        return self._buffers[transfer]

    def when_idle(self, action: Callable[[], object]) -> None:
        """Call ``action`` under the store's lock as soon as nothing of this stream is in flight."""
        with self._working_set.condition:
            if self._buffers:
                self._on_idle = action
            else:
                action()

    def _next_buffer(self, idle: list[Buffer], nbytes: int) -> Buffer:
        """Return a buffer of at least ``nbytes``; waits for the oldest transfer when the window is full."""
        room = self._working_set.room
        while True:
            while idle:
                buffer = idle.pop()
                if buffer.nbytes >= nbytes:
                    return buffer
                room.unreserve(buffer)
            if not self._jobs:
                return room.reserve(nbytes)
            in_flight = sum(buffer.nbytes for buffer in self._buffers.values())
            if len(self._jobs) < _MAX_WINDOW and in_flight + nbytes <= room.budget_bytes // 8:
                extra = room.reserve_nowait(nbytes)
                if extra is not None:
                    return extra
            idle.append(self._finish_oldest())

    def _finish_oldest(self) -> Buffer:
        job, transfer = self._jobs[0]
        deadline = Deadline(f"transfer of block {job[1]} of {job[0].name!r}", self._working_set.deadline_s)
        with self._working_set.condition:
            while not transfer.is_done:
                deadline.wait(self._working_set.condition, self._num_done)
        self._jobs.popleft()
        self._finish(job, transfer)
        with self._working_set.condition:
            return self._buffers.pop(transfer)

    def _done(self, transfer: Transfer) -> None:
        with self._working_set.condition:
            transfer.is_done = True
            self._num_done += 1
            self.has_failed = self.has_failed or transfer.error is not None
            if self._is_abandoned:
                self._give_back(transfer)
            self._working_set.condition.notify_all()

    def _abandon(self) -> None:
        """Give the buffers back: now where the transfer is done, else when its completion arrives."""
        with self._working_set.condition:
            self._is_abandoned = True
            for transfer in [transfer for transfer in self._buffers if transfer.is_done]:
                self._give_back(transfer)

    def _give_back(self, transfer: Transfer) -> None:
        self._working_set.room.drop(self._buffers.pop(transfer))
        if not self._buffers and self._on_idle is not None:
            action, self._on_idle = self._on_idle, None
            action()


def _nothing(job: Job, buffer: Buffer) -> None:
    """What reading prepares."""


def _ignore() -> None:
    """What happens at the end of an alias that lives for one copy."""

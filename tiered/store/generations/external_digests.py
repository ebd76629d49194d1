"""External digests: what makes a record in the user's own file the one that it was: read for the first commit of it.

A record that was read as a whole before, by a forward as a rule, has its digests already.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace

from tiered.bytes.arena import Buffer
from tiered.bytes.device.base import IOClass
from tiered.errors import DeadlineError
from tiered.store.format.row import Row
from tiered.store.records.entry import Entry
from tiered.store.residency.working_set import WorkingSet
from tiered.store.transfers.transfer import SLAB_NBYTES, Transfer
from tiered.units import divide_up, format_bytes

__all__ = ["ExternalDigests"]

_MOST_SLABS = 8  # in flight: 32 MiB keep a drive busy
_EVERY_S = 10.0  # a line in the log

_log = logging.getLogger("tiered")


class ExternalDigests:
    """Digests of external records, and the memory to read them through.

    That memory is part of the budget, and taken by whoever asks for the commit: its own thread must not wait for any.
    """

    def __init__(self, working_set: WorkingSet) -> None:
        self._working_set = working_set
        self._buffer: Buffer | None = None
        self._slab_nbytes = SLAB_NBYTES  # of memory for a slab: less, where all records are smaller

    def reserve(self) -> None:
        """Take the memory that the next commit needs, if it needs some; may block. Raises CapacityError."""
        if self._working_set.space.external is None or self._buffer is not None:
            return
        with self._working_set.condition:
            rows = [entry.row for entry in self._working_set.records.changed if _is_missing(entry.row)]
        if rows:
            largest = max(row.nbytes for row in rows if row is not None)
            self._slab_nbytes = min(SLAB_NBYTES, self._working_set.space.round_up(largest))
            most = self._working_set.budget_bytes // 8 // self._slab_nbytes
            self._buffer = self._working_set.room.reserve(self._slab_nbytes * max(1, min(_MOST_SLABS, most)))

    def compute(self, rows: Iterable[tuple[Entry, Row]]) -> dict[Entry, Row]:
        """Return those of ``rows`` that lack digests, with them; blocks. Raises CorruptionError, DeviceError.

        Gives the memory back.
        """
        try:
            missing = [(entry, row) for entry, row in rows if _is_missing(row)]
            return self._compute(missing) if missing else {}
        finally:
            buffer, self._buffer = self._buffer, None
            if buffer is not None:
                self._working_set.unreserve(buffer)

    def _compute(self, missing: list[tuple[Entry, Row]]) -> dict[Entry, Row]:
        assert self._buffer is not None, missing
        memory, done, size = self._buffer.memory, queue.SimpleQueue[Transfer](), self._slab_nbytes
        free = [memory[start : start + size] for start in range(0, len(memory) - size + 1, size)]
        found: dict[Row, dict[int, bytes]] = {row: {} for _, row in missing}
        total, nbytes, said_s, in_flight = sum(row.nbytes for _, row in missing), 0, time.monotonic(), 0
        jobs = _jobs(row for _, row in missing)
        error: Exception | None = None
        while True:
            job = next(jobs, None) if free and error is None else None
            if job is not None:
                row, slab = job
                in_flight += 1
                self._working_set.space.transfer(row, free.pop(), IOClass.PREFETCH, done.put, first_slab=slab).start()
                continue
            if not in_flight:
                break
            transfer = self._next(done)
            in_flight -= 1
            free.append(transfer.memory)
            error = error or transfer.error
            found[transfer.row][transfer.first_slab] = bytes(transfer.digests)
            nbytes += min(SLAB_NBYTES, transfer.row.nbytes - transfer.first_slab * SLAB_NBYTES)
            if time.monotonic() - said_s > _EVERY_S:
                said_s = time.monotonic()
                _log.info("digests of external files: %s of %s read", format_bytes(nbytes), format_bytes(total))
        if error is not None:
            raise error
        digests = {row: b"".join(parts[slab] for slab in sorted(parts)) for row, parts in found.items()}
        return {entry: replace(row, digests=digests[row]) for entry, row in missing}

    def _next(self, done: queue.SimpleQueue[Transfer]) -> Transfer:
        try:
            return done.get(timeout=self._working_set.deadline_s)
        except queue.Empty:
            raise DeadlineError(
                f"a read of an external file has not ended in {self._working_set.deadline_s:g} s: check its drive"
            ) from None


def _is_missing(row: Row | None) -> bool:
    return row is not None and bool(row.ranges) and not row.digests


def _jobs(rows: Iterable[Row]) -> Iterator[tuple[Row, int]]:
    return ((row, slab) for row in rows for slab in range(divide_up(row.nbytes, SLAB_NBYTES)))

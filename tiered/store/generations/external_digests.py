"""External digests: what makes a record in the user's own file the one that it was: read for the first commit of it.

A record that was read as a whole before, by a forward as a rule, has its digests already. All others are read by the
caller of the commit, before anything is sealed: it may take long, and what keeps it from its end costs no generation.
Whether a file was changed is asked behind all reads, those of leases too.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping

from tiered.bytes.arena import Buffer
from tiered.bytes.device.base import IOClass
from tiered.errors import UsageError
from tiered.store.format.row import Row
from tiered.store.lifetime.external import ExternalSources
from tiered.store.records.entry import Entry
from tiered.store.records.records import learned
from tiered.store.residency.working_set import WorkingSet
from tiered.store.transfers.transfer import SLAB_NBYTES, Transfer
from tiered.store.values.streaming import SlabJob
from tiered.store.values.window import Window
from tiered.units import divide_up, format_bytes

__all__ = ["are_known", "find_digests"]

_EVERY_S = 10.0  # a line in the log

_log = logging.getLogger("tiered")


def are_known(working_set: WorkingSet, known: Mapping[Entry, Row]) -> bool:
    """Whether ``known`` has all changed rows in external files, also those copied since, as now; under the lock."""
    changed = _changed(working_set)
    return all(known.get(entry) is row for entry, row in changed.items())


def _changed(working_set: WorkingSet) -> dict[Entry, Row]:
    rows = ((entry, entry.row) for entry in working_set.records.changed)
    return working_set.records.copied | {entry: row for entry, row in rows if row is not None and row.ranges}


def find_digests(working_set: WorkingSet, external: ExternalSources) -> dict[Entry, Row]:
    """Read what changed since the last commit and lacks digests; blocks. CorruptionError, DeviceError, CapacityError.

    Returns the changed rows in external files, with the digests of the files as they were opened, and those of keys
    that have bytes of their own by now. Raises UsageError where a file was changed since then: what was read of it,
    here, by a lease or by the write of a part, may be another's bytes; and where a record, an old one too, lies in a
    file that has lost its name: the next open would not find it.
    """
    if external.device is None:
        return {}
    _refuse_lost(working_set, external.lost())
    while True:
        with working_set.condition:
            found = _changed(working_set)
            missing = {entry: row for entry, row in found.items() if not row.digests and entry.row is row}
        what = external.changed() if found else None  # order: after the last read of what is returned
        if what is not None:
            raise UsageError(f"an external file was changed while the store was open: {what}; open the store again")
        if not missing:
            return found
        progress = _Progress(sum(row.nbytes for row in missing.values()))
        for entry, row in missing.items():
            _read(working_set, entry, row, progress)


def _refuse_lost(working_set: WorkingSet, lost: Mapping[int, str]) -> None:
    """Raise UsageError for a record in one of the ``lost`` files."""
    with working_set.condition:
        entries = working_set.records.entries
        for entry in map(entries.peek, entries) if lost else ():
            row = None if entry is None else entry.row
            what = (
                next((lost[each.file] for each in row.ranges if each.file in lost), None) if row is not None else None
            )
            if row is not None and what is not None:
                raise UsageError(
                    f"{row.name!r} lies in an external file that has lost its name, and the store could not be opened"
                    f" again: {what}. Move that file back and commit again; or copy its bytes to a file, close() the"
                    " store with commit=False, and open it with that file in external=[...]"
                )


def _read(working_set: WorkingSet, entry: Entry, row: Row, progress: _Progress) -> None:
    digests: list[bytes] = []

    def note(job: SlabJob, transfer: Transfer, buffer: Buffer) -> None:
        if transfer.error is not None:
            raise transfer.error
        digests.append(bytes(transfer.digests))  # in order, as the window finishes its jobs
        progress.note(min(SLAB_NBYTES, row.nbytes - job.slab * SLAB_NBYTES))

    def jobs() -> Iterator[SlabJob]:
        for slab in range(divide_up(row.nbytes, SLAB_NBYTES)):
            yield SlabJob(working_set.space, row, slab, IOClass.PREFETCH, use=note)

    Window(working_set).run(jobs())
    with working_set.condition:
        learned(entry, row, b"".join(digests))


class _Progress:
    """A line in the log now and then."""

    def __init__(self, nbytes: int) -> None:
        self._left, self._nbytes, self._said_s = nbytes, nbytes, time.monotonic()

    def note(self, nbytes: int) -> None:
        self._left -= nbytes
        if time.monotonic() - self._said_s > _EVERY_S:
            self._said_s = time.monotonic()
            read = format_bytes(self._nbytes - self._left)
            _log.info("digests of external files: %s of %s read", read, format_bytes(self._nbytes))

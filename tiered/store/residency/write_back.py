"""Write-back: which dirty entries are written when, and the meaning of a finished write.

``plan`` decides under the store's lock and returns transfers; the caller starts them without it.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Iterable

from tiered.bytes.device.base import IOClass
from tiered.store.records.entry import Entry, EntryState
from tiered.store.records.records import Extents, Records
from tiered.store.residency.residents import Residents
from tiered.store.space.space import Space
from tiered.store.transfers.transfer import Transfer
from tiered.store.waiting.recorder import Recorder

__all__ = ["Shortage", "WriteBack"]


@dataclasses.dataclass(frozen=True, slots=True)
class Shortage:
    """Device bytes that planned writes lack: the files must grow first."""

    nbytes: int
    scratch: bool


class WriteBack:
    """Writes dirty entries, at most one write in flight for each.

    A failed write leaves the tensor resident and dirty; its extents are never used again, and ``error`` has the reason
    until a caller raises it.
    """

    def __init__(
        self,
        condition: threading.Condition,
        residents: Residents,
        records: Records,
        space: Space,
        recorder: Recorder,
    ) -> None:
        self.writing_bytes = 0
        self.num_writing = 0
        self.num_landed = 0  # or failed; a sign of progress
        self.swap_out_bytes = 0
        self.num_swap_outs = 0
        self.error: Exception | None = None
        self.sealed_error: Exception | None = None  # of a write that belongs to the running commit
        self._condition = condition
        self._residents = residents
        self._records = records
        self._space = space
        self._recorder = recorder

    def plan(self, entries: Iterable[Entry], nbytes: int) -> tuple[list[Transfer], Shortage | None]:
        """Choose among ``entries`` until ``nbytes`` are on their way out.

        Returns the transfers to start, and the device space missing for more. Entries that would need a third set
        of extents are passed over. Inline ones need no I/O: they are clean at once. One that comes twice counts once.
        """
        chosen: dict[Entry, Extents] = {}
        shortage: Shortage | None = None
        for entry in entries:
            if nbytes <= 0:
                break
            if entry in chosen or not self._is_ready(entry):
                continue
            extents = () if entry.is_inline else self._records.take_target(entry)
            if extents is None:
                shortage = Shortage(self._space.round_up(max(nbytes, entry.nbytes)), entry.scratch)
                break
            nbytes -= entry.nbytes
            chosen[entry] = extents
        # Order: ``entries`` may be one of the queues, which change from here on.
        transfers: list[Transfer] = []
        for entry, extents in chosen.items():
            if entry.is_inline:
                self.land_inline(entry)
            else:
                transfers.append(self._depart(entry, extents))
        return transfers, shortage

    def _is_ready(self, entry: Entry) -> bool:
        residence = entry.residence
        if entry.is_pending and self.sealed_error is not None:
            return False  # its target is lost, and the commit with it
        return (
            entry.state is EntryState.DIRTY
            and residence is not None
            and not residence.writers
            and self._records.may_write(entry)
        )

    def land_inline(self, entry: Entry) -> None:
        """Make the row of a dirty inline entry, which is clean then; no I/O."""
        assert entry.residence is not None
        self._residents.withdraw(entry)
        content = bytes(entry.residence.buffer.memory[: entry.nbytes])
        self._records.landed(entry, self._records.inline_row(entry, content))
        entry.state = EntryState.CLEAN
        self._residents.offer(entry)

    def _depart(self, entry: Entry, extents: Extents) -> Transfer:
        assert entry.residence is not None
        row = self._records.row_for(entry, extents)
        self._residents.withdraw(entry)
        entry.state = EntryState.DEPARTING
        self._residents.departing.add(entry)
        self.writing_bytes += entry.nbytes
        self.num_writing += 1
        on_done = functools.partial(self._landed, entry, self._recorder.begin_move())
        return self._space.transfer(row, entry.residence.buffer.memory, IOClass.WRITE, on_done)

    def _landed(self, entry: Entry, begun_s: float, transfer: Transfer) -> None:
        """The write of ``entry``, begun at ``begun_s``, has ended, well or not. Without the lock."""
        nbytes = 0 if transfer.error is not None else self._space.round_up(entry.nbytes)
        self._recorder.end_move(entry.name, nbytes, begun_s, is_write=True)
        with self._condition:
            self.writing_bytes -= entry.nbytes
            self.num_writing -= 1
            self.num_landed += 1
            self._residents.departing.discard(entry)
            if transfer.error is None:
                self._records.landed(entry, dataclasses.replace(transfer.row, digests=bytes(transfer.digests)))
                entry.state = EntryState.CLEAN
                self.swap_out_bytes += entry.nbytes
                self.num_swap_outs += 1
            elif transfer.failed_piece is None:  # it was interrupted: nothing is wrong with the extents
                entry.state = EntryState.DIRTY
                self._records.put_off(entry)
            else:
                if entry.is_pending:
                    self.sealed_error = self.sealed_error or transfer.error
                else:
                    self.error = self.error or transfer.error
                self._records.lost_target(entry, transfer.row.extents)
                entry.state = EntryState.DIRTY
            self._residents.offer(entry)
            self._condition.notify_all()

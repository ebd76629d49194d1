"""Swap in and swap out: bytes come from NVMe where a caller needs them or will, and dirty bytes are written back.

Decisions are made under the store's lock and return transfers; the caller starts them without it. memory_wait.py says
when memory is short, and which bytes must be written for it.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping

from tiered.bytes.device.base import IOClass
from tiered.errors import CapacityError, TieredError
from tiered.stats import SwapStatistics
from tiered.store.residency.entry import Entry, EntryState, Residence
from tiered.store.residency.eviction import Eviction
from tiered.store.residency.key_table import Extents
from tiered.store.transfers.checked_transfer import Transfer, start_all
from tiered.store.waiting.recorder import Recorder
from tiered.units import MiB

__all__ = ["Shortage", "SwapInOut"]

_log = logging.getLogger("tiered")

_AHEAD_NBYTES = 256 * MiB  # for each device: twice what it has in flight, for when all of that completes at once


@dataclasses.dataclass(frozen=True, slots=True)
class Shortage:
    """Device bytes that planned writes lack: the files must grow first."""

    nbytes: int
    scratch: bool


class SwapInOut(Eviction):
    """Reads and writes of whole tensors.

    The invariants: an ARRIVING entry's read is in ``_ahead``, or has been started; where reads wait in ``_ahead``, a
    started one is in flight, whose end starts more of them. At most one write is in flight for each entry. A failed
    write leaves the tensor resident and dirty; its extents are never used again, and ``write_error`` has the reason
    until a caller raises it.
    """

    refuse: Callable[[], None]  # raises when the store serves no more calls

    def __init__(self) -> None:
        super().__init__()
        self.recorder = Recorder()
        self.streamed_in_bytes = self.streamed_out_bytes = 0
        self.write_ahead_bytes = self.budget_bytes // 8  # more dirty bytes than that are written ahead of need
        self.writing_bytes = 0
        self.num_writing = 0
        self.write_error: Exception | None = None
        self.sealed_error: Exception | None = None  # of a write that belongs to the running commit
        self._swapped_out = [0, 0]  # bytes, number of tensors
        demand, prefetch = [0, 0], [0, 0]  # bytes, number of tensors
        self._swapped_in = {IOClass.DEMAND: demand, IOClass.UPDATE: demand, IOClass.PREFETCH: prefetch}
        self._ahead: OrderedDict[Entry, Transfer] = OrderedDict()  # reads ahead that were not started
        self._ahead_nbytes = 0  # of reads ahead that are in flight
        self._most_ahead_nbytes = _AHEAD_NBYTES * len(self.space.devices)
        self._is_starting = False

    # Below: swap in, under the lock

    def _swap_in(self, entry: Entry, residence: Residence, io_class: IOClass) -> Transfer | None:
        """Return the read to start without the lock; None for an inline entry, which is clean at once."""
        assert entry.row is not None
        if entry.row.inline is not None:
            residence.buffer.memory[: entry.nbytes] = entry.row.inline
            entry.state = EntryState.CLEAN
            self.offer(entry)
            return None
        entry.state = EntryState.ARRIVING
        self.num_arriving += 1
        on_done = functools.partial(self._arrived, entry, self.recorder.begin_move())
        return self.space.transfer(entry.row, residence.buffer.memory, io_class, on_done, on_moved=self._moved)

    def _take_over(self, entry: Entry, io_class: IOClass) -> Transfer | None:
        """Return the read of ``entry``, of ``io_class`` now, for the caller to start, if it was not started yet."""
        transfer = self._ahead.pop(entry, None)
        if transfer is not None:
            transfer.io_class = io_class
        return transfer

    # Below: swap in, without the lock

    def _prefetch(self, names: Iterable[str], beside: Mapping[str, int]) -> int:
        """Begin to read ``names`` ahead, in order, up to the first that does not fit; return bytes here or coming.

        Each is read only where so many bytes as ``beside`` has for it stay free.
        """
        nbytes = 0
        with self.condition:
            self.drain()
            for name in names:
                entry = self.entries.get(name)
                if entry is None or entry.state is EntryState.UNDEFINED:
                    continue
                if entry.state is EntryState.STORED:
                    buffer = None
                    if not self.num_waiting:
                        needed = self.space.round_up(entry.nbytes)
                        buffer = self.allocate_ahead(needed, name, beside=beside.get(name, 0))
                    if buffer is None:
                        break
                    transfer = self._swap_in(entry, self.admit(entry, buffer), IOClass.PREFETCH)
                    if transfer is not None:
                        self._ahead[entry] = transfer
                elif name in self.clean:
                    self.clean.move_to_end(name)  # the last candidate for eviction: it will be used soon
                nbytes += entry.nbytes
        self._start_ahead()
        return nbytes

    def _start_ahead(self) -> None:
        """Start reads ahead as far as they may be in flight. One thread at a time: a device may complete at once."""
        while True:
            with self.condition:
                is_enough = self._ahead_nbytes >= self._most_ahead_nbytes
                if not self._ahead or is_enough or self._is_starting:
                    return
                entry, transfer = self._ahead.popitem(last=False)
                self._ahead_nbytes += entry.nbytes
                self._is_starting = True
            try:
                transfer.start()
            except BaseException:
                self._is_starting = False
                self._start_ahead()  # the others must not wait for a read that is not in flight
                raise
            with self.condition:
                self._is_starting = False

    def _moved(self, transfer: Transfer) -> None:
        """Note that the drive is done with a read, which may still wait for checks: start the next one."""
        if transfer.io_class is IOClass.PREFETCH:
            with self.condition:
                self._ahead_nbytes -= transfer.row.nbytes
            self._start_ahead()

    def _arrived(self, entry: Entry, begun_s: float, transfer: Transfer) -> None:
        """Note that the read of ``entry``, begun at ``begun_s``, has ended, well or not."""
        nbytes = 0 if transfer.error is not None else self.space.round_up(entry.nbytes)
        self.recorder.end_move(entry.name, nbytes, begun_s, is_write=False)
        with self.condition:
            self.num_arriving -= 1
            transfer.is_done = True
            if transfer.error is None:
                if transfer.row.ranges and not transfer.row.digests:
                    self.learn_digests(entry, transfer.row, bytes(transfer.digests))
                entry.state = EntryState.CLEAN
                counts = self._swapped_in[transfer.io_class]
                counts[0] += entry.nbytes
                counts[1] += 1
                self.offer(entry)
            else:
                entry.state = EntryState.STORED
                self.drop(entry)
            self.condition.notify_all()

    # Below: swap out, under the lock

    def plan_writes(self, entries: Iterable[Entry], nbytes: int) -> tuple[list[Transfer], Shortage | None]:
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
            extents = () if entry.is_inline else self.take_target(entry)
            if extents is None:
                shortage = Shortage(self.space.round_up(max(nbytes, entry.nbytes)), entry.scratch)
                break
            nbytes -= entry.nbytes
            chosen[entry] = extents
        # Order: ``entries`` may be one of the queues, which change from here on.
        transfers: list[Transfer] = []
        for entry, extents in chosen.items():
            if entry.is_inline:
                self.land_inline(entry)
            else:
                transfers.append(self._swap_out(entry, extents))
        return transfers, shortage

    def _is_ready(self, entry: Entry) -> bool:
        residence = entry.residence
        if entry.is_pending and self.sealed_error is not None:
            return False  # its target is lost, and the commit with it
        is_dirty = entry.state is EntryState.DIRTY and residence is not None and not residence.writers
        return is_dirty and self.may_write(entry)

    def land_inline(self, entry: Entry) -> None:
        """Make the row of a dirty inline entry, which is clean then; no I/O."""
        assert entry.residence is not None
        self.withdraw(entry)
        content = bytes(entry.residence.buffer.memory[: entry.nbytes])
        self.landed(entry, self.inline_row(entry, content))
        entry.state = EntryState.CLEAN
        self.offer(entry)

    def _swap_out(self, entry: Entry, extents: Extents) -> Transfer:
        assert entry.residence is not None
        row = self.row_for(entry, extents)
        self.withdraw(entry)
        entry.state = EntryState.DEPARTING
        self.departing.add(entry)
        self.writing_bytes += entry.nbytes
        self.num_writing += 1
        on_done = functools.partial(self._written, entry, self.recorder.begin_move())
        return self.space.transfer(row, entry.residence.buffer.memory, IOClass.WRITE, on_done)

    def catch_up(self) -> None:
        """Note the leases that have ended. Raise when no call can be served, or what a write-back has failed of."""
        if not self.ended_leases.queue.empty():
            self.drain()
        self.refuse()
        if self.write_error is not None:
            error, self.write_error = self.write_error, None
            raise error

    def forget_failure(self) -> None:
        """Log the error of a write-back since the last call: its bytes are in DRAM, and are written again."""
        error, self.write_error = self.write_error, None
        if error is not None:
            _log.warning("a write ahead of need failed; the tensor is in DRAM and is written again: %s", error)

    # Below: swap out, without the lock

    def write_ahead(self) -> None:
        """Start to write the oldest dirty bytes when they exceed an eighth of the budget; does not wait for them."""
        excess = self.dirty_bytes - self.write_ahead_bytes
        if excess > 0:
            self.write(self.dirty, excess)

    def write(self, entries: Iterable[Entry], nbytes: int) -> None:
        """Start writes of ``nbytes`` among ``entries``, ahead of need: a later call raises their errors."""
        if nbytes <= 0:  # held keys are written by commits only
            return
        with self.condition:
            transfers, shortage = self.plan_writes(entries, nbytes)
        start_all(transfers)
        if shortage is None:
            return
        try:
            self.space.grow(shortage.nbytes, scratch=shortage.scratch)
        except CapacityError:  # nothing is lost: the bytes are in DRAM, and a commit or a full budget will report it
            return
        except TieredError as error:
            with self.condition:
                self.write_error = self.write_error or error.with_traceback(None)
            return
        self.write(entries, nbytes - sum(transfer.row.nbytes for transfer in transfers))

    def _written(self, entry: Entry, begun_s: float, transfer: Transfer) -> None:
        """Note that the write of ``entry``, begun at ``begun_s``, has ended, well or not."""
        nbytes = 0 if transfer.error is not None else self.space.round_up(entry.nbytes)
        self.recorder.end_move(entry.name, nbytes, begun_s, is_write=True)
        with self.condition:
            self.writing_bytes -= entry.nbytes
            self.num_writing -= 1
            self.departing.discard(entry)
            if transfer.error is None:
                self.landed(entry, dataclasses.replace(transfer.row, digests=bytes(transfer.digests)))
                entry.state = EntryState.CLEAN
                self._swapped_out[0] += entry.nbytes
                self._swapped_out[1] += 1
            else:
                if entry.is_pending:
                    self.sealed_error = self.sealed_error or transfer.error
                else:
                    self.write_error = self.write_error or transfer.error
                self.lost_target(entry, transfer.row.extents)
                entry.state = EntryState.DIRTY
            self.offer(entry)
            self.condition.notify_all()

    def _swap_statistics(self) -> SwapStatistics:
        """Return the counts of all swaps, under the lock; streams count by themselves."""
        demand, prefetch = self._swapped_in[IOClass.DEMAND], self._swapped_in[IOClass.PREFETCH]
        return SwapStatistics(
            demand_bytes=demand[0],
            num_demands=demand[1],
            prefetch_bytes=prefetch[0],
            num_prefetches=prefetch[1],
            swap_out_bytes=self._swapped_out[0],
            num_swap_outs=self._swapped_out[1],
            streamed_in_bytes=self.streamed_in_bytes,
            streamed_out_bytes=self.streamed_out_bytes,
        )

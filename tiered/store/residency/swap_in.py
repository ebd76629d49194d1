"""Swap in: reads that a caller waits for, and reads ahead. The devices have only a few reads ahead at a time.

The working set decides which reads get a buffer. A read ahead becomes a demand read when a caller waits for it.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping

from tiered.bytes.device.base import IOClass
from tiered.stats import SwapStatistics
from tiered.store.records.entry import Entry, EntryState, Residence
from tiered.store.records.records import Records, learned
from tiered.store.residency.residents import Residents
from tiered.store.residency.room import Room
from tiered.store.residency.write_back import WriteBack
from tiered.store.space.space import Space
from tiered.store.transfers.transfer import Transfer
from tiered.units import MiB

__all__ = ["SwapIn"]

_AHEAD_NBYTES = 256 * MiB  # for each device: twice what it has in flight, for when all of that completes at once


class SwapIn:
    """Reads into the working set. An ARRIVING entry's read is in ``_ahead``, or has been started.

    The invariant: where reads wait in ``_ahead``, a started one is in flight; its end starts more of them.
    """

    def __init__(
        self, residents: Residents, records: Records, space: Space, condition: threading.Condition, room: Room
    ) -> None:
        self.counts = {IOClass.DEMAND: [0, 0], IOClass.PREFETCH: [0, 0]}  # bytes, number of arrived tensors
        self._residents = residents
        self._records = records
        self._space = space
        self._condition = condition
        self._room = room
        self._ahead: OrderedDict[Entry, Transfer] = OrderedDict()  # reads ahead that were not started
        self._ahead_nbytes = 0  # of reads ahead that are in flight
        self._is_starting = False
        self._most_nbytes = _AHEAD_NBYTES * len(space.devices)

    # Below: under the lock

    def begin(self, entry: Entry, residence: Residence) -> Transfer | None:
        """Return the demand read to start without the lock; None for an inline entry, which is clean at once."""
        return self._begin(entry, residence, IOClass.DEMAND)

    def take_over(self, entry: Entry) -> Transfer | None:
        """Return the read of ``entry``, now a demand read for the caller to start, if it was not started yet."""
        transfer = self._ahead.pop(entry, None)
        if transfer is not None:
            transfer.io_class = IOClass.DEMAND
        return transfer

    def _begin(self, entry: Entry, residence: Residence, io_class: IOClass) -> Transfer | None:
        assert entry.row is not None
        if entry.row.inline is not None:
            residence.buffer.memory[: entry.nbytes] = entry.row.inline
            entry.state = EntryState.CLEAN
            self._residents.offer(entry)
            return None
        entry.state = EntryState.ARRIVING
        self._residents.num_arriving += 1
        return self._space.transfer(
            entry.row,
            residence.buffer.memory,
            io_class,
            functools.partial(self._arrived, entry, self._room.recorder.begin_move()),
            on_moved=self._moved,
        )

    # Below: without the lock

    def prefetch(self, names: Iterable[str], beside: Mapping[str, int]) -> int:
        """Begin to read ``names`` ahead, in order, up to the first that does not fit; return bytes here or coming.

        Each is read only where so many bytes as ``beside`` has for it stay free.
        """
        nbytes = 0
        with self._condition:
            self._residents.drain()
            for name in names:
                entry = self._records.entries.get(name)
                if entry is None or entry.state is EntryState.UNDEFINED:
                    continue
                if entry.state is EntryState.STORED:
                    buffer = None
                    if not self._room.num_waiting:
                        needed = self._space.round_up(entry.nbytes)
                        buffer = self._residents.take_ahead(needed, name, beside=beside.get(name, 0))
                    if buffer is None:
                        break
                    transfer = self._begin(entry, self._residents.admit(entry, buffer), IOClass.PREFETCH)
                    if transfer is not None:
                        self._ahead[entry] = transfer
                else:
                    self._residents.renew(entry)
                nbytes += entry.nbytes
        self._start_ahead()
        return nbytes

    def _start_ahead(self) -> None:
        """Start reads ahead as far as they may be in flight. One thread at a time: a device may complete at once."""
        while True:
            with self._condition:
                is_enough = self._ahead_nbytes >= self._most_nbytes
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
            with self._condition:
                self._is_starting = False

    def _moved(self, transfer: Transfer) -> None:
        """Note that the drive is done with a read, which may still wait for checks: start the next one."""
        if transfer.io_class is IOClass.PREFETCH:
            with self._condition:
                self._ahead_nbytes -= transfer.row.nbytes
            self._start_ahead()

    def _arrived(self, entry: Entry, begun_s: float, transfer: Transfer) -> None:
        nbytes = 0 if transfer.error is not None else self._space.round_up(entry.nbytes)
        self._room.recorder.end_move(entry.name, nbytes, begun_s, is_write=False)
        with self._condition:
            self._residents.num_arriving -= 1
            transfer.is_done = True
            if transfer.error is None:
                if transfer.row.ranges and not transfer.row.digests:
                    learned(entry, transfer.row, bytes(transfer.digests))
                entry.state = EntryState.CLEAN
                counts = self.counts[transfer.io_class]
                counts[0] += entry.nbytes
                counts[1] += 1
                self._residents.offer(entry)
            else:
                entry.state = EntryState.STORED
                self._residents.drop(entry)
            self._condition.notify_all()

    def statistics(self, write_back: WriteBack, streamed_in_bytes: int, streamed_out_bytes: int) -> SwapStatistics:
        """Return the counts of all swaps, under the lock; streams count by themselves."""
        demand, prefetch = self.counts[IOClass.DEMAND], self.counts[IOClass.PREFETCH]
        return SwapStatistics(
            demand_bytes=demand[0],
            num_demands=demand[1],
            prefetch_bytes=prefetch[0],
            num_prefetches=prefetch[1],
            swap_out_bytes=write_back.swap_out_bytes,
            num_swap_outs=write_back.num_swap_outs,
            streamed_in_bytes=streamed_in_bytes,
            streamed_out_bytes=streamed_out_bytes,
        )

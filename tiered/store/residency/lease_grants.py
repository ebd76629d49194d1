"""LeaseGrants: leases, granted under the store's lock once their bytes are in DRAM; the I/O is done without it."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from tiered.bytes.arena import Buffer
from tiered.store.records.entry import Entry, EntryState, Granted, Residence
from tiered.store.records.producers import DeferredSeal
from tiered.store.records.records import Records
from tiered.store.residency.keys import Keys
from tiered.store.residency.lease_needs import LeaseNeeds, ReadPastError, SwapsIn
from tiered.store.residency.residents import Residents
from tiered.store.residency.room import Room
from tiered.store.residency.swap_in import SwapIn
from tiered.store.space.space import Space
from tiered.store.transfers.transfer import Transfer
from tiered.store.waiting.deadline import Deadline

__all__ = ["LeaseGrants"]


class LeaseGrants:
    """Grants leases; their tensors are the caller's to make."""

    def __init__(
        self,
        residents: Residents,
        records: Records,
        space: Space,
        condition: threading.Condition,
        room: Room,
        keys: Keys,
        swap_in: SwapIn,
        deferred_seal: DeferredSeal,
    ) -> None:
        self.num_leases = 0
        self._residents = residents
        self._records = records
        self._space = space
        self._condition = condition
        self._room = room
        self._keys = keys
        self._swap_in = swap_in
        self._deferred_seal = deferred_seal

    def obtain(
        self, key: str, mode: str, deadline: Deadline, *, swaps_in: SwapsIn | None = None, is_brief: bool = False
    ) -> Granted:
        """Return the granted lease, with no tensor yet, its looks, and the claimed residence it must copy, if any.

        Blocks. ``is_brief``: see ``Residents.open``. A lease for reading with ``swaps_in`` is: where its bytes are not
        in DRAM, and ``swaps_in(entry)`` is false, it raises ReadPastError. Raises the errors of ``WorkingSet.lease``.
        """
        is_brief = is_brief or swaps_in is not None
        reading: Transfer | None = None  # the swap in that this call has started
        claim: Residence | None = None  # the residence it reads into: not to be evicted before it is leased here
        try:
            while True:
                if mode != "r":
                    self._deferred_seal.settle_for(key)
                with self._condition:
                    if claim is None:
                        self._room.stand_back(deadline)
                    if mode != "r":
                        self._keys.refuse_late()
                    entry, needs, urgent = self._await_needs(key, mode, deadline)
                    if mode != "r" and not entry.scratch and self._deferred_seal.is_closed:
                        continue  # deferred meanwhile, by another thread
                    if needs is not LeaseNeeds.NOTHING and claim is not None:  # replaced: the bytes read are useless
                        self._residents.unclaim(claim)
                        claim = None
                    if needs is LeaseNeeds.NOTHING:
                        return self._grant(entry, mode, None, is_brief=is_brief)
                    if needs is LeaseNeeds.SWAP_IN and reading is not None and reading.error is not None:
                        raise reading.error
                    if needs is LeaseNeeds.SWAP_IN and swaps_in is not None and not swaps_in(entry):
                        raise ReadPastError
                    nbytes = self._space.round_up(entry.nbytes)
                    buffer = None if urgent is not None else self._residents.take_nowait(nbytes, is_held=entry.held)
                    if buffer is not None and needs is LeaseNeeds.BUFFER:
                        return self._grant(entry, mode, buffer, is_brief=is_brief)
                    if buffer is not None:
                        claim = self._residents.claim(self._residents.admit(entry, buffer))
                        reading = self._swap_in.begin(entry, claim)
                if urgent is not None:
                    urgent.start()
                elif buffer is None:
                    self._room.make(nbytes, deadline, is_held=entry.held)
                elif reading is not None:
                    reading.start()
        finally:
            self._room.leave(deadline)
            if claim is not None:
                self.unclaim(claim)

    def obtain_resident(self, keys: Sequence[str]) -> list[Granted]:
        """Return brief leases, for reading and writing, of the first of ``keys``: those that need nothing for it.

        Does not block. None where callers wait for memory: they come first.
        """
        granted: list[Granted] = []
        with self._condition:
            self._residents.drain()
            self._room.raise_failure()
            self._keys.refuse_late()
            if self._room.num_waiting or self._deferred_seal.is_closed:
                return granted
            for key in keys:
                entry = self._records.entries.get(key)
                if entry is None or not entry.is_unused:
                    break
                alias = self._residents.open(entry, is_writer=True, is_brief=True)
                self._records.touch(entry, alias)
                entry.state = EntryState.DIRTY
                granted.append((alias, entry.spec, None))
            self.num_leases += len(granted)
        return granted

    def unclaim(self, residence: Residence) -> None:
        """End a claim; without the lock."""
        with self._condition:
            self._residents.unclaim(residence)

    def _await_needs(self, key: str, mode: str, deadline: Deadline) -> tuple[Entry, LeaseNeeds, Transfer | None]:
        """Return the entry and its needs before a lease, once no transfer in flight uses it.

        Or the read of it that the caller must start first.
        """
        while True:
            entry = self._keys.find(key)
            needs = LeaseNeeds.of(entry, mode)
            urgent = self._swap_in.take_over(entry) if needs is LeaseNeeds.WAIT else None
            if needs is not LeaseNeeds.WAIT or urgent is not None:
                return entry, needs, urgent
            self._keys.wait_for(entry, deadline)

    def _grant(self, entry: Entry, mode: str, buffer: Buffer | None, *, is_brief: bool) -> Granted:
        old: Residence | None = None
        if buffer is not None:
            old = entry.residence
            if old is not None:
                self._residents.claim(old)
            self._residents.drop(entry)
            self._residents.admit(entry, buffer)
        alias = self._residents.open(entry, is_writer=mode != "r", is_brief=is_brief)
        if mode != "r":
            self._records.touch(entry, alias)
            entry.state = EntryState.DIRTY
        self.num_leases += 1
        return alias, entry.spec, old

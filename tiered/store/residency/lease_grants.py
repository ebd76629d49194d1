"""LeaseGrants: leases, granted under the store's lock once their bytes are in DRAM; the I/O is done without it.

Keys finds the entry of a name, or puts one in its place, once nothing in flight has a hold on the entry.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from tiered.bytes.arena import Buffer
from tiered.errors import ClosedError, LeaseError
from tiered.store.format.row import Spec
from tiered.store.records.entry import Entry, EntryState, Granted, Residence
from tiered.store.records.producers import DeferredSeal
from tiered.store.records.records import Records
from tiered.store.residency.lease import LeaseNeeds, ReadPastError, SwapsIn
from tiered.store.residency.residents import Residents
from tiered.store.residency.room import Room
from tiered.store.residency.swap_in import SwapIn
from tiered.store.space.space import Space
from tiered.store.transfers.transfer import Transfer
from tiered.store.waiting.calling_thread import this_thread
from tiered.store.waiting.deadline import Deadline
from tiered.store.waiting.recorder import Wait

__all__ = ["Keys", "LeaseGrants"]


class Keys:
    """The names of a store. All methods are called under the store's lock, which those that wait give back."""

    def __init__(
        self,
        records: Records,
        residents: Residents,
        room: Room,
        space: Space,
        condition: threading.Condition,
        *,
        deadline_s: float,
    ) -> None:
        self.is_ending = False  # later writes would be in no commit any more
        self._records = records
        self._residents = residents
        self._room = room
        self._space = space
        self._condition = condition
        self._deadline_s = deadline_s

    def find(self, key: str) -> Entry:
        """Return the entry of ``key``. KeyError; raises an error of the background."""
        self._residents.drain()
        self._room.raise_failure()
        entry = self._records.entries.get(key)
        if entry is None:
            raise KeyError(key)
        return entry

    def settled(self, key: str, operation: str) -> Entry | None:
        """Return the entry of ``key``, if there is one, with nothing in flight and no open lease for writing.

        Waits for transfers, and for another thread's update. For a caller about to change it: raises ClosedError once
        close() has fixed the bytes that it commits.
        """
        deadline = Deadline(f"{operation} of {key!r}", self._deadline_s)
        while True:
            self._residents.drain()
            self._room.raise_failure()
            self.refuse_late()
            entry = self._records.entries.get(key)
            if entry is None:
                return None
            residence = entry.residence
            if residence is None or not residence.open_writers:
                if entry.is_settled:
                    return entry
            elif residence.updater in (None, this_thread()):
                raise LeaseError(f"{operation} of {key!r}, which is leased for writing; release the lease first")
            self.wait_for(entry, deadline)

    def replace(self, old: Entry | None, key: str, spec: Spec, *, scratch: bool, key_id: int | None = None) -> Entry:
        """Return a new UNDEFINED entry for ``key`` in the place of ``old``, which is settled."""
        if old is not None:
            self._remove(old)
        entry = self._records.add(key, spec, scratch=scratch, key_id=key_id)
        self._hold(entry, old is not None and old.held)
        return entry

    def remove(self, key: str) -> bool:
        """Drop ``key`` and its bytes, once it is settled; return whether there was one."""
        entry = self.settled(key, "deletion")
        if entry is None:
            return False
        self._remove(entry)
        return True

    def set_held(self, key: str, held: bool) -> None:
        """Keep ``key`` in DRAM for good, or no more. KeyError."""
        entry = self.find(key)
        self._residents.withdraw(entry)
        self._hold(entry, held)
        self._residents.offer(entry)

    def count_held(self) -> None:
        """Count the bytes of held keys anew: a rollback has taken some entries away, and brought others back."""
        held = (entry for entry in self._records.entries.used() if entry.held)
        self._residents.share.held_bytes = sum(self._space.round_up(entry.nbytes) for entry in held)

    def _remove(self, entry: Entry) -> None:
        self._records.remove(entry)
        self._residents.drop(entry)
        if entry.held:  # a replaced entry says that it was
            self._residents.share.held_bytes -= self._space.round_up(entry.nbytes)

    def _hold(self, entry: Entry, held: bool) -> None:
        if entry.held != held:
            nbytes = self._space.round_up(entry.nbytes)
            self._residents.share.hold(nbytes if held else -nbytes, entry.residence)
        entry.held = held

    def wait_for(self, entry: Entry, deadline: Deadline) -> None:
        """Wait for a change of ``entry``; its bytes in DRAM are not evicted meanwhile."""
        residence = None if entry.residence is None else self._residents.claim(entry.residence)
        reason = Wait.READ if entry.state is EntryState.ARRIVING else Wait.WRITE
        if entry.is_pending and entry.state is not EntryState.ARRIVING:
            reason = Wait.COMMIT
        elif residence is not None and residence.updater is not None:
            reason = Wait.UPDATE
        begun = self._room.recorder.begin()
        try:
            commit = self._records.commit_progress() if entry.is_pending else None
            is_moving = entry.state in (EntryState.ARRIVING, EntryState.DEPARTING)
            deadline.wait(self._condition, (commit, self._space.progress.num_blocks if is_moving else 0))
        finally:
            self._room.recorder.waited(reason, entry.name, begun)
            if residence is not None:
                self._residents.unclaim(residence)

    def refuse_late(self) -> None:
        """Raise ClosedError once close() has fixed the bytes that it commits."""
        if self.is_ending:
            raise ClosedError("the store is being closed: its contents are committed, and nothing more can be written")


# -- lease grants ------------------------------------------------------------------------------------------------------


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

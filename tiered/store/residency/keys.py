"""Keys: the entry of a name, found or put in the place of another, once nothing in flight has a hold on it."""

from __future__ import annotations

import threading

from tiered.errors import ClosedError, LeaseError
from tiered.store.format.row import Spec
from tiered.store.records.entry import Entry, EntryState
from tiered.store.records.records import Records
from tiered.store.residency.residents import Residents
from tiered.store.residency.room import Room
from tiered.store.space.space import Space
from tiered.store.waiting.calling_thread import this_thread
from tiered.store.waiting.deadline import Deadline
from tiered.store.waiting.recorder import Wait

__all__ = ["Keys"]


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

"""Room: bytes of the DRAM budget for waiting callers, made by writing, waiting, and asking for memory back.

It decides when write-back starts. write_back.py chooses the entries to write, the policy those to evict.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from tiered.bytes.arena import Buffer
from tiered.errors import CapacityError, DeadlineError, TieredError
from tiered.store.records.entry import Entry, EntryState, Residence
from tiered.store.records.records import Records
from tiered.store.residency.residents import EvictionPolicy, Residents
from tiered.store.residency.write_back import Shortage, WriteBack
from tiered.store.space.space import Space
from tiered.store.transfers.transfer import SLAB_NBYTES, start_all
from tiered.store.waiting.calling_thread import this_thread
from tiered.store.waiting.deadline import Deadline
from tiered.store.waiting.recorder import Recorder, Wait
from tiered.units import format_bytes

__all__ = ["Room"]

_log = logging.getLogger("tiered")

_PATIENCE = 1 / 4  # of its deadline: a caller that waits for longer is starved, and others let it go first


class Room:
    """Buffers for callers that may block. ``refuse`` raises when the store serves no more calls.

    Callers that hold nothing, no lease and no reservation, let a starved caller go first, until they are starved
    themselves. A caller that holds something goes on at once, because others may wait for its bytes.
    """

    def __init__(
        self,
        residents: Residents,
        records: Records,
        space: Space,
        condition: threading.Condition,
        recorder: Recorder,
        *,
        deadline_s: float,
        refuse: Callable[[], None],
    ) -> None:
        self.budget_bytes = residents.arena.nbytes
        self.write_ahead_bytes = self.budget_bytes // 8  # more dirty bytes than that are written ahead of need
        self.recorder = recorder
        self.write_back = WriteBack(condition, residents, records, space, recorder)
        self.reclaimers: list[Callable[[int], bool]] = []
        self.num_waiting = 0  # callers that wait for memory: prefetches stand back
        self.waits_for: dict[int, threading.Thread] = {}  # thread's number -> the thread it waits for
        self._residents = residents
        self._records = records
        self._space = space
        self._condition = condition
        self._deadline_s = deadline_s
        self._patience_s = _PATIENCE * deadline_s
        self.refuse = refuse
        self._starved: set[Deadline] = set()  # of callers that have waited for long
        self._reservations: dict[Buffer, int | None] = {}  # and the thread that will give it back soon, if one will
        self._policy: EvictionPolicy | None = None  # that was set

    # Below: without the lock

    @contextlib.contextmanager
    def waiting_for(self, thread: threading.Thread) -> Iterator[None]:
        """Say that the calling thread gives back in the block only bytes that reclaimers asked it for.

        It waits for ``thread``, whose own calls then fail with CapacityError where they would wait for it.
        """
        number = this_thread()
        with self._condition:
            self.waits_for[number] = thread
            self._condition.notify_all()  # the other thread may wait for that
        try:
            yield
        finally:
            self.waits_for.pop(number, None)

    def reserve(self, nbytes: int, *, is_lasting: bool = False) -> Buffer:
        """Lease ``nbytes`` of the arena; blocks. Raises CapacityError, DeadlineError, DeviceError.

        No caller waits for the return of one that ``is_lasting``.
        """
        buffer = None if self._starved else self.reserve_nowait(nbytes, is_lasting=is_lasting)
        if buffer is not None:
            return buffer
        deadline = Deadline(f"reservation of {format_bytes(nbytes)} of the DRAM budget", self._deadline_s)
        try:
            while True:
                with self._condition:
                    self.stand_back(deadline)
                if (buffer := self.reserve_nowait(nbytes, is_lasting=is_lasting)) is not None:
                    return buffer
                self.make(nbytes, deadline)
        finally:
            self.leave(deadline)

    def reserve_nowait(self, nbytes: int, *, is_lasting: bool = False) -> Buffer | None:
        """Lease ``nbytes`` of the arena if evicting clean tensors is enough."""
        with self._condition:
            self._residents.drain()
            buffer = self._residents.take_nowait(self._space.round_up(nbytes))
            if buffer is not None:
                self._residents.share.reserve(buffer)
                self._reservations[buffer] = None if is_lasting else this_thread()
                if not is_lasting:
                    self._residents.users[this_thread()] += 1
            return buffer

    def leave(self, deadline: Deadline) -> None:
        """Note that the caller with ``deadline`` waits for memory no more."""
        if deadline in self._starved:
            with self._condition:
                self._starved.remove(deadline)
                self._condition.notify_all()

    def unreserve(self, buffer: Buffer) -> None:
        """Give back a buffer of ``reserve``; no tensor on it may be alive."""
        with self._condition:
            self.drop(buffer)

    def make(self, nbytes: int, deadline: Deadline, *, is_held: bool = False) -> None:
        """Take one step towards ``nbytes`` of free budget: write, wait, or reclaim. The caller then tries again.

        Raises CapacityError when no step is left, DeadlineError, and errors of the background.
        """
        needed = self._space.round_up(nbytes)
        begun = self.recorder.begin()
        with self._condition:
            if deadline.age_s >= self._patience_s:
                self._starved.add(deadline)
            self._residents.drain()
            self.raise_failure()
            if self._has_room(needed, is_held=is_held) and not self._residents.is_worth_waiting():
                return
            reason = Wait.COMMIT if self._is_waiting_for_commit() else Wait.WRITE
            lacking = self._lacking(needed)
            if lacking <= 0 and self._is_admitted(needed, is_held=is_held):  # the bytes would suffice: scattered
                lacking = needed
            missing = lacking - self.write_back.writing_bytes
            transfers, shortage = self.write_back.plan(self._residents.dirty, missing)
            is_waiting = not transfers and shortage is None and self._is_moving()
            if is_waiting:
                self._wait(deadline)
        start_all(transfers)
        if shortage is not None:
            self.grow(shortage)
        elif not transfers and not is_waiting:
            self._reclaim(needed, deadline, is_held=is_held)
        self.recorder.waited(reason, "", begun)

    def pump(self) -> None:
        """Start to write the oldest dirty bytes when they exceed an eighth of the budget; does not wait for them."""
        excess = self._residents.dirty_bytes - self.write_ahead_bytes
        if excess > 0:
            self.write(self._residents.dirty, excess)

    def write(self, entries: Iterable[Entry], nbytes: int) -> None:
        """Start writes of ``nbytes`` among ``entries``, ahead of need: a later call raises their errors."""
        if nbytes <= 0:  # held keys are written by commits only
            return
        with self._condition:
            transfers, shortage = self.write_back.plan(entries, nbytes)
        start_all(transfers)
        if shortage is None:
            return
        try:
            self._space.grow(shortage.nbytes, scratch=shortage.scratch)
        except CapacityError:  # nothing is lost: the bytes are in DRAM, and a commit or a full budget will report it
            return
        except TieredError as error:
            with self._condition:
                self.write_back.error = self.write_back.error or error.with_traceback(None)
            return
        with self._condition:
            transfers, _ = self.write_back.plan(entries, nbytes - sum(transfer.row.nbytes for transfer in transfers))
        start_all(transfers)

    def grow(self, shortage: Shortage) -> None:
        """Grow the files; CapacityError names the bytes that a commit would free, or else the largest keys."""
        try:
            self._space.grow(shortage.nbytes, scratch=shortage.scratch)
        except CapacityError as error:
            with self._condition:
                freed = sum(self._records.superseded().values())
                largest = [] if freed else self._records.largest(5)
            names = ", ".join(f"{name!r} ({format_bytes(nbytes)})" for name, nbytes in largest)
            then = ", then commit, before new puts: rollback() takes them back" if self._records.durable else ""
            remedy = f". Or delete keys{then}; the largest are {names}" if names else ""
            raise CapacityError(f"{error}; a commit would free {format_bytes(freed)}{remedy}") from error

    def _reclaim(self, needed: int, deadline: Deadline, *, is_held: bool) -> None:
        """With nothing in flight: ask the reclaimers, wait for other threads' leases, collect garbage, give up."""
        with self._condition:
            self._check_patience(needed, deadline)
            self.num_waiting += 1
        try:
            if any(reclaim(needed) for reclaim in list(self.reclaimers)):
                deadline.renew()
                return
        finally:
            with self._condition:
                self.num_waiting -= 1
        with self._condition:
            self._residents.drain()
            is_admitted = self._is_admitted(needed, is_held=is_held)
            if self._has_room(needed, is_held=is_held) or self._is_moving() or (is_admitted and self._residents.dirty):
                return
            me, my_number = threading.current_thread(), this_thread()
            others = (user for user in self._residents.users if user != my_number)
            if not is_admitted or any(self.waits_for.get(user) is not me for user in others):
                self._wait(deadline)
                return
            num_used, is_hopeless = self._residents.users.total(), not self._lingering()
        if not is_hopeless:
            gc.collect()  # lingering tensors may be in a cycle of references, such as an exception's
        with self._condition:
            self._residents.drain()
            if is_hopeless or self._residents.users.total() == num_used:
                raise CapacityError(self._explain(needed))

    # Below: under the lock

    def stand_back(self, deadline: Deadline) -> None:
        """Let starved callers go first, before the caller with ``deadline`` takes or pins memory."""
        holds_nothing = this_thread() not in self._residents.users and not self._residents.share.is_callers
        # Order: not for ever, because a thread that a starved caller waits for may wait for this caller.
        while holds_nothing and self._starved and (left_s := self._patience_s - deadline.age_s) > 0:
            self._condition.wait(left_s)

    def drop(self, buffer: Buffer) -> None:
        """Give back a buffer of ``reserve``."""
        self.take_over(buffer)
        self._residents.give_back(buffer)

    def take_over(self, buffer: Buffer) -> None:
        """Let the bytes that ``reserve`` returned become a key's."""
        thread = self._reservations.pop(buffer)
        self._residents.share.unreserve(buffer)
        if thread is not None:
            self._residents.forget_user(thread)

    def set_policy(self, policy: EvictionPolicy) -> None:
        """Have the residents ask ``policy`` from now on."""
        # Lifetime: a policy refers to a model, and that to the store, which must not keep itself alive.
        self._policy, self._residents.policy = policy, weakref.proxy(policy)

    def raise_failure(self) -> None:
        """Raise when no call can be served, or the error of a write-back since the last call."""
        self.refuse()
        error, self.write_back.error = self.write_back.error, None
        if error is not None:
            raise error

    def forget_failure(self) -> None:
        """Log the error of a write-back since the last call: its bytes are in DRAM, and are written again."""
        error, self.write_back.error = self.write_back.error, None
        if error is not None:
            _log.warning("a write ahead of need failed; the tensor is in DRAM and is written again: %s", error)

    def shortage(self, keys: Mapping[str, int], beside: int) -> int:
        """Return the bytes of ``keys`` and ``beside`` that find no room; see ``WorkingSet.shortage``."""
        residents = self._residents
        residents.drain()
        giving_way = residents.clean_bytes + residents.dirty_bytes + self.write_back.writing_bytes
        found = residents.arena.leased_nbytes - giving_way - self.budget_bytes + beside
        for key, nbytes in keys.items():
            entry = self._records.entries.get(key)
            residence = None if entry is None else entry.residence
            if entry is None or residence is None:
                found += nbytes
            else:
                gives_way = residence.is_idle and not entry.held and entry.state is not EntryState.ARRIVING
                found += nbytes if gives_way else 0
        return max(0, found)

    def _has_room(self, needed: int, *, is_held: bool) -> bool:
        """Whether evicting all clean entries would be enough."""
        return self._is_admitted(needed, is_held=is_held) and self._residents.has_room(needed)

    def _is_admitted(self, needed: int, *, is_held: bool) -> bool:
        return is_held or self._residents.share.admits(needed)

    def _lacking(self, needed: int) -> int:
        """Return how many bytes more would have to be clean or free, wherever they lie."""
        return needed - self._residents.arena.free_nbytes - self._residents.clean_bytes

    def _is_moving(self) -> bool:
        """Whether something is in flight that will make bytes evictable or free."""
        is_blocked = self._records.sealed is not None and bool(self._residents.dirty)
        in_flight = self._residents.num_arriving + self._residents.num_claims + self.write_back.num_writing
        return in_flight > 0 or is_blocked

    def _is_waiting_for_commit(self) -> bool:
        """Whether dirty bytes must stay until the running commit has given back the extents they need."""
        moving = self._residents.num_arriving + self.write_back.num_writing
        return self._records.sealed is not None and not moving

    def _check_patience(self, needed: int, deadline: Deadline) -> None:
        try:
            deadline.check()
        except DeadlineError as error:
            raise DeadlineError(f"{error}. Other threads did not give back: {self._explain(needed)}") from None

    def _wait(self, deadline: Deadline) -> None:
        """Wait for a while; the deadline starts again as long as transfers in flight make progress."""
        self.num_waiting += 1
        try:
            progress = (self._records.commit_progress(), self._space.progress.num_blocks)
            deadline.wait(self._residents.ended_leases, progress)
        finally:
            self.num_waiting -= 1

    def _explain(self, needed: int) -> str:
        if needed > self.budget_bytes:
            others = f". Put and get need no more than {format_bytes(SLAB_NBYTES)}" if needed > SLAB_NBYTES else ""
            return (
                f"no room for {format_bytes(needed)} in the DRAM budget of {format_bytes(self.budget_bytes)}, even when"
                f" nothing else is in it; give dram= of {needed:,} bytes or more{others}"
            )
        resident = [entry for entry in self._records.entries.used() if entry.residence is not None]
        used = [entry.residence for entry in resident if entry.residence is not None and entry.residence.aliases]
        leased = [residence for residence in used if not residence.is_lingering]
        held = sum(entry.nbytes for entry in resident if entry.held)
        reserved = sum(buffer.nbytes for buffer in self._reservations)
        is_scattered = self._lacking(needed) <= 0 and not self._residents.has_room(needed)
        scattered = "; enough bytes are free, but scattered between these" if is_scattered else ""
        return (
            f"no room for {format_bytes(needed)} in the DRAM budget of {format_bytes(self.budget_bytes)}: "
            f"{_describe(leased)} leased, {_describe(self._lingering())} kept alive by tensors made from past leases, "
            f"{format_bytes(held)} held, {format_bytes(reserved)} reserved{scattered}; release leases, clone() what is"
            " kept, or give a larger dram="
        )

    def _lingering(self) -> list[Residence]:
        """Return the bytes that only tensors of released leases keep in DRAM."""
        entries = self._records.entries.used()
        resident = [entry.residence for entry in entries if entry.residence is not None]
        return [residence for residence in [*resident, *self._residents.orphans] if residence.is_lingering]


def _describe(residences: Collection[Residence]) -> str:
    """Return how many bytes, and the first names, most bytes first."""
    nbytes = Counter[str]()
    for residence in residences:
        nbytes[residence.name] += residence.buffer.nbytes
    names = ", ".join(repr(name) for name, _ in nbytes.most_common(5)) + (", ..." if len(nbytes) > 5 else "")
    return format_bytes(nbytes.total()) + (f" ({names})" if names else "")

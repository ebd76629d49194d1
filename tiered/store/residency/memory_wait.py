"""MemoryWait: callers wait for bytes of the DRAM budget: what is dirty is written, what is lent is asked for.

They wait here for a change of an entry, too.
swap_in_out.py chooses the entries to write, the policy those to evict.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from tiered.bytes.arena import Buffer
from tiered.errors import CapacityError, DeadlineError
from tiered.store.residency.entry import Entry, EntryState, Residence
from tiered.store.residency.eviction import EvictionPolicy
from tiered.store.residency.swap_in_out import Shortage, SwapInOut
from tiered.store.transfers.checked_transfer import SLAB_NBYTES, Transfer, start_all
from tiered.store.waiting.calling_thread import this_thread
from tiered.store.waiting.deadline import Deadline
from tiered.store.waiting.recorder import Wait
from tiered.store.waiting.refusals import CallMark
from tiered.units import format_bytes

__all__ = ["Callbacks", "MemoryWait"]

_PATIENCE = 1 / 4  # of its deadline: a caller that waits for longer is starved, and other callers let it go first


class Callbacks:
    """The functions of a store's users that its working set calls.

    The store keeps them, and its working set refers to them weakly: they may refer to a model, and that to the store.
    """

    __slots__ = ("__weakref__", "policy", "reclaimers")

    def __init__(self) -> None:
        self.policy: EvictionPolicy | None = None
        self.reclaimers: list[Callable[[int], bool]] = []


class MemoryWait(SwapInOut):
    """Memory for callers that may block.

    Callers that hold nothing, no lease and no reservation, let a starved caller go first, until they are starved
    themselves. A caller that holds something goes on at once, because other threads may wait for its bytes.
    """

    check: Callable[..., None]  # raises where a call cannot be served; see ``Refusals.check``
    mark: CallMark
    callbacks: weakref.ref[Callbacks]
    deadline_s: float

    def __init__(self) -> None:
        super().__init__()
        self._patience_s = _PATIENCE * self.deadline_s
        self._starved: set[Deadline] = set()  # of callers that have waited for long
        self._reservations: dict[Buffer, int | None] = {}  # and the thread that will give it back soon, if one will
        self._waits_for: dict[int, threading.Thread] = {}  # thread's number -> the thread it waits for

    # Below: reservations

    def reserve(self, nbytes: int, *, is_lasting: bool = False) -> Buffer:
        """Lease ``nbytes`` of the arena for the caller's own use; blocks and evicts as a lease does.

        Give it back with ``unreserve``. No caller waits for the end of one that ``is_lasting``. Raises
        CapacityError, DeadlineError, DeviceError.
        """
        self.check(writing=False)
        with self.mark:
            buffer = None if self._starved else self.reserve_nowait(nbytes, is_lasting=is_lasting)
            if buffer is not None:
                return buffer
            deadline = Deadline(f"reservation of {format_bytes(nbytes)} of the DRAM budget", self.deadline_s)
            try:
                while True:
                    with self.condition:
                        self._stand_back(deadline)
                    if (buffer := self.reserve_nowait(nbytes, is_lasting=is_lasting)) is not None:
                        return buffer
                    self._make_room(nbytes, deadline)
            finally:
                self._end_wait(deadline)

    def reserve_nowait(self, nbytes: int, *, is_lasting: bool = False) -> Buffer | None:
        """Lease ``nbytes`` of the arena if evicting clean tensors is enough."""
        with self.condition:
            self.drain()
            buffer = self.allocate_nowait(self.space.round_up(nbytes))
            if buffer is not None:
                self._pinned_bytes += buffer.nbytes
                self._reservations[buffer] = None if is_lasting else this_thread()
                if not is_lasting:
                    self.users[this_thread()] += 1
            return buffer

    def unreserve(self, buffer: Buffer) -> None:
        """Give back a buffer of ``reserve``; no tensor on it may be alive. Works after close as well."""
        with self.mark, self.condition:
            self.end_reservation(buffer)
            self._give_back(buffer)

    def end_reservation(self, buffer: Buffer) -> None:
        """Let the bytes that ``reserve`` returned become a key's; under the lock."""
        thread = self._reservations.pop(buffer)
        self._pinned_bytes -= buffer.nbytes
        if thread is not None:
            self._forget_user(thread)

    # Below: what others say of memory

    def set_policy(self, policy: EvictionPolicy) -> None:
        """Let ``policy`` choose the keys to evict from now on."""
        callbacks = self.callbacks()
        if callbacks is not None:
            with self.condition:
                callbacks.policy, self.policy = policy, weakref.proxy(policy)

    def add_reclaimer(self, reclaim: Callable[[int], bool]) -> None:
        """Let ``reclaim(nbytes)`` be asked, without locks, when a caller waits for memory and nothing else helps.

        It runs in that caller's thread, may release leases, and returns whether it gave something back.
        """
        callbacks = self.callbacks()
        if callbacks is not None:
            callbacks.reclaimers.append(reclaim)

    def set_aside(self, nbytes: int, is_for: Callable[[], bool]) -> None:
        """Leave ``nbytes`` of the budget to the leases of the thread in which ``is_for()`` holds; 0 ends that.

        Others then wait, or give back, as if the budget were so much smaller; evictable bytes are no hindrance.
        """
        with self.mark, self.condition:
            self._set_aside_bytes, self._is_for = nbytes, is_for
            self.condition.notify_all()

    @contextlib.contextmanager
    def waiting_for(self, thread: threading.Thread) -> Iterator[None]:
        """Say that the calling thread gives back in the block only bytes that reclaimers asked it for.

        It waits for ``thread``, whose own calls then fail with CapacityError where they would wait for it.
        """
        number = this_thread()
        with self.condition:
            self._waits_for[number] = thread
            self.condition.notify_all()  # the other thread may wait for that
        try:
            yield
        finally:
            self._waits_for.pop(number, None)

    def shortage(self, keys: Mapping[str, int]) -> int:
        """Return how much of ``keys`` (key -> bytes) finds no room, even once all else is evicted.

        Leased, held and arriving keys stay and need no more; unknown keys are yet to be leased.
        """
        with self.mark, self.condition:
            self.drain()
            giving_way = self.clean_bytes + self.dirty_bytes + self.writing_bytes
            found = self.arena.leased_nbytes - giving_way - self.budget_bytes
            for key, nbytes in keys.items():
                entry = self.entries.get(key)
                residence = None if entry is None else entry.residence
                stays = residence is not None and not residence.is_idle
                if entry is not None and residence is not None:
                    stays = stays or entry.held or entry.state is EntryState.ARRIVING
                found += 0 if stays else nbytes
            return max(0, found)

    # Below: keys that are out of use

    def evict(self, keys: Iterable[str]) -> int:
        """See ``TensorMapping.evict``. Held keys stay, too, and unknown ones are passed over. Raises DeadlineError."""
        self.check(writing=False)
        names = list(keys)
        with self.mark:
            with self.condition:
                entries = [entry for name in names if (entry := self.entries.get(name)) and not entry.held]
            self.write(entries, sum(entry.nbytes for entry in entries))  # all at once
            return sum(map(self._evict_when_clean, dict.fromkeys(names)))

    def _evict_when_clean(self, name: str) -> int:
        deadline = Deadline(f"eviction of {name!r}", self.deadline_s)
        while True:
            transfers: list[Transfer] = []
            shortage: Shortage | None = None
            with self.condition:
                self.catch_up()
                entry = self.entries.get(name)
                residence = None if entry is None else entry.residence
                if entry is None or residence is None or entry.held or residence.aliases:
                    return 0
                if name in self.clean:
                    self._evict(name)
                    return residence.buffer.nbytes
                if entry.state is EntryState.DIRTY:
                    transfers, shortage = self.plan_writes([entry], max(1, entry.nbytes))
                if name not in self.clean and not transfers and shortage is None:
                    # Order: without a claim, which would keep the entry from being offered to another such caller.
                    deadline.wait(self.condition, (self.commit_progress(), self.space.progress.num_blocks))
            start_all(transfers)
            if shortage is not None:
                self.grow(shortage)

    # Below: one step towards free memory

    def _make_room(self, nbytes: int, deadline: Deadline, *, is_held: bool = False) -> None:
        """Take one step towards ``nbytes`` of free budget: write, wait, or reclaim. The caller then tries again.

        Raises CapacityError when no step is left, DeadlineError, and errors of the background.
        """
        needed = self.space.round_up(nbytes)
        begun = self.recorder.begin()
        with self.condition:
            if deadline.age_s >= self._patience_s:
                self._starved.add(deadline)
            self.catch_up()
            if self._has_room(needed, is_held=is_held) and not self.is_worth_waiting():
                return
            # Dirty bytes must stay until the running commit has given back the extents they need.
            is_commits = self.sealed is not None and not self.num_arriving + self.num_writing
            lacking = self._lacking(needed)
            if lacking <= 0 and (is_held or self.admits(needed)):  # the bytes would suffice: scattered
                lacking = needed
            transfers, shortage = self.plan_writes(self.dirty, lacking - self.writing_bytes)
            is_waiting = not transfers and shortage is None and self._is_moving()
            if is_waiting:
                self._wait(deadline)
        start_all(transfers)
        if shortage is not None:
            self.grow(shortage)
        elif not transfers and not is_waiting:
            self._reclaim(needed, deadline, is_held=is_held)
        self.recorder.waited(Wait.COMMIT if is_commits else Wait.WRITE, "", begun)

    def grow(self, shortage: Shortage) -> None:
        """Grow the files; CapacityError names the bytes that a commit would free, or else the largest keys."""
        try:
            self.space.grow(shortage.nbytes, scratch=shortage.scratch)
        except CapacityError as error:
            with self.condition:
                freed = sum(self.superseded().values())
                largest = [] if freed else self.largest(5)
            names = ", ".join(f"{name!r} ({format_bytes(nbytes)})" for name, nbytes in largest)
            then = ", then commit, before new puts: rollback() takes them back" if self.durable else ""
            remedy = f". Or delete keys{then}; the largest are {names}" if names else ""
            raise CapacityError(f"{error}; a commit would free {format_bytes(freed)}{remedy}") from error

    def _reclaim(self, needed: int, deadline: Deadline, *, is_held: bool) -> None:
        """With nothing in flight: ask the reclaimers, wait for other threads' leases, collect garbage, give up."""
        callbacks = self.callbacks()
        with self.condition:
            self._check_deadline(needed, deadline)
            self.num_waiting += 1
        try:
            if callbacks is not None and any(reclaim(needed) for reclaim in list(callbacks.reclaimers)):
                deadline.renew()
                return
        finally:
            with self.condition:
                self.num_waiting -= 1
        with self.condition:
            self.drain()
            is_admitted = is_held or self.admits(needed)
            if self._has_room(needed, is_held=is_held) or self._is_moving() or (is_admitted and self.dirty):
                return
            me, my_number = threading.current_thread(), this_thread()
            others = (user for user in self.users if user != my_number)
            if not is_admitted or any(self._waits_for.get(user) is not me for user in others):
                self._wait(deadline)
                return
            num_used, is_hopeless = self.users.total(), not self._lingering()
        if not is_hopeless:
            gc.collect()  # lingering tensors may be in a cycle of references, such as an exception's
        with self.condition:
            self.drain()
            if is_hopeless or self.users.total() == num_used:
                raise CapacityError(self._explain(needed))

    # Below: under the lock

    def wait_for_entry(self, entry: Entry, deadline: Deadline) -> None:
        """Wait for a change of ``entry``; its bytes in DRAM are not evicted meanwhile."""
        residence = None if entry.residence is None else self.claim(entry.residence)
        reason = Wait.READ if entry.state is EntryState.ARRIVING else Wait.WRITE
        if entry.is_pending and entry.state is not EntryState.ARRIVING:
            reason = Wait.COMMIT
        elif residence is not None and residence.updater is not None:
            reason = Wait.UPDATE
        begun = self.recorder.begin()
        try:
            commit = self.commit_progress() if entry.is_pending else None
            is_moving = entry.state in (EntryState.ARRIVING, EntryState.DEPARTING)
            deadline.wait(self.condition, (commit, self.space.progress.num_blocks if is_moving else 0))
        finally:
            self.recorder.waited(reason, entry.name, begun)
            if residence is not None:
                self.unclaim(residence)

    def _stand_back(self, deadline: Deadline) -> None:
        """Let starved callers go first, before the caller with ``deadline`` takes or pins memory."""
        holds_nothing = this_thread() not in self.users and not (self._set_aside_bytes and self._is_for())
        # Order: not for ever, because a thread that a starved caller waits for may wait for this caller.
        while holds_nothing and self._starved and (left_s := self._patience_s - deadline.age_s) > 0:
            self.condition.wait(left_s)

    def _end_wait(self, deadline: Deadline) -> None:
        """Note that the caller with ``deadline`` waits for memory no more; without the lock."""
        if deadline in self._starved:
            with self.condition:
                self._starved.remove(deadline)
                self.condition.notify_all()

    def _has_room(self, needed: int, *, is_held: bool) -> bool:
        """Whether evicting all clean entries would be enough."""
        return (is_held or self.admits(needed)) and self.has_clean_room(needed)

    def _lacking(self, needed: int) -> int:
        """Return how many bytes more would have to be clean or free, wherever they lie."""
        return needed - self.arena.free_nbytes - self.clean_bytes

    def _is_moving(self) -> bool:
        """Whether something is in flight that will make bytes evictable or free."""
        is_blocked = self.sealed is not None and bool(self.dirty)
        return self.num_arriving + self.num_claims + self.num_writing > 0 or is_blocked

    def _check_deadline(self, needed: int, deadline: Deadline) -> None:
        try:
            deadline.check()
        except DeadlineError as error:
            raise DeadlineError(f"{error}. Other threads did not give back: {self._explain(needed)}") from None

    def _wait(self, deadline: Deadline) -> None:
        """Wait for a while; the deadline starts again as long as transfers in flight make progress."""
        self.num_waiting += 1
        try:
            progress = (self.commit_progress(), self.space.progress.num_blocks)
            deadline.wait(self.ended_leases, progress)
        finally:
            self.num_waiting -= 1

    def _explain(self, needed: int) -> str:
        if needed > self.budget_bytes:
            others = f". Put and get need no more than {format_bytes(SLAB_NBYTES)}" if needed > SLAB_NBYTES else ""
            return (
                f"no room for {format_bytes(needed)} in the DRAM budget of {format_bytes(self.budget_bytes)}, even when"
                f" nothing else is in it; give dram= of {needed:,} bytes or more{others}"
            )
        resident = [entry for entry in self.entries.used() if entry.residence is not None]
        used = [entry.residence for entry in resident if entry.residence is not None and entry.residence.aliases]
        leased = [residence for residence in used if not residence.is_lingering]
        held = sum(entry.nbytes for entry in resident if entry.held)
        reserved = sum(buffer.nbytes for buffer in self._reservations)
        is_scattered = self._lacking(needed) <= 0 and not self.has_clean_room(needed)
        scattered = "; enough bytes are free, but scattered between these" if is_scattered else ""
        return (
            f"no room for {format_bytes(needed)} in the DRAM budget of {format_bytes(self.budget_bytes)}: "
            f"{_describe(leased)} leased, {_describe(self._lingering())} kept alive by tensors made from past leases, "
            f"{format_bytes(held)} held, {format_bytes(reserved)} reserved{scattered}; release leases, clone() what is"
            " kept, or give a larger dram="
        )

    def _lingering(self) -> list[Residence]:
        """Return the bytes that only tensors of released leases keep in DRAM."""
        entries = self.entries.used()
        resident = [entry.residence for entry in entries if entry.residence is not None]
        return [residence for residence in [*resident, *self.orphans] if residence.is_lingering]


def _describe(residences: Collection[Residence]) -> str:
    """Return how many bytes, and the first names, most bytes first."""
    nbytes = Counter[str]()
    for residence in residences:
        nbytes[residence.name] += residence.buffer.nbytes
    names = ", ".join(repr(name) for name, _ in nbytes.most_common(5)) + (", ..." if len(nbytes) > 5 else "")
    return format_bytes(nbytes.total()) + (f" ({names})" if names else "")

"""Eviction: which tensors are in DRAM, under one byte budget, who uses them, and which of them make way.

Bookkeeping under the store's lock, without I/O and without a wait: swap_in_out.py moves the bytes, memory_wait.py waits
until enough of them can be evicted.
"""

from __future__ import annotations

import functools
import queue
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from tiered.bytes.arena import Arena, Buffer
from tiered.bytes.condition import Condition
from tiered.bytes.exit_and_fork import this_process
from tiered.store.residency.entry import Alias, Entry, EntryState, Residence
from tiered.store.residency.key_table import KeyTable
from tiered.store.waiting.calling_thread import this_thread

__all__ = ["EndedLeases", "Eviction", "EvictionPolicy", "LeastRecentlyUsed"]


class EndedLeases:
    """The leases that finalizers report as ended, in a queue that is a waiter of the store's condition.

    A finalizer must not take the store's lock to notify. So one thread at a time waits for the queue instead, which a
    notification reaches as well, by None. The items that it finds stay in the queue.
    """

    def __init__(self, condition: Condition) -> None:
        self.queue: queue.SimpleQueue[Alias | None] = queue.SimpleQueue()
        self._condition = condition
        self._is_awaited = False

    def wait(self, timeout: float) -> None:
        """Wait for an end or a notification, with the store's lock held."""
        if self._is_awaited:
            self._condition.wait(timeout)
            return
        self._is_awaited = True
        try:
            self._condition.wait(timeout, self)
        finally:
            self._is_awaited = False
            self._condition.notify_all()  # another waiting thread takes this one's place

    def take(self) -> Iterator[Alias]:
        """Take the leases out of the queue, under the lock; leave a notification to the thread that waits for one."""
        was_notified = False
        while not self.queue.empty():
            try:
                alias = self.queue.get_nowait()
            except queue.Empty:  # the waiting thread has it in hand, and puts it back before it goes on
                break
            if alias is not None:
                yield alias
            was_notified |= alias is None
        if was_notified and self._is_awaited:
            self.queue.put(None)

    def release(self) -> None:
        """Note that the condition was notified."""
        self.queue.put(None)

    def acquire(self, *, timeout: float = -1) -> bool:
        """Wait until the queue has something; return False where the time is over."""
        get = functools.partial(self.queue.get, True, None if timeout < 0 else timeout)
        try:
            # Order: no line of Python between taking an end and putting it back, where an interrupt would lose it.
            next(map(self.queue.put, iter(get, None)), None)
        except queue.Empty:
            return False
        return True


class EvictionPolicy(Protocol):
    """Chooses the keys to evict; it sees names and sizes, never bytes."""

    def victim(self, evictable: Mapping[str, int], incoming: str | None) -> str | None:
        """Return the key to evict among ``evictable`` (name -> bytes, least recently used first).

        ``incoming`` is the key that a prefetch wants room for, and None means that it should not have it. It is None
        for a caller that waits: then there must be an answer. Called under the store's lock: never call the store.
        """

    def is_worth_waiting(self, victim: str, leaving: Iterable[str]) -> bool:
        """Return whether to keep ``victim``, and wait for one of ``leaving``, which can be evicted once it is written.

        As ``victim``, called under the store's lock.
        """


class LeastRecentlyUsed:
    """The default policy: the key not used for longest goes first, also for prefetches, and at once."""

    def victim(self, evictable: Mapping[str, int], incoming: str | None) -> str | None:
        return next(iter(evictable), None)

    def is_worth_waiting(self, victim: str, leaving: Iterable[str]) -> bool:
        return False


# -- eviction ----------------------------------------------------------------------------------------------------------


_MOVING = (EntryState.ARRIVING, EntryState.DEPARTING)  # a transfer has the buffer, perhaps one that was not started yet


class Eviction(KeyTable):
    """Entries in DRAM, within the arena's budget.

    The invariants: a clean entry without users that is not held is in ``clean``; a dirty one without writers that is
    not held is in ``dirty``; all others are in neither. *The leases and reservations of other threads, without held
    keys, are at most the budget less the held bytes and less* ``set_aside_bytes``, so that the thread for which these
    are set aside waits for transfers alone. Buffers that may be evicted count for no thread.
    """

    arena: Arena

    def __init__(self) -> None:
        super().__init__()
        self.budget_bytes = self.arena.nbytes
        self.policy: EvictionPolicy = LeastRecentlyUsed()
        self.clean: OrderedDict[str, int] = OrderedDict()  # name -> bytes, least recently used first
        self.dirty: OrderedDict[Entry, None] = OrderedDict()  # oldest first
        self.departing: set[Entry] = set()  # being written
        self.clean_bytes = 0  # of their buffers: evicting them all would free as much
        self.dirty_bytes = 0
        self.resident_bytes = 0
        self.held_bytes = 0  # of keys that stay in DRAM for good
        self.orphans: set[Residence] = set()  # replaced or deleted under living tensors
        self.num_evictions = 0
        self.num_arriving = 0  # swap ins in flight
        self.num_claims = 0  # callers that are about to use, or copy, bytes in DRAM
        self.num_waiting = 0  # callers that wait for memory: prefetches leave it to them
        self.users: Counter[int] = Counter()  # thread -> living leases and reservations it asked for
        self.ended_leases = EndedLeases(self.condition)
        self._set_aside_bytes = 0  # for the thread in which ``_is_for()`` holds
        self._is_for: Callable[[], bool] = _nobody
        self._pinned_bytes = 0  # leased or reserved, by all threads
        self._own_bytes = 0  # leased by the thread that bytes are set aside for
        self._is_dram_closed = False
        self._process = this_process()

    # Below: the budget

    @property
    def left_bytes(self) -> int:
        """The bytes of the budget that are neither held nor in use, but by the thread that bytes are set aside for."""
        return self.budget_bytes - self.held_bytes - (self._pinned_bytes - self._own_bytes)

    def admits(self, nbytes: int) -> bool:
        """Return whether the caller may lease or reserve ``nbytes`` more beside the bytes that are set aside."""
        if not self._set_aside_bytes or self._is_for():
            return True
        return nbytes + self._set_aside_bytes <= self.left_bytes

    def _pin(self, residence: Residence) -> None:
        """Count the first lease of ``residence``, which is not held: held bytes have their own part of the budget."""
        residence.pinned_nbytes = residence.buffer.nbytes
        self._pinned_bytes += residence.pinned_nbytes
        if self._set_aside_bytes and self._is_for():
            self._make_own(residence)

    def _unpin(self, residence: Residence) -> None:
        """Count the end of the last lease of ``residence``."""
        self._make_common(residence)
        self._pinned_bytes -= residence.pinned_nbytes
        residence.pinned_nbytes = 0

    def _make_own(self, residence: Residence) -> None:
        """Count the leased bytes of ``residence`` in those set aside."""
        if residence.pinned_nbytes and not residence.is_own:
            residence.is_own = True
            self._own_bytes += residence.pinned_nbytes

    def _make_common(self, residence: Residence) -> None:
        """Count the leased bytes of ``residence`` in those set aside no more."""
        if residence.is_own:
            residence.is_own = False
            self._own_bytes -= residence.pinned_nbytes

    def _hold(self, entry: Entry, held: bool) -> None:
        """Count the bytes of ``entry`` as held, or as ordinary again."""
        if entry.held != held:
            nbytes = self.space.round_up(entry.nbytes)
            self.held_bytes += nbytes if held else -nbytes
            if entry.residence is not None and entry.residence.aliases:
                self._unpin(entry.residence) if held else self._pin(entry.residence)
        entry.held = held

    # Below: buffers

    def allocate_nowait(self, nbytes: int, *, is_held: bool = False) -> Buffer | None:
        """Lease a buffer, evicting clean entries as needed; None when the rest is in use, or worth to be kept.

        Also None where the bytes are set aside for another thread; those of a held key never are.
        """
        if not is_held and self._set_aside_bytes and not self.admits(nbytes):
            return None
        while True:
            buffer = self.arena.allocate_nowait(nbytes)
            if buffer is not None:
                return buffer
            victim = self._victim()
            if victim is None:
                return None
            if self.arena.free_nbytes >= nbytes:
                return self._allocate_scattered(nbytes, self.clean)
            self._evict(victim)

    def allocate_ahead(self, nbytes: int, incoming: str, *, beside: int = 0) -> Buffer | None:
        """Lease a buffer for a prefetch of ``incoming``, evicting only what the policy offers.

        ``beside``: bytes that must be free then, for leases that come before its use.
        """
        while self.arena.free_nbytes < nbytes + beside:
            victim = self.policy.victim(self.clean, incoming) if self.clean else None
            if victim is None or victim not in self.clean or self._is_worth_waiting(victim):
                return None
            self._evict(victim)
        buffer = self.arena.allocate_nowait(nbytes)
        if buffer is None:
            offered = [name for name, size in self.clean.items() if self._is_offered(name, size, incoming)]
            buffer = self._allocate_scattered(nbytes, offered)
        return buffer

    def has_clean_room(self, nbytes: int) -> bool:
        """Return whether ``allocate_nowait`` would find a place for ``nbytes`` if it may evict every clean entry."""
        return self.arena.could_place(nbytes, self.clean_bytes, self._places(self.clean))

    def is_worth_waiting(self) -> bool:
        """Return whether to wait for a write in flight, rather than evict an entry that is clean now."""
        return bool(self.departing and self.clean) and self._victim() is None

    def _allocate_scattered(self, nbytes: int, names: Iterable[str]) -> Buffer | None:
        """Lease a buffer where the free bytes suffice and are scattered: evict those of ``names`` in its way."""
        evictable = dict(zip(self._places(names), names, strict=True))
        in_the_way = self.arena.in_the_way(nbytes, evictable)
        if in_the_way is None:
            return None
        for (address, size), name in evictable.items():
            if size and address in in_the_way:
                self._evict(name)
        return self.arena.allocate_nowait(nbytes)

    def _places(self, names: Iterable[str]) -> Iterator[tuple[int, int]]:
        """Yield the address and the bytes of each of the resident ``names``, while they are asked for."""
        for name in names:
            residence = self.entries[name].residence
            assert residence is not None
            yield residence.buffer.address, residence.buffer.nbytes

    def _victim(self) -> str | None:
        """Return which clean entry to evict for a caller that waits; None where there is none to be spared."""
        if not self.clean:
            return None
        victim = self.policy.victim(self.clean, None)
        if victim is None or victim not in self.clean:
            victim = next(iter(self.clean))
        return None if self._is_worth_waiting(victim) else victim

    def _is_worth_waiting(self, victim: str) -> bool:
        leaving = [entry.name for entry in self.departing if entry.residence is not None and entry.residence.is_idle]
        return bool(leaving) and self.policy.is_worth_waiting(victim, leaving)

    def _is_offered(self, name: str, nbytes: int, incoming: str) -> bool:
        """Whether the policy would evict this clean entry for a prefetch of ``incoming``."""
        return self.policy.victim({name: nbytes}, incoming) == name and not self._is_worth_waiting(name)

    def _evict(self, name: str) -> None:
        entry = self.entries[name]
        self.drop(entry)
        entry.state = EntryState.STORED
        self.num_evictions += 1

    def _give_back(self, buffer: Buffer) -> None:
        if not self.arena.release(buffer):
            self._give_back_later(buffer)
        self.condition.notify_all()

    def _give_back_later(self, buffer: Buffer) -> None:
        """Have ``buffer`` given back once the last tensor on it has died, as the bytes of a lease are."""
        residence = Residence(buffer, None)
        residence.aliases = 1
        alias = Alias(residence, is_writer=False, thread=this_thread())
        alias.is_released = True
        self.users[alias.thread] += 1
        self.orphans.add(residence)
        if self._is_dram_closed:
            buffer.follow_up(self.reap)
        buffer.follow_up(functools.partial(self.ended_leases.queue.put, alias))
        if not buffer.is_aliased:  # it has died meanwhile
            self.report_end(alias)

    # Below: entries

    def admit(self, entry: Entry, buffer: Buffer) -> Residence:
        """Make ``buffer`` the entry's bytes in DRAM."""
        assert entry.residence is None
        entry.residence = Residence(buffer, entry)
        self.resident_bytes += entry.nbytes
        return entry.residence

    def drop(self, entry: Entry) -> None:
        """Forget the entry's bytes in DRAM; living tensors keep theirs. The caller sets the state."""
        self.withdraw(entry)
        residence, entry.residence = entry.residence, None
        if residence is None:
            return
        self.resident_bytes -= entry.nbytes
        residence.entry = None
        if residence.is_idle:
            self._give_back(residence.buffer)
        else:
            self.orphans.add(residence)

    def withdraw(self, entry: Entry) -> None:
        """Take the entry out of the queues: it is about to be used, written or dropped."""
        if entry.residence is None:
            return
        if self.clean.pop(entry.name, None) is not None:
            self.clean_bytes -= entry.residence.buffer.nbytes
        elif entry in self.dirty:
            del self.dirty[entry]
            self.dirty_bytes -= entry.nbytes

    def offer(self, entry: Entry) -> None:
        """Put the entry into the queue its state calls for, if any; at the end unless it is leaving."""
        if self._is_dram_closed and entry.state not in _MOVING:
            self.drop(entry)
        residence = entry.residence
        if residence is None or entry.held:
            return
        if entry.state is EntryState.CLEAN and residence.is_idle and entry.name not in self.clean:
            self.clean[entry.name] = entry.nbytes
            self.clean_bytes += residence.buffer.nbytes
            if residence.is_leaving:
                self.clean.move_to_end(entry.name, last=False)
        elif entry.state is EntryState.DIRTY and not residence.writers and entry not in self.dirty:
            self.dirty[entry] = None
            self.dirty_bytes += entry.nbytes
        else:
            return
        self.condition.notify_all()  # a caller may wait for memory

    def _demote(self, entry: Entry) -> None:
        """Make the entry the first candidate for eviction, once it is clean: it is not needed for now."""
        if entry.residence is not None:
            entry.residence.is_leaving = True
        if entry.name in self.clean:
            self.clean.move_to_end(entry.name, last=False)

    # Below: leases

    def _open_lease(self, entry: Entry, *, is_writer: bool, is_brief: bool = False) -> Alias:
        """Count a new lease of a resident entry; its tensor is the caller's to make.

        Other threads wait for the end of a brief lease; they never get LeaseError because of it. A brief lease for
        reading counts as released from the start, and its holder makes no tensor.
        """
        residence = entry.residence
        assert residence is not None
        if not entry.held:  # a held one is in no queue
            if is_writer or entry.state is EntryState.CLEAN:  # a dirty one may be written while it is read
                self.withdraw(entry)
            if not residence.aliases:
                self._pin(residence)
        residence.aliases += 1
        residence.writers += is_writer
        residence.open_writers += is_writer
        residence.open_readers += not is_writer and not is_brief
        residence.is_leaving = False
        alias = Alias(residence, is_writer=is_writer, thread=this_thread())
        alias.is_released = is_brief and not is_writer
        if is_brief and is_writer:
            residence.updater = alias.thread
        self.users[alias.thread] += 1
        return alias

    def end_leases(self, aliases: Sequence[Alias], *, is_written: bool) -> bool:
        """Note released leases, and the ends of all that have ended; return whether ``aliases`` are among them.

        The others linger until their last tensors have died, as readers where ``is_written``: none writes any more.
        """
        for alias in aliases:
            if not alias.is_released:
                self._release(alias)
                if is_written and alias.is_writer:
                    alias.residence.writers -= 1
                    alias.is_writer = False
        self.drain()
        have_ended = True
        for alias in aliases:
            if not alias.has_ended and alias.is_dead:
                self._end(alias)
            if not alias.has_ended:
                have_ended = False
                if is_written:
                    self._end_use(alias.residence)
        return have_ended

    def drain(self) -> None:
        """Note the leases that have ended since the last call."""
        if not self.ended_leases.queue.empty():
            for alias in self.ended_leases.take():
                self._end(alias)

    def report_end(self, alias: Alias) -> None:
        """Note the end of a lease that has no tensor (any more); without the lock."""
        self.ended_leases.queue.put(alias)
        if self._is_dram_closed:
            self.reap()

    def _release(self, alias: Alias) -> None:
        alias.is_released = True
        residence = alias.residence
        residence.open_writers -= alias.is_writer
        residence.open_readers -= not alias.is_writer
        if alias.is_writer and residence.updater is not None:
            residence.updater = None
            self.condition.notify_all()

    def _make_clean(self, alias: Alias) -> None:
        """Make the entry of an ended lease clean again: it was clean before, and no byte was changed."""
        entry = alias.residence.entry
        if alias.before is None or entry is None or entry.state is not EntryState.DIRTY or alias.residence.writers:
            return
        self.withdraw(entry)
        self.untouch(entry, alias.before)
        entry.state = EntryState.CLEAN
        self.offer(entry)

    def _end(self, alias: Alias) -> None:
        if alias.has_ended:
            return
        if not alias.is_released:
            self._release(alias)
        alias.has_ended = True
        self._forget_user(alias.thread)
        residence = alias.residence
        residence.aliases -= 1
        if residence.pinned_nbytes and not residence.aliases:
            self._unpin(residence)
        residence.writers -= alias.is_writer
        self._end_use(residence)

    def _end_use(self, residence: Residence) -> None:
        """Note the end of a use of ``residence``: offer its entry, or give an orphan back."""
        if residence.entry is not None:
            self.offer(residence.entry)
        elif residence.is_idle:
            self.orphans.discard(residence)
            self._give_back(residence.buffer)

    def claim(self, residence: Residence) -> Residence:
        """Keep ``residence`` for a caller that waits for its bytes or copies them; until ``unclaim``."""
        residence.claims += 1
        self.num_claims += 1
        return residence

    def unclaim(self, residence: Residence) -> None:
        """End a claim that ``claim`` began."""
        residence.claims -= 1
        self.num_claims -= 1
        self._end_use(residence)
        self.condition.notify_all()

    def _forget_user(self, thread: int) -> None:
        """Note the end of a lease or reservation of ``thread``."""
        self.users[thread] -= 1
        if self.users[thread] <= 0:
            del self.users[thread]
        self.condition.notify_all()

    # Below: the end

    def close(self) -> None:
        """Give every buffer back that is in no use; the others follow when their last tensor dies, or transfer ends."""
        self.drain()
        self._is_dram_closed = True
        for entry in self.entries.used():
            self.offer(entry)
        moving = [entry.residence for entry in self.entries.used() if entry.residence is not None]
        # Lifetime: the last tensor on a buffer keeps the working set, which must not lead to a tensor by its user.
        self._set_aside_bytes, self._is_for = 0, _nobody
        for residence in [*self.orphans, *moving]:
            residence.buffer.follow_up(self.reap)

    def reap(self) -> None:
        """After ``close``: give back the buffers that have ended since; without the lock."""
        # Lifetime: after close finalizers drain the queue. Never blocking: the holder of the lock may be the very frame
        # that a collection interrupted; it, or the next end, finds the queue.
        if not self._process.is_here or self.condition.is_held_here():
            return
        while not self.ended_leases.queue.empty() and self.condition.acquire(blocking=False):
            try:
                self.drain()
            finally:
                self.condition.release()


def _nobody() -> bool:
    return False

"""The working set: which tensors are in DRAM, under one byte budget. The only owner of residency.

Leasing, swapping in and replacing are here; bookkeeping is in residents.py, swapping out in write_back.py, waiting for
memory in room.py, generations in records.py.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from tiered.bytes.arena import Buffer
from tiered.bytes.interrupt import uninterrupted
from tiered.stats import WorkingSetStatistics
from tiered.store.format.row import MAX_NUM_DIMS, Spec, is_kept
from tiered.store.records.entry import Alias, EntryState, Granted
from tiered.store.records.producers import DeferredSeal
from tiered.store.records.records import Records
from tiered.store.residency.lease import Lease, refuse_modes, tensor_over
from tiered.store.residency.lease_grants import Keys, LeaseGrants
from tiered.store.residency.residents import EvictionPolicy, Residents
from tiered.store.residency.room import Room
from tiered.store.residency.swap_in import SwapIn
from tiered.store.space.space import Space
from tiered.store.waiting.deadline import Deadline
from tiered.store.waiting.recorder import Recorder
from tiered.store.waiting.refusals import Refusals

__all__ = ["EvictionPolicy", "Lease", "WorkingSet"]


class WorkingSet:
    """Tensors in DRAM and on their way, within ``budget_bytes``. All methods are thread-safe.

    The invariant: *a tensor is always readable from at least one tier*. A failed write leaves it resident, a failed
    read gives its buffer back. Decisions are made under the one lock of the store; I/O is submitted without it.
    Every wait has a deadline and ends in DeadlineError; a failure in the background is raised by the next call.
    """

    def __init__(
        self,
        residents: Residents,
        records: Records,
        space: Space,
        condition: threading.Condition,
        *,
        deadline_s: float,
        refusals: Refusals,
    ) -> None:
        """``condition`` is the store's one lock."""
        self.budget_bytes = residents.arena.nbytes
        self.condition = condition
        self.residents = residents
        self.records = records
        self.space = space
        self.deadline_s = deadline_s
        self.recorder = Recorder()
        self.refusals = refusals
        self.check = refusals.check  # raises where a call cannot be served
        self.mark = refusals.mark
        self.room = Room(
            residents, records, space, condition, self.recorder, deadline_s=deadline_s, refuse=refusals.refuse
        )
        self.deferred_seal = DeferredSeal(records, condition, self._progress, deadline_s=deadline_s)
        self.swap_in = SwapIn(residents, records, space, condition, self.room)
        self.keys = Keys(records, residents, self.room, space, condition, deadline_s=deadline_s)
        self.grants = LeaseGrants(
            residents, records, space, condition, self.room, self.keys, self.swap_in, self.deferred_seal
        )
        self.streamed_in_bytes = self.streamed_out_bytes = 0
        self._pid = os.getpid()
        residents.watch(records.entries)

    # Below: leases, hints, memory

    @uninterrupted
    def create(
        self,
        key: str,
        nbytes: int,
        *,
        scratch: bool = False,
        dtype: torch.dtype = torch.uint8,
        shape: Sequence[int] | None = None,
    ) -> None:
        """Make ``key`` a tensor whose bytes are undefined until its first "w" lease; an existing one is replaced.

        ``shape`` defaults to (nbytes / itemsize,). Scratch keys are never in a commit. No device space is taken yet.
        Raises LeaseError when the key is leased for writing.
        """
        spec = Spec(dtype, (nbytes // dtype.itemsize,) if shape is None else tuple(shape))
        if spec.nbytes != nbytes:
            raise ValueError(f"create({key!r}): expected {spec.nbytes} bytes for {spec.shape} of {dtype}, got {nbytes}")
        if not is_kept(dtype):
            raise TypeError(f"create({key!r}): {dtype} is no dtype of dense tensors; expected torch.uint8")
        if len(spec.shape) > MAX_NUM_DIMS:
            raise TypeError(f"create({key!r}): expected at most {MAX_NUM_DIMS} dimensions, got {len(spec.shape)}")
        self.check(writing=True)
        with self.mark:
            self.deferred_seal.settle_for(key, is_new=not scratch)
            with self.condition:
                scratch = scratch or not self.records.durable
                self.keys.replace(self.keys.settled(key, "replacement"), key, spec, scratch=scratch)

    @uninterrupted
    def lease(self, key: str, mode: str) -> Lease:
        """Lease the tensor of ``key``: "r" shared, "rw" exclusive, "w" exclusive and undefined at first. Blocks.

        Swaps it in, making room by evicting clean entries, writing dirty ones, and asking the reclaimers. A lease
        for writing makes the key dirty. Bytes that a lingering lease still reads are copied, not overwritten.
        Raises KeyError, LeaseError (an unreleased lease conflicts), CapacityError, CorruptionError, DeviceError.
        """
        if mode not in ("r", "w", "rw"):
            raise ValueError(f'lease of {key!r}: expected mode "r", "w" or "rw", got {mode!r}')
        self.check(writing=mode != "r")
        refuse_modes("lease", key)
        with self.mark:
            lease = self._show(key, mode, self.grants.obtain(key, mode, self._lease_deadline(key, mode)))
            self.room.pump()
        return lease

    @uninterrupted
    def lease_for_update(self, keys: Sequence[str]) -> list[Lease]:
        """Lease each of ``keys`` for "rw", or none; other threads that want them wait for the end, and are not refused.

        So nothing that they wait with may be needed for it. Blocks as ``lease``, with its errors; costs less than so
        many leases where the bytes are in DRAM. To be given back by ``end_update``, or one by one.
        """
        self.check(writing=True)
        refuse_modes("lease", keys[0])
        with self.mark:
            self.deferred_seal.settle_for(*keys)
            leases = self._lease_all(keys)
            self.room.pump()
        return leases

    def _lease_all(self, keys: Sequence[str]) -> list[Lease]:
        granted = self.grants.obtain_resident(keys)
        leases: list[Lease] = []
        try:
            for key, grant in zip(keys, granted, strict=False):
                leases.append(self._show(key, "rw", grant))
            for key in keys[len(leases) :]:
                grant = self.grants.obtain(key, "rw", self._lease_deadline(key, "rw"), is_brief=True)
                leases.append(self._show(key, "rw", grant))
        except BaseException:
            for alias, _, _ in granted[len(leases) + 1 :]:
                self.residents.report_end(alias)
            for lease in leases:
                lease.release(is_unchanged=True)
            raise
        return leases

    def end_update(self, leases: Iterable[Lease]) -> None:
        """Release leases of ``lease_for_update``; none of their tensors writes any more."""
        self.released([lease.end() for lease in leases], is_written=True)

    def _lease_deadline(self, key: str, mode: str) -> Deadline:
        return Deadline(f"lease of {key!r} for {mode!r}", self.deadline_s)

    def _show(self, key: str, mode: str, granted: Granted) -> Lease:
        """Make the tensor of a granted lease; an error ends the lease."""
        alias, spec, old = granted
        buffer = alias.residence.buffer
        flat: torch.Tensor | None = None
        try:
            if old is not None and mode == "rw":  # a reader still has the old bytes: this lease gets its own
                ctypes.memmove(buffer.address, old.buffer.address, spec.nbytes)
            flat, alias.memory = buffer.alias(spec.nbytes, self.residents.on_end(alias))
            return Lease(self, key, mode, alias, tensor_over(flat, spec))
        except BaseException:
            if flat is None:
                self.residents.report_end(alias)
            else:  # its own end is reported, once: when no frame of this error has it any more
                flat = None
                self.released([alias])
            raise
        finally:
            if old is not None:
                self.grants.unclaim(old)

    @uninterrupted
    def released(self, aliases: Sequence[Alias], *, is_written: bool = False, is_unchanged: bool = False) -> bool:
        """Note that leases were released; return whether their last tensors have died. Works after close as well."""
        if self._pid != os.getpid():
            return True  # in a forked child there is nothing to give back
        if self.refusals.nested_calls.is_inside():
            return True  # a finalizer inside of a call: the death of the tensor says the same, and is noted soon
        with self.mark:
            with self.condition:
                unchanged = [alias for alias in aliases if is_unchanged and not alias.has_ended]  # order: others write
                have_ended = self.residents.end(aliases, is_written=is_written)
                for alias in unchanged:
                    if alias.has_ended:
                        self.residents.restore(alias, self.records.untouch)
            self.room.pump()
        return have_ended

    @uninterrupted
    def discard(self, lease: Lease) -> bool:
        """Release ``lease`` and delete its key, whose bytes are not written any more; blocks while one is in flight.

        Returns False when other tensors on its bytes are alive: the key stays then, and is to be deleted later.
        """
        alias = lease.end()
        self.check(writing=True)
        with self.mark, self.condition:
            self.residents.end((alias,), is_written=False)
            self.residents.share.give_back(alias.residence)
            if alias.has_ended:
                self.keys.remove(lease.key)
        return alias.has_ended

    @uninterrupted
    def prefetch(self, keys: Iterable[str], beside: Mapping[str, int] | None = None) -> int:
        """Start to swap in ``keys``, in order, up to the first that does not fit. A hint: never blocks on I/O.

        ``beside`` says how many bytes of the budget must stay free beside a key, for leases that come before its use.
        Returns how many bytes of them are resident or coming. Unknown keys and failures are passed over.
        """
        self.check(writing=False)
        names = list(keys)  # not under the lock: an iterator may ask the store
        with self.mark:
            return self.swap_in.prefetch(names, beside or {})

    @uninterrupted
    def swap_out(self, keys: Iterable[str]) -> None:
        """Start to write the dirty ones of ``keys``; make the clean ones the first candidates for eviction.

        Held keys and keys that are leased for writing are passed over. Does not wait for the writes.
        """
        self.check(writing=False)
        names = list(keys)
        with self.mark:
            with self.condition:
                self.residents.drain()
                entries = [entry for key in names if (entry := self.records.entries.get(key)) and not entry.held]
                for entry in entries:
                    self.residents.demote(entry)
            self.room.write(entries, sum(entry.nbytes for entry in entries))

    def release_hold(self, keys: Iterable[str]) -> None:
        """Make ``keys`` ordinary again. KeyError."""
        self.hold(keys, held=False)

    @uninterrupted
    def hold(self, keys: Iterable[str], *, held: bool = True) -> None:
        """Keep ``keys`` resident for good once they are; they are written by commits only. KeyError."""
        names = list(keys)
        with self.mark, self.condition:
            for key in names:
                self.keys.set_held(key, held)

    def set_aside(self, nbytes: int, is_for: Callable[[], bool]) -> None:
        """Leave ``nbytes`` of the budget to the leases of the thread in which ``is_for()`` holds; 0 ends that.

        Others then wait, or give back, as if the budget were so much smaller; evictable bytes are no hindrance.
        """
        with self.mark, self.condition:
            self.residents.share.set_aside(nbytes, is_for)
            self.condition.notify_all()

    def change_share(self, lease: Lease) -> None:
        """Count the bytes of ``lease``, which another thread has taken, in the bytes set aside."""
        with self.mark, self.condition:
            self.residents.share.change(lease.residence)

    def set_policy(self, policy: EvictionPolicy) -> None:
        """Let ``policy`` choose the keys to evict from now on."""
        with self.condition:
            self.room.set_policy(policy)

    def add_reclaimer(self, reclaim: Callable[[int], bool]) -> None:
        """Let ``reclaim(nbytes)`` be asked, without locks, when a caller waits for memory and nothing else helps.

        It runs in that caller's thread, may release leases, and returns whether it gave something back.
        """
        self.room.reclaimers.append(reclaim)

    @uninterrupted
    def shortage(self, keys: Mapping[str, int], beside: int = 0) -> int:
        """Return how much of ``keys`` (key -> bytes) and ``beside`` finds no room, even once all else is evicted.

        Leased, held and arriving keys stay and need no more; unknown keys are yet to be leased.
        """
        with self.mark, self.condition:
            return self.room.shortage(keys, beside)

    def has(self, key: str) -> bool:
        """Whether ``key`` exists now. Takes no lock."""
        return key in self.records.entries  # order: ``get`` may change the table, which is for holders of the lock

    def version(self, key: str) -> int:
        """Return a number that the bytes of ``key`` share with none before them, whoever wrote; 0: unknown.

        Under a lease for reading it is that of the leased bytes. Takes no lock.
        """
        return self.records.entries.version(key)

    def is_resident(self, key: str) -> bool:
        """Whether the bytes of ``key`` are in DRAM now."""
        with self.condition:
            entry = self.records.entries.peek(key)
        return entry is not None and entry.state in (EntryState.CLEAN, EntryState.DIRTY, EntryState.DEPARTING)

    @uninterrupted
    def reserve(self, nbytes: int, *, is_lasting: bool = False) -> Buffer:
        """Lease ``nbytes`` of the arena for the caller's own use; blocks and evicts as a lease does.

        Give it back with ``unreserve``. No caller waits for the end of one that ``is_lasting``. Raises
        CapacityError, DeadlineError, DeviceError.
        """
        self.check(writing=False)
        with self.mark:
            return self.room.reserve(nbytes, is_lasting=is_lasting)

    @uninterrupted
    def unreserve(self, buffer: Buffer) -> None:
        """Give back a buffer of ``reserve``; no tensor on it may be alive. Works after close as well."""
        with self.mark:
            self.room.unreserve(buffer)

    @uninterrupted
    def statistics(self) -> WorkingSetStatistics:
        """Return a snapshot."""
        with self.mark, self.condition:
            self.residents.drain()
            residents, write_back = self.residents, self.room.write_back
            return WorkingSetStatistics(
                budget_bytes=self.budget_bytes,
                arena_bytes=residents.arena.leased_nbytes,
                peak_bytes=residents.arena.peak_nbytes,
                resident_bytes=residents.resident_bytes,
                evictable_bytes=residents.clean_bytes,
                dirty_bytes=residents.dirty_bytes,
                writing_bytes=write_back.writing_bytes,
                orphan_bytes=residents.orphan_bytes,
                num_evictions=residents.num_evictions,
                num_leases=self.grants.num_leases,
                swaps=self.swap_in.statistics(write_back, self.streamed_in_bytes, self.streamed_out_bytes),
            )

    # Below: for the rest of the store

    @uninterrupted
    def delete(self, keys: Iterable[str]) -> None:
        """Drop ``keys`` and their bytes; a commit makes it durable. KeyError; LeaseError when leased for writing."""
        self.check(writing=True)
        for key in keys:
            with self.mark:
                self.deferred_seal.settle_for(key)
                with self.condition:
                    if not self.keys.remove(key):
                        raise KeyError(key)

    def _progress(self) -> object:
        return self.grants.num_leases, self.room.write_back.num_landed, self.records.commit_progress()

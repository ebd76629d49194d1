"""Residency: which tensors are in DRAM, and who may use them; the one part of this room that others see.

Leases are granted and end here, and keys come and go. The classes below it, each in a file of its own, are one object
with it, under the one lock of the store: memory_wait.py, swap_in_out.py, eviction.py, key_table.py, paged_rows.py.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Iterable, Mapping, Sequence
from threading import get_ident

import torch

from tiered.bytes.arena import Arena, Buffer
from tiered.bytes.condition import Condition
from tiered.bytes.device.base import IOClass
from tiered.errors import ClosedError, LeaseError
from tiered.stats import WorkingSetStatistics
from tiered.store.format.root import Root
from tiered.store.format.row import MAX_NUM_DIMS, Spec, is_kept
from tiered.store.residency.entry import Alias, Entry, EntryState, Granted, LeaseNeeds, Residence, tensor_over
from tiered.store.residency.memory_wait import Callbacks, MemoryWait
from tiered.store.residency.paged_rows import ReadPages
from tiered.store.space.space import Space
from tiered.store.transfers.checked_transfer import Transfer
from tiered.store.waiting.calling_thread import refuse_modes, this_thread
from tiered.store.waiting.deadline import Deadline
from tiered.store.waiting.refusals import Refusals

__all__ = ["Lease", "ReadPastError", "Residency"]


class Lease:
    """A leased tensor: ``tensor`` until ``release``. Made by ``Residency.lease``; the arena owns the bytes.

    The lease ends when its last tensor has died; until then its bytes stay counted. Dropping a lease without
    releasing it releases it.
    """

    __slots__ = ("_residency", "_tensor", "alias", "key", "mode")

    def __init__(self, residency: Residency, key: str, mode: str, alias: Alias, tensor: torch.Tensor) -> None:
        self.key = key
        self.mode = mode
        self._residency = residency
        self.alias = alias
        self._tensor: torch.Tensor | None = tensor

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor, typed and shaped as the record says, over bytes of the arena. Raises LeaseError once released."""
        if self._tensor is None:
            raise LeaseError(f"the lease of {self.key!r} was released; lease it again")
        return self._tensor

    @property
    def buffer(self) -> Buffer:
        """The buffer that has the bytes; for the holder of the lease."""
        return self.alias.residence.buffer

    def release(self, *, is_written: bool = False, is_unchanged: bool = False) -> bool:
        """Drop the lease's own reference; return whether the lease has ended (no other tensor is alive). Idempotent.

        ``is_written``: the holder knows that no living tensor writes, so that nothing needs to wait for its end.
        ``is_unchanged``: the holder of a lease for writing knows that the bytes are those it found; unless another
        tensor is alive they need not be written then.
        """
        return self._residency.released((self.end(),), is_written=is_written, is_unchanged=is_unchanged)

    def end(self) -> Alias:
        """Drop the lease's own reference; return the alias by which the working set knows the lease, for it alone."""
        self._tensor = None
        return self.alias

    def __repr__(self) -> str:
        state = "released" if self._tensor is None else "open"
        return f"Lease({self.key!r}, {self.mode!r}, {state})"


# -- residency ---------------------------------------------------------------------------------------------------------


class ReadPastError(Exception):
    """A lease was not granted: its bytes are not in DRAM, and the caller reads such bytes past DRAM."""


class Residency(MemoryWait):
    """Tensors in DRAM and on their way, within ``budget_bytes``. All methods are thread-safe.

    The invariant: *a tensor is always readable from at least one tier*. A failed write leaves it resident, a failed
    read gives its buffer back. Decisions are made under the one lock of the store; I/O is submitted without it.
    Every wait has a deadline and ends in DeadlineError; a failure in the background is raised by the next call.
    """

    def __init__(
        self,
        arena: Arena,
        space: Space,
        condition: Condition,
        root: Root,
        *,
        read_pages: ReadPages | None,
        durable: bool,
        deadline_s: float,
        refusals: Refusals,
        callbacks: Callbacks,
    ) -> None:
        """``condition`` is the store's one lock, ``root`` the last commit's; the store must keep ``callbacks``."""
        self.arena, self.space, self.condition, self.deadline_s = arena, space, condition, deadline_s
        self.durable, self.generation, self.next_key_id = durable, root.generation, root.next_key_id
        self.refusals, self.mark = refusals, refusals.mark
        self.check, self.refuse = refusals.check, refusals.refuse  # order: no call more than the refusal itself
        self.read_pages, self.callbacks = read_pages, weakref.ref(callbacks)
        self.is_ending = False  # later writes would be in no commit any more
        self._num_leases = 0
        super().__init__()

    # Below: leases

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
        if not is_kept(dtype):
            raise TypeError(f"create({key!r}): {dtype} is no dtype of dense tensors; expected torch.uint8")
        if len(spec.shape) > MAX_NUM_DIMS:
            raise TypeError(f"create({key!r}): expected at most {MAX_NUM_DIMS} dimensions, got {len(spec.shape)}")
        self.check(writing=True)
        with self.mark:
            self._await_seal_for(key, is_new=not scratch)
            with self.condition:
                scratch = scratch or not self.durable
                self.replace_entry(self.idle_entry(key, "replacement"), key, spec, scratch=scratch)

    def lease(self, key: str, mode: str) -> Lease:
        """Lease the tensor of ``key``: "r" shared, "rw" exclusive, "w" exclusive and undefined at first. Blocks.

        Swaps it in, making room by evicting clean entries, writing dirty ones, and asking the reclaimers. A lease
        for writing makes the key dirty. Bytes that a lingering lease still reads are copied, not overwritten.
        Raises KeyError, LeaseError (an unreleased lease conflicts), CapacityError, CorruptionError, DeviceError.
        """
        self.check(writing=mode != "r")
        refuse_modes("lease", key)
        with self.mark:
            lease = self._show(key, mode, self.obtain(key, mode))
            self.write_ahead()
        return lease

    def lease_anew(self, key: str) -> Lease:
        """Lease ``key``, a scratch key without bytes, for "w"; as ``lease``, but costs less where memory is free.

        For callers that nothing interrupts, inside of ``mark``.
        """
        self.check(writing=True)
        refuse_modes("lease", key)
        granted: Granted | None = None
        with self.condition:
            self.drain()
            entry = self.entries.get(key)
            is_new = entry is not None and entry.state is EntryState.UNDEFINED and not self.is_ending
            if entry is not None and is_new and not self.num_waiting and self.write_error is None:
                buffer = self.allocate_nowait(self.space.round_up(entry.nbytes))
                if buffer is not None:
                    granted = self._grant(entry, "w", buffer, is_brief=False)
        return self.lease(key, "w") if granted is None else self._show(key, "w", granted)

    def lease_for_update(self, keys: Sequence[str]) -> list[Lease]:
        """Lease each of ``keys`` for "rw", or none; other threads that want them wait for the end, and are not refused.

        The update must not need anything that a waiting thread holds. Blocks as ``lease``, with its errors. To be given
        back by ``end_update``, or one by one.
        """
        self.check(writing=True)
        refuse_modes("lease", keys[0])
        with self.mark:
            leases: list[Lease] = []
            try:
                for key in keys:
                    leases.append(self._show(key, "rw", self.obtain(key, "rw", is_brief=True)))
            except BaseException:
                for lease in leases:
                    lease.release(is_unchanged=True)
                raise
            self.write_ahead()
        return leases

    def end_update(self, leases: Iterable[Lease]) -> None:
        """Release leases of ``lease_for_update``; none of their tensors writes any more."""
        self.released([lease.end() for lease in leases], is_written=True)

    def released(self, aliases: Sequence[Alias], *, is_written: bool = False, is_unchanged: bool = False) -> bool:
        """Note that leases were released; return whether their last tensors have died. Works after close as well."""
        if not self._process.is_here:
            return True  # in a forked child there is nothing to give back
        if self.refusals.nested_calls.is_inside():
            return True  # a finalizer inside of a call: the death of the tensor says the same, and is noted soon
        with self.mark:
            with self.condition:
                unchanged = [alias for alias in aliases if is_unchanged and not alias.has_ended]  # order: others write
                have_ended = self.end_leases(aliases, is_written=is_written)
                for alias in unchanged:
                    if alias.has_ended:
                        self._make_clean(alias)
            self.write_ahead()
        return have_ended

    def drop_bytes(self, key: str, lease: Lease | None = None) -> None:
        """Drop the bytes of scratch ``key``, unwritten, and its device space; release ``lease``, which has them.

        The key stays. Bytes that a living tensor shows stay counted until it dies. Blocks while they are in flight.
        """
        alias = None if lease is None else lease.end()
        self.check(writing=True)
        with self.mark, self.condition:
            if alias is not None:
                self.end_leases((alias,), is_written=False)
                self._make_common(alias.residence)
            entry = self.idle_entry(key, "deletion")
            if entry is not None:
                self.drop(entry)
                self._hold(entry, False)
                self._empty(entry)

    def change_share(self, lease: Lease) -> None:
        """Count the bytes of ``lease``, which another thread has taken, in the bytes set aside."""
        with self.mark, self.condition:
            self._make_own(lease.alias.residence)

    def _show(self, key: str, mode: str, granted: Granted) -> Lease:
        """Make the tensor of a granted lease; an error ends the lease."""
        alias, spec, old = granted
        buffer = alias.residence.buffer
        flat: torch.Tensor | None = None
        try:
            if old is not None and mode == "rw":  # a reader still has the old bytes: this lease gets its own
                ctypes.memmove(buffer.address, old.buffer.address, spec.nbytes)
            # Order: the callback is no line of Python: an interrupt there would be lost, and the end with it.
            flat, alias.memory = buffer.alias(spec.nbytes, functools.partial(self.ended_leases.queue.put, alias))
            return Lease(self, key, mode, alias, tensor_over(flat, spec))
        except BaseException:
            if flat is None:
                self.report_end(alias)
            else:  # its own end is reported, once: when no frame of this error has it any more
                flat = None
                self.released([alias])
            raise
        finally:
            if old is not None:
                with self.condition:
                    self.unclaim(old)

    # Below: the grant of a lease

    def obtain(self, key: str, mode: str, *, most_nbytes: int | None = None, is_brief: bool = False) -> Granted:
        """Return a lease, its spec, and the claimed residence it must copy, if any; the tensor is the caller's to make.

        Blocks. ``is_brief``: see ``Eviction._open_lease``; a writer's is an update's, whose read holds no write back.
        ``most_nbytes`` are the most that are swapped in. Each turn of the loop finds the entry anew, under the lock, in
        one of these cases:

        1. There is no such key, a lease is in the way, or the bytes were never written: raise.
        2. A seal is pending that must not contain the write: wait for the seal.
        3. A transfer, a seal or another thread's update uses the bytes: wait, or start the read that nobody started.
        4. The bytes are in DRAM, and the lease can be granted on them: return it.
        5. The bytes are only on NVMe, and more than ``most_nbytes``, or this call's read has failed: raise.
        6. The lease needs memory, and there is none: make room.
        7. The lease needs memory alone, because it defines the bytes or must not write over a reader's: return it.
        8. The bytes are only on NVMe, and there is memory: claim the memory, and start the read.
        """
        deadline = Deadline(f"lease of {key!r} for {mode!r}", self.deadline_s)
        is_writer = mode != "r"
        io_class = IOClass.UPDATE if is_writer and is_brief else IOClass.DEMAND
        reading: Transfer | None = None  # the swap in that this call has started
        claim: Residence | None = None  # the residence it reads into: not to be evicted before it is leased here
        try:
            while True:
                if is_writer:
                    self._await_seal_for(key)
                with self.condition:
                    if self._starved and claim is None:
                        self._stand_back(deadline)
                    entry = self._find(key, is_writer=is_writer)
                    needs, buffer, transfer = entry.needs(mode), None, None  # case 1
                    if is_writer and self.must_await_seal and not entry.scratch:
                        continue  # case 2: deferred meanwhile, by another thread
                    if needs is LeaseNeeds.WAIT and (transfer := self._take_over(entry, io_class)) is None:
                        self.wait_for_entry(entry, deadline)  # case 3
                        continue
                    if claim is not None and needs in (LeaseNeeds.BUFFER, LeaseNeeds.SWAP_IN):
                        self.unclaim(claim)  # the key was replaced, or the read has failed
                        claim = None
                    if needs is LeaseNeeds.SWAP_IN:
                        _refuse_swap_in(entry, reading, most_nbytes)  # case 5
                    if needs in (LeaseNeeds.BUFFER, LeaseNeeds.SWAP_IN):
                        buffer = self.allocate_nowait(self.space.round_up(entry.nbytes), is_held=entry.held)
                    if needs is LeaseNeeds.NOTHING or (needs is LeaseNeeds.BUFFER and buffer is not None):
                        return self._grant(entry, mode, buffer, is_brief=is_brief)  # cases 4 and 7
                    if buffer is not None:  # case 8
                        claim = self.claim(self.admit(entry, buffer))
                        transfer = reading = self._swap_in(entry, claim, io_class)
                if transfer is not None:
                    transfer.start()
                elif claim is None:  # case 6
                    self._make_room(entry.nbytes, deadline, is_held=entry.held)
        finally:
            if claim is not None:
                with self.condition:
                    self.unclaim(claim)
            if self._starved:
                self._end_wait(deadline)

    def _grant(self, entry: Entry, mode: str, buffer: Buffer | None, *, is_brief: bool) -> Granted:
        old: Residence | None = None
        if buffer is not None:
            old = entry.residence
            if old is not None:
                self.claim(old)
            self.drop(entry)
            self.admit(entry, buffer)
        alias = self._open_lease(entry, is_writer=mode != "r", is_brief=is_brief)
        if mode != "r":
            self.touch(entry, alias)
            entry.state = EntryState.DIRTY
        self._num_leases += 1
        return alias, entry.spec, old

    def end_brief(self, alias: Alias) -> None:
        """End a brief lease for reading, over whose bytes no tensor was made."""
        with self.condition:
            self._end(alias)

    # Below: hints

    def prefetch(self, keys: Iterable[str], beside: Mapping[str, int] | None = None) -> int:
        """Start to swap in ``keys``, in order, up to the first that does not fit. A hint: never blocks on I/O.

        ``beside`` says how many bytes of the budget must stay free beside a key, for leases that come before its use.
        Returns how many bytes of them are resident or coming. Unknown keys and failures are passed over.
        """
        self.check(writing=False)
        names = list(keys)  # not under the lock: an iterator may ask the store
        with self.mark:
            return self._prefetch(names, beside or {})

    def swap_out(self, keys: Iterable[str]) -> None:
        """Start to write the dirty ones of ``keys``; make the clean ones the first candidates for eviction.

        Held keys and keys that are leased for writing are passed over. Does not wait for the writes.
        """
        self.check(writing=False)
        names = list(keys)
        with self.mark:
            with self.condition:
                self.drain()
                entries = [entry for key in names if (entry := self.entries.get(key)) and not entry.held]
                for entry in entries:
                    self._demote(entry)
            self.write(entries, sum(entry.nbytes for entry in entries))

    def release_hold(self, keys: Iterable[str]) -> None:
        """Make ``keys`` ordinary again. KeyError."""
        self.hold(keys, held=False)

    def hold(self, keys: Iterable[str], *, held: bool = True) -> None:
        """Keep ``keys`` resident for good once they are; they are written by commits only. KeyError."""
        names = list(keys)
        with self.mark, self.condition:
            for key in names:
                entry = self._find(key)
                self.withdraw(entry)
                self._hold(entry, held)
                self.offer(entry)

    # Below: keys

    def has(self, key: str) -> bool:
        """Whether ``key`` exists now. Takes no lock."""
        return key in self.entries  # order: ``get`` may change the table, which is for holders of the lock

    def has_bytes(self, key: str) -> bool:
        """Whether ``key`` exists and was written, or is leased to be. Takes no lock."""
        return self.entries.has_bytes(key)

    def version(self, key: str) -> int:
        """Return a number that the bytes of ``key`` share with none before them, whoever wrote; 0: unknown.

        Under a lease for reading it is that of the leased bytes. Takes no lock.
        """
        return self.entries.version(key)

    def is_resident(self, key: str) -> bool:
        """Whether the bytes of ``key`` are in DRAM, and can be leased for reading without a wait."""
        with self.condition:
            entry = self.entries.peek(key)
            residence = None if entry is None else entry.residence
            if entry is None or residence is None or residence.open_writers:
                return False
            return entry.state is not EntryState.ARRIVING

    def taken_by_keys(self, prefix: str) -> tuple[int, int]:
        """See ``KeyTable.taken_nbytes``."""
        with self.mark, self.condition:
            self.catch_up()
            return self.taken_nbytes(prefix)

    def taken_by_key(self, key: str) -> int:
        """Return what ``key`` takes of the files that the next commit after its deletion frees."""
        with self.mark, self.condition:
            entry = self.entries.peek(key)
            return 0 if entry is None else self._taken_by(entry)[1]

    def is_in_flight(self, key: str) -> bool:
        """Whether a transfer or a seal has a hold on the bytes of ``key``, so that a delete would wait."""
        with self.condition:
            entry = self.entries.get(key)
        return entry is not None and not entry.is_settled

    def delete(self, keys: Iterable[str]) -> None:
        """Drop ``keys`` and their bytes; a commit makes it durable. KeyError; LeaseError when leased for writing."""
        self.check(writing=True)
        for key in keys:
            with self.mark:
                self._await_seal_for(key)
                with self.condition:
                    if not self._remove(key):
                        raise KeyError(key)

    def statistics(self) -> WorkingSetStatistics:
        """Return a snapshot."""
        with self.mark, self.condition:
            self.drain()
            return WorkingSetStatistics(
                budget_bytes=self.budget_bytes,
                arena_bytes=self.arena.leased_nbytes,
                peak_bytes=self.arena.peak_nbytes,
                resident_bytes=self.resident_bytes,
                evictable_bytes=self.clean_bytes,
                dirty_bytes=self.dirty_bytes,
                writing_bytes=self.writing_bytes,
                orphan_bytes=sum(residence.buffer.nbytes for residence in self.orphans),
                num_evictions=self.num_evictions,
                num_leases=self._num_leases,
                swaps=self._swap_statistics(),
            )

    # Below: the entries of keys, under the lock, which those that wait give back

    def _find(self, key: str, *, is_writer: bool = False) -> Entry:
        """Return the entry of ``key``. KeyError; raises an error of the background, for a writer at the end, too."""
        self.catch_up()
        if is_writer:
            self.refuse_late()
        entry = self.entries.get(key)
        if entry is None:
            raise KeyError(key)
        return entry

    def idle_entry(self, key: str, operation: str) -> Entry | None:
        """Return the entry of ``key``, if there is one, with nothing in flight and no open lease for writing.

        Waits for transfers, and for another thread's update. For a caller about to change it: raises ClosedError once
        close() has fixed the bytes that it commits.
        """
        deadline: Deadline | None = None
        while True:
            self.catch_up()
            self.refuse_late()
            entry = self.entries.get(key)
            if entry is None:
                return None
            residence = entry.residence
            if residence is None or not residence.open_writers:
                if entry.is_settled:
                    return entry
            elif residence.updater in (None, this_thread()):
                raise LeaseError(f"{operation} of {key!r}, which is leased for writing; release the lease first")
            deadline = deadline or Deadline(f"{operation} of {key!r}", self.deadline_s)
            self.wait_for_entry(entry, deadline)

    def replace_entry(
        self, old: Entry | None, key: str, spec: Spec, *, scratch: bool, key_id: int | None = None
    ) -> Entry:
        """Return a new UNDEFINED entry for ``key`` in the place of ``old``, which is from ``idle_entry``."""
        if old is not None:
            self._remove_entry(old)
        entry = self.add(key, spec, scratch=scratch, key_id=key_id)
        self._hold(entry, old is not None and old.held)
        return entry

    def _remove(self, key: str) -> bool:
        """Drop ``key`` and its bytes, once nothing is in flight; return whether there was one."""
        entry = self.idle_entry(key, "deletion")
        if entry is not None:
            self._remove_entry(entry)
        return entry is not None

    def _remove_entry(self, entry: Entry) -> None:
        self._take_out(entry)
        self.drop(entry)
        if entry.held:  # a replaced entry says that it was
            self.held_bytes -= self.space.round_up(entry.nbytes)

    def roll_back(self) -> None:
        """Return to the last sealed generation; no commit runs and all changed entries are settled."""
        self.write_error = None  # of bytes that are given up now
        for entry in self._roll_back_rows():
            self.drop(entry)
        # Order: counted anew, since some entries are gone and others back.
        self.held_bytes = sum(self.space.round_up(entry.nbytes) for entry in self.entries.used() if entry.held)

    def refuse_late(self) -> None:
        """Raise ClosedError once close() has fixed the bytes that it commits."""
        if self.is_ending:
            raise ClosedError("the store is being closed: its contents are committed, and nothing more can be written")

    # Below: the deferred seal

    def await_seal(self) -> None:
        """Wait until no seal is pending, before a change of the contents of commits; not under the lock.

        The producer's thread does not wait. The thread that committed serves it meanwhile, and gets its error. Other
        threads cannot serve it with memory: they wait, with a deadline, and go on whether or not it failed. Raises the
        error of the producer or of the seal; DeadlineError.
        """
        producer = self._producer
        if producer is None and self._failed is not None:
            producer = self._failed()
        if producer is None or producer.is_this_thread():
            return
        if self._thread == get_ident():
            self._failed = None  # it is raised here, or was by the producer
            producer.finish_all()
            self._end_seal()  # of a seal that an interrupt kept from being handed over
            return
        deadline = Deadline(f"seal of generation {self._deferred_generation}", self.deadline_s)
        with self.condition:
            while self._producer is not None:
                progress = self._num_leases, self.space.progress.num_blocks, self.commit_progress()
                deadline.wait(self.condition, progress, at_most_s=self.deadline_s / 8)

    def _await_seal_for(self, key: str, *, is_new: bool = False) -> None:
        """Await the seal before a change of ``key``, unless no commit contains it, nor will as ``is_new``."""
        if self.must_await_seal or self._failed is not None:
            with self.condition:
                entry = self.entries.get(key)
            if is_new or (entry is not None and not entry.scratch):
                self.await_seal()


def _refuse_swap_in(entry: Entry, reading: Transfer | None, most_nbytes: int | None) -> None:
    """Raise where the bytes of ``entry`` were read in vain, or are to be read past DRAM."""
    if reading is not None and reading.error is not None:
        raise reading.error
    if most_nbytes is not None and entry.nbytes > most_nbytes:
        raise ReadPastError

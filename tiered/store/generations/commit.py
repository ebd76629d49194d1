"""Commit: seal the contents of a generation, bring them to the devices, name them in the catalog; and the way back.

The order that makes it atomic: the generation is proposed to all that have a part in it, and sealed where none refuses;
all writes landed and checked, every device flushed, one catalog transaction, the generation confirmed by all, and only
then are the superseded extents free.
A record in the user's own files is read for its first commit, unless it was read as a whole before. The caller of the
commit reads it, before anything is sealed: it may take long, and what keeps it from its end costs no generation.
Whether a file was changed is asked behind all reads, those of leases too.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace

from tiered.bytes.arena import Buffer
from tiered.bytes.critical_section import ServiceThread
from tiered.bytes.device.base import IOClass
from tiered.errors import CapacityError, DeviceError, LeaseError, UsageError
from tiered.store.catalog.catalog import Confirmation, GenerationName
from tiered.store.catalog.sqlite_catalog import SqliteCatalog
from tiered.store.format.root import Root
from tiered.store.format.row import Row
from tiered.store.lifetime.external import ExternalSources
from tiered.store.lifetime.opening import Parts
from tiered.store.residency.entry import Entry, EntryState
from tiered.store.residency.key_table import Sealed
from tiered.store.residency.paged_rows import hand_out_pages, look_up_pages
from tiered.store.residency.residency import Residency
from tiered.store.residency.swap_in_out import Shortage
from tiered.store.transfers.checked_transfer import Transfer, start_all
from tiered.store.values.streaming import slab_jobs, slab_transfer
from tiered.store.values.window import OnDone, Window
from tiered.store.waiting.calling_thread import this_thread
from tiered.store.waiting.deadline import Deadline
from tiered.store.waiting.deferred_seal import Producer
from tiered.store.waiting.recorder import Wait
from tiered.units import MiB

__all__ = ["Attempt", "Committer", "are_known", "find_digests"]


_log = logging.getLogger("tiered")


def are_known(working_set: Residency, known: Mapping[Entry, Row]) -> bool:
    """Whether ``known`` has all changed rows in external files, also those copied since, as now; under the lock."""
    changed = _changed(working_set)
    return all(known.get(entry) is row for entry, row in changed.items())


def _changed(working_set: Residency) -> dict[Entry, Row]:
    rows = ((entry, entry.row) for entry in working_set.changed)
    return working_set.copied | {entry: row for entry, row in rows if row is not None and row.ranges}


def find_digests(working_set: Residency, external: ExternalSources) -> dict[Entry, Row]:
    """Read what changed since the last commit and lacks digests; blocks. CorruptionError, DeviceError, CapacityError.

    Returns the changed rows in external files, with the digests of the files as they were opened, and those of keys
    that have bytes of their own by now. Raises UsageError where a file was changed since then: what was read of it,
    here, by a lease or by the write of a part, may be another's bytes; and where a record, an old one too, lies in a
    file that has lost its name: the next open would not find it.
    """
    if external.device is None:
        return {}
    _refuse_lost(working_set, external.lost())
    while True:
        with working_set.condition:
            working_set.take_learned()
            found = _changed(working_set)
            missing = {entry: row for entry, row in found.items() if not row.digests and entry.row is row}
        what = external.changed() if found else None  # order: after the last read of what is returned
        if what is not None:
            raise UsageError(f"an external file was changed while the store was open: {what}; open the store again")
        if not missing:
            return found
        for entry, row in missing.items():
            _read(working_set, entry, row)


def _refuse_lost(working_set: Residency, lost: Mapping[int, str]) -> None:
    """Raise UsageError for a record in one of the ``lost`` files."""
    with working_set.condition:
        entries = working_set.entries
        rows = [entry.row for entry in map(entries.peek, entries) if entry is not None] if lost else []
    for row in rows:
        for each in () if row is None else row.ranges:
            if row is not None and each.file in lost:
                raise UsageError(
                    f"{row.name!r} lies in an external file that has lost its name, and the store could not be opened"
                    f" again: {lost[each.file]}. Move that file back and commit again; or copy its bytes to a file,"
                    " close() the store with commit=False, and open it with that file in external=[...]"
                )


def _read(working_set: Residency, entry: Entry, row: Row) -> None:
    digests: list[bytes] = []

    def read(slab: int, buffer: Buffer, on_done: OnDone) -> Iterator[Transfer]:
        transfer = slab_transfer(working_set.space, row, slab, buffer, IOClass.PREFETCH, on_done)
        yield transfer
        transfer.raise_error()
        digests.append(bytes(transfer.digests))  # in order, as the window finishes its jobs

    with Window(working_set) as window:
        window.run(slab_jobs(row, read))
    with working_set.condition:
        working_set.learn_digests(entry, row, b"".join(digests))


# -- commit ------------------------------------------------------------------------------------------------------------


_MAX_NUM_WRITING = 64  # writes a commit keeps in flight: enough for any drive, few enough to keep demand reads quick
_MAX_WRITING_BYTES = 256 * MiB


class Attempt:
    """One attempt at the next generation: proposed to all that share the store, then sealed or called off.

    As a block, it is called off by an error that leaves the block. One thread at a time.
    """

    __slots__ = ("_confirmation", "_is_over", "_steps", "_working_set", "name")

    def __init__(self, confirmation: Confirmation, working_set: Residency, steps: Mapping[str, int]) -> None:
        self.name: GenerationName | None = None  # once all have agreed
        self._confirmation = confirmation
        self._working_set = working_set
        self._steps = steps
        self._is_over = False  # all know that there will be no such generation

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self.call_off(error)

    def propose(self) -> GenerationName:
        """Agree with all on the generation's name, and return it; blocks. See ``Confirmation.propose``. Idempotent."""
        if self.name is None:
            self._is_over = True  # order: an error of this call is everybody's
            number = self._working_set.open_generation
            self.name = GenerationName(number, self._confirmation.propose(number, self._steps, ""))
            self._is_over = False
        return self.name

    def call_off(self, error: BaseException) -> None:
        """Tell all that this store does not seal, because of ``error``; what all raise then comes in its place."""
        if self._is_over:
            return
        self._is_over = True
        if self.name is not None:
            self._confirmation.failed(self.name.number, error)
        elif isinstance(error, Exception):
            number = self._working_set.open_generation
            self._confirmation.propose(number, self._steps, f"{type(error).__name__}: {error}")


class Committer:
    """Takes a store from one generation to the next, one commit at a time.

    The flush runs in a thread that ends with it, so a caller may wait or go on. After a failure there nothing can be
    written any more: ``Refusals`` refuses, and reopening the store decides which generation it holds.
    """

    def __init__(self, working_set: Residency, parts: Parts, catalog: SqliteCatalog, root: Root) -> None:
        self.root = root  # the last committed generation's
        self.num_commits = 0
        self.catalog_write_bytes = 0
        self._working_set = working_set
        self._condition = working_set.condition
        self._catalog = catalog
        self._parts = parts
        self._confirmation = parts.confirmation
        self._external = parts.external
        self._thread: threading.Thread | None = None

    def measure(self, state: str) -> None:
        """Raise CapacityError for a ``state`` that the catalog would refuse after the seal."""
        self._catalog.measure(replace(self.root, state=state, external=self._external.files))

    def attempt(self, steps: Mapping[str, int]) -> Attempt:
        """Return the attempt at the next generation; ``steps``: see ``Confirmation.propose``."""
        return Attempt(self._confirmation, self._working_set, steps)

    def start(self, state: str, attempt: Attempt, *, is_last: bool = False) -> int:
        """Seal the open generation, with ``state`` riding along, and start to flush it; return its number.

        ``is_last``: the store closes. An earlier error of a write-back then does not keep the commit from happening.
        Blocks while another commit runs. Raises LeaseError while a key is leased for writing or such a lease lingers,
        CapacityError when the devices lack space, ClosedError after the last one, and what all that share the store
        refuse together: then nothing is sealed.
        """
        while True:
            self.wait()
            # Order: before anything is sealed, and without the lock.
            known = find_digests(self._working_set, self._external)
            with self._condition:
                if is_last:
                    self._working_set.forget_failure()
                else:
                    self._working_set.refuse_late()
                self._working_set.catch_up()
                if self._working_set.sealed is not None:  # another thread's; it came first
                    continue
                begun = self._working_set.recorder.begin(on_device=False)
                if self._refuse_writers("commit", lingering=True):
                    continue
                if self._external.device is not None and not are_known(self._working_set, known):
                    continue  # adopted meanwhile
                missing = self._take_targets()
                if not missing and (attempt.name is not None or not self._confirmation.keeps_before):
                    name = attempt.propose()  # alone; or the name that all have agreed on
                    assert name.number == self._working_set.open_generation, name
                    sealed = self._working_set.seal(state)
                    sealed.nonce = name.nonce
                    self._thread = sealed.thread = self._start_thread(sealed)
                    self._working_set.is_ending |= is_last
                    break
            if missing:
                self._working_set.grow(Shortage(missing, scratch=False))
            else:
                attempt.propose()  # order: without the lock, and once this store has nothing to refuse for
        self._working_set.recorder.worked("seal", f"generation {sealed.generation}", begun)
        if sealed.thread is None:
            self._finish(sealed)
        return sealed.generation

    def _start_thread(self, sealed: Sealed) -> ServiceThread | None:
        """Start the thread that flushes ``sealed`` once it gets the lock; None where there can be none."""
        # A thread of its own, not a daemon: the interpreter waits for it, and no call can interrupt it.
        thread = ServiceThread(target=self._finish, args=(sealed,), name="tiered-commit")
        try:
            thread.start()
        except CapacityError:
            return None
        return thread

    def defer(self, seal: Callable[[], object], producer: Producer, attempt: Attempt) -> int:
        """Have ``seal``, which calls ``start``, called at the end of the pending work of ``producer``.

        Returns the number that the generation will have, 0 where nothing is pending. Raises LeaseError while a key that
        is not the producer's is leased for writing or such a lease lingers, and what ``Attempt.propose`` raises: then
        nothing will be sealed.
        """
        keys = producer.pending_keys()  # order: without the lock
        while True:
            with self._condition:
                self._working_set.catch_up()
                while self._refuse_writers("commit", lingering=True, but=keys):
                    pass
                if attempt.name is not None or not self._confirmation.keeps_before:
                    number = attempt.propose().number  # alone; or the number that all have agreed on
                    self._working_set.announce_seal(producer, number)
                    break
            attempt.propose()  # order: without the lock, and once this store has nothing to refuse for
        return number if self._working_set.hand_over_seal(seal, attempt.call_off) else 0

    def wait(self) -> None:
        """Wait until no commit runs, successful or not. Raises DeadlineError."""
        deadline = Deadline("completion of the running commit", self._working_set.deadline_s)
        begun = self._working_set.recorder.begin()
        with self._condition:
            is_waiting = self._is_running()
            while self._is_running():
                deadline.wait(self._condition, self._working_set.commit_progress())
            thread = self._thread
        if is_waiting:
            self._working_set.recorder.waited(Wait.COMMIT, "", begun)
        if thread is not None:
            thread.join()  # it has nothing left to do

    def _is_running(self) -> bool:
        is_ended = self._working_set.refusals.has_failed or self._working_set.mark.reason
        return self._working_set.sealed is not None and not is_ended

    def roll_back(self) -> None:
        """Return to the last sealed generation, without I/O. Raises LeaseError while a key is leased for writing."""
        self.wait()
        deadline = Deadline("rollback", self._working_set.deadline_s)
        with self._condition:
            while True:
                self._working_set.drain()
                self._working_set.refuse()
                if self._refuse_writers("rollback", lingering=False):
                    continue
                busy = next((entry for entry in self._working_set.unsealed() if not entry.is_settled), None)
                if busy is None:
                    break
                self._working_set.wait_for_entry(busy, deadline)
            self._working_set.roll_back()

    def _refuse_writers(self, operation: str, *, lingering: bool, but: Collection[str] = ()) -> bool:
        """Raise LeaseError for a key that is leased for writing; return whether another thread's update has ended."""
        held = [(entry, entry.residence) for entry in self._working_set.unsealed() if entry.name not in but]
        leased = []
        for entry, residence in held:
            if residence is None or not (residence.writers if lingering else residence.open_writers):
                continue
            if residence.updater not in (None, this_thread()):
                self._working_set.wait_for_entry(entry, Deadline(operation, self._working_set.deadline_s))
                return True
            leased.append(entry.name)
        if leased:
            names = ", ".join(map(repr, leased[:5])) + (", ..." if len(leased) > 5 else "")
            raise LeaseError(
                f"{operation} while {names} {'is' if len(leased) == 1 else 'are'} leased for writing, or tensors of "
                "such a lease are alive; release them first"
            )
        return False

    def _take_targets(self) -> int:
        """Give every changed entry that has not landed the extents for it; return how many bytes are missing."""
        missing = 0
        working_set = self._working_set
        for entry in list(working_set.changed):
            if entry.row is not None:
                continue
            if entry.is_inline:
                self._working_set.land_inline(entry)
            elif entry.state is EntryState.DIRTY and working_set.take_target(entry) is None:
                missing += self._working_set.space.round_up(entry.nbytes)
        return missing

    # Below: the flush, in its own thread, or in the caller's where none can be started

    def _finish(self, sealed: Sealed) -> None:
        recorder, subject = self._working_set.recorder, f"generation {sealed.generation}"
        is_durable = False
        try:
            self._write(sealed)
            begun = recorder.begin(on_device=False)
            self._working_set.space.flush()
            self._parts.check_locks()
            self._working_set.mark.refuse()
            recorder.worked("flush", subject, begun)
            sealed.phase += 1
            root = replace(
                self.root,
                generation=sealed.generation,
                next_key_id=self._working_set.next_key_id,
                state=sealed.state,
                nonce=sealed.nonce,
                external=self._external.files,
            )
            self._hand_out_pages(sealed)
            begun = recorder.begin(on_device=False)
            written = _written_nbytes()
            rows, removed = list(sealed.rows.values()), [entry.key_id for entry in sealed.removed]
            self._catalog.apply(root, rows, removed, keeps_before=self._confirmation.keeps_before)
            self.catalog_write_bytes += _written_nbytes() - written
            sealed.phase += 1
            is_durable = True
            # Order: until this returns, the sealed set and the one before stay as they are, and no key takes a third.
            name = GenerationName(root.generation, root.nonce)
            self._confirmation.confirm(name, functools.partial(_note_wait, sealed))
            recorder.worked("commit", subject, begun)
        except BaseException as error:  # of any kind: it must reach the caller
            self._fail(sealed, error, is_durable=is_durable)
            return
        with self._condition:
            self._working_set.committed()  # Order: only now may the superseded extents be reused
            self.root = root
            self.num_commits += 1
            self._condition.notify_all()
        self._working_set.space.give_up_deleted()
        self._parts.ledgers.note_commit(self.catalog_write_bytes)

    def _hand_out_pages(self, sealed: Sealed) -> None:
        """Have whoever reads rows with pages keep those that the catalog is about to lose. May block for reads."""
        with self._condition:
            replaced = self._working_set.begin_to_apply()
        if replaced:
            found = look_up_pages(replaced)
            with self._condition:
                sealed.freed = hand_out_pages(replaced, found)

    def _write(self, sealed: Sealed) -> None:
        """Write the sealed entries that have not landed; wait until they have."""
        working_set = self._working_set
        deadline = Deadline(f"commit of generation {sealed.generation}", self._working_set.deadline_s)
        while True:
            with self._condition:
                self._working_set.mark.refuse()
                if working_set.sealed_error is not None:
                    raise working_set.sealed_error
                if not sealed.num_pending:
                    sealed.phase += 1
                    return
                batch: list[Entry] = []
                nbytes = working_set.writing_bytes
                while sealed.to_write and nbytes < _MAX_WRITING_BYTES:
                    if working_set.num_writing + len(batch) >= _MAX_NUM_WRITING:
                        break
                    batch.append(sealed.to_write.popleft())
                    nbytes += batch[-1].nbytes
                transfers, _ = working_set.plan_writes([entry for entry in batch if entry.is_pending], max(1, nbytes))
                if not transfers and not batch:
                    deadline.wait(self._condition, self._working_set.commit_progress())
            start_all(transfers)

    def _fail(self, sealed: Sealed, error: BaseException, *, is_durable: bool) -> None:
        if not isinstance(error, Exception):
            error = DeviceError(f"the commit was interrupted: {error!r}")
        fate = "is durable here, but not confirmed by all that share the store" if is_durable else "was not committed"
        _log.error("generation %d %s: %s", sealed.generation, fate, error)
        with self._condition:
            self._working_set.refusals.fail(error, f"generation {sealed.generation} {fate}")
            self._condition.notify_all()
        if not is_durable:
            self._confirmation.failed(sealed.generation, error)  # order: this store's own callers know by now


def _note_wait(sealed: Sealed) -> None:
    """Others are waited for: who waits for the commit goes on to wait."""
    sealed.phase += 1


def _written_nbytes() -> int:
    """Return the bytes that this thread has made the system write so far; 0 where it does not tell."""
    try:
        with open("/proc/thread-self/io", encoding="ascii") as lines:
            return next(int(line.split()[1]) for line in lines if line.startswith("write_bytes:"))
    except (OSError, StopIteration):
        return 0

"""Seeded bugs: each takes one safeguard out of the real code, and names the check that must see it."""

from __future__ import annotations

import dataclasses
import fcntl
import inspect
import os
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.bytes import test_files
from tests.store import checks
from tests.store.simulated_catalog import SimulatedCatalog
from tests.store.test_external import saved
from tiered.bytes.device.base import Device
from tiered.bytes.device.files import DataFiles
from tiered.bytes.device.queue import InFlight
from tiered.errors import DeviceError
from tiered.store.catalog import sqlite_catalog as catalog_module
from tiered.store.catalog import sqlite_catalog as new_file_module
from tiered.store.catalog.catalog import Confirmation, GenerationName
from tiered.store.catalog.transaction import CatalogTransaction, discard_newest
from tiered.store.format import committed_rows, root
from tiered.store.generations.commit import Committer
from tiered.store.lifetime import directory, lock
from tiered.store.residency.entry import Entry
from tiered.store.residency.key_table import Extents, KeyTable, Sealed
from tiered.store.space.space import Space
from tiered.store.store import Store
from tiered.store.transfers.checked_transfer import Transfer
from tiered.store.waiting import deadline
from tiered.store.waiting.deadline import Deadline
from tiered.store.waiting.refusals import Refusals

Patch = pytest.MonkeyPatch
Check = Callable[..., object]

KILLERS: dict[str, Check] = {}  # the name of a mutant -> the check that must see it
MUTANTS: dict[str, Callable[[Patch], None]] = {}


def mutant(killer: Check) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    """Note a patch, by its name, with the check that must see it."""

    def note(patch: Callable[[Patch], None]) -> Callable[[Patch], None]:
        KILLERS[patch.__name__], MUTANTS[patch.__name__] = killer, patch
        return patch

    return note


def run_check(check: Check, directory: Path) -> None:
    """Call ``check`` with what it asks for; it raises where it sees something."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        offered: dict[str, Any] = {"tmp_path": directory, "monkeypatch": monkeypatch, "umask": 0o777, "policy": "keep"}
        wanted = inspect.signature(check).parameters
        if "base" in wanted:
            offered["base"] = saved(directory)
        check(**{name: offered[name] for name in wanted})


# -- commits: what the campaign must see ---------------------------------------------------------------------------


@mutant(checks.no_crash_state_is_wrong)
def only_the_first_directory_is_flushed(patch: Patch) -> None:
    patch.setattr(Space, "flush", lambda space: space.devices[0].flush())


@mutant(checks.no_crash_state_is_wrong)
def data_is_flushed_before_it_is_written(patch: Patch) -> None:
    write, flush = Committer._write, Space.flush
    patch.setattr(Space, "flush", lambda space: None)

    def flush_then_write(committer: Committer, sealed: Sealed) -> None:
        flush(committer._working_set.space)
        write(committer, sealed)

    patch.setattr(Committer, "_write", flush_then_write)


@mutant(checks.no_crash_state_is_wrong)
def the_catalog_comes_before_the_data(patch: Patch) -> None:
    apply, flushed = SimulatedCatalog.apply, list[Space]()
    flush = Space.flush
    patch.setattr(Space, "flush", flushed.append)

    def apply_then_flush(catalog: SimulatedCatalog, *arguments: Any, **options: Any) -> None:
        apply(catalog, *arguments, **options)
        flush(flushed.pop())

    patch.setattr(SimulatedCatalog, "apply", apply_then_flush)


@mutant(checks.no_crash_state_is_wrong)
def committed_bytes_are_overwritten(patch: Patch) -> None:
    take_target, give_back = KeyTable.take_target, Space.give_back
    in_place: set[Extents] = set()

    def take_committed(records: KeyTable, entry: Entry) -> Extents | None:
        if entry.landing is None and not entry.is_pending and entry.committed is not None and entry.committed.extents:
            entry.landing = entry.committed.extents
            in_place.add(entry.landing)
        return take_target(records, entry)

    def give_back_others(space: Space, extents: Extents) -> None:
        if extents not in in_place:
            give_back(space, extents)

    patch.setattr(KeyTable, "take_target", take_committed)
    patch.setattr(Space, "give_back", give_back_others)


@mutant(checks.superseded_bytes_stay_until_the_commit_is_durable)
def superseded_extents_are_reused_before_the_commit(patch: Patch) -> None:
    seal, give_back = KeyTable.seal, Space.give_back

    def seal_and_free(records: KeyTable, state: str) -> Sealed:
        sealed = seal(records, state)
        for entry in (*sealed.rows, *sealed.targets):
            if entry.committed is not None:
                give_back(records.space, entry.committed.extents)
                entry.committed = dataclasses.replace(entry.committed, extents=())  # nothing is left to free later
        return sealed

    patch.setattr(KeyTable, "seal", seal_and_free)


@mutant(checks.no_crash_state_is_wrong)
def a_commit_is_acknowledged_before_it_is_durable(patch: Patch) -> None:
    patch.setattr(Store, "wait_for_commit", lambda store: None)


@mutant(checks.no_crash_state_is_wrong)
def extents_in_use_are_not_claimed_at_open(patch: Patch) -> None:
    patch.setattr(KeyTable, "load", lambda records, loaded: records.entries.fill(loaded))


@mutant(checks.no_crash_state_is_wrong)
def superseded_extents_are_never_freed(patch: Patch) -> None:
    patch.setattr(Space, "give_back", lambda space, extents: None)


@mutant(checks.no_crash_state_is_wrong)
def deletions_are_left_out_of_the_commit(patch: Patch) -> None:
    apply = SimulatedCatalog.apply

    def apply_without(catalog: SimulatedCatalog, root: Any, upserts: Any, deleted: Any, **options: bool) -> None:
        apply(catalog, root, upserts, [], **options)

    patch.setattr(SimulatedCatalog, "apply", apply_without)


# -- two generations side by side ----------------------------------------------------------------------------------


class _Instead:
    """The confirmation of a store, with another ``confirm``."""

    def __init__(self, confirmation: Confirmation, confirm: Callable[[GenerationName, Any], None]) -> None:
        self.keeps_before, self.member = confirmation.keeps_before, confirmation.member
        self.choose, self.propose, self.failed = confirmation.choose, confirmation.propose, confirmation.failed
        self.join, self.is_to_commit_at_end = confirmation.join, confirmation.is_to_commit_at_end
        self.confirm = confirm


def _confirm_instead(patch: Patch, confirm: Callable[[Committer, Confirmation, GenerationName], None]) -> None:
    make = Committer.__init__

    def make_with(committer: Committer, *arguments: Any) -> None:
        make(committer, *arguments)
        real = committer._confirmation
        committer._confirmation = _Instead(real, lambda generation, _: confirm(committer, real, generation))

    patch.setattr(Committer, "__init__", make_with)


@mutant(checks.superseded_bytes_stay_until_the_generation_is_confirmed)
def a_commit_is_not_confirmed(patch: Patch) -> None:
    _confirm_instead(patch, lambda committer, real, generation: None)


def _free_and_confirm(committer: Committer, real: Confirmation, generation: GenerationName) -> None:
    records = committer._working_set
    assert records.sealed is not None
    with committer._condition:
        for entry in (*records.sealed.rows, *records.sealed.removed):
            if entry.committed is not None:
                records.space.give_back(entry.committed.extents)
                entry.committed = dataclasses.replace(entry.committed, extents=())  # nothing is left to free later
    real.confirm(generation, bool)


@mutant(checks.superseded_bytes_stay_until_the_generation_is_confirmed)
def superseded_extents_are_reused_before_the_confirmation(patch: Patch) -> None:
    _confirm_instead(patch, _free_and_confirm)


def _keep_nothing(patch: Patch, catalog: type) -> None:
    apply = catalog.apply  # type: ignore[attr-defined]

    def apply_alone(catalog: Any, *arguments: Any, keeps_before: bool = False) -> None:
        apply(catalog, *arguments)

    patch.setattr(catalog, "apply", apply_alone)


@mutant(checks.a_generation_given_up_leaves_the_one_before)
def the_generation_before_is_not_kept_in_the_file(patch: Patch) -> None:
    _keep_nothing(patch, catalog_module.SqliteCatalog)


@mutant(checks.a_generation_given_up_leaves_the_one_before)
def replaced_rows_are_not_kept(patch: Patch) -> None:
    patch.setattr(CatalogTransaction, "_keep_row", lambda transaction, key_id: None)


@mutant(checks.a_generation_given_up_leaves_the_one_before)
def a_discard_leaves_the_added_rows(patch: Patch) -> None:
    def discard(connection: sqlite3.Connection) -> None:
        connection.execute("DELETE FROM records_before WHERE length(body) = 0")
        discard_newest(connection)

    patch.setattr(catalog_module, "discard_newest", discard)


@mutant(checks.no_crash_state_is_wrong)
def the_newest_generation_is_discarded_by_the_next_commit(patch: Patch) -> None:
    apply, discard, given_up = SimulatedCatalog.apply, SimulatedCatalog.discard, list[SimulatedCatalog]()
    patch.setattr(SimulatedCatalog, "discard", given_up.append)

    def discard_and_apply(catalog: SimulatedCatalog, *arguments: Any, **options: bool) -> None:
        if catalog in given_up:
            given_up.remove(catalog)
            discard(catalog)
        apply(catalog, *arguments, **options)

    patch.setattr(SimulatedCatalog, "apply", discard_and_apply)


# -- results: what must not be passed over -------------------------------------------------------------------------


@mutant(checks.a_flipped_byte_is_found)
def digests_are_not_checked(patch: Patch) -> None:
    patch.setattr(Transfer, "_check", lambda transfer, block: None)


def _without_error(patch: Patch, *, of_writes: bool) -> None:
    piece_done = Transfer._piece_done

    def forget(transfer: Transfer, block: int, piece: Any, operation: Any) -> None:
        if operation.is_write == of_writes:
            operation.error = None
        piece_done(transfer, block, piece, operation)

    patch.setattr(Transfer, "_piece_done", forget)


@mutant(checks.a_write_that_fails_fails_the_commit)
def the_result_of_a_write_is_not_read(patch: Patch) -> None:
    _without_error(patch, of_writes=True)


@mutant(checks.a_read_that_fails_says_so)
def the_result_of_a_read_is_not_read(patch: Patch) -> None:
    _without_error(patch, of_writes=False)


@mutant(checks.a_short_transfer_goes_on)
def a_short_transfer_counts_as_whole(patch: Patch) -> None:
    patch.setattr(InFlight, "advance", lambda flight, *arguments: True)


@mutant(checks.a_flush_that_fails_fails_the_commit)
def the_result_of_a_flush_is_not_read(patch: Patch) -> None:
    def flush(space: Space) -> None:
        for device in space.devices:
            try:
                device.flush()
            except DeviceError:
                pass

    patch.setattr(Space, "flush", flush)


@mutant(test_files.test_a_failed_flush_poisons_the_device)
def a_failed_flush_is_tried_again(patch: Patch) -> None:
    flush = DataFiles.flush

    def flush_and_forget(files: DataFiles, fdatasync: Callable[[int], None]) -> None:
        files._flush_error = None
        flush(files, fdatasync)

    patch.setattr(DataFiles, "flush", flush_and_forget)


@mutant(checks.a_failed_commit_is_the_end)
def a_store_goes_on_after_a_failed_commit(patch: Patch) -> None:
    patch.setattr(Refusals, "refuse", lambda refusals: None)


@mutant(checks.nobody_writes_again_where_a_write_failed)
def an_extent_that_failed_is_used_again(patch: Patch) -> None:
    def free(records: KeyTable, entry: Entry, extents: Extents) -> None:
        records.space.give_back(extents)
        if entry.landing == extents:
            entry.landing = None

    patch.setattr(KeyTable, "lost_target", free)


@mutant(checks.a_wait_ends_with_the_deadline)
def a_wait_has_no_deadline(patch: Patch) -> None:
    patch.setattr(Deadline, "check", lambda waited, progress=None: deadline.time.monotonic())


# -- files: fsyncs, names, permissions, locks ----------------------------------------------------------------------


class _WithoutFsync:
    """The module ``os``, whose fsync does nothing."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def fsync(self, descriptor: int) -> None:
        pass


@mutant(checks.every_directory_is_flushed_before_the_catalog)
def only_the_files_of_the_first_directory_are_synced(patch: Patch) -> None:
    def flush(space: Space) -> None:
        first: Device = space.devices[0]
        first.flush()

    patch.setattr(Space, "flush", flush)


@mutant(test_files.test_a_flush_makes_the_name_of_a_new_file_durable)
def the_name_of_a_new_data_file_is_not_synced(patch: Patch) -> None:
    create = DataFiles._create

    def create_and_forget(files: DataFiles, file: int, nbytes: int) -> None:
        create(files, file, nbytes)
        files._directory_is_dirty = False

    patch.setattr(DataFiles, "_create", create_and_forget)


@mutant(checks.creation_is_durable_name_by_name)
def the_name_of_a_new_catalog_is_not_synced(patch: Patch) -> None:
    patch.setattr(new_file_module, "fsync_directory", lambda path: None)


@mutant(checks.creation_is_durable_name_by_name)
def an_identity_is_not_synced(patch: Patch) -> None:
    patch.setattr(directory, "os", _WithoutFsync())


@mutant(checks.a_catalog_that_cannot_be_flushed_fails_the_commit)
def the_catalog_is_not_synchronous(patch: Patch) -> None:
    def make(connection: sqlite3.Connection) -> None:
        connection.execute("PRAGMA synchronous=OFF")
        connection.execute("PRAGMA journal_mode=TRUNCATE")

    patch.setattr(catalog_module, "make_durable", make)


@mutant(checks.opening_settles_the_journal)
def the_end_of_the_journal_is_not_made_durable(patch: Patch) -> None:
    patch.setattr(catalog_module, "settle_journal", lambda path: None)


@mutant(checks.a_lost_row_is_found)
def rows_are_not_counted(patch: Patch) -> None:
    decode = committed_rows.CommittedRows.decode.__func__  # type: ignore[attr-defined]

    def decode_any(kind: type, raw: Sequence[Any], header: root.RootHeader, file: str, **options: Any) -> object:
        found = list(raw)
        total = sum(int.from_bytes(digest, "little") for _, _, digest in found)
        header = dataclasses.replace(header, num_rows=len(found), digest_sum=total & ((1 << 64) - 1))
        return decode(kind, found, header, file, **options)

    patch.setattr(committed_rows.CommittedRows, "decode", classmethod(decode_any))


@mutant(checks.a_second_opener_is_refused)
def nobody_takes_the_lock(patch: Patch) -> None:
    patch.setattr(lock, "_take", lambda descriptor, path, *, shared: None)


@mutant(checks.a_copy_of_the_descriptor_does_not_keep_the_lock)
def the_lock_is_left_to_the_last_descriptor(patch: Patch) -> None:
    flock = fcntl.flock
    patch.setattr(fcntl, "flock", lambda fd, operation: None if operation == fcntl.LOCK_UN else flock(fd, operation))


@mutant(checks.every_file_is_private)
def files_can_be_read_by_others(patch: Patch) -> None:
    def create(path: Path) -> int:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.fchmod(descriptor, 0o644)
        return descriptor

    for module in (directory, lock):
        patch.setattr(module, "create_private_file", create)


@mutant(checks.a_fork_is_refused)
def a_forked_child_is_served(patch: Patch) -> None:
    patch.setattr(Refusals, "_note_fork", lambda refusals: None)

"""Seeded bugs in parts of tensors, in pages and in external files; importing this adds them to mutants.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from _pytest.outcomes import Failed

from tests.store import test_external, test_holes, test_parts, test_rows
from tests.store.mutants import Patch, mutant
from tiered.errors import CorruptionError
from tiered.store.format.places import ChangedPage, Places, extents_of
from tiered.store.format.row import Row
from tiered.store.lifetime import external as external_module
from tiered.store.residency.paged_rows import Pages
from tiered.store.residency.swap_in_out import Shortage
from tiered.store.rows.gather import Gather
from tiered.store.rows.rows import _RowWrite
from tiered.store.rows.scatter import Scatter
from tiered.store.space.extents import DeviceSpace
from tiered.store.space.space import Readers
from tiered.store.transfers.external_read import ExternalRead

__all__: list[str] = []


def rows_agree() -> None:
    try:
        test_rows.test_rows_are_those_of_a_tensor_in_memory((1024,), torch.float32, 1, 200)
    except CorruptionError as error:  # bytes of another time
        raise AssertionError from error


@mutant(test_parts.test_parts_that_no_commit_has_leave_the_tensor_as_it_was_committed)
def blocks_are_written_in_place(patch: Patch) -> None:
    begin = Scatter._begin

    def begin_in_place(write: Scatter, nbytes: int) -> Any:
        target: Any = begin(write, nbytes)
        if target is None or isinstance(target, Shortage) or target.row.pages is None:
            return target
        places = Places.of(target.row.pages.page(target.row, 0).places, target.row.block_nbytes)
        return target._replace(new=replace(target.new, extents=tuple(extents_of(places.take(target.blocks)))))

    patch.setattr(Scatter, "_begin", begin_in_place)
    patch.setattr(Readers, "give_up", lambda readers, extents, version=None: [])  # which would free what is in use


@mutant(test_parts.test_a_reader_sees_the_tensor_that_was_there_when_it_began)
def pages_that_change_are_not_kept_for_readers(patch: Patch) -> None:
    patch.setattr(Pages, "keep", lambda pages, changed: None)


@mutant(test_parts.test_a_reader_sees_the_tensor_that_was_there_when_it_began)
def blocks_are_free_while_somebody_reads_them(patch: Patch) -> None:
    patch.setattr(Readers, "give_up", lambda readers, extents, version=None: list(extents))


@mutant(test_parts.test_a_commit_of_one_block_of_a_large_tensor_is_small)
def all_pages_are_written_with_each_commit(patch: Patch) -> None:
    inherit = Pages.inherit

    def inherit_all(pages: Pages, before: Pages, *, is_sealed: bool) -> None:
        inherit(pages, before, is_sealed=is_sealed)
        row = Row(1, "table", "uint8", (64 << 20,), 64 << 20, 1, (), b"", None, 4096, is_paged=True)
        pages.change({number: before.page(row, number) for number in range(16)})

    patch.setattr(Pages, "inherit", inherit_all)


@mutant(test_rows.test_a_flipped_bit_names_row_file_and_offset)
def rows_are_not_checked(patch: Patch) -> None:
    patch.setattr(Gather, "_first_bad", lambda gather, *block, may_learn: None)


@mutant(test_rows.test_a_page_that_moved_many_times_is_the_one_that_was_packed_each_time)
def a_page_forgets_what_moved_before(patch: Patch) -> None:
    pack = ChangedPage._pack
    patch.setattr(ChangedPage, "_pack", lambda page, notes: pack(page, notes[-1:]))


@mutant(test_holes.test_a_drive_that_others_filled_refuses_a_put_and_fails_no_write)
def what_was_given_back_is_free(patch: Patch) -> None:
    def dig_nothing(space: DeviceSpace, start: int, end: int) -> None:
        space._free.add(start, end)

    patch.setattr(DeviceSpace, "_add_hole", dig_nothing)
    patch.setattr(DeviceSpace, "fill", lambda space, extent: None)


def a_failed_read_teaches_nothing(tmp_path: Path) -> None:
    try:
        test_external.test_a_read_that_fails_teaches_nothing(tmp_path, "threads")
    except (CorruptionError, Failed) as error:
        raise AssertionError from error


@mutant(a_failed_read_teaches_nothing)
def a_failed_read_is_learnt(patch: Patch) -> None:
    first_bad = Gather._first_bad
    patch.setattr(Gather, "_first_bad", lambda gather, *block, may_learn: first_bad(gather, *block, may_learn=True))


@mutant(rows_agree)
def pages_stay_decoded_as_they_were(patch: Patch) -> None:
    patch.setattr(Pages, "stamp", lambda pages, number: 0)


@mutant(rows_agree)
def rows_are_put_that_should_be_added(patch: Patch) -> None:
    init = _RowWrite.__init__
    patch.setattr(
        _RowWrite, "__init__", lambda write, values, *where, needs_old: init(write, values, *where, needs_old=False)
    )


@mutant(test_external.test_a_flipped_bit_is_found_with_its_file_and_offset)
def external_bytes_are_not_checked(patch: Patch) -> None:
    patch.setattr(ExternalRead, "_check", _without_check(ExternalRead._check))


def _without_check(check: Any) -> Any:
    def assemble(read: ExternalRead, slab: int) -> None:
        if read.row.digests:
            read._assemble(slab)
        else:
            check(read, slab)

    return assemble


@mutant(test_external.test_another_file_under_the_name_is_refused_or_found)
def any_file_will_do(patch: Patch) -> None:
    patch.setattr(external_module, "_find_files", lambda needed, given, rows, is_right: dict.fromkeys(needed, 0))


@mutant(test_external.test_copies_and_damaged_look_alikes_are_taken_by_name_and_order)
def of_files_that_look_alike_the_first_will_do(patch: Patch) -> None:
    patch.setattr(external_module, "_reads_of", lambda device, store_uuid: lambda row, slab, indices: True)

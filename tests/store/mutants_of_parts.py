"""Seeded bugs in parts of tensors, in pages and in external files; importing this adds them to mutants.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.store import test_external, test_parts
from tests.store.mutants import Patch, mutant
from tiered.store.format.row import Page, Row
from tiered.store.lifetime import external as external_module
from tiered.store.residency.paged_rows import Pages, places_of
from tiered.store.residency.swap_in_out import Shortage
from tiered.store.space.space import Readers
from tiered.store.transfers.external_read import ExternalRead
from tiered.store.values.parts import PartWrite

__all__: list[str] = []


@mutant(test_parts.test_parts_that_no_commit_has_leave_the_tensor_as_it_was_committed)
def blocks_are_written_in_place(patch: Patch) -> None:
    begin = PartWrite._begin

    def begin_in_place(write: PartWrite, nbytes: int) -> Any:
        target: Any = begin(write, nbytes)
        if target is None or isinstance(target, Shortage) or target.row.pages is None:
            return target
        first = target.new.base_block
        page: Page = target.row.pages.page(target.row, 0)
        (places,) = places_of(page, target.row.block_nbytes, [range(first, first + target.new.num_blocks)])
        return target._replace(new=replace(target.new, extents=places))

    patch.setattr(PartWrite, "_begin", begin_in_place)
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

"""Rows and pages of some blocks of a record: to read these alone, and to put others in their place."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tiered.store.format.checksum import DIGEST_NBYTES
from tiered.store.format.row import Extent, ExternalRange, Page, Row, join, part_of, pieces
from tiered.units import round_up

__all__ = ["changed_page", "part_row"]


def part_row(row: Row, first: int, blocks: int) -> Row:
    """Return a row of some blocks of ``row``."""
    if row.is_paged:
        return part_of(row, first, blocks)
    start = first * row.block_nbytes
    nbytes = min(blocks * row.block_nbytes, row.nbytes - start)
    if row.ranges:
        digests = row.digests[DIGEST_NBYTES * first : DIGEST_NBYTES * (first + blocks)]
        return replace(row, nbytes=nbytes, ranges=_cut(row.ranges, start, nbytes), digests=digests, base_block=first)
    stored = sum(extent.nbytes for extent in row.extents) - start
    return replace(
        row,
        nbytes=nbytes,
        extents=tuple(pieces(row.extents, start, min(stored, round_up(nbytes, row.block_nbytes)))),
        digests=row.digests[DIGEST_NBYTES * first : DIGEST_NBYTES * (first + blocks)],
        base_block=first,
    )


def _cut(ranges: Iterable[ExternalRange], start: int, nbytes: int) -> tuple[ExternalRange, ...]:
    """Return the ranges of the bytes [start, start + nbytes) of a record, by their place in these."""
    found = []
    for each in ranges:
        begin, stop = max(start, each.start), min(start + nbytes, each.start + each.nbytes)
        if begin < stop:
            found.append(ExternalRange(begin - start, each.file, each.offset + begin - each.start, stop - begin))
    return tuple(found) or (ExternalRange(0, 0, 0, 0),)


def changed_page(
    page: Page, block_nbytes: int, first: int, places: Iterable[Extent], digests: bytes, generation: int
) -> Page:
    """Return ``page`` with the blocks from ``first`` on in ``places``, written for ``generation``."""
    stored = sum(extent.nbytes for extent in page.extents)
    blocks = len(digests) // DIGEST_NBYTES
    start, stop = first * block_nbytes, min((first + blocks) * block_nbytes, stored)
    is_last = (first + blocks) * DIGEST_NBYTES == len(page.digests)
    stop = stored if is_last else stop
    extents = (*pieces(page.extents, 0, start), *places, *pieces(page.extents, stop, stored - stop))
    new = generation.to_bytes(8, "little") * blocks
    written = page.written or page.generation.to_bytes(8, "little") * (len(page.digests) // DIGEST_NBYTES)
    written = written[: 8 * first] + new + written[8 * (first + blocks) :]
    at = DIGEST_NBYTES * first
    content = page.digests[:at] + digests + page.digests[at + len(digests) :]
    if written == written[:8] * (len(written) // 8):
        return Page(generation, join(extents), content, b"")
    return Page(generation, join(extents), content, written)

"""What the smallest DRAM budget of a sharded model is, and the sizes that follow from the model alone.

Pure arithmetic. The formula is design.md's, section 2: root unit + 2 largest units (parameters and gradient) + 3
buckets of state + what is in flight (the tile scratch of the update).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from tiered.errors import CapacityError
from tiered.units import format_bytes, parse_bytes, round_up
from tiered.zero.formats.codec import PIECE_ALIGNMENT, divide
from tiered.zero.formats.layout import Layouts
from tiered.zero.formats.rules import AdamWRule
from tiered.zero.formats.tile_scratch import TileScratch

if TYPE_CHECKING:
    from tiered.zero.parameters.unit import Segment, Unit

__all__ = [
    "LEAST_BUCKET_NUMEL",
    "TILE_NUMEL",
    "Shares",
    "bucket_numel_for",
    "share_out",
    "share_out_as_asked",
    "smallest_budget",
    "tile_numel_for",
    "whole_pages",
]

TILE_NUMEL = 1 << 20
"""Elements that one call updates: enough that calls cost nothing; tiles that stay in the caches take no less time."""

LEAST_BUCKET_NUMEL = 1 << 14
"""Elements of buckets in models of tiny units, 160 KiB of exact state: smaller ones take as much CPU time."""

_BUCKET_NUMEL = 1 << 22  # elements; 40 MiB of exact state: ten blocks in flight
_BUCKETS_PER_UNIT = 8  # buckets shrink with the unit, so that small models run in small budgets
_PAGE = 4096
_LARGEST = Layouts("exact", AdamWRule())  # no other state is larger: who shards does not know the optimizer yet


def whole_pages(nbytes: int) -> int:
    """Return the bytes of DRAM that a key of ``nbytes`` takes."""
    return round_up(nbytes, _PAGE)


def bucket_numel_for(num_trainable: Iterable[int]) -> int:
    """Return the elements per bucket for units with these numbers of trainable elements; a multiple of 1,024.

    Depends on the model alone, so that a store can be resumed under another budget.
    """
    largest = max(num_trainable, default=1)
    share = round_up(-(-largest // _BUCKETS_PER_UNIT), PIECE_ALIGNMENT)
    return min(_BUCKET_NUMEL, max(LEAST_BUCKET_NUMEL, share))


def smallest_budget(units: Sequence[Unit]) -> int:
    """Return the smallest DRAM budget in bytes that trains ``units`` (the root unit first) with any state."""
    trainable, numel = _trainable(units)
    bucket = _largest_bucket(trainable, numel)
    sizes = [
        whole_pages(unit.nbytes) + whole_pages(sum(round_up(s.nbytes, 64) for s in segments))
        for unit, segments in zip(units, trainable, strict=True)
    ]
    scratch = whole_pages(TileScratch.nbytes(tile_numel_for(numel, trainable)))
    return sizes[0] + sum(sorted(sizes[1:], reverse=True)[:2]) + 3 * bucket + scratch


class Shares(NamedTuple):
    """How a budget is shared out beyond the smallest one, in bytes."""

    held: int  # kept in DRAM for good
    window: int  # on its way in, ahead of need


def share_out(units: Sequence[Unit], budget_bytes: int, *, held: int | None = None) -> Shares:
    """Return what placement may hold and how far the schedule reads ahead under ``budget_bytes``.

    Read-ahead wants the next unit's parameters and 3 buckets; what is being written must find room beside it, or bytes
    that were read ahead are evicted before their use and read twice. All else is held. ``held`` overrides the choice.
    """
    trainable, numel = _trainable(units)
    buckets = 3 * _largest_bucket(trainable, numel)
    spare = budget_bytes - smallest_budget(units)
    parameters = whole_pages(max(unit.nbytes for unit in units))
    gradients = whole_pages(max(sum(segment.nbytes for segment in segments) for segments in trainable))
    if held is None:
        held = max(0, spare - buckets)
    return Shares(held, min(parameters + buckets, spare - held + max(gradients, parameters)))


def share_out_as_asked(units: Sequence[Unit], budget_bytes: int, hold: str | int) -> Shares:
    """Return the shares of ``budget_bytes`` with ``hold`` ("auto", or a size) held for good.

    Raises CapacityError for a budget below the smallest one, which the message names, or a ``hold`` beyond it.
    """
    smallest = smallest_budget(units)
    if budget_bytes < smallest:
        raise CapacityError(
            f"DRAM budget {budget_bytes} bytes ({format_bytes(budget_bytes)}) is too small for this model; the smallest"
            f" working budget is {smallest} bytes ({format_bytes(smallest)}): root unit + 2 largest units with"
            " gradients + 3 buckets of state + tile scratch. Give dram= at least that, or smaller units"
        )
    if hold == "auto":
        return share_out(units, budget_bytes)
    held = parse_bytes(hold)
    if held > budget_bytes - smallest:
        raise CapacityError(
            f"hold={format_bytes(held)} leaves too little to work with; expected at most"
            f' {format_bytes(budget_bytes - smallest)} of this budget: give the store a larger dram=, or hold="auto"'
        )
    return share_out(units, budget_bytes, held=held)


def _trainable(units: Sequence[Unit]) -> tuple[list[list[Segment]], int]:
    """Return the trainable segments of each unit, and the elements per bucket that follow."""
    trainable = [[segment for segment in unit.segments if segment.trainable] for unit in units]
    return trainable, bucket_numel_for(sum(segment.numel for segment in segments) for segments in trainable)


def _largest_bucket(trainable: Iterable[Sequence[Segment]], numel: int) -> int:
    """Return the bytes of the largest bucket."""
    buckets = [bucket for segments in trainable for bucket in divide("", segments, numel, _LARGEST)]
    return whole_pages(max((bucket.nbytes for bucket in buckets), default=0))


def tile_numel_for(bucket_numel: int, segments: Iterable[Sequence[Segment]]) -> int:
    """Return the elements per tile: no more than a bucket or the largest parameter needs; a multiple of 1,024."""
    largest = max((segment.numel for unit in segments for segment in unit), default=1)
    return min(TILE_NUMEL, bucket_numel, round_up(largest, PIECE_ALIGNMENT))

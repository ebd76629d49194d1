"""What the smallest DRAM budget of a sharded model is, and the sizes that follow from the model alone.

Pure arithmetic. The formula is design.md's, section 2: root unit + 2 largest units (parameters and gradient) + 3
buckets of state + what is in flight (the tile scratch of the update).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from tiered.units import round_up
from tiered.zero.codec import PIECE_ALIGNMENT, TileScratch, divide

if TYPE_CHECKING:
    from tiered.zero.unit import Segment, Unit

__all__ = ["TILE_NUMEL", "bucket_numel_for", "smallest_budget", "tile_numel_for"]

TILE_NUMEL = 1 << 20
"""Elements that one kernel call updates: a tile and its state stay in L2 (design.md, section 9)."""

_BUCKET_NUMEL = 1 << 22  # elements; 40 MiB of exact state: ten blocks in flight
_BUCKETS_PER_UNIT = 8  # buckets shrink with the unit, so that small models run in small budgets
_PAGE = 4096


def bucket_numel_for(num_trainable: Iterable[int]) -> int:
    """Return the elements per bucket for units with these numbers of trainable elements; a multiple of 1,024.

    Depends on the model alone, so that a store can be resumed under another budget.
    """
    largest = max(num_trainable, default=1)
    return min(_BUCKET_NUMEL, round_up(max(1, -(-largest // _BUCKETS_PER_UNIT)), PIECE_ALIGNMENT))


def smallest_budget(units: Sequence[Unit]) -> int:
    """Return the smallest DRAM budget in bytes that trains ``units`` (the root unit first) with exact state."""
    trainable = [[segment for segment in unit.segments if segment.trainable] for unit in units]
    numel = bucket_numel_for(sum(segment.numel for segment in segments) for segments in trainable)
    buckets = [bucket for segments in trainable for bucket in divide("", segments, numel)]
    bucket = round_up(max((bucket.nbytes for bucket in buckets), default=0), _PAGE)
    sizes = [
        round_up(unit.nbytes, _PAGE) + round_up(sum(round_up(s.nbytes, 64) for s in segments), _PAGE)
        for unit, segments in zip(units, trainable, strict=True)
    ]
    scratch = round_up(TileScratch.nbytes(tile_numel_for(numel, trainable)), _PAGE)
    return sizes[0] + sum(sorted(sizes[1:], reverse=True)[:2]) + 3 * bucket + scratch


def tile_numel_for(bucket_numel: int, segments: Iterable[Sequence[Segment]]) -> int:
    """Return the elements per tile: no more than a bucket or the largest parameter needs; a multiple of 1,024."""
    largest = max((segment.numel for unit in segments for segment in unit), default=1)
    return min(TILE_NUMEL, bucket_numel, round_up(largest, PIECE_ALIGNMENT))

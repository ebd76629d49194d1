"""The budget of a sharded model: its shares with any optimizer's state, and the refusal of a budget too small."""

from __future__ import annotations

from collections.abc import Sequence

from tiered.errors import CapacityError
from tiered.units import format_bytes, parse_bytes
from tiered.zero.formats.rules import AdamWRule
from tiered.zero.formats.state_layout import Layouts
from tiered.zero.formats.tile_scratch import TileScratch
from tiered.zero.layout import (
    Shares,
    UnitLayout,
    WorkSizes,
    bucket_numel_for,
    cut,
    share_out,
    tile_numel_for,
    whole_pages,
)

__all__ = ["share_out_again", "share_out_as_asked", "work_sizes"]

_LARGEST = Layouts("exact", AdamWRule())  # no other state is larger: ``shard`` does not know the optimizer yet


def work_sizes(units: Sequence[UnitLayout]) -> WorkSizes:
    """Return the bytes of any rank's largest bucket of ``units`` and of the tile scratch, whatever the optimizer."""
    numel = bucket_numel_for([-(-unit.trainable_numel // unit.world) for unit in units])
    trainable = [
        [(unit.specs[each.number].dtype, range(each.start, each.stop)) for each in stretches if each.grad_offset >= 0]
        for unit in units
        for stretches in map(unit.stretches, range(unit.world))
    ]
    buckets = [
        sum(_LARGEST.of(dtypes[index]).nbytes(stop - start) for index, start, stop in bucket)
        for dtypes, ranges in (zip(*each, strict=True) for each in trainable if each)
        for bucket in cut(ranges, numel)
    ]
    tile_numel = tile_numel_for(numel, [len(stretch) for each in trainable for _, stretch in each])
    return WorkSizes(whole_pages(max(buckets, default=0)), whole_pages(TileScratch.nbytes(tile_numel)))


def share_out_as_asked(units: Sequence[UnitLayout], budget_bytes: int, hold: str | int, *, stage: int = 3) -> Shares:
    """Return the shares of ``budget_bytes`` with ``hold`` ("auto", or a size) held for good, see ``share_out``.

    Raises CapacityError for a budget below the smallest one, which the message names, or a ``hold`` beyond it.
    """
    sizes = work_sizes(units)
    shares = _share_out(units, sizes, budget_bytes, stage)
    smallest = shares.smallest
    if hold == "auto":
        return shares
    held = parse_bytes(hold)
    if held > budget_bytes - smallest:
        raise CapacityError(
            f"hold={format_bytes(held)} leaves too little to work with; expected at most"
            f' {format_bytes(budget_bytes - smallest)} of this budget: give the store a larger dram=, or hold="auto"'
        )
    return share_out(units, sizes, budget_bytes, held=held, stage=stage)


def share_out_again(units: Sequence[UnitLayout], budget_bytes: int, before: Shares, *, gradients_wait: bool) -> Shares:
    """Return the shares for other ``units``, or another step; raises CapacityError as ``share_out_as_asked``.

    No more is held than was ``before``; with ``gradients_wait``, optimizer state beside all gradients alone: a byte of
    these saves a read and a write, one of state that each step commits a read.
    """
    sizes = work_sizes(units)
    most = _share_out(units, sizes, budget_bytes, before.stage)
    held = min(before.held, budget_bytes - most.smallest)
    if gradients_wait:
        waiting = sum(unit.shard_gradient_nbytes for unit in units) - most.gradients // units[0].world
        held = min(held, max(most.held - waiting, sum(unit.shard_nbytes for unit in units)))
    return share_out(units, sizes, budget_bytes, held=held, stage=before.stage)


def _share_out(units: Sequence[UnitLayout], sizes: WorkSizes, budget_bytes: int, stage: int) -> Shares:
    shares = share_out(units, sizes, budget_bytes, stage=stage)
    smallest = shares.smallest
    if budget_bytes < smallest and stage < 3 and units[0].world > 1:
        raise CapacityError(
            f"DRAM budget {budget_bytes} bytes ({format_bytes(budget_bytes)}) is too small for stage={stage}, which"
            f" keeps all parameters gathered{' and their gradients' * (stage == 1)}; the smallest working budget is"
            f" {smallest} bytes ({format_bytes(smallest)}) for each rank. Give dram= at least that for each rank of the"
            " machine, or stage=3"
        )
    if budget_bytes < smallest:
        raise CapacityError(
            f"DRAM budget {budget_bytes} bytes ({format_bytes(budget_bytes)}) is too small for this model; the smallest"
            f" working budget is {smallest} bytes ({format_bytes(smallest)}): root unit + 2 largest units with"
            " gradients + 3 buckets of state + tile scratch. Give dram= at least that, or smaller units"
        )
    return shares

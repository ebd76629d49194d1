"""The fp32 masters between ``shard`` and the optimizer: the values before the cast to bf16, one key per unit.

``shard`` writes the key, the optimizer turns it into its own state and deletes it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from tiered.units import round_up
from tiered.zero.layout import CUT_NUMEL

if TYPE_CHECKING:
    from tiered.zero.parameters.unit import Segment

__all__ = ["master_key", "master_offsets", "masters_nbytes"]


def master_key(unit_name: str) -> str:
    """Return the key of a unit's masters."""
    return f"model/master/{unit_name}"


def master_offsets(segments: Iterable[Segment]) -> dict[Segment, int]:
    """Return where, in elements, the fp32 master of each bf16 segment trained at ``shard`` lies in its unit's key."""
    offsets: dict[Segment, int] = {}
    offset = 0
    for segment in segments:
        if segment.dtype == torch.bfloat16 and segment.was_trainable:
            offsets[segment] = offset
            offset += round_up(segment.numel, CUT_NUMEL)
    return offsets


def masters_nbytes(segments: Iterable[Segment]) -> int:
    """Return the bytes of a unit's master key; 0 where no segment needs one."""
    return max((4 * (offset + segment.numel) for segment, offset in master_offsets(segments).items()), default=0)

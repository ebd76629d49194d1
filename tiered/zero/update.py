"""The streaming update: bucket by bucket, state read ahead | updated in place | written behind.

The pipeline moves keys and calls the kernel; which parameters, with which hyperparameters, is the optimizer's say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from tiered.store.working_set import WorkingSet
from tiered.zero.codec import Bucket, Hyperparameters, TileScratch, update_piece

if TYPE_CHECKING:
    from tiered.zero.unit import Segment

__all__ = ["Source", "UpdatePipeline"]

_READ_AHEAD = 2
"""Buckets on their way in while one is updated: with the one being updated, the 3 buckets of the smallest budget."""


class Source(NamedTuple):
    """What one parameter contributes to an update: (numel,) each, in memory order."""

    parameter: torch.Tensor
    gradient: torch.Tensor
    factor: torch.Tensor | None  # () fp32 clip factor
    hyper: Hyperparameters


class UpdatePipeline:
    """Updates the buckets of one unit after another in a bounded piece of DRAM.

    Holds tile scratch from the working set, counted in its budget, until ``close``.
    """

    def __init__(self, working_set: WorkingSet, tile_numel: int) -> None:
        self._working_set = working_set
        self._buffer = working_set.reserve(TileScratch.nbytes(tile_numel))
        memory = torch.frombuffer(self._buffer.memory, dtype=torch.uint8)
        self.scratch = TileScratch(memory, tile_numel)
        self._is_open = True

    def run(self, buckets: Sequence[Bucket], sources: Mapping[Segment, Source], use: Callable[[str], None]) -> None:
        """Update in place every piece of ``buckets`` whose segment is in ``sources``; blocks.

        ``use(key)`` is told of each bucket as it comes up. New state is on its way to the device when this returns.
        """
        due = [bucket for bucket in buckets if any(piece.segment in sources for piece in bucket.pieces)]
        keys = [bucket.key for bucket in due]
        for index, bucket in enumerate(due):
            self._working_set.prefetch(keys[index : index + 1 + _READ_AHEAD])
            self._update(bucket, sources, use)
            self._working_set.swap_out([bucket.key])

    def _update(self, bucket: Bucket, sources: Mapping[Segment, Source], use: Callable[[str], None]) -> None:
        lease = self._working_set.lease(bucket.key, "rw")
        try:
            use(bucket.key)  # order: once it is leased, or what is read ahead would push it out as just used
            for piece in bucket.pieces:
                source = sources.get(piece.segment)
                if source is not None:
                    update_piece(
                        piece,
                        source.parameter,
                        source.gradient,
                        lease.tensor,
                        source.hyper,
                        source.factor,
                        self.scratch,
                    )
        finally:
            lease.release()

    def close(self) -> None:
        """Give the scratch back. Idempotent."""
        if self._is_open:
            self._is_open = False
            self.scratch.release()
            self._working_set.unreserve(self._buffer)

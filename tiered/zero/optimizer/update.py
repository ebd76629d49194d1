"""The streaming update: bucket by bucket, state read ahead | updated in place | written behind.

The pipeline moves keys and calls the kernel. The optimizer decides which parameters it updates, with which
hyperparameters; update_thread.py decides in which thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from tiered.store.residency.working_set import Lease, WorkingSet
from tiered.tiers.accelerator import DevicePlace
from tiered.tiers.compute_tier import UpdatePlace
from tiered.tiers.device_tier import HostPlace, HostTier
from tiered.zero.formats.codec import Bucket, Piece, Source, update_pieces
from tiered.zero.formats.tile_scratch import TileScratch

if TYPE_CHECKING:
    from tiered.zero.parameters.unit import Segment

__all__ = ["PlainSupply", "Supply", "UpdatePipeline"]

_READ_AHEAD = 2
"""Buckets on their way in while one is updated: with the one being updated, the 3 buckets of the smallest budget."""


class Supply(Protocol):
    """The supply of an update with parameters and gradients."""

    @property
    def num_together(self) -> int:
        """The most buckets that may be leased at one time."""

    def open(self, keys: Sequence[str]) -> list[Lease]:
        """Lease the buckets ``keys`` for the update, and the bytes that ``source`` gives views of; blocks."""

    def read_ahead(self, keys: Sequence[str]) -> None:
        """Ask for the buckets ``keys``, which come next; a hint."""

    def source(self, segment: Segment) -> Source | None:
        """Return the contribution of ``segment``, None where none is due; valid until the next ``open``."""

    def done(self, keys: Sequence[str]) -> None:
        """The buckets ``keys`` are updated and released: have them on their way to the device."""


class PlainSupply:
    """Parameters and gradients in ordinary memory."""

    num_together = 1

    def __init__(self, working_set: WorkingSet, sources: Mapping[Segment, Source]) -> None:
        self._working_set = working_set
        self._sources = sources

    def open(self, keys: Sequence[str]) -> list[Lease]:
        """Lease the buckets ``keys``; blocks."""
        return self._working_set.lease_for_update(keys)

    def read_ahead(self, keys: Sequence[str]) -> None:
        """Ask for the buckets ``keys``."""
        self._working_set.prefetch(keys)

    def source(self, segment: Segment) -> Source | None:
        """Return the contribution of ``segment``."""
        return self._sources.get(segment)

    def done(self, keys: Sequence[str]) -> None:
        """Swap the buckets out."""
        self._working_set.swap_out(keys)


class UpdatePipeline:
    """Updates the buckets of one unit after another in a bounded piece of DRAM; one thread at a time.

    Holds tile scratch from the working set, counted in its budget, until ``close``.
    """

    def __init__(self, working_set: WorkingSet, tile_numel: int) -> None:
        self.tile_numel = tile_numel
        self.scratch_nbytes = TileScratch.nbytes(tile_numel)
        self._working_set = working_set
        self._buffer = working_set.reserve(self.scratch_nbytes, is_lasting=True)
        memory = torch.frombuffer(self._buffer.memory, dtype=torch.uint8)
        self.scratch = TileScratch(memory, tile_numel)
        self._is_open = True
        self._place: UpdatePlace = HostPlace(HostTier(working_set), working_set)
        self._scratch_there = self.scratch

    def move_to(self, place: DevicePlace) -> None:
        """Run the updates of sharded parameters at ``place`` from now on. Raises CapacityError."""
        memory = place.keep(self.scratch_nbytes)
        with place.computing():
            self._place, self._scratch_there = place, TileScratch(memory, self.tile_numel)

    def run(self, buckets: Sequence[Bucket[Segment]], supply: Supply, use: Callable[[Sequence[str]], None]) -> None:
        """Update in place every piece of ``buckets`` that ``supply`` has a source for; blocks.

        Each bucket has at least one. ``use(keys)`` is told of those that come up, and may raise to end the run
        between buckets. New state is on its way to the device when this returns.
        """
        keys = [bucket.key for bucket in buckets]
        number = supply.num_together
        for first in range(0, len(buckets), number):
            supply.read_ahead(keys[first : first + number + _READ_AHEAD])
            with self._place.computing():
                self._update(buckets[first : first + number], supply, use)
            supply.done(keys[first : first + number])

    def _update(self, buckets: Sequence[Bucket[Segment]], supply: Supply, use: Callable[[Sequence[str]], None]) -> None:
        keys = [bucket.key for bucket in buckets]
        leases = supply.open(keys)
        try:
            parts = self._parts(buckets, leases, supply)
            begun = self._working_set.recorder.begin()
            use(keys)  # order: once they are leased, or keys read ahead would push them out as just used
            update_pieces(parts, self._scratch_there)
            parts.clear()  # lifetime: they are views of bytes that are given back below
            self._working_set.recorder.worked("update bucket", keys[0], begun)  # the first of them
        finally:
            self._place.put_back(leases)

    def _parts(
        self, buckets: Sequence[Bucket[Segment]], leases: Sequence[Lease], supply: Supply
    ) -> list[tuple[Piece[Segment], torch.Tensor, Source]]:
        parts = []
        for bucket, lease in zip(buckets, leases, strict=True):
            state = self._place.bring(lease)
            for piece in bucket.pieces:
                source = supply.source(piece.segment)
                if source is not None:
                    parts.append((piece, state, source))
        return parts

    def close(self) -> None:
        """Give the scratch back. Idempotent."""
        if self._is_open:
            self._is_open = False
            self.scratch.release()
            self._scratch_there.release()
            self._place.close()
            self._working_set.unreserve(self._buffer)

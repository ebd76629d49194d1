"""ShardGradient: this rank's shard of the gradients of one unit over several ranks, and the sum that makes it.

In each backward a unit's whole gradients go to the ranks whose shards they belong to. Each rank adds what it receives
in fp32, in the order of the ranks, multiplies with fp32(1 / world), rounds once to the gradients' dtype and adds that
to the shard's gradient: the same bits for any transport.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from tiered.bytes.host_tensor import copy_across
from tiered.tiers.compute_tier import GradientBuffer
from tiered.zero.gradients.stand_in import Compute, UsedGradient
from tiered.zero.parameters.unit import Segment, Unit
from tiered.zero.parameters.unit_collectives import UnitCollectives

__all__ = ["ShardGradient", "add_mean"]

_TILE_NUMEL = 1 << 18  # elements that are summed at one time: 1 MiB in fp32
_DEVICE_TILE_NUMEL = 1 << 22  # on a compute device, whose every tile is a copy to DRAM of its own


def add_mean(out: torch.Tensor, pieces: torch.Tensor, *, is_first: bool) -> None:
    """Add the mean of ``pieces``, (world, numel), to ``out``, (numel,) of the same dtype; ``is_first``: write it there.

    The sum is taken where the pieces are, in fp32 (fp64 for fp64), in the order of the ranks, and rounded once. ``out``
    is in DRAM; blocks on copies to it.
    """
    world, numel = pieces.shape
    dtype = torch.float64 if out.dtype is torch.float64 else torch.float32
    factor = torch.tensor(1 / world, dtype=dtype, device="cpu")
    most = _TILE_NUMEL if pieces.is_cpu else _DEVICE_TILE_NUMEL
    total = torch.empty(min(numel, most), dtype=dtype, device=pieces.device)
    for start in range(0, numel, most):
        tile = total[: min(most, numel - start)]
        stop = start + tile.numel()
        tile.copy_(pieces[0, start:stop])
        for rank in range(1, world):
            tile.add_(pieces[rank, start:stop])
        tile.mul_(factor)
        if is_first:
            copy_across(out[start:stop], tile if tile.is_cpu else tile.to(out.dtype))
        else:
            out[start:stop].add_(tile.to(out.dtype).cpu())


class ShardGradient:
    """The gradients of one unit in this rank's shard, from the first exchange of a step to the update that takes them.

    They are in DRAM, wherever the model computes. The bytes are those of scratch ``key``, laid out as the shards of the
    trainable spans, one after the other. ``segments`` are the parameters with a gradient on some rank. Invariant:
    ``buffer`` is leased, or the working set has the bytes, or ``segments`` is empty.
    """

    __slots__ = ("_has_key", "buffer", "key", "norms", "num_added", "own_norms", "segments", "unit")

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.key = f"model/gradient/.shard/{unit.name}"
        self.segments: dict[Segment, None] = {}
        self.num_added = 0  # exchanges since there were none
        self.own_norms: dict[Segment, tuple[float, float]] = {}  # 2-norm and largest magnitude of this rank's piece
        self.norms: dict[Segment, torch.Tensor] = {}  # those of all ranks, (2, world) fp64, once they have told them
        self.buffer: GradientBuffer | None = None
        self._has_key = False

    def __repr__(self) -> str:
        return f"ShardGradient({self.unit.name!r}, {len(self.segments)} parameters)"

    @property
    def nbytes(self) -> int:
        """Bytes of the shard."""
        return self.unit.layout.shard_gradient_nbytes

    def add(self, received: torch.Tensor, segments: Sequence[Segment]) -> None:
        """Add the mean of what all ranks have sent, for ``segments``; blocks where DRAM is short.

        ``received``: (nbytes,) uint8, of each trainable span the pieces of all ranks, one after the other.
        """
        is_first = not self.segments
        buffer, layout = self.leased(), self.unit.layout
        start = 0
        for span in layout.spans:
            if span.trainable:
                pieces = received[start : start + span.nbytes].view(span.dtype).view(layout.world, -1)
                place = span.grad_offset // layout.world
                add_mean(buffer[place : place + span.shard_nbytes].view(span.dtype), pieces, is_first=is_first)
                if not pieces.is_cpu:
                    self.unit.tier.note_copy_out(span.shard_nbytes)
                start += span.nbytes
        self.segments |= dict.fromkeys(segments)
        self.num_added += 1
        if not self.unit.engine.phase.updates_in_backward:  # nobody may ask then
            self.own_norms = {segment: _norms(segment.gradient_piece(buffer)) for segment in self.segments}

    def apply(self, sources: Mapping[Segment, UsedGradient]) -> None:
        """Apply the changes that are pending in ``sources``."""
        for segment, source in sources.items():
            changes = source.changes_in_dram()
            source.take_pending()
            for change in changes:
                change(segment.gradient_piece(self.leased()))

    def ask_all(self, segment: Segment, source: UsedGradient, compute: Compute) -> torch.Tensor:
        """Return ``compute`` of each rank's piece, with the changes that are pending, (world,); all ranks ask together.

        0 where a rank has no piece. Blocks.
        """
        assert isinstance(self.unit.comm, UnitCollectives)
        mine = torch.zeros((), dtype=torch.float64, device="cpu")
        if segment.stretch:
            piece = segment.gradient_piece(self.leased())
            if source.pending:
                piece = piece.clone()
                for change in source.changes_in_dram():
                    change(piece)
            mine = compute(piece).to(torch.float64)
        return self.unit.comm.numbers(f"a norm of {segment.name}", mine)

    def leased(self) -> torch.Tensor:
        """Return the shard, (nbytes,) uint8, leased to be read and changed; blocks."""
        gradients = self.unit.gradients
        if self.buffer is None:
            if not self.segments and gradients.taken is not None and not gradients.taken.is_over:
                self.unit.engine.finish_update(self.unit)
            gradients.model.make_room_for_shard(self.nbytes)
            working_set, tier = self.unit.working_set, self.unit.tier
            if self.segments:
                lease = tier.lease(self.key, "rw")
            else:
                if not self._has_key:
                    working_set.create(self.key, self.nbytes, scratch=True)
                    self._has_key = True
                tier.settle(self.key)
                lease = working_set.lease_anew(self.key)
            self.buffer = GradientBuffer(working_set, lease)
            gradients.model.opened_shard(self)
        return self.buffer.tensor

    def store_away(self) -> bool:
        """Give the bytes to the working set; return whether there were any to give."""
        buffer = self._close()
        if buffer is not None:
            buffer.store()
        return buffer is not None

    def take(self) -> GradientBuffer | None:
        """Hand the bytes over to an update: return their lease, None where the working set has them."""
        self.segments, self.own_norms, self.norms, self.num_added = {}, {}, {}, 0
        self.unit.gradients.model.rooms.filled.discard(self.key)
        return self._close()

    def _close(self) -> GradientBuffer | None:
        buffer, self.buffer = self.buffer, None
        self.unit.gradients.model.closed_shard(self)
        return buffer

    def drop(self) -> None:
        """Forget the gradients, if there are any."""
        were_there = bool(self.segments)
        buffer = self.take()
        if buffer is not None:
            buffer.discard()
        elif were_there:
            self.unit.tier.drop_bytes(self.key)

    def zero(self) -> None:
        """Fill the gradients with zeros."""
        if self.segments:
            self.leased().zero_()
        self.own_norms = dict.fromkeys(self.own_norms, (0.0, 0.0))
        self.norms = {segment: torch.zeros_like(norms) for segment, norms in self.norms.items()}

    def forget_key(self) -> None:
        """Delete the key: the unit is about to be laid out anew."""
        self.drop()
        if self._has_key:
            self._has_key = False
            self.unit.working_set.delete([self.key])


def _norms(piece: torch.Tensor) -> tuple[float, float]:
    """Return the 2-norm and the largest magnitude of ``piece``, added up in fp32 (fp64 for fp64)."""
    dtype = torch.float64 if piece.dtype is torch.float64 else torch.float32
    if not piece.numel():
        return 0.0, 0.0
    norm = torch.linalg.vector_norm
    return norm(piece, 2.0, dtype=dtype).item(), norm(piece, float("inf"), dtype=dtype).item()

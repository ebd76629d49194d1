"""OwnGradients: the gradients of one unit in the tensors that autograd made, where the budget has room for good."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tiered.tiers.compute_tier import GradientBuffer
from tiered.zero.parameters.unit import Segment

__all__ = ["OwnGradients"]


class OwnGradients:
    """The gradients of one unit while they stay where autograd put them, beside an empty buffer of their size.

    The invariant: *while such gradients are there, the unit's buffer is leased and its pages are the system's*. So they
    count in the budget as if they lay in it, no byte of theirs is copied, and the move into the buffer waits for
    nothing. ``buffer`` is kept from step to step; ``key`` is its key.
    """

    __slots__ = ("_clipped", "are_there", "buffer", "key")

    def __init__(self) -> None:
        self.are_there = False
        self.key = ""
        self.buffer: GradientBuffer | None = None
        # As the factors were made, with their versions. Lifetime: a tensor that is kept lends its address to no other.
        self._clipped: dict[Segment, tuple[torch.Tensor, int]] = {}

    def __repr__(self) -> str:
        return f"OwnGradients({'there' if self.are_there else 'none'}, buffer {self.key!r})"

    def keep(self, key: str, buffer: GradientBuffer) -> None:
        """Keep ``buffer``, whose bytes in DRAM are undefined, and its ``key``."""
        assert buffer.lease is not None
        buffer.lease.buffer.give_pages_back()
        self.key, self.buffer = key, buffer

    def take_buffer(self) -> tuple[str, GradientBuffer | None]:
        """Return the key and the buffer, for the gradients to be moved there; none are here any more."""
        found, self.key, self.buffer = (self.key, self.buffer), "", None
        self.drop()
        return found

    def drop(self) -> None:
        """Note that no gradient is here any more; the buffer is kept."""
        self.are_there = False
        self._clipped.clear()

    @staticmethod
    def can_have(segment: Segment, gradient: torch.Tensor) -> bool:
        """Return whether ``gradient`` is one that an update can read as it lies, and keeps no other bytes alive."""
        return (
            type(gradient) is torch.Tensor
            and gradient.layout is torch.strided
            and gradient.dtype == segment.dtype
            and gradient.stride() == segment.strides
            and segment.grad_offset >= 0
            and not gradient.is_neg()  # its bytes have the other sign, and kernels read bytes
            and gradient.untyped_storage().nbytes() <= segment.nbytes
        )

    @staticmethod
    def flat(gradient: torch.Tensor) -> torch.Tensor:
        """Return the (numel,) view of ``gradient``, which ``can_have`` has seen, in memory order."""
        return gradient.detach().as_strided((gradient.numel(),), (1,))

    def note_clipped(self, factors: Mapping[Segment, torch.Tensor]) -> None:
        """The ``factors`` are for the gradients as they are now."""
        gradients = {segment: segment.parameter.grad for segment in factors}
        self._clipped = {s: (g.detach(), g._version) for s, g in gradients.items() if g is not None}

    def changes(self, factors: dict[Segment, torch.Tensor]) -> bool:
        """Drop the factors of gradients that were replaced since; return whether others were written in place."""
        is_changed = False
        for segment in list(factors):
            before, now = self._clipped.get(segment), segment.parameter.grad
            if before is None or now is None or before[0].data_ptr() != now.data_ptr():
                del factors[segment]
            elif before[1] != now._version:
                is_changed = True
        return is_changed

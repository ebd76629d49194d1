"""ClipFactors: the factors that the next update multiplies one unit's gradients with, and what they were made for."""

from __future__ import annotations

import torch

from tiered.errors import UsageError
from tiered.tiers.compute_tier import GradientBuffer
from tiered.zero.gradients.own_gradients import OwnGradients
from tiered.zero.parameters.placeholder import without_dispatch
from tiered.zero.parameters.unit import Segment

__all__ = ["BETWEEN_CLIP_AND_STEP", "ClipFactors"]

BETWEEN_CLIP_AND_STEP = (
    "between tiered.clip_grad_norm_, whose factor is applied by the step, and optimizer.step(); expected changes, such"
    " as those of scaler.unscale_, before the clipping"
)


class ClipFactors:
    """The factors, () fp32 each, of the gradients as they were when they were clipped.

    Invariant: gradients that were written in place since are noticed before their bytes are elsewhere.
    """

    __slots__ = ("_is_changed", "_version", "factors")

    def __init__(self) -> None:
        self.factors: dict[Segment, torch.Tensor] = {}
        self._version = 0  # of the buffer, when the factors were made for it
        self._is_changed = False  # in place, since then

    def clear(self) -> None:
        """There are no factors."""
        self.factors.clear()
        self._is_changed = False

    def note(self, buffer: GradientBuffer | None, own: OwnGradients) -> None:
        """The factors are for the gradients as they are now."""
        if buffer is not None:
            self._version = buffer.tensor._version
        elif own.are_there and self.factors:
            with without_dispatch():
                own.note_clipped(self.factors)

    def note_changes(self, buffer: GradientBuffer | None, own: OwnGradients) -> None:
        """Take note of gradients that were written in place."""
        if not self.factors:
            return
        if buffer is not None and buffer.tensor._version != self._version:
            self._is_changed = True
        elif own.are_there:
            with without_dispatch():
                self._is_changed |= own.changes(self.factors)

    def check(self, name: str) -> None:
        """Raise UsageError where gradients of the unit ``name`` were clipped and then written in place."""
        if self._is_changed:
            raise UsageError(
                f"unit {name!r}: gradients written in place {BETWEEN_CLIP_AND_STEP}, or a new tensor as .grad, which is"
                " taken as it is"
            )

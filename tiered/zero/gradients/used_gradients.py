"""UsedGradient: a gradient that an update in a backward has used, and what becomes of it until the step."""

from __future__ import annotations

from typing import NoReturn

from tiered.errors import UsageError
from tiered.zero.gradients.stand_in import Change, StandIn
from tiered.zero.parameters.placeholder import without_dispatch
from tiered.zero.parameters.unit import Unit

__all__ = ["UsedGradient", "check_used", "show_used"]


class UsedGradient:
    """A gradient that an update in a backward has used, until the step concludes; it has no values."""

    __slots__ = ("name",)

    where = 'used up, by the backward under update="backward"'
    advice = 'tiered.AdamW(..., update="step") for clipping, scaling and looking at gradients'
    is_readable = False

    def __init__(self, name: str) -> None:
        self.name = name

    def answer(self, question: object, compute: object) -> NoReturn:
        """Never called: there is nothing to ask about."""
        raise AssertionError(self.name)

    def read(self) -> NoReturn:
        """Never called: there is nothing to read."""
        raise AssertionError(self.name)

    def change(self, change: Change) -> NoReturn:
        """Never called: there is nothing to change."""
        raise AssertionError(self.name)

    def take_pending(self) -> list[Change]:
        """Return nothing: there is nothing to change."""
        return []


def check_used(unit: Unit) -> None:
    """Raise UsageError where the caller has put or dropped a gradient of ``unit`` that the backward has used."""
    with without_dispatch():
        dropped = next((segment for segment in unit.gradients.sources if segment.parameter.grad is None), None)
    if dropped is not None:
        raise UsageError(
            f"parameter {dropped.name}: .grad dropped between backward and optimizer.step() under"
            ' update="backward", which has used it: the step cannot be skipped any more; expected step() once more,'
            ' or tiered.AdamW(..., update="step")'
        )
    for segment, _ in unit.gradients.changed_by_hand():
        raise UsageError(
            f'parameter {segment.name}: a gradient put into .grad by hand under update="backward", where gradients'
            ' are used up as they become final; expected tiered.AdamW(..., update="step")'
        )


def show_used(unit: Unit) -> None:
    """Let each ``.grad`` of ``unit`` say again that the backward has used it; the caller's own tensors there go."""
    sources = unit.gradients.sources
    with without_dispatch():
        for segment in unit.segments:
            source = sources.get(segment)
            looks = segment.shape, segment.strides, segment.dtype, unit.tier.device
            segment.parameter.grad = StandIn.of(source, *looks) if source is not None else None

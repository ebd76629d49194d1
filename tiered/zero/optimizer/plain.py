"""Plain parameters, never sharded, whose optimizer state lives in a store: the optimizer's view of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tiered.errors import UsageError
from tiered.zero.parameters.unit import Segment

__all__ = ["PlainSegment", "PlainUnit"]


class PlainSegment(Segment):
    """A parameter in ordinary memory; its bytes are the caller's."""

    __slots__ = ()

    def memory(self) -> torch.Tensor:
        """Return the parameter's values: (numel,) in memory order, writable. Raises UsageError for a changed layout."""
        if self.parameter.stride() != self.strides:
            raise UsageError(
                f"parameter {self.name} has strides {self.parameter.stride()}, and had {self.strides} when the"
                " optimizer was made; expected the memory format to stay: change it before"
            )
        return self.parameter.detach().as_strided((self.numel,), (1,))

    def gradient(self) -> torch.Tensor:
        """Return the parameter's gradient: (numel,) in the same order; a copy where its strides differ."""
        gradient = self.parameter.grad
        assert gradient is not None
        if gradient.layout is not torch.strided:
            raise UsageError(f"parameter {self.name}: a {gradient.layout} gradient; expected a dense one")
        if gradient.stride() != self.strides:
            ordered = torch.empty_strided(self.shape, self.strides, dtype=gradient.dtype, device="cpu")
            gradient = ordered.copy_(gradient)
        return gradient.detach().as_strided((self.numel,), (1,))


class PlainUnit:
    """Plain parameters as one unit of optimizer state."""

    def __init__(self, parameters: Sequence[tuple[str, torch.Tensor]]) -> None:
        self.name = "plain"
        self.segments: list[PlainSegment] = []
        for name, parameter in parameters:
            if parameter.device.type != "cpu":
                raise UsageError(f"parameter {name} is on {parameter.device}; expected the CPU, or a sharded model")
            segment = PlainSegment(name, parameter, parameter.dtype)  # type: ignore[arg-type]
            if segment.strides != parameter.stride():
                raise UsageError(
                    f"parameter {name} does not fill its memory densely; expected p.data = p.data.contiguous()"
                )
            segment.unit = self  # type: ignore[assignment]
            self.segments.append(segment)

    def trained(self) -> list[PlainSegment]:
        """Return the segments whose parameters have a gradient now."""
        return [segment for segment in self.segments if segment.parameter.grad is not None]

    def zero_grad(self, *, set_to_none: bool) -> None:
        """Drop all gradients, or zero them."""
        for segment in self.segments:
            gradient = segment.parameter.grad
            if set_to_none or gradient is None:
                segment.parameter.grad = None
            else:
                gradient.detach_().zero_()

    def __repr__(self) -> str:
        return f"PlainUnit({len(self.segments)} parameters)"

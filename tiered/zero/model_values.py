"""ModelValues: the tensors of a model's ``state_dict()``, sharded or not, to be read one at a time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tiered.bytes.interrupt import uninterrupted
from tiered.zero.engine import Engine
from tiered.zero.parameters.parameter import TieredParameter
from tiered.zero.parameters.unit import Segment, Unit

__all__ = ["ModelValues", "opened"]


class ModelValues:
    """``state`` is what ``model.state_dict()`` gives, with a meta tensor for each sharded parameter.

    Names of one tied parameter have meta tensors of one storage. Between steps only.
    """

    def __init__(self, model: nn.Module, what: str) -> None:
        """``what`` names the caller in messages. Reads no parameter. Raises UsageError at the wrong time."""
        parameters = [p for p in model.parameters() if isinstance(p, TieredParameter)]
        segments: list[Segment] = [p.segment for p in parameters if isinstance(p.segment.unit, Unit)]
        self._segments = {segment.layout().untyped_storage()._cdata: segment for segment in segments}
        self.engines: list[Engine] = list(dict.fromkeys(segment.unit.engine for segment in segments))  # type: ignore[misc]
        units = list(dict.fromkeys(segment.unit for segment in segments))
        self._next = dict(itertools.pairwise(units))
        for engine in self.engines:
            engine.check_idle(what)
            engine.phase.export.only_looks = True
        try:
            self.state: dict[str, Any] = dict(model.state_dict())
        finally:
            for engine in self.engines:
                engine.phase.export.only_looks = False

    def segment_of(self, tensor: torch.Tensor) -> Segment | None:
        """Return the parameter that ``tensor`` of ``state`` stands for, None for a tensor that has its values."""
        return self._segments.get(tensor.untyped_storage()._cdata) if tensor.is_meta else None

    @uninterrupted
    def read(self, segment: Segment) -> torch.Tensor:
        """Return the values of a parameter in DRAM, with its shape and strides: the store's own bytes, to be read.

        They stay as long as the tensor lives, and take room of the budget meanwhile.
        """
        with segment.unit.working_set.mark:
            unit = segment.unit
            is_first = not unit.is_open
            span = unit.open("r")[segment.span]
            if is_first and unit in self._next:
                unit.working_set.prefetch(self._next[unit].keys)
            unit.buffer.use()
            return segment.view(span).detach().cpu()


@contextmanager
def opened(model: nn.Module, what: str) -> Iterator[ModelValues]:
    """Lend the values of ``model``; its units are parked afterwards."""
    values = ModelValues(model, what)
    try:
        yield values
    finally:
        for engine in values.engines:
            engine.open_units.park_all()

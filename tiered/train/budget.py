"""Whether a DRAM budget trains a model, known from the model's shape: no parameter gets bytes, nothing is opened."""

from __future__ import annotations

import torch

from tiered.train.task import GPT, Shape
from tiered.zero.division import divide_into_units
from tiered.zero.formats.budget import share_out_as_asked
from tiered.zero.layout import SegmentSpec, UnitLayout, lay_out
from tiered.zero.parameters.unit import dense_strides

__all__ = ["check_budget"]


def check_budget(shape: Shape, dtype: torch.dtype, *, dram: int, hold: str | int) -> None:
    """Raise the CapacityError that ``tiered.shard`` would raise for ``GPT(shape)`` in a store with ``dram`` bytes."""
    share_out_as_asked(_units(shape, dtype), dram, hold)


def _units(shape: Shape, dtype: torch.dtype) -> list[UnitLayout]:
    """Return the units of ``GPT(shape)``, the root unit first."""
    with torch.device("meta"):
        model = GPT(shape)
    modules = divide_into_units(model, None)  # none of a GPT's lies inside another
    members: dict[str, list[SegmentSpec]] = {"root": [], **{name: [] for name in modules}}
    unit_of = {parameter: name for name, module in modules.items() for parameter in module.parameters()}
    for name, parameter in model.named_parameters():
        spec = SegmentSpec(name, tuple(parameter.shape), dense_strides(parameter), dtype, parameter.requires_grad)
        members[unit_of.get(parameter, "root")].append(spec)
    return [lay_out(name, specs) for name, specs in members.items()]

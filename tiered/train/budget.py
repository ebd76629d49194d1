"""Whether a DRAM budget trains a model, known from the model's shape: no parameter gets bytes, nothing is opened."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from tiered.train.model import GPT, Shape
from tiered.zero.budget import share_out_as_asked
from tiered.zero.division import divide_into_units
from tiered.zero.parameters.unit import Segment, Unit

if TYPE_CHECKING:
    from tiered.store.residency.working_set import WorkingSet

__all__ = ["check_budget"]


def check_budget(shape: Shape, dtype: torch.dtype, *, dram: int, hold: str | int) -> None:
    """Raise the CapacityError that ``tiered.shard`` would raise for ``GPT(shape)`` in a store with ``dram`` bytes."""
    share_out_as_asked(_units(shape, dtype), dram, hold)


def _units(shape: Shape, dtype: torch.dtype) -> list[Unit]:
    """Return the units of ``GPT(shape)``, the root unit first, without a store behind them."""
    with torch.device("meta"):
        model = GPT(shape)
    modules = divide_into_units(model, None)  # none of a GPT's lies inside another
    members: dict[str, list[Segment]] = {"root": [], **{name: [] for name in modules}}
    unit_of = {parameter: name for name, module in modules.items() for parameter in module.parameters()}
    for name, parameter in model.named_parameters():
        members[unit_of.get(parameter, "root")].append(Segment(name, parameter, dtype))
    nowhere = cast("WorkingSet", None)
    return [Unit(name, "", segments, nowhere) for name, segments in members.items()]

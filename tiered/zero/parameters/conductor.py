"""Conductor: the part of the engine of one sharded model that the rooms of zero/ see."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from tiered.store.residency.working_set import WorkingSet
from tiered.store.store import Store
from tiered.tiers.compute_tier import ComputeTier
from tiered.tiers.schedule import SharedSchedule
from tiered.zero.parameters.calls import Calls
from tiered.zero.parameters.open_units import Ahead, OpenUnits
from tiered.zero.parameters.unit import Segment, Unit
from tiered.zero.step import Phase

__all__ = ["Conductor", "ForwardCalls", "MasterKeeper"]


class _Backward(Protocol):
    def seen(self) -> None:
        """A part of the model runs in a backward: the engine must hear of the end of that backward."""


class ForwardCalls(Protocol):
    """Methods and recomputations of a model report here: their calls begin and end as module calls do."""

    def enter(self, module: nn.Module, unit: Unit | None) -> None:
        """A call of ``module`` begins."""

    def enter_outermost(self, module: nn.Module) -> None:
        """The outermost call begins, of ``module``."""

    def leave(self, unit: Unit | None) -> None:
        """A call of the module of ``unit``, if it is one's, is over."""

    def leave_abandoned(self, beginning: nn.Module | None = None) -> None:
        """Leave calls that an interrupt has ended and no hook has seen."""

    def ended(self) -> None:
        """An outermost forward with gradients has ended."""

    def method_ended(self) -> None:
        """The outermost method has ended."""


class MasterKeeper(Protocol):
    """The owner of the fp32 masters: the optimizer, and before there is one, ``Masters``."""

    def set_master(self, segment: Segment, source: torch.Tensor | None) -> None:
        """The caller has replaced the values of ``segment``: its master becomes ``source``, or those values."""


class Conductor(Protocol):
    """One sharded model: its parts, and the moves that need more than one part."""

    store: Store
    working_set: WorkingSet
    units: list[Unit]  # the root unit first
    tier: ComputeTier
    phase: Phase
    calls: Calls
    schedule: SharedSchedule
    open_units: OpenUnits
    ahead: Ahead

    @property
    def backward(self) -> _Backward:
        """The facts about the backward that runs."""

    @property
    def forward(self) -> ForwardCalls:
        """The module calls that are under way."""

    def model(self) -> nn.Module | None:
        """Return the module that was sharded, as long as it lives."""

    def check_idle(self, what: str) -> None:
        """Finish the pending updates; raise UsageError unless no forward, backward or step is under way."""

    def written(self, segment: Segment, source: torch.Tensor | None) -> None:
        """The values of ``segment`` were replaced, by ``source`` where it is known."""

    def watch(self, parameter: nn.Parameter) -> None:
        """Follow the gradient of ``parameter`` if it requires one."""

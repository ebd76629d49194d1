"""One forward, as the units see it: the module calls that are under way, and the actions as each begins and ends.

Module hooks and wrapped methods report here. The calls themselves are listed in calls.py; backward.py is the other half
of a step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tiered.bytes.interrupt import uninterrupted
from tiered.store.waiting.recorder import Begun
from tiered.zero.activations.activations import Activations
from tiered.zero.activations.saved import is_recomputing, with_repeated_arguments
from tiered.zero.gradients.backward import Backward
from tiered.zero.one_rank import refuse_distributed
from tiered.zero.parameters.access import check_forward
from tiered.zero.parameters.conductor import Conductor
from tiered.zero.parameters.methods import any_requires_grad, own
from tiered.zero.parameters.unit import Unit
from tiered.zero.step import Event, graph_task, in_graph_task

__all__ = ["Forward"]


class Forward:
    """The module calls of one model. Units are shown where their call begins, and parked where it ends."""

    def __init__(
        self, conductor: Conductor, backward: Backward, activations: Activations, begin: Callable[[bool], None]
    ) -> None:
        """``begin(is_first)`` is called as an outermost forward begins, the first one of a step or not."""
        self._conductor = conductor
        self._phase = conductor.phase
        self._calls = conductor.calls
        self._open_units = conductor.open_units
        self._backward = backward
        self._activations = activations
        self._begin = begin
        self._begun: Begun | None = None  # the outermost call that runs, where it is no recomputation

    @uninterrupted
    def begin_call(self, unit: Unit | None, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Before the forward of ``module``, whose ``unit`` it is if it is one's; return the arguments to call it with.

        None for those that it was called with.
        """
        with self._conductor.working_set.mark:
            if self._calls and module is self._conductor.model():
                self.leave_abandoned(module)
            changed = with_repeated_arguments(args, kwargs) if graph_task() != -1 and is_recomputing() else None
            self.enter(module, unit)
            return changed

    @uninterrupted
    def end_call(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """After the forward of ``module``, also one that failed.

        Return the output to hand on, with nothing of it in a unit's buffer.
        """
        with self._conductor.working_set.mark:
            if output is None and (error := sys.exc_info()[1]) is not None:
                self._conductor.tier.note_dials(error, f"the forward of {type(module).__name__}")
            for call in self._calls.end(module):
                self.leave(call.unit)
            if self._calls.are_in_forward:
                return output
            if self._begun is not None:
                self._conductor.working_set.recorder.worked("forward", type(module).__name__, self._begun)
                self._begun = None
            if torch.is_grad_enabled() and not in_graph_task() and any_requires_grad(output):
                self.ended()
            return own(output, self._open_units.address_of)

    def enter(self, module: nn.Module, unit: Unit | None) -> None:
        """A module call begins."""
        if not self._calls.are_in_forward:
            self._begun = None if in_graph_task() else self._conductor.working_set.recorder.begin()
        call = self._calls.begin(module, unit)
        if len(self._calls) == 1:
            self.enter_outermost(module)
        self._calls.enter_pair(call)
        if unit is not None:
            unit.show()

    def enter_outermost(self, module: nn.Module) -> None:
        """The outermost call begins, of ``module``. Raises UsageError where none may, and changes nothing then."""
        name = type(module).__name__
        check_forward(self._conductor, name)
        if in_graph_task():
            self._backward.seen()
            return
        self._backward.settle()
        phase = self._phase
        if phase.updates_in_backward and torch.is_grad_enabled():
            refuse_distributed(None)
        phase.check(Event.FORWARD if torch.is_grad_enabled() else Event.EVALUATION, f"forward of {name}")
        goes_on = self._calls.goes_on_with(module)
        is_first = not (goes_on or phase.is_between or phase.has_updated or phase.has_gradients())
        self._activations.begin_forward(is_first=is_first)
        self._begin(is_first)

    def leave(self, unit: Unit | None) -> None:
        """A call of the module of ``unit``, if it is one's, is over: park it unless it is used on."""
        if unit is None or self._phase.abandoned or unit in self._open_units.shielded or unit in self._calls.units():
            return
        if not self.keeps_open() or unit.was_written():
            unit.park()

    def keeps_open(self) -> bool:
        """Return whether units stay open until their backward: all keys are in DRAM for good, where they are used.

        Not in a method that runs outside of any forward: its recomputation finds its units parked, as it did.
        """
        conductor = self._conductor
        if not (conductor.schedule.is_settled and conductor.tier.computes_in_dram) or self._calls.methods:
            return False
        return torch.is_grad_enabled() and not in_graph_task()

    def leave_abandoned(self, beginning: nn.Module | None = None) -> None:
        """Leave calls that an interrupt has ended and no hook has seen; a call of ``beginning`` begins now."""
        if not in_graph_task():
            self._calls.leave_abandoned(self.leave, beginning)

    def leave_methods(self) -> None:
        """An event between steps comes: methods that are calls, with no forward inside, stop being calls."""
        self._calls.leave_methods(self.leave)

    def ended(self) -> None:
        """An outermost forward with gradients has ended."""
        self._phase.is_between = True
        self._activations.end_forward(may_go_on=bool(self._calls.methods))

    def method_ended(self) -> None:
        """The outermost method has ended."""
        self._activations.decide()

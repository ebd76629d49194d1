"""Engine: the parts of one sharded model, and the moves that need several parts: see [Note: the way of a unit].

The engine owns no bytes (the working set does), does no arithmetic on them (the optimizer does) and does not decide
which calls are legal (the phase does). The engine is the one object that knows all the parts of a model.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from tiered.bytes.exit_and_fork import after_fork, before_fork
from tiered.errors import UsageError
from tiered.store.store import Store
from tiered.store.waiting.calling_thread import is_in_transform
from tiered.tiers.schedule import SharedSchedule
from tiered.zero.activations.activations import Activations
from tiered.zero.formats.codec import Bucket
from tiered.zero.gradients.backward import Backward
from tiered.zero.gradients.model_gradients import ModelGradients, Reclaimer, Updates
from tiered.zero.gradients.relayout import UnitLayouts
from tiered.zero.gradients.unit_gradients import UnitGradients
from tiered.zero.layout import Shares, UnitLayout
from tiered.zero.parameters.gather_plan import GatherPlan
from tiered.zero.parameters.module_calls import ModuleCalls
from tiered.zero.parameters.open_units import OpenUnits, ahead_on
from tiered.zero.parameters.parameter_access import Access, end_interrupted
from tiered.zero.parameters.unit import Segment, Unit
from tiered.zero.step import ONLY_ADDED, Event, Phase, graph_task
from tiered.zero.torch_func_guard import guard_functorch

__all__ = ["Engine"]


_NUM_OPS = operator.attrgetter("num_ops")  # of the operations that run on a unit at this moment


class MasterKeeper(Protocol):
    """The owner of the fp32 masters: the optimizer, and before there is one, ``Masters``."""

    def set_master(self, segment: Segment, source: torch.Tensor | None) -> None:
        """The caller has replaced the values of ``segment``: its master becomes ``source``, or those values."""

    def fill_master(self, segment: Segment, values: Callable[[slice], torch.Tensor] | None) -> None:
        """The same, of what lies in this rank's shard; ``values`` give a slice of the elements in memory order."""


class Engine:
    """One sharded model between, in and after its forwards and backwards. One thread drives it."""

    activations: Activations
    gradients: ModelGradients
    schedule: SharedSchedule

    def __init__(
        self, store: Store, model: nn.Module, units: Sequence[Unit], *, shares: Shares, masters: MasterKeeper
    ) -> None:
        self.store, self.working_set, self.masters = store, store.working_set, masters
        self.units, self.tier = list(units), units[0].tier  # the root unit first, then in the order of the modules
        self.updates = Updates()
        self.model = weakref.ref(model)
        self.activations = Activations(self)  # order: asked before the units to give bytes back
        self.calls = ModuleCalls(self, self.activations.pack)
        self.plan = GatherPlan(self.units[0])
        self.open_units = OpenUnits(self.units[0], self.plan)
        self.gradients = ModelGradients(self.units, self.open_units)
        has_gradients = self.gradients.are_there
        self.phase = Phase(store, self.updates, calls_under_way=self.calls.under_way, has_gradients=has_gradients)
        self.reclaimer = Reclaimer(self.open_units, self.gradients, lambda: self.updates)
        self.working_set.add_reclaimer(self.reclaimer.reclaim)
        self.ahead = ahead_on(self.tier, self.plan, lambda: self.updates)
        self.tier.attach(lambda key: self.schedule.distance(key), self.reclaimer.make_way)
        self.backward = Backward(self, self._gradients_came)
        self.layouts = UnitLayouts(store, self.units, shares)
        owner = Access(self)
        for unit in self.units:
            unit.engine, unit.owner = self, owner
            unit.gradients = UnitGradients(unit, self.gradients)
        self.expect_steps()
        before_fork(self, Engine.end_updates_before_fork)
        after_fork(self, Engine.forget)
        guard_functorch()

    def __repr__(self) -> str:
        return f"Engine({len(self.units)} units, {self.phase!r}, {self.open_units!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            "pickling or deepcopy of a sharded model; expected model.state_dict(), or store.commit() and tiered.Store"
            " in the other process"
        )

    # -- parameters ----------------------------------------------------------------------------------------------

    def watch(self, parameter: nn.Parameter) -> None:
        """Follow the gradient of ``parameter`` if it requires one. Raises UsageError where it may not, now."""
        self.calls.leave_abandoned()  # order: a forward or backward that has failed is no part of a step
        self.backward.settle()
        self.layouts.note_unfreezing(parameter, self.phase)
        self.backward.watch(parameter)

    # -- units ---------------------------------------------------------------------------------------------------

    def before_open(self, unit: Unit) -> tuple[str, tuple[Unit, ...]]:
        """A unit is about to be leased: finish its update, and park units where its slot is taken.

        Return the use of the lease, and the units that are to be parked once the unit is open.
        """
        if is_in_transform():
            raise UsageError(
                f"unit {unit.name!r}: swap in inside torch.func (grad, vjp, jvp, functionalize, ...); expected over a"
                " model in memory: one built afresh with model.state_dict() loaded"
            )
        if self.updates.is_busy or self.updates.failure is not None:
            self.updates.wait_for(unit)
        use = "backward" if graph_task() != -1 else "forward" if self.calls.under_way else "open"
        self.backward.before_gather(use) if unit.layout.world > 1 else None
        self.gradients.rooms.opening = unit.gradients.key if use == "backward" else ""
        running, stays = list(filter(_NUM_OPS, self.plan.gathered)), self.calls.keep_until_backward()
        before, after = self.plan.open(unit, used=self.calls.units(), running=running, until_backward=stays, use=use)
        for each in before:
            each.park()
        return use, after

    def finish_update(self, unit: Unit) -> None:
        """Wait for the update of ``unit``, if one is pending; raise the error of an update that failed."""
        if self.updates.is_busy or self.updates.failure is not None:
            self.updates.wait_for(unit)

    def opened(self, unit: Unit, idle: Sequence[Unit]) -> None:
        """A unit has leased its bytes: park the ``idle`` units, and ask for the keys that come next."""
        self.gradients.rooms.opening = ""
        self.open_units.opened(unit)
        for each in idle:
            each.park()
        self.backward.gathered() if unit.layout.world > 1 else None
        self.ahead.opened(unit)
        room = [unit.gradients.key] if unit.is_in_backward and unit.gradients.nbytes else []
        self.schedule.use(*unit.keys, *room)

    # -- steps ---------------------------------------------------------------------------------------------------

    def begin_forward(self, is_first: bool) -> None:
        """An outermost forward begins; ``is_first`` of its step."""
        self.tier.refuse_capture("forward")
        if self.layouts.is_stale:
            self.layouts.renew(self.plan.lent, self.expect_steps)
        self.backward.begin_forward(is_first)
        if is_first:
            self.schedule.rewind()

    def _gradients_came(self) -> None:
        self.calls.leave_methods()
        self.activations.decide()

    def _end_unreported_calls(self) -> None:
        """An event between steps comes: end the calls, the backward and the load that have ended without a report."""
        self.calls.leave_abandoned()
        self.calls.leave_methods()
        self.backward.settle()
        end_interrupted(self)

    def check_between_steps(self, what: str) -> None:
        """Raise UsageError unless no forward, backward or step is under way; updates may be pending."""
        self._end_unreported_calls()
        self.phase.check(Event.EVALUATION, what)  # order: an abandoned step is reported first
        self.phase.check_not_running(what)
        self.phase.check(Event.BETWEEN_STEPS, what)

    def check_idle(self, what: str) -> None:
        """Finish the pending updates; raise UsageError unless no forward, backward or step is under way."""
        self.check_between_steps(what)
        self.updates.finish_all()

    def step(self) -> list[Unit]:
        """The optimizer's step begins: return the units whose update is due; none where backwards have updated them.

        Raises UsageError, with nothing changed, where no step may be. ``step_ended`` must follow.
        """
        self.tier.refuse_capture("optimizer.step()")
        self._end_unreported_calls()
        self.phase.check(Event.STEP, "optimizer.step()")
        self.phase.check_not_running("optimizer.step()")
        self.backward.micro_steps.warn()
        in_backward = self.phase.updates_in_backward
        if self.backward.are_only_added(in_backward=in_backward):
            raise UsageError(ONLY_ADDED)
        self.open_units.park_all()
        if in_backward:
            self.backward.check_used()
            return []
        due = self.gradients.reconcile_all()
        self.gradients.make_room_for_updates()
        return due

    def step_ended(self) -> None:
        """All updates of the step are handed over."""
        self.phase.conclude()
        self.phase.is_between = False
        self.gradients.drop_all()
        self.activations.swapped.sweep()
        self.schedule.end_step()

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        """Drop all gradients, or zero them. Raises UsageError where a backward has used them and step() is due."""
        self.backward.settle()
        if self.phase.has_updated:
            self.backward.show_used()
            self.phase.check(Event.ZERO_GRAD, "optimizer.zero_grad()")
        self.gradients.drop_all() if set_to_none else self.gradients.zero_all()

    def attach(
        self,
        updates: Updates,
        submit: Callable[[Unit], None],
        buckets: Mapping[Unit, Sequence[Bucket[Segment]]],
        follow: Callable[[Unit, UnitLayout], None],
    ) -> None:
        """An optimizer was made: ``submit`` hands over the update of a unit, ``buckets`` hold the optimizer's state.

        ``follow(unit, old)`` brings the state of a unit that was laid out anew to where its elements are.
        """
        self.updates = self.phase.updates = updates
        self.backward.submit = submit
        self.layouts.set_state(buckets, follow, updates_in_backward=self.phase.updates_in_backward)
        self.expect_steps()

    def expect_steps(self) -> None:
        """Hold the keys that placement chooses of the present ones, and expect their uses in the order of a step."""
        self.layouts.is_stale = True  # the next forward checks once that the units fit the trained parameters
        self.schedule = self.layouts.expect_steps(self.gradients)
        self.plan.num_slots, self.plan.keeps = self.layouts.gather_slots()

    def end_updates_before_fork(self) -> None:
        """The process is about to fork: wait for all updates. The next call raises the error of one that fails."""
        if self.phase.process.is_here:
            self.updates.wait_for_all()

    def forget(self) -> None:
        """In a forked child: forget all that is open, for the bytes are the parent's."""
        self.updates.forget()
        self.open_units.forget()
        self.gradients.forget()
        self.calls.forget()

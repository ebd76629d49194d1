"""Engine: what runs now (forward, backward, step), and who may touch which parameter when.

Module hooks report here; units are opened and parked from here. The engine owns no bytes (the working set does), does
no arithmetic on them (update.py does), and leaves the course of a backward to backward.py.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from tiered.errors import StepAbandonedError, StoreLostError, UsageError
from tiered.store.store import Store
from tiered.zero.activations.activations import Activations
from tiered.zero.export import Export
from tiered.zero.forks import forget_in_children
from tiered.zero.gradients.backward import Backward, in_graph_task
from tiered.zero.gradients.gradients import UnitGradients
from tiered.zero.gradients.relayout import UnitLayouts
from tiered.zero.guard import obey
from tiered.zero.layout import Shares
from tiered.zero.microbatching.lanes import Lanes
from tiered.zero.microbatching.streams import Foresight
from tiered.zero.optimizer.update_worker import UpdateWorker
from tiered.zero.parameters.access import check_access, check_forward
from tiered.zero.parameters.calls import Calls
from tiered.zero.parameters.functorch import check_no_transform, guard_functorch
from tiered.zero.parameters.outputs import any_requires_grad, own
from tiered.zero.parameters.parameter import is_write, name_of
from tiered.zero.parameters.residency import Residency
from tiered.zero.parameters.shared_schedule import SharedSchedule

if TYPE_CHECKING:
    from tiered.zero.formats.codec import Bucket
    from tiered.zero.parameters.unit import Segment, Unit

__all__ = ["Engine", "Updater"]


class Updater(Protocol):
    """What the engine asks of an optimizer."""

    in_backward: bool  # update="backward"

    def begin(self) -> None:
        """Freeze the hyperparameters for one step."""

    def check(self, unit: Unit) -> None:
        """Raise UsageError where the unit has a gradient that cannot be used."""

    def update(self, unit: Unit) -> None:
        """Hand the update of the unit's parameters that have a gradient to the engine's worker, and the gradients."""


class Engine:
    """The state of one sharded model between, in and after its forwards and backwards.

    Invariant: outside a module call, a backward, the time between a forward and its backward, and ``unsharded``, no
    parameter's values can be reached. One thread drives it. ``abandoned`` is the reason once a step was left half done;
    ``is_between`` holds from a forward with gradients to the end of its backward.
    """

    schedule: SharedSchedule

    def __init__(self, store: Store, model: nn.Module, units: Sequence[Unit], *, shares: Shares) -> None:
        self.store = store
        self.working_set = store.working_set
        self.units = list(units)  # the root unit first, then in the order of the modules
        self.updater: Updater | None = None
        self.write_listeners: list[Callable[[Segment, torch.Tensor | None], None]] = []  # values were replaced
        self.abandoned = ""
        self.must_resume = False  # the store holds a run that was not resumed yet
        self.is_between = False
        self.export = Export()  # inside state_dict(): detach() copies
        self.num_loading = 0  # inside load_state_dict(): copy_() writes
        self.num_accumulating = 0  # inside tiered.accumulate
        self.pending_bytes = 0  # DRAM that updates handed over in a backward may keep, beyond one
        self.worker = UpdateWorker(self.working_set)
        store.add_producer(self.worker)
        self.worker.abandon = self.abandon
        self.worker.on_use = lambda key: self.schedule.use_promised(key)
        self.activations = Activations(self)  # Order: asked before the residency to give bytes back
        self.residency = Residency(self.working_set, self.units[0], self.worker)
        self.residency.distance = lambda key: self.schedule.distance(key)
        self.backward = Backward(self)
        self.model = weakref.ref(model)
        self.pid = os.getpid()
        self.calls = Calls(self)
        self.lanes: Lanes | None = None  # the micro-batches that take turns in a forward or backward now
        self.foresight = Foresight()
        self.layouts = UnitLayouts(
            store,
            self.units,
            shares,
            before_move=self.finish_update,
            after_move=self.expect_steps,
            abandon=self.abandon,
        )
        for unit in self.units:
            unit.engine = self
            unit.gradients = UnitGradients(unit, self.units, self.residency, self.layouts.lay_out_anew)
            self.residency.add_room(unit.gradients)
        self.expect_steps()
        forget_in_children(self)
        guard_functorch()

    def __repr__(self) -> str:
        return f"Engine({len(self.units)} units, {self.residency!r}, depth {len(self.calls)})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            "pickling or deepcopy of a sharded model; expected model.state_dict(), or store.commit() and tiered.Store"
            " in the other process"
        )

    # -- what may be touched when --------------------------------------------------------------------------------

    @contextmanager
    def access(self, segment: Segment, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        """Show ``segment``'s parameter for one operation ``func``; raises UsageError at the wrong time."""
        write = is_write(func, args, kwargs)
        check_access(self, segment, name_of(func), is_write=write)
        if not in_graph_task():
            self.calls.touched(segment)
        unit = segment.unit
        unit.show("rw" if write else "r")
        self.activations.touch(unit)  # Order: to show it may finish an update of it
        unit.num_ops += 1
        try:
            with self.calls.pair_for_operation():
                yield
        finally:
            unit.num_ops -= 1
        if write and self.num_loading:
            self.written(segment, args[1] if len(args) > 1 else None)

    def is_unsharded(self, segment: Segment) -> bool:
        """Return whether a ``tiered.unsharded`` block keeps the values of ``segment`` where they are."""
        return segment.unit in self.residency.shielded

    def check_usable(self, what: str) -> None:
        """Raise unless the model can be used: what an update failed of, StepAbandonedError, UsageError."""
        self.check_updates()
        if self.abandoned and not self.store.durable:
            raise StoreLostError(
                f"{what}: {self.abandoned}; a store with durable=False cannot roll back: start again in a new one"
            )
        if self.abandoned:
            raise StepAbandonedError(
                f"{what}: the step was abandoned ({self.abandoned}); expected store.rollback(), store.resume() or"
                " store.close() next"
            )
        if self.must_resume:
            raise UsageError(
                f"{what}: the store holds a run at generation {self.store.generation}; expected store.resume() first"
                " (after the optimizer and everything else is registered), or a store in an empty directory"
            )

    def check_updates(self) -> None:
        """Raise what an update that was handed over, or its commit, has failed of; the step is abandoned."""
        self.worker.raise_failure()

    def finish_updates(self) -> None:
        """Wait for all updates that are pending and the commit that waits for them; raise what one failed of."""
        self.worker.finish_all()

    def abandon(self, reason: str) -> None:
        """Mark the step as left half done; only rollback, resume and close remain."""
        self.abandoned = self.abandoned or reason

    def give_up(self, reason: str) -> str:
        """Mark the step as left half done, and return what the caller can do next."""
        self.abandon(reason)
        return "store.rollback() to go on" if self.store.durable else "start again in a new store"

    def check_idle(self, what: str) -> None:
        """Finish what is pending; raise UsageError unless no forward, backward or step is under way."""
        self.check_between_steps(what)
        self.finish_updates()

    def check_between_steps(self, what: str) -> None:
        """Raise UsageError unless no forward, backward or step is under way; updates may be pending."""
        self.leave_abandoned()
        self.leave_methods()
        self.backward.settle()
        self.check_usable(what)
        if self.calls or in_graph_task():
            raise UsageError(f"{what} inside a forward or backward; expected between steps")
        if self.backward.has_updated or self.has_gradients():
            raise UsageError(
                f"{what} with gradients pending; expected after optimizer.step(), or after optimizer.zero_grad(), which"
                " drops them"
            )

    def has_gradients(self) -> bool:
        """Return whether some unit has gradients that no step has used and nobody has dropped."""
        return any(unit.gradients.are_there() for unit in self.units)

    # -- module calls --------------------------------------------------------------------------------------------

    def enter(self, module: nn.Module, unit: Unit | None) -> None:
        """A module call begins."""
        call = self.calls.begin(module, unit)
        if len(self.calls) == 1:
            self.enter_outermost(module)
        self.calls.enter_pair(call)
        if unit is not None:
            unit.show()

    def exit(self, module: nn.Module, output: Any) -> Any:
        """A module call ends, also by an exception; return the output with nothing of it in a unit's buffer."""
        for call in self.calls.end(module):
            self.leave(call.unit)
        if self.calls.are_in_forward:
            return output
        if torch.is_grad_enabled() and not in_graph_task() and any_requires_grad(output):
            self.forward_ended()
        return own(output, self.residency.address_of)

    def forward_ended(self) -> None:
        """An outermost forward with gradients has ended."""
        self.is_between = True
        self.activations.end_forward(may_go_on=bool(self.calls.stack.methods))

    def leave_methods(self) -> None:
        """What belongs between steps comes: methods that are calls, with no forward inside, are none any more."""
        for call in self.calls.leave_methods():
            self.leave(call.unit)

    def leave_abandoned(self, beginning: nn.Module | None = None) -> None:
        """Leave calls that an interrupt has ended and no hook has seen; ``beginning`` is whose call begins now."""
        if not in_graph_task():
            for call in self.calls.abandoned(beginning):
                self.leave(call.unit)

    def enter_outermost(self, module: nn.Module) -> None:
        """The outermost call begins, of ``module``."""
        name = type(module).__name__
        check_forward(self, name)
        if in_graph_task():
            self.backward.seen()
            return
        self.backward.settle()
        self.check_usable(f"forward of {name}")
        if self.backward.has_updated:
            self.abandon("a forward after a backward that had updated parameters, without optimizer.step()")
            self.check_usable(f"forward of {name}")
        is_under_way = self.lanes is not None and self.lanes.are_under_way
        is_first = not (self.is_between or self.has_gradients() or is_under_way or self.calls.goes_on_with(module))
        self.activations.begin_forward(is_first=is_first)
        if self.layouts.is_stale:
            self.layouts.renew(self.residency.shielded)
        if is_first:
            self.forget_touches()
            self.schedule.rewind()

    def leave(self, unit: Unit | None) -> None:
        """A call of the module of ``unit``, if it is one's, is over: park it unless it is used on."""
        if unit is None or unit in self.calls.units() or unit in self.residency.shielded or self.abandoned:
            return
        if self.lanes is not None:
            return  # other micro-batches come by: it is parked when another unit is opened
        unit.park()

    def before_open(self, unit: Unit) -> str:
        """A unit is about to be leased: its update must be through. Return what for; "" where it is open by then."""
        check_no_transform(f"unit {unit.name!r}: swap in")
        if self.lanes is not None:
            self.lanes.about_to_open(unit)
            if unit.is_open:  # a micro-batch that took its turn has opened it
                return ""
        self.finish_update(unit)
        in_backward = in_graph_task()
        self.residency.opening = unit if in_backward else None
        return "backward" if in_backward else "forward" if self.calls else "open"

    def finish_update(self, unit: Unit) -> None:
        """Wait for the update of ``unit``, if one is pending; raise what an update failed of."""
        if self.worker.is_busy:
            self.worker.serve()
            self.worker.wait_for(unit)
        self.check_updates()

    def opened(self, unit: Unit) -> None:
        """A unit has leased its bytes: park what is idle, ask for what comes next."""
        self.residency.opened(unit, self.calls.units())
        gradients = unit.gradients
        if unit.is_in_backward and gradients.nbytes:
            self.schedule.use(*unit.keys, gradients.room)
        else:
            self.schedule.use(*unit.keys)
        self._make_way()

    def parked(self, unit: Unit) -> None:
        """A unit is about to give its bytes back."""
        self.residency.parked(unit)

    def check_readable(self, unit: Unit) -> None:
        """Raise unless saved references to ``unit`` may be read now; a backward does."""
        self.check_usable(f"backward through unit {unit.name!r}")
        self.backward.seen()

    def check_unused(self, what: str) -> None:
        """Raise UsageError where the optimizer uses gradients as they come, before ``what`` could see them."""
        if self.updater is not None and self.updater.in_backward:
            raise UsageError(
                f'{what} under update="backward", where gradients are used up as they become final; expected'
                ' tiered.AdamW(..., update="step")'
            )

    def _make_way(self) -> None:
        """Give back what is in the way of what comes next; gradients handed over in a backward are limited anyway."""
        if self.schedule.is_settled:
            return
        is_pending = self.worker.is_busy and self.updater is not None and not self.updater.in_backward
        self.residency.make_way(self.schedule.soon(), pending=is_pending)

    def assign(self, segment: Segment, value: torch.Tensor) -> None:
        """``parameter.data = value`` while it is shown for writing: the values are copied. Raises UsageError."""
        if value.shape != segment.shape or value.dtype != segment.dtype:
            raise UsageError(
                f"parameter {segment.name}: .data = {tuple(value.shape)} {value.dtype}; expected the {segment.shape}"
                f" {segment.dtype} that it was sharded with"
            )
        with torch.no_grad():
            segment.parameter.copy_(value)

    def detached(self, segment: Segment, result: torch.Tensor) -> torch.Tensor:
        """``parameter.detach()``: inside state_dict() the caller's own."""
        return self.export.copy(segment, result) if self.export else result

    def set(self, segment: Segment, source: torch.Tensor) -> None:
        """``parameter.set_(source)``: raises UsageError."""
        segment.parameter._refuse()  # type: ignore[attr-defined]

    def copy(self, segment: Segment) -> nn.Parameter:
        """``copy.deepcopy`` of a parameter: raises UsageError."""
        raise UsageError(
            f"parameter {segment.name}: refused deepcopy of a sharded parameter; copy model.state_dict() into a model"
            " built afresh"
        )

    def require_gradient(self, parameter: nn.Parameter) -> None:
        """A parameter's ``requires_grad`` was set: follow its gradient, and make a place for it in time."""
        self.backward.watch(parameter)
        self.layouts.is_stale = True

    def forget_touches(self) -> None:
        """Forget which parameters were touched how often: a new step begins."""
        for unit in self.units:
            for segment in unit.segments:
                segment.num_grad_touches = segment.num_no_grad_touches = 0

    # -- steps ---------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """The optimizer's step: hand over what has a gradient, or, under update="backward", conclude; no waiting."""
        assert self.updater is not None
        self.leave_abandoned()
        self.leave_methods()
        self.backward.settle()
        self.check_usable("optimizer.step()")
        if self.calls or in_graph_task():
            raise UsageError("optimizer.step() inside a forward or backward; expected after it")
        if self.updater.in_backward and not self.backward.has_updated and self.has_gradients():
            raise UsageError(
                "optimizer.step() after backwards under tiered.accumulate only; expected one backward outside it, which"
                " adds and updates"
            )
        self.residency.park_all()
        if self.updater.in_backward:
            self.backward.check_used()
        due = [] if self.updater.in_backward else self.units
        for unit in due:  # order: what is refused leaves the gradients, and nothing half done
            unit.gradients.reconcile()
            self.updater.check(unit)
        try:
            with self.schedule.hand_overs():
                for unit in due:
                    if unit.gradients.key:
                        self.backward.update(unit)
        except BaseException as error:
            self.abandon(f"optimizer.step() failed: {error}")
            raise
        self.backward.conclude()
        for unit in self.units:
            unit.gradients.drop()
        self.is_between = False
        self.residency.sweep()
        self.activations.swapped.sweep()
        self.schedule.end_step()
        self._make_way()

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        """Drop all gradients, or zero them. Raises UsageError where a backward has used them and step() is due."""
        self.backward.settle()
        self.backward.check_not_skipped()
        for unit in self.units:
            if set_to_none:
                unit.gradients.drop()
            else:
                unit.gradients.zero()

    def set_state_keys(self, buckets: Mapping[Unit, Sequence[Bucket[Segment]]], *, in_backward: bool) -> None:
        """Tell placement and schedule of the optimizer's keys, and of the order of use to expect in a step."""
        self.layouts.set_state(buckets, updates_in_backward=in_backward)
        self.expect_steps()

    def expect_steps(self) -> None:
        """Hold what is to be held of the keys that there are now, and expect their uses in the order of a step."""
        layouts = self.layouts
        layouts.is_stale = True  # the next forward looks once whether the units fit what is trained
        layouts.hold()
        self.pending_bytes = layouts.shares.spare // 2  # the other half is for reading ahead
        self.schedule = SharedSchedule(
            self.working_set,
            layouts.order(),
            layouts.nbytes,
            window_bytes=layouts.shares.read_ahead,
            rooms=self.residency,
            rooms_nbytes=layouts.rooms_nbytes if layouts.are_held else None,
        )

    def written(self, segment: Segment, source: torch.Tensor | None) -> None:
        """A parameter's values were replaced, by ``source`` where it is known; who keeps masters must hear of it."""
        for listener in self.write_listeners:
            listener(segment, source)

    # -- the store's word ----------------------------------------------------------------------------------------

    def guard(self, word: str) -> None:
        """What the store calls before it commits, rolls back, resumes or closes."""
        obey(self, word)

    def settle(self) -> None:
        """The process is about to fork: no update may be pending. What one fails of is raised by the next call."""
        if os.getpid() == self.pid:
            self.worker.wait_for_all()

    def forget(self) -> None:
        """In a forked child: nothing of the parent's memory is there."""
        self.worker.forget()
        self.residency.forget()
        self.calls.forget()

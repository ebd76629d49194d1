"""One backward, as the units see it: which gradients have come, which are final, when it is over.

Autograd tells of each accumulated gradient and of the end of each graph task; a failed backward tells nothing, which
``settle`` notices. Reentrant checkpoints nest backwards: only the end of the outermost one counts.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.autograd.graph import _engine_run_backward

from tiered.bytes.interrupt import uninterrupted
from tiered.errors import UsageError
from tiered.zero.frames import num_on_stack
from tiered.zero.parameters.parameter import without_dispatch

if TYPE_CHECKING:
    from tiered.zero.engine import Engine
    from tiered.zero.parameters.unit import Segment, Unit

__all__ = ["Backward", "in_graph_task"]


def in_graph_task() -> bool:
    """Return whether this thread runs inside an autograd backward."""
    return bool(torch._C._current_graph_task_id() != -1)


class Backward:
    """What is known of the backward that runs now.

    ``done`` are the units updated in it; ``has_updated`` says that a backward has updated and ``step()`` is due.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._tasks: set[int] = set()
        self._is_running = False
        self._has_begun = False  # an update has begun in this step
        self._waiting: dict[Unit, None] = {}  # accumulated, but not known to be final
        self._watched: set[Segment] = set()
        self._has_graphs = False  # of gradients, which none can keep that lies in a buffer
        self.done: set[Unit] = set()
        self.has_updated = False

    @property
    def is_half_done(self) -> bool:
        """Whether some units may be updated and the step is not concluded."""
        return self._has_begun or self.has_updated

    def watch(self, parameter: nn.Parameter) -> None:
        """Follow the gradient of a tiered parameter that requires one."""
        segment: Segment = parameter.segment  # type: ignore[attr-defined]
        with without_dispatch():
            if segment in self._watched or not parameter.requires_grad:
                return
            self._watched.add(segment)
            # Lifetime: the parameter leads to both. A hook that did too would keep them and the store for ever: the
            # collector does not look into what autograd's nodes hold.
            own, its = weakref.ref(self), weakref.ref(segment)
            parameter.register_hook(  # type: ignore[no-untyped-call]
                lambda _: own()._accumulating(its())  # type: ignore[union-attr,arg-type]  # both live
            )
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda _: own()._accumulated(its())  # type: ignore[union-attr,arg-type]
            )

    def seen(self) -> None:
        """Something of ours runs in a backward: make sure that we hear of its end.

        Of micro-batches that take turns, each has a graph task inside the one that counts.
        """
        task = torch._C._current_graph_task_id()
        if task == -1 or task in self._tasks or self._engine.lanes is not None:
            return
        self._tasks.add(task)
        self._is_running = True
        torch.autograd.Variable._execution_engine.queue_callback(self._ended)

    @uninterrupted
    def settle(self) -> None:
        """Notice a backward that failed: its end was never reported."""
        if not self._is_running or in_graph_task():
            return
        engine = self._engine
        self._tasks.clear()
        self._is_running = self._has_graphs = False
        engine.is_between = False
        self._clear_accumulated()
        if self._is_updating() and (self._has_begun or engine.has_gradients()):
            engine.abandon("a backward failed after parameters were updated or gradients accumulated")

    def update(self, unit: Unit) -> None:
        """Hand the update of ``unit`` over, and its gradients with it. Blocks while too much is pending."""
        updater = self._engine.updater
        assert updater is not None
        if not self._has_begun:
            self._has_begun = True
            updater.begin()
        self._waiting.pop(unit, None)
        if updater.in_backward:
            unit.gradients.reconcile()  # order: what an earlier backward left may have been dropped or replaced since
        unit.park()
        updater.update(unit)
        unit.version += 1
        self.done.add(unit)

    def check_not_skipped(self) -> None:
        """Raise UsageError where ``zero_grad()`` comes when gradients have been used and the step is due."""
        if self.has_updated:
            self._show_used()
            raise UsageError(
                'optimizer.zero_grad() between backward and optimizer.step() under update="backward", which has used'
                ' the gradients: the step cannot be skipped any more; expected step() next, or update="step"'
            )

    def check_used(self) -> None:
        """Raise UsageError, once, for gradients put or dropped since this has used them; they show that again."""
        try:
            for unit in self._engine.units:
                unit.gradients.check_used()
        except UsageError:
            self._show_used()
            raise

    def _show_used(self) -> None:
        for unit in self._engine.units:
            unit.gradients.show_used()

    def conclude(self) -> None:
        """The step is over."""
        self.done.clear()
        self.has_updated = self._has_begun = False

    def reset(self) -> None:
        """Forget everything."""
        self.conclude()
        self._tasks.clear()
        self._waiting.clear()
        self._is_running = self._has_graphs = False
        self._clear_accumulated()

    def _is_updating(self) -> bool:
        updater = self._engine.updater
        is_due = updater is not None and updater.in_backward and not self._engine.num_accumulating
        return is_due and not self._has_graphs

    @uninterrupted
    def _accumulating(self, segment: Segment) -> None:
        """Autograd is about to accumulate the gradient of ``segment``."""
        self.seen()
        if self.has_updated:
            raise UsageError(
                f'parameter {segment.name}: a second backward before optimizer.step() under update="backward"; expected'
                ' one backward a step, `with tiered.accumulate(model):` around the others, or update="step"'
            )
        if segment.unit in self.done:
            raise UsageError(
                f"parameter {segment.name}: a gradient after its unit was updated in this backward; expected all of it"
                ' before: use update="step"'
            )
        if self._engine.lanes is not None:
            self._engine.lanes.about_to_accumulate(segment)
        segment.unit.gradients.recall(segment)

    @uninterrupted
    def _accumulated(self, segment: Segment) -> None:
        """Autograd has accumulated the gradient of ``segment``."""
        unit = segment.unit
        with without_dispatch():
            gradient = segment.parameter.grad
            self._has_graphs = self._has_graphs or (gradient is not None and gradient.requires_grad)
        del gradient
        unit.gradients.adopt(segment)
        segment.accumulated = True
        if self._engine.lanes is not None:
            self._engine.lanes.accumulated(segment)
        if not self._is_updating():
            return
        self._waiting[unit] = None
        for candidate in list(self._waiting):
            if self._is_final(candidate):
                self.update(candidate)

    def _is_final(self, unit: Unit) -> bool:
        """Return whether no more gradient can come for ``unit`` and nobody needs its present bytes any more.

        A parameter accumulates once per graph task. One that a reentrant checkpoint will recompute more than once (it
        was touched without gradients in the forward) accumulates in several, and is final only at the end.
        """
        if unit.has_references() or unit.num_ops or unit in self._engine.calls.units():
            return False
        for segment in unit.trainable_segments():
            if not segment.accumulated:
                return False
            if self._engine.lanes is not None and not self._engine.lanes.is_done_with(segment):
                return False
            touches = segment.num_no_grad_touches
            if touches > 1 or (touches and segment.num_grad_touches):
                return False
        return True

    @uninterrupted
    def _ended(self) -> None:
        """A graph task of this backward is over."""
        if num_on_stack(_engine_run_backward.__code__) > 1:
            return  # a reentrant checkpoint's: the outermost reports too
        engine = self._engine
        self._tasks.clear()
        self._is_running = False
        if engine.calls.are_in_forward or not self._clear_accumulated():
            return  # autograd.grad: nothing was accumulated
        engine.leave_methods()
        engine.activations.decide()
        engine.is_between = False
        if self._has_graphs:
            self._refuse_graphs()
        if self._is_updating():
            for unit in engine.units:
                if unit.gradients.key:
                    self.update(unit)
            self.has_updated = True
            self.done.clear()
        self._waiting.clear()
        engine.forget_touches()
        engine.residency.park_all()

    def _refuse_graphs(self) -> None:
        """Raise UsageError, at the end: autograd frees nothing of a backward with graphs that fails in the middle."""
        self._waiting.clear()
        self._has_graphs = False
        for unit in self._engine.units:
            unit.gradients.drop()
        raise UsageError(
            "backward(create_graph=True) of a sharded model, whose gradients have no graphs; expected"
            " torch.autograd.grad(loss, parameters, create_graph=True), whose results are the caller's; all gradients"
            " are dropped"
        )

    def _clear_accumulated(self) -> bool:
        """Clear the marks of this backward; return whether there were any."""
        found = False
        for unit in self._engine.units:
            unit.gradients.num_accumulating = 0
            for segment in unit.segments:
                found = found or segment.accumulated
                segment.accumulated = False
        return found

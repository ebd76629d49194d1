"""One backward, as the units see it: which gradients have come, which are final, when it is over.

Autograd reports each accumulated gradient and the end of each graph task. Reentrant checkpoints nest backwards: only
the end of the outermost one counts. A failed backward reports nothing; ``settle`` notices it. For models on compute
devices torch's function that runs a backward is replaced, from their ``shard`` on, by one that reports the error.
"""

from __future__ import annotations

import functools
import logging
import operator
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import _engine_run_backward, get_gradient_edge

from tiered.errors import UsageError
from tiered.store.waiting.calling_thread import be_thread
from tiered.store.waiting.recorder import Begun, Recorder
from tiered.units import format_bytes
from tiered.zero.gradients.exchange import PlainGradients
from tiered.zero.parameters.module_calls import EngineParts, num_on_stack
from tiered.zero.parameters.parameter import without_dispatch
from tiered.zero.parameters.unit import Segment, Unit
from tiered.zero.parameters.unit_collectives import Exchange, UnitCollectives
from tiered.zero.step import Event, in_graph_task, is_autograds_own

__all__ = ["Backward"]


_lock = threading.Lock()
_listeners: weakref.WeakSet[Backward] = weakref.WeakSet()
_is_replaced = False


def _report_failures_to(listener: Backward) -> None:
    """Have ``listener`` hear of each backward that fails from now on, as long as it lives. Thread-safe."""
    global _is_replaced
    with _lock:
        _listeners.add(listener)
        if not _is_replaced:
            _is_replaced = True
            torch.autograd._engine_run_backward = _reporting(torch.autograd._engine_run_backward)  # type: ignore[attr-defined]


def _reporting(run_backward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run_backward)
    def reporting(*args: Any, **kwargs: Any) -> Any:
        try:
            return run_backward(*args, **kwargs)
        except Exception as error:
            with _lock:
                listeners = list(_listeners)
            for listener in listeners:
                listener.failed(error)
            raise

    return reporting


# -- backward ----------------------------------------------------------------------------------------------------------


_log = logging.getLogger("tiered")


class Backward:
    """The facts about the backward that runs now. ``submit(unit)`` hands over the update of a unit that is due."""

    def __init__(self, engine: EngineParts, gradients_came: Callable[[], None]) -> None:
        """``gradients_came()``: the last gradient of a backward has come, and due updates follow."""
        self.submit: Callable[[Unit], None] = lambda unit: None  # there is no optimizer yet
        self._units = engine.units
        self._phase = engine.phase
        self._calls = engine.calls
        self._tier = engine.tier
        self._open_units = engine.open_units
        self._gradients_came = gradients_came
        self._tasks: set[int] = set()
        self._is_running = False
        self._begun = Begun(0.0)  # where it runs
        self._is_harmful = False  # this backward has accumulated or updated gradients
        self._waiting: dict[Unit, None] = {}  # accumulated, but not known to be final
        self._watched: set[Segment] = set()
        self._has_graphs = False  # of gradients; a gradient that lies in a buffer can keep none
        self._why = ""  # this backward failed, where it is known
        comm = engine.units[0].comm
        self._collectives = comm if isinstance(comm, UnitCollectives) else None  # over several ranks
        self.plain = None if self._collectives is None else PlainGradients(engine, self._collectives, self.seen)
        self._exchange: tuple[Unit, Exchange] | None = None  # under way
        self.micro_steps = _MicroSteps(engine.working_set.recorder)
        if self._tier.device.type != "cpu":
            _report_failures_to(self)

    def watch(self, parameter: nn.Parameter) -> None:
        """Follow the gradient of a tiered parameter that requires one."""
        segment: Segment = parameter.segment  # type: ignore[attr-defined]
        with without_dispatch():
            if segment in self._watched or not parameter.requires_grad:
                return
            self._watched.add(segment)
            # Lifetime: the parameter leads to both. A hook that did too would keep them and the store for ever: the
            # collector does not look into the objects that autograd's nodes hold.
            own, its = weakref.ref(self), weakref.ref(segment)
            parameter.register_hook(  # type: ignore[no-untyped-call]
                lambda _: own()._accumulating(its())  # type: ignore[union-attr,arg-type]  # both live
            )
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda _: own()._accumulated(its())  # type: ignore[union-attr,arg-type]
            )

    def seen(self) -> None:
        """A part of the model runs in a backward: have autograd report the end of that backward."""
        task = torch._C._current_graph_task_id()
        if task == -1 or task in self._tasks:
            return
        if not self._is_running:
            self._begun = self._units[0].working_set.recorder.begin()
        self._tasks.add(task)
        self._is_running = True
        if is_autograds_own():
            be_thread(self._open_units.thread)  # which waits while this one works
        torch.autograd.Variable._execution_engine.queue_callback(self._ended)

    def failed(self, error: BaseException) -> None:
        """A backward has raised ``error``; it may be one of another model."""
        if self._is_running or self._phase.is_between:
            self._why = self._tier.note_dials(error, "a backward")

    def settle(self) -> None:
        """Notice a backward that failed: its end was never reported. A refused backward has harmed nothing."""
        with self._units[0].working_set.mark:
            if not self._is_running or in_graph_task():
                return
            is_harmful, why = self._is_harmful and self._is_updating(), self._why
            self._phase.is_between = False
            self.reset()
            if is_harmful:
                reason = "a backward failed after parameters were updated or gradients accumulated"
                self._phase.abandon(f"{reason}: {why}" if why else reason)

    def check_used(self) -> None:
        """Raise UsageError, once, for gradients that were put or dropped since the backward has used them.

        Each gradient then says again that it was used.
        """
        try:
            for unit in self._units:
                unit.gradients.check_used()
        except UsageError:
            self.show_used()
            raise

    def show_used(self) -> None:
        """Let each gradient say again that the backward has used it."""
        for unit in self._units:
            unit.gradients.show_used()

    def reset(self) -> None:
        """Forget everything."""
        self._tasks.clear()
        self._waiting.clear()
        self._drop_exchange()
        self._is_running = self._has_graphs = self._is_harmful = False
        self._why = ""
        self._clear_accumulated()

    def begin_forward(self, is_first: bool) -> None:
        """An outermost forward begins; ``is_first`` of its step."""
        if is_first:
            self.forget_touches()
            self.micro_steps.begin()
        if self.plain is not None:
            self.plain.look()

    def forget_touches(self) -> None:
        """Forget which parameters were touched how often: a new step begins."""
        for unit in self._units:
            for segment in unit.segments:
                segment.num_grad_touches = segment.num_no_grad_touches = 0

    def _is_updating(self) -> bool:
        phase = self._phase
        return phase.updates_in_backward and not phase.num_accumulating and not self._has_graphs

    def _update(self, unit: Unit) -> None:
        self._waiting.pop(unit, None)
        unit.gradients.reconcile()  # order: gradients of an earlier backward may have been dropped or replaced since
        self._phase.done.add(unit)
        self.submit(unit)

    def _accumulating(self, segment: Segment) -> None:
        """Autograd is about to accumulate the gradient of ``segment``."""
        with self._units[0].working_set.mark:
            self.seen()
            self._phase.check(Event.BACKWARD, f"parameter {segment.name}:")
            if segment.unit in self._phase.done:
                raise UsageError(
                    f"parameter {segment.name}: a gradient after its unit was updated in this backward; expected all of"
                    ' it before: use update="step"'
                )
            segment.unit.gradients.recall(segment)
            self._is_harmful = True

    def _accumulated(self, segment: Segment) -> None:
        """Autograd has accumulated the gradient of ``segment``."""
        with self._units[0].working_set.mark:
            unit = segment.unit
            with without_dispatch():
                gradient = segment.parameter.grad
                self._has_graphs = self._has_graphs or (gradient is not None and gradient.requires_grad)
            del gradient
            unit.gradients.adopt(segment)
            segment.accumulated = True
            if self._collectives is not None:
                self._waiting |= {unit: None} if self._is_exchanging() else {}
                return
            if not self._phase.updates_in_backward or not self._is_updating():
                return
            self._waiting[unit] = None
            for candidate in list(self._waiting):
                if self._is_final(candidate):
                    self._update(candidate)

    # -- over several ranks --------------------------------------------------------------------------------------

    def _is_exchanging(self) -> bool:
        return not self._phase.num_accumulating and not self._has_graphs

    def before_gather(self, use: str) -> None:
        """A unit is about to be gathered for ``use``; in a backward, say which units' gradients are final on this rank.

        All ranks gather the same units in the same order, so these are the places where they find out together.
        """
        if self._collectives is None:
            return
        self._collectives.use = use if torch.is_grad_enabled() else f"{use} without gradients"
        if use == "backward":
            self._finish_exchange()
            self._collectives.payload = self._bits_of(lambda unit: unit in self._waiting and self._is_final(unit))

    def entered(self, use: str) -> None:
        """A unit that stayed gathered is used for something else now: in a backward, the ranks find out here, too."""
        if self._collectives is not None and use == "backward":
            self.before_gather(use)
            self._collectives.tell("the backward of a unit")
            self.gathered()

    def gathered(self) -> None:
        """A unit was gathered: in a backward, the gradients that are final on all ranks are exchanged."""
        if self._collectives is not None and self._collectives.told:
            for unit in self._named(operator.and_):
                self._begin_exchange(unit)

    def _named(self, join: Callable[[int, int], int]) -> list[Unit]:
        """Return the units whose bits, as all ranks have told them, are set when joined, in a backward's order."""
        assert self._collectives is not None
        told, self._collectives.told = self._collectives.told, ()
        bits = functools.reduce(join, [int.from_bytes(each, "little") for each in told])
        return [unit for n, unit in reversed(list(enumerate(self._units))) if bits >> n & 1]

    def _begin_exchange(self, unit: Unit) -> None:
        """Send the whole gradients of ``unit`` to the ranks whose shards they belong to."""
        assert self._collectives is not None
        self._finish_exchange()
        self._waiting.pop(unit, None)
        if self._phase.updates_in_backward:
            self._phase.done.add(unit)
        buffer, mask = unit.gradients.give()
        self._exchange = unit, self._collectives.exchange(unit.name, buffer, unit.layout, payload=mask)
        if not unit.engine.layouts.shares.behind:
            self._finish_exchange()

    def _finish_exchange(self) -> None:
        """Wait for the exchange that is under way, if one is; its sum becomes the shard's gradient, or an update's."""
        if self._exchange is None:
            return
        unit, exchange = self._exchange
        masks = exchange.wait()
        self._exchange = None
        unit.gradients.shared(exchange.received, masks)
        exchange.end()
        if self._phase.updates_in_backward:
            self.submit(unit)

    def _drop_exchange(self) -> None:
        """Forget the exchange that is under way; blocks until it is over. Where it has failed its buffers are lost."""
        if self._exchange is not None:
            (_, exchange), self._exchange = self._exchange, None
            exchange.drop()

    def _exchange_rest(self) -> None:
        """A backward ends: exchange the gradients of all units that have some, on any rank, and were not exchanged."""
        assert self._collectives is not None and self.plain is not None
        self._finish_exchange()
        bits = self._bits_of(lambda unit: unit.gradients.are_whole)
        self._collectives.payload = bits + self.plain.mask()
        self._collectives.tell("the end of a backward")
        masks = [each[len(bits) :] for each in self._collectives.told]
        for unit in self._named(operator.or_):
            self._begin_exchange(unit)
        self._finish_exchange()
        self.plain.exchange(masks)
        if not self._phase.updates_in_backward:
            self._tell_norms(self._collectives)

    def are_only_added(self, *, in_backward: bool) -> bool:
        """Return whether there are gradients that no backward outside ``tiered.accumulate`` has used yet."""
        if self._collectives is not None:
            return any(unit.gradients.are_there() and unit.gradients.are_whole for unit in self._units)
        return in_backward and not self._phase.has_updated and any(unit.gradients.are_there() for unit in self._units)

    def _tell_norms(self, collectives: UnitCollectives) -> None:
        """Tell all ranks the norms of this one's pieces: whoever asks for a gradient's norm knows it then."""
        shards = [unit.gradients.shard for unit in self._units]
        own = [shard.own_norms.get(segment, (0.0, 0.0)) for shard in shards for segment in shard.unit.segments]
        every = collectives.numbers("the norms of a backward", torch.tensor(own, dtype=torch.float64, device="cpu"))
        columns = iter(every.unbind(1))
        for shard in shards:
            for segment in shard.unit.segments:
                norms = next(columns)  # (world, 2)
                if segment in shard.segments:
                    shard.norms[segment] = norms.T

    def _bits_of(self, is_one: Callable[[Unit], bool]) -> bytes:
        bits = sum(1 << number for number, unit in enumerate(self._units) if is_one(unit))
        return bits.to_bytes(-(-len(self._units) // 8), "little")

    # -- finality ------------------------------------------------------------------------------------------------

    def _is_final(self, unit: Unit) -> bool:
        """Return whether no more gradient can come for ``unit`` and no saved tensor needs its present bytes any more.

        A parameter accumulates once per graph task. A reentrant checkpoint may recompute a parameter more than once, if
        the forward touched it without gradients: it accumulates in several tasks, and is final only at the end. For a
        parameter that no checkpoint recomputes, and that has no node in the graph of the backward's outermost task,
        nothing comes. The graph of a nested task does not tell.
        """
        if unit.has_references() or unit.num_ops or unit in self._calls.units():
            return False
        for segment in unit.trainable_segments():
            touches = segment.num_no_grad_touches
            if not segment.accumulated:
                if touches or segment.num_grad_touches or segment.is_recomputed or _is_nested() or _is_awaited(segment):
                    return False
                continue
            if touches > 1 or (touches and segment.num_grad_touches):
                return False
        return True

    def _ended(self) -> None:
        """A graph task of this backward is over."""
        with self._units[0].working_set.mark:
            if _is_nested():
                return  # a reentrant checkpoint's: the outermost reports too
            self._units[0].working_set.recorder.worked("backward", "", self._begun)
            self._tasks.clear()
            self._is_running = self._is_harmful = False
            if self.plain is not None:
                self.plain.restore()
            if self._calls.are_in_forward or not self._clear_accumulated():
                return  # autograd.grad: nothing was accumulated
            self._gradients_came()
            self.micro_steps.ended()
            self._phase.is_between = False
            if self._has_graphs or (self.plain is not None and self.plain.have_graphs()):
                self._refuse_graphs()
            if self._collectives is not None and self._is_exchanging():
                self._exchange_rest()
            if self._is_updating():
                try:
                    for unit in self._units:
                        if unit.gradients.are_whole:
                            self._update(unit)
                except BaseException as error:
                    if self._phase.has_begun:
                        self._phase.abandon(f"the updates at the end of a backward failed: {error!r}")
                    raise
                self._phase.has_updated = True
                self._phase.done.clear()
            self._waiting.clear()
            self.forget_touches()
            if self._collectives is None or self._units[0].engine.layouts.shares.stage == 3:
                self._open_units.park_all()

    def _refuse_graphs(self) -> None:
        """Raise UsageError, at the end: autograd frees nothing of a backward with graphs that fails in the middle."""
        self._waiting.clear()
        self._has_graphs = False
        for each in [unit.gradients for unit in self._units] + ([] if self.plain is None else [self.plain]):
            each.drop()
        if self._phase.has_begun:
            self._phase.abandon("a backward with create_graph=True had updated parameters")
        raise UsageError(
            "backward(create_graph=True) of a sharded model, whose gradients have no graphs; expected"
            " torch.autograd.grad(loss, parameters, create_graph=True), whose results are the caller's; all gradients"
            " are dropped"
        )

    def _clear_accumulated(self) -> bool:
        """Clear the marks of this backward; return whether there were any."""
        found = self.plain is not None and self.plain.clear_accumulated()
        for unit in self._units:
            unit.gradients.num_accumulating = 0
            for segment in unit.segments:
                found = found or segment.accumulated
                segment.accumulated = False
        return found


def _is_nested() -> bool:
    """Return whether the graph task that runs is inside another, as a reentrant checkpoint's is."""
    return num_on_stack(_engine_run_backward.__code__) > (0 if is_autograds_own() else 1)


def _is_awaited(segment: Segment) -> bool:
    """Return whether the graph task that runs will accumulate a gradient of ``segment``, or has."""
    with without_dispatch():
        return bool(torch._C._will_engine_execute_node(get_gradient_edge(segment.parameter).node))


class _MicroSteps:
    """The micro-steps of a step, and the parameters' bytes that were read by the end of the first and of the last."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._num = self._first_bytes = self._last_bytes = 0
        self._has_warned = False

    def begin(self) -> None:
        """A step begins."""
        self._num = 0

    def ended(self) -> None:
        """A backward has added its gradients."""
        self._num += 1
        self._last_bytes = self._recorder.read_bytes("parameters")
        self._first_bytes = self._last_bytes if self._num == 1 else self._first_bytes

    def warn(self) -> None:
        """The optimizer's step comes: say once where more than one micro-step has read parameters."""
        if self._has_warned or self._num < 2 or self._last_bytes == self._first_bytes:
            return
        self._has_warned = True
        _log.warning(
            "a step of %d micro-steps: those after the first have read %s of parameters from the drives; one batch of"
            ' the same rows is one micro-step, with activations="swap" where its activations do not fit',
            self._num,
            format_bytes(self._last_bytes - self._first_bytes),
        )

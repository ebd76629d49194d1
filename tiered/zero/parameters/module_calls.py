"""ModuleCalls: the calls of a sharded model's modules and methods that are under way; units are shown while they run.

Module hooks and wrapped methods report here, and each call opens and parks its unit: see [Note: the way of a unit] in
unit.py. The engine decides what else happens as a forward begins. Where torch reports no call, the thread's frames tell
which calls run. Outputs that lie in a unit's buffer are cloned before they are handed out.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any, Protocol

import torch
from torch import nn

from tiered.errors import UsageError
from tiered.store.residency.residency import Residency
from tiered.store.store import Store
from tiered.store.waiting.recorder import Begun
from tiered.tiers.compute_tier import ComputeTier
from tiered.tiers.schedule import SharedSchedule
from tiered.zero.one_rank import refuse_distributed
from tiered.zero.parameters.gather_plan import GatherPlan
from tiered.zero.parameters.open_units import Ahead, OpenUnits
from tiered.zero.parameters.parameter import TieredParameter
from tiered.zero.parameters.saved_references import Packed, SavedPair, is_recomputing, with_repeated_arguments
from tiered.zero.parameters.unit import Segment, Unit
from tiered.zero.step import Event, Phase, graph_task, in_graph_task

__all__ = ["EngineParts", "ModuleCalls", "num_on_stack", "stack"]


def stack() -> Iterator[FrameType]:
    """Yield this thread's frames, the caller's first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def num_on_stack(code: CodeType) -> int:
    """Return how many calls of the function with ``code`` this thread is in."""
    return sum(frame.f_code is code for frame in stack())


class EngineParts(Protocol):
    """One sharded model's engine, as the rooms below it see it: its parts, and the moves that need several of them."""

    store: Store
    working_set: Residency
    units: list[Unit]  # the root unit first
    tier: ComputeTier
    phase: Phase
    calls: ModuleCalls
    schedule: SharedSchedule
    plan: GatherPlan[Unit]
    open_units: OpenUnits
    ahead: Ahead
    activations: Any  # Activations, of a room that stands above this one
    backward: Any  # Backward, too
    masters: Any  # the owner of the fp32 masters

    def model(self) -> nn.Module | None:
        """Return the module that was sharded, as long as it lives."""

    def check_idle(self, what: str) -> None:
        """Finish the pending updates; raise UsageError unless no forward, backward or step is under way."""

    def begin_forward(self, is_first: bool) -> None:
        """An outermost forward begins; ``is_first`` of its step."""

    def watch(self, parameter: nn.Parameter) -> None:
        """Follow the gradient of ``parameter`` if it requires one."""


# -- calls -------------------------------------------------------------------------------------------------------------


class Call:
    """One module call: its module, the module's unit if it is one, and the pair that was entered for it."""

    __slots__ = ("is_method", "module", "pair", "unit")

    def __init__(self, module: nn.Module, unit: Unit | None, *, is_method: bool = False) -> None:
        self.module = module
        self.unit = unit
        self.is_method = is_method
        self.pair: SavedPair | None = None


class Method:
    """A method of the user's that runs outside any forward: the calls in it are as they would be without the method.

    The method becomes a call, ``call``, with the first parameter that it touches itself. The call lasts until the
    method ends or an event between steps comes. The method's pair of hooks is in force all the while: such pairs nest
    as blocks do.
    """

    __slots__ = ("call", "has_called", "module", "pair", "unit")

    def __init__(self, module: nn.Module, unit: Unit | None, pair: SavedPair | None) -> None:
        self.module = module
        self.unit = unit
        self.pair = pair
        self.has_called = False  # a module, without gradients
        self.call: Call | None = None


class ModuleCalls:
    """The calls ``under_way`` and the ``methods`` of one model in one thread, each the outermost first.

    A unit is shown where its call begins, and parked where its call ends. The calls that methods have become are the
    outermost ones. The outermost call or method with gradients puts a pair of saved-tensor hooks in force. A call or an
    operation below a pair that is not tiered's (a caller's own, or a checkpoint's) puts another pair in force, because
    torch uses only the innermost one; ``SavedPair`` says which tensors a pair hands on.
    """

    def __init__(self, engine: EngineParts, pack: Callable[[torch.Tensor], Packed]) -> None:
        """``pack`` takes the saved tensors that lie in no unit."""
        self.under_way: list[Call] = []
        self.methods: list[Method] = []
        self._engine = engine
        self._pack = pack
        self._num_pairs = 0  # that calls and methods have entered
        self._thread = 0  # of the outermost call
        self._has_gradients = False  # whether it began with gradients
        self._begun: Begun | None = None  # the outermost call that runs, where it is no recomputation

    @property
    def are_in_forward(self) -> bool:
        """Whether a module is being called, and not only methods."""
        calls = self.under_way
        return bool(calls) and not calls[-1].is_method

    def units(self) -> set[Unit | None]:
        """Return the units whose modules are being called."""
        return {call.unit for call in self.under_way}

    def touched(self, segment: Segment) -> None:
        """Count a use of ``segment``'s parameter, in a forward or in a term of the loss beside it."""
        if torch.is_grad_enabled():
            segment.num_grad_touches += 1
        elif self.under_way:
            segment.num_no_grad_touches += 1
            segment.is_recomputed = segment.is_recomputed or self._has_gradients

    def innermost_unit(self) -> Unit | None:
        """Return the unit that is being called, if one is."""
        for call in reversed(self.under_way):  # no generator: an interrupt that comes as one is closed goes nowhere
            if call.unit is not None:
                return call.unit
        return None

    # -- module calls --------------------------------------------------------------------------------------------

    def begin_call(self, unit: Unit | None, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Before the forward of ``module``, whose ``unit`` it is if it is one's; return the arguments to call it with.

        None for those that it was called with.
        """
        with self._engine.working_set.mark:
            if self.under_way and module is self._engine.model():
                self.leave_abandoned(module)
            changed = with_repeated_arguments(args, kwargs) if graph_task() != -1 and is_recomputing() else None
            self._begin(module, unit)
            return changed

    def end_call(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """After the forward of ``module``, also one that failed.

        Return the output to hand on, with nothing of it in a unit's buffer.
        """
        engine = self._engine
        with engine.working_set.mark:
            if output is None and (error := sys.exc_info()[1]) is not None:
                engine.tier.note_dials(error, f"the forward of {type(module).__name__}")
            self._end(module)
            if self.are_in_forward:
                return output
            if self._begun is not None:
                engine.working_set.recorder.worked("forward", type(module).__name__, self._begun)
                self._begun = None
            if not (in_graph_task() or self.methods):
                engine.open_units.park_all(until_backward=self.keep_until_backward())
            if torch.is_grad_enabled() and not in_graph_task() and _any_requires_grad(output):
                self._forward_ended()
            return _without_our_bytes(output, engine.open_units.place_of)

    def _begin(self, module: nn.Module, unit: Unit | None) -> None:
        if not self.are_in_forward:
            self._begun = None if in_graph_task() else self._engine.working_set.recorder.begin()
        call = self._add(Call(module, unit))
        call.pair = self._enter_pair()
        if unit is not None:
            unit.show()

    def _add(self, call: Call) -> Call:
        """List ``call`` as under way. Raises UsageError where an outermost one may not begin; its hook ends it then."""
        self.under_way.append(call)
        if len(self.under_way) == 1:
            self._thread, self._has_gradients = threading.get_ident(), torch.is_grad_enabled()
            self._begin_outermost(call.module)
        return call

    def _begin_outermost(self, module: nn.Module) -> None:
        name, engine = type(module).__name__, self._engine
        _check_forward(engine.phase, name)
        if in_graph_task():
            engine.backward.seen()
            return
        engine.backward.settle()
        phase = engine.phase
        if phase.updates_in_backward and torch.is_grad_enabled():
            refuse_distributed(None)
        phase.check(Event.FORWARD if torch.is_grad_enabled() else Event.EVALUATION, f"forward of {name}")
        goes_on = self._goes_on_with(module)
        is_first = not (goes_on or phase.is_between or phase.has_updated or phase.has_gradients())
        engine.activations.begin_forward(is_first=is_first)
        engine.begin_forward(is_first)

    def _goes_on_with(self, module: nn.Module) -> bool:
        """Return whether the forward of ``module`` continues a method that began without gradients."""
        if not self.methods or torch.is_grad_enabled():
            return False
        outermost = self.methods[0]
        has_begun, outermost.has_called = outermost.has_called, True
        return has_begun and module is not outermost.module

    def _forward_ended(self) -> None:
        """An outermost forward with gradients has ended."""
        self._engine.phase.is_between = True
        self._engine.activations.end_forward(may_go_on=bool(self.methods))

    def _end(self, module: nn.Module) -> None:
        """End the call of ``module``, and those inside it that an error left."""
        while self.under_way:
            call = self._pop()
            self._leave(call.unit)
            if call.module is module:
                break

    def _pop(self) -> Call:
        call = self.under_way.pop()
        self._exit_pair(call.pair)
        return call

    def _leave(self, unit: Unit | None) -> None:
        """A call of the module of ``unit``, if it is one's, is over: park the unit unless it is used on."""
        engine = self._engine
        if unit is None or engine.phase.abandoned:
            return
        is_over = engine.plan.last_use(unit, used=self.units(), until_backward=self.keep_until_backward())
        if is_over or (unit.was_written() and unit not in engine.plan.lent):
            unit.park()

    def keep_until_backward(self) -> bool:
        """Return whether a unit that opens now has a backward that needs its bytes, if the plan keeps units so long.

        Not in a method that runs outside of any forward: its recomputation finds its units parked, as it did.
        """
        return not self.methods and torch.is_grad_enabled() and graph_task() == -1

    # -- methods -------------------------------------------------------------------------------------------------

    @contextmanager
    def running(self, module: nn.Module, unit: Unit | None) -> Iterator[Callable[[Any], Any]]:
        """A method of ``module`` runs; its output goes through the function that this block gives.

        In a forward or backward the method is a call from its beginning. Elsewhere it changes nothing about the calls
        that it makes, and becomes a call with the first parameter that it touches itself.
        """
        if self.under_way and module is self._engine.model():
            self.leave_abandoned()
        if self.are_in_forward or in_graph_task():
            self._begin(module, unit)
            try:
                yield lambda output: output
            finally:
                self._end(module)
            return
        method = Method(module, unit, self._enter_pair())
        self.methods.append(method)
        try:
            yield functools.partial(self._hand_out, method)
        finally:
            self._end_method(method)

    def _end_method(self, method: Method) -> None:
        """End ``method``, its own call, and those inside it that were left by an error."""
        ended = []
        while method.call in self.under_way:
            ended.append(self._pop())
        self.methods.remove(method)
        self._exit_pair(method.pair)
        for call in ended:
            self._leave(call.unit)
        if not self.methods:
            self._engine.activations.decide()

    def _hand_out(self, method: Method, output: Any) -> Any:
        """Return the ``output`` of ``method`` with nothing of it in a unit's buffer."""
        if method.call in self.under_way and torch.is_grad_enabled() and _any_was_computed(output):
            self._forward_ended()
        return _without_our_bytes(output, self._engine.open_units.place_of)

    def touching_method(self) -> Method | None:
        """Return the innermost method if that method itself touches a parameter now, and is no call yet."""
        methods = self.methods
        if not methods or self.are_in_forward or methods[-1].call in self.under_way:
            return None
        return methods[-1]

    def touched_by_method(self) -> None:
        """A parameter is about to be touched outside a forward or backward: a method that touches it becomes a call."""
        method = self.touching_method()
        if method is not None:
            method.call = Call(method.module, method.unit, is_method=True)
            self._add(method.call)

    # -- calls that no hook ends -----------------------------------------------------------------------------------

    def leave_methods(self) -> None:
        """An event between steps comes: methods that are calls, with no forward inside, stop being calls."""
        while self.under_way and self.under_way[-1].is_method:
            self._leave(self._pop().unit)

    def leave_abandoned(self, beginning: nn.Module | None = None) -> None:
        """End the calls that are over without having ended.

        torch runs no hook for an exception that is no Exception, such as Ctrl-C. The thread's frames tell whether the
        outermost call is still under way; methods always end. The innermost frame of ``beginning`` belongs to a call
        that begins now.
        """
        if in_graph_task() or not self.are_in_forward or self._thread != threading.get_ident():
            return
        outermost = next(call.module for call in self.under_way if not call.is_method)
        if _num_under_way(outermost) == (outermost is beginning):
            self._end(outermost)

    def clear(self) -> None:
        """Leave all calls: an interrupt left them that no hook saw, or methods go on without them."""
        while self.under_way:
            self._pop()

    def forget(self) -> None:
        """In a forked child: the calls are the parent's."""
        self.under_way.clear()

    # -- pairs of hooks ------------------------------------------------------------------------------------------

    def _enter_pair(self) -> SavedPair | None:
        pair = self.pair_if_needed()
        if pair is not None:
            pair.enter()
            self._num_pairs += 1
        return pair

    def _exit_pair(self, pair: SavedPair | None) -> None:
        if pair is not None:
            pair.exit()
            self._num_pairs -= 1

    def pair_if_needed(self) -> SavedPair | None:
        """Return a new pair of hooks, not in force yet; None where one of ours is in force, or nothing is saved."""
        if not torch.is_grad_enabled():
            return None
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        innermost = getattr(hooks[0], "__self__", None) if hooks else None
        if getattr(innermost, "calls", None) is self:
            return None
        return SavedPair(self, self._engine.open_units, self._pack, is_outermost=self._num_pairs == 0)


def _num_under_way(module: nn.Module) -> int:
    """Return how many calls of ``module`` this thread is in."""
    code = nn.Module._call_impl.__code__
    return sum(frame.f_code is code and frame.f_locals.get("self") is module for frame in stack())


def _check_forward(phase: Phase, name: str) -> None:
    """Raise UsageError where no forward of the module ``name`` can run."""
    if not phase.process.is_here:
        raise UsageError(f"forward of {name} in a forked process; expected in the one that opened the store")
    if torch._C._get_tracing_state() is not None:
        raise UsageError(
            f"torch.jit.trace of {name}, which is sharded: the trace would keep its parameters; expected a model"
            " built afresh with model.state_dict() loaded"
        )


# -- outputs -----------------------------------------------------------------------------------------------------------


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in ``output``: nested tuples, lists, mappings and dataclasses."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from _tensors(value)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        for field in dataclasses.fields(output):
            yield from _tensors(getattr(output, field.name, None))


_NOTHING = (int, float, complex, str, bytes, Iterator, nn.Module, type(None))


def _any_requires_grad(output: Any) -> bool:
    """Return whether a backward can start from ``output``; True for an object that cannot be looked into."""
    found = list(_tensors(output))
    return any(tensor.requires_grad for tensor in found) if found else _is_opaque(output)


def _any_was_computed(output: Any) -> bool:
    """Return whether a backward can start from ``output`` of a method, which may hand out the parameters themselves."""
    found = list(_tensors(output))
    if not found:
        return _is_opaque(output)
    return any(tensor.requires_grad and not isinstance(tensor, TieredParameter) for tensor in found)


def _is_opaque(output: Any) -> bool:
    """Return whether ``output``, in which no tensor was found, may yet have some in it."""
    if isinstance(output, Mapping):
        return any(_is_opaque(value) for value in output.values())
    if isinstance(output, list | tuple):
        return any(_is_opaque(value) for value in output)
    return not isinstance(output, _NOTHING)


def _without_our_bytes(output: Any, place_of: Callable[[torch.Tensor], object]) -> Any:
    """Return ``output`` with each tensor for which ``place_of`` is not None cloned; the same object if there is none.

    Containers keep their types; the ones that hold nothing of ours are returned as they are. A sharded parameter stays
    itself, with or without bytes.
    """
    if not any(_must_be_cloned(tensor, place_of) for tensor in _tensors(output)):
        return output
    if isinstance(output, torch.Tensor):
        return output.clone()
    if isinstance(output, Mapping):
        result = copy.copy(output)
        for key, value in output.items():
            result[key] = _without_our_bytes(value, place_of)  # type: ignore[index]
        return result
    if isinstance(output, tuple) and hasattr(output, "_fields"):
        return type(output)(*(_without_our_bytes(value, place_of) for value in output))
    if isinstance(output, list | tuple):
        return type(output)(_without_our_bytes(value, place_of) for value in output)
    result = copy.copy(output)
    for field in dataclasses.fields(output):
        object.__setattr__(result, field.name, _without_our_bytes(getattr(output, field.name), place_of))
    return result


def _must_be_cloned(tensor: torch.Tensor, place_of: Callable[[torch.Tensor], object]) -> bool:
    return not isinstance(tensor, TieredParameter) and place_of(tensor) is not None

"""Calls: the module calls of a sharded model that are under way, and the one pair of saved-tensor hooks around them.

What a call may do, and what becomes of its unit, is the engine's say.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tiered.zero.activations.saved import SavedPair, is_callers_pair_in_force
from tiered.zero.frames import stack

if TYPE_CHECKING:
    from tiered.zero.engine import Engine
    from tiered.zero.parameters.unit import Segment, Unit

__all__ = ["CALLERS", "Call", "CallStack", "Calls"]

CALLERS: dict[CodeType, str] = {nn.Module._call_impl.__code__: "self"}
"""The functions whose frames are module calls, to the name of the module in them."""


class Call:
    """One module call: its module, the module's unit if it is one, and the pair that was entered for it."""

    __slots__ = ("module", "pair", "unit")

    def __init__(self, module: nn.Module, unit: Unit | None) -> None:
        self.module = module
        self.unit = unit
        self.pair: SavedPair | None = None


class CallStack:
    """The calls of one thread, the outermost first, and how many of them have entered a pair."""

    __slots__ = ("calls", "num_pairs", "thread")

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.num_pairs = 0
        self.thread = 0  # of the outermost call


class Calls:
    """The stack of calls, the outermost first: ``stack``; micro-batches that take turns have their own (``others``).

    Invariant: one pair of hooks is entered by the outermost call with gradients, and one by each call and operation
    that finds a pair of the caller's own above it. (Only the innermost pair is ever used: one per unit would switch
    non-reentrant checkpointing off.)
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.stack = CallStack()
        self.others: list[CallStack] = []

    def __len__(self) -> int:
        return len(self.stack.calls)

    def units(self) -> set[Unit | None]:
        """Return the units whose modules are being called, also by micro-batches that wait for their turn."""
        return {call.unit for stack in (self.stack, *self.others) for call in stack.calls}

    def touched(self, segment: Segment) -> None:
        """Count a use of ``segment``'s parameter in a forward, and whose it is."""
        with_grad = torch.is_grad_enabled()
        if self.stack.calls and with_grad:
            segment.num_grad_touches += 1
        elif self.stack.calls:
            segment.num_no_grad_touches += 1
        lane = self._engine.lanes.lane_here() if self._engine.lanes is not None else None
        if lane is not None:
            (lane.touches.with_grad if with_grad else lane.touches.without_grad).add(segment)

    def innermost_unit(self) -> Unit | None:
        """Return the unit that is being called, if one is."""
        return next((call.unit for call in reversed(self.stack.calls) if call.unit is not None), None)

    def begin(self, module: nn.Module, unit: Unit | None) -> Call:
        """A call begins."""
        call = Call(module, unit)
        if not self.stack.calls:
            self.stack.thread = threading.get_ident()
        self.stack.calls.append(call)
        return call

    def enter_pair(self, call: Call) -> None:
        """Put a pair of hooks in force for ``call`` unless one of ours is already, or nothing is saved."""
        if self._needs_pair():
            pair = self._pair()
            pair.enter()
            call.pair = pair
            self.stack.num_pairs += 1

    def end(self, module: nn.Module) -> Iterator[Call]:
        """Yield the calls that end with that of ``module``, innermost first: those inside it were left by an error."""
        while self.stack.calls:
            call = self.stack.calls.pop()
            if call.pair is not None:
                call.pair.exit()
                self.stack.num_pairs -= 1
            yield call
            if call.module is module:
                break

    def abandoned(self, beginning: nn.Module | None = None) -> Iterator[Call]:
        """End and yield the calls that are over without having ended, innermost first.

        torch runs no hook for an exception that is no Exception, such as Ctrl-C. Whether the outermost call is still
        under way the thread's frames tell; the innermost one of ``beginning`` is that of a call that begins now.
        """
        stack = self.stack
        if not stack.calls or stack.thread != threading.get_ident():
            return
        outermost = stack.calls[0].module
        if _num_under_way(outermost) == (outermost is beginning):
            yield from self.end(outermost)

    def clear(self) -> None:
        """Leave all calls: an interrupt left them that no hook saw."""
        while self.stack.calls:
            pair = self.stack.calls.pop().pair
            if pair is not None:
                pair.exit()
        self.stack.num_pairs = 0

    def forget(self) -> None:
        """In a forked child: the calls are the parent's."""
        self.stack.calls.clear()

    def pair_for_operation(self) -> AbstractContextManager[Any]:
        """Return the pair of hooks for an operation outside any call; inside one they are in force already."""
        return self._pair() if self._needs_pair() else nullcontext()

    def _pair(self) -> SavedPair:
        return SavedPair(self._engine, is_outermost=self.stack.num_pairs == 0)

    def _needs_pair(self) -> bool:
        return torch.is_grad_enabled() and (self.stack.num_pairs == 0 or is_callers_pair_in_force())


def _num_under_way(module: nn.Module) -> int:
    """Return how many calls of ``module`` this thread is inside of."""
    return sum(frame.f_code in CALLERS and frame.f_locals.get(CALLERS[frame.f_code]) is module for frame in stack())

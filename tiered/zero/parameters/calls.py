"""Calls: the module calls of a sharded model that are under way, and the one pair of saved-tensor hooks around them.

The engine decides which operations a call may do, and whether its unit stays open. The frames of a thread tell which
calls it is in, where torch does not report them.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Protocol

import torch
from torch import nn

from tiered.zero.parameters.unit import Segment, Unit

__all__ = ["Calls", "HookPair", "Method", "num_on_stack", "stack"]


def stack() -> Iterator[FrameType]:
    """Yield this thread's frames, the caller's first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def num_on_stack(code: CodeType) -> int:
    """Return how many calls of the function with ``code`` this thread is in."""
    return sum(frame.f_code is code for frame in stack())


# -- calls -------------------------------------------------------------------------------------------------------------


class HookPair(Protocol):
    """A pair of saved-tensor hooks, bound methods of this object; ``calls`` are those of its model."""

    calls: Calls

    def enter(self) -> None:
        """Put the pair in force."""

    def exit(self) -> None:
        """Take the pair out of force."""


class HookPairs(Protocol):
    """The pairs of hooks of one model."""

    def make(self, *, is_outermost: bool) -> HookPair:
        """Return a new pair, not in force yet."""


class Call:
    """One module call: its module, the module's unit if it is one, and the pair that was entered for it."""

    __slots__ = ("is_method", "module", "pair", "unit")

    def __init__(self, module: nn.Module, unit: Unit | None, *, is_method: bool = False) -> None:
        self.module = module
        self.unit = unit
        self.is_method = is_method
        self.pair: HookPair | None = None


class Method:
    """A method of the user's that runs outside any forward: the calls in it are as they would be without the method.

    The method becomes a call, ``call``, with the first parameter that it touches itself. The call lasts until the
    method ends or an event between steps comes. The method's pair of hooks is in force all the while: such pairs nest
    as blocks do.
    """

    __slots__ = ("call", "has_called", "module", "pair", "unit")

    def __init__(self, module: nn.Module, unit: Unit | None, pair: HookPair | None) -> None:
        self.module = module
        self.unit = unit
        self.pair = pair
        self.has_called = False  # a module, without gradients
        self.call: Call | None = None


class Calls:
    """The calls ``under_way`` and the ``methods`` in one thread, each the outermost first.

    Invariants: the calls that methods have become are the outermost ones. A pair of hooks of ours is entered by the
    outermost call or method with gradients, and by each call and operation that finds another pair above ours: a
    caller's own, or a checkpoint's. (torch uses the innermost pair only; ``SavedPair`` says which tensors it hands on.)
    """

    def __init__(self, pairs: HookPairs) -> None:
        self.under_way: list[Call] = []
        self.methods: list[Method] = []
        self._num_pairs = 0  # that calls and methods have entered
        self._thread = 0  # of the outermost call
        self._pairs = pairs

    def __len__(self) -> int:
        return len(self.under_way)

    @property
    def are_in_forward(self) -> bool:
        """Whether a module is being called, and not only methods."""
        calls = self.under_way
        return bool(calls) and not calls[-1].is_method

    def units(self) -> set[Unit | None]:
        """Return the units whose modules are being called."""
        return {call.unit for call in self.under_way}

    def touched(self, segment: Segment) -> None:
        """Count a use of ``segment``'s parameter in a forward."""
        if self.under_way and torch.is_grad_enabled():
            segment.num_grad_touches += 1
        elif self.under_way:
            segment.num_no_grad_touches += 1

    def innermost_unit(self) -> Unit | None:
        """Return the unit that is being called, if one is."""
        for call in reversed(self.under_way):  # no generator: an interrupt that comes as one is closed goes nowhere
            if call.unit is not None:
                return call.unit
        return None

    def begin(self, module: nn.Module, unit: Unit | None, *, is_method: bool = False) -> Call:
        """A call begins."""
        call = Call(module, unit, is_method=is_method)
        if not self.under_way:
            self._thread = threading.get_ident()
        self.under_way.append(call)
        return call

    def enter_pair(self, call: Call) -> None:
        """Put a pair of hooks in force for ``call`` unless one of ours is already, or nothing is saved."""
        pair = self.pair_if_needed()
        if pair is not None:
            pair.enter()
            call.pair = pair
            self._num_pairs += 1

    def end(self, module: nn.Module) -> Iterator[Call]:
        """Yield the calls that end with that of ``module``, innermost first: those inside it were left by an error."""
        while self.under_way:
            call = self._pop()
            yield call
            if call.module is module:
                break

    def _pop(self) -> Call:
        call = self.under_way.pop()
        if call.pair is not None:
            call.pair.exit()
            self._num_pairs -= 1
        return call

    def begin_method(self, module: nn.Module, unit: Unit | None) -> Method:
        """A method begins outside any forward."""
        pair = self.pair_if_needed()
        if pair is not None:
            pair.enter()
            self._num_pairs += 1
        method = Method(module, unit, pair)
        self.methods.append(method)
        return method

    def end_method(self, method: Method) -> list[Call]:
        """Return the calls that end with ``method``: its own, and those inside it that were left by an error."""
        ended = []
        while method.call in self.under_way:
            ended.append(self._pop())
        self.methods.remove(method)
        if method.pair is not None:
            method.pair.exit()
            self._num_pairs -= 1
        return ended

    def goes_on_with(self, module: nn.Module) -> bool:
        """Return whether the forward of ``module`` continues a method that began without gradients."""
        if not self.methods or torch.is_grad_enabled():
            return False
        outermost = self.methods[0]
        has_begun, outermost.has_called = outermost.has_called, True
        return has_begun and module is not outermost.module

    def touching_method(self) -> Method | None:
        """Return the innermost method if that method itself touches a parameter now, and is no call yet."""
        methods = self.methods
        if not methods or self.are_in_forward or methods[-1].call in self.under_way:
            return None
        return methods[-1]

    def leave_methods(self, leave: Callable[[Unit | None], None]) -> None:
        """End the calls that methods have become, if there are no others, and ``leave`` the unit of each."""
        while self.under_way and self.under_way[-1].is_method:
            leave(self._pop().unit)

    def leave_abandoned(self, leave: Callable[[Unit | None], None], beginning: nn.Module | None) -> None:
        """End the calls that are over without having ended, innermost first, and ``leave`` the unit of each.

        torch runs no hook for an exception that is no Exception, such as Ctrl-C. The thread's frames tell whether the
        outermost call is still under way; methods always end. The innermost frame of ``beginning`` belongs to a call
        that begins now.
        """
        if not self.are_in_forward or self._thread != threading.get_ident():
            return
        outermost = next(call.module for call in self.under_way if not call.is_method)
        if _num_under_way(outermost) == (outermost is beginning):
            for call in self.end(outermost):
                leave(call.unit)

    def clear(self) -> None:
        """Leave all calls: an interrupt left them that no hook saw, or methods go on without them."""
        while self.under_way:
            self._pop()

    def forget(self) -> None:
        """In a forked child: the calls are the parent's."""
        self.under_way.clear()

    def pair_if_needed(self) -> HookPair | None:
        """Return a new pair of hooks, not in force yet; None where one of ours is in force, or nothing is saved."""
        if not torch.is_grad_enabled():
            return None
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        innermost = getattr(hooks[0], "__self__", None) if hooks else None
        if getattr(innermost, "calls", None) is self:
            return None
        return self._pairs.make(is_outermost=self._num_pairs == 0)


def _num_under_way(module: nn.Module) -> int:
    """Return how many calls of ``module`` this thread is in."""
    code = nn.Module._call_impl.__code__
    return sum(frame.f_code is code and frame.f_locals.get("self") is module for frame in stack())

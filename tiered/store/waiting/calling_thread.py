"""The calling thread, as a store knows it: its number, the calls that it is within, and its modes of torch."""

from __future__ import annotations

import itertools
import threading

import torch
from torch._C._functorch import TransformType, get_interpreter_stack

from tiered.bytes.condition import Condition
from tiered.bytes.critical_section import CRITICAL_SECTION
from tiered.errors import UsageError

__all__ = ["NestedCalls", "be_thread", "is_in_transform", "refuse_modes", "this_thread"]


class NestedCalls:
    """Refuses a call that a signal handler, ``__del__`` or weakref callback makes within another call of the store.

    Such a call would wait for its own thread, for ever. It is recognised by its thread, which holds the store's lock or
    is in a critical section; tiered's own threads always are. The check costs less than taking a lock.
    """

    __slots__ = ("_is_held_here",)

    def __init__(self, condition: Condition) -> None:
        self._is_held_here = condition.is_held_here

    def is_inside(self) -> bool:
        """Whether the calling thread is within a call of the store, so that another could never end."""
        return self._is_held_here() or CRITICAL_SECTION.is_inside()

    def refuse(self) -> None:
        """Raise UsageError where the calling thread is within a call of the store."""
        if self._is_held_here() or CRITICAL_SECTION.is_inside():
            raise UsageError(
                "the store was called from a signal handler or a finalizer (__del__, a weakref callback) that "
                "interrupted a call of it in this very thread, or runs in one of tiered's own; only set a flag there "
                "(threading.Event), and commit or drop keys in the loop that looks at it"
            )


class _Thread(threading.local):
    """A number of its own for each thread: the system's are used again, and tensors outlive threads."""

    numbers = itertools.count()

    def __init__(self) -> None:
        self.number = next(self.numbers)


_thread = _Thread()


def this_thread() -> int:
    """Return the number of the calling thread; no other thread of this process ever has it."""
    return _thread.number


def be_thread(number: int) -> None:
    """Count the calling thread's leases as those of the thread of that number, which waits while this one runs."""
    _thread.number = number


_MODES = torch._C._TorchDispatchModeKey
_REFUSED = {_MODES.FAKE: "FakeTensorMode", _MODES.FUNCTIONAL: "FunctionalTensorMode", _MODES.PROXY: "make_fx"}


def refuse_modes(operation: str, key: str) -> None:
    """Raise UsageError where the caller's mode makes tensors without bytes, or records the operations on them."""
    if torch._C._len_torch_dispatch_stack():
        for mode, name in _REFUSED.items():
            if torch._C._get_dispatch_mode(mode) is not None:
                raise UsageError(
                    f"{operation} of {key!r} under {name}, in which new tensors are no memory to copy to; expected"
                    " outside of it"
                )
    if is_in_transform():
        raise UsageError(
            f"{operation} of {key!r} inside torch.func (grad, vjp, jvp, functionalize, ...), which wraps each tensor"
            " that is made there; expected before the transform: have the function take the tensor, or close over it"
        )


def is_in_transform() -> bool:
    """Whether a transform of torch.func wraps each tensor that is made now: all but vmap do."""
    stack = get_interpreter_stack()
    return bool(stack) and any(interpreter.key() != TransformType.Vmap for interpreter in stack)

"""Methods of a sharded model beside ``forward``: a method changes nothing about the calls that it makes.

But methods may touch parameters as a forward may: a method becomes a call with the first parameter it touches itself.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from tiered.bytes.interrupt import uninterrupted_block
from tiered.zero.parameters.calls import Method
from tiered.zero.parameters.conductor import Conductor
from tiered.zero.parameters.outputs import any_was_computed, own
from tiered.zero.parameters.unit import Unit
from tiered.zero.step import in_graph_task

__all__ = ["copied", "running", "touched_by_method"]


@uninterrupted_block
def running(conductor: Conductor, module: nn.Module, unit: Unit | None) -> Iterator[Callable[[Any], Any]]:
    """A method of ``module`` runs; its output goes through the function that this block gives.

    In a forward or backward the method is a call from its beginning.
    """
    calls = conductor.calls
    if calls and module is conductor.model():
        conductor.forward.leave_abandoned()
    if calls.are_in_forward or in_graph_task():
        conductor.forward.enter(module, unit)
        try:
            yield lambda output: output
        finally:
            for call in calls.end(module):
                conductor.forward.leave(call.unit)
        return
    method = calls.begin_method(module, unit)
    try:
        yield functools.partial(_hand_out, conductor, method)
    finally:
        for call in calls.end_method(method):
            conductor.forward.leave(call.unit)
        if not calls.methods:
            conductor.forward.method_ended()


def touched_by_method(conductor: Conductor) -> None:
    """A parameter is about to be touched outside a forward or backward: the method that touches it becomes a call."""
    calls = conductor.calls
    method = calls.touching_method()
    if method is not None:
        method.call = calls.begin(method.module, method.unit, is_method=True)
        if len(calls) == 1:
            conductor.forward.enter_outermost(method.module)


def _hand_out(conductor: Conductor, method: Method, output: Any) -> Any:
    """Return the ``output`` of ``method`` with nothing of it in a unit's buffer."""
    if method.call in conductor.calls.under_way and torch.is_grad_enabled() and any_was_computed(output):
        conductor.forward.ended()
    return own(output, conductor.open_units.address_of)


def copied(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Return ``copy.deepcopy`` of ``module`` as it was before ``shard``; its parameters may refuse the copy."""
    made: Any = type(module).__new__(type(module))
    memo[id(module)], state = made, {}
    for name, value in vars(module).items():
        if name.endswith("_hooks") and isinstance(value, dict):
            value = type(value)((key, hook) for key, hook in value.items() if not _is_own(hook))
        if name != "_compiled_call_impl" and not _is_own(value):
            state[name] = copy.deepcopy(value, memo)
    made.__setstate__(state)
    return made  # type: ignore[no-any-return]


def _is_own(value: Any) -> bool:
    """Return whether ``value`` is a hook, a method or a mark of tiered's, as it stands or wrapped by torch."""
    for name in ("_torchdynamo_orig_callable", "hook", "func", "__func__"):
        value = getattr(value, name, value)
    return str(getattr(value, "__globals__", {}).get("__name__") or type(value).__module__).startswith("tiered.")

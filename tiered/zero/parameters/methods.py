"""Methods of a sharded model beside ``forward``: a method changes nothing about the calls that it makes.

But methods may touch parameters as a forward may: a method becomes a call with the first parameter it touches itself.
Of the outputs of methods and forwards, those that lie in a unit's buffer are cloned.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from tiered.bytes.interrupt import uninterrupted_block
from tiered.zero.parameters.calls import Method
from tiered.zero.parameters.conductor import Conductor
from tiered.zero.parameters.parameter import TieredParameter
from tiered.zero.parameters.unit import Unit
from tiered.zero.step import in_graph_task

__all__ = ["any_requires_grad", "any_was_computed", "copied", "own", "running", "touched_by_method"]


def tensors(output: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in ``output``: nested tuples, lists, mappings and dataclasses."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from tensors(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from tensors(value)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        for field in dataclasses.fields(output):
            yield from tensors(getattr(output, field.name, None))


_NOTHING = (int, float, complex, str, bytes, Iterator, nn.Module, type(None))


def any_requires_grad(output: Any) -> bool:
    """Return whether a backward can start from ``output``; True for an object that cannot be looked into."""
    found = list(tensors(output))
    return any(tensor.requires_grad for tensor in found) if found else _is_opaque(output)


def any_was_computed(output: Any) -> bool:
    """Return whether a backward can start from ``output`` of a method, which may hand out the parameters themselves."""
    found = list(tensors(output))
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


def own(output: Any, address_of: Callable[[torch.Tensor], object]) -> Any:
    """Return ``output`` with each tensor for which ``address_of`` is not None cloned; the same object if there is none.

    Containers keep their types; the ones that hold nothing of ours are returned as they are. A sharded parameter stays
    itself, with or without bytes.
    """
    if not any(_must_be_cloned(tensor, address_of) for tensor in tensors(output)):
        return output
    if isinstance(output, torch.Tensor):
        return output.clone()
    if isinstance(output, Mapping):
        result = copy.copy(output)
        for key, value in output.items():
            result[key] = own(value, address_of)  # type: ignore[index]
        return result
    if isinstance(output, tuple) and hasattr(output, "_fields"):
        return type(output)(*(own(value, address_of) for value in output))
    if isinstance(output, list | tuple):
        return type(output)(own(value, address_of) for value in output)
    result = copy.copy(output)
    for field in dataclasses.fields(output):
        object.__setattr__(result, field.name, own(getattr(output, field.name), address_of))
    return result


def _must_be_cloned(tensor: torch.Tensor, address_of: Callable[[torch.Tensor], object]) -> bool:
    return not isinstance(tensor, TieredParameter) and address_of(tensor) is not None


# -- methods -----------------------------------------------------------------------------------------------------------


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

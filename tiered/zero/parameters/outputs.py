"""The outputs of a forward: finding their tensors, and cloning those that lie in a unit's buffer."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from tiered.zero.parameters.parameter import TieredParameter

__all__ = ["any_requires_grad", "any_was_computed", "own", "tensors"]


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

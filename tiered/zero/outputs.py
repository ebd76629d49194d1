"""What a forward returns: looking into it, and cloning what lies in a unit's buffer before the lease returns."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

__all__ = ["any_requires_grad", "own", "tensors"]


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


def any_requires_grad(output: Any) -> bool:
    """Return whether a backward can start from ``output``; True for an object that cannot be looked into."""
    found = list(tensors(output))
    if not found:
        return output is not None
    return any(tensor.requires_grad for tensor in found)


def own(output: Any, address_of: Callable[[torch.Tensor], object]) -> Any:
    """Return ``output`` with each tensor for which ``address_of`` is not None cloned; the same object if there is none.

    Containers keep their types; the ones that hold nothing of ours are returned as they are.
    """
    if not any(address_of(tensor) is not None for tensor in tensors(output)):
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

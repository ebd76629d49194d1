"""Which tensors a call into torch writes to, told before it is made: from its name and its arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

__all__ = ["flat_values", "name_of", "write_targets"]

_ALWAYS_WRITES = {"__setitem__", "__dlpack__", "__delitem__", "_typed_storage", "module_load", "storage"}
_NO_WRITES = {"__index__", "__int__", "__invert__", "__init__", "__init_subclass__"}
_SETTERS = {torch.Tensor.data.__set__, torch.Tensor.real.__set__, torch.Tensor.imag.__set__}  # type: ignore[attr-defined]
_RUNNING = {functional.batch_norm: 1, functional.instance_norm: 1}  # where the running mean is; elsewhere it is fourth


def write_targets(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Return the tensors that ``func(*args, **kwargs)``, as ``__torch_function__`` is given it, would write to.

    Those of an ``inplace`` argument, and of operators with names of their own, torch alone knows.
    """
    name = name_of(func)
    targets = flat_values((kwargs.get("out"),)) + _running_statistics(func, args, kwargs)
    is_in_place = name.endswith("_") and not name.endswith("__")
    if func in _SETTERS or name in _ALWAYS_WRITES or (name.startswith("__i") and name not in _NO_WRITES):
        is_in_place = True
    if is_in_place:
        targets += flat_values(args[:1] or tuple(kwargs.values())[:1])
    if kwargs.get("max_norm") is not None:  # of an embedding, which renormalises rows of its weight
        targets += flat_values((args[1:2], kwargs.get("weight")))
    return targets


def flat_values(values: Any) -> list[Any]:
    """Return the leaves of nested lists, tuples and dicts."""
    if isinstance(values, dict):
        values = values.values()
    leaves: list[Any] = []
    for value in values:
        leaves += flat_values(value) if isinstance(value, list | tuple | dict) else [value]
    return leaves


def name_of(func: Callable[..., Any]) -> str:
    """Return the name of ``func`` for messages."""
    return getattr(func, "__name__", repr(func)).partition(".")[0]  # of an operator without its overload


def _running_statistics(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Return the mean and variance that a normalisation in training updates; no schema says so."""
    if not name_of(func).endswith(("batch_norm", "instance_norm")):
        return []
    is_training = args[5] if len(args) > 5 else kwargs.get("training", kwargs.get("use_input_stats"))
    first = _RUNNING.get(func, 3)
    return [*args[first : first + 2], kwargs.get("running_mean"), kwargs.get("running_var")] if is_training else []

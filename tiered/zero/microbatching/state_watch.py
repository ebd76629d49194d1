"""Watches on the state that a model keeps between forwards: micro-batches in turns would see it in another order."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from tiered.errors import UsageError

if TYPE_CHECKING:
    from tiered.zero.parameters.calls import Call

__all__ = ["InterruptionWatch", "StateWatch"]

_NOT_STATE = {*vars(nn.Module()), "_flat_weights"}
_SIZED = (list, tuple, dict, set, bytearray)
_PLAIN = (int, float, complex, str, bytes, bool, type(None))
_STATELESS = "forwards that keep nothing on modules (a table made on first use: call the model once before)"
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


class StateWatch:
    """Refuses models whose micro-batches depend on each other by more than their order at one place.

    Watches the attributes of the modules: buffers, tensors, containers and numbers. A counter is allowed, an int that
    each micro-batch raises by the same amount in one of its turns: it has the values that it has without turns, unless
    other units go by it. A counter that is raised again in a later turn has other values in between.
    """

    def __init__(self, model: nn.Module, num_lanes: int) -> None:
        self._modules = dict(model.named_modules())
        for name, module in self._modules.items():
            _check(f"{name or 'the model'} ({type(module).__name__})", module)
        found = list(self._attributes())
        self._before = {(where, name): _Mark(holder[name]) for where, holder, name in found}
        self._counters = [(where, holder, name) for where, holder, name in found if type(holder[name]) is int]
        self._counts = self._count()
        self._raised: list[dict[int, list[int]]] = [{} for _ in range(num_lanes)]  # by how much in each turn

    def enter(self, index: int, *, has_begun: bool) -> None:
        """Lane ``index`` is about to run; not ``has_begun``: from its beginning."""
        self._counts = self._count()
        if not has_begun:
            self._raised[index].clear()

    def leave(self, index: int) -> None:
        """Lane ``index`` has paused or ended."""
        for number, (before, after) in enumerate(zip(self._counts, self._count(), strict=True)):
            if type(after) is int and after != before:
                self._raised[index].setdefault(number, []).append(after - before)

    def finish(self) -> None:
        """Raise UsageError, with the reason, if the forwards left state on the modules."""
        counters = {
            (where, name): [raised.get(number, []) for raised in self._raised]
            for number, (where, _, name) in enumerate(self._counters)
        }
        for where, holder, name in self._attributes():
            mark = _Mark(holder[name])
            before = self._before.pop((where, name), None)
            if before is not None and mark.same_as(before):
                continue
            raised = counters.get((where, name), [[]])
            is_counter = type(holder[name]) is int and len(raised[0]) == 1 and raised[0][0] > 0
            if not is_counter or any(turns != raised[0] for turns in raised):
                raise _refusal(f"{_path(where, name)} was set in the forward, which others interrupt", _STATELESS)
        for where, name in self._before:
            raise _refusal(f"{_path(where, name)} was deleted in the forward", _STATELESS)

    def _count(self) -> list[Any]:
        return [holder.get(name) for _, holder, name in self._counters]

    def _attributes(self) -> Iterator[tuple[str, Any, str]]:
        """Yield the place, the dict and the name of each attribute that can keep state, buffers included."""
        for where, module in self._modules.items():
            for name in vars(module):
                if name not in _NOT_STATE:
                    yield where, vars(module), name
            for name in module._buffers:
                yield where, module._buffers, name


class InterruptionWatch:
    """Refuses forwards that are interrupted while modules hold a value for a while only.

    An example is the tensors that ``functional_call`` puts in the place of parameters: other micro-batches would find
    them, and put them back at their end. Looks at the parameters of all modules, and at the other attributes of those
    that are being called.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = dict(model.named_modules())
        self._parameters = [
            (module._parameters, name, parameter, where)
            for where, module in modules.items()
            for name, parameter in module._parameters.items()
        ]
        self._attributes = {module: (where, _attributes_of(module)) for where, module in modules.items()}

    def check(self, calls: Sequence[Call]) -> None:
        """Raise UsageError where the forward that has paused in ``calls`` has replaced an attribute."""
        for holder, name, parameter, where in self._parameters:
            if holder.get(name) is not parameter:
                raise _refusal(f"{_path(where, name)} was replaced in the forward, which others interrupt", _STATELESS)
        for call in calls:
            where, before = self._attributes.get(call.module, ("", {}))
            now = _attributes_of(call.module)
            for name in before.keys() | now.keys():
                if not _is_same(before.get(name), now.get(name)):
                    raise _refusal(f"{_path(where, name)} was set in the forward, which others interrupt", _STATELESS)


def _attributes_of(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _NOT_STATE}


def _is_same(before: Any, now: Any) -> bool:
    """Return whether an attribute is as it was, or a counter."""
    return before is now or type(now) is int or (type(now) in _PLAIN and bool(before == now))


class _Mark:
    """An attribute's value, alive so that its identity stays its own, and the signs of a change in place."""

    __slots__ = ("size", "value", "version")

    def __init__(self, value: Any) -> None:
        self.value = value
        self.size = len(value) if isinstance(value, _SIZED) else 0
        self.version = _version(value)

    def same_as(self, other: _Mark) -> bool:
        """Return whether nothing was changed between the two, as far as can be seen."""
        same_value = self.value is other.value or (type(self.value) in _PLAIN and self.value == other.value)
        return same_value and self.size == other.size and self.version == other.version


def _version(value: Any) -> int:
    is_plain = isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter) and not value.is_inference()
    return value._version if is_plain else 0


def _check(name: str, module: nn.Module) -> None:
    """Raise UsageError for a module that is known to keep state between forwards."""
    if isinstance(module, nn.modules.batchnorm._NormBase) and module.training and module.running_mean is not None:
        raise _refusal(
            f"{name} keeps running statistics over micro-batches in training mode",
            "model.eval() of that module, a norm within each sample (LayerNorm, GroupNorm)",
        )
    for attribute, value in vars(module).items():
        if isinstance(value, _GENERATORS):
            raise _refusal(f"{name}.{attribute} is a random number generator of its own", "torch's default generator")


def _path(where: str, name: str) -> str:
    return f"{where}.{name}" if where else f"the model's {name}"


def _refusal(what: str, expected: str) -> UsageError:
    return UsageError(f"tiered.micro_batches: {what}; expected {expected}, or micro-batches one after another")

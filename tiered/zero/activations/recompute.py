"""recompute: a unit's forward that keeps its inputs only and runs again in backward, to the same bits.

torch's non-reentrant checkpoint runs it again, with torch's random numbers and autocast as they were. This file adds
the rest: buffers and modes as they were, tensors that functional_call puts in the place of parameters, and units that
are updated meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from tiered.bytes.interrupt import uninterrupted
from tiered.errors import UsageError
from tiered.zero.activations.saved import SavedPair
from tiered.zero.step import Event

if TYPE_CHECKING:
    from tiered.zero.parameters.unit import ReferenceToken, Unit

__all__ = ["Recompute", "RecomputedForward"]


class RecomputedForward:
    """A unit module's forward under recompute: call it with the module's arguments.

    The forward must go by its arguments, parameters, buffers, mode, torch's random numbers and autocast only, and must
    not write a tensor argument in place.
    """

    def __init__(self, unit: Unit, module: nn.Module, forward: Callable[..., Any]) -> None:
        self.unit = unit
        self.module = module
        self.forward = forward
        self.modules = list(module.modules())
        self._copies: dict[int, torch.Tensor] = {}  # of buffers as they were last: constant ones are copied once

    def __call__(self, engine: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the forward; autograd keeps its tensor inputs and nothing else. Raises UsageError if it wrote one."""
        arguments = _Arguments(args, kwargs)
        recompute = Recompute(self, engine, (args, kwargs), arguments)
        return checkpoint(recompute, *arguments.hand_over(), use_reentrant=False)

    def states(self) -> list[_ModuleState]:
        """Return the state of each of ``modules`` as it is now; the copies of buffers in it are never written."""
        copies: dict[int, torch.Tensor] = {}
        states = []
        for module in self.modules:
            for buffer in module._buffers.values():
                if buffer is not None and id(buffer) not in copies:
                    last = self._copies.get(id(buffer))
                    is_same = last is not None and _has_same_bits(buffer, last)
                    copies[id(buffer)] = last if last is not None and is_same else buffer.detach().clone()
            buffers = {name: None if b is None else copies[id(b)] for name, b in module._buffers.items()}
            states.append(_ModuleState(dict(module._parameters), buffers, module.training))
        self._copies = copies
        return states


class Recompute:
    """One call of a unit's forward: called by checkpoint now, and again in backward, each time with the same tensors.

    The first run is given the caller's own arguments (``given``). Until the second run the units whose parameters the
    first one touched are not updated.
    """

    def __init__(
        self,
        recomputed: RecomputedForward,
        engine: Any,
        given: tuple[tuple[Any, ...], dict[str, Any]],
        arguments: _Arguments,
    ) -> None:
        self._recomputed = recomputed
        self._engine = engine
        self._given: tuple[tuple[Any, ...], dict[str, Any]] | None = given
        self._arguments = arguments
        self._states = recomputed.states()
        self._versions: dict[Unit, int] = {}
        self._tokens: list[ReferenceToken] = []

    def touch(self, unit: Unit) -> None:
        """Note that the forward uses the parameters of ``unit``."""
        if unit not in self._versions:
            self._versions[unit] = unit.version
            self._tokens.append(unit.token())

    @uninterrupted
    def __call__(self, *tensors: torch.Tensor) -> Any:
        if self._given is None:
            return self._run_again(tensors)
        (args, kwargs), self._given = self._given, None
        unit = self._recomputed.unit
        versions = [_version_of(tensor) for tensor in tensors]
        self.touch(unit)
        pair = SavedPair(self._engine, self._engine.activations.pack, is_outermost=False, recomputed=unit.name)
        with self._engine.activations.recomputing(self), pair:
            output = self._recomputed.forward(*args, **kwargs)
        for tensor, version, place in zip(tensors, versions, self._arguments.places, strict=True):
            if _version_of(tensor) != version:
                raise UsageError(
                    f"recompute of unit {unit.name!r}: its forward wrote {place} in place; expected a forward that can"
                    f" run again, or activations={{{unit.name!r}: 'keep'}} (or 'swap')"
                )
        return output

    def _run_again(self, tensors: Sequence[torch.Tensor]) -> Any:
        engine, recomputed = self._engine, self._recomputed
        name = recomputed.unit.name
        engine.phase.check(Event.BACKWARD, f"recompute of unit {name!r}:")
        for unit, version in self._versions.items():
            if unit.version != version:
                raise UsageError(
                    f"recompute of unit {name!r} after the parameters of unit {unit.name!r} were updated since the"
                    ' forward; expected one backward per forward and step: use update="step" for several'
                )
        args, kwargs = self._arguments.build(tensors)
        engine.forward.enter(recomputed.module, recomputed.unit)
        try:
            with engine.activations.running_again(), self._as_it_was():
                return recomputed.forward(*args, **kwargs)
        except Exception as error:  # also checkpoint's own, when it has all it needs
            error.add_note(f"in the recompute of unit {name!r}, which activations={{{name!r}: 'keep'}} does without")
            raise
        finally:
            engine.forward.exit(recomputed.module, None)
            self._tokens.clear()  # Lifetime: recomputed tensors lie in the units' buffers and keep them alive

    @contextmanager
    def _as_it_was(self) -> Iterator[None]:
        """Give the modules their tensors and modes as they were, and take the present ones back after."""
        modules = self._recomputed.modules
        present = [_ModuleState(module._parameters, module._buffers, module.training) for module in modules]
        clones: dict[int, torch.Tensor] = {}  # a buffer that two modules share stays one
        try:
            for module, state in zip(modules, self._states, strict=True):
                buffers: dict[str, torch.Tensor | None] = {}
                for name, copy in state.buffers.items():
                    buffers[name] = None if copy is None else clones.setdefault(id(copy), copy.clone())
                _ModuleState(dict(state.parameters), buffers, state.training).put(module)
            yield
        finally:
            for module, state in zip(modules, present, strict=True):
                state.put(module)


class _ModuleState(NamedTuple):
    """The state of a module that a forward finds."""

    parameters: dict[str, Any]  # in functional_call, tensors of the caller's
    buffers: dict[str, torch.Tensor | None]
    training: bool

    def put(self, module: nn.Module) -> None:
        """Give this state to ``module``."""
        vars(module).update(_parameters=self.parameters, _buffers=self.buffers, training=self.training)


class _Number(int):
    """The place of a tensor among those that autograd keeps."""


class _Arguments:
    """The arguments of one call: each tensor once, for autograd to keep, and the containers to rebuild around them.

    Containers are made afresh; everything else, parameters included, stands for itself.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.places: list[str] = []  # where each tensor was found first, in words
        self._tensors: list[torch.Tensor] = []
        numbers: dict[int, _Number] = {}
        self._args = [self._take(value, f"argument {index}", numbers) for index, value in enumerate(args)]
        self._kwargs = {name: self._take(value, f"argument {name!r}", numbers) for name, value in kwargs.items()}

    def _take(self, value: Any, place: str, numbers: dict[int, _Number]) -> tuple[list[Any], TreeSpec]:
        leaves, spec = tree_flatten(value)
        for index, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor) or isinstance(leaf, nn.Parameter):
                continue
            if id(leaf) not in numbers:
                numbers[id(leaf)] = _Number(len(self._tensors))
                self._tensors.append(leaf)
                self.places.append(place)
            leaves[index] = numbers[id(leaf)]
        return leaves, spec

    def hand_over(self) -> list[torch.Tensor]:
        """Return the tensors, which are autograd's to keep from now on."""
        tensors, self._tensors = self._tensors, []
        return tensors

    def build(self, tensors: Sequence[torch.Tensor]) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments with ``tensors``."""

        def made(taken: tuple[list[Any], TreeSpec]) -> Any:
            leaves, spec = taken
            return tree_unflatten([tensors[leaf] if type(leaf) is _Number else leaf for leaf in leaves], spec)

        return [made(taken) for taken in self._args], {name: made(taken) for name, taken in self._kwargs.items()}


def _version_of(tensor: torch.Tensor) -> int:
    """Return the count of writes in place to ``tensor``; 0 where torch counts none."""
    return 0 if tensor.is_inference() else tensor._version


def _has_same_bits(buffer: torch.Tensor, copy: torch.Tensor) -> bool:
    """Return whether two dense tensors are the same, -0.0 and NaN included; False where it is not easily known."""
    if buffer.dtype != copy.dtype or buffer.shape != copy.shape or buffer.stride() != copy.stride():
        return False
    if buffer.layout is not torch.strided or not buffer.is_contiguous() or not buffer.dim():
        return False
    return torch.equal(buffer.detach().view(torch.uint8), copy.view(torch.uint8))

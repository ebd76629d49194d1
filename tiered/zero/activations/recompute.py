"""recompute: a unit's forward that keeps its inputs only and runs again in backward, to the same bits.

torch's non-reentrant checkpoint does the bookkeeping of saved tensors, and restores torch's RNG and autocast state;
here is what it leaves out: arguments and attributes as they were, tensors that functional_call puts in the place of
parameters, buffers, modes, other generators, units updated meanwhile, and forwards that cannot run again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tiered.bytes.interrupt import uninterrupted
from tiered.errors import UsageError
from tiered.zero.activations.attributes import Attributes, Known
from tiered.zero.activations.random_draws import RandomStates
from tiered.zero.activations.saved import other_pair_in_force
from tiered.zero.activations.snapshot import Snapshot, build, version_of
from tiered.zero.activations.undecided import UndecidedPair

if TYPE_CHECKING:
    from tiered.zero.engine import Engine
    from tiered.zero.parameters.unit import ReferenceToken, Unit

__all__ = ["Recompute", "RecomputedForward"]


class RecomputedForward:
    """A unit module's forward under recompute: call it with the module's arguments.

    What runs again must depend on its arguments, generators, autocast state, and what its modules hold only. It may
    change all of that but tensors, which it may not write in place (buffers excepted). One that does, or that is given
    what cannot be had twice, such as an iterator, is told at the end of its first run, or before.
    """

    def __init__(self, unit: Unit, module: nn.Module, forward: Callable[..., Any]) -> None:
        self.unit = unit
        self.module = module
        self.forward = forward
        self.by_name = {f"{unit.name}.{name}" if name else unit.name: m for name, m in module.named_modules()}
        self.modules = list(self.by_name.values())
        self._copies: dict[int, torch.Tensor] = {}  # of buffers as they were last: constant ones are copied once
        self._known: Known = [None] * len(self.modules)

    def __call__(self, engine: Engine, args: tuple[Any, ...], kwargs: dict[str, Any], *, may_keep: bool) -> Any:
        """Run the forward; autograd keeps its tensor inputs (a parameter of ours as what it is) and nothing else.

        One that cannot run again has all that it saved kept where it ``may_keep``; otherwise raises UsageError.
        """
        snapshot = Snapshot()
        taken = [snapshot.take(value, f"argument {index}") for index, value in enumerate(args)]
        named = {name: snapshot.take(value, f"argument {name!r}") for name, value in kwargs.items()}
        tensors, places, unknown = list(snapshot.tensors), list(snapshot.places), snapshot.unknown
        attributes = Attributes(self.by_name, self._known, snapshot)
        self._known = attributes.known
        if unknown or snapshot.iterator:
            reason = f"{unknown or snapshot.iterator}, cannot be copied for a second forward"
            if not may_keep:
                raise self.refusal(reason)
            engine.activations.cannot_recompute(self.unit, reason)
            return self.forward(*args, **kwargs)
        recompute = Recompute(self, engine, (args, kwargs), (taken, named), attributes, places, may_keep=may_keep)
        return checkpoint(recompute, *tensors, use_reentrant=False)

    def refusal(self, reason: str) -> UsageError:
        """Return the error that says why the forward cannot run again."""
        name = self.unit.name
        return UsageError(
            f"recompute of unit {name!r}: {reason}; expected a forward that can run again, or"
            f" activations={{{name!r}: 'keep'}} (or 'swap')"
        )

    def copies_of_buffers(self) -> list[dict[str, torch.Tensor | None]]:
        """Return the buffers of each of ``modules``, as they are now; never to be written."""
        copies: dict[int, torch.Tensor] = {}
        found = []
        for module in self.modules:
            for buffer in module._buffers.values():
                if buffer is not None and id(buffer) not in copies:
                    last = self._copies.get(id(buffer))
                    is_same = last is not None and _has_same_bits(buffer, last)
                    copies[id(buffer)] = last if last is not None and is_same else buffer.detach().clone()
            found.append({name: None if b is None else copies[id(b)] for name, b in module._buffers.items()})
        self._copies = copies
        return found


class Recompute:
    """One call of a unit's forward: called by checkpoint now, and again in backward, each time with the same tensors.

    The first run is given the caller's own objects (``given``), the second ones made afresh as they were then, from
    ``taken``. Until it has run again it keeps the units whose parameters it touched from being updated in the backward.
    """

    def __init__(
        self,
        recomputed: RecomputedForward,
        engine: Engine,
        given: tuple[tuple[Any, ...], dict[str, Any]],
        taken: tuple[list[Any], dict[str, Any]],
        attributes: Attributes,
        places: list[str],
        *,
        may_keep: bool,
    ) -> None:
        self._recomputed = recomputed
        self._engine = engine
        self._given: tuple[tuple[Any, ...], dict[str, Any]] | None = given
        self._taken = taken
        self._places = places
        self._may_keep = may_keep
        pair = other_pair_in_force()
        assert pair is not None
        self._below: Callable[..., Any] | None = pair[0]
        self._versions: dict[Unit, int] = {}
        self._tokens: list[ReferenceToken] = []
        self._parameters = [dict(module._parameters) for module in recomputed.modules]  # functional_call's, maybe
        self._buffers = recomputed.copies_of_buffers()
        self._attributes = attributes
        self._generators = RandomStates.now()

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
        below, self._below = self._below, None
        assert below is not None
        recomputed = self._recomputed
        versions = [version_of(tensor) for tensor in tensors]
        self.touch(recomputed.unit)
        pair = UndecidedPair(self._engine, recomputed.unit.name, below, may_keep=self._may_keep)
        with self._engine.activations.recomputing(self), pair.hooks():
            output = recomputed.forward(*args, **kwargs)
        written = [
            place for tensor, n, place in zip(tensors, versions, self._places, strict=True) if version_of(tensor) != n
        ]
        where = written[0] if written else self._attributes.written()
        if not where:
            pair.recompute()
            return output
        reason = f"its forward wrote {where} in place"
        if not self._may_keep:
            raise recomputed.refusal(reason)
        self._engine.activations.cannot_recompute(recomputed.unit, reason)  # Order: what is saved is kept or swapped
        pair.keep()
        self._tokens.clear()
        return output

    def _run_again(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        engine, recomputed = self._engine, self._recomputed
        engine.check_usable(f"recompute of unit {recomputed.unit.name!r}")
        for unit, version in self._versions.items():
            if unit.version != version:
                raise UsageError(
                    f"recompute of unit {recomputed.unit.name!r} after the parameters of unit {unit.name!r} were"
                    ' updated since the forward; expected one backward per forward and step: use update="step" for'
                    " several"
                )
        where = self._attributes.written()
        if where:
            raise recomputed.refusal(f"{where} was written in place since the forward")
        built: dict[int, Any] = {}
        taken, named = self._taken
        args = [build(value, tensors, built) for value in taken]
        kwargs = {name: build(value, tensors, built) for name, value in named.items()}
        engine.enter(recomputed.module, recomputed.unit)
        try:
            with engine.activations.running_again(), self._attributes.in_place(tensors, built), self._as_it_was():
                return recomputed.forward(*args, **kwargs)
        finally:  # also when checkpoint has all it needs, and says so by an exception
            engine.exit(recomputed.module, None)
            self._tokens.clear()  # Lifetime: what was recomputed lies in the units' buffers and keeps them itself

    @contextmanager
    def _as_it_was(self) -> Iterator[None]:
        """Give the module its tensors and generators as they were, and take the present ones back after."""
        modules = self._recomputed.modules
        parameters = [module._parameters for module in modules]
        buffers = [module._buffers for module in modules]
        generators = RandomStates.now()
        clones: dict[int, torch.Tensor] = {}  # a buffer that two modules share stays one
        try:
            for module, own, copies in zip(modules, self._parameters, self._buffers, strict=True):
                module.__dict__["_parameters"] = dict(own)
                for copy in copies.values():
                    if copy is not None and id(copy) not in clones:
                        clones[id(copy)] = copy.clone()
                module.__dict__["_buffers"] = {n: None if c is None else clones[id(c)] for n, c in copies.items()}
            self._generators.restore()
            yield
        finally:
            for module, own, present in zip(modules, parameters, buffers, strict=True):
                module.__dict__["_parameters"] = own
                module.__dict__["_buffers"] = present
            generators.restore()


def _has_same_bits(buffer: torch.Tensor, copy: torch.Tensor) -> bool:
    """Return whether two dense tensors are the same, -0.0 and NaN included; False where it is not easily known."""
    if buffer.dtype != copy.dtype or buffer.shape != copy.shape or buffer.stride() != copy.stride():
        return False
    if buffer.layout is not torch.strided or not buffer.is_contiguous() or not buffer.dim():
        return False
    return torch.equal(buffer.detach().view(torch.uint8), copy.view(torch.uint8))

"""recompute: a unit's forward that keeps its inputs only and runs again in backward, to the same bits.

torch's non-reentrant checkpoint does the bookkeeping of saved tensors, and restores torch's RNG and autocast state;
here is what it leaves out: tensors that functional_call puts in the place of parameters, buffers, modes, other
generators, kwargs and nested inputs, and units updated meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from tiered.errors import UsageError
from tiered.zero.activations.random_draws import RandomStates

if TYPE_CHECKING:
    from tiered.zero.engine import Engine
    from tiered.zero.parameters.unit import ReferenceToken, Unit

__all__ = ["Recompute", "RecomputedForward"]


class RecomputedForward:
    """A unit module's forward under recompute: call it with the module's arguments.

    What runs again must depend on its arguments, parameters, buffers, generators, ``training`` and autocast state only.
    """

    def __init__(self, unit: Unit, module: nn.Module, forward: Callable[..., Any]) -> None:
        self.unit = unit
        self.module = module
        self.forward = forward
        self.modules = list(module.modules())
        self._copies: dict[int, torch.Tensor] = {}  # of buffers as they were last: constant ones are copied once

    def __call__(self, engine: Engine, *args: Any, **kwargs: Any) -> Any:
        """Run the forward; autograd keeps its tensor inputs (a parameter of ours as what it is) and nothing else."""
        leaves, structure = tree_flatten((args, kwargs))
        wrapped = [_Parameter(leaf) if isinstance(leaf, nn.Parameter) else leaf for leaf in leaves]
        return checkpoint(Recompute(self, engine, structure), *wrapped, use_reentrant=False)

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
    """One call of a unit's forward: called by checkpoint now, and again in backward, each time with the same leaves.

    Until it has run again it keeps the units whose parameters it touched from being updated in the backward.
    """

    def __init__(self, recomputed: RecomputedForward, engine: Engine, structure: TreeSpec) -> None:
        self._recomputed = recomputed
        self._engine = engine
        self._structure = structure
        self._versions: dict[Unit, int] = {}
        self._tokens: list[ReferenceToken] = []
        self._parameters = [dict(module._parameters) for module in recomputed.modules]  # functional_call's, maybe
        self._buffers = recomputed.copies_of_buffers()
        self._modes = [module.training for module in recomputed.modules]
        self._generators = RandomStates.now()
        self._has_run = False

    def touch(self, unit: Unit) -> None:
        """Note that the forward uses the parameters of ``unit``."""
        if unit not in self._versions:
            self._versions[unit] = unit.version
            self._tokens.append(unit.token())

    def __call__(self, *wrapped: Any) -> Any:
        leaves = [leaf.parameter if isinstance(leaf, _Parameter) else leaf for leaf in wrapped]
        args, kwargs = tree_unflatten(leaves, self._structure)
        if self._has_run:
            return self._run_again(args, kwargs)
        self._has_run = True
        self.touch(self._recomputed.unit)
        with self._engine.activations.recomputing(self):
            return self._recomputed.forward(*args, **kwargs)

    def _run_again(self, args: Any, kwargs: Any) -> Any:
        engine, recomputed = self._engine, self._recomputed
        engine.check_usable(f"recompute of unit {recomputed.unit.name!r}")
        for unit, version in self._versions.items():
            if unit.version != version:
                raise UsageError(
                    f"recompute of unit {recomputed.unit.name!r} after the parameters of unit {unit.name!r} were"
                    ' updated since the forward; expected one backward per forward and step: use update="step" for'
                    " several"
                )
        engine.enter(recomputed.module, recomputed.unit)
        try:
            with self._as_it_was():
                return recomputed.forward(*args, **kwargs)
        finally:  # also when checkpoint has all it needs, and says so by an exception
            engine.exit(recomputed.module, None)
            self._tokens.clear()  # Lifetime: what was recomputed lies in the units' buffers and keeps them itself

    @contextmanager
    def _as_it_was(self) -> Iterator[None]:
        """Give the module its tensors, modes and generators as they were, and take the present ones back after."""
        modules = self._recomputed.modules
        parameters = [module._parameters for module in modules]
        buffers = [module._buffers for module in modules]
        modes = [module.training for module in modules]
        generators = RandomStates.now()
        clones: dict[int, torch.Tensor] = {}  # a buffer that two modules share stays one
        try:
            for module, own, copies, mode in zip(modules, self._parameters, self._buffers, self._modes, strict=True):
                module.__dict__["_parameters"] = dict(own)
                for copy in copies.values():
                    if copy is not None and id(copy) not in clones:
                        clones[id(copy)] = copy.clone()
                module.__dict__["_buffers"] = {n: None if c is None else clones[id(c)] for n, c in copies.items()}
                module.training = mode
            self._generators.restore()
            yield
        finally:
            for module, own, present, mode in zip(modules, parameters, buffers, modes, strict=True):
                module.__dict__["_parameters"] = own
                module.__dict__["_buffers"] = present
                module.training = mode
            generators.restore()


class _Parameter:
    """A parameter among the arguments: not to be saved as a tensor."""

    __slots__ = ("parameter",)

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter


def _has_same_bits(buffer: torch.Tensor, copy: torch.Tensor) -> bool:
    """Return whether two dense tensors are the same, -0.0 and NaN included; False where it is not easily known."""
    if buffer.dtype != copy.dtype or buffer.shape != copy.shape or buffer.stride() != copy.stride():
        return False
    if buffer.layout is not torch.strided or not buffer.is_contiguous() or not buffer.dim():
        return False
    return torch.equal(buffer.detach().view(torch.uint8), copy.view(torch.uint8))

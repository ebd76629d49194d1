"""The guard at torch.func's door: vmap, grad, vjp, jvp, jacrev, jacfwd, hessian, linearize and functionalize.

These transforms wrap their arguments in C++ without asking ``__torch_function__``; operations on the wrapped parameter
then pass tiered by, and its unit is never leased. So the three functions that wrap are replaced, in the two torch
modules that call them, by ones that first look for a TieredParameter. Nothing changes for other tensors, and nothing
before the first ``construct`` or ``shard``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch._functorch.eager_transforms
import torch._functorch.vmap

from tiered.errors import UsageError
from tiered.zero.parameters.parameter import TieredParameter

__all__ = ["guard_functorch"]

_DOORS: tuple[tuple[Any, str], ...] = (
    (torch._functorch.vmap, "_add_batch_dim"),  # vmap, and the transforms built on it
    (torch._functorch.eager_transforms, "_wrap_for_grad"),  # grad, vjp, jvp, and the transforms built on them
    (torch._functorch.eager_transforms, "_wrap_functional_tensor"),  # functionalize
)


@functools.cache
def guard_functorch() -> None:
    """Have torch.func refuse tiered parameters from now on, by UsageError. Idempotent, thread-safe."""
    for module, name in _DOORS:
        setattr(module, name, _guarded(getattr(module, name)))


def _guarded(wrap: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(wrap)
    def guarded(tensor: Any, *args: Any) -> Any:
        if isinstance(tensor, TieredParameter):
            _check(tensor)
        return wrap(tensor, *args)

    return guarded


def _check(parameter: TieredParameter) -> None:
    """Raise UsageError unless the parameter's bytes stay where they are for as long as a block lasts."""
    segment = parameter.segment
    if not segment.unit.owner.is_unsharded(segment):
        raise UsageError(
            f"parameter {segment.name}: refused torch.func (vmap, grad, vjp, jvp, jacrev, jacfwd, hessian, linearize,"
            " functionalize) over a sharded parameter, whose values it would take past the store; expected inside"
            " `with tiered.unsharded(module):` between steps, or over the copies of model.state_dict()"
        )

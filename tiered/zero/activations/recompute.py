"""recompute: torch's non-reentrant checkpoint around a unit's forward, which promises what torch's promises."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from tiered.zero.activations.saved import with_repeated_arguments
from tiered.zero.parameters.methods import running
from tiered.zero.step import in_graph_task

if TYPE_CHECKING:
    from tiered.zero.parameters.conductor import Conductor
    from tiered.zero.parameters.unit import Unit

__all__ = ["recomputed"]


def recomputed(conductor: Conductor, unit: Unit, module: nn.Module) -> Callable[..., Any]:
    """Return a forward of ``module``, which is ``unit``'s, that keeps its arguments and runs again in backward."""
    forward = module.forward

    def run(names: tuple[str, ...], *values: Any) -> Any:
        num = len(values) - len(names)
        args, kwargs = values[:num], dict(zip(names, values[num:], strict=True))
        if in_graph_task():
            args, kwargs = with_repeated_arguments(args, kwargs)
        with running(conductor, module, unit):  # puts a pair of ours above checkpoint's
            return forward(*args, **kwargs)

    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        values = (*args, *kwargs.values())  # checkpoint has autograd keep no keyword argument
        return checkpoint(functools.partial(run, tuple(kwargs)), *values, use_reentrant=False)

    return checkpointed

"""torch.compile and sharded models: calls of their modules, their methods and operations on their parameters run as is.

A graph would take the parameters past tiered, and the code that moves them in and out cannot be traced. So the compiler
leaves all of the model alone, and compiles the code around it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

__all__ = ["eager", "stay_eager"]

_log = logging.getLogger("tiered")

_REASON = "the modules of a sharded model move their parameters in and out, and run as they are"

_OWN = (
    *("bytes", "store", "tiers", "zero.activations", "zero.engine", "zero.formats", "zero.gradients"),
    *("zero.step", "zero.optimizer", "zero.shard", "zero.unsharded", "zero.parameters.access"),
    *("zero.parameters.calls", "zero.parameters.methods", "zero.parameters.parameter"),
    *("zero.parameters.open_units", "zero.parameters.placeholder", "zero.parameters.unit"),
)
"""The modules that are not traced; those in ``parameters`` singly, for the guard of torch.func is there."""


def eager(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` as one that torch.compile does not look into, nor into the functions that it calls."""
    disabled: Callable[..., Any] = torch.compiler.disable(function, reason=_REASON)  # type: ignore[no-untyped-call]
    return disabled


def stay_eager(module: nn.Module) -> None:
    """Have torch.compile leave calls of ``module`` as they are; ``module.compile()`` warns the user of that."""
    if module._compiled_call_impl is not None:
        _warn(module)
    vars(module)["_compiled_call_impl"] = eager(module._call_impl)
    if type(module).compile is nn.Module.compile:
        module.compile = functools.partial(_warn, module)  # type: ignore[method-assign]
    _skip_own_functions()


@functools.cache
def _skip_own_functions() -> None:
    """Have torch.compile trace no function that runs a model, such as those autograd calls for saved tensors.

    The guard of torch.func is traced: it stands before transforms of ordinary tensors as well.
    """
    for name in _OWN:
        torch._dynamo.trace_rules.add(f"tiered.{name}")


def _warn(module: nn.Module, *_: Any, **__: Any) -> None:
    _log.warning("compile() of %s, which is sharded, changes nothing: %s", type(module).__name__, _REASON)

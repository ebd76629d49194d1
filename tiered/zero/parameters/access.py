"""Who may touch which parameter when: every operation on a sharded parameter asks here first."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
from torch import nn

from tiered.errors import UsageError
from tiered.zero.frames import num_on_stack, stack
from tiered.zero.gradients.backward import in_graph_task
from tiered.zero.parameters.methods import touched_by_method

if TYPE_CHECKING:
    from tiered.zero.engine import Engine
    from tiered.zero.parameters.unit import Segment

__all__ = ["check_access", "check_forward"]

_NOT_NOW = (
    "expected inside a forward or backward of the model, or between the two, as for a term of the loss: use "
    "`with tiered.unsharded(module):` between steps, or model.state_dict() for a copy of everything"
)


def check_access(engine: Engine, segment: Segment, name: str, *, is_write: bool) -> None:
    """Raise UsageError unless the operation ``name`` may read, or write, ``segment``'s parameter now."""
    what = f"parameter {segment.name}: {name}"
    if os.getpid() != engine.pid:
        raise UsageError(
            f"{what} in a forked process; expected in the process that opened the store: pass the worker plain tensors"
        )
    engine.check_usable(what)
    _end_interrupted(engine)
    is_unsharded = engine.is_unsharded(segment)
    if is_write:
        if is_unsharded or engine.num_loading:
            return
        _refuse_strangers(what)
        raise UsageError(
            f"{what} writes a sharded parameter; expected inside `with tiered.unsharded(module):` between steps,"
            " or by the optimizer; a new shape or dtype before tiered.shard"
        )
    if is_unsharded or engine.export or engine.num_loading:
        return
    in_task = in_graph_task()
    if in_task:
        engine.backward.seen()
    if segment.unit in engine.backward.done:
        raise UsageError(f'{what} after its unit was updated in this backward; expected before: use update="step"')
    if engine.backward.has_updated:
        raise UsageError(f"{what} between backward and optimizer.step(); {_NOT_NOW}")
    if engine.calls.stack.methods and not in_task:
        touched_by_method(engine)
    if not (engine.calls or in_task or engine.is_between):
        _refuse_strangers(what)
        raise UsageError(f"{what} outside a forward or backward; {_hint(name)}{_NOT_NOW}")


def check_forward(engine: Engine, name: str) -> None:
    """Raise UsageError where no forward of the module ``name`` can run."""
    if os.getpid() != engine.pid:
        raise UsageError(f"forward of {name} in a forked process; expected in the one that opened the store")
    if torch._C._get_tracing_state() is not None:
        raise UsageError(
            f"torch.jit.trace of {name}, which is sharded: the trace would keep its parameters; expected a model"
            " built afresh with model.state_dict() loaded"
        )


def _end_interrupted(engine: Engine) -> None:
    """End a state_dict() or load_state_dict() that an exception left in the middle: torch calls no hook for it."""
    if engine.export and not num_on_stack(nn.Module.state_dict.__code__):
        engine.export.end()
    if engine.num_loading and not num_on_stack(nn.Module.load_state_dict.__code__):
        engine.num_loading = 0


def _refuse_strangers(what: str) -> None:
    """Raise UsageError where it is the step of another optimizer than tiered's that does ``what``."""
    step = (frame.f_locals.get("self") for frame in stack() if frame.f_code.co_name == "step")
    optimizer = next((each for each in step if isinstance(each, torch.optim.Optimizer)), None)
    kinds = [] if optimizer is None else [(kind.__module__, kind.__qualname__) for kind in type(optimizer).__mro__]
    if not kinds or any(module.partition(".")[0] == "tiered" for module, _ in kinds):
        return
    module, name = kinds[0]
    title = f"{'torch.optim' if module.startswith('torch.optim.') else module}.{name}"
    raise UsageError(
        f"{what}, by the step of {title}, which keeps its state in memory and cannot update a sharded model; expected"
        " tiered.AdamW(model.parameters(), ...), tiered.SGD or tiered.Lion"
    )


def _hint(name: str) -> str:
    if name in {"to", "float", "half", "double", "bfloat16", "cuda", "type"}:
        return "to change dtype or device pass param_dtype= or device= to tiered.shard; "
    return ""

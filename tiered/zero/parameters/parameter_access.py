"""Access: an operation on a sharded parameter asks here for the right to it, and faults the parameter's unit in.

The other way in is a module's hook: see [Note: the way of a unit] in unit.py.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import torch
from torch import nn

from tiered.errors import UsageError
from tiered.tiers.compute_tier import BufferState
from tiered.zero.parameters.module_calls import EngineParts, ModuleCalls, num_on_stack, stack
from tiered.zero.parameters.parameter import is_write, name_of
from tiered.zero.parameters.saved_references import SavedPair
from tiered.zero.parameters.unit import Segment, Unit
from tiered.zero.step import Event, graph_task

__all__ = ["Access", "end_interrupted"]

_MAKERS = {"update", "update_layer"}
_MERGES = {"merge", "unmerge", "_unload_and_optionally_merge", *_MAKERS}
"""Functions of PEFT that read, copy and write the base between steps; ``_MAKERS`` make adapters."""

_NOT_NOW = (
    "expected inside a forward or backward of the model, or between the two, as for a term of the loss: use "
    "`with tiered.unsharded(module):` between steps, or model.state_dict() for a copy of everything"
)

_NEW_SHAPE = "expected before tiered.shard: tiered.hf.from_pretrained(num_tokens=N), or resize_token_embeddings(N)"


class Access:
    """The parameters of a sharded model ask this object for the right to each operation, and for their values."""

    def __init__(self, engine: EngineParts) -> None:
        self.engine = engine

    def access(
        self, segments: Sequence[Segment], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> AbstractContextManager[None]:
        """Return a block for one operation ``func``, in which the parameters of ``segments`` are shown."""
        return _Operation(self, segments, func, args, kwargs)

    def is_unsharded(self, segment: Segment) -> bool:
        """Return whether a ``tiered.unsharded`` block keeps the values of ``segment`` where they are."""
        return segment.unit in self.engine.plan.lent

    def assign(self, segment: Segment, value: torch.Tensor) -> None:
        """``parameter.data = value`` while it is shown for writing: the values are copied. Raises UsageError."""
        if value.shape != segment.shape or value.dtype != segment.dtype:
            raise UsageError(
                f"parameter {segment.name}: .data = {tuple(value.shape)} {value.dtype} for {segment.shape}"
                f" {segment.dtype}; another shape or dtype is {_NEW_SHAPE}"
            )
        with torch.no_grad():
            segment.parameter.copy_(value)

    def detached(self, segment: Segment, result: torch.Tensor) -> torch.Tensor:
        """``parameter.detach()``: inside state_dict() the caller's own."""
        state_dicts = self.engine.phase.state_dicts
        return state_dicts.copy(segment, result) if state_dicts.num_calls else result

    def set(self, segment: Segment, source: torch.Tensor) -> None:
        """``parameter.set_(source)``: raises UsageError."""
        segment.parameter._refuse()  # type: ignore[attr-defined]

    def copy(self, segment: Segment) -> nn.Parameter:
        """``copy.deepcopy`` of a parameter: PEFT, which trains the copy, gets an ordinary one. Raises UsageError."""
        if _is_in_merge():
            with torch.no_grad():
                return nn.Parameter(segment.parameter.clone(), requires_grad=segment.parameter.requires_grad)
        raise UsageError(
            f"parameter {segment.name}: refused deepcopy of a sharded parameter; copy model.state_dict() into a model"
            " built afresh"
        )

    def require_gradient(self, parameter: nn.Parameter) -> None:
        """A parameter's ``requires_grad`` was set: follow its gradient."""
        self.engine.watch(parameter)

    def check(self, segment: Segment, name: str, *, is_write: bool, in_task: bool) -> bool:
        """Raise UsageError unless the operation ``name`` may read, or write, ``segment``'s parameter now.

        Return whether it is part of a merge of adapters, which writes to what ``.data`` has given.
        """
        engine, phase, calls = self.engine, self.engine.phase, self.engine.calls
        what = f"parameter {segment.name}: {name}"
        if not phase.process.is_here:
            raise UsageError(
                f"{what} in a forked process; expected in the process that opened the store: pass the worker plain"
                " tensors"
            )
        if phase.must_resume and _is_in_merge(_MAKERS):
            return True  # resume() gives the adapter its values, and the base those of the commit
        phase.check(_event(calls, in_task=in_task), what)
        if phase.state_dicts.num_calls or phase.num_loading:
            end_interrupted(engine)
        is_in_model = bool(calls.under_way) or in_task
        if (name == ".data" or not is_in_model) and _is_in_merge():
            engine.check_idle(what)
            return True
        is_unsharded = segment.unit in engine.plan.lent
        if is_write:
            if is_unsharded or phase.num_loading:
                return False
            _refuse_strangers(what)
            raise UsageError(
                f"{what} writes a sharded parameter; expected inside `with tiered.unsharded(module):` between steps,"
                " or by the optimizer; a new shape or dtype before tiered.shard"
            )
        if is_unsharded or phase.state_dicts.num_calls or phase.num_loading:
            return False
        if in_task:
            engine.backward.seen()
        if segment.unit in phase.done:
            raise UsageError(f'{what} after its unit was updated in this backward; expected before: use update="step"')
        if calls.methods and not in_task:
            calls.touched_by_method()
        if not (is_in_model or calls.under_way or phase.is_between):
            _refuse_strangers(what)
            raise UsageError(f"{what} outside a forward or backward; {_hint(name)}{_NOT_NOW}")
        return False


class _Operation:
    """The block around one operation: it shows the parameters' units, which stay open until its end.

    Raises UsageError at the wrong time as it begins.
    """

    __slots__ = ("_access", "_args", "_func", "_kwargs", "_pair", "_segments", "_units", "_written")

    def __init__(
        self, access: Access, segments: Sequence[Segment], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._access = access
        self._segments = segments
        self._func, self._args, self._kwargs = func, args, kwargs
        self._units: list[Unit] = []
        self._written: list[Segment] = []  # by a copy, or who knows what the values are
        self._pair: SavedPair | None = None

    def __enter__(self) -> None:
        engine = self._access.engine
        if engine.phase.state_dicts.only_looks:
            return
        try:
            self._show_units(is_write(self._func, self._args, self._kwargs), name_of(self._func))
            self._pair = engine.calls.pair_if_needed()
            if self._pair is not None:
                self._pair.enter()
        except BaseException:
            self._end()
            raise

    def _show_units(self, write: bool, name: str) -> None:
        access, engine = self._access, self._access.engine
        in_task = graph_task() != -1
        for segment in self._segments:
            unit = segment.unit
            is_new = unit not in self._units  # the check of one parameter is that of all of its unit
            is_merge = (is_new or write) and access.check(segment, name, is_write=write, in_task=in_task)
            if not in_task:
                engine.calls.touched(segment)
            if write and (engine.phase.num_loading or is_merge):
                self._written.append(segment)
            if is_new:
                mode = "rw" if write or (is_merge and name == ".data") else "r"
                buffer = unit.buffer
                if buffer.state is not BufferState.SHOWN or (mode == "rw" and buffer.mode == "r"):
                    unit.show(mode)
                unit.buffer.use()
                engine.ahead.go_on()
                unit.num_ops += 1
                self._units.append(unit)

    def _end(self) -> None:
        for unit in self._units:
            unit.num_ops -= 1
        for unit in tuple(self._access.engine.plan.beyond):
            unit.park()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._pair is not None:
            self._pair.exit()
        self._end()
        if error is None:
            for segment in self._written:
                source = self._args[1] if self._func is torch.Tensor.copy_ and len(self._args) > 1 else None
                self._access.engine.masters.set_master(segment, source)


def _event(calls: ModuleCalls, *, in_task: bool) -> Event:
    """Return the event that an operation on a parameter is a part of."""
    if in_task:
        return Event.BACKWARD
    if not calls.under_way and calls.touching_method() is None:
        return Event.TOUCH
    return Event.FORWARD if torch.is_grad_enabled() else Event.EVALUATION


def end_interrupted(engine: EngineParts) -> None:
    """End a state_dict() or load_state_dict() that an exception left in the middle: torch calls no hook for it."""
    phase = engine.phase
    if phase.state_dicts.num_calls and not num_on_stack(nn.Module.state_dict.__code__):
        phase.state_dicts.end()
    if phase.num_loading and not num_on_stack(nn.Module.load_state_dict.__code__):
        phase.num_loading = 0
        engine.open_units.park_all()  # it had leased one for writing


def _is_in_merge(names: Collection[str] = frozenset(_MERGES)) -> bool:
    """Return whether an adapter of PEFT is being made, is merging itself into its base, or goes out of it again."""
    if "peft" not in sys.modules:
        return False
    return any(
        frame.f_code.co_name in names and frame.f_globals.get("__name__", "").startswith("peft.") for frame in stack()
    )


def _refuse_strangers(what: str) -> None:
    """Raise UsageError where the step of another optimizer than tiered's, or a resize of embeddings, does ``what``."""
    if any(frame.f_code.co_name == "resize_token_embeddings" for frame in stack()):
        raise UsageError(f"{what}, by resize_token_embeddings, which is {_NEW_SHAPE}")
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

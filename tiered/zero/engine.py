"""Engine: what runs now (forward, backward, step), and who may touch which parameter when.

Module hooks report here; units are opened and parked from here. The engine owns no bytes (the working set does), does
no arithmetic on them (update.py does), and leaves the course of a backward to backward.py.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from tiered.errors import StepAbandonedError, StoreLostError, UsageError
from tiered.store.store import Store
from tiered.tiers.placement import choose_held
from tiered.tiers.schedule import NextUsePolicy, Schedule
from tiered.tiers.trace import Trace
from tiered.zero.backward import Backward, in_graph_task
from tiered.zero.gradients import UnitGradients
from tiered.zero.outputs import any_requires_grad, own
from tiered.zero.parameter import is_write
from tiered.zero.residency import Residency
from tiered.zero.saved import SavedPair, other_pair_in_force

if TYPE_CHECKING:
    from tiered.zero.codec import Bucket
    from tiered.zero.unit import Segment, Unit

__all__ = ["Engine", "Updater"]


class Updater(Protocol):
    """What the engine asks of an optimizer."""

    in_backward: bool  # update="backward"

    def begin(self) -> None:
        """Freeze the hyperparameters for one step."""

    def update(self, unit: Unit) -> None:
        """Update the unit's parameters that have a gradient; blocks."""


class _Frame:
    """One module call on the stack."""

    __slots__ = ("module", "pair", "unit")

    def __init__(self, module: nn.Module, unit: Unit | None) -> None:
        self.module = module
        self.unit = unit
        self.pair: SavedPair | None = None


_NOT_NOW = (
    "expected inside a forward or backward of the model: use `with tiered.unsharded(module):` between steps, "
    "model.state_dict() for a copy of everything, or `tiered export` for a file"
)


class Engine:
    """The state of one sharded model between, in and after its forwards and backwards.

    Invariant: outside a module call, a backward, the time between a forward and its backward, and ``unsharded``, no
    parameter's values can be reached. One thread drives it. ``abandoned`` is the reason once a step was left half done;
    ``is_between`` holds from a forward with gradients to the end of its backward.
    """

    def __init__(self, store: Store, model: nn.Module, units: Sequence[Unit], *, window_bytes: int) -> None:
        self.store = store
        self.working_set = store.working_set
        self.units = list(units)  # the root unit first, then in the order of the modules
        self.updater: Updater | None = None
        self.write_listeners: list[Callable[[Segment, torch.Tensor | None], None]] = []  # values were replaced
        self.abandoned = ""
        self.must_resume = False  # the store holds a run that was not resumed yet
        self.is_between = False
        self.num_exporting = 0  # inside state_dict(): detach() copies
        self.num_loading = 0  # inside load_state_dict(): copy_() writes
        self.num_accumulating = 0  # inside tiered.accumulate
        self.held_bytes = 0  # DRAM that placement may keep for good
        self.residency = Residency(self.working_set, self.units[0])
        self.backward = Backward(self)
        self._model = weakref.ref(model)
        self._pid = os.getpid()
        self._stack: list[_Frame] = []
        self._num_pairs = 0
        for unit in self.units:
            unit.engine = self
            unit.gradients = UnitGradients(unit)
        self._nbytes: dict[str, int] = {unit.key: unit.nbytes for unit in self.units}
        order = [unit.key for unit in self.units]
        self._expect([*order, *reversed(order)], window_bytes)
        _engines.add(self)
        _watch_forks()

    def __repr__(self) -> str:
        return f"Engine({len(self.units)} units, {self.residency!r}, depth {len(self._stack)})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            "pickling or deepcopy of a sharded model; expected model.state_dict(), or store.commit() and tiered.Store"
            " in the other process"
        )

    # -- what may be touched when --------------------------------------------------------------------------------

    @contextmanager
    def access(self, segment: Segment, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        """Show ``segment``'s parameter for one operation ``func``; raises UsageError at the wrong time."""
        write = is_write(func, args, kwargs)
        self._check(segment, getattr(func, "__name__", str(func)), write)
        if self._stack and not in_graph_task():
            if torch.is_grad_enabled():
                segment.num_grad_touches += 1
            else:
                segment.num_no_grad_touches += 1
        unit = segment.unit
        unit.show("rw" if write else "r")
        unit.num_ops += 1
        try:
            with self._pair_for_operation():
                yield
        finally:
            unit.num_ops -= 1
        if write and self.num_loading:
            self.written(segment, args[1] if len(args) > 1 else None)

    def _check(self, segment: Segment, name: str, write: bool) -> None:
        what = f"parameter {segment.name}: {name}"
        if os.getpid() != self._pid:
            raise UsageError(
                f"{what} in a forked process; expected in the process that opened the store: pass the worker plain"
                " tensors"
            )
        self.check_usable(what)
        is_unsharded = segment.unit in self.residency.shielded
        if write:
            if is_unsharded or self.num_loading:
                return
            raise UsageError(
                f"{what} writes a sharded parameter; expected inside `with tiered.unsharded(module):` between steps,"
                " or by the optimizer"
            )
        if is_unsharded or self.num_exporting or self.num_loading:
            return
        in_task = in_graph_task()
        if in_task:
            self.backward.seen()
        if segment.unit in self.backward.done:
            raise UsageError(f'{what} after its unit was updated in this backward; expected before: use update="step"')
        if self.backward.has_updated:
            raise UsageError(f"{what} between backward and optimizer.step(); {_NOT_NOW}")
        if not (self._stack or in_task or self.is_between):
            raise UsageError(f"{what} outside a forward or backward; {_hint(name)}{_NOT_NOW}")

    def check_usable(self, what: str) -> None:
        """Raise unless the model can be used: StepAbandonedError, or UsageError for a run not resumed."""
        if self.abandoned and not self.store.durable:
            raise StoreLostError(
                f"{what}: {self.abandoned}; a store with durable=False cannot roll back: start again in a new one"
            )
        if self.abandoned:
            raise StepAbandonedError(
                f"{what}: the step was abandoned ({self.abandoned}); expected store.rollback(), store.resume() or"
                " store.close() next"
            )
        if self.must_resume:
            raise UsageError(
                f"{what}: the store holds a run at generation {self.store.generation}; expected store.resume() first"
                " (after the optimizer and everything else is registered), or a store in an empty directory"
            )

    def abandon(self, reason: str) -> None:
        """Mark the step as left half done; only rollback, resume and close remain."""
        self.abandoned = self.abandoned or reason

    def check_idle(self, what: str) -> None:
        """Raise UsageError unless no forward, backward or step is under way."""
        self.backward.settle()
        self.check_usable(what)
        if self._stack or in_graph_task():
            raise UsageError(f"{what} inside a forward or backward; expected between steps")
        if self.backward.has_updated or self.has_gradients():
            raise UsageError(
                f"{what} with gradients pending; expected after optimizer.step(), or after optimizer.zero_grad(), which"
                " drops them"
            )

    def has_gradients(self) -> bool:
        """Return whether some unit has gradients that no step has used."""
        return any(unit.gradients.key for unit in self.units)

    # -- module calls --------------------------------------------------------------------------------------------

    def is_in_call(self) -> bool:
        """Return whether a module call is under way."""
        return bool(self._stack)

    def is_on_stack(self, unit: Unit) -> bool:
        """Return whether a call of ``unit``'s module is under way."""
        return any(frame.unit is unit for frame in self._stack)

    def enter(self, module: nn.Module, unit: Unit | None) -> None:
        """A module call begins."""
        frame = _Frame(module, unit)
        self._stack.append(frame)
        if len(self._stack) == 1:
            self._enter_outermost(type(module).__name__)
        if self._num_pairs == 0 and torch.is_grad_enabled() and not _is_recomputing():
            pair = SavedPair(self)
            pair.enter()
            frame.pair = pair
            self._num_pairs += 1
        if unit is not None:
            unit.show()

    def exit(self, module: nn.Module, output: Any) -> Any:
        """A module call ends, also by an exception; return the output with nothing of it in a unit's buffer."""
        while self._stack:
            frame = self._stack.pop()
            self._leave(frame)
            if frame.module is module:
                break
        if self._stack or in_graph_task():
            return output
        if torch.is_grad_enabled() and any_requires_grad(output):
            self.is_between = True
        return own(output, self.residency.address_of)

    def _enter_outermost(self, name: str) -> None:
        if os.getpid() != self._pid:
            raise UsageError(f"forward of {name} in a forked process; expected in the one that opened the store")
        if in_graph_task():
            self.backward.seen()
            return
        self.backward.settle()
        self.check_usable(f"forward of {name}")
        if self.backward.has_updated:
            self.abandon("a forward after a backward that had updated parameters, without optimizer.step()")
            self.check_usable(f"forward of {name}")
        if not self.is_between and not self.has_gradients():
            self.forget_touches()
            self.schedule.trace.rewind()
            self.schedule.advance()

    def _leave(self, frame: _Frame) -> None:
        if frame.pair is not None:
            frame.pair.exit()
            self._num_pairs -= 1
        unit = frame.unit
        if unit is None or self.is_on_stack(unit) or unit in self.residency.shielded or self.abandoned:
            return
        unit.park()

    def _pair_for_operation(self) -> AbstractContextManager[Any]:
        """Return the pair of hooks for an operation outside any module call; inside one they are in force already."""
        if self._num_pairs or not torch.is_grad_enabled() or _is_recomputing():
            return nullcontext()
        return SavedPair(self)

    def opened(self, unit: Unit) -> None:
        """A unit has leased its bytes: park what is idle, ask for what comes next."""
        self.residency.opened(unit, {frame.unit for frame in self._stack})
        self.schedule.use(unit.key)

    def assign(self, segment: Segment, value: torch.Tensor) -> None:
        """``parameter.data = value`` while it is shown for writing: the values are copied. Raises UsageError."""
        if value.shape != segment.shape or value.dtype != segment.dtype:
            raise UsageError(
                f"parameter {segment.name}: .data = {tuple(value.shape)} {value.dtype}; expected the {segment.shape}"
                f" {segment.dtype} that it was sharded with"
            )
        with torch.no_grad():
            segment.parameter.copy_(value)

    def copy(self, segment: Segment) -> nn.Parameter:
        """``copy.deepcopy`` of a parameter: raises UsageError."""
        raise UsageError(
            f"parameter {segment.name}: refused deepcopy of a sharded parameter; copy model.state_dict() into a model"
            " built afresh"
        )

    def require_gradient(self, parameter: nn.Parameter) -> None:
        """A parameter's ``requires_grad`` was set: follow its gradient."""
        self.backward.watch(parameter)

    def forget_touches(self) -> None:
        """Forget which parameters were touched how often: a new step begins."""
        for unit in self.units:
            for segment in unit.segments:
                segment.num_grad_touches = segment.num_no_grad_touches = 0

    # -- steps ---------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """The optimizer's step: update what has a gradient, or, under update="backward", conclude what was done."""
        assert self.updater is not None
        self.backward.settle()
        self.check_usable("optimizer.step()")
        if self._stack or in_graph_task():
            raise UsageError("optimizer.step() inside a forward or backward; expected after it")
        if self.updater.in_backward and not self.backward.has_updated and self.has_gradients():
            raise UsageError(
                "optimizer.step() after backwards under tiered.accumulate only; expected one backward outside it, which"
                " adds and updates"
            )
        self.residency.park_all()
        due = [] if self.updater.in_backward else self.units
        try:
            for unit in due:
                unit.gradients.reconcile()
                if unit.gradients.key:
                    self.backward.update(unit)
        except BaseException as error:
            self.abandon(f"optimizer.step() failed: {error}")
            raise
        self.backward.conclude()
        for unit in self.units:
            unit.gradients.drop()
        self.is_between = False
        self.residency.sweep()
        self.schedule.trace.end_step()
        self.schedule.advance()

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        """Drop all gradients, or zero them."""
        self.backward.settle()
        for unit in self.units:
            if set_to_none:
                unit.gradients.drop()
            else:
                unit.gradients.zero()

    def set_state_keys(self, buckets: Mapping[Unit, Sequence[Bucket]], *, in_backward: bool) -> None:
        """Tell placement and schedule of the optimizer's keys, and of the order of use to expect in a step."""
        state = {bucket.key: bucket.nbytes for unit in self.units for bucket in buckets[unit]}
        self._nbytes |= state
        self.working_set.hold(choose_held({u.key: u.nbytes for u in self.units}, state, self.held_bytes))
        order = [unit.key for unit in self.units]
        if not in_backward:
            order += [unit.key for unit in reversed(self.units)]
        for unit in reversed(self.units) if in_backward else self.units:
            order += [unit.key, *(bucket.key for bucket in buckets[unit])]
        self._expect(order, self.schedule.window_bytes)

    def _expect(self, order: list[str], window_bytes: int) -> None:
        trace = Trace(order)
        self.schedule = Schedule(trace, self._prefetch, self._nbytes, window_bytes=window_bytes)
        self.working_set.set_policy(NextUsePolicy(trace))

    def _prefetch(self, keys: Iterable[str]) -> int:
        return self.working_set.prefetch(list(keys))

    def written(self, segment: Segment, source: torch.Tensor | None) -> None:
        """A parameter's values were replaced, by ``source`` where it is known; who keeps masters must hear of it."""
        for listener in self.write_listeners:
            listener(segment, source)

    # -- the store's word ----------------------------------------------------------------------------------------

    def guard(self, word: str) -> None:
        """What the store calls before it commits, rolls back, resumes or closes."""
        if word == "commit":
            self.check_idle("commit")
            return
        if in_graph_task():
            raise UsageError(f"{word} inside a backward; expected between steps")
        is_half_done = bool(self.abandoned) or self.backward.is_half_done
        self._reset()
        if word == "close" and is_half_done and self.store.durable:
            self._drop_half_done()

    def _drop_half_done(self) -> None:
        """Keep ``close`` from committing a step that was left half done."""
        if not self.store.generation:
            raise StepAbandonedError("closed in the middle of a step, and nothing was ever committed: all is dropped")
        self.store.rollback()

    def _reset(self) -> None:
        """Forget the step under way; what the store holds is the truth."""
        while self._stack:  # left by an interrupt that no hook saw
            pair = self._stack.pop().pair
            if pair is not None:
                pair.exit()
        self._num_pairs = 0
        self.backward.reset()
        self.abandoned = ""
        self.must_resume = self.is_between = False
        self.residency.shielded.clear()
        for unit in self.units:
            unit.num_ops = 0
            unit.version += 1
        self.residency.park_all()
        for unit in self.units:
            unit.gradients.busy = False
            unit.gradients.drop()
        self.forget_touches()
        self.schedule.trace.rewind()

    def forget(self) -> None:
        """In a forked child: nothing of the parent's memory is there."""
        self.residency.forget()
        self._stack.clear()


def _is_recomputing() -> bool:
    """Return whether a non-reentrant checkpoint recomputes: its own pair must see what it saves, weights included."""
    return in_graph_task() and other_pair_in_force() is not None


def _hint(name: str) -> str:
    if name in {"to", "float", "half", "double", "bfloat16", "cuda", "type"}:
        return "to change dtype or device pass param_dtype= or device= to tiered.shard; "
    return ""


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()
_is_watching = False


def _watch_forks() -> None:
    global _is_watching
    if not _is_watching:
        _is_watching = True
        os.register_at_fork(after_in_child=_forget_all)


def _forget_all() -> None:
    for engine in list(_engines):
        engine.forget()

"""Phase: the place of one sharded model in its step, the events that may come next, and the refusals of others.

A phase is the state between calls, and the calls that run on top of that state. The units' saved references tell
whether a graph is alive; the phase does not: two forwards and then two backwards are as legal as one after the other.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Sized
from typing import Any

import torch

from tiered.bytes.exit_and_fork import this_process
from tiered.errors import StepAbandonedError, StoreLostError, UsageError
from tiered.store.store import Store
from tiered.zero.state_dict_copies import StateDictCopies

__all__ = ["ONLY_ADDED", "Event", "Phase", "StepState", "graph_task", "in_graph_task", "is_autograds_own"]


class StepState(enum.Enum):
    """The state of a model between its calls; each member says which calls may come and what the state costs.

    CLEAN -> PENDING [autograd accumulates], PENDING -> CLEAN [``Engine.step_ended``, ``zero_grad``],
    CLEAN -> USED [``Backward``, at the end of one that updates], USED -> CLEAN [``conclude``],
    any -> ABANDONED [``abandon``], ABANDONED and MUST_RESUME -> CLEAN [``restored``].
    """

    CLEAN = "clean"  # no gradient waits: every call may begin; DRAM keeps held keys and those read ahead
    PENDING = "pending"  # gradients wait for a step: no commit; they take their share of DRAM, and NVMe beyond it
    USED = "used"  # a backward has updated its units: only evaluation, then step(); no gradient takes memory
    ABANDONED = "abandoned"  # a step was left half done: only rollback(), resume() and close()
    MUST_RESUME = "must resume"  # the store holds a run that was not resumed: only resume() and close()


class Event(enum.Enum):
    """The requests that a caller may make of a model."""

    FORWARD = "a forward with gradients"
    EVALUATION = "a forward without gradients"
    TOUCH = "an operation on a parameter"
    BACKWARD = "a backward"
    STEP = "optimizer.step()"
    ZERO_GRAD = "optimizer.zero_grad()"
    BETWEEN_STEPS = "commit, state_dict(), unsharded and what else expects a whole model"


_PENDING = "with gradients pending; expected after optimizer.step(), or after optimizer.zero_grad(), which drops them"

_REFUSED: dict[StepState, dict[Event, str]] = {
    StepState.CLEAN: {},
    StepState.PENDING: {Event.BETWEEN_STEPS: _PENDING},
    StepState.USED: {
        Event.FORWARD: 'after a backward that has updated parameters (update="backward"); expected optimizer.step()'
        " first: an evaluation under torch.no_grad() may run before it",
        Event.TOUCH: "between backward and optimizer.step(); expected inside a forward or backward of the model, or"
        " between the two, as for a term of the loss",
        Event.BACKWARD: 'a second backward before optimizer.step() under update="backward"; expected one backward a'
        ' step, `with tiered.accumulate(model):` around the others, or update="step"',
        Event.ZERO_GRAD: 'between backward and optimizer.step() under update="backward", which has used the gradients:'
        ' the step cannot be skipped any more; expected step() next, or update="step"',
        Event.BETWEEN_STEPS: _PENDING,
    },
    StepState.ABANDONED: dict.fromkeys(
        Event,
        "the step was abandoned ({reason}); expected store.rollback(), store.resume() or, where nothing was ever"
        " committed, store.close() next",
    ),
    StepState.MUST_RESUME: dict.fromkeys(
        Event,
        "the store holds a run at generation {generation}; expected store.resume() first (after the optimizer and"
        " everything else is registered), or a store in an empty directory",
    ),
}
"""The one table of illegal events: state -> event -> the text of the refusal after the caller's words.

All other events are legal. A refusal changes nothing: the state after it is the state before it.
"""


ONLY_ADDED = (
    "optimizer.step() after backwards under tiered.accumulate only, or one that failed; expected one backward outside"
    " it, which adds and updates"
)

graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""Return the number of the autograd backward that this thread runs inside of; -1 outside."""


def in_graph_task() -> bool:
    """Return whether this thread runs inside an autograd backward."""
    return graph_task() != -1


def is_autograds_own() -> bool:
    """Return whether this thread is one that autograd runs the backward of a compute device in."""
    me = threading.get_ident()  # order: asking for the current thread would list it from then on
    mine = [thread for thread in threading.enumerate() if thread.ident == me]  # a generator's end may lose a Ctrl-C
    return not mine or isinstance(mine[0], threading._DummyThread)  # one that Python did not start


class Phase:
    """The facts about the step of one model; one thread changes them.

    Invariant: outside a call of the model, a backward, the time between a forward and its backward (``is_between``),
    and ``unsharded``, no parameter's values can be reached. ``abandoned`` is the reason once a step was left half done.
    ``has_begun`` holds from the first update of a step to its end, ``has_updated`` from the end of a backward that has
    updated to the step that concludes it.
    """

    def __init__(
        self,
        store: Store,
        updates: Any,  # Updates, of a room that stands above this one
        *,
        calls_under_way: Sized,
        has_gradients: Callable[[], bool],
    ) -> None:
        self.is_durable = store.durable
        self.updates = updates
        self.abandoned = ""
        self.must_resume = False
        self.is_between = False
        self.has_begun = False
        self.has_updated = False
        self.done: set[object] = set()  # the units that were updated in the backward that runs
        self.state_dicts = StateDictCopies()  # inside state_dict(): detach() copies
        self.num_loading = 0  # inside load_state_dict(): copy_() writes
        self.num_accumulating = 0  # inside tiered.accumulate
        self.updates_in_backward = False  # update="backward"
        self.process = this_process()
        self.has_gradients = has_gradients
        self._store = store
        self._calls_under_way = calls_under_way

    def __repr__(self) -> str:
        return f"Phase({self.state.value})"

    @property
    def state(self) -> StepState:
        """The state between calls."""
        if self.abandoned:
            return StepState.ABANDONED
        if self.must_resume:
            return StepState.MUST_RESUME
        if self.has_updated:
            return StepState.USED
        return StepState.PENDING if self.has_gradients() else StepState.CLEAN

    @property
    def is_half_done(self) -> bool:
        """Whether some units may be updated and the step is not concluded, or was abandoned."""
        return bool(self.abandoned) or self.has_begun or self.has_updated

    @property
    def is_in_step(self) -> bool:
        """Whether a forward or backward runs, or gradients wait for the step; a forward that has ended is no step."""
        is_running = in_graph_task() or bool(self._calls_under_way)
        return is_running or self.has_begun or self.has_updated or self.has_gradients()

    def check(self, event: Event, what: str) -> None:
        """Raise where ``event``, which messages call ``what``, is illegal now; nothing is changed.

        Raises the error of a failed update; then StepAbandonedError or StoreLostError; then UsageError.
        """
        if self.updates.failure is not None:
            self.updates.raise_failure()
        if not (self.abandoned or self.must_resume or self.has_updated) and event is not Event.BETWEEN_STEPS:
            return  # CLEAN and PENDING refuse nothing else: gradients are not looked through for it
        state = self.state
        refusal = _REFUSED[state].get(event)
        if refusal is None:
            return
        if state is StepState.ABANDONED and not self.is_durable:
            raise StoreLostError(
                f"{what}: {self.abandoned}; a store with durable=False cannot roll back: start again in a new one"
            )
        if state is StepState.ABANDONED:
            raise StepAbandonedError(f"{what}: {refusal.format(reason=self.abandoned)}")
        if state is StepState.MUST_RESUME:
            raise UsageError(f"{what}: {refusal.format(generation=self._store.generation)}")
        raise UsageError(f"{what} {refusal}")

    def check_not_running(self, what: str) -> None:
        """Raise UsageError inside a forward or backward."""
        if in_graph_task() or self._calls_under_way:
            raise UsageError(f"{what} inside a forward or backward; expected between steps")

    def check_unused(self, what: str) -> None:
        """Raise UsageError where the optimizer uses gradients as they come, before ``what`` could see them."""
        if self.updates_in_backward:
            raise UsageError(
                f'{what} under update="backward", where gradients are used up as they become final; expected'
                ' tiered.AdamW(..., update="step")'
            )

    def give_up(self, reason: str) -> str:
        """Mark the step as left half done, and return the caller's next move in words."""
        self.abandon(reason)
        return "store.rollback() to go on" if self.is_durable else "start again in a new store"

    def abandon(self, reason: str) -> None:
        """Mark the step as left half done; the first reason stays. Other ranks hear of it."""
        if self._store.ranks is not None and not self.abandoned:
            self._store.ranks.comm_thread.abandon(reason)
        self.begin_return(reason)

    def begin_return(self, reason: str) -> None:
        """Mark the step as left half done until ``restored``; other ranks, which return too, need not hear of it."""
        self.abandoned = self.abandoned or reason

    def conclude(self) -> None:
        """The step is over."""
        self.has_begun = self.has_updated = False
        self.done.clear()

    def forget_step(self) -> None:
        """Forget the step under way; one that was left half done, and a run to resume, stay so until ``restored``."""
        self.conclude()
        self.is_between = False
        self.num_accumulating = 0

    def restored(self) -> None:
        """Everything is as the last commit has it."""
        self.abandoned = ""
        self.must_resume = False

"""RunState: the state of transformers' Trainer that rides along with each commit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any, ClassVar, NamedTuple

__all__ = ["RunNow", "RunState"]


class RunNow(NamedTuple):
    """The parts of a run that is under way: TrainerState, the scheduler, and other facts by name; both may be None."""

    trainer: Any
    scheduler: Any
    facts: dict[str, Any]


class RunState:
    """TrainerState, the scheduler and a few facts of a run, as the store sees them.

    ``now`` returns the parts as they are when it is called. The state of the model, the optimizer and the random number
    generators is registered by their own. ``facts`` are those that were loaded last.
    """

    NAME: ClassVar[str] = "transformers.trainer"

    def __init__(self, now: Callable[[], RunNow]) -> None:
        self._now = now
        self.facts: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return copies of all parts, in types that ``Store.register`` takes."""
        now = self._now()
        return {
            "trainer": None if now.trainer is None else asdict(now.trainer),
            "scheduler": None if now.scheduler is None else now.scheduler.state_dict(),
            "facts": now.facts,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Hand the scheduler its state; transformers takes TrainerState from the checkpoint's folder."""
        scheduler = self._now().scheduler
        if scheduler is not None and state["scheduler"] is not None:
            scheduler.load_state_dict(state["scheduler"])
        self.facts = dict(state["facts"])

"""RunState: the state of transformers' Trainer that rides along with each commit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any, ClassVar

__all__ = ["RunState"]


class RunState:
    """TrainerState and the scheduler of a run, as the store sees them.

    ``source`` returns the two as they are now; either may be None. The state of the model, the optimizer and the
    random number generators is registered by their own.
    """

    NAME: ClassVar[str] = "transformers.trainer"

    def __init__(self, source: Callable[[], tuple[Any, Any]]) -> None:
        self._source = source

    def state_dict(self) -> dict[str, Any]:
        """Return copies of both, in types that ``Store.register`` takes."""
        trainer, scheduler = self._source()
        return {
            "trainer": None if trainer is None else asdict(trainer),
            "scheduler": None if scheduler is None else scheduler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Hand the scheduler its state; transformers takes TrainerState from the checkpoint's folder."""
        _, scheduler = self._source()
        if scheduler is not None and state["scheduler"] is not None:
            scheduler.load_state_dict(state["scheduler"])

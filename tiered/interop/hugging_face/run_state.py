"""RunState: the state of transformers' Trainer that rides along with each commit."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, ClassVar, NamedTuple

from transformers import TrainerState

from tiered.store.store import Store

__all__ = ["RunNow", "RunState"]


class RunNow(NamedTuple):
    """The parts of a run: TrainerState, the scheduler, and other facts by name.

    ``trainer`` is None while nobody goes on with the run: none was trained or resumed, or the Trainer is gone.
    """

    trainer: Any
    scheduler: Any
    facts: dict[str, Any]


class RunState:
    """TrainerState, the scheduler and a few facts of a run, as the store sees them.

    ``now`` returns the parts as they are when it is called. The state of the model, the optimizer and the random number
    generators is registered by their own. ``facts`` are those that were loaded last. While nobody goes on with the run
    it stays as it was when ``keep`` was called, or a commit made or loaded. ``best`` is the folder of the best step's
    files while the model has their weights: the end of the store does not commit these as the last step's.
    """

    NAME: ClassVar[str] = "transformers.trainer"

    @classmethod
    def of(cls, store: Store, now: Callable[[], RunNow]) -> RunState:
        """Return the run of ``store``, registered there, which ``now`` tells of from here on: one run has one loop."""
        found = _of_store.get(store)
        run = None if found is None else found()
        if run is None:
            run = cls(now)
            store.register(cls.NAME, run)
            store.add_guard(functools.partial(run._withhold_best, store))
            _of_store[store] = weakref.ref(run)
        else:
            run.keep()
            run._now = now
        return run

    def __init__(self, now: Callable[[], RunNow]) -> None:
        self._now = now
        self.best: str | None = None
        self._last: dict[str, Any] = {"trainer": asdict(TrainerState()), "scheduler": None, "facts": {}}
        self.facts: dict[str, Any] = {}

    def keep(self) -> None:
        """Remember the run as it is now."""
        now = self._now()
        if now.trainer is not None:
            scheduler = None if now.scheduler is None else now.scheduler.state_dict()
            self._last = {"trainer": asdict(now.trainer), "scheduler": scheduler, "facts": now.facts}

    def state_dict(self) -> dict[str, Any]:
        """Return copies of all parts, in types that ``Store.register`` takes."""
        self.keep()
        return self._last

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Hand the scheduler its state; transformers takes TrainerState from the checkpoint's folder."""
        self._last, self.best = state, None
        scheduler = self._now().scheduler
        if scheduler is not None and state["scheduler"] is not None:
            scheduler.load_state_dict(state["scheduler"])
        self.facts = dict(state["facts"])

    def _withhold_best(self, store: Store, word: str) -> None:
        """Hear of an event of the store."""
        if word == "close" and self.best is not None:
            store.withhold_changes(
                "the weights of the best step were loaded, and are not committed: the store keeps the last step, and"
                f" {self.best} has the files of the best one"
            )


_of_store: weakref.WeakKeyDictionary[Store, weakref.ref[RunState]] = weakref.WeakKeyDictionary()

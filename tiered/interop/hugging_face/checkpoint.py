"""The run of transformers' Trainer in a store, and the ``checkpoint-N`` folders that point to its commits.

The store is the truth: it has the weights of its last commit alone, and all that a run needs to go on. A folder says
which commit it was; where a kill came between the two, the folder is made again from the store.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from transformers import TrainerState
from transformers.trainer_utils import get_last_checkpoint

from tiered.errors import UsageError
from tiered.store.store import Store

__all__ = ["Pointer", "RunNow", "RunState", "folder_to_resume"]

_log = logging.getLogger("tiered")

_POINTER = "tiered.json"
_TRAINER_STATE = "trainer_state.json"  # the name that transformers gives it


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


@dataclass(frozen=True, slots=True)
class Pointer:
    """The commit that a checkpoint folder stands for: its store, its generation, and how many steps it has.

    Over ranks ``store`` is the identity of the run of all: each of them knows the folder as its own.
    """

    store: str
    generation: int
    step: int

    @classmethod
    def of(cls, store: Store, step: int) -> Pointer:
        """Return the pointer to the last commit of ``store``."""
        return cls(store.run, store.generation, step)

    def write(self, folder: Path) -> None:
        """Write the pointer into ``folder``, whole or not at all."""
        part = folder / f"{_POINTER}.part"
        part.write_text(json.dumps(asdict(self)) + "\n")
        os.replace(part, folder / _POINTER)

    @classmethod
    def read(cls, folder: Path) -> Pointer | None:
        """Return the pointer in ``folder``; None where there is none that can be read."""
        try:
            fields = json.loads((folder / _POINTER).read_text())
            return cls(str(fields["store"]), int(fields["generation"]), int(fields["step"]))
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            return None


def folder_to_resume(wanted: Any, output_dir: Path, store: Store, *, is_live: bool) -> Any:
    """Return the folder that transformers is to resume from, for what its caller has asked for.

    ``wanted`` is ``resume_from_checkpoint``; ``is_live`` says that this process has trained or resumed already. Raises
    UsageError where the store cannot give what is wanted, with what it has.
    """
    step = _last_step(store)
    if step is None:
        last = get_last_checkpoint(output_dir) if wanted is True and output_dir.is_dir() else wanted
        if last and Pointer.read(Path(last)) is not None:
            raise UsageError(
                f"{last} points to a commit, and {store!r} has none; expected Arguments(store=) with the directories of"
                " the run"
            )
        return wanted
    there = f"{store!r} holds the run at step {step}"
    if not wanted:
        if is_live:
            return wanted
        raise UsageError(
            f"train(): {there}; expected resume_from_checkpoint=True to go on with it, or a store in an empty directory"
        )
    if wanted is True:
        return str(_folder_of_step(output_dir, store))
    given = Path(wanted)
    pointer, last = Pointer.read(given), get_last_checkpoint(given.parent) if given.parent.is_dir() else None
    is_carried = pointer is not None and (pointer.store, pointer.step) == (store.origin, step)  # from other ranks
    if pointer is not None and pointer.store != store.run and not is_carried:
        raise UsageError(f"{given} belongs to the store {pointer.store}; {there} and is {store.run}")
    if pointer == Pointer.of(store, step) or is_carried:
        return str(given)
    if last is not None and given.resolve() == Path(last).resolve() and given.parent.resolve() == output_dir.resolve():
        _log.warning("resuming from step %d, the last commit, where %s was asked for", step, given)
        return str(_folder_of_step(output_dir, store))  # a kill came between commit and folder
    raise UsageError(
        f"resume_from_checkpoint={str(wanted)!r}: {there}, and keeps the weights of its last commit alone; expected"
        " resume_from_checkpoint=True. To go back in steps, train in a new store from files of the model, which"
        " Arguments(export=True) writes into each checkpoint"
    )


def _last_step(store: Store) -> int | None:
    """Return the step of the Trainer's run that ``store`` holds; None where it holds no model.

    Raises UsageError for a run that another loop has committed.
    """
    if not store.durable or store.registered_state("tiered.model") is None:
        return None
    committed = store.registered_state(RunState.NAME)
    if committed is None:
        raise UsageError(
            f"{store!r} holds a run of a loop that is not transformers' Trainer; expected that loop, or a store in an"
            " empty directory"
        )
    return int(committed["trainer"]["global_step"])


def _folder_of_step(output_dir: Path, store: Store) -> Path:
    """Return the folder of the last commit of ``store``, made again from it where it is missing or another's."""
    committed = store.registered_state(RunState.NAME)
    assert committed is not None  # or ``_last_step`` had told
    state = TrainerState(**committed["trainer"])
    folder, pointer = output_dir / f"checkpoint-{state.global_step}", Pointer.of(store, state.global_step)
    if Pointer.read(folder) != pointer or not (folder / _TRAINER_STATE).exists():
        folder.mkdir(parents=True, exist_ok=True)
        state.save_to_json(str(folder / _TRAINER_STATE))
        pointer.write(folder)
        _log.info("%s was made again from %r", folder, store)
    return folder

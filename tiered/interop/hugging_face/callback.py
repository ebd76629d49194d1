"""Callback: commits and resumes for a plain ``transformers.Trainer`` that was given a sharded model."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from tiered.errors import UsageError
from tiered.interop.hugging_face.checkpoint import Pointer, folder_of_step, has_weights, last_step, set_aside_after
from tiered.interop.hugging_face.placement import is_in_store
from tiered.interop.hugging_face.run_state import RunNow, RunState
from tiered.store.store import Store
from tiered.zero.model_state import RandomState

__all__ = ["Callback"]

_log = logging.getLogger("tiered")


class Callback(TrainerCallback):  # type: ignore[misc]  # mypy does not read transformers
    """Commits where a plain Trainer saves, and brings its run back: ``Trainer(callbacks=[tiered.hf.Callback(store)])``.

    The model is sharded into ``store``, and the optimizer is one of ``tiered``, given as ``optimizers=(optimizer,
    None)`` or made by ``tiered.hf.Factory``. ``every`` commits each so many steps, too, behind the next step.

    A checkpoint folder has the model's files, ``trainer_state.json`` and a pointer to the commit: the Trainer is told
    ``save_only_model``, so no optimizer's state is written twice. The next run's ``train(resume_from_checkpoint=True)``
    goes on from the last commit, with the bits of the undisturbed run; where that has no folder, one is made when the
    Trainer is, and folders that a kill left beyond it are renamed. Losses of steps between two logs are not part of
    TrainerState: the first mean that is logged after a resume lacks those before it.

    Raises UsageError for a store without commits, for a model that is not in it, and where ``train`` begins at another
    step than the store's.
    """

    def __init__(self, store: Store, *, every: int | None = None) -> None:
        if not isinstance(store, Store) or not store.durable:
            raise UsageError(f"tiered.hf.Callback({store!r}) has nothing to commit to; expected a durable tiered.Store")
        if every is not None and every < 1:
            raise ValueError(f"tiered.hf.Callback(every={every}); expected a number of steps of at least 1, or None")
        self._store = store
        self._every = every
        self._trainer_state: Any = None
        self._scheduler: Any = None
        self._is_at_step_begin = False  # where in a step the commit that is being made stands
        self._is_live = False  # whether this process has trained or resumed the run
        self._random: dict[str, Any] | None = None  # the states of a resumed run, until the loop is where they were
        self._run: RunState | None = None  # until the model is known to be in the store

    def _now(self) -> RunNow:
        trainer = self._trainer_state if self._is_live else None
        return RunNow(trainer, self._scheduler, {"is_at_step_begin": self._is_at_step_begin})

    # -- the run -------------------------------------------------------------------------------------------------

    def on_init_end(self, args: Any, state: Any, control: Any, *, model: Any = None, **_: Any) -> None:
        """Bring the weights of a committed run back, and have a folder that the Trainer can resume from."""
        args.save_only_model = True
        step = last_step(self._store)
        if step is None or not is_in_store(model, self._store):
            return
        self._register()
        found = RandomState().state_dict()
        self._store.resume()
        RandomState().load_state_dict(found)
        output_dir = Path(args.output_dir)
        set_aside_after(step, output_dir)
        folder = folder_of_step(output_dir, self._store)
        if not has_weights(folder):
            model.save_pretrained(folder)

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Resume the run, where the store holds one."""
        if not is_in_store(objects["model"], self._store):
            raise UsageError(
                f"the Trainer's model is not in {self._store!r}; expected tiered.shard(model, store) before, or"
                " optimizer_cls_and_kwargs=(tiered.hf.Factory, ...)"
            )
        self._trainer_state, self._scheduler = state, objects["lr_scheduler"]
        step, is_live = last_step(self._store), self._is_live
        self._register().best = None
        self._is_live, self._random = True, None
        if step is None or (is_live and state.global_step == 0):
            return
        if state.global_step != step:
            last = get_last_checkpoint(args.output_dir)
            raise UsageError(
                f"train() begins at step {state.global_step}, and {self._store!r} holds the run at step {step};"
                f" expected train(resume_from_checkpoint=True), which takes {last} now: call tiered.shard before the"
                " Trainer is made, and it is the right one; or a store in an empty directory"
            )
        self._store.resume()
        self._random = RandomState().state_dict()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Set the random states of a run that was committed between two passes through the data."""
        if float(state.epoch).is_integer() and not self._register().facts.get("is_at_step_begin"):
            self._set_random()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Set the random states of a run that was committed within a pass; commit where ``every`` says so."""
        self._set_random()
        if self._every is not None and state.global_step and state.global_step % self._every == 0:
            self._is_at_step_begin = True
            self._store.commit({"step": state.global_step}, wait=False)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Commit, durably, and point to the commit."""
        self._is_at_step_begin = False
        self._store.commit({"step": state.global_step})
        Pointer.of(self._store, state.global_step).write(Path(args.output_dir) / f"checkpoint-{state.global_step}")

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Have the last commit durable; transformers has loaded the best weights by now, where it was told to."""
        self._register().best = state.best_model_checkpoint if args.load_best_model_at_end else None
        self._store.wait_for_commit()

    def _register(self) -> RunState:
        if self._run is None:
            self._run = RunState.of(self._store, self._now)
        return self._run

    def _set_random(self) -> None:
        random, self._random = self._random, None
        if random is not None:
            RandomState().load_state_dict(random)

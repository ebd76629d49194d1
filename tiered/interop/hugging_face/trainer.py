"""Trainer: transformers' own loop over a sharded model, whose checkpoints are commits of a store.

Nothing of the loop is copied: these are overrides of the places where a model is moved, clipped, kept and resumed.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.utils.data import DataLoader

from tiered.errors import UsageError
from tiered.interop.hugging_face.arguments import Arguments, choose_optimizer, refuse, refuse_other_ranks
from tiered.interop.hugging_face.checkpoint import Pointer, RunNow, RunState, folder_to_resume
from tiered.interop.hugging_face.model_files import load_files
from tiered.loader.random_parts import BatchDraws
from tiered.ranks.ranks import phase
from tiered.store.store import Store
from tiered.zero import accumulate, clip_grad_norm_
from tiered.zero.engine import Engine
from tiered.zero.model_state import RandomState, gather_for_others
from tiered.zero.parameters.parameter import TieredParameter
from tiered.zero.parameters.unit import Unit
from tiered.zero.shard import shard

__all__ = ["Trainer", "TrainerMixin"]


class TrainerMixin:
    """The overrides; put it before ``transformers.Trainer`` or a class made of it, such as TRL's ``SFTTrainer``.

    ``tiered=`` takes ``tiered.hf.Arguments``, or a mapping of them; all other arguments are those of the class behind.
    The constructor opens the store and moves the model into it; one that is sharded into the open ``Arguments(store=)``
    already, as by ``tiered.hf.from_pretrained``, stays as it is. ``train`` makes the optimizer that
    ``TrainingArguments(optim=)`` names: ``tiered.AdamW``, ``SGD`` or ``Lion``, with its decay groups. Where it would
    save, it commits: a checkpoint folder has a pointer to the commit and ``trainer_state.json``, and no weights, which
    ``save_model`` or ``Arguments(export=True)`` write. The store keeps the last commit alone, so
    ``resume_from_checkpoint=True`` goes on from there with the bits of the undisturbed run; an older folder is refused.

    Over ranks, as torchrun starts them, each has a Trainer: all construct it, train, evaluate and save together.

    Raises UsageError for TrainingArguments that cannot be followed, each by its name; CapacityError for a budget that
    is too small, with the smallest one that works. ``close`` gives a store back that was opened here; a Trainer that is
    collected closes it, too.
    """

    args: Any
    control: Any
    data_collator: Any
    model: Any
    optimizer: Any
    lr_scheduler: Any
    state: Any
    optimizer_cls_and_kwargs: Any
    _tr_loss: Any = None
    _total_loss_scalar: float

    def __init__(self, *arguments: Any, tiered: Arguments | Mapping[str, Any], **options: Any) -> None:
        self.tiered = Arguments.of(tiered)
        self._is_live = False  # whether this process has trained or resumed the run
        self._is_back = False  # whether it has the weights of a run alone
        self._draws: BatchDraws | None = None
        self._resumed_random: dict[str, Any] | None = None  # until the loop is at its place in the data
        self._resumed_facts: dict[str, Any] = {}  # each until the loop has used it
        super().__init__(*arguments, **options)
        self._refuse_objects()
        chosen = choose_optimizer(self.args, self.tiered, self.optimizer_cls_and_kwargs)
        self.store = self.tiered.open()
        self.optimizer_cls_and_kwargs = chosen[0], {"store": self.store} | chosen[1]
        self._closer: weakref.finalize[Any, Any] | None = None
        if self.store is not self.tiered.store:
            self._closer = weakref.finalize(self, self.store.close, commit=False)
            self._closer.atexit = False  # order: the store itself ends before that, and knows what to say
        try:
            refuse_other_ranks(self.args, self.store)
            self._shard()
        except BaseException:
            self.close()
            raise

    def _refuse_objects(self) -> None:
        """Raise UsageError for objects that only a model in memory can have."""
        if self.model_init is not None:  # type: ignore[attr-defined]
            raise UsageError("model_init builds a model for each train(); expected model=, and one Trainer per run")
        if self.optimizer is not None or self.lr_scheduler is not None:
            raise UsageError(
                "optimizers=(...) was given, and tiered.hf.Trainer makes its own; expected TrainingArguments(optim=,"
                " lr_scheduler_type=)"
            )

    def _shard(self) -> None:
        """Move the model into the store, or adopt the one that is there."""
        self._dtype = place(self.model, self.tiered, self.store, self.args)
        if self.store.durable:
            trainer = weakref.ref(self)
            self._run = RunState.of(self.store, lambda: _run_of(trainer()))

    def close(self) -> None:
        """Close the store, if it was opened here: steps after the last commit are dropped. Idempotent."""
        if self._closer is not None:
            self._closer()

    # -- the model's place ---------------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """Make accelerate's part, once the arguments are known to be ones that can be followed."""
        refuse(self.args, self.tiered)
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:  # type: ignore[attr-defined]
            raise UsageError(
                "accelerate was launched with DeepSpeed or FSDP, and tiered is in their place; expected `accelerate"
                " launch` without, or python"
            )

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the model where it is: its parameters come to the device a few units at a time."""

    def _prepare_input(self, data: Any) -> Any:
        """Move ``data`` to the device; floats get the dtype that the parameters were cast to."""
        moved = super()._prepare_input(data)  # type: ignore[misc]
        is_float = isinstance(moved, torch.Tensor) and moved.is_floating_point()
        return moved.to(self._dtype) if is_float and self._dtype is not None else moved

    def evaluation_loop(self, *arguments: Any, **options: Any) -> Any:
        """Evaluate or predict; of a run that the store holds, with its weights."""
        self._bring_back()
        return super().evaluation_loop(*arguments, **options)  # type: ignore[misc]

    def _bring_back(self) -> None:
        """Load the committed run, where nothing was trained or resumed yet. Random generators stay as they are."""
        if self._is_live or self._is_back or not self.store.durable or not self.store.generation:
            return
        found = RandomState().state_dict()
        self.store.resume()
        RandomState().load_state_dict(found)
        self._is_back = True

    # -- steps ---------------------------------------------------------------------------------------------------

    def _run_epoch(self, *arguments: Any, **options: Any) -> None:
        """Go through the data once; not for a run that was resumed at its end."""
        made = self._resumed_facts.pop("made", None)  # all that tiered 0.2.0 committed: what collators drew
        older = {"start": [], "made": [{"process": each, "parts": {}} for each in made or ()], "parts": {}}
        committed = self._resumed_facts.pop("batches", None) or (made and older)
        random = self._resumed_random
        if committed and random and self._draws is not None and not self.args.ignore_data_skip:
            position = options["steps_trained_in_current_epoch"]
            is_set_there = self._draws.load_state_dict(committed, position, random)
            self._resumed_random = None if is_set_there else random
        if "loss" in self._resumed_facts:
            self._tr_loss += self._resumed_facts["loss"]
            self._total_loss_scalar -= self._resumed_facts["loss"]  # it is the mean of the steps of this call
            self._globalstep_last_logged = self._resumed_facts["step_logged"]
            del self._resumed_facts["loss"]
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
        else:
            super()._run_epoch(*arguments, **options)  # type: ignore[misc]

    def get_train_dataloader(self) -> Any:
        """Return the loader; its draws are watched, and come back in a resumed run."""
        loader = super().get_train_dataloader()  # type: ignore[misc]
        base = getattr(loader, "base_dataloader", loader)
        self._draws = BatchDraws(base) if isinstance(base, DataLoader) else None
        return loader

    def get_batch_samples(self, *arguments: Any, **options: Any) -> Any:
        """Return the batches of one step."""
        batches, num_items = super().get_batch_samples(*arguments, **options)  # type: ignore[misc]
        if self._draws is not None:
            self._draws.used(len(batches))
        return batches, num_items

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Run one micro-step; return its loss."""
        self._is_live = True
        is_last = self.accelerator.sync_gradients  # type: ignore[attr-defined]
        with contextlib.nullcontext() if is_last else accumulate(model):
            loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]
        return loss

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        """Clip to ``max_grad_norm`` in fp32; return the norm before."""
        return clip_grad_norm_(model, self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Return the norm of all gradients; None where they are used up as they come."""
        if grad_norm is None and self.tiered.update != "backward":
            grad_norm = clip_grad_norm_(model, float("inf"))
        return grad_norm

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: Any = None, *arguments: Any, **options: Any) -> Any:
        """Train, or go on with the store's run where ``resume_from_checkpoint`` is True or its last folder.

        Raises UsageError for a run in the store that the caller does not ask for, and for a folder whose weights are
        gone.
        """
        output_dir = Path(self.args.output_dir)
        folder = self._in_turn(
            lambda: folder_to_resume(resume_from_checkpoint, output_dir, self.store, is_live=self._is_live)
        )
        self._resumed_random, self._resumed_facts = None, {}
        if self.store.durable:
            self._run.best = None
        try:
            return super().train(folder, *arguments, **options)  # type: ignore[misc]
        finally:
            if self.store.durable:
                self._run.keep()  # this object may be gone when the store is closed

    def _in_turn(self, find: Callable[[], Any]) -> Any:
        """Return what ``find`` returns, which may make a folder: rank 0's first, then one of each machine, then others.

        Over ranks all call it together; an error of one is raised on all.
        """
        if self.store.ranks is not None and self.store.durable:
            self.store.ranks.rejoin("Trainer.train()")  # also after an abandoned step, which is over then
        index, local_index = self.args.process_index, self.args.local_process_index
        own, found = 0 if index == 0 else 1 if local_index == 0 else 2, None
        for turn in range(3):
            with phase(self.store.ranks, "Trainer.train()"):
                found = find() if turn == own else found
        return found

    def _save_checkpoint(self, *arguments: Any, **options: Any) -> None:
        """Write the folder, then commit, then point to the commit."""
        super()._save_checkpoint(*arguments, **options)  # type: ignore[misc]
        if not self._commits:
            return
        step = self.state.global_step
        self.store.commit({"step": step})
        if self.args.should_save:
            Pointer.of(self.store, step).write(Path(self.args.output_dir) / f"checkpoint-{step}")

    @property
    def _commits(self) -> bool:
        return bool(self.store.durable and not self.args.save_only_model)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model's files; not where a checkpoint has them in the store. All ranks together, rank 0 writes."""
        if _internal_call and self._commits and not self._exports:
            assert output_dir is not None
            if self.args.should_save:
                Path(output_dir).mkdir(parents=True, exist_ok=True)
            return
        self._bring_back()
        if _internal_call and self._reads_best_files:
            save = self.model.save_pretrained
            self._write(lambda state: save(output_dir, state_dict=state, save_original_format=False))
            return
        super().save_model(output_dir, _internal_call)  # type: ignore[misc]

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Write the files of the model, and what stands beside them; ``state_dict`` has its values, or is None."""
        write = super()._save  # type: ignore[misc]
        self._write(lambda state: write(output_dir, state), state_dict)

    def _write(self, write: Callable[[Any], object], state: Any = None) -> None:
        """Call ``write`` with the values of the model, which all ranks gather and rank 0 alone writes.

        It is given None where the model's own ``state_dict`` has the values. An error of rank 0 is raised on all.
        """
        ranks, writes = self.store.ranks, self.args.should_save
        if ranks is not None and state is None and writes:
            state = self.model.state_dict()
        elif ranks is not None and state is None:
            gather_for_others(self.model, _engines(self.model))
        with phase(ranks, "Trainer.save_model()"):
            if writes:
                write(state)

    @property
    def _exports(self) -> bool:
        return bool(self.tiered.export or self.args.load_best_model_at_end)

    @property
    def _reads_best_files(self) -> bool:
        """Whether the files of a checkpoint are read again: they have the names of the model's own parameters then."""
        is_plain = isinstance(self.model, transformers.PreTrainedModel) and not hasattr(self.model, "peft_config")
        return bool(is_plain and self.args.load_best_model_at_end)

    def _load_best_model(self) -> None:
        """Load the weights of the best step, one unit after another; the store's commit stays that of the last step."""
        if self.store.durable:
            self._run.best = self.state.best_model_checkpoint
        if not self._reads_best_files:
            super()._load_best_model()  # type: ignore[misc]
            return
        load_files(self.model, Path(self.state.best_model_checkpoint))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Write nothing: both are in the commit."""

    def _save_rng_state(self, output_dir: str) -> None:
        """Write nothing: random states are in the commit."""

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load files of a model, where the folder points to no commit."""
        if Pointer.read(Path(resume_from_checkpoint)) is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Resume the run: model, optimizer, scheduler and random states."""
        if checkpoint is None or Pointer.read(Path(checkpoint)) is None:
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            return
        self.store.resume()
        self._is_live = True
        self._resumed_random, self._resumed_facts = RandomState().state_dict(), self._run.facts

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Set the random states of the commit, when transformers is at the place in the data where they were."""
        random, self._resumed_random = self._resumed_random, None
        if random is None:
            super()._load_rng_state(checkpoint)  # type: ignore[misc]
        else:
            RandomState().load_state_dict(random)


class Trainer(TrainerMixin, transformers.Trainer):  # type: ignore[misc]  # mypy does not read transformers
    """``transformers.Trainer`` whose model, gradients and optimizer state live in a store. See ``TrainerMixin``."""


def _run_of(trainer: Any) -> RunNow:
    """Return the parts of the run of ``trainer``, which may be gone, or have only evaluated."""
    if trainer is None:
        return RunNow(None, None, {})
    facts: dict[str, Any] = {"batches": None if trainer._draws is None else trainer._draws.state_dict()}
    if trainer._tr_loss is not None:
        facts |= {"loss": trainer._tr_loss.item(), "step_logged": trainer._globalstep_last_logged}
    return RunNow(trainer.state if trainer._is_live else None, trainer.lr_scheduler, facts)


def place(model: Any, tiered: Arguments, store: Store, training: Any) -> torch.dtype | None:
    """Shard ``model`` into ``store``, unless it is there, and return the dtype that floating inputs get, if any.

    Raises what ``tiered.shard`` raises; UsageError for a model that was sharded otherwise than the arguments say.
    """
    options = tiered.shard_options(bf16=training.bf16)
    dtype: torch.dtype | None = options["param_dtype"]
    engines = _engines(model)
    if not engines:
        shard(model, store, device=training.device, **options)
        return dtype
    if any(engine.store is not store for engine in engines):
        raise UsageError(
            f"the model is sharded into {engines[0].store!r}; expected tiered.hf.Arguments(store=) with that open store"
        )
    given = tiered.changed("unit", "weights", "activations", "hold", "update_on", "stage")
    if given:
        raise UsageError(
            f"tiered.hf.Arguments({given[0]}=) for a model that is sharded already; expected it where that was done, at"
            " tiered.shard or tiered.hf.from_pretrained"
        )
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, TieredParameter):
            continue
        if dtype is not None and parameter.is_floating_point() and parameter.dtype != dtype:
            raise UsageError(
                f"bf16=True, or param_dtype=, asks for {dtype}, and {name} is sharded as {parameter.dtype}; expected"
                f" param_dtype={dtype} at tiered.shard or tiered.hf.from_pretrained, or Arguments(param_dtype=None)"
            )
    if engines[0].tier.device.type != training.device.type:
        raise UsageError(
            f"the model is sharded to compute on {engines[0].tier.device}, and TrainingArguments train on"
            f" {training.device}; expected device={str(training.device)!r} at tiered.shard or tiered.hf.from_pretrained"
        )
    return dtype


def _engines(model: Any) -> list[Engine]:
    parameters = [] if model is None else model.parameters()
    units = [p.segment.unit for p in parameters if isinstance(p, TieredParameter)]
    return list(dict.fromkeys(unit.engine for unit in units if isinstance(unit, Unit)))

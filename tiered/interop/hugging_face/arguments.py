"""Arguments: what ``tiered.hf.Trainer`` needs to know beside ``TrainingArguments``, and what both may say together."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

import torch

from tiered.errors import UsageError
from tiered.removed import refuse_removed
from tiered.store.store import Store
from tiered.units import parse_bytes
from tiered.zero import SGD, AdamW, Lion
from tiered.zero.optimizer.streaming_optimizer import StreamingOptimizer

__all__ = ["Arguments", "choose_optimizer", "refuse", "refuse_other_ranks"]

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
_OF_THE_STORE = ("dram", "device_memory", "durable", "engine", "external", "rank_deadline")


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Where the state of a Trainer lives and how it moves; the learning rate and the like are TrainingArguments.

    ``store``: a directory, several of them (striped), or a ``tiered.Store`` that the caller opens and closes; a path is
    opened when the Trainer is made. It must not lie in a ``checkpoint-N`` folder, which rotation deletes. ``dram``,
    ``device_memory``, ``durable``, ``engine``, ``external`` and ``rank_deadline`` are the store's, only for paths.

    ``unit``, ``weights``, ``activations``, ``hold``, ``update_on`` and ``stage`` are those of ``tiered.shard``.
    ``param_dtype``: a dtype, "bf16", "fp32", "fp16", None for the model's own, or "auto": bf16 under
    ``TrainingArguments(bf16=True)``, where masters are fp32 and there is no autocast; else the model's own. ``update``
    and ``state`` are those of ``tiered.AdamW``. ``export``: whether each checkpoint folder has the model's files, too;
    without it the store alone has the weights, those of the last commit.

    Raises TypeError for an unknown name, with a likely one, and TypeError, ValueError and UsageError for values that
    cannot be meant.
    """

    store: Any
    dram: int | str | None = None
    device_memory: int | str | None = None
    durable: bool = True
    engine: str = "auto"
    external: Sequence[str | os.PathLike[str]] = ()
    rank_deadline: float = Store.rank_deadline
    unit: Any = None
    param_dtype: torch.dtype | str | None = "auto"
    weights: Any = None
    activations: Any = "auto"
    hold: int | str = "auto"
    update_on: str = "auto"
    stage: int = 3
    update: str = "step"
    state: str = "exact"
    export: bool = False

    def __new__(cls, **given: Any) -> Self:
        """Refuse unknown names before ``__init__`` does."""
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                refuse_removed(f"tiered.hf.Arguments({name}=)")
                close = difflib.get_close_matches(name, known, 1)
                hint = f"did you mean {close[0]!r}?" if close else f"expected some of {', '.join(known)}"
                raise TypeError(f"tiered.hf.Arguments has no {name!r}: {hint}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if not isinstance(self.store, Store) and not self.directories:
            raise ValueError("Arguments(store=()); expected a directory, several of them, or a tiered.Store")
        changed = self.changed(*_OF_THE_STORE)
        if isinstance(self.store, Store) and changed:
            raise UsageError(
                f"Arguments(store=<an open Store>, {changed[0]}=...); expected {changed[0]} at tiered.Store(...), or"
                " the store's directories"
            )
        for name in ("dram", "device_memory"):
            value = getattr(self, name)
            if value is not None:
                parse_bytes(value)
        _one_of("param_dtype", self.param_dtype, (None, "auto", *_DTYPES), torch.dtype)
        _one_of("update", self.update, ("step", "backward"))
        _one_of("state", self.state, ("exact", "compact"))
        _one_of("update_on", self.update_on, ("auto", "cpu", "device"))
        _one_of("stage", self.stage, (1, 2, 3))
        for name in ("durable", "export"):
            _one_of(name, getattr(self, name), (True, False))

    @classmethod
    def of(cls, value: Arguments | Mapping[str, Any]) -> Arguments:
        """Return ``value``, or the arguments in a mapping."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise TypeError(f"tiered={value!r}; expected tiered.hf.Arguments(store=...), or a mapping of its arguments")
        return cls(**value)

    @property
    def directories(self) -> tuple[Path, ...]:
        """The directories of the store that is to be opened; none where an open one was given."""
        if isinstance(self.store, Store):
            return ()
        many = [self.store] if isinstance(self.store, str | os.PathLike) else self.store
        return tuple(Path(path) for path in many)

    @property
    def is_durable(self) -> bool:
        """Whether the store has commits."""
        return self.store.durable if isinstance(self.store, Store) else self.durable

    def open(self) -> Store:
        """Return the store, opened here where paths were given. Raises what ``tiered.Store`` raises."""
        if isinstance(self.store, Store):
            return self.store
        return Store(
            *self.directories, dram=self.dram, device_memory=self.device_memory, durable=self.durable,
            engine=self.engine, external=self.external, rank_deadline=self.rank_deadline,
        )  # fmt: skip

    def shard_options(self, *, bf16: bool) -> dict[str, Any]:
        """Return the options for ``tiered.shard``, where TrainingArguments say ``bf16``."""
        dtype = self.param_dtype
        if dtype == "auto":
            dtype = torch.bfloat16 if bf16 else None
        names = ("unit", "weights", "activations", "hold", "update_on", "stage")
        chosen = {name: getattr(self, name) for name in names}
        return chosen | {"param_dtype": _DTYPES[dtype] if isinstance(dtype, str) else dtype}

    def changed(self, *names: str) -> list[str]:
        """Return those of ``names`` that have other values than by default."""
        return [each.name for each in fields(self) if each.name in names and getattr(self, each.name) != each.default]


def _one_of(name: str, value: object, known: tuple[object, ...], kind: type | None = None) -> None:
    if not any(value is one or (isinstance(one, str) and value == one) for one in known) and not (
        kind is not None and isinstance(value, kind)
    ):
        raise ValueError(f"tiered.hf.Arguments({name}={value!r}); expected one of {', '.join(map(repr, known))}")


_SWITCHES = {
    "torch_compile": "a compiled graph keeps addresses of parameters, whose bytes move; expected torch_compile=False",
    "bf16_full_eval": "it casts the model in memory; expected bf16=True, which keeps parameters in bf16",
    "fp16_full_eval": "it casts the model in memory; expected bf16=True, which keeps parameters in bf16",
    "fp16": "accelerate's loss scaling steps optimizers that it wraps itself; expected bf16=True, or fp32",
    "auto_find_batch_size": "it begins a run again in the middle; expected a batch size that fits",
    "use_liger_kernel": "its kernels take addresses of parameters, whose bytes move; expected use_liger_kernel=False",
    "deepspeed": "tiered is in its place; expected no deepspeed config: docs/deepspeed.md has what its keys become",
    "fsdp": "tiered is in its place; expected no fsdp",
    "parallelism_config": "tiered shards over all ranks, each with batches of its own; expected none",
}


def refuse(training: Any, tiered: Arguments) -> None:
    """Raise UsageError for the first of the TrainingArguments ``training`` that cannot be followed."""
    for name, reason in _SWITCHES.items():
        if getattr(training, name, None):
            raise UsageError(f"TrainingArguments({name}={getattr(training, name)!r}): {reason}")
    if training.n_gpu > 1:
        raise UsageError(
            f"TrainingArguments with n_gpu={training.n_gpu}: a process trains on one device; expected a rank for each,"
            f" by torchrun --nproc-per-node {training.n_gpu}, or one device, such as CUDA_VISIBLE_DEVICES=0"
        )
    config = training.accelerator_config
    if training.world_size > 1 and not (config.even_batches or training.dataloader_drop_last):
        raise UsageError(
            "TrainingArguments(accelerator_config=...) with even_batches=False: some of the"
            f" {training.world_size} ranks would have a batch less than others, who wait for them; expected"
            " even_batches=True, or dataloader_drop_last=True"
        )
    if tiered.update == "backward" and training.max_grad_norm > 0:
        raise UsageError(
            f'Arguments(update="backward") uses gradients before a norm of all is known, and max_grad_norm is'
            f' {training.max_grad_norm}; expected TrainingArguments(max_grad_norm=0), or update="step"'
        )
    if not tiered.is_durable and training.save_strategy != "no" and not training.save_only_model:
        raise UsageError(
            f"TrainingArguments(save_strategy={training.save_strategy.value!r}) on a store with durable=False, which"
            ' has no commits; expected save_strategy="no", save_only_model=True for the files of the model alone, or'
            " durable=True"
        )
    if training.push_to_hub and training.hub_strategy != "end" and not tiered.export:
        raise UsageError(
            f"TrainingArguments(hub_strategy={training.hub_strategy.value!r}): checkpoint folders have no files of the"
            ' model; expected tiered.hf.Arguments(export=True), or hub_strategy="end"'
        )
    for directory in tiered.directories:
        inside = next((part for part in directory.absolute().parts if re.fullmatch(r"checkpoint-\d+", part)), None)
        if inside is not None:
            raise UsageError(
                f"the store {directory} lies in {inside}, which save_total_limit may delete; expected another place"
            )


def refuse_other_ranks(training: Any, store: Store) -> None:
    """Raise UsageError unless ``store`` is of the ranks that the TrainingArguments ``training`` train over."""
    ranks = store.ranks
    of_store = (0, 1) if ranks is None else (ranks.rank, ranks.world)
    expected = (training.process_index, training.world_size)
    if of_store == expected:
        return
    if expected[1] == 1:
        next_step = (
            "the script started by torchrun or accelerate launch, whose variables RANK and WORLD_SIZE accelerate reads,"
            " or tiered.Store(..., process_group=False) for a run of this process alone"
        )
    else:
        next_step = (
            "Arguments(store=) with the store's directories, or a tiered.Store that is opened once the process group is"
            " there, which TrainingArguments(...) makes, and without process_group="
        )
    raise UsageError(
        f"this process is rank {expected[0]} of {expected[1]} to accelerate, and rank {of_store[0]} of {of_store[1]} to"
        f" {store!r}; expected {next_step}"
    )


_KNOWN = ("adamw_torch_fused", "adamw_torch", "sgd", "lion_32bit")
_OF_SGD = ("momentum", "dampening", "nesterov")
_IN_8_BITS = 'tiered keeps moments in 8 bits where it is told Arguments(state="compact") beside optim="adamw_torch"'


def choose_optimizer(training: Any, tiered: Arguments, given: Any) -> tuple[type, dict[str, Any]]:
    """Return the class and the keyword arguments for the optimizer, but for groups and store.

    ``given`` is ``optimizer_cls_and_kwargs`` of the Trainer, with a class of ``tiered``. The bits are those of
    ``optim="adamw_torch_fused"``, transformers' default, also under "adamw_torch". Raises UsageError for a name or a
    class that ``tiered`` has no optimizer for.
    """
    own = {"update": tiered.update, "state": tiered.state}
    if given is not None:
        cls, options = given
        if not (isinstance(cls, type) and issubclass(cls, StreamingOptimizer)):
            raise UsageError(
                f"optimizer_cls_and_kwargs=({getattr(cls, '__name__', cls)}, ...) keeps its state in memory; expected"
                " tiered.AdamW, tiered.SGD or tiered.Lion"
            )
        return cls, own | options
    name, betas = str(getattr(training.optim, "value", training.optim)), (training.adam_beta1, training.adam_beta2)
    options = {"lr": training.learning_rate}
    if name in ("adamw_torch_fused", "adamw_torch"):
        return AdamW, own | options | {"betas": betas, "eps": training.adam_epsilon}
    if name == "lion_32bit":
        return Lion, own | options | {"betas": betas}
    if name == "sgd":
        return SGD, own | options | _sgd_options(training.optim_args)
    raise UsageError(
        f"TrainingArguments(optim={name!r}): tiered has no such optimizer; expected one of"
        f" {', '.join(map(repr, _KNOWN))}{f': {_IN_8_BITS}' if '8bit' in name else ''}"
    )


def _sgd_options(text: str | None) -> dict[str, Any]:
    """Return the options in ``optim_args``, such as "momentum=0.9,nesterov=true"."""
    found: dict[str, Any] = {}
    for item in (text or "").replace(" ", "").split(","):
        name, _, value = item.partition("=")
        if name and name not in (*_OF_SGD, "weight_decay"):
            raise UsageError(f"TrainingArguments(optim_args={text!r}): expected some of {', '.join(_OF_SGD)}")
        if name in _OF_SGD:  # the weight decay is that of the groups
            found[name] = value.lower() in ("true", "1", "yes") if name == "nesterov" else float(value)
    return found

"""DeepSpeedConfig: the facts of a DeepSpeed configuration that calls of tiered take, and notes on all other keys.

deepspeed_program.py writes the calls. Nothing of DeepSpeed is imported.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiered.errors import UsageError
from tiered.interop.deepspeed_keys import DROPPED, FILLED, REFUSED, KeyNote
from tiered.interop.deepspeed_schedule import RateSchedule, read_schedule
from tiered.interop.deepspeed_section import ConfigSection

__all__ = ["DeepSpeedConfig", "LossScale", "read_deepspeed_config"]

_LARGEST_FILE_NBYTES = 1 << 20
_RATE, _DECAY = ("learning_rate", 5e-5), ("weight_decay", 0.0)  # of the Trainer's arguments, and their defaults
_BETAS, _EPS = "adam_beta1, adam_beta2", ("adam_epsilon", 1e-8)


@dataclass(frozen=True, slots=True)
class LossScale:
    """The loss scaling of fp16 training, as torch's GradScaler takes it."""

    init_scale: float
    growth_interval: int


@dataclass(frozen=True, slots=True)
class DeepSpeedConfig:
    """The facts of one configuration, for one rank."""

    stage: int
    directories: tuple[str, ...]
    dram_nbytes: int | None  # None: half of what is free
    dram_terms: str  # how ``dram_nbytes`` adds up
    dtype: str  # "bf16", "fp32", or "fp16": fp32 parameters under autocast
    loss_scale: LossScale | None
    optimizer: str  # a class of tiered
    hyperparameters: Mapping[str, Any]
    schedule: RateSchedule | None
    clip: float
    micro_batch: int | None  # samples of one micro-batch
    window: int  # micro-batches of one step
    activations: str
    notes: tuple[KeyNote, ...]

    @property
    def update(self) -> str:
        """When state is updated: in backward, unless something has to see all gradients before."""
        return "step" if self.clip or self.loss_scale else "backward"


def read_deepspeed_config(file: Path) -> DeepSpeedConfig:
    """Return the facts in ``file``, JSON as DeepSpeed reads it; blocks.

    Raises UsageError where it cannot be read, holds a value of the wrong kind, or an optimizer or a schedule that
    tiered has no equivalent of.
    """
    try:
        if file.stat().st_size > _LARGEST_FILE_NBYTES:
            raise UsageError(f"{file} has more than {_LARGEST_FILE_NBYTES:,} bytes: expected a DeepSpeed configuration")
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{file} is not JSON: {error}") from error
    notes: list[KeyNote] = []
    whole = ConfigSection(values, "", notes)
    dtype, loss_scale = _precision(whole, notes)
    zero = whole.inner("zero_optimization")
    stage = int(zero.number("stage", 0))
    if not 0 <= stage <= 3:
        raise UsageError(f"zero_optimization.stage: expected 0 to 3, got {stage}")
    directories, dram_nbytes, terms = _places(zero, notes)
    zero.conclude()
    optimizer, hyperparameters = _optimizer(whole.inner("optimizer"), is_given=whole.has("optimizer"))
    schedule = None
    if whole.has("scheduler"):
        schedule = read_schedule(whole.inner("scheduler"), hyperparameters["lr"])
        hyperparameters["lr"] = schedule.base
    micro_batch, window = _batches(whole)
    clip = float(whole.number("gradient_clipping", 0.0, auto=("max_grad_norm", 1.0)))
    activations = _activations(whole)
    whole.conclude()
    return DeepSpeedConfig(
        max(1, stage), directories, dram_nbytes, terms, dtype, loss_scale, optimizer, hyperparameters, schedule, clip,
        micro_batch, window, activations, tuple(notes),
    )  # fmt: skip


# -- memory and drives ---------------------------------------------------------------------------------------------


def _places(zero: ConfigSection, notes: list[KeyNote]) -> tuple[tuple[str, ...], int | None, str]:
    """Return the directories of the store, its DRAM budget, and how that adds up.

    In DRAM DeepSpeed keeps max_in_cpu parameters and buffer_count buffers of them, 2 bytes each, and buffer_count
    sub-groups of optimizer state, 4 bytes each.
    """
    folders: dict[str, None] = {}
    nbytes, terms = 0, []
    for flag, name in (("cpu_offload", "offload_optimizer"), ("cpu_offload_params", "offload_param")):
        if zero.has(flag):
            zero.switch(flag, False)
            zero.note(DROPPED, f"the old name of {name}: a store holds in DRAM what fits the budget", flag)
    parameters, state = zero.inner("offload_param"), zero.inner("offload_optimizer")
    for section in (parameters, state):
        device = section.word("device", "none")
        if device not in ("none", "cpu", "nvme"):
            raise UsageError(f"{section.path}.device: expected none, cpu or nvme, got {device!r}")
        if device == "nvme":
            folders[f"{section.word('nvme_path', '.').rstrip('/')}/tiered"] = None
        elif section.has("nvme_path"):
            section.note(DROPPED, f'no files are kept there: device is "{device}"', "nvme_path")
        if section is parameters:
            kept = int(section.number("max_in_cpu", 1_000_000_000))
            buffers = int(section.number("buffer_count", 5)) * int(section.number("buffer_size", 100_000_000))
            if device == "nvme":
                nbytes += 2 * kept + 2 * buffers
                terms.append(f"2 * {kept:,} (max_in_cpu) + 2 * {buffers:,} (buffer_count * buffer_size)")
        else:
            count = int(section.number("buffer_count", 4))
            section.note(DROPPED, "decided by tiered, from the model and the budget", "buffer_size")
            if not section.has("buffer_size"):
                notes.pop()
            group = int(zero.number("sub_group_size", 1_000_000_000))
            if device == "nvme":
                nbytes += 4 * count * group
                terms.append(f"4 * {count:,} * {group:,} (buffer_count * sub_group_size)")
        section.conclude()
    return tuple(folders) or ("runs/deepspeed",), nbytes or None, " + ".join(terms)


def _activations(whole: ConfigSection) -> str:
    """Return the treatment of activations: DeepSpeed's section only tells how its own checkpoint function works."""
    section = whole.inner("activation_checkpointing")
    on_cpu = section.switch("cpu_checkpointing", False)
    is_divided = section.switch("partition_activations", False)
    section.conclude()
    return "swap" if on_cpu else "recompute" if is_divided else "auto"


# -- precision -----------------------------------------------------------------------------------------------------


def _precision(whole: ConfigSection, notes: list[KeyNote]) -> tuple[str, LossScale | None]:
    """Return the dtype that is computed in, and the loss scaling of fp16."""
    bf16 = whole.inner("bfloat16" if whole.has("bfloat16") else "bf16")
    fp16 = whole.inner("fp16")
    for section, argument in ((bf16, "bf16"), (fp16, "fp16")):
        if section.is_auto("enabled"):
            section.fill("enabled", argument, False)
    is_bf16, is_fp16 = bf16.switch("enabled", False), fp16.switch("enabled", False)
    if is_bf16 and is_fp16:
        raise UsageError("bf16.enabled and fp16.enabled are both true: DeepSpeed refuses that, too")
    bf16.conclude()
    if not is_fp16:
        for name in ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale"):
            if fp16.has(name):
                fp16.note(DROPPED, "of fp16, which is not on", name)
        fp16.conclude()
        return "bf16" if is_bf16 else "fp32", None
    fp16.note(
        FILLED, "tiered's optimizers keep parameters in bf16, fp32 or fp64: here fp32 that computes in fp16", "enabled"
    )
    scale = fp16.number("loss_scale", 0)
    power = fp16.number("initial_scale_power", 16)
    if power > 127:
        raise UsageError(f"fp16.initial_scale_power: expected at most 127, as fp32 has it, got {power}")
    window = int(fp16.number("loss_scale_window", 1000))
    for name, neutral in (("hysteresis", 1), ("min_loss_scale", 0)):
        if fp16.has(name) and fp16.number(name, neutral) != neutral:
            fp16.note(REFUSED, "torch's loss scaling halves at each overflow, and has no least scale", name)
    if scale:
        fp16.note(REFUSED, "kept as long as no step overflows; torch's loss scaling halves it then", "loss_scale")
    fp16.conclude()
    return "fp16", LossScale(float(scale), 1 << 31) if scale else LossScale(2.0**power, window)


# -- optimizer and batches -----------------------------------------------------------------------------------------


def _optimizer(section: ConfigSection, *, is_given: bool) -> tuple[str, dict[str, Any]]:
    """Return the class of tiered that ``section`` stands for, and its arguments."""
    name = section.word("type", "AdamW")
    params = section.inner("params")
    lr = params.number("lr", 1e-3 if is_given else _RATE[1], auto=_RATE)
    decay = params.number("weight_decay", 0.0, auto=_DECAY)
    hyper: dict[str, Any] = {"lr": float(lr)}
    kind = {"adam": "AdamW", "adamw": "AdamW", "lion": "Lion", "sgd": "SGD"}.get(name.lower())
    if kind is None:
        raise UsageError(
            f"{section.path}.type: tiered has no {name!r}; expected Adam, AdamW, Lion or SGD (tiered.AdamW, Lion, SGD)"
        )
    if kind == "AdamW":
        hyper |= {"betas": params.pair("betas", (0.9, 0.999), auto=_BETAS)}
        hyper |= {"eps": float(params.number("eps", 1e-8, auto=_EPS)), "weight_decay": float(decay)}
        is_decoupled = params.switch("adam_w_mode", True) or name.lower() == "adamw"
        if not is_decoupled and decay:
            raise UsageError(
                f"{params.path}.adam_w_mode is false: tiered.AdamW decays weights apart from the gradient; expected"
                " adam_w_mode true, or weight_decay 0"
            )
        for switch, value in (("bias_correction", True), ("amsgrad", False)):
            if params.switch(switch, value) is not value:
                raise UsageError(f"{params.path}.{switch}: expected {str(value).lower()}, as in torch's fused AdamW")
    elif kind == "Lion":
        hyper |= {"betas": params.pair("betas", (0.9, 0.99), auto=_BETAS), "weight_decay": float(decay)}
    else:
        hyper |= {"momentum": float(params.number("momentum", 0.0)), "weight_decay": float(decay)}
        hyper |= {"dampening": float(params.number("dampening", 0.0)), "nesterov": params.switch("nesterov", False)}
    params.conclude()
    section.conclude()
    return kind, hyper


def _batches(whole: ConfigSection) -> tuple[int | None, int]:
    """Return the samples of a micro-batch, None where they are not told, and the micro-batches of a step.

    A step of several ranks has the micro-batches of all: they become those of the one rank here.
    """
    window = int(whole.number("gradient_accumulation_steps", 1, auto=("gradient_accumulation_steps", 1)))
    has_window = whole.has("gradient_accumulation_steps") and not whole.is_auto("gradient_accumulation_steps")
    micro, total = "train_micro_batch_size_per_gpu", "train_batch_size"
    per_rank = int(whole.number(micro, 0, auto=("per_device_train_batch_size", 8)))
    samples = 0
    if whole.is_auto(total):
        whole.note(FILLED, '"auto": micro-batch * accumulation * ranks; here of one rank', total)
    elif whole.has(total):
        samples = int(whole.number(total, 0))
    if min(window, 1) < 1 or per_rank < 0 or samples < 0:
        raise UsageError(f"{micro}, {total} and gradient_accumulation_steps: expected numbers from 1 on")
    if samples and per_rank and not whole.is_auto(micro):
        if samples % (per_rank * window if has_window else per_rank):
            raise UsageError(f"{total} {samples} is no multiple of {micro} {per_rank} * accumulation {window}")
        ranks = samples // (per_rank * window)
        if has_window and ranks > 1:
            reason = f"as on {ranks} ranks: a step here has {samples // per_rank} micro-batches, {ranks} times as many"
            whole.note(FILLED, reason, "gradient_accumulation_steps")
        return per_rank, samples // per_rank
    if samples and not per_rank:
        if samples % window:
            raise UsageError(f"{total} {samples} is no multiple of gradient_accumulation_steps {window}")
        return samples // window, window
    return per_rank or None, window

"""The TrainingArguments that a sharded model cannot follow, each refused by its name before anything is opened."""

from __future__ import annotations

from typing import Any

from tiered.errors import UsageError
from tiered.interop.hugging_face.arguments import Arguments
from tiered.interop.hugging_face.checkpoint import refuse_store_in_checkpoint

__all__ = ["refuse"]

_SWITCHES = {
    "torch_compile": "a compiled graph keeps addresses of parameters, whose bytes move; expected torch_compile=False",
    "bf16_full_eval": "it casts the model in memory; expected bf16=True, which keeps parameters in bf16",
    "fp16_full_eval": "it casts the model in memory; expected bf16=True, which keeps parameters in bf16",
    "fp16": "accelerate's loss scaling steps optimizers that it wraps itself; expected bf16=True, or fp32",
    "auto_find_batch_size": "it begins a run again in the middle; expected a batch size that fits",
    "use_liger_kernel": "its kernels take addresses of parameters, whose bytes move; expected use_liger_kernel=False",
    "deepspeed": "tiered is in its place; expected no deepspeed config: docs/deepspeed.md has what its keys become",
    "fsdp": "tiered is in its place; expected no fsdp",
    "parallelism_config": "this release shards on one rank; expected none",
}


def refuse(training: Any, tiered: Arguments) -> None:
    """Raise UsageError for the first of the TrainingArguments ``training`` that cannot be followed."""
    for name, reason in _SWITCHES.items():
        if getattr(training, name, None):
            raise UsageError(f"TrainingArguments({name}={getattr(training, name)!r}): {reason}")
    if training.n_gpu > 1 or training.world_size > 1:
        raise UsageError(
            f"TrainingArguments with n_gpu={training.n_gpu}, world_size={training.world_size}: this release trains on"
            " one device and one rank; expected one, such as CUDA_VISIBLE_DEVICES=0"
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
        refuse_store_in_checkpoint(directory)

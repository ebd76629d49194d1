"""save_pretrained: a model's values from the store to safetensors files, a parameter at a time."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tiered.errors import UsageError
from tiered.interop.checkpoint_folder import write_checkpoint
from tiered.zero.deferred_tensors import DeferredTensor
from tiered.zero.model_state import ModelValues, opened

__all__ = ["cast", "save_pretrained"]


def save_pretrained(
    model: nn.Module,
    folder: str | Path,
    *,
    max_shard_size: int | str = "50GB",
    dtype: torch.dtype | None = None,
    original_format: bool = True,
) -> None:
    """Save ``model``, sharded by tiered or not, to ``folder`` as safetensors files; blocks until they are durable.

    It takes one parameter at a time from the store, within its budget, and a few pieces of 4 MiB or of a row besides. A
    model of transformers is laid out as its own ``save_pretrained`` does: names, tied weights once, the format of v4
    where ``original_format``, config.json; a model with adapters of PEFT saves these alone. Any other module saves its
    ``state_dict()``, of tied names the first. ``max_shard_size`` in bytes or as "5GB"; ``dtype`` casts floating-point
    tensors. The earlier files in the folder are replaced as a whole, once the new ones are durable.

    Between steps only. Raises UsageError at the wrong time, and for a conversion of weights that cannot be undone
    tensor by tensor, by its name; CapacityError where the drive is full; DeviceError. The earlier files stay then.
    """
    transformers: Any = sys.modules.get("transformers")
    peft: Any = sys.modules.get("peft")
    write_others: Callable[[Path], object] | None = None  # a module of no known library has no other files
    with opened(model, "tiered.save_pretrained") as values:
        state = _deferred_state(values)
        if (peft is not None and isinstance(model, peft.PeftModel)) or getattr(model, "_hf_peft_config_loaded", False):
            from tiered.interop.hugging_face.model_files import write_adapters

            write_adapters(model, Path(folder), state, dtype=dtype)
            return
        if transformers is not None and isinstance(model, transformers.PreTrainedModel):
            from tiered.interop.hugging_face.model_files import saved_names, write_config

            state = saved_names(model, state, original_format=original_format)
            write_others = partial(write_config, model, dtype)
        else:
            state = _untied(state)
        write_checkpoint(Path(folder), cast(state, dtype), max_shard_size=max_shard_size, write_others=write_others)


def _deferred_state(values: ModelValues) -> dict[str, torch.Tensor]:
    """Return the model's ``state_dict()`` with each sharded parameter deferred; names of a tied one share a storage."""
    state: dict[str, torch.Tensor] = {}
    for name, tensor in values.state.items():
        if not isinstance(tensor, torch.Tensor):
            raise UsageError(f"{name} is a {type(tensor).__name__}, which safetensors files cannot hold")
        segment = values.segment_of(tensor)
        state[name] = tensor if segment is None else DeferredTensor.of(tensor, partial(values.read, segment))
    return state


def cast(state: dict[str, torch.Tensor], dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """Return ``state`` with its floating-point tensors cast to ``dtype`` when they are read."""
    if dtype is None:
        return state
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"dtype={dtype!r}; expected a floating-point torch.dtype such as torch.bfloat16, or None")
    return {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in state.items()}


def _untied(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return ``state`` with the first name of each tensor."""
    seen: dict[int, str] = {}
    for name, tensor in state.items():
        seen.setdefault(tensor.untyped_storage()._cdata, name)
    first = set(seen.values())
    return {name: tensor for name, tensor in state.items() if name in first or not tensor.is_meta}

"""The names, the format and the small files of a checkpoint as transformers and PEFT write them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.dynamic_module_utils import custom_object_save
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from tiered.interop.checkpoint_folder import write_files
from tiered.interop.hugging_face.conversion import refusing_by_name
from tiered.zero.deferred_tensor import DeferredTensor

__all__ = ["saved_names", "write_adapters", "write_config"]


def saved_names(model: Any, state: dict[str, Any], *, original_format: bool) -> dict[str, torch.Tensor]:
    """Return the tensors that the model's own ``save_pretrained`` would write, deferred as those of ``state`` are.

    Raises UsageError for a conversion that cannot be undone tensor by tensor.
    """
    ignored = set(model._keys_to_ignore_on_save or ())
    kept = {name: tensor for name, tensor in state.items() if name not in ignored}
    kept = remove_tied_weights_from_state_dict(kept, model)
    if original_format:
        with refusing_by_name("tiered.save_pretrained", "original_format=False"):
            kept = dict(revert_weight_conversion(model, kept))
    return kept


def write_config(model: Any, dtype: torch.dtype | None, folder: Path) -> None:
    """Write what stands beside the weights: config.json, generation_config.json, and the code of a custom model."""
    model.config.dtype = str(dtype or model.dtype).removeprefix("torch.")
    model.config.architectures = [type(model).__name__]
    if model.is_remote_code():
        custom_object_save(model, folder, config=model.config)
    model.config.save_pretrained(folder)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(folder)


def write_adapters(model: Any, folder: Path, state: Mapping[str, torch.Tensor], *, dtype: torch.dtype | None) -> None:
    """Have PEFT save the adapters of ``model`` to ``folder``; the base is not read.

    PEFT picks the tensors by name; those alone get values, all of them at once.
    """
    wanted: dict[str, torch.Tensor] = {}

    def read(name: str) -> torch.Tensor:
        tensor = state[name]
        wanted[name] = tensor.values() if isinstance(tensor, DeferredTensor) else tensor
        return wanted[name]

    watched = {name: DeferredTensor.of(tensor, partial(read, name)) for name, tensor in state.items()}
    for picked in _picked(model, watched):
        picked.values()
    given = {name: (tensor.to(dtype) if dtype else tensor).detach().clone() for name, tensor in wanted.items()}
    write_files(folder, lambda temporary: model.save_pretrained(temporary, state_dict={**watched, **given}))


def _picked(model: Any, state: dict[str, DeferredTensor]) -> list[DeferredTensor]:
    """Return the tensors of ``state`` that PEFT saves."""
    if isinstance(model, PreTrainedModel):
        return list(model.get_adapter_state_dict(state_dict=state).values())
    from peft import get_peft_model_state_dict

    found: list[DeferredTensor] = []
    for name in model.peft_config:
        found += get_peft_model_state_dict(model, state_dict=dict(state), adapter_name=name).values()
    return found

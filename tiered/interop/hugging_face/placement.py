"""Placement: a Trainer's model goes into the store, unless it is there already."""

from __future__ import annotations

from typing import Any

import torch

from tiered.errors import UsageError
from tiered.interop.hugging_face.arguments import Arguments
from tiered.store.store import Store
from tiered.zero.engine import Engine
from tiered.zero.parameters.parameter import TieredParameter
from tiered.zero.parameters.unit import Unit
from tiered.zero.shard import shard

__all__ = ["place"]


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
    given = tiered.changed("unit", "weights", "activations", "hold", "update_on")
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
    return list(dict.fromkeys(unit.engine for unit in units if isinstance(unit, Unit)))  # type: ignore[misc]

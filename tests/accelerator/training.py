"""Training on a compute device of its own memory, for comparison with plain PyTorch in memory on the same device."""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

import tiered
from tests.models import CASES, Case
from tests.reference import Recipe, Trained
from tests.zero.training import checkpointed, reference, start
from tiered.errors import CapacityError
from tiered.units import MiB
from tiered.zero.activations import swapped_activations

__all__ = [
    "DEVICE", "ROOMY_NBYTES", "case_on", "device_memory_named_in", "reference_on", "smallest_device_memory",
]  # fmt: skip

ROOMY_NBYTES = 32 * MiB
DEVICE = os.environ.get("TIERED_TEST_DEVICE", "sim")
"""The type of device that tests run on: the simulated one, or a real one where a machine has it."""


def case_on(device: str, name: str) -> Case:
    """Return the case ``name`` with its model and its batches on ``device``."""
    case = CASES[name]

    def build() -> torch.nn.Module:
        with torch.device(device):
            return case.build()

    def batch(index: int) -> Any:
        return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), case.batch(index))

    return Case(build, batch, case.loss, case.unit)


def reference_on(
    device: str, name: str, recipe: Recipe, update_on: str = "device", *, recomputes: bool = False
) -> Trained:
    """Return what plain PyTorch leaves of case ``name`` on ``device``, updated there or on the CPU.

    The simulated device has the bits of the CPU, so one reference serves both. ``recomputes``: with a checkpoint around
    each unit.
    """
    updates_on = "cpu" if update_on == "cpu" and device != "sim" else ""
    made = recipe.param_dtype, recipe.max_norm, recipe.num_micro_steps, recipe.num_steps
    return _reference_on(device, name, *made, updates_on, recomputes=recomputes)


@cache
def _reference_on(
    device: str,
    name: str,
    dtype: torch.dtype | None,
    max_norm: float | None,
    num_micro_steps: int,
    num_steps: int,
    where: str,
    *,
    recomputes: bool,
) -> Trained:
    sizes = {"num_micro_steps": num_micro_steps, "num_steps": num_steps}
    recipe = Recipe(param_dtype=dtype, max_norm=max_norm, updates_on=where, **sizes)
    case = case_on(device, name)
    return reference(checkpointed(case) if recomputes else case, recipe)


def smallest_device_memory(name: str, recipe: Recipe, directory: Path, **options: Any) -> int:
    """Return the smallest device budget for case ``name``, in bytes, as the refusal of one too small names it.

    Asked for once, whatever is trained: what a model and its optimizer need is all that a refusal knows of.
    """
    key = (name, recipe.param_dtype, recipe.optimizer, swapped_activations.SMALLEST_NBYTES, *sorted(options.items()))
    if key not in _smallest_device_memories:
        _smallest_device_memories[key] = _refused_device_memory(name, recipe, directory, **options)
    return _smallest_device_memories[key]


_smallest_device_memories: dict[tuple[Any, ...], int] = {}


def _refused_device_memory(name: str, recipe: Recipe, directory: Path, **options: Any) -> int:
    with tiered.Store(directory, dram=ROOMY_NBYTES, device_memory=1, durable=False) as store:
        with pytest.raises(CapacityError) as refusal:
            start(case_on(options["device"], name), recipe, store, **options)
    return device_memory_named_in(refusal.value)


def device_memory_named_in(error: BaseException) -> int:
    """Return the number of bytes that a refusal names as the smallest device budget that works."""
    found = re.search(r"smallest that works is (\d+) bytes", str(error))
    assert found is not None, f"the message names no smallest budget: {error}"
    return int(found[1])

"""Training on a compute device of its own memory, for comparison with plain PyTorch in memory on the same device."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

import tiered
from tests.models import CASES, Case
from tests.reference import Recipe, Trained
from tests.zero.training import reference, start
from tiered.errors import CapacityError

__all__ = ["case_on", "device_store", "reference_on", "smallest_device_memory", "train_on"]


def case_on(device: str, name: str) -> Case:
    """Return the case ``name`` with its model and its batches on ``device``."""
    case = CASES[name]

    def build() -> torch.nn.Module:
        with torch.device(device):
            return case.build()

    def batch(index: int) -> Any:
        return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), case.batch(index))

    return Case(build, batch, case.loss, case.unit)


@cache
def reference_on(device: str, name: str, recipe_of: Callable[[], Recipe]) -> Trained:
    """Return what plain PyTorch leaves of case ``name`` on ``device`` under the recipe that ``recipe_of()`` returns."""
    return reference(case_on(device, name), recipe_of())


@contextmanager
def device_store(directory: Path, *, dram: int, device_memory: int, **options: Any) -> Iterator[tiered.Store]:
    """Open a store with both budgets, and see that it kept to them."""
    with tiered.Store(directory, dram=dram, device_memory=device_memory, **options) as store:
        yield store
        assert store.working_set.residents.arena.peak_nbytes <= dram


def train_on(
    device: str, name: str, recipe: Recipe, store: tiered.Store, update: str = "step", **options: Any
) -> Trained:
    """Train case ``name`` on ``device`` through ``store``."""
    session = start(case_on(device, name), recipe, store, update, device=device, **options)
    trained = session.run()
    memory = session.model.blocks[0].unit if False else None  # type: ignore[union-attr,index]
    del memory
    return trained


def smallest_device_memory(
    device: str, name: str, recipe: Recipe, directory: Path, *, dram: int, **options: Any
) -> int:
    """Return the smallest device budget for case ``name``, in bytes, as the refusal of one too small names it."""
    with pytest.raises(CapacityError) as refusal:
        with device_store(directory, dram=dram, device_memory=1, durable=False) as store:
            start(case_on(device, name), recipe, store, device=device, **options)
    found = re.search(r"smallest that works is (\d+) bytes", str(refusal.value))
    assert found is not None, refusal.value
    return int(found[1])

"""One rank: the refusals of processes, groups and wrappers that would train apart, or that no rank is there for yet."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tiered.errors import UsageError
from tiered.store.store import Store

__all__ = ["DistributedLater", "refuse_distributed", "refuse_ranks", "refuse_wrapped"]


def refuse_ranks(store: Store) -> None:
    """Raise UsageError where this process is one of several ranks and ``store`` knows of none and was not told so."""
    if store.process_group is False or store.ranks is not None:
        return
    told = os.environ.get("WORLD_SIZE", "").strip()
    what, number = f"WORLD_SIZE={told} in the environment", int(told) if told.isdecimal() else 1
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        size = torch.distributed.get_world_size()
        what, number = (f"a process group of {size} ranks", size) if size > number else (what, number)
    if number > 1:
        raise UsageError(
            f"tiered.shard with {what}, into a store that was opened for one process: each would train a model of its"
            " own; expected torch.distributed.init_process_group() before tiered.Store(...), or"
            " tiered.Store(..., process_group=False) for models that are to differ or that DistributedDataParallel,"
            " made before tiered.shard, keeps alike"
        )


def refuse_wrapped(model: nn.Module, store: Store) -> None:
    """Raise UsageError where DistributedDataParallel is in ``model`` and ``store`` has ranks, which exchange, too."""
    if store.ranks is not None and any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise UsageError(
            f"tiered.shard of a model in DistributedDataParallel, into a store of {store.ranks.world} ranks, which add"
            " up their gradients themselves; expected tiered.shard(model, store) of the plain model, its .module,"
            " before accelerator.prepare(), which then leaves the model as it is"
        )


def refuse_distributed(model: nn.Module | None) -> None:
    """Raise UsageError for an update in backward where DistributedDataParallel calls ``model`` or is in it.

    It reduces gradients after they are accumulated, and such an update has used them by then.
    """
    inner = () if model is None else model.modules()
    if DistributedDataParallel._active_ddp_module or any(isinstance(m, DistributedDataParallel) for m in inner):
        raise UsageError(
            'update="backward" under DistributedDataParallel, which reduces gradients of the ranks after they were'
            ' used; expected update="step"'
        )


class DistributedLater:
    """The mark of a sharded module: DistributedDataParallel, which asks a module for names to ignore, is refused."""

    def __iter__(self) -> Iterator[str]:
        raise UsageError(
            "DistributedDataParallel around a sharded model: it would send values that lie in the store; expected"
            " none where the store has ranks, which add up their gradients themselves, or DistributedDataParallel"
            ' first, and tiered.shard of it after, with tiered.Store(..., process_group=False) and update="step"'
        )

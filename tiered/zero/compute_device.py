"""The compute device of a sharded model: its choice, its share of memory, and the tensors that move there at once.

Also the type of this process's accelerator, and the states of the random number generators there.
"""

from __future__ import annotations

import logging

import torch
from torch import nn

from tiered.errors import CapacityError, UsageError
from tiered.ranks.ranks import Ranks
from tiered.store.store import Store
from tiered.tiers.accelerator import AcceleratorTier
from tiered.tiers.compute_tier import ComputeTier
from tiered.tiers.device_memory import free_device_memory
from tiered.units import MiB, format_bytes
from tiered.zero.formats.budget import work_sizes
from tiered.zero.layout import UnitLayout

__all__ = [
    "accelerator_type",
    "check_memory",
    "check_update_on",
    "describe_device",
    "generator_states",
    "give_construction_memory",
    "give_memory",
    "move_buffers",
    "named_device",
    "set_generator_states",
    "smallest_device_budget",
    "tier_of",
]

_log = logging.getLogger("tiered")

_CONSTRUCTION_NBYTES = 256 * MiB
_PART = 2  # of the free memory, its inverse, where the user names no budget: activations need the rest


def accelerator_type() -> str:
    """Return the type of this process's accelerator, "" where there is none."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "" if found is None else found.type


def describe_device(device: torch.device) -> str:
    """Return the name of ``device`` and, where its driver tells, that of the card."""
    name = getattr(torch.get_device_module(device.type), "get_device_name", None)
    return str(device) if name is None else f"{device} ({name(device)})"


def generator_states() -> list[torch.Tensor]:
    """Return the state of each device's generator, in the devices' order; none without an accelerator."""
    word = accelerator_type()
    if not word:
        return []
    module = torch.get_device_module(word)
    return [module.get_rng_state(index) for index in range(torch.accelerator.device_count())]


def set_generator_states(states: list[torch.Tensor]) -> None:
    """Set the devices' generators to ``states``; those of devices that are not there are left out."""
    num_devices = torch.accelerator.device_count() if states else 0
    for index, state in enumerate(states[:num_devices]):
        torch.get_device_module(accelerator_type()).set_rng_state(state, index)


def named_device(word: str | torch.device, device_memory: int | None = None) -> torch.device:
    """Return the device that ``word`` names, with its index. UsageError.

    "auto" is the accelerator of this process, or the CPU: without one, or with a ``device_memory`` of 0. It is logged.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if word == "auto":
        word = accelerator if accelerator and device_memory != 0 else "cpu"
        why = "device_memory is 0" if accelerator else "this process has no accelerator"
        _log.info('device="auto" is %s: %s', word, "the accelerator of this process" if word == accelerator else why)
    try:
        device = torch.device(word)
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"device={word!r}; expected 'auto', 'cpu' or an accelerator such as 'cuda'") from error
    if device.type == "cpu":
        return torch.device("cpu")
    if accelerator is None or accelerator.type != device.type:
        there = "there is none" if accelerator is None else f"it is {accelerator.type!r}"
        raise UsageError(f"device={str(word)!r}; expected 'auto', 'cpu' or the accelerator of this process: {there}")
    if device_memory == 0:
        raise UsageError(
            f"device={str(word)!r} with a store of device_memory=0; expected a budget such as device_memory='20GiB'"
        )
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    if index >= (num_devices := torch.accelerator.device_count()):
        raise UsageError(f"device={str(word)!r}; expected one of {num_devices} devices of that type, counted from 0")
    return torch.device(device.type, index)


def tier_of(device: torch.device, store: Store) -> ComputeTier:
    """Return the tier of ``device``; one of an accelerator has no memory before ``give_memory``."""
    if device.type == "cpu":
        return ComputeTier(store.working_set)
    return AcceleratorTier(store.working_set, device, 0)


def check_update_on(word: str, tier: ComputeTier) -> None:
    """Raise UsageError for an ``update_on`` that is no word, or is "device" where there is none."""
    if word not in ("auto", "cpu", "device"):
        raise UsageError(f"update_on={word!r}; expected 'auto', 'cpu' or 'device'")
    if word == "device" and tier.computes_in_dram:
        raise UsageError("update_on='device' of a model on the CPU; expected device= of an accelerator, or 'cpu'")


def check_memory(tier: ComputeTier, units: list[UnitLayout], budget: int | None, stage: int, *, updates: bool) -> None:
    """Raise CapacityError, with the smallest one that works, for too small a ``budget`` of the device's memory."""
    smallest = 0 if tier.computes_in_dram else smallest_device_budget(units, updates=updates, stage=stage)
    if budget is not None and budget < smallest:
        parts, remedy = "root unit + 2 largest units, their gradients", ""
        if stage < 3 and units[0].world > 1:
            parts = f"all units, which stage={stage} keeps gathered, gradients of {'all' if stage == 1 else 2} of them"
            remedy = ", or stage=3"
        raise CapacityError(
            f"compute-device budget {budget} bytes ({format_bytes(budget)}) is too small for this model; the smallest"
            f" that works is {smallest} bytes ({format_bytes(smallest)}): {parts}"
            f"{' + what an update on the device takes' if updates else ''}. Give device_memory= at least that, or"
            f" smaller units{', or update_on=' + repr('cpu') if updates else ''}{remedy}"
        )


def give_memory(
    tier: ComputeTier,
    units: list[UnitLayout],
    asked_bytes: int | None,
    stage: int,
    *,
    updates: bool,
    ranks: Ranks | None = None,
) -> None:
    """Give ``tier`` the budget asked for, or a part of what is free once the model's values have left the device.

    ``updates``: they may compute there, too. Over ``ranks`` the least part is each one's; blocks for all of them.
    """
    if not isinstance(tier, AcceleratorTier):
        return
    torch.accelerator.empty_cache()  # memory: torch keeps the values' for the stream that they were made on, no other
    smallest = smallest_device_budget(units, updates=updates, stage=stage)
    largest = sum(unit.nbytes + unit.gradient_nbytes for unit in units)
    budget = asked_bytes
    if budget is None:
        free = free_device_memory(tier.device)
        part = max(smallest, min(free // _PART, smallest + largest))
        budget = part if ranks is None else ranks.least("device_memory", lambda: part)
        _log.info("device_memory=%s of %s free on %s", format_bytes(budget), format_bytes(free), tier.device)
    tier.memory.budget_bytes = budget
    root, *others = units
    sizes = {max((getattr(unit, name) for unit in others), default=0) for name in ("nbytes", "gradient_nbytes")}
    sizes = {root.nbytes, root.gradient_nbytes} | {nbytes >> num for nbytes in sizes for num in range(12)}
    tier.memory.capacities = sorted(sizes)  # those that the smallest budget counts, and halves of halves of the largest
    stay = [tier.memory.capacity_of(unit.nbytes) for unit in others]
    tier.memory.reserve(min(budget, smallest + max(0, sum(stay) - 2 * max(stay, default=0))))  # all that can stay


def give_construction_memory(tier: ComputeTier, nbytes: int) -> None:
    """Let ``tier`` take memory for a few parameters, one of ``nbytes`` among them, while a model is constructed."""
    if isinstance(tier, AcceleratorTier):
        tier.memory.budget_bytes = max(tier.memory.budget_bytes, _CONSTRUCTION_NBYTES, nbytes)


def smallest_device_budget(units: list[UnitLayout], *, updates: bool, stage: int = 3) -> int:
    """Return the smallest budget in bytes for ``units``, the root first: it, the unit in use, the next; gradients.

    With ``updates`` on the device also one unit more, its gradients, 3 buckets and the tile scratch. Over ranks also
    the gradients that are received, in ``stage`` 2 all units, in stage 1 their gradients, too.
    """
    sizes = work_sizes(units)
    own = max(unit.shard_gradient_nbytes for unit in units)
    update = 2 * own + 3 * sizes.bucket + sizes.scratch if updates else 0
    root, *others = units
    parameters, gradients = [unit.nbytes for unit in others] or [0], [unit.gradient_nbytes for unit in others] or [0]
    shown, filled = 2 * max(parameters), 2 * max(gradients)
    received = 0
    if root.world > 1:
        received = max(root.gradient_nbytes, *gradients)
        shown = max(shown, sum(parameters)) if stage < 3 else shown
        filled = max(filled, sum(gradients)) if stage < 2 else filled
    return root.nbytes + shown + root.gradient_nbytes + filled + received + update


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move the tensors of ``model`` that are no parameters to ``device``, those on meta excepted; shared ones once."""
    moved: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device and not buffer.is_meta:
                module._buffers[name] = moved.setdefault(id(buffer), buffer.to(device))

"""Memory of the device that torch reserves: what is free of it, and buffers that are made once for many sizes."""

from __future__ import annotations

import gc
import itertools
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

import tiered
from tests.accelerator.training import ROOMY_NBYTES
from tiered.tiers.accelerator import AcceleratorTier, DevicePlace
from tiered.tiers.device_memory import DeviceBuffer, DeviceMemory
from tiered.units import KiB, MiB

SIZES = (20 * KiB, 12 * KiB, 17 * KiB, 10 * KiB, 19 * KiB, 15 * KiB)


def memory_of(budget_bytes: int) -> DeviceMemory:
    return DeviceMemory(torch.device("sim:0"), budget_bytes, torch.Stream(device="sim"), lambda _: 1)


def taken(memory: DeviceMemory, nbytes: int) -> DeviceBuffer:
    buffer = memory.take(nbytes)
    assert buffer is not None and buffer.tensor.shape == (nbytes,)
    return buffer


def test_a_small_size_in_a_large_buffer_takes_no_room_from_others(sim: ModuleType) -> None:
    memory = memory_of(40 * KiB)
    memory.give(taken(memory, 20 * KiB))
    small, large = taken(memory, 12 * KiB), taken(memory, 20 * KiB)
    assert memory.take(9 * KiB) is None
    rest = taken(memory, 8 * KiB)  # all 40 KiB are in use
    for buffer in (small, large, rest):
        memory.give(buffer)
    assert memory.left_bytes() == 40 * KiB


def test_buffers_of_few_sizes_are_made_and_change_their_users(sim: ModuleType) -> None:
    memory = memory_of(45 * KiB)
    memory.capacities = [10 * KiB, 20 * KiB]
    sim.keep_log()
    for one, other in itertools.permutations(SIZES[:3] + SIZES[4:], 2):
        for buffer in [taken(memory, one), taken(memory, other)]:
            memory.give(buffer)
    made = [entry.nbytes for entry in sim.log() if entry.kind == "allocate"]
    assert set(made) == {20 * KiB} and len(made) <= 2, made


def test_the_smallest_budget_does_for_parts_that_few_sizes_are_too_large_for(sim: ModuleType) -> None:
    memory = memory_of(20 * KiB)
    memory.capacities = [5 * KiB, 10 * KiB, 20 * KiB]
    buffers = [taken(memory, 6 * KiB) for _ in range(3)]
    assert memory.take(6 * KiB) is None
    for buffer in buffers:
        memory.give(buffer)


def test_the_memory_of_units_and_that_of_updates_are_one_to_the_allocator_of_torch(
    sim: ModuleType, tmp_path: Path
) -> None:
    with tiered.Store(tmp_path, dram=ROOMY_NBYTES, durable=False) as store:
        tier = AcceleratorTier(store.working_set, torch.device("sim:0"), 4 * KiB)
        place = DevicePlace(tier, 4 * KiB)
        sim.keep_log()
        for memory in (tier.memory, place.memory):
            memory.give(taken(memory, 4 * KiB))
        assert len({entry.stream for entry in sim.log() if entry.kind == "allocate"}) == 1
        place.close()
        tier.forget()


def test_a_model_that_lies_on_the_device_leaves_the_budget_of_one_that_does_not(
    sim: ModuleType, tmp_path: Path
) -> None:
    def budget(name: str, *, is_there: bool) -> int:
        gc.collect()
        torch.accelerator.empty_cache()
        sim.set_memory_limit(torch.accelerator.memory_allocated() + 24 * MiB)
        model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)])  # 8 MiB
        if is_there:
            model.to("sim")
        with tiered.Store(tmp_path / name, dram=ROOMY_NBYTES, durable=False) as store:
            tiered.shard(model, store, unit=nn.Linear, device="sim", update_on="cpu")
            budget_bytes: int = model[0].weight.segment.unit.tier.memory.budget_bytes  # type: ignore[union-attr,assignment]
        return budget_bytes

    there, here = budget("there", is_there=True), budget("here", is_there=False)
    assert abs(there - here) < 64 * KiB and here > 11 * MiB

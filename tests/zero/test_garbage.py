"""Nothing of a training outlives it, nor of a run that ended badly, whatever its errors refer to."""

import gc
import logging
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import tiered
from tests.devices.simulated_disk import SimulatedDisk
from tests.store.rig import simulated_store
from tiered.bytes.arena import Arena
from tiered.errors import DeviceError
from tiered.units import MiB


def run(disk: SimulatedDisk, arena: Arena) -> None:
    """Train a model whose second commit fails."""
    with simulated_store(disk, arena=arena) as store:
        model = tiered.shard(nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))), store)
        optimizer = tiered.AdamW(model.parameters())
        for step in range(2):
            model(torch.ones(2, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                disk.fail_next("transact", DeviceError("the drive is full"))
            store.commit({"step": step})


def test_a_run_whose_commit_failed_gives_its_memory_back(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="tiered")  # lifetime: pytest keeps messages, which refer to errors
    arena = Arena(4 * MiB)
    life, mapped = weakref.ref(arena), weakref.ref(arena._mappings[0].memory.obj)
    try:
        run(SimulatedDisk(capacity_nbytes=4 * MiB, can_lose_power=False), arena)
    except DeviceError as error:
        assert "generation 2" in str(error)
    else:
        raise AssertionError("the second commit did not fail")
    del arena
    gc.collect()  # the model; the ends of its leases still call the working set
    gc.collect()
    assert life() is None
    assert mapped() is None


def test_model_optimizer_and_store_go_when_nobody_has_them(tmp_path: Path) -> None:
    def train() -> list[weakref.ref[object]]:
        with tiered.Store(tmp_path / "run", dram="16MiB") as store:
            model = tiered.shard(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), store)
            optimizer = tiered.AdamW(model.parameters(), lr=1e-3)
            model(torch.ones(2, 16)).sum().backward()
            optimizer.step()
            store.commit()
            return [weakref.ref(one) for one in (model, optimizer, store)]

    gone = train()
    gc.collect()
    assert [reference() for reference in gone] == [None, None, None]

"""Micro-steps that read parameters again: one warning with the bytes, and none where DRAM keeps the parameters."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import tiered
from tests.devices.simulated_disk import SimulatedDisk
from tests.store.rig import simulated_store
from tiered.units import KiB, MiB, format_bytes

WIDTH, NUM_UNITS = 128, 8


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records if "micro-steps" in record.getMessage()]
    caplog.clear()
    return found


@pytest.mark.parametrize("update", ["step", "backward"])
def test_the_bytes_that_micro_steps_read_are_said_once(update: str, caplog: pytest.LogCaptureFixture) -> None:
    with simulated_store(SimulatedDisk(), budget_nbytes=800 * KiB, durable=False) as store:
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(NUM_UNITS)]
        model = tiered.shard(nn.Sequential(*layers), store, unit=nn.Linear, hold=0)
        optimizer = tiered.AdamW(model.parameters(), update=update)

        def step(num_micro_steps: int) -> int:
            """Return the bytes of parameters that were read from the end of the first backward to that of the last."""
            read = []
            for left in reversed(range(num_micro_steps)):
                with tiered.accumulate(model) if left else nullcontext():
                    model(torch.ones(4, WIDTH)).square().mean().backward()
                moved = {each.name: each.read_bytes for each in store.statistics().recorder.moved}
                read.append(moved.get("parameters", 0))
            optimizer.step()
            optimizer.zero_grad()
            return read[-1] - read[0]

        for _ in range(2):
            step(1)
        assert not warnings_of(caplog), "one batch a step"
        nbytes = step(3)
        (said,) = warnings_of(caplog)
        assert f"3 micro-steps: those after the first have read {format_bytes(nbytes)} of parameters" in said
        assert nbytes > 2 * WIDTH * WIDTH * 4 * NUM_UNITS, "forwards and backwards do"
        step(3)
        assert not warnings_of(caplog), "it is known"


def test_parameters_that_stay_in_dram_are_not_spoken_of(caplog: pytest.LogCaptureFixture) -> None:
    with simulated_store(SimulatedDisk(), budget_nbytes=8 * MiB, durable=False) as store:
        model = tiered.shard(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2))), store, unit=nn.Linear)
        optimizer = tiered.AdamW(model.parameters())
        for _ in range(3):
            for _ in range(2):
                model(torch.ones(4, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert not warnings_of(caplog)

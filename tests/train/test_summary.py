"""The summary of a run: what it says twice, it says the same way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import tiered
from tiered.train.config import RunConfig, RunDials
from tiered.train.plan import Plan
from tiered.train.progress import StepRecord
from tiered.train.summary import RunSummary


def test_the_first_step_is_left_out_of_how_long_the_others_waited(tmp_path: Path) -> None:
    plan = Plan(RunConfig(1, 8, 1, 8), RunDials(), (tmp_path,), durable=False, first_step=0)
    first = StepRecord(1, 5.0, 9.0, 8, 0, 0, stall_seconds=0.0)
    other = StepRecord(2, 4.0, 1.0, 8, 0, 0, stall_seconds=0.5, waits={"update": 0.5})
    with tiered.Store(tmp_path / "store", dram="16MiB", durable=False) as store:
        lines = RunSummary.of(plan, [first, other, replace(other, step=3)], store).lines(None)
    assert any("50% of it waiting for I/O" in line for line in lines)
    assert "50% of the step waits" in lines[-1]

"""The summary of a run: what it says twice, it says the same way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import tiered
from tiered.tools.train.config import RunConfig, RunDials
from tiered.tools.train.plan import Plan
from tiered.tools.train.summary import RunSummary, StepRecord


def test_a_step_has_one_line() -> None:
    record = StepRecord(3, 5.25, 2.0, 2048, {"read_bytes": 4e9, "write_bytes": 3e9, "wait: update": 0.5})
    assert str(record) == "loss 5.250  1,024 tokens/s  in 2.00 out 1.50 GB/s  stall 25%"


def test_the_first_step_is_left_out_of_how_long_the_others_waited(tmp_path: Path) -> None:
    plan = Plan(RunConfig(1, 8, 1, 8), RunDials(), (tmp_path,), durable=False, first_step=0)
    first = StepRecord(1, 5.0, 9.0, 8, {})
    other = StepRecord(2, 4.0, 1.0, 8, {"wait: update": 0.5})
    with tiered.Store(tmp_path / "store", dram="16MiB", durable=False) as store:
        lines = RunSummary(plan, [first, other, replace(other, step=3)], store).lines(None)
    assert any("50% of it waiting for I/O" in line for line in lines)
    assert "50% of the step waits" in lines[-1]


def test_the_bound_is_that_of_the_mean_step_without_the_first(tmp_path: Path) -> None:
    plan = Plan(RunConfig(1, 8, 1, 8), RunDials(), (tmp_path,), durable=False, first_step=0)
    records = [
        StepRecord(step, 5.0, step_s, 8, {"wait: update": 0.2}) for step, step_s in enumerate((9.0, 1.0, 2.4, 1.2), 1)
    ]
    with tiered.Store(tmp_path / "store", dram="16MiB", durable=False) as store:
        summary = RunSummary(plan, records, store, peak_flop_per_s=1e9)
    said = "\n".join(summary.lines(None))
    assert "time    1.53 s per step, 5 tokens/s" in said
    assert "bound   1.33 s (compute 1.33, " in said and "step/bound 1.15" in said
    assert summary.share_of_peak == pytest.approx(plan.step_flop / 1e9 / 1.5333, rel=1e-3)

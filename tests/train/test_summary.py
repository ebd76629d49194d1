"""The summary of a run: what it says twice, it says the same way."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

import tiered
from tiered.tools.train.config import RunConfig, RunDials
from tiered.tools.train.plan import Plan
from tiered.tools.train.summary import RunSummary, StepRecord


def test_the_first_step_is_left_out_of_how_long_the_others_waited(tmp_path: Path) -> None:
    plan = Plan(RunConfig(1, 8, 1, 8), RunDials(), (tmp_path,), durable=False, first_step=0)
    first = StepRecord(1, 5.0, 9.0, 8, {})
    other = StepRecord(2, 4.0, 1.0, 8, {"wait: update": 0.5})
    with tiered.Store(tmp_path / "store", dram="16MiB", durable=False) as store:
        lines = RunSummary(plan, [first, other, replace(other, step=3)], store).lines(None)
    assert any("50% of it waiting for I/O" in line for line in lines)
    assert "50% of the step waits" in lines[-1]


@pytest.mark.parametrize(
    ("seconds", "waits"), [((1.0, 2.4, 1.2), 0.2), ((0.0101, 0.0149, 0.0297), 0.0), ((0.4, 0.41, 3.0), 0.31)]
)
def test_step_over_bound_is_the_quotient_of_the_time_and_the_bound_beside_it(
    tmp_path: Path, seconds: tuple[float, ...], waits: float
) -> None:
    """The median of uneven steps is below the bound of their mean."""
    plan = Plan(RunConfig(1, 8, 1, 8), RunDials(), (tmp_path,), durable=False, first_step=0)
    records = [
        StepRecord(step, 5.0, step_s, 8, {"wait: update": waits}) for step, step_s in enumerate((9.0, *seconds), 1)
    ]
    with tiered.Store(tmp_path / "store", dram="16MiB", durable=False) as store:
        summary = RunSummary(plan, records, store, peak_flop_per_s=1e9)
    said = "\n".join(summary.lines(None))
    time, tokens = re.findall(r"time +([\d.]+) s per step, ([\d,]+) tokens/s", said)[0]
    bound, compute, ratio = re.findall(r"bound +([\d.]+) s \(compute ([\d.]+),.* step/bound ([\d.]+)", said)[0]
    assert float(time) == pytest.approx(sum(seconds) / 3, rel=5e-3)
    assert float(tokens.replace(",", "")) == pytest.approx(8 / float(time), rel=5e-3, abs=0.5)
    assert compute == bound and float(bound) <= float(time)
    assert ratio == f"{float(time) / float(bound):.2f}"
    assert summary.share_of_peak == pytest.approx(plan.step_flop / 1e9 / float(time), rel=5e-3)

"""SIGKILL while a model computes on a compute device: nothing durable is lost, and the end has the same bits."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from types import ModuleType

import pytest

from bench.kills import Campaign
from tests.rigs.warm_python import WarmPython


def test_a_killed_run_ends_with_the_bits_of_an_undisturbed_one(
    sim: ModuleType, tmp_path: Path, warm_python: WarmPython, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", warm_python.executable)  # of which the nursery is forked
    with closing(Campaign(tmp_path, update_on="device")) as campaign:  # bench/soak.py --update-on has more
        verdict = campaign.run(4, 1)
        while not verdict.num_inside_commit and len(verdict.kills) < 40:  # a busy machine shifts the instants
            verdict.kills += campaign.run(4, 0).kills
    assert not verdict.wrong
    assert verdict.count("training") >= 4 and verdict.count("making") >= 1 and verdict.num_inside_commit >= 1

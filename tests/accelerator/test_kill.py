"""SIGKILL while a model computes on a compute device: nothing durable is lost, and the end has the same bits."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from types import ModuleType

from bench.kills import Campaign


def test_a_killed_run_ends_with_the_bits_of_an_undisturbed_one(sim: ModuleType, tmp_path: Path) -> None:
    with closing(Campaign(tmp_path, update_on="device")) as campaign:  # bench/soak.py --update-on has more
        verdict = campaign.run(5, 1)
        while not verdict.num_inside_commit and len(verdict.kills) < 40:  # a busy machine shifts the instants
            verdict.kills += campaign.run(5, 0).kills
    assert not verdict.wrong
    assert verdict.count("training") >= 5 and verdict.count("making") >= 1 and verdict.num_inside_commit >= 1

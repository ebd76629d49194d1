"""Commits over ranks: killed, rolled back and resumed runs have the bits of an undisturbed one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.commits import NUM_STEPS
from tests.ranks.processes import Ranks, StartedRanks
from tests.rigs.warm_python import WarmPython


@pytest.fixture(scope="module")
def ranks(warm_python: WarmPython) -> Iterator[Ranks]:
    with StartedRanks(3, warm_python.executable, limit_s=240.0) as ranks:
        yield ranks


@pytest.mark.parametrize("world", [2, 3])
def test_a_run_that_commits_resumes_after_its_end(world: int, ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run("commit_each_step", world=world, path=str(tmp_path))[:world]
    assert sorted(each.name for each in tmp_path.iterdir()) == [f"rank-{r:04d}-of-{world:04d}" for r in range(world)]
    again = ranks.run("commit_each_step", world=world, path=str(tmp_path))[:world]
    for before, after in zip(found, again, strict=True):
        assert (before["first"], after["first"]) == (0, NUM_STEPS)
        assert before["digests"] == after["digests"] and before["random"] == after["random"]

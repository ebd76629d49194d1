"""Commits over ranks: killed, rolled back and resumed runs have the bits of an undisturbed one."""

from __future__ import annotations

import os
import signal
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


@pytest.mark.parametrize("kind", ["forward", "step", "backward"])
def test_ranks_roll_back_together_after_one_has_failed(kind: str, ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run("go_back", world=3, kind=kind, path=str(tmp_path / "failed"))
    update = "backward" if kind == "backward" else "step"
    plain = ranks.run("commit_each_step", world=3, update=update, path=str(tmp_path / "plain"))
    for rank in range(3):
        assert found[rank]["digests"] == plain[rank]["digests"]
        assert len(found[rank]["errors"]) == 2 and found[rank]["lost"] == 0, found
        assert all(kind in each for each in found[rank]["errors"])


@pytest.fixture(scope="module")
def undisturbed(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Any]]:
    """The digests of each rank after a run that nothing has disturbed, by the number of ranks."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return {
        world: [
            each["digests"]
            for each in ranks.run("commit_each_step", world=world, path=str(folder / str(world)))[:world]
        ]
        for world in (2, 3)
    }


@pytest.mark.parametrize(
    ("world", "instant", "kept"),
    [(2, "before the flush", 3), (3, "before the catalog", 3), (3, "before the confirmation", 4), (2, "all", None)],
)
def test_a_killed_run_resumes_with_the_bits_of_an_undisturbed_one(
    world: int, instant: str, kept: int | None, undisturbed: Any, ranks: Ranks, warm_python: WarmPython, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"world": world, "path": str(tmp_path)}
    with StartedRanks(world, warm_python.executable, limit_s=240.0) as killed:
        killed.start("commit_each_step", **options, killed=-1 if instant == "all" else world - 1, instant=instant)
        if instant == "all":
            assert [killed.line(rank)["committed"] for rank in range(world) for _ in range(2)] == [1, 2] * world
            for pid in killed.pids:
                os.kill(pid, signal.SIGKILL)
        else:
            assert killed.wait_for(world - 1) == -signal.SIGKILL
            for rank in range(world - 1):
                line = killed._last_line(rank)
                assert f"rank {world - 1}" in line["raised"], line
    found = ranks.run("commit_each_step", **options)[:world]
    assert {each["first"] for each in found} == ({kept} if kept is not None else {found[0]["first"]})
    assert found[0]["first"] >= 2
    assert [each["digests"] for each in found] == undisturbed[world]

"""Commits over ranks: killed, rolled back and resumed runs have the bits of an undisturbed one."""

from __future__ import annotations

import os
import re
import select
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tiered
from tests.ranks.commits import NUM_STEPS
from tests.ranks.processes import Ranks, StartedRanks
from tests.rigs.warm_python import WarmPython
from tiered.errors import UsageError
from tiered.tools.cli import main


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


@pytest.mark.parametrize(
    ("kind", "of_device"),
    [
        ("forward", "gloo"),
        ("exchange", "gloo"),
        ("backward", "gloo"),
        ("take", "gloo"),
        ("exchange", "sim_collectives"),
        ("take", "sim_collectives"),
    ],
)
def test_ranks_roll_back_together_after_one_has_failed(kind: str, of_device: str, ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run("go_back", world=3, kind=kind, path=str(tmp_path / "failed"), of_device=of_device)
    update = "backward" if kind == "backward" else "step"
    plain = ranks.run("commit_each_step", world=3, update=update, path=str(tmp_path / "plain"), kind=of_device)
    for rank in range(3):
        assert found[rank]["digests"] == plain[rank]["digests"]
        assert len(found[rank]["errors"]) == 2 and found[rank]["lost"] == 0, found
        told = "store.rollback()" if kind == "backward" and rank else kind
        assert all(told in each for each in found[rank]["errors"]), found


@pytest.mark.parametrize(
    ("model", "dtype", "update", "waits", "stop", "kind"),
    [
        ("odd_sizes", "bf16", "step", False, 4, "gloo"),
        ("tied_head", "bf16", "backward", True, 2, "gloo"),
        ("unused_parameter", "fp32", "backward", False, 2, "gloo"),
        ("unfrozen", "bf16", "step", True, 3, "gloo"),
        ("unfrozen", "bf16", "step", True, 1, "gloo"),
        ("tied_head", "bf16", "backward", False, 2, "sim_collectives"),
    ],
)
def test_a_run_in_two_parts_has_the_bits_of_one(
    model: str, dtype: str, update: str, waits: bool, stop: int, kind: str, ranks: Ranks, tmp_path: Path
) -> None:
    """Shards, masters, moments and counts come back, where values are written and parts laid out anew, too."""
    unfreezes = model == "unfrozen"
    options = {"world": 3, "model": "odd_sizes" if unfreezes else model, "dtype": dtype, "update": update}
    options |= {"waits": waits, "unfreezes": unfreezes, "kind": kind}
    whole = ranks.run("commit_each_step", **options, path=str(tmp_path / "whole"))
    first = ranks.run("commit_each_step", **options, path=str(tmp_path / "parts"), num_steps=stop)
    rest = ranks.run("commit_each_step", **options, path=str(tmp_path / "parts"))
    for rank in range(3):
        assert (first[rank]["state"], rest[rank]["first"]) == (stop, stop)
        assert rest[rank]["digests"] == whole[rank]["digests"] != first[rank]["digests"]


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
            lines = [killed.line(rank) for rank in range(world) for _ in range(2)]
            assert [line["committed"] for line in lines] == [1, 2] * world
            ends = [os.pidfd_open(pid) for pid in sorted({line["pid"] for line in lines})]
            for end in ends:
                signal.pidfd_send_signal(end, signal.SIGKILL)
            for end in ends:  # the locks of a killed process go with it
                assert select.select([end], [], [], 60.0)[0]
                os.close(end)
        else:
            assert killed.wait_for(world - 1) == -signal.SIGKILL
            for rank in range(world - 1):
                line = killed._last_line(rank)
                assert f"rank {world - 1}" in line["raised"], line
    found = ranks.run("commit_each_step", **options)[:world]
    assert {each["first"] for each in found} == ({kept} if kept is not None else {found[0]["first"]})
    assert found[0]["first"] >= 2
    assert [each["digests"] for each in found] == undisturbed[world]


# -- one rank's own troubles ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        ("leased", "LeaseError", "rank 1: commit while 'x' is leased for writing"),
        ("no space", "", "no space left on the drive"),
        ("locked", "UsageError", "rank 1: .* is open in process"),
    ],
)
def test_what_keeps_one_rank_from_a_commit_or_an_opening_is_named_on_all(
    kind: str, error: str, text: str, ranks: Ranks, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"world": 3, "path": str(tmp_path)}
    assert ranks.run("open_with", **options) == ["generation 1"] * 3, "a close commits what has changed"
    found = ranks.run("open_with", **options, kind=kind)
    for rank, each in enumerate(found):
        assert each.startswith(error) and re.search(text, each), found
        assert kind != "no space" or rank == 1 or "generation 2 is lost because rank 1" in each, found
    assert ranks.run("open_with", **options) == ["generation 2"] * 3


def test_all_ranks_commit_at_the_close_where_one_has_changes(ranks: Ranks, tmp_path: Path) -> None:
    options: dict[str, Any] = {"world": 3, "path": str(tmp_path), "kind": "changes on one"}
    assert ranks.run("open_with", **options) == ["generation 2"] * 3


def test_directories_say_whose_they_are(ranks: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = ranks.run("commit_each_step", world=2, path=str(tmp_path / "run"))[:2]
    refused = ranks.run("open_with", world=3, path=str(tmp_path / "run"), mode="r")
    assert all('mode "r" on a run of 2 ranks' in each and "--nproc-per-node 2" in each for each in refused), refused
    with pytest.raises(UsageError, match=r'mode "r" on a run of 2 ranks.*there is 1 now.*--nproc-per-node 2'):
        tiered.Store(tmp_path / "run", dram="16MiB", mode="r")
    own = tmp_path / "run" / "rank-0001-of-0002"
    with pytest.raises(UsageError, match=r"is the store of rank 1 of 2, and this is one rank alone.*mode=\"r\""):
        tiered.Store(own, dram="16MiB")
    with tiered.Store(own, dram="16MiB", mode="r") as store:
        assert store.verify().is_clean and store.state["rank"] == 1
    for command in (["inspect"], ["verify"], ["gc", "--yes"]):
        assert main([command[0], str(own), *command[1:]]) == 0
        assert "rank 1 of 2" in " ".join(capsys.readouterr().out.split())
        assert main([command[0], str(tmp_path / "run"), *command[1:]]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert all(f"rank {rank} of 2" in shown for rank in range(2)), "each rank, one after the other"
    assert main(["export", str(own), str(tmp_path / "out")]) == 2
    assert "one rank's shards of a model over 2 ranks" in " ".join(capsys.readouterr().err.split())
    again = ranks.run("commit_each_step", world=2, path=str(tmp_path / "run"))[:2]
    assert [each["digests"] for each in again] == [each["digests"] for each in found], "and state_dict() has all"


@pytest.mark.parametrize(
    ("kind", "first", "others"),
    [
        ("interrupted", "KeyboardInterrupt", "rank 0 is lost.*KeyboardInterrupt in store.commit"),
        ("alone", "the ranks do different things", "the ranks do different things.*store.commit"),
        ("update fails", "no space left for an update", "generation 2 is lost because rank 0|rank 0 has abandoned"),
    ],
)
def test_no_rank_waits_for_one_that_does_not_commit(
    kind: str, first: str, others: str, ranks: Ranks, tmp_path: Path
) -> None:
    found = ranks.run("end_oddly", world=3, path=str(tmp_path), kind=kind)
    for rank, error in enumerate(found):
        assert re.search(others if rank else first, error), found
    assert ranks.run("open_with", world=3, path=str(tmp_path)) == ["generation 2"] * 3


def test_each_rank_has_a_directory_in_each_that_is_given(ranks: Ranks, tmp_path: Path) -> None:
    paths = [str(tmp_path / "one"), str(tmp_path / "drive{local_rank}" / "run{rank}")]
    for mode in ("x", "r"):
        found = ranks.run("stripe", world=2, paths=paths, mode=mode)[:2]
        for rank, each in enumerate(found):
            own = f"rank-{rank:04d}-of-0002"
            assert each == [1, str(tmp_path / "one" / own), str(tmp_path / f"drive{rank}" / f"run{rank}" / own)]

"""A run that another number of ranks opens: values, state and bytes, kills in the switch, and what is refused."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

import tiered
from tests.ranks.crash_states import ACTIONS, CrashStates, Rig, discarding
from tests.ranks.processes import Ranks, StartedRanks
from tests.rigs.available import needs
from tests.rigs.room import room
from tests.rigs.warm_python import WarmPython
from tiered.errors import CapacityError, CorruptionError, UsageError
from tiered.store.catalog.catalog import GenerationName
from tiered.store.generations.generations import Generations
from tiered.store.lifetime.lock import Lock
from tiered.store.lifetime.rank_sets import RankSet, find_sets, newest_of
from tiered.tools.cli import main
from tiered.zero.reshard import carry_over


@pytest.fixture(scope="module")
def ranks(warm_python: WarmPython) -> Iterator[Ranks]:
    with StartedRanks(4, warm_python.executable, limit_s=240.0) as ranks:
        yield ranks


def run(ranks: Ranks, world: int, path: Path, **options: Any) -> list[Any]:
    return ranks.run("commit_each_step", world=world, path=str(path), **options)[:world]


def contents(path: Path) -> dict[str, dict[str, bytes]]:
    """Return the bytes of each key, by the directory of the rank."""
    found = {}
    for directory in sorted(path.iterdir()):
        with tiered.Store(directory, dram="16MiB", mode="r") as store:
            found[directory.name] = {
                key: value.view(-1).view(torch.uint8).numpy().tobytes() for key, value in store.items()
            }
    return found


@pytest.mark.parametrize(
    ("model", "options", "worlds"),
    [
        ("odd_sizes", {"dtype": "bf16"}, (2, 1, 4, 3)),
        ("tied_head", {"dtype": "fp32", "update": "backward"}, (1, 3, 2)),
        ("hollow", {"dtype": "fp32"}, (2, 3)),
        ("gpt", {"dtype": "bf16", "state_format": "compact"}, (2, 3, 4, 3, 1)),
        ("odd_sizes", {"dtype": "bf16", "unfreezes": True}, (3, 2)),
    ],
)
def test_parameters_and_state_are_those_that_were_committed(
    model: str, options: dict[str, Any], worlds: tuple[int, ...], ranks: Ranks, tmp_path: Path
) -> None:
    num_steps = 1 if options.get("unfreezes") else 2
    before = run(ranks, worlds[0], tmp_path, model=model, num_steps=num_steps, **options)
    for world in worlds[1:]:
        found = run(ranks, world, tmp_path, model=model, num_steps=num_steps, **options)
        assert [each["first"] for each in found] == [num_steps] * world
        assert all(each["digests"] == before[0]["digests"] for each in found)
    trained = run(ranks, worlds[-1], tmp_path, model=model, num_steps=3, **options)
    again = run(ranks, worlds[-1], tmp_path, model=model, num_steps=3, **options)
    assert trained[0]["digests"] == again[0]["digests"] != before[0]["digests"], "and training goes on, and commits"


def test_a_commit_since_the_look_at_the_old_set_is_not_lost(ranks: Ranks, tmp_path: Path) -> None:
    run(ranks, 2, tmp_path / "run", num_steps=1)
    origin = newest_of(find_sets([tmp_path / "run"]))
    assert origin is not None
    run(ranks, 2, tmp_path / "run", num_steps=2)
    with (
        tiered.Store(tmp_path / "new", dram="16MiB") as store,
        pytest.raises(UsageError, match="another process has committed to the run of 2 ranks, generation 1"),
        carry_over(store, origin, external=(), engine="auto"),
    ):
        pass


def test_as_many_ranks_as_before_have_the_bytes_of_before(
    ranks: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run"
    first = run(ranks, 2, path, model="odd_sizes", dtype="bf16", num_steps=2)
    before = contents(path)
    run(ranks, 3, path, model="odd_sizes", dtype="bf16", num_steps=2)
    assert len(list(path.iterdir())) == 5, "the old set stays until it is removed"
    found = run(ranks, 2, path, model="odd_sizes", dtype="bf16", num_steps=2)
    assert [each["random"] for each in found] == [each["random"] for each in first], "random states are each rank's own"
    assert main(["gc", str(path), "--yes"]) == 0
    assert "not needed any more: 3 ranks" in " ".join(capsys.readouterr().out.split())
    assert contents(path) == before
    for command in (["inspect", str(path)], ["verify", str(path)], ["export", str(path), str(tmp_path / "out")]):
        assert main(command) == 0
    digests = found[0]["digests"]
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert exported.keys() and all(any(name in key for key in digests) for name in exported)
    run(ranks, 1, path, model="odd_sizes", dtype="bf16", num_steps=2)
    assert main(["export", str(path), str(tmp_path / "alone")]) == 0
    alone = load_file(tmp_path / "alone" / "model.safetensors")
    assert exported.keys() == alone.keys() and all(torch.equal(alone[name], value) for name, value in exported.items())


@pytest.mark.parametrize(
    "instant",
    ["before the first key", "before the catalog", "before the confirmation"],
)
def test_a_kill_in_the_switch_loses_nothing(
    instant: str, ranks: Ranks, warm_python: WarmPython, tmp_path: Path
) -> None:
    options = {"model": "odd_sizes", "dtype": "bf16", "num_steps": 2}
    before = run(ranks, 2, tmp_path, **options)
    with StartedRanks(3, warm_python.executable, limit_s=240.0) as killed:
        killed.start("commit_each_step", world=3, path=str(tmp_path), killed=2, instant=instant, switch=True, **options)
        assert killed.wait_for(2) == -signal.SIGKILL
        for rank in range(2):
            killed._last_line(rank)
    if instant != "before the confirmation":
        found = run(ranks, 2, tmp_path, **options)
        assert [each["first"] for each in found] == [2, 2] and found[0]["digests"] == before[0]["digests"]
    found = run(ranks, 3, tmp_path, **options)
    assert [each["first"] for each in found] == [2] * 3 and found[0]["digests"] == before[0]["digests"]


@needs("faulty file system")
def test_a_crash_at_a_change_of_a_switch_or_an_opening_leaves_one_generation(ranks: Ranks) -> None:
    """A sample: `bench/soak.py --campaign switch` has all changes, kills of one rank, a commit, gc."""
    with room() as made:
        rig = Rig(made, made.daemon("recorded"), ranks)
        switch = CrashStates.of(rig, ACTIONS["1 to 2"])
        opening = discarding(rig, 2, after=switch)
        for states in (switch, opening):
            states.kill_all(len(states.changes) // 4, goes_on=False)
            states.cut_power(len(states.changes) - 8, "subset", goes_on=False)
        switch.kill_all(2 * len(switch.changes) // 3)
        assert (switch.num_opened, opening.num_opened) == (3, 2)
        assert not switch.wrong + opening.wrong


def test_each_rank_finds_what_others_have_on_drives_of_their_own(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "nvme{local_rank}" / "run"
    before = run(ranks, 2, path, model="odd_sizes", num_steps=1)
    assert (tmp_path / "nvme1" / "run" / "rank-0001-of-0002").is_dir()
    for world in (1, 3, 1):
        found = run(ranks, world, path, model="odd_sizes", num_steps=1)
        assert {each["first"] for each in found} == {1} and found[0]["digests"] == before[0]["digests"]
    assert not (tmp_path / "nvme{local_rank}").exists()


def test_a_set_that_lacks_a_rank_is_no_reason_to_go_back(ranks: Ranks, tmp_path: Path) -> None:
    options = {"model": "odd_sizes", "num_steps": 2}
    run(ranks, 2, tmp_path, **options)
    run(ranks, 3, tmp_path, **options)
    run(ranks, 3, tmp_path, model="odd_sizes", num_steps=3)
    shutil.move(tmp_path / "rank-0001-of-0003", tmp_path / "moved")
    with pytest.raises(CorruptionError, match=r"3 ranks, without 1, generation 2.*restore what is missing"):
        tiered.Store(tmp_path, dram="32MiB")
    shutil.move(tmp_path / "moved", tmp_path / "rank-0001-of-0003")
    found = run(ranks, 1, tmp_path, model="odd_sizes", num_steps=3)
    assert found[0]["first"] == 3


def test_nobody_writes_to_the_old_set_before_the_switch_is_durable(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it came to have meanwhile would be superseded with it."""
    run(ranks, 2, tmp_path, model="odd_sizes", num_steps=1)
    old, real = tmp_path / "rank-0001-of-0002", Generations.take_over

    def take_over(generations: Generations, text: str) -> None:
        with pytest.raises(UsageError, match="is open in process"):
            Lock(old, shared=False)
        real(generations, text)
        with pytest.raises(UsageError, match="is open in process"):
            Lock(old, shared=False)

    monkeypatch.setattr(Generations, "take_over", take_over)
    with tiered.Store(tmp_path, dram="32MiB") as store:
        assert store.state["step"] == 1
        Lock(old, shared=False).release()


def test_two_sets_that_do_not_fit_are_refused_before_a_byte(ranks: Ranks, tmp_path: Path) -> None:
    run(ranks, 2, tmp_path, model="odd_sizes", num_steps=1)
    whole = os.statvfs(tmp_path)
    full = os.statvfs_result([whole.f_bsize, whole.f_frsize, whole.f_blocks, 9, 9, *list(whole)[5:]])
    with (
        mock.patch("os.statvfs", return_value=full),
        pytest.raises(CapacityError, match=r"has 36.0 KiB \(36,864 bytes"),
    ):
        tiered.Store(tmp_path, dram="32MiB")
    assert not list((tmp_path / "rank-0000-of-0001").glob("data-*")) or not contents(tmp_path)["rank-0000-of-0001"]
    assert [each["first"] for each in run(ranks, 2, tmp_path, model="odd_sizes", num_steps=1)] == [1, 1]


def test_keys_of_the_callers_own_stay_with_their_rank(ranks: Ranks, tmp_path: Path) -> None:
    with tiered.Store(tmp_path, dram="16MiB") as store:
        store["table"] = torch.arange(5000.0)
        store.put("rows", torch.ones(4096), block_size=4096)
        store.commit({"step": 4})
    found = ranks.run("open_with", world=2, path=str(tmp_path))[:2]
    assert found == ["generation 2"] * 2, "that of the switch, and that of the close"
    with tiered.Store(tmp_path / "rank-0000-of-0002", dram="16MiB", mode="r") as store:
        assert torch.equal(store["table"], torch.arange(5000.0)) and store["rows"].sum() == 4096
        assert store.state == {"step": 4}
    with pytest.raises(UsageError, match=r"keys of the caller's own that no rank would have.*'x' of rank 1"):
        tiered.Store(tmp_path, dram="32MiB")
    assert ranks.run("open_with", world=2, path=str(tmp_path))[:2] == ["generation 3"] * 2


def test_adapters_and_their_state_go_along(ranks: Ranks, tmp_path: Path) -> None:
    before = ranks.run("carry_adapters", world=2, path=str(tmp_path), num_steps=2)[:2]
    for world in (3, 1):
        found = ranks.run("carry_adapters", world=world, path=str(tmp_path), num_steps=2)[:world]
        assert found == before[:1] * world and found[0][1] == 2
    ((trained, step),) = ranks.run("carry_adapters", world=1, path=str(tmp_path), num_steps=3)[:1]
    assert step == 3 and trained != before[0][0]


def test_the_set_that_counts_follows_from_what_is_on_the_drives() -> None:
    """Of each state that a switch of 2 to 3 ranks can leave: the new set counts where all its ranks have its first."""
    before, newest = GenerationName(4, 40), GenerationName(5, 50)
    stores = (Path("a"),)
    origin = RankSet(b"o" * 16, 2, (), (Path("a"),), (stores, stores), ((newest, before),) * 2, is_alone=False)
    empty, first = GenerationName(0, 0), GenerationName(1, 7)
    states = {"missing": ((), ()), "empty": (stores, (empty,)), "first": (stores, (first, empty))}
    for ranks in itertools.product(states, repeat=3):
        places, kept = zip(*(states[each] for each in ranks), strict=True)
        new = RankSet(b"n" * 16, 3, (origin.run,), (Path("a"),), places, kept, is_alone=False)
        chosen = newest_of([origin, new])
        assert chosen is (new if set(ranks) == {"first"} else origin), ranks
        if set(ranks) != {"first"}:
            assert newest_of([new, origin]) is origin
    second = RankSet(b"n" * 16, 3, (origin.run,), (Path("a"),), ((), stores, stores),
                     ((), *[(GenerationName(2, 8), first)] * 2), is_alone=False)  # fmt: skip
    with pytest.raises(CorruptionError, match="without 0"):
        newest_of([origin, second])
    with pytest.raises(CorruptionError, match="do not belong together"):
        newest_of([origin, origin._replace(run=b"x" * 16)])

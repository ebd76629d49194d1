"""Groups and comms: the right bytes, no memory beyond the buffers, and nothing on the caller's group."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import tiered
from tests.ranks import room  # noqa: F401  # its cases
from tests.ranks.delayed import Module
from tests.ranks.processes import Ranks, run_once
from tiered.errors import UsageError
from tiered.ranks.comm import DeviceComm
from tiered.ranks.group import Group, NullGroup
from tiered.ranks.watch import _Message


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("nbytes", [12, 12 << 16])
def test_gathers_and_exchanges_have_the_right_bytes(world: int, nbytes: int, ranks: Ranks) -> None:
    for seen in ranks.run("move_patterns", world=world, nbytes=nbytes)[:world]:
        assert seen == dict.fromkeys(("gather", "exchange"), True)


def test_gathers_and_exchanges_allocate_nothing_beyond_their_buffers(ranks: Ranks) -> None:
    for seen in ranks.run("allocate", nbytes=64 << 20, num_pairs=1):
        assert seen["extra"]["gather"] <= 1, seen
        assert seen["extra"]["exchange"] <= 1, seen
        assert seen["extra"]["torch's gather"] >= 48, seen  # the measure sees it: gloo's own has the others' pieces


def test_groups_are_made_of_parts_and_of_meshes_of_one_dimension() -> None:
    for rank, seen in enumerate(run_once(4, "join_parts")):
        everyone = [rank, 4, rank, 4, ["0", "1", "2", "3"]]
        first = rank // 2 * 2
        pair = [rank % 2, 2, rank % 2, 2, [str(first), str(first + 1)]]
        assert seen["plane"].startswith("a DeviceMesh of 2 dimensions ('dp', 'tp')")
        assert {name: seen[name] for name in ("default", "part", "mesh", "row")} == {
            "default": everyone, "part": pair, "mesh": everyone, "row": pair,
        }  # fmt: skip


def test_phases_raise_one_error_on_all_ranks(ranks: Ranks) -> None:
    (first, *others) = ranks.run("agree_on_failures", failing=[1, 3])
    assert all(other == first for other in others)
    assert first[0] == "ValueError: shard failed on 2 of the ranks: rank 1: no such width; rank 3: no such width"
    assert first[2].startswith("TieredError: shard failed on 2 of the ranks: rank 1: OSError: a drive;")
    assert first[3].startswith("UsageError: shard failed on 2 of the ranks: rank 1: ééé")
    assert first[4] == f"dram= failed on 4 of the ranks: {'; '.join(f'rank {n}: too little' for n in range(4))}"


def test_ranks_go_on_with_a_new_group_after_an_error(ranks: Ranks) -> None:
    for seen in ranks.run("go_on_after_a_departure"):
        assert "rank 1 agreement on phase of rank 1 with 512 bytes told; rank 2 agreement on phase with" in seen[0]
        assert seen[1] == "0 1 2 3"


def test_a_group_without_a_device_for_the_cpu_is_left_alone(tmp_path: Path) -> None:
    arguments = {"store": str(tmp_path / "again")}
    for seen in run_once(2, "live_beside_a_group_without_the_cpu", **arguments):
        assert "No backend type associated with device type cpu" in seen["refused"]
        assert seen["told"] == ["0", "1"]
        assert seen["moved"] == {"gather": True, "exchange": True}


def test_a_rank_that_opens_no_group_is_named() -> None:
    assert run_once(2, "come_alone")[0].startswith("1: rank 1 did not come to open its group within 0.3 s")


def test_one_rank_has_a_group_of_none() -> None:
    for process_group in (None, False):
        group = Group.of(process_group)
        assert isinstance(group, NullGroup)
        assert (group.rank, group.world, group.local_rank, group.local_world) == (0, 1, 0, 1)
    with pytest.raises(UsageError, match=r"expected init_process_group"):
        Group.of(object())


@pytest.mark.parametrize("form", ["gather", "exchange"])
@pytest.mark.parametrize("mutant", ["", "no wait", "no fence"])
def test_a_collective_of_a_device_is_over_when_its_stream_has_it(
    form: str, mutant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = torch.full((8,), 7, dtype=torch.uint8)
    module = Module(theirs)
    if mutant == "no wait":  # the event is recorded in a stream that has not waited for the work
        copy = module._copy
        silent = type("Work", (), {"wait": lambda work: None})
        monkeypatch.setattr(module, "_copy", lambda *tensors: (copy(*tensors), silent())[1])
    group = type("Ranks", (), {"rank": 0, "world": 2})()
    comm = DeviceComm(cast(Any, group), None, torch.device("cpu"), module=module, collectives=module)
    send, whole = torch.zeros(16, dtype=torch.uint8), torch.zeros(16, dtype=torch.uint8)
    made = whole if form == "gather" else send
    module.compute.work.append(lambda: made[:8].fill_(5))  # the compute stream makes the own bytes, late
    fence = comm.fence() if mutant != "no fence" else None  # the collective waits for nobody's bytes
    moving = comm.gather(whole, fence) if form == "gather" else comm.exchange(send, whole, after=fence)
    assert not whole.any()
    assert moving.wait(10.0)
    assert (whole.tolist() == [5] * 8 + [7] * 8) is not bool(mutant)
    assert module.compute.num_done == (mutant != "no fence")  # the compute stream itself waited for nothing


def test_messages_of_the_watch_are_cut_between_letters() -> None:
    message = _Message(3, 2, 9, "é" * 400)
    there = _Message.unpacked(message.packed())
    assert (there.word, there.rank, there.number) == (3, 2, 9)
    assert set(there.text) == {"é"} and 240 < len(there.text) < 260


@pytest.mark.parametrize("value", [0, -1.5, float("nan"), float("inf"), "60", True])
def test_a_deadline_for_ranks_is_a_number_of_seconds(value: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError if value in ("60", True) else ValueError, match="rank_deadline"):
        tiered.Store(tmp_path / "store", dram="16MiB", rank_deadline=value)
    assert not list(tmp_path.iterdir())
    with tiered.Store(tmp_path / "store", dram="16MiB", rank_deadline=30) as store:
        assert store.rank_deadline == 30.0


def test_the_error_of_a_lost_rank_is_public_and_has_its_number_and_place() -> None:
    error = tiered.RankLostError("rank 3 is gone", rank=3, place="gather of u2")
    assert (error.rank, error.place) == (3, "gather of u2")
    assert isinstance(error, tiered.DeviceError) and not isinstance(error, tiered.DeadlineError)


@pytest.mark.parametrize("what", ["control", "watch"])
def test_a_rank_that_dies_as_the_groups_connect_is_an_error_in_time(what: str) -> None:
    with Ranks(2) as ranks:
        ranks.start("connect_beside_a_death", what=what, deadline_s=1.0)
        assert ranks.wait_for(1) == 9
        seen = ranks.result(0)
        assert f"could not connect the {what} group within 3 s" in seen["text"] and seen["after_s"] < 30


def test_ranks_that_tell_nothing_for_long_are_not_missed() -> None:
    assert run_once(2, "stay_quiet", connect_s=2.0) == [["0", "1"]] * 2

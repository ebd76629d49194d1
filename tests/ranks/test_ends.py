"""The end of a rank is known to the others in a second, and ends them in an orderly way."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.ranks import ends  # noqa: F401  # its cases
from tests.ranks.processes import Ranks, run_once
from tests.rigs.warm_python import WarmPython

WITHIN_S = 15.0  # beside a load of 12; bench/ranks.py has the second


@pytest.mark.parametrize("seed", range(12))
def test_a_kill_is_named_on_every_survivor_and_ends_it_with_75(seed: int) -> None:
    draw = random.Random(seed)
    world, victim = draw.choice([2, 3, 4]), 0
    with Ranks(world) as ranks:
        ranks.start("work_until_the_end", nbytes=12 << draw.choice([6, 10, 16]), deadline_s=60.0)
        for rank in range(world):
            assert "began" in ranks.line(rank)
        victim = draw.randrange(world)
        time.sleep(draw.random() * 0.2)  # the instant is the point, whatever it meets
        os.kill(ranks.pids[victim], signal.SIGKILL)
        killed_at = time.monotonic()
        for rank in set(range(world)) - {victim}:
            line = ranks.line(rank)
            assert line["error"] == "RankLostError" and line["rank"] == victim, line
            assert f"rank {victim}" in line["text"]
            assert line["at"] - killed_at < WITHIN_S
            assert ranks.wait_for(rank) == 75
        assert ranks.wait_for(victim) == -signal.SIGKILL


@pytest.mark.parametrize("kind", ["gather", "exchange"])
@pytest.mark.parametrize("is_careless", [False, True], ids=["", "mutant"])
def test_no_byte_of_a_stopped_rank_meets_memory_in_use(kind: str, is_careless: bool) -> None:
    world = 3
    with Ranks(world) as ranks:
        ranks.start("meet_a_stopped_rank", is_careless=is_careless, kind=kind)
        for rank in range(world - 1):
            seen = ranks.result(rank)
            assert seen["rank"] == world - 1, seen
            assert seen["is_quarantined"] is not is_careless
            assert "collective 1" in seen["error"] and "did not come" in seen["error"] + "did not come" * rank
        os.kill(ranks.pids[world - 1], signal.SIGCONT)
        ranks.result(world - 1)
        seen = ranks.run("look_at_memory", is_careless=is_careless)
        changed = [each["changed"] for each in seen[: world - 1]]
        assert all(changed) if is_careless else not any(changed)
        assert is_careless or all(each["came"] for each in seen[: world - 1])


@pytest.mark.parametrize("has_store", [False, True])
def test_an_interrupt_leaves_the_wait_and_the_collective_goes_on(
    has_store: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIERED_TEST_GO", str(tmp_path / "go"))
    with Ranks(2) as ranks:
        ranks.start("wait_for_another", has_store=has_store)
        pid = ranks.line(0)["waits"]
        sent_at = time.monotonic()
        os.kill(pid, signal.SIGINT)
        assert ranks.line(0) == {"left": True}
        (tmp_path / "go").touch()
        found = ranks.result(0)
        assert found["at"] - sent_at < WITHIN_S
        assert (found["frees"], found["frees later"]) == (False, True)
        ranks.result(1)


def test_sigterm_after_a_death_ends_at_once_and_before_it_runs_the_programs_action() -> None:
    with Ranks(3) as ranks:
        ranks.start("die_before_sigterm")
        assert ranks.line(0) == {"knows": 0}
        os.kill(ranks.pids[0], signal.SIGTERM)
        assert ranks.wait_for(0) == 75
        assert ranks.wait_for(1) == 3
    with Ranks(2) as ranks:
        ranks.start("work_until_the_end", nbytes=12 << 10, deadline_s=60.0)
        assert "began" in ranks.line(0)
        os.kill(ranks.pids[0], signal.SIGTERM)  # without an action of the program's it ends as ever
        assert ranks.wait_for(0) == -signal.SIGTERM
        assert ranks.line(1) is not None


SCRIPT = """
import logging, os, sys, torch, torch.distributed as dist
from tiered.ranks.comm import GlooComm
from tiered.ranks.comm_thread import CommThread
from tiered.ranks.group import Group
from tiered.ranks.watch import Watch
rank, path, how = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=2)
group = Group.of(None, deadline_s=60)
thread = CommThread(GlooComm(group), Watch(group), deadline_s=60)
whole = torch.zeros(1024, dtype=torch.uint8)
thread.gather("u0", whole).wait()
if rank == 1:
    if how == "fails": raise ValueError("a user's own")
    if how == "dies": os._exit(9)
if how in ("fails", "dies"): thread.gather("u1", whole).wait()
if how == "leaves one": thread.gather("u2", whole)  # as a prefetch that no step waits for
if how == "destroys": dist.destroy_process_group()
if how == "catches" and rank == 1: thread.close()
if how == "catches" and rank == 0:
    try: thread.gather("u1", whole).wait()
    except Exception as error: print("caught", error, file=sys.stderr)
print("good end", file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("how", "statuses", "says"),
    [
        ("ends", (0, 0), "good end"),
        ("leaves one", (0, 0), "good end"),
        ("destroys", (0, 0), "good end"),
        ("fails", (75, 1), "rank 1 has abandoned the step: ValueError: a user's own"),
        ("dies", (75, 9), "rank 1 is gone"),
        ("catches", (75, 0), "caught rank 1 has ended its script"),
    ],
)
def test_a_script_ends_by_itself_and_by_no_signal(
    how: str, statuses: tuple[int, int], says: str, tmp_path: Path, warm_python: WarmPython
) -> None:
    commands = [[warm_python.executable, "-c", SCRIPT, str(rank), str(tmp_path / "store"), how] for rank in (0, 1)]
    root = Path(__file__).parents[2]
    running = [subprocess.Popen(command, cwd=root, stderr=subprocess.PIPE, text=True) for command in commands]
    errors = [process.communicate(timeout=60)[1] for process in running]
    assert tuple(process.returncode for process in running) == statuses, errors
    assert says in errors[0], errors


def test_nothing_is_left_of_ranks_that_have_closed() -> None:
    """The action of SIGTERM keeps no watch, nor the groups and threads that it refers to."""
    assert run_once(2, "open_and_close", num=3) == [0, 0]

"""`tiered train` over two ranks: one plan, one voice, one end; kills and resumes to the bits."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import tiered
from tests.rigs.warm_python import WarmPython
from tiered.errors import CapacityError, TieredError, UsageError
from tiered.tools.train.config import RunConfig, RunDials
from tiered.tools.train.launch import Launch
from tiered.tools.train.plan import Plan, check_room
from tiered.units import parse_bytes

ROOT = Path(__file__).parents[2]
TINY = ("--layers", "2", "--width", "64", "--heads", "4", "--context", "32", "--dram", "64MiB", "--quiet")
LIMIT_S = 120


class Command:
    """`tiered train` in a folder, on ranks of its own or of torchrun's, forked from a warm Python."""

    def __init__(self, folder: Path, python: WarmPython) -> None:
        self.folder, self._python = folder, python
        self.text = folder / "text.txt"
        self.text.write_bytes(b"one word, one meaning; " * 1300)

    def words(self, *options: str, store: str = "run", sizes: tuple[str, ...] = TINY) -> list[str]:
        data = () if "--resume" in options else ("--data", str(self.text))
        return ["-m", "tiered", "train", "--store", str(self.folder / store), *data, *sizes, *options]

    def start(self, words: list[list[str]], **streams: Any) -> list[subprocess.Popen[str]]:
        """Start a rank for each of ``words``; rank 0 alone gets ``streams``."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        return [
            subprocess.Popen(
                [self._python.executable, *each], cwd=ROOT, text=True, stderr=subprocess.PIPE,
                env=os.environ | {
                    "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(len(words)),
                    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                },
                **{"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, **(streams if not rank else {})},
            )
            for rank, each in enumerate(words)
        ]  # fmt: skip

    def run(self, *options: str, **how: Any) -> list[tuple[int, str, str]]:
        """Return the status and the output of each of two ranks."""
        return ended(self.start([self.words(*options, **how)] * 2))

    def digests(self, store: str) -> list[str]:
        return [digest(self.folder / store / f"rank-000{rank}-of-0002") for rank in range(2)]


def ended(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    with ThreadPoolExecutor() as pool:
        said = list(pool.map(lambda each: each.communicate(timeout=LIMIT_S), processes))
    return [(each.returncode, out or "", err) for each, (out, err) in zip(processes, said, strict=True)]


def digest(directory: Path) -> str:
    """Return a digest of all committed tensors of one rank's store, and of the step that they are of."""
    found = sha256()
    with tiered.Store(directory, dram="16MiB", mode="r", process_group=False) as store:
        for name in sorted(store):
            found.update(name.encode() + store[name].view(-1).contiguous().numpy().tobytes())
        return f"{store.state['step']} {found.hexdigest()}"


@pytest.fixture
def command(tmp_path: Path, warm_python: WarmPython) -> Command:
    return Command(tmp_path, warm_python)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, warm_python: WarmPython) -> tuple[Command, Any]:
    """A run of 12 steps that nothing has disturbed, with what it said."""
    command = Command(tmp_path_factory.mktemp("whole"), warm_python)
    figures = ("--json", str(command.folder / "run.json"))
    return command, command.run("--steps", "12", *figures, sizes=TINY[:-1])


def test_two_ranks_have_one_plan_and_one_voice(whole: tuple[Command, Any]) -> None:
    command, ((status, out, err), other) = whole
    assert (status, err) == (0, "")
    assert other == (0, "", ""), "rank 1 says nothing"
    said = " ".join(out.split())
    assert "12 steps from the start, each of 256 tokens on 2 ranks; lr" in said
    assert "a DRAM budget of 64.0 MiB, 32.0 MiB for each of the 2 ranks here" in said
    assert "for each rank (two sets of 12 bytes per parameter of its own)" in said
    assert "step 12/12" in out
    assert re.search(r"ranks 2; the slowest is rank [01], with [\d.]+ s of its own per step and", said)
    assert f"go on torchrun --nproc-per-node 2 -m tiered train --resume --steps 24 --store {command.folder}" in said
    found = json.loads((command.folder / "run.json").read_text())
    assert found["steps"] == list(range(1, 13)) and found["losses"][-1] < found["losses"][0] - 0.5
    assert len(found["ranks"]) == 2 and found["dram_budget_bytes"] == 32 << 20
    written = re.search(r"writes up to ([\d.]+ \w+) in all for each rank", said)
    assert written is not None and 0.3 * parse_bytes(written[1]) < found["bytes_written"] <= parse_bytes(written[1])
    first, second = command.digests("run")
    assert first != second and first.startswith("12 ")


def test_a_resumed_run_of_two_ranks_has_the_bits_of_the_undisturbed_one(
    whole: tuple[Command, Any], command: Command
) -> None:
    assert [each[0] for each in command.run("--steps", "5")] == [0, 0]
    (status, out, err), other = command.run("--resume", "--steps", "12", sizes=())
    assert (status, err, other) == (0, "", (0, "", "")) and "step 6/12" in out
    assert command.digests("run") == whole[0].digests("run")
    for world, steps in ((1, 13), (3, 14)):
        (status, out, err), *_ = ended(
            command.start([command.words("--resume", "--steps", str(steps), sizes=())] * world)
        )
        assert status == 0 and f"is carried over to {world}:" in err and f"step {steps}/{steps}" in out
        assert f"ranks   carried over from {2 if world == 1 else 1} to {world}: tiered gc removes the old set" in out
    (status, _, err), *_ = command.run("--fresh", "--yes", "--steps", "2")
    assert status == 2 and "holds a run of 3 ranks" in err


def test_torchrun_starts_a_killed_rank_again_and_the_run_goes_on_by_itself(
    whole: tuple[Command, Any], command: Command, warm_python: WarmPython
) -> None:
    """With its default rendezvous, whose store has the addresses of the ended processes."""
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1", "--no-python"]
    job = [warm_python.executable, *command.words("--steps", "12", sizes=TINY[:-1])]
    with subprocess.Popen(
        [warm_python.executable, *torchrun, *job], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        with ThreadPoolExecutor() as pool:
            errors = pool.submit(process.stderr.read)
            for line in process.stdout:
                if line.startswith("step 3/"):
                    (pid,) = ranks_of(command.folder, "1")
                    os.kill(pid, signal.SIGKILL)
                    break
            said = process.stdout.read()
            assert process.wait(LIMIT_S) == 0, errors.result()
    (again,) = re.findall(r"job +\d+ steps from step (\d+),", said)
    assert 1 <= int(again) < 12, "the second life goes on, at most with the commit before the one under way"
    assert "going on with the model" in said
    assert command.digests("run") == whole[0].digests("run")


def ranks_of(folder: Path, rank: str) -> Iterator[int]:
    """Yield the processes that torchrun has started as ``rank`` of the run in ``folder``."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            is_of_run = entry.name.isdecimal() and str(folder).encode() in (entry / "cmdline").read_bytes()
            if is_of_run and f"RANK={rank}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                yield int(entry.name)


def test_a_refusal_on_one_rank_is_one_on_all(command: Command) -> None:
    words = command.words("--steps", "1")
    nowhere = [each if each != str(command.text) else "/nowhere/at/all" for each in words]
    for status, out, err in ended(command.start([words, nowhere])):
        assert (status, out) == (2, "")
        assert err.startswith("tiered: rank 1: no data at /nowhere/at/all") and err.count("\n") == 1
    assert not (command.folder / "run").exists()


def test_a_signal_to_one_rank_stops_all_after_the_same_step_and_rank_0_asks_for_all(command: Command) -> None:
    ranks = command.start([command.words("--steps", "100000", sizes=TINY[:-1])] * 2)
    assert ranks[0].stdout is not None
    while not (line := ranks[0].stdout.readline()).startswith("step 2/"):
        assert line, ranks[0].communicate()
    ranks[1].send_signal(signal.SIGINT)
    (status, out, err), other = ended(ranks)
    assert (status, err, other) == (130, "", (130, "", ""))
    stopped = re.search(r"stopped by Ctrl-C; the run is resumable from step (\d+): torchrun", out)
    assert stopped is not None
    before = command.digests("run")
    assert [each.split()[0] for each in before] == [stopped[1]] * 2
    (status, _, err), other = answered("n", command)
    assert status == 2 and "for good?" in err and "nothing was removed" in err
    assert other == (2, "", "") and command.digests("run") == before
    (status, _, err), other = answered("y", command)
    assert (status, other) == (0, (0, "", ""))
    assert [each.split()[0] for each in command.digests("run")] == ["1", "1"]


def answered(answer: str, command: Command) -> list[tuple[int, str, str]]:
    """Begin the run anew, with a terminal for rank 0 alone on which ``answer`` is typed."""
    ours, theirs = pty.openpty()
    try:
        ranks = command.start([command.words("--steps", "1", "--fresh")] * 2, stdin=theirs, stdout=theirs)
        os.write(ours, f"{answer}\n".encode())
        return ended(ranks)
    finally:
        os.close(ours)
        os.close(theirs)


class TestLaunch:
    """The processes before there is a store."""

    @staticmethod
    def together(*parts: Any) -> list[Any]:
        """Return what ``Launch.together`` returns or raises on each of some ranks, which are threads here."""
        store = dist.HashStore()

        def on_rank(rank: int) -> Any:
            try:
                return Launch(rank, len(parts), store=store).together("a part", parts[rank])
            except Exception as error:
                return error

        with ThreadPoolExecutor() as pool:
            return list(pool.map(on_rank, range(len(parts))))

    def test_each_rank_hears_what_all_have_to_say(self) -> None:
        assert self.together(lambda: 1, lambda: [2]) == [[1, [2]]] * 2

    def test_an_error_is_raised_on_all(self) -> None:
        def refuse(error: Exception) -> Any:
            raise error

        for error in self.together(lambda: 1, lambda: refuse(CapacityError("full")), lambda: 3):
            assert type(error) is CapacityError and str(error) == "rank 1: full"
        for error in self.together(*[lambda: refuse(UsageError("no"))] * 2):
            assert type(error) is UsageError and str(error) == "no", "what all of them refuse has no rank"
        for error in self.together(lambda: 1, lambda: refuse(FileNotFoundError(2, "No such file", "x"))):
            assert type(error) is TieredError and "No such file" in str(error)

    def test_commands_that_differ_are_refused_by_what_differs(self) -> None:
        with pytest.raises(UsageError, match="ranks 0 and 1 differ: seed 0 and 3; expected the same command"):
            Launch().check_equal([{"seed": 0, "steps": 5}, {"seed": 3, "steps": 5}], "the same command on all ranks")

    @pytest.mark.parametrize(
        ("variables", "says"),
        [
            ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two'"),
            ({"WORLD_SIZE": "2"}, "RANK is ''"),
            ({"WORLD_SIZE": "2", "RANK": "2", "MASTER_ADDR": "here"}, "RANK 2"),
            ({"WORLD_SIZE": "2", "RANK": "1"}, "expected what torchrun sets"),
            ({"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "here"}, "MASTER_PORT is ''"),
        ],
    )
    def test_variables_that_do_not_go_together_are_refused(self, variables: dict[str, str], says: str) -> None:
        with pytest.raises(UsageError, match=says):
            Launch.begin(variables)

    def test_one_process_is_alone(self) -> None:
        launch = Launch.begin({"WORLD_SIZE": "1", "RANK": "0", "TORCHELASTIC_RESTART_COUNT": "3"})
        assert (launch.world, launch.num_restarts, launch.program) == (1, 3, "")
        assert launch.together("a part", lambda: (1, 2)) == [(1, 2)]


class TestPlan:
    """The arithmetic is that of one rank."""

    def plan(self, world: int, **given: Any) -> Plan:
        config = RunConfig.of_given({"world": world, **given})
        return Plan(config, RunDials(dram=1 << 30), (), durable=True, first_step=0, local_world=2)

    def test_a_rank_has_its_part_of_the_bytes(self) -> None:
        one, four = self.plan(1), self.plan(4)
        assert four.config.tokens_per_step == 4 * one.config.tokens_per_step
        assert four.step_flop == one.step_flop
        assert four.space_nbytes == one.space_nbytes // 4
        assert (one.rank_dram, four.rank_dram) == (1 << 30, 1 << 29)
        for given, share in (({"clip": 1.0}, 4), ({"accumulate": 2, "update": "backward"}, 1)):
            assert self.plan(4, **given).gradient_nbytes == self.plan(1, **given).gradient_nbytes // share

    def test_a_budget_too_small_for_each_rank_is_refused(self) -> None:
        self.plan(4).check_budget()
        small = replace(self.plan(4), dials=RunDials(dram=256 << 20))
        with pytest.raises(CapacityError, match=r"budget 134217728 bytes .* for each of the 2 ranks here"):
            small.check_budget()

    def test_the_space_of_ranks_on_one_drive_adds_up(self) -> None:
        check_room([("a", 1, 5, 9, "one"), ("b", 1, 5, 9, "two")])
        with pytest.raises(CapacityError, match="in one, two: it needs 10 B, 9 B are free"):
            check_room([("a", 1, 5, 9, "one"), ("a", 1, 5, 9, "two")])

    def test_a_run_of_another_number_of_ranks_is_of_theirs_and_an_old_one_is_of_one(self) -> None:
        committed = {"layers": 1, "width": 8, "heads": 1, "context": 8, "batch": 4, "lr": 1e-3, "clip": None}
        committed |= {"accumulate": 1, "dtype": "fp32", "update": "step", "state": "exact", "seed": 0}
        assert RunConfig.of_committed(committed, {"world": 1}).world == 1
        assert RunConfig.of_committed(committed, {"world": 2}).world == 2

"""Rank processes: forked from the tests' process, which has run one case itself, with gloo between them.

Each serves cases, functions of ``Here``, until it is told to end; results come back as JSON through pipes. The parent
kills by pid what does not answer within its own limit.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tiered.ranks.agreement import Agreement
from tiered.ranks.comm import GlooComm
from tiered.ranks.comm_thread import CommThread
from tiered.ranks.group import Group
from tiered.ranks.watch import Watch

__all__ = ["CASES", "LIMIT_S", "Here", "Ranks", "StartedRanks", "case", "run_once"]

_ROOT = Path(__file__).parents[2]

LIMIT_S = 60.0  # of one case, on a machine with a load of 12
CASES: dict[str, Callable[..., Any]] = {}


def case(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have rank processes know ``function`` by its name; each returns what JSON can say."""
    CASES[function.__name__] = function
    return function


@dataclass
class Here:
    """A rank in its process: the room's objects, made over the first ``world`` ranks of the set."""

    group: Group
    watch: Watch
    thread: CommThread
    agreement: Agreement
    send: Callable[[Any], None]  # a line to the parent before the result

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def world(self) -> int:
        return self.group.world

    @classmethod
    def open(cls, process_group: Any, deadline_s: float, send: Callable[[Any], None], **classes: Any) -> Here:
        group = Group.of(process_group, deadline_s=deadline_s)
        assert isinstance(group, Group)
        watch = classes.get("watch", Watch)(group)
        thread = classes.get("thread", CommThread)(GlooComm(group), watch, deadline_s=deadline_s)
        thread.end_first_step()
        return cls(group, watch, thread, Agreement(thread), send)


class Ranks:
    """``world`` forked processes with a default gloo group; ``with`` ends them."""

    def __init__(self, world: int, *, limit_s: float = LIMIT_S) -> None:
        _warm_up()
        self.world = world
        self.limit_s = limit_s
        self._directory = tempfile.TemporaryDirectory(prefix="tiered-")
        self.pids: list[int] = []
        self.statuses: dict[int, int] = {}  # rank -> exit code
        self._to: list[int] = []
        self._from: list[int] = []
        self._rest: list[bytes] = []
        for rank in range(world):
            there, to = os.pipe()
            back, out = os.pipe()
            sys.stdout.flush()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Python 3.12 warns of forks beside threads
                pid = os.fork()
            if pid == 0:
                for end in (to, back, *self._to, *self._from):
                    os.close(end)
                _serve(rank, world, str(Path(self._directory.name, "store")), there, out)
            os.close(there)
            os.close(out)
            self.pids.append(pid)
            self._to.append(to)
            self._from.append(back)
            self._rest.append(b"")

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        for rank, pid in enumerate(self.pids):
            with suppress(OSError):
                os.write(self._to[rank], b"end\n")
            if rank not in self.statuses:
                self._end(rank, pid)
        for end in (*self._to, *self._from):
            os.close(end)
        self._directory.cleanup()

    def _end(self, rank: int, pid: int) -> None:
        if self.wait_for(rank, 20.0) is None:
            os.kill(pid, signal.SIGCONT)
            os.kill(pid, signal.SIGKILL)
            self.wait_for(rank, 20.0)

    def start(self, name: str, **arguments: Any) -> None:
        """Have all ranks run the case ``name``."""
        for rank in range(self.world):
            os.write(self._to[rank], (json.dumps([name, arguments]) + "\n").encode())

    def line(self, rank: int, limit_s: float | None = None) -> Any:
        """Return the next line of ``rank``; None where its process has ended. Kills all and fails at the limit."""
        end = time.monotonic() + (self.limit_s if limit_s is None else limit_s)
        while b"\n" not in self._rest[rank]:
            ready, _, _ = select.select([self._from[rank]], [], [], max(end - time.monotonic(), 0))
            if not ready:
                for pid in self.pids:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                raise AssertionError(f"rank {rank} said nothing in time, after {self._rest[rank]!r}")
            read = os.read(self._from[rank], 1 << 16)
            if not read:
                return None
            self._rest[rank] += read
        line, _, self._rest[rank] = self._rest[rank].partition(b"\n")
        return json.loads(line)

    def run(self, name: str, **arguments: Any) -> list[Any]:
        """Return what the case ``name`` returned on each rank; raise what it raised."""
        self.start(name, **arguments)
        lines = [self._last_line(rank) for rank in range(self.world)]
        return [self._result(rank, line) for rank, line in enumerate(lines)]

    def result(self, rank: int) -> Any:
        """Return what the case returned on ``rank``; raise what it raised."""
        return self._result(rank, self._last_line(rank))

    def _last_line(self, rank: int) -> Any:
        while (line := self.line(rank)) is not None and "result" not in line and "raised" not in line:
            pass
        return line

    def _result(self, rank: int, line: Any) -> Any:
        assert line is not None, f"rank {rank} has ended"
        assert "raised" not in line, line["raised"]
        return line["result"]

    def wait_for(self, rank: int, limit_s: float = LIMIT_S) -> int | None:
        """Return the exit code of ``rank``, -N for signal N; None where it has not ended in time."""
        if rank not in self.statuses:
            pidfd = os.pidfd_open(self.pids[rank])
            try:
                if not select.select([pidfd], [], [], limit_s)[0]:
                    return None
                self.statuses[rank] = os.waitstatus_to_exitcode(os.waitpid(self.pids[rank], 0)[1])
            finally:
                os.close(pidfd)
        return self.statuses[rank]


class StartedRanks(Ranks):
    """Ranks that a Python of their own forks, for training: autograd's threads for devices survive no fork.

    ``python`` is the command that starts one, such as a WarmPython's; ``cases`` are modules of tests.ranks.
    """

    def __init__(
        self,
        world: int,
        python: str,
        *,
        limit_s: float,
        cases: tuple[str, ...] = ("commits", "constructed", "plain", "training"),
    ) -> None:
        self.world, self.limit_s = world, limit_s
        self._directory = tempfile.TemporaryDirectory(prefix="tiered-")
        self.statuses: dict[int, int] = {}
        command = [python, "-m", "tests.ranks.processes", str(world), str(Path(self._directory.name, "store"))]
        self._processes = [
            subprocess.Popen(
                [*command, str(rank), *cases], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=_ROOT, bufsize=0
            )
            for rank in range(world)
        ]
        self.pids = [process.pid for process in self._processes]
        self._to = [os.dup(process.stdin.fileno()) for process in self._processes if process.stdin]
        self._from = [os.dup(process.stdout.fileno()) for process in self._processes if process.stdout]
        self._rest = [b""] * world
        for process in self._processes:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.close()
            process.stdout.close()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        for rank, process in enumerate(self._processes):
            process.returncode = self.statuses.get(rank, -signal.SIGKILL)


@functools.cache
def _warm_up() -> None:
    """Run one case in this process, alone: lazy imports would cost each child its own."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    one = torch.zeros(8, dtype=torch.uint8)
    dist.broadcast(one, 0, async_op=True).wait(timedelta(seconds=5))
    dist.all_to_all_single(one.clone(), one)
    Group.of(None)
    dist.destroy_process_group()


def _serve(rank: int, world: int, store: str, requests: int, out: int) -> None:
    status = 70
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=60)
        )

        def send(line: Any) -> None:
            os.write(out, (json.dumps(line) + "\n").encode())

        with os.fdopen(requests) as lines:
            for line in lines:
                if line == "end\n":
                    break
                name, arguments = json.loads(line)
                try:
                    result = {"result": CASES[name](send, **arguments)}
                except Exception:
                    result = {"raised": traceback.format_exc()}
                send(result)
        status = 0
    except SystemExit as end:  # of a case that ends as a script does
        status = _as_interpreter(end.code)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _as_interpreter(code: object) -> int:
    """Do what the interpreter does at its end up to the last thread, and return the status."""
    threading._shutdown()  # type: ignore[attr-defined]  # the actions of tiered run here
    return code if isinstance(code, int) else 0


def _main() -> None:
    """Serve as one of StartedRanks: requests come on standard input, results go where standard output was."""
    from tests.ranks import processes  # as its name, and not as the program, it knows the cases

    for name in sys.argv[4:]:
        importlib.import_module(f"tests.ranks.{name}")
    world, store, rank = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    out = os.dup(1)
    os.dup2(2, 1)
    processes._serve(rank, world, store, 0, out)


def run_once(world: int, name: str, **arguments: Any) -> list[Any]:
    """Return the results of one case in a set of its own."""
    with Ranks(world) as ranks:
        return ranks.run(name, **arguments)


if __name__ == "__main__":
    _main()

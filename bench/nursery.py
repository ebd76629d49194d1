"""Children that run `tiered ARGV` and can be killed at a chosen instant of their life.

Children are forked from a nursery: a process that has imported torch and run nothing, because importing costs more
than the whole life of a child. A child reports its I/O calls, its commits and its losses through a pipe; the parent
kills it from outside a given time after a given report. Nothing else in the child is changed.
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Instant", "Life", "Nursery", "Report", "warm_up"]

_CALLS = ("mkdir", "open", "rename", "replace", "posix_fallocate", "preadv", "pwritev", "fsync", "fdatasync")


# -- in the child --------------------------------------------------------------------------------------------------


def _report(pipe: int, *words: object) -> None:
    os.write(pipe, (" ".join(map(str, words)) + "\n").encode())


def _reported(pipe: int, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        _report(pipe, "call", name)
        return function(*args, **kwargs)

    return call


def _instrument(pipe: int) -> None:
    """Report every I/O call before it is made, the opening of the store, and each commit's begin and end."""
    from tiered.store.catalog.sqlite_catalog import SqliteCatalog
    from tiered.store.store import Store
    from tiered.tools.train.run import TrainingLoop

    for name in _CALLS:
        setattr(os, name, _reported(pipe, name, getattr(os, name)))
    init, commit, apply, step = Store.__init__, Store.commit, SqliteCatalog.apply, TrainingLoop._step

    def reported_init(store: Any, *args: Any, **kwargs: Any) -> None:
        _report(pipe, "opening")
        init(store, *args, **kwargs)
        _report(pipe, "opened", store.generation)

    def reported_commit(store: Any, *args: Any, **kwargs: Any) -> Any:
        _report(pipe, "commit")
        result = commit(store, *args, **kwargs)
        _report(pipe, "sealed")
        return result

    def reported_apply(catalog: Any, root: Any, *args: Any, **kwargs: Any) -> None:
        _report(pipe, "applying", root.generation)
        apply(catalog, root, *args, **kwargs)
        _report(pipe, "durable", root.generation)

    def reported_step(job: Any, model: Any, optimizer: Any, number: int) -> float:
        loss = step(job, model, optimizer, number)
        _report(pipe, "loss", number, loss.hex())
        return loss

    TrainingLoop._step = reported_step  # type: ignore[method-assign]
    Store.__init__, Store.commit = reported_init, reported_commit  # type: ignore[assignment,method-assign]
    SqliteCatalog.apply = reported_apply  # type: ignore[method-assign]


def _run(is_simulated: bool) -> int:
    """Run the command line; where there is the simulated accelerator, a race is a failure, too."""
    import tiered.tools.cli

    if not is_simulated:
        return tiered.tools.cli.main()
    from tests.accelerator import simulated
    from tests.accelerator.registrar import SimulatedRegistrar
    from tiered.bytes.pinned_arena import add_registrar

    simulated.enable()
    add_registrar("sim", SimulatedRegistrar())
    status, races = tiered.tools.cli.main(), simulated.races()
    print(*races, sep="\n", file=sys.stderr)
    return status or min(len(races), 1)


def warm_up() -> None:
    """Do once what every child that runs ``tiered`` would do. It starts no thread: those would not survive a fork."""
    import torch

    import tiered.tools.cli
    import tiered.tools.train.run  # noqa: F401
    from tiered.zero.shard import stay_eager

    for late in ("torch._dynamo", "typer._adapters"):  # the first optimizer and the command line import them
        with suppress(ModuleNotFoundError):  # what is their own may move
            importlib.import_module(late)
    stay_eager(torch.nn.Module())  # the first sharded module: a fifth of the CPU time that a child takes for four steps
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError("importing has started threads, which no fork has")
    gc.collect()
    gc.freeze()  # or every child walks through all of it at its end


def _be_a_nursery(*, is_simulated: bool) -> None:
    """Fork a child for each line of JSON on stdin; its reports, then its exit status, go to stdout."""
    warm_up()
    if is_simulated:
        from tests.accelerator import simulated

        simulated.load()
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            pipe = os.dup(1)
            log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            sys.argv = ["tiered", *request["argv"]]
            _report(pipe, "pid", os.getpid())
            _instrument(pipe)
            sys.exit(_run(is_simulated))
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print("exit", status, flush=True)


# -- in the parent -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Report:
    """One line of a child, and when it came: seconds since the child started."""

    words: tuple[str, ...]
    time_s: float

    @property
    def is_call(self) -> bool:
        return self.words[0] == "call"


@dataclass(frozen=True, slots=True)
class Instant:
    """``delay_s`` after the ``num_calls``-th I/O call after the ``num_marks``-th report that is not an I/O call."""

    num_marks: int
    num_calls: int
    delay_s: float


@dataclass(slots=True)
class Life:
    """What a child reported, and how it ended (-9: killed)."""

    reports: list[Report] = field(default_factory=list)
    status: int = 0

    def times(self, word: str) -> list[float]:
        """Return when ``word`` was reported."""
        return [report.time_s for report in self.reports if report.words[0] == word]

    def generations(self, word: str) -> list[int]:
        """Return the generations that were reported as ``word``."""
        return [int(report.words[1]) for report in self.reports if report.words[0] == word]

    def losses(self) -> list[tuple[int, str]]:
        """Return number (from 0) and loss (every bit of it, as float.hex) of each step."""
        return [(int(report.words[1]), report.words[2]) for report in self.reports if report.words[0] == "loss"]

    @property
    def durable(self) -> int:
        """The last generation that was reported durable or found at opening."""
        return max([0, *self.generations("opened"), *self.generations("durable")])

    @property
    def is_inside_commit(self) -> bool:
        """Whether it ended inside a commit: sealed or sealing, not yet durable."""
        return len(self.times("commit")) > len(self.times("durable"))

    @property
    def sealed(self) -> int:
        """The last generation that was sealed, or was being sealed."""
        return sum(self.generations("opened")) + len(self.times("commit"))

    def instant(self, time_s: float) -> Instant:
        """Return the instant at ``time_s``, in terms that hold in another life although its speed differs."""
        before = [report for report in self.reports if report.time_s <= time_s]
        num_calls = 0
        while num_calls < len(before) and before[-1 - num_calls].is_call:
            num_calls += 1
        since_s = time_s - (before[-1].time_s if before else 0.0)  # an instant before the first report is one too
        return Instant(len(before) - sum(report.is_call for report in before), num_calls, since_s)


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):  # it ended by itself just now
        os.kill(pid, signal.SIGKILL)


class Nursery:
    """A process that has imported torch and run nothing, and forks children, one at a time."""

    def __init__(self, root: Path, *, is_simulated: bool = False) -> None:
        """``is_simulated``: there is the simulated accelerator."""
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, *(["simulated"] if is_simulated else [])]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, env=environment, cwd=root
        )
        self.log = root / "children.log"
        assert self._line() == ["ready"], "the nursery did not start"

    def _line(self) -> list[str]:
        assert self._process.stdout is not None
        return self._process.stdout.readline().split()

    def run(self, argv: Sequence[str], kill_at: Instant | None = None) -> Life:
        """Run `tiered ARGV`, killed at ``kill_at`` if it lives that long, and return its life."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"argv": list(argv), "log": str(self.log)}) + "\n")
        life = Life()
        start, num_marks, num_calls, pid, timer = time.monotonic(), 0, 0, 0, None
        while words := self._line():
            if words[0] == "exit":
                if timer is not None and timer.ident is not None:
                    timer.cancel()
                    timer.join()
                life.status = int(words[1])
                return life
            life.reports.append(Report(tuple(words), time.monotonic() - start))
            if words[0] == "pid":
                pid = int(words[1])
            if words[0] == "call":
                num_calls += 1
            else:
                num_marks, num_calls = num_marks + 1, 0
            reached = (num_marks, num_calls)
            if kill_at is not None and timer is None and reached >= (kill_at.num_marks, kill_at.num_calls):
                timer = threading.Timer(kill_at.delay_s, _kill, (pid,))
                timer.start() if kill_at.delay_s else _kill(pid)
        raise RuntimeError(f"the nursery died; see {self.log}")

    def close(self) -> None:
        """End the nursery."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._process.stdout.close()


if __name__ == "__main__":
    _be_a_nursery(is_simulated=sys.argv[1:] == ["simulated"])

"""Kill `tiered train` with SIGKILL at instants spread over its life, resume it, and compare it with an undisturbed run.

usage: python bench/soak.py [--kills 200] [--seed 0]      one campaign of kills, its own table
       python bench/soak.py --minutes N [--campaign NAME]  go on with campaigns whose counts add up: see campaigns.py

Children are forked from a nursery: a process that has imported torch and run nothing, because importing costs more
than the whole life of a child. A child reports its I/O calls and its commits through a pipe; the campaign kills it from
outside a given time after a given report. Nothing else in the child is changed. The last line is one line of JSON.
"""

from __future__ import annotations

import argparse
import functools
import gc
import hashlib
import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Campaign", "Kill", "Nursery", "Verdict"]

_CALLS = ("mkdir", "open", "rename", "replace", "posix_fallocate", "preadv", "pwritev", "fsync", "fdatasync")
_SIZES = "--layers 2 --width 64 --heads 2 --context 16 --batch 2 --commit-every 1 --dram 16MiB --seed 3"


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
    from tiered.store.catalog import SqliteCatalog
    from tiered.store.store import Store

    for name in _CALLS:
        setattr(os, name, _reported(pipe, name, getattr(os, name)))
    init, commit, apply = Store.__init__, Store.commit, SqliteCatalog.apply

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

    Store.__init__, Store.commit = reported_init, reported_commit  # type: ignore[assignment,method-assign]
    SqliteCatalog.apply = reported_apply  # type: ignore[method-assign]


def _be_a_nursery() -> None:
    """Fork a child for each line of JSON on stdin; its reports, then its exit status, go to stdout."""
    import tiered.cli
    import tiered.train.launch  # and torch, of which nothing is run: its threads would not survive the fork

    importlib.import_module("torch._dynamo")  # the first optimizer would, in every child
    gc.freeze()  # or every child walks through all of it at its end

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
            sys.exit(tiered.cli.main())
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print("exit", status, flush=True)


# -- in the campaign -----------------------------------------------------------------------------------------------


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

    def __init__(self, root: Path) -> None:
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--nursery"]
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


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill: in which phase, and what the resumed run found and became."""

    phase: str  # "making" | "training" | "resuming"
    is_inside_commit: bool
    durable: int  # the last generation reported durable before the kill
    sealed: int  # the last generation sealed or being sealed
    found: int  # the generation that the next process opened
    same_losses: bool
    same_bits: bool

    @property
    def is_lost(self) -> bool:
        """Whether a durable generation was lost."""
        return self.found < self.durable

    @property
    def is_right(self) -> bool:
        """Whether nothing durable was lost and the end is that of the undisturbed run."""
        return not self.is_lost and self.same_losses and self.same_bits


@dataclass(slots=True)
class Verdict:
    """What a campaign found."""

    kills: list[Kill] = field(default_factory=list)
    num_survivors: int = 0  # children that ended before the kill reached them: not counted as kills

    def count(self, phase: str) -> int:
        """Return the number of kills in ``phase``."""
        return sum(kill.phase == phase for kill in self.kills)

    @property
    def num_inside_commit(self) -> int:
        return sum(kill.is_inside_commit for kill in self.kills)

    @property
    def wrong(self) -> list[Kill]:
        """The kills that lost something or changed the bits."""
        return [kill for kill in self.kills if not kill.is_right]


class Campaign:
    """Runs of one small model in ``root``, killed and resumed, each compared with an undisturbed one."""

    def __init__(self, root: Path, *, seed: int = 0, num_steps: int = 4, options: Sequence[str] = ()) -> None:
        self.root = root
        self.num_steps = num_steps
        self.options = options
        self._random = random.Random(seed)
        text = "".join(f"{i} squared is {i * i}; " for i in range(2000))
        (root / "text").write_text(text)
        self.nursery = Nursery(root)
        self.undisturbed = self._run("undisturbed")
        if self.undisturbed.status != 0:
            raise RuntimeError(f"the undisturbed run failed with {self.undisturbed.status}; see {self.nursery.log}")
        self.losses = self._losses("undisturbed")
        self.digests = digests(root / "undisturbed")

    def close(self) -> None:
        """End the nursery."""
        self.nursery.close()

    def argv(self, run: str, *more: str) -> list[str]:
        """Return the command line of ``run``."""
        places = ["--data", f"{self.root}/text", "--store", f"{self.root}/{run}", "--json", f"{self.root}/{run}.json"]
        steps = ["--steps", str(self.num_steps)]
        return ["train", *_SIZES.split(), *places, *steps, "--quiet", "--yes", *self.options, *more]

    def _run(self, run: str, *more: str, kill_at: Instant | None = None) -> Life:
        return self.nursery.run(self.argv(run, *more), kill_at)

    def _losses(self, run: str) -> list[float]:
        return list(json.loads((self.root / f"{run}.json").read_text())["losses"])

    def instants(self, num_kills: int, num_making: int) -> Iterator[tuple[str, Instant]]:
        """Yield phases and instants: evenly over the making, over first read to last commit, and over the commits."""
        life = self.undisturbed
        opening, opened, first_durable = life.times("opening")[0], life.times("opened")[0], life.times("durable")[0]
        for time_s in _evenly([(opening, opened)], num_making // 2):
            yield "making", life.instant(time_s)
        for time_s in _evenly([(opened, first_durable)], num_making - num_making // 2):
            yield "making", life.instant(time_s)
        commits = list(zip(life.times("commit"), life.times("durable"), strict=True))
        num_in_commits = -(-2 * num_kills // 5)
        first_read = next((r.time_s for r in life.reports if r.words == ("call", "preadv")), first_durable)
        for time_s in _evenly([(min(first_read, first_durable), commits[-1][1])], num_kills - num_in_commits):
            yield "training", life.instant(time_s)
        inside = [r.time_s for r in life.reports if any(start <= r.time_s < end for start, end in commits)]
        for number in range(num_in_commits):  # just as a call is made: commits are too short to be hit by the clock
            yield "training", life.instant(inside[(2 * number + 1) * len(inside) // (2 * num_in_commits)])

    def kill(self, phase: str, instant: Instant, run: str, *, again: bool = False) -> Iterator[Kill]:
        """Kill a fresh run at ``instant``, resume it, and yield what became of it; nothing if it survived.

        With ``again`` the resumed run is killed too, somewhere, before it may finish.
        """
        try:
            killed = [(phase, self._run(run, kill_at=instant))]
            if killed[0][1].status != -signal.SIGKILL:
                return
            if again:
                somewhere = self.undisturbed.instant(self._random.uniform(0, self.undisturbed.reports[-1].time_s))
                life = self._run(run, "--resume", kill_at=somewhere)
                killed += [("resuming", life)] if life.status == -signal.SIGKILL else []
            last = self._run(run, "--resume")
            assert last.status == 0, f"--resume after {killed[-1]} failed with {last.status}; see {self.nursery.log}"
            losses = self._losses(run)
            same_losses = losses == self.losses[len(self.losses) - len(losses) :]
            same_bits = digests(self.root / run) == self.digests
            lives = [life for _, life in killed] + [last]
            for (where, life), after in zip(killed, lives[1:], strict=True):
                found = after.generations("opened")
                yield Kill(
                    phase=where, is_inside_commit=life.is_inside_commit, durable=life.durable, sealed=life.sealed,
                    found=found[0] if found else life.durable, same_losses=same_losses,
                    same_bits=same_bits,
                )  # fmt: skip
        finally:
            shutil.rmtree(self.root / run, ignore_errors=True)
            (self.root / f"{run}.json").unlink(missing_ok=True)

    def run(self, num_kills: int, num_making: int, *, on_kill: Callable[[Kill], object] = lambda kill: None) -> Verdict:
        """Kill at all instants, the same ones again where a child survived, and return the verdict."""
        verdict = Verdict()
        waiting = list(self.instants(num_kills, num_making))
        for number, (phase, instant) in enumerate(waiting):
            kills = list(self.kill(phase, instant, f"run{number}", again=number % 4 == 3))
            if not kills:
                verdict.num_survivors += 1
                if verdict.num_survivors > num_kills + num_making:
                    raise RuntimeError("most children end before the kill reaches them: is the machine too busy?")
                waiting.append((phase, Instant(instant.num_marks, max(0, instant.num_calls - 2), instant.delay_s / 2)))
            for kill in kills:
                verdict.kills.append(kill)
                on_kill(kill)
        return verdict


def _evenly(spans: Sequence[tuple[float, float]], num_points: int) -> Iterator[float]:
    """Yield ``num_points`` instants, evenly spread over the spans laid end to end."""
    total_s = sum(end - start for start, end in spans)
    for point in range(num_points):
        left_s = (point + 0.5) / num_points * total_s
        for start, end in spans:
            if left_s <= end - start:
                yield start + left_s
                break
            left_s -= end - start


def digests(directory: Path) -> dict[str, str]:
    """Return a digest of every tensor of the store in ``directory``, by key."""
    import torch

    import tiered

    with tiered.Store(directory, dram="16MiB", mode="r") as store:
        return {
            key: hashlib.sha256(bytes(tensor.reshape(-1).view(torch.uint8).numpy())).hexdigest()
            for key, tensor in ((key, store[key]) for key in store)
        }


@contextmanager
def campaign_in(directory: str | None, seed: int) -> Iterator[Campaign]:
    """Give a campaign in a new directory under ``directory``, removed at the end."""
    with tempfile.TemporaryDirectory(dir=directory, prefix="soak-") as root:
        campaign = Campaign(Path(root), seed=seed)
        try:
            yield campaign
        finally:
            campaign.close()


def main() -> int:
    """Run the campaign, print a table and one line of JSON; return 1 if anything was lost or changed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="kills between the first read and the last commit")
    parser.add_argument("--making", type=int, help="kills while the store is being made (default: a fifth of --kills)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", help="where to work (default: the temporary directory)")
    parser.add_argument("--minutes", type=float, help="go on for so long with --campaign, or with all, a share each")
    parser.add_argument("--campaign", help="its name in campaigns.py")
    parser.add_argument("--results", type=Path, help="where runs add up (default: bench/results/soak.json)")
    parser.add_argument("--nursery", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.nursery:
        _be_a_nursery()
        return 0
    if args.minutes is not None or args.campaign is not None:
        return _go_on(args)
    num_making = max(10, args.kills // 5) if args.making is None else args.making
    start = time.monotonic()
    with campaign_in(args.directory, args.seed) as campaign:
        life_s = campaign.undisturbed.reports[-1].time_s
        print(f"undisturbed: {campaign.num_steps} steps, {life_s:.2f} s, {len(campaign.undisturbed.reports)} reports")
        verdict = campaign.run(args.kills, num_making, on_kill=_print_wrong)
    _print_table(verdict)
    result = {
        "bench": "soak", "kills": len(verdict.kills), "inside_commit": verdict.num_inside_commit,
        "making": verdict.count("making"), "training": verdict.count("training"), "resuming": verdict.count("resuming"),
        "lost": sum(kill.is_lost for kill in verdict.kills), "wrong": len(verdict.wrong),
        "survivors": verdict.num_survivors, "seconds": round(time.monotonic() - start, 1),
    }  # fmt: skip
    print(json.dumps(result))
    return 1 if verdict.wrong else 0


def _go_on(args: argparse.Namespace) -> int:
    """Run the campaigns of campaigns.py, print the table of all runs and one line of JSON of these."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from bench.campaigns import CAMPAIGNS, RESULTS, run, table
    from tests.rigs.available import off, refusal

    names = [args.campaign] if args.campaign else list(CAMPAIGNS)
    if args.campaign and args.campaign not in CAMPAIGNS:
        print(f"there is no campaign {args.campaign!r}; there is: {', '.join(CAMPAIGNS)}", file=sys.stderr)
        return 2
    results, done = args.results or RESULTS, []
    for name in names:
        rig = CAMPAIGNS[name].rig
        reason = refusal(rig) if rig else None
        if reason is not None:
            print(off(rig, reason))
            continue
        done.append(run(name, (args.minutes or 1.0) / len(names), results))
    print("\n".join(table(results)))
    counts = {entry.campaign: entry.cases for entry in done}
    num_wrong = sum(len(entry.wrong) for entry in done)
    print(json.dumps({"bench": "soak", "cases": counts, "wrong": num_wrong}))
    return 1 if num_wrong else 0


def _print_wrong(kill: Kill) -> None:
    if not kill.is_right:
        print(f"WRONG: {kill}", flush=True)


def _print_table(verdict: Verdict) -> None:
    print(f"{'phase':<10}{'kills':>7}{'in commit':>11}{'lost':>6}{'other bits':>12}   durable generation -> kills")
    for phase in ("making", "training", "resuming"):
        kills = [kill for kill in verdict.kills if kill.phase == phase]
        spread = Counter(kill.durable for kill in kills)
        print(
            f"{phase:<10}{len(kills):>7}{sum(k.is_inside_commit for k in kills):>11}{sum(k.is_lost for k in kills):>6}"
            f"{sum(not (k.same_losses and k.same_bits) for k in kills):>12}   "
            + ", ".join(f"{generation}: {num}" for generation, num in sorted(spread.items()))
        )


if __name__ == "__main__":
    sys.exit(main())

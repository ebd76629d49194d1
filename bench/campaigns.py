"""Campaigns of many seeds that add up over runs: each goes on where the last run of it ended, and stops after a time.

What a run did is one entry of bench/results/soak.json: {"campaign", "first", "end" (seeds, half open), "cases",
"inside_commit", "wrong" (what, with its seed), "seconds", "commit", "date"}. `bench/soak.py` is the command.
"""

from __future__ import annotations

import datetime
import functools
import importlib
import itertools
import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # for the rigs

__all__ = ["CAMPAIGNS", "RESULTS", "Entry", "Step", "run", "table"]

RESULTS = ROOT / "bench" / "results" / "soak.json"


@dataclass(frozen=True, slots=True)
class Step:
    """What one seed came to."""

    num_cases: int
    num_inside_commit: int = 0
    wrong: str = ""


@dataclass(slots=True)
class Entry:
    """One run of a campaign."""

    campaign: str
    first: int
    end: int
    cases: int = 0
    inside_commit: int = 0
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0
    commit: str = ""
    date: str = ""


@dataclass(frozen=True, slots=True)
class Campaign:
    """``steps(first)`` yields one Step per seed from ``first`` on; ``rig`` is what it takes; ``goal`` the release's."""

    rig: str
    goal: int
    steps: Callable[[int], Iterator[Step]]


def _kills(first: int) -> Iterator[Step]:
    """SIGKILL of `tiered train`: each seed some kills, spread over its life a little differently."""
    from bench.kills import campaign_in

    seed = first
    while True:
        with campaign_in(None, seed) as campaign:
            verdict = campaign.run(17 + seed % 13, 4 + seed % 3)
        yield Step(len(verdict.kills), verdict.num_inside_commit, str(verdict.wrong) if verdict.wrong else "")
        seed += 1


def _resumes(first: int) -> Iterator[Step]:
    """One run per seed, killed 50 times anywhere: it must be the undisturbed one."""
    from bench.resumes import campaign_of, resume_many

    for seed in itertools.count(first):
        with campaign_of(50, seed) as campaign:
            resumed = resume_many(campaign, seed=seed, num_kills=50)
        yield Step(resumed.num_kills, resumed.num_inside_commit, resumed.wrong)


def _ranks(first: int) -> Iterator[Step]:
    """One run over two ranks per seed, one of them killed or both, some twenty times."""
    from bench.rank_kills import KILLS_A_RUN, kill_many

    for seed in itertools.count(first):
        kills, wrong = kill_many(KILLS_A_RUN, seed)
        yield Step(len(kills), sum(kill.is_inside_commit for kill in kills), wrong)


def _switches(first: int) -> Iterator[Step]:
    """Crashes at changes of a switch to other ranks, an opening, a commit, gc: each seed takes every eighth of one."""
    from bench.rank_kills import crashes_of_a_switch

    with crashes_of_a_switch() as look:
        for seed in itertools.count(first):
            num_opened, wrong = look(seed)
            yield Step(num_opened, 0, "; ".join(wrong))


def _openings(first: int) -> Iterator[Step]:
    """Simulated ranks, two or three: a crash of each in a commit, and of each where the opening discards a generation.

    It ends when every operation was tried.
    """
    from tests.store.meeting import NUM_OPERATIONS, wrong_in_discards

    for seed in range(first, 2 * (NUM_OPERATIONS + 1)):
        num_cases, wrong = wrong_in_discards(2 + seed % 2, seed // 2)
        yield Step(num_cases, 0, wrong)


def _large(first: int) -> Iterator[Step]:
    """A million keys (even seeds), a tensor of more than 2 GiB (odd ones)."""
    from bench import large

    for seed in itertools.count(first):
        yield Step(1, 0, large.run(seed))


def _soak(first: int) -> Iterator[Step]:
    """One process, disturbed all the time: twelve cycles a seed; "in commit" counts the cycles a full drive ended."""
    from tests.rigs.endurance import endurance, slope_kib
    from tiered.units import MiB

    with endurance((320, 512)[first % 2] * MiB, first) as life:  # torch alone takes 230 MiB
        for seed in itertools.count(first):
            before = life.num_refused
            wrong = life.run(range(12 * seed, 12 * seed + 12))
            yield Step(12, life.num_refused - before, wrong)
            memory = [sample["rss_kib"] for sample in life.samples[24:]]
            print(
                f"soak: {len(life.samples)} cycles, {life.num_refused} ended by a full drive, {memory[-1:]} KiB, "
                f"slope {slope_kib(memory):.0f} KiB in 100 cycles, {life.samples[-1]['descriptors']} descriptors",
                flush=True,
            )
            if wrong:
                return


def _power_cuts(kind: str) -> Callable[[int], Iterator[Step]]:
    def steps(first: int) -> Iterator[Step]:
        from tests.rigs.children import Nursery
        from tests.rigs.drives import RIGS
        from tests.rigs.power import campaign
        from tests.rigs.room import room

        nursery = Nursery()
        try:
            with room() as made:
                rig = RIGS[kind][1](made)
                while True:
                    for cut in campaign(rig, nursery, range(first, first + 1000)):
                        first += 1
                        yield Step(1, int(cut.is_inside_commit), f"{cut}" if cut.wrong else "")
        finally:
            nursery.close()

    return steps


def _errors(first: int) -> Iterator[Step]:
    """The errno sweep: even seeds on io_uring, odd ones on threads, until every case was tried."""
    from bench.errno_sweep import cases, try_case
    from tests.rigs.room import room

    with room() as made:
        drive = made.daemon("faulty")
        found = [cases(drive, engine) for engine in ("uring", "threads")]
        for seed in range(first, 2 * max(map(len, found))):
            if seed // 2 >= len(found[seed % 2]):  # the other engine has more calls
                yield Step(0)
                continue
            outcome = try_case(drive, found[seed % 2][seed // 2])
            yield Step(1, 0, f"{outcome.case}: {outcome.wrong}" if outcome.wrong else "")


def _batches(module: str) -> Callable[[int], Iterator[Step]]:
    """Return the steps of the campaign whose batches are ``module.batch``: a seed each, in processes, in one directory.

    ``batch(seed, place)`` keeps its files in ``place`` and returns the number of its cases and what was wrong.
    """

    def steps(first: int) -> Iterator[Step]:
        from tests.store.places import quick_directory

        with quick_directory() as place:
            with closing(_in_processes(functools.partial(_batch, module, place))(first)) as done:
                yield from done

    return steps


def _batch(module: str, place: Path, seed: int) -> Step:
    num_cases, wrong = importlib.import_module(module).batch(seed, place)
    return Step(num_cases, 0, "; ".join(wrong))


def _in_processes(step: Callable[[int], Step]) -> Callable[[int], Iterator[Step]]:
    """Return the steps of seeds that need nothing of each other: one process on each core that this one may use."""

    def steps(first: int) -> Iterator[Step]:
        num_processes = len(os.sched_getaffinity(0))
        context = multiprocessing.get_context("spawn")  # torch's threads would not survive a fork
        with ProcessPoolExecutor(num_processes, mp_context=context, initializer=_quiet) as processes:
            running = deque(processes.submit(step, seed) for seed in range(first, first + 2 * num_processes))
            try:
                for seed in itertools.count(first + len(running)):
                    yield running.popleft().result()
                    running.append(processes.submit(step, seed))
            finally:
                processes.shutdown(cancel_futures=True)

    return steps


def _quiet() -> None:
    import torch

    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process ends the others
    logging.getLogger("tiered").setLevel(logging.CRITICAL)


def _simulated(seed: int) -> Step:
    """Power cuts of the simulated disk: eight seeds take every operation of one job; cases are the states opened."""
    from tests.store.crashes import Campaign as Crashes

    crashes = Crashes(seed // 8, slice(seed % 8, None, 8)).run()
    return Step(crashes.num_opened, crashes.num_inside_commit, "; ".join(crashes.wrong))


CAMPAIGNS: dict[str, Campaign] = {
    "simulated": Campaign("", 1_000_000, _in_processes(_simulated)),
    "kill": Campaign("", 5_000, _kills),
    "resume": Campaign("", 5_000, _resumes),
    "ranks": Campaign("", 1_000, _ranks),
    "opening": Campaign("", 684, _openings),
    "switch": Campaign("faulty file system", 5_000, _switches),
    "large": Campaign("", 2, _large),
    "soak": Campaign("blkio cgroup", 600, _soak),  # half an hour
    "shutdown-ext4": Campaign("ext4 shutdown", 2_500, _power_cuts("shutdown-ext4")),
    "shutdown-xfs": Campaign("xfs shutdown", 2_500, _power_cuts("shutdown-xfs")),
    "torn": Campaign("torn drives", 1_000, _power_cuts("torn")),
    "errno": Campaign("faulty file system", 9_400, _errors),
    "flips": Campaign("", 100_000, _batches("tests.store.flips")),
    "writes": Campaign("", 20_000, _batches("tests.store.silent")),
    "model": Campaign("", 20_000, _batches("tests.store.model")),
    "threads": Campaign("", 10_000, _batches("tests.store.threads")),
    "programs": Campaign("", 100_000, _batches("tests.zero.drawn.programs")),
}


def run(name: str, minutes: float, results: Path = RESULTS) -> Entry:
    """Run a campaign for so long, from the first seed that no run has tried; add what it did to ``results``.

    An interruption (KeyboardInterrupt) ends it early, with what was done kept.
    """
    logging.getLogger("tiered").setLevel(logging.CRITICAL)
    first = max([entry.end for entry in _load(results) if entry.campaign == name], default=0)
    entry = Entry(name, first, first, commit=_commit(), date=datetime.date.today().isoformat())
    start = time.monotonic()
    steps = CAMPAIGNS[name].steps(first)
    try:
        for step in steps:
            entry.cases += step.num_cases
            entry.inside_commit += step.num_inside_commit
            if step.wrong:
                entry.wrong.append(f"seed {entry.end}: {step.wrong}")
                print(f"WRONG: {name}, {entry.wrong[-1]}", flush=True)
            entry.end += 1
            if time.monotonic() > start + 60 * minutes:
                break
    except KeyboardInterrupt:
        print(f"{name}: interrupted", flush=True)
    finally:
        steps.close()  # type: ignore[attr-defined]  # a generator: the rig goes
        entry.seconds = round(time.monotonic() - start, 1)
        if entry.end > entry.first:
            _add(results, entry)
    return entry


def table(results: Path = RESULTS) -> list[str]:
    """Return the lines that sum up all runs of every campaign."""
    lines = [
        f"{'campaign':<15}{'runs':>6}{'cases':>8}{'in commit':>11}{'wrong':>7}{'minutes':>9}{'of the release':>16}"
    ]
    for name, campaign in CAMPAIGNS.items():
        entries = [entry for entry in _load(results) if entry.campaign == name]
        num_cases, num_wrong = sum(entry.cases for entry in entries), sum(len(entry.wrong) for entry in entries)
        minutes, inside = sum(entry.seconds for entry in entries) / 60, sum(entry.inside_commit for entry in entries)
        share = f"{100 * num_cases / campaign.goal:.1f} %"
        lines.append(f"{name:<15}{len(entries):>6}{num_cases:>8}{inside:>11}{num_wrong:>7}{minutes:>9.1f}{share:>16}")
    return lines


def _load(results: Path) -> list[Entry]:
    return [Entry(**entry) for entry in json.loads(results.read_text())] if results.exists() else []


def _add(results: Path, entry: Entry) -> None:
    entries: list[dict[str, Any]] = [asdict(old) for old in _load(results)]
    text = ",\n".join(json.dumps(each) for each in [*entries, asdict(entry)])
    with tempfile.NamedTemporaryFile("w", dir=results.parent, delete=False) as file:
        file.write(f"[\n{text}\n]\n")
    Path(file.name).replace(results)


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"

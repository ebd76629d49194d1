"""What reads a store's files, when they are hostile: an error of ours or none, soon, and in little memory.

Each case changes a file as forgery.py has it, then everything is read. Cases run in forked children, whose end is
watched.
usage: python -m tests.store.fuzz SEED NUM    prints the number of cases and what was wrong as one line of JSON
"""

from __future__ import annotations

import io
import json
import logging
import os
import random
import select
import signal
import sqlite3
import sys
import tempfile
import time
import traceback
import tracemalloc
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

import torch

from tests.store.flips import JOURNAL_NAME, Killed, Subject
from tests.store.forgery import KINDS, Kind
from tests.store.places import quick_directory
from tiered.bytes.device.profile import find_profile
from tiered.errors import CorruptionError, TieredError
from tiered.store.lifetime.directory import CATALOG_NAME
from tiered.store.store import Store
from tiered.tools.inspect import inspect_run

__all__ = ["batch", "fuzz", "run_in_child"]

_BATCH = 250
_MOST_CPU_S = 1.0
_HANG_S = 30.0  # of the clock, without a word from the child: more than a machine that is busy takes for 1 s of work
_FIXED_NBYTES = 3 << 20  # what opening a store and reading it through takes of Python's memory, whatever it holds
_TOO_MUCH = "made Python allocate"
_ARENA_NBYTES = 32 << 20  # arena, threads' stacks and SQLite's cache, as the kernel counts them


def _try_case(subject: Subject, kind: Kind, rng: random.Random) -> str:
    """Mutate, then read everything that a store, its commands and its users would; return what was wrong."""
    killed: Killed = "late" if kind.name == JOURNAL_NAME else ""
    chosen = None
    if kind.name == CATALOG_NAME and rng.random() < 0.5:
        killed, chosen = "unconfirmed", rng.choice((None, 3, 4))
    subject.restore(subject.images[killed])
    path = subject.directories[0] / kind.name
    with suppress(sqlite3.Error):  # SQLite refused: the file is as it was
        kind.mutate(path, rng)
    nbytes = sum(each.stat().st_size for each in path.parent.iterdir() if not each.name.startswith("data-"))
    expected = {"": {3}, "late": {3, 4}, "unconfirmed": {chosen or 4}}[killed]
    tracemalloc.start()
    _reset_peak()
    before, mapped, start_s = _resident_nbytes("VmRSS"), _resident_nbytes("RssFile"), time.process_time()
    try:
        wrong = _read_everything(subject, None if kind.is_forged else expected, chosen)
    except TieredError:
        wrong = ""
    except BaseException as error:
        wrong = f"{type(error).__name__}: {error}"
    cpu_s, grown = time.process_time() - start_s, _resident_nbytes("VmHWM") - before
    grown -= max(0, _resident_nbytes("RssFile") - mapped)  # a child's first case maps the pages of libraries: 54 MB
    _, traced = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    if cpu_s > _MOST_CPU_S:
        wrong = wrong or f"it took {cpu_s:.1f} s of CPU time"
    if traced > 4 * nbytes + _FIXED_NBYTES or grown > 4 * nbytes + _ARENA_NBYTES:
        wrong = wrong or f"files of {nbytes} bytes {_TOO_MUCH} {traced}, the process {grown}"
    return wrong


def _read_everything(subject: Subject, expected: set[int] | None, chosen: int | None) -> str:
    find_profile(subject.directories[0])
    with redirect_stdout(io.StringIO()):
        inspect_run(subject.directories, parameters=False, json_file=None)
    for mode in ("r", "a"):
        with subject.open(mode, chosen) as store:
            wrong = _read(store, subject, expected)
            if wrong:
                return wrong
            store.records()
            store.verify()
            if mode == "a":
                store.register("counter", _Counter())
                store.resume()
                store["after"] = torch.ones(3000)
    return ""


def _read(store: Store, subject: Subject, expected: set[int] | None) -> str:
    """Read all keys and the state; with ``expected`` they must be those of one of these generations."""
    state, found = store.state, {}
    for name in list(store):
        try:
            found[name] = store[name]
        except CorruptionError as error:
            if expected is not None:
                return f"{error!r}, and nobody has touched the data"
    if expected is None:
        return ""
    if store.generation not in expected or state != subject.states[store.generation]:
        return f"generation {store.generation} with state {state}"
    contents = subject.contents[store.generation]
    is_same = set(found) == set(contents) and all(torch.equal(found[name], contents[name]) for name in contents)
    return "" if is_same else "other content"


class _Counter:
    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: Any) -> None:
        self.count = state["count"] + 1


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _resident_nbytes(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(field))


# -- children ------------------------------------------------------------------------------------------------------


def run_in_child(cases: list[Callable[[], str]]) -> list[str]:
    """Run ``cases`` in a forked child, in a new one after each that dies or hangs; return what was wrong with each."""
    outcomes: list[str] = []
    while len(outcomes) < len(cases):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            _run(cases[len(outcomes) :], writer)
        os.close(writer)
        with open(reader, "rb", buffering=0) as pipe:
            ending = _collect(pipe, outcomes)
        if ending:
            os.kill(pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if len(outcomes) < len(cases):
            outcomes.append(ending or f"the interpreter died with {status}")
    return outcomes


def _run(cases: list[Callable[[], str]], writer: int) -> None:
    try:
        for case in cases:
            os.write(writer, json.dumps(case()[:1500]).encode() + b"\n")
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _collect(pipe: Any, outcomes: list[str]) -> str:
    """Add what the child says to ``outcomes`` until it ends; return why it must be ended."""
    rest = b""
    while select.select([pipe], [], [], _HANG_S)[0]:
        received = pipe.read(1 << 16)
        if not received:
            return ""
        *lines, rest = (rest + received).split(b"\n")
        outcomes += [json.loads(line) for line in lines]
    return f"nothing happened for {_HANG_S} s"


def fuzz(seed: int, num: int, place: Path) -> list[str]:
    """Try ``num`` cases of ``seed``; return what was wrong with each. The process must have no threads.

    A case of too much memory is tried once more, in a new child: what a file makes us allocate comes again. Python's
    table of interned strings does not, which it copies at once, of 3.8 MB, when parts of paths have filled it up.
    """
    with tempfile.TemporaryDirectory(dir=place) as root:
        subject = _made_in_child(Path(root))
        rng = random.Random(seed)
        drawn = rng.choices(list(KINDS), [kind.weight for kind in KINDS.values()], k=num)

        def case(number: int) -> Callable[[], str]:
            def try_it() -> str:
                wrong = _try_case(subject, KINDS[drawn[number]], random.Random(f"{seed}/{number}"))
                return wrong and f"{drawn[number]}, case {number} of seed {seed}: {wrong}"

            return try_it

        outcomes = run_in_child([case(number) for number in range(num)])
        again = [number for number, wrong in enumerate(outcomes) if _TOO_MUCH in wrong]
        for number in again:
            outcomes[number] = run_in_child([case(number)])[0]
        return outcomes


def _made_in_child(root: Path) -> Subject:
    """Return a subject; making it leaves a few threads that have ended, and nothing else."""
    torch.set_num_threads(1)
    return Subject(root)


def batch(seed: int, place: Path) -> tuple[int, list[str]]:
    """Try the cases of ``seed``; return their number and what was wrong."""
    outcomes = fuzz(seed, _BATCH, place)
    return len(outcomes), [wrong for wrong in outcomes if wrong]


if __name__ == "__main__":
    logging.getLogger("tiered").setLevel(logging.CRITICAL)
    with quick_directory() as directory:
        done = fuzz(int(sys.argv[1]), int(sys.argv[2]), directory)
    print(json.dumps({"cases": len(done), "wrong": [wrong for wrong in done if wrong]}))

#!/usr/bin/env python3
"""The check of a machine with a GPU, in nine minutes: what can be wrong only there comes first, what is slow last.

Usage: scripts/gpu_check [MINUTES] [--results DIR --store DIR --only PART,... --tiny]

Each part is a process of its own with a limit out of the time that is left; a part that fails, is cut short or finds no
time stops no other. Every figure is a JSON line of DIR/gpu_check.jsonl as soon as it is known, and each part ends with
a line of its status: "green", "red", "cut short", "not run", or "does not apply". What a part printed is in
DIR/PART.log. The exit status is 1 unless every part is green or does not apply.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

__all__ = ["Journal", "JsonLines", "Part", "PytestLines", "check", "run_part"]

ROOT = Path(__file__).resolve().parents[1]
DEVICE = os.environ.get("TIERED_TEST_DEVICE", "cuda")
GRACE_S = 6.0  # between the signal that interrupts a part and the one that kills it
LEAST_S = 2.0  # less than that is not worth a start
SPARE_S = 8.0  # for processes that do not end at once even when killed, and for the summary
FIRST = ("test_streams", "test_training", "test_bytes")  # of the tests: what a race or a lost byte shows in
FINE = ("green", "does not apply")

# -- what parts say ------------------------------------------------------------------------------------------------


class Reader(Protocol):
    """Reads what a part prints, line by line."""

    wrong: list[str]  # what the part found wrong

    def read(self, line: str) -> dict[str, Any] | None:
        """Return the figures of ``line``; None where the line has none."""

    def figures(self) -> dict[str, Any]:
        """Return what belongs into the line of the part's status."""

    def lacks(self) -> str:
        """Return what a part that ended well must have said and did not; "" where nothing is missing."""


@dataclass
class JsonLines:
    """Reads a part whose figures are JSON lines; a line's "wrong" says what of it must not be."""

    wrong: list[str] = field(default_factory=list)
    num_lines: int = 0

    def read(self, line: str) -> dict[str, Any] | None:
        if not line.startswith("{"):
            return None
        with suppress(json.JSONDecodeError):
            found: dict[str, Any] = json.loads(line)
            self.num_lines += 1
            if found.get("wrong"):
                self.wrong.append(str(found["wrong"]))
            return found
        return None

    def figures(self) -> dict[str, Any]:
        return {}

    def lacks(self) -> str:
        return "" if self.num_lines else "the part said no figure"


@dataclass
class PytestLines:
    """Reads ``pytest -v``: a test that fails is told at once, and one that never ends is known by its name."""

    wrong: list[str] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    running: str = ""
    deselected: int = 0

    def read(self, line: str) -> dict[str, Any] | None:
        if found := re.search(r"(\d+) deselected", line):
            self.deselected = int(found[1])
        if found := re.match(r"(tests/\S+::.*?) *(?:(PASSED|FAILED|ERROR|SKIPPED)\b.*)?$", line):
            self.running, outcome = found[1], found[2]
        elif found := re.match(r"(PASSED|FAILED|ERROR|SKIPPED) +\[ *\d+%\]", line):  # the test had printed something
            outcome = found[1]
        else:
            return None
        if outcome is None:
            return None
        test, self.running = self.running, ""
        self.outcomes[outcome.lower()] += 1
        if outcome not in {"FAILED", "ERROR"}:
            return None
        self.wrong.append(test)
        return {"test": test, "wrong": outcome.lower()}

    def figures(self) -> dict[str, Any]:
        return {**self.outcomes, "deselected": self.deselected} | ({"running": self.running} if self.running else {})

    def lacks(self) -> str:
        return "" if self.outcomes["passed"] else "no test passed"


# -- parts ---------------------------------------------------------------------------------------------------------


@dataclass
class Part:
    """A process of the check. ``weight`` is its share of the time, in seconds of nine minutes."""

    name: str
    weight: float
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    reader: Reader = field(default_factory=JsonLines)
    inapplicable: str = ""  # why the part has no meaning here
    tells_limit: bool = False  # the command takes --minutes


def all_parts(results: Path, store: Path, *, tiny: bool) -> list[Part]:
    """Return the parts in the order in which they run."""
    python, small = sys.executable, ["--tiny"] if tiny else []
    pytest = [
        python, "-m", "pytest", "-c", "scripts/gpu_check.ini", "--rootdir", ".", "-p", "no:cacheprovider", "-v",
        "--maxfail=1000", "--color=no",
    ]  # fmt: skip
    files = sorted(path.relative_to(ROOT) for path in (ROOT / "tests" / "accelerator").glob("test_*.py"))
    chosen = os.environ.get("GPU_CHECK_TESTS", "").split()
    first = chosen or [f"tests/accelerator/{name}.py" for name in FIRST]
    others = [str(file) for file in files if file.stem not in FIRST]
    place = ["--device", DEVICE, "--store", str(store), *small]
    bits = [python, "bench/gpu_bits.py", *place]
    bench = [python, "bench/gpu.py", *place, "--results", str(results)]
    uncached = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    elsewhere = "" if DEVICE == "cuda" else f"CUDA's alone, and the device is {DEVICE!r}"
    return [
        Part("versions", 20, [python, "bench/gpu_machine.py", *place]),
        Part("probes", 30, [python, "bench/gpu_probes.py", *place]),
        Part("tests", 90, [*pytest, f"--junitxml={results / 'tests.xml'}", *first], reader=PytestLines()),
        Part(  # a process of its own: its files import transformers, which takes a minute where files are cold
            "other tests", 45, [*pytest, f"--junitxml={results / 'other_tests.xml'}", *others], reader=PytestLines(),
            inapplicable="GPU_CHECK_TESTS names all tests to run" if chosen else "",
        ),
        Part("bits", 60, bits, tells_limit=True),
        Part("bits beside a busy stream", 35, [*bits, "--busy", "--rows", "2"], tells_limit=True),
        Part(
            "bits without a cache of memory", 25, [*bits, "--rows", "2"], uncached, inapplicable=elsewhere,
            tells_limit=True,
        ),
        Part("kill", 55, [*bits, "--kill"], tells_limit=True),
        Part("bench", 130, bench, tells_limit=True),
        Part("waits", 20, [python, "bench/gpu_waits.py", *place]),
        Part("ranks", 60, [python, "bench/gpu_ranks.py", *small]),
        Part(
            "sanitizer", 20, [*pytest, "tests/accelerator/test_streams.py"], {"TORCH_CUDA_SANITIZER": "1"},
            PytestLines(), inapplicable=elsewhere,
        ),
    ]  # fmt: skip


class Journal:
    """The file of JSON lines: each line is on the drive when ``write`` returns."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._lock = threading.Lock()

    def write(self, figures: dict[str, Any]) -> None:
        with self._lock:
            self._file.write(json.dumps(figures) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())


def run_part(part: Part, limit_s: float, results: Path, journal: Journal) -> dict[str, Any]:
    """Run ``part`` for ``limit_s`` and the grace at most; write its figures as they come, and return its last line."""
    begun_s = time.monotonic()

    def seconds() -> float:
        return round(time.monotonic() - begun_s, 2)

    def read(output: IO[str], log: IO[str]) -> None:
        for line in output:
            log.write(line)
            log.flush()
            if line.strip():
                last[:] = [*last[-14:], line.rstrip()]
            if (figures := part.reader.read(line.rstrip())) is not None:
                journal.write({"part": part.name, "at_s": seconds()} | figures)

    last: list[str] = []
    command = [*part.command, *(["--minutes", f"{limit_s * 0.85 / 60:.2f}"] if part.tells_limit else [])]
    ended: dict[str, Any] = {"part": part.name, "limit_s": limit_s}
    with open(results / f"{part.name.replace(' ', '_')}.log", "w") as log:
        try:
            process = subprocess.Popen(
                command, cwd=ROOT, env=os.environ | part.environment, stdin=subprocess.DEVNULL, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace", start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            return ended | {"status": "red", "seconds": seconds(), "why": f"{command[0]} did not start: {error}"}
        assert process.stdout is not None
        reading = threading.Thread(target=read, args=(process.stdout, log), daemon=True)  # lifetime: others may hold it
        reading.start()
        was_cut = not ends_within(process, limit_s)
        reading.join(2)
        if not reading.is_alive():
            process.stdout.close()
    ended |= {"status": "green", "seconds": seconds(), **part.reader.figures()}
    if part.reader.wrong:
        ended["wrong"] = part.reader.wrong
    if was_cut:
        return ended | {"status": "cut short", "why": f"no end after {limit_s:g} s", "last": last[-3:]}
    if process.returncode:
        return ended | {"status": "red", "why": f"exit status {process.returncode}", "last": last}
    if part.reader.wrong or part.reader.lacks():
        return ended | {"status": "red", "why": part.reader.lacks() or part.reader.wrong[0], "last": last}
    return ended


def ends_within(process: subprocess.Popen[str], limit_s: float) -> bool:
    """Wait so long for ``process``, then interrupt and at last kill it with all that it started; return if it ended."""
    try:
        process.wait(limit_s)
        return True
    except subprocess.TimeoutExpired:
        _signal(process, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
        return False
    finally:
        _signal(process, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(3)


def _signal(process: subprocess.Popen[str], number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def check(parts: list[Part], seconds: float, results: Path) -> list[dict[str, Any]]:
    """Run ``parts`` one after another within ``seconds``; return the line of each one's status."""
    end_s = time.monotonic() + seconds - SPARE_S
    ended = []
    with open(results / "gpu_check.jsonl", "a") as file:
        journal = Journal(file)
        for index, part in enumerate(parts):
            to_come = [each for each in parts[index:] if not each.inapplicable]
            left_s = end_s - time.monotonic() - GRACE_S
            found: dict[str, Any] = {"part": part.name, "seconds": 0.0}
            if part.inapplicable:
                found |= {"status": "does not apply", "why": part.inapplicable}
            elif left_s < LEAST_S:
                found |= {"status": "not run", "why": f"no time was left of {seconds / 60:g} minutes"}
            else:
                share = part.weight / sum(each.weight for each in to_come)
                found = run_part(part, round(max(LEAST_S, left_s * share), 1), results, journal)
            journal.write(found)
            ended.append(found)
            print(f"gpu_check: {words_of(found)}", flush=True)
        spent_s = seconds - SPARE_S - (end_s - time.monotonic())
        statuses = {each["part"]: each["status"] for each in ended}
        journal.write({"part": "all", "seconds": round(spent_s, 1), "statuses": statuses})
    return ended


def words_of(ended: dict[str, Any]) -> str:
    """Return what the terminal is told of a part that ended."""
    said = [f"{number} {word}" for word in ("passed", "failed", "error") if (number := ended.get(word))]
    said += [ended["why"]] if "why" in ended else []
    said += [f"{ended['running']} did not end"] if ended.get("running") else []
    text = f"{ended['part']}: {ended['status']} after {ended['seconds']:.0f} s{': ' if said else ''}{', '.join(said)}"
    wrong = [f"- {each}" for each in ended.get("wrong", [])[:8]]
    return "\n  ".join(line[:300] for line in [text, *wrong, *([] if wrong else ended.get("last", []))])


def summary(ended: list[dict[str, Any]], results: Path) -> str:
    """Return the whole in a line of words."""
    others = [f"{each['part']} {each['status']}" for each in ended if each["status"] != "green"]
    num_green = len(ended) - len(others)
    seconds = sum(each["seconds"] for each in ended)
    return (
        f"gpu_check: {num_green} of {len(ended)} parts are green after {seconds:.0f} s on {DEVICE}"
        f"{'; ' if others else ''}{', '.join(others)}; figures in {results / 'gpu_check.jsonl'}"
    )


def main() -> int:
    """Run the check and return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("minutes", nargs="?", type=float, default=9.0, help="the time of the whole, default: 9")
    parser.add_argument("--results", type=Path, help="where figures and logs go, default: a new folder in runs")
    parser.add_argument("--store", type=Path, default=ROOT / "runs", help="a folder on the drive, default: runs")
    parser.add_argument("--only", help="names of parts, by commas")
    parser.add_argument("--tiny", action="store_true", help="models of no size, to see that all of it runs")
    args = parser.parse_args()
    args.store.mkdir(parents=True, exist_ok=True)
    results = (args.results or Path(tempfile.mkdtemp(dir=args.store, prefix="gpu_check-"))).resolve()
    results.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.store.resolve(), prefix="parts-", ignore_cleanup_errors=True) as place:
        parts = chosen_parts(parser, args, all_parts(results, Path(place), tiny=args.tiny))
        ended = check(parts, 60 * args.minutes, results)
    print(summary(ended, results))
    return 0 if all(each["status"] in FINE for each in ended) else 1


def chosen_parts(parser: argparse.ArgumentParser, args: argparse.Namespace, parts: list[Part]) -> list[Part]:
    """Return the parts that the command names, all where it names none."""
    if args.only:
        names = args.only.split(",")
        if unknown := set(names) - {part.name for part in parts}:
            parser.error(f"no parts {sorted(unknown)}; there are {', '.join(part.name for part in parts)}")
        parts = [part for part in parts if part.name in names]
    return parts


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the part that runs is killed with the check
    sys.exit(main())

"""Everything that a command prints fits 80 columns, and what is heavy is imported by the job that needs it alone."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tiered
from tests.measure.test_bench import TINY as TINY_BENCH
from tiered.tools.bench.command import BenchRequest, bench
from tiered.tools.cli import main
from tiered.tools.doctor.checks import MACHINE, Finding, Outcome
from tiered.tools.doctor.doctor import DoctorReport, examined

COMMANDS = ("train", "inspect", "verify", "gc", "doctor", "bench", "import")
TINY = ("--layers", "1", "--width", "64", "--heads", "4", "--context", "32", "--dram", "32MiB", "--steps", "2")
HEAVY = {"torch", "numpy", "transformers", "safetensors", "matplotlib", "numba", "scipy", "pandas"}


class Page:
    """The output so far; ``check`` finds the lines that are too long because of tiered, not of the user's paths."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *paths: Path) -> None:
        self._capsys = capsys
        self._paths = paths

    def check(self, *words: str) -> str:
        """Check what was printed since the last call, and return it: ``words`` begin lines of it."""
        output, error = self._capsys.readouterr()
        lines = output.splitlines() + [line for line in error.splitlines() if not line.startswith("tiered: ")]
        assert not [word for word in words if not any(line.startswith(word) for line in lines)], output
        assert not [line for line in lines if len(self._own(line)) > 80]
        return str(output)

    def _own(self, line: str) -> str:
        """Return ``line`` without paths and options of the user's, a command to copy being of those alone."""
        for command in ("go on   ", "nothing was begun or written; begin: "):
            if line.startswith(command):
                return command
        for path in self._paths:
            line = line.replace(str(path), "")
        return line


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Page]:
    """A directory to work in, and the page of a terminal with 80 columns; standard output is none."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "text.txt").write_bytes(b"one word, one meaning; " * 1300)
    found = Page(capsys, tmp_path)
    yield found
    found.check()


def test_help_fits(page: Page) -> None:
    for options in ([], *([command] for command in COMMANDS)):
        assert main([*options, "--help"]) == 0
        page.check(" Usage: tiered")


def test_a_run_and_what_is_said_of_it_fit(page: Page, tmp_path: Path) -> None:
    job = ["train", "--store", "run", "--data", "text.txt", *TINY]
    assert main([*job, "--dry-run"]) == 0
    plan = page.check("model   ", "memory  ", "writes  ", "nothing was begun")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["text.txt"], "nothing was written"
    assert main([*job, "--timeline", "t.json"]) == 0
    said = page.check("model   ", "step 2/2", "time    ", "bound   ", "verdict ", "drawn   ", "go on   ")
    plan, said = (re.sub(r"\(\S+ GiB free\)", "", " ".join(text.split())) for text in (plan, said))
    assert said.startswith(plan.partition(" nothing was begun")[0]), "the first lines of the run"
    assert main(["train", "--resume", "--store", "run", "--params", "9T"]) == 2
    assert main(["train", "--dry-run", "--store", "large", "--steps", "100000000", "--params", "1M"]) in (0, 2)
    page.check("warning: this run writes up to")
    assert main(["train", "--resume", "--store", "run"]) == 0
    page.check("the run has done its 2 steps", "go on   ")
    assert main(["inspect", "run"]) == 0
    page.check("parameters", "optimizer state", "state {")
    assert main(["inspect", "run", "--parameters"]) == 0
    assert "  emb.weight\n" in page.check("model/parameters/emb: bfloat16, trained")
    assert main(["verify", "run"]) == 0
    page.check("read ")
    leftover = tmp_path / "run" / ".tiered-profile.json.0123abcd"
    leftover.write_bytes(b"{")
    leftover.chmod(0o600)
    os.utime(leftover, (0, 0))
    assert main(["gc", "run", "--dry-run"]) == 0
    assert "a profile that was not finished" in " ".join(page.check().split())
    assert main(["gc", "run", "--yes"]) == 0
    page.check("freed ")


def test_damage_and_keys_of_other_jobs_fit(page: Page, tmp_path: Path) -> None:
    with tiered.Store("run", dram="16MiB") as store:
        for name in ("a", "quite/a/long/key/of/a/job"):
            store[name] = torch.zeros(1 << 10, 1 << 10)
    with tiered.Store("run", dram="16MiB", mode="r") as store:
        offset = next(iter(store.records())).extents[0].offset
    with open("run/data-000", "r+b") as file:
        file.seek(offset)
        file.write(b"\1")
    assert main(["inspect", "run"]) == 0
    assert "  quite/a/long/key" in page.check("float32  1024x1024")
    assert main(["verify", "run", "--drop", "a"]) == 0
    page.check("damaged: ", "read ", "dropped 'a': generation 2 is without them")


def test_a_bench_fits(page: Page, tmp_path: Path) -> None:
    directories = (tmp_path / "one", tmp_path / "two")
    for directory in directories:
        directory.mkdir()
    request = BenchRequest(directories, engine="threads", yes=True)
    assert bench(request, replace(TINY_BENCH, rounds=1, tensor_rounds=1)) == 0
    page.check("this writes at most", "machine ", "op   ", "read  ", "write  ", "put  ", "best: engine", "read ")


def test_the_doctor_fits(page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examined, "__defaults__", (120.0,))  # a busy machine may be slow to answer
    assert main(["doctor", str(tmp_path)]) in (0, 1)
    page.check("ok ")
    words = "this and that and many more words " * 5
    findings = (
        Finding(str(tmp_path), "direct I/O", Outcome.BROKEN, words, words, words),
        Finding(MACHINE, "a", Outcome.SLOWER, words, mend=words),
    )
    DoctorReport(findings, None).show()  # type: ignore[arg-type]  # the machine is not shown
    page.check("broken  direct I/O", "slower  a           this")


def modules_after(program: str) -> set[str]:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_the_command_line_answers_without_what_is_heavy() -> None:
    calls = [["--help"], *([command, "--help"] for command in COMMANDS), ["--version"], ["trian"]]
    calls.append(["train", "--dram", "much"])
    found = modules_after(
        "import json, sys\nfrom tiered.tools.cli import main\n"
        f"for call in {calls}: main(call)\n"
        "print(json.dumps(sorted(sys.modules)))"
    )
    assert "typer" in found and not HEAVY & found
    assert not [name for name in found if name.startswith(("tiered.store", "tiered.zero", "tiered.tools.train"))]


def test_the_package_imports_its_parts_at_their_first_use() -> None:
    """So `import tiered` costs nothing beside `import torch`."""
    found = modules_after("import json, sys, tiered\nprint(json.dumps(sorted(sys.modules)))")
    assert not HEAVY & found
    assert {name for name in found if name.split(".")[0] == "tiered"} == {"tiered", "tiered.errors", "tiered.removed"}


def test_the_library_loads_no_tool() -> None:
    names = "[getattr(tiered, name) for name in tiered.__all__]"
    found = modules_after(f"import json, sys, tiered\n{names}\nprint(json.dumps(sorted(sys.modules)))")
    assert "tiered.hf" in found and not [name for name in found if name.startswith("tiered.tools")]

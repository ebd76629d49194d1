"""Commands that cannot be undone ask on a terminal; elsewhere they need --yes, and refuse before they write."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tiered
import tiered.tools.bench.command
from tests.measure.test_bench import FEW
from tiered.tools.cli import main
from tiered.tools.doctor.description import directory_description, machine_description
from tiered.units import GiB

KEY = "model/parameters/blocks.1"


def damaged_run(folder: Path) -> list[str]:
    """Make a run with damage in a key of a model; return the command that drops it."""
    with tiered.Store(folder, dram="16MiB") as store:
        store[KEY] = torch.zeros(1 << 16, dtype=torch.uint8)
    with tiered.Store(folder, dram="16MiB", mode="r") as store:
        offset = next(iter(store.records())).extents[0].offset
    with open(folder / "data-000", "r+b") as file:
        file.seek(offset)
        file.write(b"\1")
    return ["verify", str(folder), "--drop", KEY]


def run_with_leftovers(folder: Path) -> list[str]:
    """Make a run beside a file of a crash; return the command that removes it."""
    tiered.Store(folder, dram="16MiB").close()
    leftover = folder / ".tiered-profile.json.0123abcd"
    leftover.write_bytes(b"{")
    leftover.chmod(0o600)
    os.utime(leftover, (0, 0))  # long ago: a younger one may be in its instant
    return ["gc", str(folder)]


def old_run(folder: Path) -> list[str]:
    """Make a store; return the command that starts a run in its place."""
    with tiered.Store(folder, dram="16MiB") as store:
        store["a"] = torch.zeros(5)
    (folder.parent / "text.txt").write_bytes(b"one word, one meaning; " * 1300)
    sizes = ["--layers", "1", "--width", "64", "--heads", "4", "--context", "32", "--dram", "32MiB", "--steps", "1"]
    return ["train", "--fresh", "--store", str(folder), "--data", str(folder.parent / "text.txt"), *sizes]


CASES: dict[str, Callable[[Path], list[str]]] = {
    "verify --drop": damaged_run,
    "gc": run_with_leftovers,
    "train --fresh": old_run,
}


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name != "lock"}


@pytest.mark.parametrize("name", list(CASES))
def test_it_is_asked_on_a_terminal_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = CASES[name](tmp_path / "run")
    before = content(tmp_path / "run")
    assert main(command) == 2
    error = capsys.readouterr().err
    assert "there is no terminal to ask on: add --yes" in error and error.count("\n") == 1
    assert content(tmp_path / "run") == before, "nothing was written"
    asked: list[str] = []
    with monkeypatch.context() as terminal:
        terminal.setattr("sys.stdin.isatty", lambda: True)
        terminal.setattr("sys.stdout.isatty", lambda: True)
        terminal.setattr("builtins.input", lambda question: asked.append(question) or "n")
        assert main(command) == 2
    assert len(asked) == 1 and asked[0].endswith(" [y/N] ")
    assert content(tmp_path / "run") == before
    assert main([*command, "--yes"]) == 0
    assert content(tmp_path / "run") != before


def test_a_bench_that_writes_more_than_a_tenth_of_what_is_free_is_asked_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    described = replace(directory_description(tmp_path), free_nbytes=GiB)
    machine = replace(machine_description(), directories=(described,))
    monkeypatch.setattr(tiered.tools.bench.command, "machine_description", lambda directories: machine)
    assert main(["bench", str(tmp_path), "--quick"]) == 2
    error = capsys.readouterr().err
    assert "1.0 GiB free" in error and "there is no terminal to ask on: add --yes" in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(tiered.tools.bench.command, "QUICK", FEW)
    assert main(["bench", str(tmp_path), "--quick", "--yes"]) == 0

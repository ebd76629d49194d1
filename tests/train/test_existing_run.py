"""Directories that hold a run or none, and keys that a run cannot do without."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tiered
from tests.store.together import Together
from tests.train.test_loop import TINY
from tiered.bytes.arena import Arena
from tiered.store.catalog.sqlite_catalog import SqliteCatalog
from tiered.store.lifetime.opening import open_parts
from tiered.tools.cli import main

KEY = "model/parameters/blocks.1"


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """A store with a flipped byte in a key of a model and in another."""
    run = tmp_path / "run"
    with tiered.Store(run, dram="16MiB") as store:
        for key in (KEY, "other"):
            store[key] = torch.zeros(1 << 20, dtype=torch.uint8)
    with tiered.Store(run, dram="16MiB", mode="r") as store:
        offsets = [record.extents[0].offset for record in store.records()]
    with open(run / "data-000", "r+b") as file:
        for offset in offsets:
            file.seek(offset)
            file.write(b"\1")
    return run


def keys(run: Path) -> set[str]:
    with tiered.Store(run, dram="16MiB", mode="r") as store:
        return set(store)


def test_a_key_of_a_model_is_dropped_only_once_that_is_agreed_to(
    damaged: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with tiered.Store(damaged, dram="16MiB", mode="r") as store:
        offsets = [str(record.extents[0].offset) for record in store.records()]
    assert main(["verify", str(damaged), "--drop", KEY, "--drop", "other"]) == 2
    said = capsys.readouterr()
    assert f"--drop of '{KEY}' ends the training run for good" in said.err
    assert all(word in said.out for word in (KEY, "other", str(damaged / "data-000"), *offsets))
    assert keys(damaged) == {KEY, "other"}
    with monkeypatch.context() as terminal:
        terminal.setattr("sys.stdin.isatty", lambda: True)
        terminal.setattr("sys.stdout.isatty", lambda: True)
        terminal.setattr("builtins.input", lambda question: "" if "cannot go on without" in question else "y")
        assert main(["verify", str(damaged), "--drop", KEY]) == 2
    assert "nothing was dropped" in capsys.readouterr().err
    assert main(["verify", str(damaged), "--drop", "other"]) == 1, "which is nobody's, and not asked for"
    assert main(["verify", str(damaged), "--drop", KEY, "--yes"]) == 0
    assert keys(damaged) == set()


def test_a_run_that_is_not_there_is_not_gone_on_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_bytes(b"one word, one meaning; " * 1300)
    store = tmp_path / "typo" / "x"
    job = ["train", *TINY, "--data", str(tmp_path / "text.txt"), "--steps", "1", "--resume", "--store", str(store)]
    assert main(job) == 2
    assert f"no run in {store} to go on with" in capsys.readouterr().err
    assert not store.parent.exists()
    assert main([*job, "--yes"]) == 0


@pytest.mark.parametrize("command", ["verify", "gc", "inspect"])
def test_directories_without_a_run_are_said_to_be_that(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, str(tmp_path)]) == 2
    assert f"no run in {tmp_path}" in capsys.readouterr().err


def test_a_missing_directory_is_none_of_a_run(damaged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nowhere = damaged.parent / "nowhere"
    assert main(["verify", str(damaged), str(nowhere)]) == 2
    error = capsys.readouterr().err
    assert f"no run in {nowhere}" in error and "mode" not in error


@pytest.mark.parametrize("command", [["train", "--store"], ["train", "--data"], ["gc"], ["verify"], ["doctor"]])
def test_an_empty_path_is_not_this_directory(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, ""]) == 2
    assert "expected a path, got an empty one" in capsys.readouterr().err


def test_a_generation_that_is_kept_beside_the_newest_is_named_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both as they are at one moment: a writer that commits between two looks would make one of the other."""
    parts = open_parts([tmp_path / "run"], Arena(16 << 20), durable=True, engine="threads", mode="a")
    with tiered.Store._from_parts(replace(parts, confirmation=Together())) as store:
        for step in (1, 2):
            store["a"] = torch.full((5000,), step, dtype=torch.uint8)
            store.commit({"step": step})
    looks: list[str] = []
    look = SqliteCatalog._look
    monkeypatch.setattr(
        SqliteCatalog, "_look", lambda self, verb, read: (looks.append(verb), look(self, verb, read))[1]
    )
    assert main(["inspect", str(tmp_path / "run")]) == 0
    assert "\ngeneration 2; generation 1 is kept until the next commit\n" in capsys.readouterr().out
    assert looks == ["load"]

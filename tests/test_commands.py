"""README and docs: every command runs as written, by a user at a terminal who says yes to what it asks.

The places that it names are below a directory of the test's, and `tiered bench` measures tiny files for moments.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import chdir
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import tiered
from tests.measure.test_bench import FEW
from tests.store.places import quick_directory, short_files
from tests.test_docs import PAGES, blocks, moved
from tiered.bytes.device.profile import PROFILE_NAME
from tiered.tools.cli import main
from tiered.tools.doctor.doctor import examined

IN_BLOCKS = {
    line.partition("#")[0].strip()
    for page in PAGES
    for block in blocks(page, "")
    for line in block.splitlines()
    if line.startswith("tiered ")
}
IN_SENTENCES = {text for page in PAGES for text in re.findall(r"`(tiered [a-z]+ [^`]*)`", page.read_text())}
COMMANDS = sorted(command for command in IN_BLOCKS | IN_SENTENCES if "--device" not in command)
"""All but the one that wants an accelerator: tests/accelerator/test_docs.py has it."""

STANDS_FOR = {"RUN": "runs/mine", "FOLDER": "runs/files", "DIR": "nvme0", "[DIR...]": "nvme0"}


def does_bench(said: str) -> bool:
    return "GB/s" in said and any(Path("nvme0").glob(f"**/{PROFILE_NAME}"))


def does_export(said: str) -> bool:
    (file,) = Path("runs").glob("*/*.safetensors")
    return len(load_file(file)) == 4


def does_import(said: str) -> bool:
    with tiered.Store("runs/base", mode="r") as store:
        return len(store) == 2


DOES: dict[str, Callable[[str], bool]] = {
    "bench": does_bench,
    "doctor": lambda said: "io_uring" in said and "nvme0" in said,
    "export": does_export,
    "gc": lambda said: "runs/mine" in said and "freed" in said,
    "import": does_import,
    "inspect": lambda said: "registered tiered.model, tiered.random, tiered.optimizer" in said,
    "train": lambda said: "404.4 M parameters" in said and not any(Path("nvme0").iterdir()),
    "verify": lambda said: "none damaged" in said,
}


@pytest.fixture(autouse=True)
def directory() -> Iterator[None]:
    """A directory with all that the commands name: drives, a checkpoint, runs."""
    with quick_directory() as path, short_files(), chdir(path):
        for place in ("nvme0", "nvme1", "models/base", "runs"):
            Path(place).mkdir(parents=True)
        save_file({"a": torch.randn(300, 4), "b": torch.randn(7)}, "models/base/model.safetensors")
        yield


def train(run: str) -> None:
    """Leave a run with a committed step there."""
    with tiered.Store(run, dram="16MiB") as store:
        model = tiered.shard(nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 1)), store)
        optimizer = tiered.AdamW(model.parameters())
        model(torch.randn(2, 30)).sum().backward()
        optimizer.step()
        store.commit({"step": 1})


def come_to_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda question: "y")
    monkeypatch.setattr(examined, "__defaults__", (120.0,))  # a busy machine may be slow to answer
    monkeypatch.setattr("tiered.tools.bench.command.FULL", FEW)
    monkeypatch.setattr("tiered.tools.bench.command.QUICK", FEW)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_runs_as_written(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    come_to_a_terminal(monkeypatch)
    words = [STANDS_FOR.get(word, word) for word in shlex.split(moved(command).partition(" > ")[0])][1:]
    for word in words:
        if word.startswith("nvme0/run"):
            Path(word).mkdir()
        elif word in ("runs/tuned", "runs/mine"):
            train(word)
    status = main(words)
    said, complaint = capsys.readouterr()
    assert not complaint or complaint.startswith("warning: this CPU has no AVX-512")
    assert status == 0 or (words[0] == "doctor" and "1 thing is broken here: file system" in said)  # in memory
    assert DOES[words[0]](said), said


def test_all_are_found() -> None:
    assert {command.split()[1] for command in COMMANDS} == set(DOES)
    assert len(COMMANDS) >= 16

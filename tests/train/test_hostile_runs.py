"""What a run reads back of its directory is sound, refused in one line, or harmless: no traceback, hang or much memory.

The catalog's own format is altered byte by byte in tests/store/test_row.py; here are the commands, over every file of a
run, and what
lies inside a sound commit that another program may have written.
"""

from __future__ import annotations

import copy
import os
import random
import shutil
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tiered
import tiered.store.generations.generations
import tiered.store.store
import tiered.tools.train.run
from tests.devices.simulated_disk import SimulatedDisk
from tests.store.rig import simulated_store
from tests.train.test_loop import TINY
from tiered.bytes.device.profile import Profile, write_profile
from tiered.errors import TieredError
from tiered.store.generations.registry import committed_state
from tiered.tools.cli import main
from tiered.tools.inspect import find_run
from tiered.units import MiB

MOST_S = 30.0  # of the clock, on a machine that is busy: a hang takes for ever
FIXED_NBYTES = 24 * MiB  # what a command takes of Python's memory, whatever the run holds
HUGE_NBYTES = 1 << 40
NUM_CASES = 24

Change = Callable[[Path, random.Random], None]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step, done, with a profile of its drive; its data lies beside it."""
    root = tmp_path_factory.mktemp("made")
    (root / "text.txt").write_bytes(b"one word, one meaning; " * 1300)
    options = ["--data", str(root / "text.txt"), "--store", str(root / "run"), "--steps", "1", "--quiet"]
    assert main(["train", *TINY, *options]) == 0
    write_profile(
        root / "run",
        Profile(
            engine="threads", read_bytes_per_s=2e9, write_bytes_per_s=1e9, duplex=None, block_nbytes=4 * MiB,
            read_depth=4, write_depth=4, measured_at="2026-01-01T00:00:00+00:00", kernel="6.1",
        ),
    )  # fmt: skip
    return root


# -- files ---------------------------------------------------------------------------------------------------------


def flip(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes() or b"\0")
    for _ in range(rng.choice([1, 1, 8])):
        content[int(rng.random() * len(content))] ^= 1 << rng.randrange(8)
    with open(path, "r+b") as file:
        file.write(content)


def cut(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(max(1, path.stat().st_size)))


def junk(path: Path, rng: random.Random) -> None:
    path.write_bytes(rng.choice([rng.randbytes(4096), b"{" * 4096, b"[" * 60_000, b"\0" * 4096, b"SQLite format 3\0"]))


def replace_by_link(path: Path, rng: random.Random) -> None:
    path.rename(path.parent / "elsewhere")
    path.symlink_to(rng.choice([path.parent / "elsewhere", Path("/dev/zero"), Path("/dev/full"), path, Path("/")]))


def replace_by_fifo(path: Path, rng: random.Random) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def replace_by_directory(path: Path, rng: random.Random) -> None:
    path.unlink()
    path.mkdir(0o700)


CHANGES: dict[str, Change] = {
    "flip": flip,
    "cut": cut,
    "empty": lambda path, rng: os.truncate(path, 0),
    "junk": junk,
    "huge": lambda path, rng: os.truncate(path, HUGE_NBYTES),
    "link": replace_by_link,
    "second name": lambda path, rng: os.link(path, path.parent / "second"),
    "fifo": replace_by_fifo,
    "directory": replace_by_directory,
    "gone": lambda path, rng: path.unlink(),
}

COMMANDS: dict[str, tuple[str, ...]] = {
    "resume": ("train", "--resume", "--store"),
    "without a word": ("train", "--store"),
    "inspect": ("inspect",),
    "verify": ("verify",),
    "gc": ("gc", "--dry-run"),
}


def told(command: tuple[str, ...], run: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Return the status of ``tiered COMMAND run`` and its errors; whatever it raises, fails the test."""
    nbytes = sum(entry.lstat().st_blocks * 512 for entry in run.iterdir())
    tracemalloc.start()
    start_s = time.monotonic()
    try:
        status = main([*command, str(run)])
        _, peak_nbytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    said = capsys.readouterr()
    assert time.monotonic() - start_s < MOST_S
    assert peak_nbytes < 4 * nbytes + FIXED_NBYTES
    assert status in (0, 1, 2), said
    assert status != 2 or (said.err.startswith("tiered: ") and "Traceback" not in said.err and len(said.err) < 3000)
    assert status != 1 or "damaged" in said.out
    return status, said.err


def run_files(made: Path) -> list[str]:
    return sorted(entry.name for entry in (made / "run").iterdir())


def test_no_file_of_a_run_makes_a_command_fall_over(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert {"data-000", "catalog.db", "identity", "lock"} <= set(run_files(made)) and len(run_files(made)) >= 5
    cases = [(file, change) for file in run_files(made) for change in CHANGES]
    random.Random(7).shuffle(cases)
    num_refused = 0
    for number, (file, change) in enumerate(cases[:NUM_CASES]):
        run = tmp_path / "run"
        shutil.copytree(made / "run", run)
        CHANGES[change](run / file, random.Random(number))
        for command in random.Random(number).sample(list(COMMANDS), 2):
            status, _ = told(COMMANDS[command], run, capsys)
            num_refused += status != 0
        shutil.rmtree(run)
    assert num_refused > NUM_CASES // 2


def test_data_that_is_not_what_it_was_is_refused(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, run = made / "text.txt", tmp_path / "run"
    content = text.read_bytes()
    shutil.copytree(made / "run", run)
    for change in ("cut", "junk", "fifo", "directory", "gone", "link", "huge"):
        CHANGES[change](text, random.Random(1))
        status, said = told(("train", "--resume", "--steps", "2", "--store"), run, capsys)
        assert status == 2 and "data" in said, change
        found = find_run([run])
        assert found is not None and found.root.generation == 1
        if text.is_dir() and not text.is_symlink():
            text.rmdir()
        else:
            text.unlink(missing_ok=True)
        text.write_bytes(content)


# -- what a sound commit holds -------------------------------------------------------------------------------------

JUNK: list[Any] = [
    None, True, -1, 0, 1, 3, 1 << 60, 10**5000, 0.5, float("nan"), float("inf"), "", "8", "\0", "x" * 5000, b"x", [],
    {}, (), [1], ["a"], [None], {"a": 1}, {(1, 2): 3}, {1, 2}, torch.ones(2), torch.float32, 1 + 2j,
]  # fmt: skip


def spoilt(value: Any, rng: random.Random) -> Any:
    """Return a copy of a nest of dicts and lists with one value of it replaced, removed or added."""
    if isinstance(value, dict | list) and value and rng.random() < 0.9:
        copied = value.copy()
        name = rng.choice(list(copied) if isinstance(copied, dict) else range(len(copied)))
        how = rng.random()
        if how < 0.15:
            del copied[name]
        elif how < 0.25 and isinstance(copied, dict):
            copied[rng.choice(["", "another", 3, ("a", 1)])] = rng.choice(JUNK)
        else:
            copied[name] = spoilt(copied[name], rng)
        return copied
    return rng.choice(JUNK)


class FakeJob:
    """In the place of a job, which the plan is followed by."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def run(self, interruption: object) -> None: ...

    def hint(self) -> str:
        return ""


def test_whatever_a_commit_holds_a_run_goes_on_or_is_refused(
    made: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = find_run([made / "run"])
    assert found is not None
    monkeypatch.setattr(tiered.tools.train.run, "TrainingLoop", FakeJob)
    num_refused, rng = 0, random.Random(11)
    for number in range(120):
        state = spoilt(found.state, rng)
        state = state if isinstance(state, dict) else {"config": state, "dials": state, "step": state}
        monkeypatch.setattr(tiered.tools.train.run, "find_run", lambda _, state=state: replace(found, state=state))
        status = main([*COMMANDS["resume" if number % 4 else "without a word"], str(made / "run")])
        said = capsys.readouterr().err
        assert status == 0 or (status == 2 and said.startswith("tiered: ") and len(said) < 6000), state
        num_refused += status == 2
    assert 60 < num_refused < 120


def test_a_commit_of_anybody_can_be_inspected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with tiered.Store(tmp_path / "run", dram="16MiB") as store:
        for value in JUNK:
            store.commit({"config": value, "step": value})
            store.wait_for_commit()
    for command in ("resume", "without a word", "inspect", "verify"):
        status, _ = told(COMMANDS[command], tmp_path / "run", capsys)
        assert (status == 0) == (command in {"inspect", "verify"})


@pytest.fixture
def disk() -> Iterator[SimulatedDisk]:
    """A store that an optimizer of one parameter has committed to, and something that is registered."""
    disk = SimulatedDisk(capacity_nbytes=4 * MiB, can_lose_power=False)
    with simulated_store(disk, budget_nbytes=1 * MiB) as store:
        resumed(store)
        store.commit({"step": 1})
    yield disk


def resumed(store: tiered.Store) -> None:
    """Make the optimizer on ``store``, go on where it was, and make a step."""
    weight = torch.nn.Parameter(torch.linspace(-1, 1, 1500))
    optimizer = tiered.AdamW([weight], lr=0.1, store=store)
    store.resume()
    weight.grad = torch.ones(1500)
    optimizer.step()


def test_whatever_was_committed_for_an_optimizer_it_goes_on_or_is_refused(
    disk: SimulatedDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_refused, rng = 0, random.Random(13)
    for _ in range(100):
        kept: dict[str, Any] = {}

        def changed(text: str, kept: dict[str, Any] = kept) -> tuple[dict[str, Any], dict[str, Any]]:
            user, registered = committed_state(text)
            if registered and not kept:
                kept["tiered.optimizer"] = spoilt(copy.deepcopy(registered["tiered.optimizer"]), rng)
            return user, kept

        with monkeypatch.context() as patch:
            for module in (tiered.store.store, tiered.store.generations.generations):
                patch.setattr(module, "committed_state", changed)
            store = simulated_store(disk, budget_nbytes=1 * MiB)
            start_s = time.monotonic()
            try:
                resumed(store)
            except TieredError as error:
                num_refused += 1
                assert len(str(error)) < 1500
            finally:
                store.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)  # nothing of it is committed
            assert time.monotonic() - start_s < MOST_S
    assert 60 < num_refused < 100
    with simulated_store(disk, budget_nbytes=1 * MiB) as store:
        resumed(store)

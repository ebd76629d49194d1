"""Whatever lies in the place of a store's files, reading it ends soon, in little memory, with no error but ours."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.rigs.warm_python import WarmPython
from tests.store import fuzz
from tiered.errors import CorruptionError, UsageError
from tiered.store.generations.registry import Registry, committed_state

NUM_CASES = 120  # each kind four times or more; the campaign has an hour of them


def test_hostile_files_are_refused_or_read_right(warm_python: WarmPython) -> None:
    """In a process without threads, whose children the cases can be."""
    command = [warm_python.executable, "-m", "tests.store.fuzz", "0", str(NUM_CASES)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"cases": NUM_CASES, "wrong": []}


def die() -> str:
    os.kill(os.getpid(), signal.SIGKILL)
    return ""


def hang() -> str:
    while True:
        time.sleep(1)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_case_that_crashes_or_hangs_is_told_and_the_next_one_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "_HANG_S", 2.0)
    outcomes = fuzz.run_in_child([lambda: "", die, lambda: "wrong", hang, lambda: ""])
    assert outcomes == ["", f"the interpreter died with {-signal.SIGKILL}", "wrong", "nothing happened for 2.0 s", ""]


@pytest.mark.parametrize(
    "text", ["[]", "null", "3", '{"state":[]}', '{"registered":3}', '{"$tuple":[]}', "[" * 100_000]
)
def test_a_state_that_is_none_is_corruption(text: str) -> None:
    with pytest.raises(CorruptionError):
        committed_state(text)


class Picky:
    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        state["absent"]


def test_a_state_that_its_object_cannot_load_is_named() -> None:
    registry = Registry("{}")
    registry.add("loader", Picky())
    with pytest.raises(UsageError, match=r"a Picky cannot load .* for 'loader': KeyError\('absent'\)"):
        registry.load({"loader": {}})

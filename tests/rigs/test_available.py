"""The run says at its end which rigs were off, and why."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.rigs.available import RIGS, off, refusal
from tests.rigs.warm_python import WarmPython

ROOT = Path(__file__).parents[2]
SKIPPED = f"""
import pytest

@pytest.mark.parametrize("number", [1, 2])
def test_something(number):
    pytest.skip({off("a thing", "nobody has one")!r})

def test_something_else():
    pytest.skip("no affair of a rig's")
"""


def test_the_last_lines_name_each_rig_that_was_off(tmp_path: Path, warm_python: WarmPython) -> None:
    (tmp_path / "test_it.py").write_text(SKIPPED)
    command = [warm_python.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", str(tmp_path)]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300).stdout
    lines = output.splitlines()
    assert lines[-2] == "rig off: a thing: nobody has one (2 tests skipped)"
    assert output.count("rig off: ") == 1 and "3 skipped" in lines[-1]


def test_whether_a_rig_is_on_is_known_without_anything_installed() -> None:
    command = [sys.executable, "-S", "tests/rigs/available.py"]
    lines = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    assert lines == [f"rig on: {rig}" if refusal(rig) is None else off(rig, str(refusal(rig))) for rig in RIGS]


def test_all_are_off_without_root() -> None:
    given_up = "import os, tests.rigs.available as a; os.geteuid() or os.setuid(65534); a.main()"
    command = [sys.executable, "-c", given_up]
    lines = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    assert lines == [off(rig, "it takes root, with the right to mount") for rig in RIGS]

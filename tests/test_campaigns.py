"""Campaigns add up: each run goes on at the seed where the last one ended, and the table counts all of them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rigs.available import needs
from tests.rigs.warm_python import WarmPython

ROOT = Path(__file__).parents[1]


ON_ONE_CORE = """
import os, runpy, sys
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
sys.argv, sys.path[0] = sys.argv[1:], "bench"
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def soak(
    results: Path, *arguments: str, python: list[str] | None = None, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    command = [*(python or [sys.executable]), "bench/soak.py", "--results", str(results), *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("shutdown-ext4", marks=needs("ext4 shutdown")),
        pytest.param("errno", marks=needs("faulty file system")),
    ],
)
def test_runs_of_a_campaign_add_up(name: str, tmp_path: Path, warm_python: WarmPython) -> None:
    results = tmp_path / "soak.json"
    for _ in range(2):
        arguments = ("--minutes", "0.01", "--campaign", name)
        done = soak(results, *arguments, python=[warm_python.executable], environment=warm_python.environment)
        assert done.returncode == 0, done.stderr + done.stdout
    first, second = json.loads(results.read_text())
    assert first["campaign"] == second["campaign"] == name
    assert first["first"] == 0 < first["end"] == second["first"] < second["end"]
    assert not first["wrong"] and not second["wrong"]
    assert json.loads(done.stdout.splitlines()[-1])["cases"] == {name: second["cases"]}
    row = next(line for line in done.stdout.splitlines() if line.startswith(name))
    assert row.split()[1:3] == ["2", str(first["cases"] + second["cases"])]


def test_a_campaign_of_independent_seeds_runs_in_processes(tmp_path: Path, warm_python: WarmPython) -> None:
    """One for each core: here it may use one, for a process with torch takes its time to start."""
    arguments = ("--minutes", "0.001", "--campaign", "simulated")
    done = soak(tmp_path / "soak.json", *arguments, python=[warm_python.executable, "-c", ON_ONE_CORE])
    assert done.returncode == 0, done.stderr + done.stdout
    (entry,) = json.loads((tmp_path / "soak.json").read_text())
    assert not entry["wrong"] and entry["cases"] > entry["inside_commit"] > 0


def test_a_campaign_of_batches_counts_the_cases_of_each(tmp_path: Path, warm_python: WarmPython) -> None:
    arguments = ("--minutes", "0.001", "--campaign", "writes")
    done = soak(tmp_path / "soak.json", *arguments, python=[warm_python.executable, "-c", ON_ONE_CORE])
    assert done.returncode == 0, done.stderr + done.stdout
    (entry,) = json.loads((tmp_path / "soak.json").read_text())
    assert not entry["wrong"] and (entry["end"], entry["cases"]) == (1, 50)


def test_an_unknown_campaign_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    done = soak(tmp_path / "soak.json", "--campaign", "kil")
    assert done.returncode == 2
    assert "shutdown-xfs" in done.stderr

"""Each bench runs, tiny, and ends with its one JSON line; at least once as a user starts it."""

import json
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.warm_python import WarmPython

ROOT = Path(__file__).parents[1]
TINY = ("--layers", "2", "--width", "64", "--heads", "4", "--context", "16", "--batch", "2", "--steps", "3")


def run(
    bench: str, *options: object, python: WarmPython, executable: str = "", forks: bool = True
) -> tuple[dict[str, Any], str]:
    """Run a bench; return its JSON line and all that it said. ``forks``: its own processes fork ``python``, too."""
    command = [executable or python.executable, f"bench/{bench}.py", *map(str, options)]
    environment = python.environment if forks else None
    output = subprocess.run(
        command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True, timeout=300
    ).stdout
    result = json.loads(output.splitlines()[-1])
    assert result.get("bench", bench) == bench
    return result, output


def train(bench: str, tmp_path: Path, *options: str, **how: Any) -> tuple[dict[str, Any], str]:
    """Run a training bench on the tiny model, with its stores in a directory that is empty afterwards."""
    found = run(bench, *TINY, "--dram", "16MiB", "--store", tmp_path, *options, **how)
    assert not list(tmp_path.iterdir())
    return found


def test_train_step_runs_tiny(tmp_path: Path, warm_python: WarmPython) -> None:
    options = ("--pairs", "1", "--hold", "0", "--clip", "0.5", "--update", "step")
    result, output = train("train_step", tmp_path, *options, python=warm_python, executable=sys.executable)
    assert result["ratio"] > 0
    assert result["write_bytes_per_param"] > 12
    assert result["peak_rss_bytes"] > result["resident_bytes"] > 0
    assert set(result["moved_bytes_per_param"]) >= {"parameters", "optimizer state", "catalog"}
    assert result["verdict"] in output


def test_a_bench_compares_with_another_checkout(tmp_path: Path, warm_python: WarmPython) -> None:
    """This tree stands for the other one."""
    for tree in (ROOT, tmp_path):
        options = ("--pairs", "1", "--against", f"tree={tree}")
        with nullcontext() if tree == ROOT else pytest.raises(subprocess.CalledProcessError):
            result, output = train("train_step", tmp_path, *options, python=warm_python)
            assert result["ratio"] > 0 and result["cpu_ratio"] > 0, output


def test_files_runs_tiny(tmp_path: Path, warm_python: WarmPython) -> None:
    tiny = ["--layers", "2", "--width", "64", "--heads", "4", "--vocabulary", "256", "--dram", "16MiB", "--turns", "1"]
    result, output = run("files", *tiny, "--store", str(tmp_path), python=warm_python)
    for part in ("copied", "in place", "export", "own save"):
        assert result[part]["within"] and result[part]["of_drive"] > 0, output
    assert not list(tmp_path.iterdir())


def test_frozen_runs_tiny(tmp_path: Path, warm_python: WarmPython) -> None:
    tiny = ["--layers", "2", "--width", "64", "--heads", "4", "--dram", "64", "--store", str(tmp_path)]
    result, output = run("frozen", *tiny, python=warm_python)
    for name in ("lora", "half", "later"):
        assert result[name]["same_bits"] and result[name]["within"], output


def test_budget_sweep_follows_the_formula_tiny(tmp_path: Path, warm_python: WarmPython) -> None:
    options = ("--budgets", "smallest,24MiB", "--layers", "6", "--width", "256", "--no-durable")
    result, _ = train("budget_sweep", tmp_path, *options, python=warm_python)
    assert result["follows"]
    small, large = result["rows"]
    assert small["read"] > large["read"]
    assert small["gradients"] == [0, 0]
    assert small["written"] == pytest.approx(small["written_formula"], rel=0.03)


def test_scale_runs_tiny(tmp_path: Path, warm_python: WarmPython) -> None:
    options = ("--sizes", "100K,200K", "--no-durable")
    result, _ = train("scale", tmp_path, *options, python=warm_python)
    assert [row["layers"] for row in result["rows"]] == [1, 3]
    assert all(row["ns_per_param"] > 0 for row in result["rows"])


def test_memory_is_drawn_from_the_reports_of_runs(tmp_path: Path, warm_python: WarmPython) -> None:
    for number, params in enumerate((400_000_000, 7_000_000_000)):
        (tmp_path / f"{number}.json").write_text(json.dumps({"params": params, "peak_rss_bytes": 5 << 30}))
    reports = [str(tmp_path / f"{number}.json") for number in (1, 0)]
    result, _ = run("memory", *reports, "--plot", tmp_path / "memory.png", python=warm_python)
    assert [row["in_memory_bytes"] for row in result["rows"]] == [6_400_000_000, 112_000_000_000]
    assert (tmp_path / "memory.png").stat().st_size > 10_000


def test_compare_says_what_is_missing(tmp_path: Path, warm_python: WarmPython) -> None:
    options = ("--pairs", "1", "--deepspeed-python", "/nowhere/python")
    result, output = train("compare", tmp_path, *options, python=warm_python)
    assert result["ratio"] is None
    assert "DeepSpeed is not there" in output
    assert "deepspeed==" in output


def test_quality_runs_tiny(tmp_path: Path, warm_python: WarmPython) -> None:
    curves = tmp_path / "curves.png"
    result, _ = run("quality", "--tiny", "--plot", str(curves), python=warm_python)
    assert result["steps"] == 6
    assert set(result["finals"]) == {"exact", "compact"}
    assert all(abs(over) < 0.01 for over in result["over_exact"].values())
    assert curves.stat().st_size > 1000


def test_small_tensors_runs_tiny(tmp_path: Path, warm_python: WarmPython) -> None:
    tiny = ["--keys", "3000", "--dram", "16MiB", "--turns", "1", "--slice", "1000", "--store", str(tmp_path)]
    tiny += ["--against", f"tree={ROOT}"]
    result, _ = run("small_tensors", *tiny, python=warm_python)
    assert result["keys"] == 3000
    assert min(result["put_per_s"], result["get_per_s"], result["open_s"]) > 0
    assert min(result["against"][name]["ratio"] for name in ("put_per_s", "get_cpu_s")) > 0
    assert not list(tmp_path.iterdir())


def test_io_engine_runs_tiny(tmp_path: Path, warm_python: WarmPython) -> None:
    tiny = ["--rounds", "1", "--seconds", "0.05", "--file", "64MiB", "--blocks", "1MiB", "--opens", "5"]
    result, _ = run("io_engine", str(tmp_path), *tiny, "--only", "engines,duplex,leaks", python=warm_python)
    assert {row["engine"] for row in result["engines"]} == {"uring", "threads"}
    assert all(row["gb_per_s"] > 0 for row in result["engines"] + result["duplex"])
    assert all(row["fds"] == row["threads"] == 0 for row in result["leaks"])
    assert not list(tmp_path.iterdir())


def test_tensor_level_runs_tiny(tmp_path: Path, warm_python: WarmPython) -> None:
    tiny = ["--rounds", "1", "--tensor", "4MiB", "--total", "16MiB", "--dram", "32MiB", "--block", "1MiB"]
    result, _ = run("tensor_level", tmp_path, *tiny, python=warm_python)
    assert [row["op"] for row in result["rows"]] == ["put", "get", "lease"]
    assert all(row[f"{name}_gb_per_s"] > 0 for row in result["rows"] for name in ("raw", "ceiling", "store"))
    result, _ = run("tensor_level", tmp_path, *tiny, "--against", f"tree={ROOT}", python=warm_python)
    assert all(row["wall_s_ratio"] > 0 < row["cpu_s_ratio"] for row in result["rows"])
    assert not list(tmp_path.iterdir())


def test_two_directories_runs_tiny(tmp_path: Path, warm_python: WarmPython) -> None:
    tiny = ["--limit", "3GB", "--nbytes", "32MiB", "--rounds", "1", "--dram", "16MiB", "--store", str(tmp_path)]
    result, _ = run("two_directories", *tiny, python=warm_python)
    assert min(result[kind] for kind in ("stream_put", "stream_get", "swap_out", "swap_in")) > 0
    assert not list(tmp_path.iterdir())


def test_overhead_runs_tiny(tmp_path: Path, warm_python: WarmPython) -> None:
    tiny = ["--widths", "16", "--units", "3", "--turns", "1", "--steps", "2", "--store", str(tmp_path)]
    result, output = run("overhead", *tiny, python=warm_python)
    (row,) = result["rows"]
    assert (row["numel"], row["units"]) == (544, 3)
    assert all(row["ratio"][what][mode] > 0 for what in ("time", "cpu") for mode in ("backward", "step"))
    assert all(0 < row["calls"][mode]["training thread"] < 1250 for mode in ("backward", "step")), output
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="the device is compiled")
def test_device_bits_runs_tiny(warm_python: WarmPython) -> None:
    tiny = ["--models", "tied_head,lstm", "--every", "17"]
    result, output = run("device_bits", *tiny, python=warm_python, forks=False)
    assert (result["runs"], result["wrong"]) == (6, 0), output


def test_way_runs_tiny(tmp_path: Path, warm_python: WarmPython) -> None:
    result, output = run("way", "--store", str(tmp_path), python=warm_python)
    ways = result["ways"]
    assert len(ways) == 7
    assert all(way["calls"] > 0 for way in ways.values()), output
    assert {"zero/parameters/unit.py", "tiers/trace.py"} <= set(ways["fault-in"]["files"])
    assert "zero/optimizer/bucket_update.py" in ways["bucket"]["files"]
    for name, most in (("fault-in", 8), ("bucket", 9)):
        assert ways[name]["zero"] + ways[name]["tiers"] <= most, output
    assert not list(tmp_path.iterdir())


def test_ranks_step_runs_tiny(tmp_path: Path, warm_python: WarmPython) -> None:
    tiny = [
        "--worlds",
        "1,2",
        "--width",
        "64",
        "--layers",
        "2",
        "--steps",
        "1",
        "--limit",
        "1GiB",
        "--store",
        str(tmp_path),
    ]
    result, output = run("ranks_step", *tiny, python=warm_python)
    assert [len(seen) for seen in result["worlds"].values()] == [1, 2], output
    result, output = run(
        "ranks_step", "--drive", "--worlds", "1,2", "--nbytes", "64MiB", "--turns", "1", "--store", str(tmp_path),
        python=warm_python,
    )  # fmt: skip
    assert all(row["put"] > 0 for rows in result["drive"].values() for row in rows), output


def test_ranks_runs_tiny(warm_python: WarmPython) -> None:
    tiny = ["--nbytes", "1MiB", "--pairs", "1", "--kills", "1", "--worlds", "2", "--kinds", "other unit,one more"]
    result, output = run("ranks", *tiny, python=warm_python)
    assert result["gathers"][0]["ratio"] > 0
    assert (result["kills"]["kills"], result["kills"]["wrong"]) == (1, []), output
    assert result["departures"]["departures"] == 4


def test_ranks_commit_runs_tiny(warm_python: WarmPython, tmp_path: Path) -> None:
    tiny = ["--worlds", "1,2", "--commits", "3", "--carry", "2,1", "--width", "32", "--layers", "2"]
    result, output = run("ranks_commit", *tiny, "--store", str(tmp_path), python=warm_python)
    assert result["commits"]["2"]["confirm"] > 0 and [row["world"] for row in result["carry"]] == [2, 1], output


def test_soak_kills_ranks_tiny(warm_python: WarmPython) -> None:
    result, output = run("soak", "--ranks", "2", "--kills", "4", python=warm_python)
    assert (result["kills"], result["lost"], result["wrong"]) == (4, 0, []), output
    assert result["inside_commit"] > 0

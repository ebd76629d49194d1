"""The check of a machine with a GPU: its whole path on the simulated device, and the sizes of its runs."""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import tiered
from bench import gpu_bits, gpu_check
from bench.gpu_check import Journal, Part, PytestLines, check, run_part
from bench.gpu_runs import waits_by_profiler
from bench.gpu_sizes import BUDGETS, DISK, IN_MEMORY, STATE, Machine, sizes_for
from bench.gpu_waits import counted
from tests.rigs.warm_python import WarmPython
from tiered.tools.bench.report import Bandwidth
from tiered.units import GiB

ROOT = Path(__file__).parents[2]
H100 = Machine(60 * GiB, 120 * GiB, 78 * GiB, Bandwidth(3e9, 2e9), 6e14)
SMALL_CARD = Machine(200 * GiB, 60 * GiB, 15 * GiB, Bandwidth(6e9, 5e9), 4e13)


def lines_of(results: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the lines of the check's journal by their part, the status of each part last."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in (results / "gpu_check.jsonl").read_text().splitlines():
        found[json.loads(line)["part"]].append(json.loads(line))
    return found


def test_the_whole_check_runs_on_the_simulated_device(
    sim: ModuleType, drive_path: Path, warm_python: WarmPython
) -> None:
    environment = warm_python.environment | {
        "PYTHON": warm_python.executable, "TIERED_TEST_DEVICE": "sim",
        "GPU_CHECK_TESTS": "tests/accelerator/test_training.py -k gpt-torch.bfloat16-step",
    }  # fmt: skip
    command = [ROOT / "scripts" / "gpu_check", "9", "--tiny", "--results", drive_path, "--store", drive_path / "store"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stdout + done.stderr
    parts = lines_of(drive_path)
    statuses = {name: lines[-1]["status"] for name, lines in parts.items() if name != "all"}
    of_cuda_alone = {"bits without a cache of memory", "sanitizer", "other tests"}
    assert {name for name, status in statuses.items() if status != "green"} == of_cuda_alone, done.stdout
    assert parts["tests"][-1]["passed"] == 1 and (drive_path / "tests.xml").exists()
    assert [line["num_params"] > 0 for line in parts["bits"][:-1]] == [True] * 5
    assert 2 <= parts["kill"][0]["resumed_at"] < 8
    assert [line["num_waits"] for line in parts["waits"][:2]] == [0, 0]
    result = parts["bench"][-2]
    assert min(result[run]["seconds"] for run in ("compute_bound", "io_bound", "in_memory")) > 0
    assert 0 < result["compute_bound"]["device"]["peak_bytes"] <= result["sizes"]["device_memory"]
    (file,) = drive_path.glob("gpu_*.md")
    text = file.read_text()
    assert "| compute-bound |" in text and "| I/O-bound |" in text
    assert not list((drive_path / "store").iterdir())


def part_of(name: str, script: str, **options: Any) -> Part:
    return Part(name, 1, ["bash", "-c", script], **options)


def test_a_part_that_fails_or_says_nothing_is_red_and_stops_no_other(tmp_path: Path) -> None:
    parts = [
        part_of("fails", """echo '{"figure": 1}'; exit 3"""),
        part_of("finds", """echo '{"figure": 1, "wrong": "bits differ"}'"""),
        part_of("is silent", "true"),
        Part("is not there", 1, ["/nowhere"]),
        part_of("does not apply", "exit 1", inapplicable="CUDA's alone"),
        part_of("passes no test", "echo '= 5 deselected in 0.1s ='", reader=PytestLines()),
        part_of("is good", """echo no figure; echo '{"figure": 2}'"""),
    ]
    ended = check(parts, 600, tmp_path)
    assert {each["part"]: each["status"] for each in ended} == {
        "fails": "red", "finds": "red", "is silent": "red", "is not there": "red", "does not apply": "does not apply",
        "passes no test": "red", "is good": "green",
    }  # fmt: skip
    lines = lines_of(tmp_path)
    assert [line.get("figure") for line in lines["finds"]] == [1, None]
    assert lines["finds"][-1]["wrong"] == ["bits differ"]
    assert [each["status"] for each in check([part_of("comes too late", "true")], 0, tmp_path)] == ["not run"]


def test_a_part_that_hangs_is_killed_with_all_that_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "GRACE_S", 0.1)
    script = """trap '' INT; sleep 60 & echo '{"child": '$!'}'; wait"""
    with open(tmp_path / "gpu_check.jsonl", "w") as file:
        ended = run_part(part_of("hangs", script), 0.5, tmp_path, Journal(file))
    assert (ended["status"], ended["why"]) == ("cut short", "no end after 0.5 s")
    (line,) = lines_of(tmp_path)["hangs"]  # what the part said before its end
    with suppress(ProcessLookupError):
        child = os.pidfd_open(line["child"])
        try:
            assert select.select([child], [], [], 10)[0], "the child lives"
        finally:
            os.close(child)


def test_tests_that_fail_or_never_end_are_known_by_their_names() -> None:
    reader = PytestLines()
    lines = (
        "collected 6 items / 1 deselected / 5 selected",
        "tests/accelerator/test_a.py::test_good PASSED                    [ 20%]",
        "tests/accelerator/test_a.py::test_bad[gpt None-1] FAILED         [ 40%]",
        "tests/accelerator/test_a.py::test_loud something was printed",
        "FAILED                                                           [ 60%]",
        "tests/accelerator/test_a.py::test_hangs ",
    )
    found = [figures for line in lines if (figures := reader.read(line)) is not None]
    bad, loud = "tests/accelerator/test_a.py::test_bad[gpt None-1]", "tests/accelerator/test_a.py::test_loud"
    assert [each["wrong"] for each in found] == ["failed", "failed"]
    assert reader.wrong[0] == bad and reader.wrong[1].startswith(loud)
    hanging = "tests/accelerator/test_a.py::test_hangs"
    assert reader.figures() == {"passed": 1, "failed": 2, "deselected": 1, "running": hanging}


def test_bits_that_differ_are_told_and_the_other_runs_go_on(
    sim: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_bits.Training, "start", started_with_one_other_bit(gpu_bits.Training.start))
    device, rows = torch.device("sim", 0), gpu_bits.ROWS[:2]
    gpu_bits.compare(device, rows, gpu_bits.SMALL, tmp_path, end_s=time.monotonic() + 60, late=False)
    wrong = [json.loads(line)["wrong"] for line in capfd.readouterr().out.splitlines() if line.startswith("{")]
    assert len(wrong) == 2 and all("losses differ at [0, 1, 2]" in each for each in wrong)


def started_with_one_other_bit(start: Any) -> Any:
    def start_otherwise(training: Any, store: Any) -> Any:
        session = start(training, store)
        with tiered.unsharded(session.model), torch.no_grad():
            session.model.ln.weight[3] = 2.0
        return session

    return start_otherwise


def test_a_witness_that_sees_no_planted_wait_says_so_instead_of_none() -> None:
    blind = counted("blind", lambda step: {}, lambda: None, lambda: None)
    assert "num_waits" not in blind and "no wait was seen where one was planted" in blind["why"]
    without_device = counted("torch's profiler", waits_by_profiler, torch.ones(4).sum, torch.ones(4).sum)
    assert "num_waits" not in without_device and "the profiler saw none of cudaLaunchKernel" in without_device["why"]
    waits = counted("sees", lambda step: {"cudaStreamSynchronize": 2}, lambda: None, lambda: None)
    assert waits["num_waits"] == 2 and "a settled step waits" in waits["wrong"]


@pytest.mark.parametrize("machine", [H100, SMALL_CARD, replace(H100, disk_bytes=10 * GiB)])
@pytest.mark.parametrize("seconds", [120, 300])
def test_a_run_fits_the_machine_and_exceeds_both_budgets(machine: Machine, seconds: float) -> None:
    sizes = sizes_for(machine, seconds)
    num_params = sizes.shape.num_params
    assert DISK * num_params <= machine.disk_bytes
    assert sizes.dram <= machine.ram_bytes / 2
    assert STATE * num_params > sizes.dram + sizes.device_memory == 2 * BUDGETS * num_params
    assert IN_MEMORY * num_params < 0.5 * machine.device_bytes or num_params > 10**9
    arithmetic_s = 8 * num_params * sizes.tokens / machine.flop_per_s
    io_s = num_params * (14 / machine.drive.read_bytes_per_s + 12 / machine.drive.write_bytes_per_s)
    assert not sizes.is_compute_bound or arithmetic_s > io_s
    assert 12 * max(arithmetic_s, io_s) < 2 * seconds


def test_a_state_beyond_card_and_memory_trains_tiny(sim: ModuleType, drive_path: Path, warm_python: WarmPython) -> None:
    tiny = "--layers 3 --width 64 --heads 4 --context 16 --dram 16MiB --device-memory 2MiB --card 4MiB"
    limit = "--memory-limit 1GiB" if os.geteuid() == 0 and Path("/sys/fs/cgroup/memory").is_dir() else ""
    command = [warm_python.executable, "bench/beyond_memory.py", *tiny.split(), *limit.split()]
    output = subprocess.run(
        [*command, "--store", str(drive_path)], cwd=ROOT, check=True, capture_output=True, text=True, timeout=300
    ).stdout
    result = json.loads(output.splitlines()[-1])
    assert result["bench"] == "beyond_memory" and result["same_losses"] and result["within"], output
    assert 0 < result["device"]["peak_bytes"] < result["device"]["allocator_peak_bytes"] <= 4 << 20

"""The check of a machine with a GPU: its whole path on the simulated device, and the sizes of its runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from bench.gpu_sizes import BUDGETS, DISK, IN_MEMORY, STATE, Machine, sizes_for
from tests.rigs.warm_python import WarmPython
from tiered.train.bound import Bandwidth
from tiered.units import GiB

ROOT = Path(__file__).parents[2]
H100 = Machine(60 * GiB, 120 * GiB, 78 * GiB, Bandwidth(3e9, 2e9), 6e14)
SMALL_CARD = Machine(200 * GiB, 60 * GiB, 15 * GiB, Bandwidth(6e9, 5e9), 4e13)


def test_the_whole_check_runs_on_the_simulated_device(
    sim: ModuleType, drive_path: Path, warm_python: WarmPython
) -> None:
    environment = warm_python.environment | {
        "PYTHON": warm_python.executable, "TIERED_TEST_DEVICE": "sim",
        "GPU_CHECK_TESTS": "tests/accelerator/test_training.py -k gpt-torch.bfloat16-step",
        "GPU_CHECK_BENCH": f"--tiny --store {drive_path / 'store'} --results {drive_path}",
    }  # fmt: skip
    done = subprocess.run(
        [ROOT / "scripts" / "gpu_check", "9"], env=environment, capture_output=True, text=True, timeout=540
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed = [int(number) for number in re.findall(r"^(\d+) passed", done.stdout, re.MULTILINE)]
    assert len(passed) == 2 and passed[0] == 1 and passed[1] > 1, done.stdout
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["bench"] == "gpu" and result["waiting_calls"] == {}
    assert min(result[run]["seconds"] for run in ("compute_bound", "io_bound", "in_memory")) > 0
    assert 0 < result["compute_bound"]["device"]["peak_bytes"] <= result["sizes"]["device_memory"]
    (file,) = drive_path.glob("gpu_*.md")
    text = file.read_text()
    assert "| compute-bound |" in text and "| I/O-bound |" in text
    assert "Calls of a settled step that wait for the device: none." in text
    assert not list((drive_path / "store").iterdir())


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


def test_a_check_without_time_left_has_a_small_run() -> None:
    assert sizes_for(H100, -100.0).shape.num_params <= sizes_for(H100, 300).shape.num_params


def test_a_fast_card_gets_as_many_tokens_as_hide_its_io() -> None:
    assert sizes_for(H100, 300).is_compute_bound


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

"""Each bench runs, tiny, and ends with its one JSON line."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_train_step_runs_tiny(tmp_path: Path) -> None:
    tiny = ["--layers", "2", "--width", "64", "--heads", "4", "--context", "16", "--batch", "2", "--dram", "16MiB"]
    command = [sys.executable, "bench/train_step.py", "--pairs", "1", "--steps", "3", "--store", str(tmp_path), *tiny]
    output = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=120).stdout
    result = json.loads(output.splitlines()[-1])
    assert result["bench"] == "train_step"
    assert result["ratio"] > 0
    assert not list(tmp_path.iterdir())

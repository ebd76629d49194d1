"""The bench of two directories runs, tiny, and ends with its one JSON line."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_two_directories_runs_tiny(tmp_path: Path) -> None:
    tiny = ["--limit", "3GB", "--nbytes", "32MiB", "--rounds", "1", "--dram", "16MiB", "--store", str(tmp_path)]
    command = [sys.executable, "bench/two_directories.py", *tiny]
    output = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=120).stdout
    result = json.loads(output.splitlines()[-1])
    assert result["bench"] == "two_directories"
    assert min(result[kind] for kind in ("stream_put", "stream_get", "swap_out", "swap_in")) > 0
    assert not list(tmp_path.iterdir())

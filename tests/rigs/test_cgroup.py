"""The limits are real: what is over its memory is killed, what writes through a throttle takes its time."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.rigs.available import needs, off
from tests.rigs.cgroup import limited_memory, throttled
from tests.rigs.drives import Shutdown
from tests.rigs.room import Room
from tiered.store.store import Store
from tiered.units import MiB


def run_in(group: Path | str, *command: str) -> int:
    """Run ``command`` as a member of ``group``; return its exit status."""
    if isinstance(group, str):
        pytest.skip(off("cgroup", group))
    shell = ["sh", "-c", 'echo $$ > "$0"/cgroup.procs && exec "$@"', str(group), *command]
    return subprocess.run(shell, capture_output=True, timeout=60).returncode


HUNGRY = """
import sys, torch, tiered
with tiered.Store(sys.argv[1], dram="16MiB") as store:
    store["a"] = torch.arange(3_000_000)
    store.commit({"step": 1})
    store["b"] = torch.arange(3_000_000)
    store.commit({"step": 2}, wait=False)
    memory = bytearray(1 << 30)
"""


@needs("memory cgroup")
def test_a_store_whose_process_the_kernel_kills_for_memory_holds_its_last_commit(tmp_path: Path) -> None:
    with limited_memory(512 * MiB) as group:
        assert run_in(group, sys.executable, "-c", HUNGRY, str(tmp_path / "run")) == -signal.SIGKILL
    with Store(tmp_path / "run", dram="16MiB") as store:
        step = store.state["step"]
        assert step in (1, 2) and set(store) == set("ab"[:step]) and store.verify().is_clean
        assert torch.equal(store["a"], torch.arange(3_000_000))


WRITER = """
import sys, time, torch, tiered
with tiered.Store(sys.argv[1], dram="16MiB") as store:
    start = time.monotonic()
    store["a"] = torch.arange(500_000)  # 4 MB
    store.commit({"step": 1})
    store.commit({"step": 2, "seconds": time.monotonic() - start})
"""


@needs("blkio cgroup")
def test_a_store_on_a_slow_drive_commits_and_takes_its_time(a_room: Room) -> None:
    mount = Shutdown(a_room, "ext4").mounts[0]
    with throttled(mount, bytes_per_s=4 * MiB) as group:
        assert run_in(group, sys.executable, "-c", WRITER, str(mount / "run")) == 0
    with Store(mount / "run", dram="16MiB") as store:
        assert store.state["step"] == 2 and store.state["seconds"] > 0.5  # one, less what it lets pass at first
        assert torch.equal(store["a"], torch.arange(500_000)) and store.verify().is_clean

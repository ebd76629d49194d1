"""The limits are real: what is over its memory is killed, what writes through a throttle takes its time."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.rigs.available import needs, off
from tests.rigs.cgroup import limited_memory, throttled
from tests.rigs.drives import Shutdown
from tests.rigs.room import Room
from tiered.store.store import Store
from tiered.units import MiB

TAKE = "import sys; memory = bytearray(int(sys.argv[1])); print(len(memory))"


def run_in(group: Path | str, *command: str) -> int:
    """Run ``command`` as a member of ``group``; return its exit status."""
    if isinstance(group, str):
        pytest.skip(off("cgroup", group))
    shell = ["sh", "-c", 'echo $$ > "$0"/cgroup.procs && exec "$@"', str(group), *command]
    return subprocess.run(shell, capture_output=True, timeout=60).returncode


@needs("memory cgroup")
def test_a_process_over_its_memory_is_killed() -> None:
    with limited_memory(64 * MiB) as group:
        assert run_in(group, sys.executable, "-c", TAKE, str(16 * MiB)) == 0
        assert run_in(group, sys.executable, "-c", TAKE, str(256 * MiB)) == -signal.SIGKILL
    assert isinstance(group, str) or not group.exists()


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


@needs("blkio cgroup")
def test_writes_through_a_throttle_take_their_time(a_room: Room) -> None:
    mount = Shutdown(a_room, "ext4").mounts[0]
    write = ["dd", "if=/dev/zero", f"of={mount}/file", "bs=256k", "count=8", "oflag=direct"]
    with throttled(mount, bytes_per_s=4 * MiB) as group:
        start = time.monotonic()
        assert run_in(group, *write) == 0
        assert time.monotonic() - start > 0.3  # half a second, less what the throttle lets pass at first

"""A room goes with all that is mounted in it, however the process ends that made it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rigs.available import needs
from tests.rigs.room import room, sweep

ROOT = Path(__file__).parents[2]
MAKE = """
import sys
from tests.rigs.drives import TornDrives
from tests.rigs.room import room
with room() as made:
    rig = TornDrives(made)
    (rig.mounts[0] / "file").write_text("something")
    print(made.directory, made.keeper_pid, flush=True)
    sys.stdin.read()
"""
PATIENCE_MS = 30_000


def start() -> tuple[subprocess.Popen[str], Path, int]:
    """Start a process that has a room; return it, the room's directory and the keeper's pid."""
    process = subprocess.Popen(
        [sys.executable, "-c", MAKE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True, cwd=ROOT,
    )  # fmt: skip
    assert process.stdout is not None
    directory, keeper = process.stdout.readline().split()
    assert below(Path(directory)) == 3
    return process, Path(directory), int(keeper)


def finish(process: subprocess.Popen[str]) -> None:
    process.communicate()


def wait_for_end(pid: int) -> None:
    """Wait until ``pid``, which is nobody's child, has ended."""
    fd = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        assert poll.poll(PATIENCE_MS), f"process {pid} does not end"
    finally:
        os.close(fd)


def below(directory: Path) -> int:
    """Return the number of mounts in ``directory``."""
    return sum(f" {directory}/" in line for line in Path("/proc/self/mounts").read_text().splitlines())


def loops_below(directory: Path) -> list[str]:
    files = Path("/sys/block").glob("loop*/loop/backing_file")
    return [text for file in files if (text := file.read_text()).startswith(str(directory))]


def assert_gone(directory: Path) -> None:
    assert not below(directory)
    assert not loops_below(directory)
    assert not directory.exists()


@needs("torn drives")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_a_process_that_is_killed(number: signal.Signals) -> None:
    process, directory, keeper = start()
    process.send_signal(number)
    wait_for_end(keeper)
    finish(process)
    assert_gone(directory)


@needs("torn drives")
def test_what_a_killed_keeper_left_goes_with_the_next_room() -> None:
    process, directory, keeper = start()
    os.kill(keeper, signal.SIGKILL)
    process.kill()
    finish(process)
    assert below(directory) == 3
    sweep()
    assert_gone(directory)


@needs("faulty file system")
def test_a_dead_file_system_is_no_obstacle() -> None:
    with room() as made:
        daemon = made.daemon("faulty")
        (daemon.mount / "file").write_text("something")
        daemon.kill()
        with pytest.raises(OSError, match="not connected"):
            os.listdir(daemon.mount)
    assert_gone(made.directory)

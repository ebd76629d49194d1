"""A room goes with all that is mounted in it, however the process ends that made it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rigs.available import needs
from tests.rigs.room import clean, room, sweep

ROOT = Path(__file__).parents[2]
MAKE = """
import sys
from pathlib import Path
from tests.rigs import room
from tests.rigs.drives import TornDrives
room._PLACES = (Path(sys.argv[1]),)
with room.room() as made:
    rig = TornDrives(made)
    (rig.mounts[0] / "file").write_text("something")
    print(made.directory, made.keeper_pid, flush=True)
    sys.stdin.read()
"""
PATIENCE_MS = 30_000


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where rooms are: apart from those of other processes, each of which sweeps the place that they share."""
    monkeypatch.setattr("tests.rigs.room._PLACES", (tmp_path,))
    yield tmp_path
    for left in tmp_path.glob("tiered-rig-*"):
        clean(left)


def start(place: Path) -> tuple[subprocess.Popen[str], Path, int]:
    """Start a process that has a room in ``place``; return it, the room's directory and a pidfd of the keeper."""
    process = subprocess.Popen(
        [sys.executable, "-c", MAKE, str(place)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True, cwd=ROOT,
    )  # fmt: skip
    assert process.stdout is not None
    directory, keeper = process.stdout.readline().split()
    assert below(Path(directory)) == 3
    return process, Path(directory), os.pidfd_open(int(keeper))  # order: while it lives for certain


def finish(process: subprocess.Popen[str]) -> None:
    process.communicate()


def wait_for_end(pidfd: int) -> None:
    """Wait until a process, which is nobody's child, has ended; ``pidfd`` is closed."""
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        assert poll.poll(PATIENCE_MS), "the keeper does not end"
    finally:
        os.close(pidfd)


def below(directory: Path) -> int:
    """Return the number of mounts in ``directory``."""
    return sum(f" {directory}/" in line for line in Path("/proc/self/mounts").read_text().splitlines())


def loops_below(directory: Path) -> list[str]:
    found = []
    for file in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):  # another process has detached its own just now
            found.append(file.read_text())
    return [image for image in found if image.startswith(str(directory))]


def assert_gone(directory: Path) -> None:
    assert not below(directory)
    assert not loops_below(directory)
    assert not directory.exists()


@needs("torn drives")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_a_process_that_is_killed(number: signal.Signals, place: Path) -> None:
    process, directory, keeper = start(place)
    process.send_signal(number)
    wait_for_end(keeper)
    finish(process)
    assert_gone(directory)


@needs("torn drives")
def test_what_a_killed_keeper_left_goes_with_the_next_room(place: Path) -> None:
    process, directory, keeper = start(place)
    signal.pidfd_send_signal(keeper, signal.SIGKILL)
    wait_for_end(keeper)
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

"""A directory of a rig, with all that is mounted below it, which goes whatever happens to the test.

A keeper, a process of its own, sees its input end when the test ends, also by SIGKILL, and cleans up. What is left when
both were killed is found by its name and removed by the next room.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.rigs.available import SEARCH_PATH

__all__ = ["Daemon", "Room", "clean", "loop_mount", "room", "run", "sweep", "unmount"]

_ROOT = Path(__file__).parents[2]
_NAME = re.compile(r"tiered-rig-(\d+)-\w+")
_PATIENCE_S = 10.0
_ROOM_NBYTES = 1 << 30  # more than any rig fills; containers have 64 MiB of /dev/shm
_PLACES = (Path("/dev/shm"), Path(tempfile.gettempdir()))


class Daemon:
    """A FUSE file system in a process of its own; see daemon.py."""

    def __init__(self, room: Room, kind: str) -> None:
        self.backing, self.mount = room.directory / f"{kind}-backing", room.directory / f"{kind}-mount"
        self.backing.mkdir()
        self.mount.mkdir()
        module = [sys.executable, "-m", "tests.rigs.daemon", kind]
        command = [*module, str(self.backing), str(self.mount), room.directory.name]
        log = open(room.directory / "daemon.log", "wb")  # noqa: SIM115  # the daemon's own from here on
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, cwd=_ROOT,
            start_new_session=True,
        )  # fmt: skip
        log.close()
        (room.directory / f"{kind}.pid").write_text(str(self._process.pid))
        if self._line() != "ready":
            raise RuntimeError(f"no FUSE file system: {(room.directory / 'daemon.log').read_text()}")

    def call(self, method: str, **arguments: object) -> Any:
        """Have the file system carry out one of its commands, and return its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([method, arguments]) + "\n")
        self._process.stdin.flush()
        return self._line()

    def kill(self) -> None:
        """End the process: its mount answers ENOTCONN from now on."""
        self._process.kill()
        self._process.wait()

    def _line(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line else None

    def close(self) -> None:
        """Let go of the process, which ends when the room is cleaned; called by the room."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def wait(self) -> None:
        self._process.wait(_PATIENCE_S)


class Room:
    """What a rig works in: ``directory``."""

    def __init__(self, directory: Path, keeper_pid: int) -> None:
        self.directory = directory
        self.keeper_pid = keeper_pid
        self.daemons: list[Daemon] = []

    def daemon(self, kind: str) -> Daemon:
        """Start a FUSE file system, "faulty" or "volatile", that goes with the room."""
        self.daemons.append(Daemon(self, kind))
        return self.daemons[-1]


@contextmanager
def room() -> Iterator[Room]:
    """Give a new room, in memory where there is /dev/shm; remove the ones that others left."""
    sweep()
    place = next((place for place in _PLACES if _is_roomy(place)), _PLACES[-1])
    directory = tempfile.mkdtemp(prefix=f"tiered-rig-{os.getpid()}-", dir=place)
    keeper = subprocess.Popen(
        [sys.executable, "-m", "tests.rigs.keeper", directory], stdin=subprocess.PIPE, cwd=_ROOT, start_new_session=True
    )
    made = Room(Path(directory), keeper.pid)
    try:
        yield made
    finally:
        for daemon in made.daemons:
            daemon.close()
        assert keeper.stdin is not None
        keeper.stdin.close()
        keeper.wait()
        for daemon in made.daemons:
            daemon.wait()
    assert not os.path.exists(directory), f"{directory} could not be removed"


def _is_roomy(place: Path) -> bool:
    return os.access(place, os.W_OK) and shutil.disk_usage(place).free >= _ROOM_NBYTES


def sweep() -> None:
    """Clean the rooms of processes that are gone."""
    for place in _PLACES:
        for directory in place.glob("tiered-rig-*"):
            match = _NAME.fullmatch(directory.name)
            if match is not None and not os.path.exists(f"/proc/{match[1]}"):
                clean(directory)


def clean(directory: Path) -> None:
    """Unmount and remove everything in ``directory``. Idempotent."""
    for mount in reversed(_mounts(directory)):
        try:
            unmount(mount)
        except (OSError, subprocess.SubprocessError):
            _kill_daemons(directory)  # which ends what waits for them
            subprocess.run(["umount", "-l", mount], capture_output=True, timeout=_PATIENCE_S)
    for device, image in _loops():
        if image.startswith(f"{directory}/"):
            subprocess.run(["losetup", "-d", device], capture_output=True, timeout=_PATIENCE_S)
    _kill_daemons(directory)
    shutil.rmtree(directory, ignore_errors=True)


def unmount(mount: str | Path) -> None:
    """Unmount, as soon as nobody uses it: what a killed process had open closes a little later. Raises OSError."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        process = subprocess.Popen(["umount", str(mount)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        _, complaint = process.communicate(timeout=_PATIENCE_S)  # one that hangs could not be killed: it is left
        if not process.returncode:
            return
        if time.monotonic() > deadline or "busy" not in complaint:
            raise OSError(f"umount {mount}: {complaint.strip()}")
        time.sleep(0.005)


def loop_mount(image: Path, mount: Path) -> None:
    """Mount the file system in ``image`` on ``mount``; its loop device goes with the mount. Raises OSError."""
    mount.mkdir(exist_ok=True)
    device = run("losetup", "--find", "--show", str(image))
    try:
        fd = os.open(device, os.O_RDWR | os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # an error that the device remembers from another life would spoil this one
            os.fsync(fd)
        os.close(fd)
        run("mount", "-o", "noatime", device, str(mount))
    finally:
        run("losetup", "-d", device)  # goes when the last one who uses it does: with the mount


def run(*command: str) -> str:
    """Run ``command`` and return what it printed. Raises OSError with what it complained of."""
    environment = os.environ | {"PATH": SEARCH_PATH}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout.strip()


def _mounts(directory: Path) -> list[str]:
    """Return what is mounted below ``directory``, in the order of mounting."""
    lines = Path("/proc/self/mounts").read_text().splitlines()
    return [place for place in (line.split()[1] for line in lines) if place.startswith(f"{directory}/")]


def _loops() -> Iterator[tuple[str, str]]:
    """Yield loop devices and their files."""
    for entry in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):  # detached just now
            yield f"/dev/{entry.parts[3]}", entry.read_text().strip()


def _kill_daemons(directory: Path) -> None:
    for file in directory.glob("*.pid"):
        with contextlib.suppress(OSError, ValueError):  # another process cleans it too, or its daemon had just begun
            pid = int(file.read_text())
            if directory.name in Path(f"/proc/{pid}/cmdline").read_text():  # the number may be another's by now
                os.kill(pid, signal.SIGKILL)

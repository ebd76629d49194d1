"""The file system that records: the directory of each instant can be made, and that of each power cut."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

from tests.rigs.available import needs
from tests.rigs.recorded_files import Change, Image, read_changes
from tests.rigs.room import Daemon, Room
from tiered.bytes.private_file import fsync_directory

pytestmark = needs("faulty file system")


@pytest.fixture
def recorded(a_room: Room) -> Daemon:
    return a_room.daemon("recorded")


def content(image: Image, directory: Path) -> dict[str, bytes]:
    """Return the files of ``image``, by their paths."""
    image.write(directory)
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def replaced(recorded: Daemon) -> tuple[Image, list[Change]]:
    """Replace a file as programs do, with its directory flushed last; grow another one, and remove a third."""
    for name in ("kept", "gone"):
        (recorded.mount / name).write_bytes(b"old")
    image = Image.of(recorded.backing)
    recorded.call("begin")
    (recorded.mount / "inner").mkdir()
    fd = os.open(recorded.mount / "new", os.O_RDWR | os.O_CREAT)
    os.pwrite(fd, b"n" * 2000, 0)
    os.fsync(fd)
    os.rename(recorded.mount / "new", recorded.mount / "kept")
    fsync_directory(recorded.mount)
    os.unlink(recorded.mount / "gone")
    os.posix_fallocate(fd, 0, 3000)
    os.pwrite(fd, b"later", 2500)
    os.close(fd)
    (recorded.mount / "inner" / "gone").write_bytes(b"another")  # may have the number of the one that was removed
    recorded.call("end", path=str(recorded.backing.parent / "changes"))
    return image, read_changes(recorded.backing.parent / "changes")


def test_the_directory_of_each_instant_is_made(recorded: Daemon, tmp_path: Path) -> None:
    image, changes = replaced(recorded)
    assert [each.kind for each in changes] == [
        "make directory", "make", "write", "flush", "rename", "flush", "remove", "grow", "write", "make", "write",
    ]  # fmt: skip
    assert {each.place for each in changes} == {".", "inner"}
    assert content(image.killed(changes[:2]), tmp_path / "2") == {"kept": b"old", "gone": b"old", "new": b""}
    assert content(image.killed(changes[:5]), tmp_path / "5") == {"kept": b"n" * 2000, "gone": b"old"}
    assert image.killed(changes).digest() == Image.of(recorded.backing).digest() != image.digest()
    last = content(image.killed(changes), tmp_path / "last")
    assert last.pop("kept") == b"n" * 2000 + bytes(500) + b"later" + bytes(495) and last == {"inner/gone": b"another"}


def test_a_power_cut_loses_what_no_flush_has_covered(recorded: Daemon, tmp_path: Path) -> None:
    image, changes = replaced(recorded)
    rng = random.Random(0)
    assert content(image.power_cut(changes[:5], "drop", rng), tmp_path / "5") == {"kept": b"old", "gone": b"old"}
    assert content(image.power_cut(changes, "drop", rng), tmp_path / "all") == {"kept": b"n" * 2000, "gone": b"old"}
    files = [content(image.power_cut(changes, "torn", rng), tmp_path / f"torn {number}") for number in range(40)]
    assert all(each["kept"].startswith(b"n" * 2000) for each in files), "it was flushed"
    assert {len(each["kept"]) for each in files} == {2000, 2505, 3000}
    assert len({"gone" in each for each in files}) == len({each.get("inner/gone") for each in files} & {b"", None}) == 2


def test_a_process_is_killed_in_place_of_one_of_its_changes(recorded: Daemon) -> None:
    (recorded.mount / "own").mkdir()
    here, there = os.pipe()
    pid = os.fork()
    if not pid:
        os.read(here, 1)
        for number in range(5):
            (recorded.mount / "own" / str(number)).touch()
        os._exit(0)
    recorded.call("begin", kill_at=2, victims={"own": pid})
    (recorded.mount / "other").touch()
    os.write(there, b"!")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    os.close(here)
    os.close(there)
    assert sorted(os.listdir(recorded.backing / "own")) == ["0", "1"]

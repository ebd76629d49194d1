"""Data files: growth that fails, flushes that fail, privacy, and traps laid in the directory."""

import contextlib
import errno
import os
import resource
import shutil
import stat
import subprocess
import threading
from pathlib import Path

import pytest

from tests.bytes.faulty import Errors, faulty
from tests.bytes.moving import move
from tiered.bytes.arena import Buffer
from tiered.bytes.device.base import SCRATCH
from tiered.bytes.device.direct_io import open_unnamed, probe_direct
from tiered.bytes.device.threads import ThreadsDevice
from tiered.errors import CapacityError, ClosedError, DeadlineError, DeviceError, UsageError
from tiered.units import KiB, MiB


def test_a_flush_makes_the_name_of_a_new_file_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    with faulty(tmp_path) as device:
        device.flush()
        assert synced == [str(tmp_path)]
        device.grow(0, 2 * MiB)
        device.grow(SCRATCH, 4096)
        device.flush()
        assert synced == [str(tmp_path)]
        device.grow(1, 4096)
        device.flush()
        assert synced == [str(tmp_path)] * 2


@pytest.mark.parametrize("call", ["fchmod", "unlink"])
@pytest.mark.parametrize("has_tmpfile", [True, False])
def test_an_unnamed_file_that_cannot_be_finished_leaves_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, has_tmpfile: bool
) -> None:
    open_file = os.open

    def without_tmpfile(path: str, flags: int, *arguments: int, **options: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE and not has_tmpfile:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return open_file(path, flags, *arguments, **options)

    def fail(*arguments: object, **options: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    directory = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    with monkeypatch.context() as failing:
        failing.setattr(os, "open", without_tmpfile)
        failing.setattr(os, call, fail)
        if call == "unlink" and has_tmpfile:
            os.close(open_unnamed(directory, 0))
        else:
            with pytest.raises(OSError, match="Input/output"):
                open_unnamed(directory, 0)
    os.close(directory)  # the fixture of every test counts the rest


def test_space_that_was_allocated_before_growth_failed_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def allocate_half(fd: int, offset: int, nbytes: int) -> None:
        os.ftruncate(fd, offset + nbytes // 2)
        raise OSError(errno.ENOSPC, "scripted")

    with faulty(tmp_path) as device:
        monkeypatch.setattr(os, "posix_fallocate", allocate_half)
        with pytest.raises(CapacityError, match="scripted"):
            device.grow(0, 2 * MiB)
        assert device.files() == {0: 1 * MiB}
        assert (tmp_path / "data-000").stat().st_size == 1 * MiB


def test_growth_without_fallocate_writes_zeros(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "scripted")

    with faulty(tmp_path) as device:
        monkeypatch.setattr(os, "posix_fallocate", unsupported)
        device.grow(0, 2 * MiB + 64 * KiB)
        device.grow(1, 4096)
        assert device.files() == {0: 2 * MiB + 64 * KiB, 1: 4096}
    status = (tmp_path / "data-000").stat()
    assert status.st_size == 2 * MiB + 64 * KiB and status.st_blocks * 512 >= status.st_size


def test_a_failed_flush_poisons_the_device(tmp_path: Path) -> None:
    with faulty(tmp_path) as device:
        device.sync_error = OSError(errno.EIO, "scripted")
        with pytest.raises(DeviceError, match=r"flush of .*data-000 failed: scripted"):
            device.flush()
        with pytest.raises(DeviceError, match="earlier flush"):
            device.flush()
        assert device.num_syncs == 1


def test_descriptors_are_not_closed_under_a_flush_of_another_thread(tmp_path: Path) -> None:
    has_begun, may_end = threading.Event(), threading.Event()
    ended: list[str] = []

    class Slow(ThreadsDevice):
        def _fdatasync(self, fd: int) -> None:
            has_begun.set()
            assert may_end.wait(30)
            os.fdatasync(fd)

    device = Slow(tmp_path, deadline_s=0.1)
    device.grow(0, 64 * KiB)
    thread = threading.Thread(target=lambda: (device.flush(), ended.append("flush")))
    thread.start()
    assert has_begun.wait(30)
    with pytest.raises(DeadlineError, match="growth or a flush"):
        device.close()
    may_end.set()
    thread.join(30)
    assert ended == ["flush"]
    device.deadline_s = 30
    device.close()
    for late in (device.flush, lambda: device.grow(0, MiB), lambda: device._files.grow(0, MiB)):
        with pytest.raises(ClosedError):
            late()


def test_a_flush_syncs_only_what_changed(tmp_path: Path, buffer: Buffer) -> None:
    with faulty(tmp_path) as device:
        device.grow(1, 64 * KiB)
        device.grow(SCRATCH, 64 * KiB)
        device.flush()
        assert device.num_syncs == 2
        device.flush()
        assert device.num_syncs == 2
        assert move(device, "write", buffer, file=1) is None
        assert move(device, "write", buffer, file=SCRATCH) is None
        assert move(device, "read", buffer, file=0) is None
        device.flush()
        assert device.num_syncs == 3
        device.fault = Errors(errno.EIO)
        assert move(device, "write", buffer) is not None  # it may have changed the file all the same
        device.flush()
        assert device.num_syncs == 4


def test_after_an_interrupted_flush_the_next_one_has_it_all_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def interrupted(fd: int) -> None:
        raise KeyboardInterrupt

    with faulty(tmp_path) as device:
        with monkeypatch.context() as patch:
            patch.setattr(device, "_fdatasync", interrupted)
            with pytest.raises(KeyboardInterrupt):
                device.flush()
        assert device.num_syncs == 0
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", interrupted)
            with pytest.raises(KeyboardInterrupt):
                device.flush()
        assert device.num_syncs == 1
        monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd)))
        device.flush()
        assert synced == [str(tmp_path)] and device.num_syncs == 1


def test_growth_that_fails_leaves_everything_as_it_was(tmp_path: Path) -> None:
    with faulty(tmp_path) as device:
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 * MiB, hard))
        try:
            for file in (0, 1, SCRATCH):
                with pytest.raises(CapacityError, match="cannot grow"):
                    device.grow(file, 4 * MiB)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        assert device.files() == {0: 1 * MiB}
        assert os.listdir(tmp_path) == ["data-000"]
        assert (tmp_path / "data-000").stat().st_size == 1 * MiB
        device.grow(1, 4 * MiB)


def test_a_full_file_system_refuses_growth(tmp_path: Path, buffer: Buffer) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting needs root")
    try:
        device = ThreadsDevice(tmp_path, num_threads=1)
        device.grow(0, 512 * KiB)
        with pytest.raises(CapacityError, match="No space left"):
            device.grow(0, 2 * MiB)
        assert device.files() == {0: 512 * KiB}
        assert device.free_bytes() == 512 * KiB
        assert move(device, "write", buffer, 448 * KiB) is None
        device.close()
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.parametrize("umask", [0o000, 0o777])
def test_files_are_private_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    old = os.umask(umask)
    try:
        with faulty(tmp_path) as device:
            device.grow(SCRATCH, 4096)
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "data-000").stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["data-000"]


@pytest.mark.parametrize("trap", ["symlink", "hard link", "open to others", "directory", "fifo"])
def test_a_trap_in_the_directory_is_refused(tmp_path: Path, trap: str) -> None:
    victim, directory = tmp_path / "victim", tmp_path / "run"
    directory.mkdir()
    victim.write_bytes(bytes(4096))
    victim.chmod(0o600)
    name = directory / "data-000"
    {
        "symlink": lambda: name.symlink_to(victim),
        "hard link": lambda: name.hardlink_to(victim),
        "open to others": lambda: (name.write_bytes(bytes(4096)), name.chmod(0o644)),
        "directory": name.mkdir,
        "fifo": lambda: os.mkfifo(name, 0o600),
    }[trap]()
    fds = os.listdir("/proc/self/fd")
    with pytest.raises(UsageError, match="data-000"):
        ThreadsDevice(directory)
    assert os.listdir("/proc/self/fd") == fds and victim.read_bytes() == bytes(4096)


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    for name in ("data-0", "data-0001", "data-abc", "xdata-000", "catalog.db"):
        (tmp_path / name).write_bytes(b"x")
    device = ThreadsDevice(tmp_path, num_threads=1)
    assert device.files() == {}
    device.close()


@pytest.mark.parametrize("harm", ["replaced", "removed", "directory removed"])
def test_a_file_that_is_no_longer_in_its_place_fails_the_flush(tmp_path: Path, harm: str) -> None:
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700)
    with contextlib.closing(ThreadsDevice(directory)) as device:
        device.grow(0, device.alignment)
        device.flush()
        if harm == "replaced":
            shutil.copy(directory / "data-000", directory / "copy")
            os.replace(directory / "copy", directory / "data-000")
        elif harm == "removed":
            (directory / "data-000").unlink()
        else:
            shutil.rmtree(directory)
        with pytest.raises(DeviceError, match="data-000 failed"):
            device.flush()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_drive_is_read_without_direct_io_and_not_refused(tmp_path: Path, number: int) -> None:
    def write(fd: int, memory: memoryview, offset: int) -> int:
        raise OSError(number, os.strerror(number))

    directory = os.open(tmp_path, os.O_RDONLY)
    try:
        probe = probe_direct(directory, lambda fd, memory, offset: os.preadv(fd, [memory], offset), write)
    finally:
        os.close(directory)
    assert probe.refusal is not None
    assert os.strerror(number) in probe.refusal or "statx" in probe.refusal or "refuses" in probe.refusal

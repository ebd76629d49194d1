"""The profile of a directory: what is written is found again, from below too; what is hostile is passed over."""

from __future__ import annotations

import json
import logging
import os
import stat
import subprocess
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests.bytes.test_uring import check_round_trip
from tiered.bytes.device.engines import open_device
from tiered.bytes.device.profile import (
    LINK_PROFILE_NAME,
    PROFILE_NAME,
    LinkProfile,
    Profile,
    find_profile,
    load_link_profile,
    load_profile,
    write_profile,
)
from tiered.bytes.device.uring import UringDevice
from tiered.errors import CapacityError, DeviceError
from tiered.units import KiB, MiB

PROFILE = Profile(
    engine="threads",
    read_bytes_per_s=3.5e9,
    write_bytes_per_s=5e9,
    block_nbytes=4 * MiB,
    read_depth=8,
    write_depth=4,
    duplex=0.25,
    measured_at="2026-11-21T03:50:00+00:00",
    kernel="6.18.44",
)


def put(directory: Path, content: bytes | str) -> Path:
    """Write ``content`` as the profile of ``directory``, private as it should be."""
    file = directory / PROFILE_NAME
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    file.chmod(0o600)
    return file


def changed(**values: object) -> str:
    return json.dumps(asdict(PROFILE) | values)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_what_is_written_is_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert load_profile(tmp_path) is None
    for profile in (PROFILE, replace(PROFILE, duplex=None, engine="uring")):
        assert write_profile(tmp_path, profile) == tmp_path / PROFILE_NAME
        assert load_profile(tmp_path) == profile
    assert os.listdir(tmp_path) == [PROFILE_NAME]
    assert not warnings(caplog)


def test_the_file_is_as_documented(tmp_path: Path) -> None:
    assert json.loads(write_profile(tmp_path, PROFILE).read_bytes()) == {
        "version": 1,
        "engine": "threads",
        "read_bytes_per_s": 3.5e9,
        "write_bytes_per_s": 5e9,
        "block_nbytes": 4194304,
        "read_depth": 8,
        "write_depth": 4,
        "duplex": 0.25,
        "measured_at": "2026-11-21T03:50:00+00:00",
        "kernel": "6.18.44",
    }


@pytest.mark.parametrize("umask", [0, 0o077, 0o777])
def test_the_file_is_private_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    old = os.umask(umask)
    try:
        path = write_profile(tmp_path, PROFILE)
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_profile(tmp_path) == PROFILE


class TestPlaces:
    """Where a profile is looked for."""

    def test_a_directory_has_the_nearest_profile_above_it(self, tmp_path: Path) -> None:
        write_profile(tmp_path, PROFILE)
        inner = tmp_path / "runs" / "demo"
        assert load_profile(inner) == PROFILE, "a store's directory may not be there yet"
        inner.mkdir(parents=True)
        assert load_profile(inner) == PROFILE
        nearer = replace(PROFILE, read_depth=32)
        write_profile(inner.parent, nearer)
        assert load_profile(inner) == nearer
        assert load_profile(tmp_path) == PROFILE

    def test_a_tilde_in_a_name_is_a_tilde(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        Path("~root").mkdir()
        write_profile("~root", PROFILE)
        assert load_profile("~root") == PROFILE

    def test_links_and_relative_paths_are_resolved(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        real = tmp_path / "drive" / "run"
        real.mkdir(parents=True)
        (tmp_path / "link").symlink_to(real)
        write_profile(real.parent, PROFILE)
        assert load_profile(tmp_path / "link") == PROFILE
        monkeypatch.chdir(real)
        assert load_profile(".") == PROFILE

    def test_the_search_ends_at_the_mount_point(self, tmp_path: Path) -> None:
        """What is above belongs to another drive."""
        mounted = tmp_path / "drive"
        mounted.mkdir()
        write_profile(tmp_path, PROFILE)
        mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(mounted)]
        if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
            pytest.skip("mounting needs root")
        try:
            (mounted / "run").mkdir()
            assert load_profile(mounted / "run") is None
            here = replace(PROFILE, read_depth=1)
            write_profile(mounted, here)
            assert load_profile(mounted / "run") == here
        finally:
            subprocess.run(["umount", str(mounted)], check=True)

    def test_a_file_has_no_profile(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        (tmp_path / "file").touch()
        assert load_profile(tmp_path / "file") is None
        assert not warnings(caplog)


HOSTILE = {
    "empty": b"",
    "not text": b"\xff" * 100,
    "cut short": changed()[:-20],
    "a list": "[]",
    "null": "null",
    "deep": "[" * 60_000,
    "huge": changed(kernel="x" * 100_000),
    "endless": b" " * (64 << 20),
    "newer": changed(version=2),
    "version of another type": changed(version=True),
    "no version": "{}",
    "unknown name": changed(directory="/etc"),
    "missing name": '{"version": 1}',
    "unknown engine": changed(engine="../uring"),
    "engine of another type": changed(engine=["threads"]),
    "number as text": changed(read_bytes_per_s="3e9"),
    "boolean number": changed(write_bytes_per_s=True),
    "no number": changed(read_bytes_per_s=None),
    "not a number": changed(read_bytes_per_s=float("nan")),
    "infinite": changed(read_bytes_per_s=float("inf")),
    "overflowing": changed().replace("3500000000.0", "1e999"),
    "enormous": changed(read_bytes_per_s=10**400),
    "too long to read": changed().replace("3500000000.0", "9" * 20_000),
    "negative": changed(write_bytes_per_s=-1.0),
    "zero": changed(write_bytes_per_s=0),
    "block of zero": changed(block_nbytes=0),
    "block out of line": changed(block_nbytes=4097),
    "block too large": changed(block_nbytes=1 << 40),
    "fractional block": changed(block_nbytes=4096.0),
    "no depth": changed(read_depth=0),
    "too deep": changed(write_depth=1 << 30),
    "duplex above one": changed(duplex=1.5),
    "duplex of another type": changed(duplex="half"),
    "no date": changed(measured_at="yesterday"),
    "date of another type": changed(measured_at=20261121),
    "more than a line": changed(kernel="6.1\nERROR the store is gone"),
    "half a character": changed(kernel="\ud800"),
    "long kernel": changed(kernel="6" * 201),
}


class TestHostileFiles:
    """Ignored with one warning that names the file; never an error."""

    @pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE.keys())
    def test_content(self, tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes | str) -> None:
        file = put(tmp_path, content)
        for _ in range(3):  # a store asks more than once; a person reads it once
            assert load_profile(tmp_path) is None
        (warning,) = warnings(caplog)
        assert str(file) in warning and "tiered bench" in warning
        assert len(warning) < 1000 and warning.isprintable()

    def test_not_more_than_64_kib_is_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        put(tmp_path, HOSTILE["endless"])
        read, asked = os.read, []
        monkeypatch.setattr(os, "read", lambda fd, nbytes: (asked.append(nbytes), read(fd, nbytes))[1])
        load_profile(tmp_path)
        assert sum(asked) <= 65_537

    @pytest.mark.parametrize("trap", ["symlink", "hard link", "fifo", "directory", "group may write", "all may write"])
    def test_traps(self, tmp_path: Path, caplog: pytest.LogCaptureFixture, trap: str) -> None:
        directory, victim = tmp_path / "run", tmp_path / "victim"
        directory.mkdir()
        victim.write_text(changed())
        victim.chmod(0o600)
        name = directory / PROFILE_NAME
        {
            "symlink": lambda: name.symlink_to(victim),
            "hard link": lambda: name.hardlink_to(victim),
            "fifo": lambda: os.mkfifo(name, 0o600),
            "directory": name.mkdir,
            "group may write": lambda: put(directory, changed()).chmod(0o660),
            "all may write": lambda: put(directory, changed()).chmod(0o606),
        }[trap]()
        assert load_profile(directory) is None
        assert len(warnings(caplog)) == 1

    def test_a_file_of_another_user(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        file = put(tmp_path, changed())
        if os.geteuid() == 0:
            os.chown(file, 65534, -1)
        else:
            monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 12345)
        assert load_profile(tmp_path) is None
        (warning,) = warnings(caplog)
        assert "belongs to user" in warning

    def test_the_one_above_is_taken_in_its_place(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        write_profile(tmp_path, PROFILE)
        (tmp_path / "run").mkdir()
        put(tmp_path / "run", "{")
        assert load_profile(tmp_path / "run") == PROFILE
        assert find_profile(tmp_path / "run") == (PROFILE, warnings(caplog))
        assert len(warnings(caplog)) == 1


class TestWriting:
    """Whole or not at all, and through no link."""

    def test_a_planted_link_is_replaced_and_not_followed(self, tmp_path: Path) -> None:
        directory, victim = tmp_path / "run", tmp_path / "victim"
        directory.mkdir()
        victim.write_text("precious")
        (directory / PROFILE_NAME).symlink_to(victim)
        write_profile(directory, PROFILE)
        assert victim.read_text() == "precious"
        assert not (directory / PROFILE_NAME).is_symlink() and load_profile(directory) == PROFILE

    @pytest.mark.parametrize("call", ["open", "fchmod", "write", "fsync", "rename"])
    def test_a_failure_leaves_the_old_profile_and_nothing_else(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
    ) -> None:
        write_profile(tmp_path, PROFILE)

        def fail(*_: object, **__: object) -> int:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail)
            with pytest.raises(CapacityError, match=r"cannot write .*tiered-profile.*No space left"):
                write_profile(tmp_path, replace(PROFILE, read_depth=99))
        assert load_profile(tmp_path) == PROFILE
        assert os.listdir(tmp_path) == [PROFILE_NAME]

    def test_the_content_is_durable_before_the_name_and_then_the_name(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        events: list[str] = []
        fsync, rename = os.fsync, os.rename
        monkeypatch.setattr(os, "fsync", lambda fd: (events.append(kind(fd)), fsync(fd)))
        monkeypatch.setattr(os, "rename", lambda *names, **fds: (events.append("rename"), rename(*names, **fds)))
        write_profile(tmp_path, PROFILE)
        assert events == ["file", "rename", "directory"]

    def test_a_short_write_is_gone_on_with(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write = os.write
        monkeypatch.setattr(os, "write", lambda fd, content: write(fd, content[:7]))
        write_profile(tmp_path, PROFILE)
        assert load_profile(tmp_path) == PROFILE

    def test_no_directory(self, tmp_path: Path) -> None:
        with pytest.raises(DeviceError, match="No such file"):
            write_profile(tmp_path / "missing", PROFILE)

    @pytest.mark.parametrize("bad", [{"engine": "memory"}, {"read_depth": 0}, {"duplex": -1.1}, {"measured_at": ""}])
    def test_nonsense_cannot_be_written(self, bad: dict[str, object]) -> None:
        with pytest.raises(ValueError, match=r"engine|read_depth|duplex|isoformat"):
            replace(PROFILE, **bad)


class TestLink:
    """The rates of copies to a compute device lie beside those of the drive, and neither is in the other's way."""

    LINK = LinkProfile(
        device="cuda", in_bytes_per_s=25e9, out_bytes_per_s=24e9, duplex=0.9,
        measured_at="2026-11-21T03:50:00+00:00", kernel="6.18.44",
    )  # fmt: skip

    def test_both_are_found_from_below(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        write_profile(tmp_path, PROFILE)
        assert load_link_profile(tmp_path) is None
        assert write_profile(tmp_path, self.LINK) == tmp_path / LINK_PROFILE_NAME
        for directory in (tmp_path, tmp_path / "runs" / "demo"):
            assert (load_profile(directory), load_link_profile(directory)) == (PROFILE, self.LINK)
        assert json.loads((tmp_path / LINK_PROFILE_NAME).read_bytes()) == asdict(self.LINK)
        assert stat.S_IMODE((tmp_path / LINK_PROFILE_NAME).stat().st_mode) == 0o600
        assert not warnings(caplog)

    @pytest.mark.parametrize(
        "values",
        [{"version": 2}, {"device": 1}, {"in_bytes_per_s": 0}, {"duplex": None}, {"kernel": "a\nb"}, {"more": 1}],
    )
    def test_nonsense_is_one_warning(
        self, values: dict[str, object], tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        file = write_profile(tmp_path, self.LINK)
        file.write_text(json.dumps(asdict(self.LINK) | values))
        for _ in range(2):
            assert load_link_profile(tmp_path) is None
        (warning,) = warnings(caplog)
        assert str(file) in warning and warning.endswith(f"tiered bench {tmp_path} --device auto")
        write_profile(tmp_path, self.LINK)  # as a bench does
        assert load_link_profile(tmp_path) == self.LINK


def kind(fd: int) -> str:
    return "directory" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file"


@pytest.mark.parametrize(
    ("block_nbytes", "request_nbytes"), [(128 * KiB, 512 * KiB), (2 * MiB, 2 * MiB), (16 * MiB, 4 * MiB)]
)
def test_a_ring_moves_bytes_in_requests_as_long_as_were_the_best(
    tmp_path: Path, block_nbytes: int, request_nbytes: int
) -> None:
    write_profile(tmp_path, replace(PROFILE, engine="uring", block_nbytes=block_nbytes))
    (tmp_path / "here").mkdir()
    with closing(UringDevice(tmp_path / "here")) as plain, closing(open_device(tmp_path / "here")) as device:
        assert isinstance(device, UringDevice)
        assert (plain._request_nbytes, device._request_nbytes) == (MiB, request_nbytes)
        check_round_trip(device)

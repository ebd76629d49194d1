"""The checks of a directory, on real places where something is amiss; nothing is ever left there."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.doctor.in_child import found_in_child
from tests.seccomp import forbid
from tiered.bytes.device.mount import RAM_COST, RAM_MEND
from tiered.bytes.device.profile import PROFILE_NAME, Profile, write_profile
from tiered.tools.doctor import checks as checks_module
from tiered.tools.doctor import description as drives
from tiered.tools.doctor.checks import (
    Finding,
    Outcome,
    check_drives,
    check_flush,
    check_profile,
    directory_checks,
)
from tiered.tools.doctor.description import by_drive
from tiered.tools.doctor.doctor import examine
from tiered.units import MiB

Mount = Callable[..., Path]


def found_in(directory: Path | str, before: Callable[[], object] | None = None) -> dict[str, Finding]:
    """Return what all checks find in ``directory``, by their names; in a child where ``before`` runs first."""
    checks = directory_checks(str(directory))
    if before is not None:
        return {finding.check: finding for finding in found_in_child(lambda: (before(), examine([checks], 120))[1])}
    return {finding.check: finding for finding in examine([checks], 120)}


def become_nobody() -> None:
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)


def profile_of(when: datetime, kernel: str = "", engine: str = "uring") -> Profile:
    return Profile(
        engine=engine,
        read_bytes_per_s=3.5e9,
        write_bytes_per_s=5e9,
        block_nbytes=4 * MiB,
        read_depth=8,
        write_depth=8,
        duplex=None,
        measured_at=when.isoformat(),
        kernel=kernel or os.uname().release,
    )


class TestPlaces:
    """What is said about places of every kind."""

    def test_a_directory_of_ones_own(self, tmp_path: Path) -> None:
        found = found_in(tmp_path)
        assert list(found) == list(directory_checks(str(tmp_path))[1])
        assert found["writing"].outcome is Outcome.OK
        assert not os.listdir(tmp_path)

    def test_a_missing_one_and_a_file(self, tmp_path: Path) -> None:
        (finding,) = found_in(tmp_path / "two words").values()
        assert (finding.check, finding.outcome) == ("writing", Outcome.BROKEN)
        assert "No such file" in finding.found and finding.mend == f"mkdir -p -m 700 '{tmp_path}/two words'"
        (tmp_path / "file").touch()
        (finding,) = found_in(tmp_path / "file").values()
        assert finding.outcome is Outcome.BROKEN and "Not a directory" in finding.found

    def test_one_that_is_not_ours_to_write(self, tmp_path: Path) -> None:
        def prepare() -> None:
            tmp_path.chmod(0o555)
            os.chdir(tmp_path)  # order: nobody may not go there by its name
            become_nobody()

        (finding,) = found_in(".", prepare).values()
        assert finding.outcome is Outcome.BROKEN
        assert "Permission denied" in finding.found and finding.mend.startswith("as root: chown ")

    def test_one_that_is_read_only(self, mount: Mount) -> None:
        place = mount("-t", "tmpfs", "-o", "size=1m,ro", "none")
        (finding,) = found_in(place).values()
        assert finding.outcome is Outcome.BROKEN and "Read-only file system" in finding.found
        assert f"mount -o remount,rw {place}" in finding.mend

    def test_one_that_is_full(self, mount: Mount) -> None:
        place = mount("-t", "tmpfs", "-o", "size=1m", "none")
        with pytest.raises(OSError, match="No space"):
            (place / "filling").write_bytes(bytes(2 * MiB))
        (finding,) = found_in(place).values()
        assert (finding.check, finding.outcome) == ("writing", Outcome.BROKEN)
        assert "No space left" in finding.found and "remove files" in finding.mend

    def test_one_that_is_nearly_full(self, mount: Mount) -> None:
        finding = found_in(mount("-t", "tmpfs", "-o", "size=31m", "none"))["free space"]
        assert finding.outcome is Outcome.BROKEN
        assert finding.found == "31.0 MiB: trains at least 1.0 M parameters at up to 31 bytes each"

    def test_ram(self) -> None:
        found = found_in("/dev/shm")
        assert found["file system"].outcome is Outcome.BROKEN and "tmpfs on /dev/shm" in found["file system"].found
        assert "no drive to wait for" in found["flush"].found
        cost = found["file system"].cost
        tuning = (Path(__file__).parents[2] / "docs" / "tuning.md").read_text()
        assert cost == RAM_COST and cost in " ".join(tuning.split()) and RAM_MEND in tuning.lower()

    def test_a_container_s_layer(self, tmp_path: Path, mount: Mount) -> None:
        for name in ("lower", "upper", "work"):
            (tmp_path / name).mkdir()
        options = ",".join(f"{name}dir={tmp_path / name}" for name in ("lower", "upper", "work"))
        place = mount("-t", "overlay", "-o", options, "overlay")
        finding = found_in(place)["file system"]
        assert finding.outcome is Outcome.SLOWER and "docker run -v" in finding.mend

    def test_a_file_system_without_direct_io(self, tmp_path: Path) -> None:
        """As the kernel says it for one: the trial write fails with EINVAL."""

        def refuse() -> None:
            forbid(["pwritev", "pwritev2"], errno.EINVAL)

        finding = found_in(tmp_path, refuse)["direct I/O"]
        assert finding.outcome is Outcome.SLOWER
        assert "0.6 instead of 3.5 GB/s" in finding.cost

    def test_without_io_uring_the_engine_is_another(self, tmp_path: Path) -> None:
        finding = found_in(tmp_path, lambda: forbid(["io_uring_setup"], errno.EPERM))["engine"]
        assert finding.outcome is Outcome.SLOWER and finding.found.startswith("threads: ")


class TestFlush:
    """How long a commit waits."""

    @pytest.mark.parametrize(
        ("took_s", "cache", "outcome", "says"),
        [
            (0.08, "write back", Outcome.SLOWER, "takes 80 ms"),
            (0.002, "write back", Outcome.OK, "takes 2 ms (write cache: write back)"),
            (0.00001, "write back", Outcome.OK, "suspiciously fast"),
            (0.00001, "write through", Outcome.OK, "takes 0.01 ms (write cache: write through)"),
            (0.00001, None, Outcome.OK, "(write cache: not readable)"),
        ],
    )
    def test_drives(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        took_s: float,
        cache: str | None,
        outcome: Outcome,
        says: str,
    ) -> None:
        now = 0.0

        def flush(fd: int) -> None:
            nonlocal now
            now += took_s

        monkeypatch.setattr(os, "fdatasync", flush)
        monkeypatch.setattr(checks_module.time, "perf_counter", lambda: now)
        monkeypatch.setattr(checks_module, "find_mount", lambda directory: SimpleNamespace(kind="local"))
        monkeypatch.setattr(checks_module, "find_block_device", lambda mount: SimpleNamespace(write_cache=cache))
        finding = check_flush(str(tmp_path))
        assert finding.outcome is outcome and says in finding.found

    def test_a_flush_that_fails(self, tmp_path: Path) -> None:
        (finding,) = found_in(tmp_path, lambda: forbid(["fdatasync"], errno.EIO)).values()
        assert finding.outcome is Outcome.BROKEN and "Input/output error" in finding.found


class TestProfile:
    """What was measured before."""

    def test_none(self, tmp_path: Path) -> None:
        finding = check_profile(str(tmp_path))
        assert finding.outcome is Outcome.OK
        assert finding.mend == f"tiered bench {tmp_path}"

    @pytest.mark.parametrize("kernel", ["", "4.19.0"])
    def test_one_of_another_kernel_is_to_be_measured_again(self, kernel: str, tmp_path: Path) -> None:
        write_profile(tmp_path, profile_of(datetime(2026, 11, 27, tzinfo=UTC), kernel=kernel))
        finding = check_profile(str(tmp_path))
        assert finding.outcome is Outcome.OK and finding.mend == (f"tiered bench {tmp_path}" if kernel else "")
        assert finding.found == (
            f"measured 2026-11-27 on Linux {kernel or os.uname().release}: reads 3.50 GB/s, writes 5.00 GB/s with "
            "uring, blocks of 4.0 MiB"
        )

    def test_one_that_is_ignored(self, tmp_path: Path) -> None:
        (tmp_path / PROFILE_NAME).write_text(json.dumps(asdict(profile_of(datetime.now(UTC))) | {"read_depth": 0}))
        (tmp_path / PROFILE_NAME).chmod(0o600)
        finding = found_in(tmp_path)["profile"]  # where logging is switched off
        assert finding.outcome is Outcome.SLOWER and "read_depth must be" in finding.found

    def test_the_engine_that_was_the_fastest_is_no_lack(self, tmp_path: Path) -> None:
        write_profile(tmp_path, profile_of(datetime.now(UTC), engine="threads"))
        finding = found_in(tmp_path)["engine"]
        assert finding.outcome is Outcome.OK and finding.found.startswith("threads: ")


class TestDrives:
    """Striping over one drive gains nothing."""

    def test_directories_of_one_drive(self, tmp_path: Path) -> None:
        one, two = tmp_path / "one", tmp_path / "two"
        one.mkdir()
        two.mkdir()
        finding = check_drives([str(one), str(two)])
        assert finding.outcome is Outcome.SLOWER
        assert f"{one}, {two} lie on one drive" in finding.found and "gains nothing" in finding.cost

    def test_directories_of_several_drives(self, tmp_path: Path) -> None:
        finding = check_drives([str(tmp_path), "/dev/shm", "/nowhere/at/all"])
        assert finding.outcome is Outcome.OK and finding.found.startswith("3 directories on 2 drives")

    def test_directories_that_share_a_disk_are_of_one_drive(self, monkeypatch: pytest.MonkeyPatch) -> None:
        disks = {"a": ("sda",), "b": ("sdb",), "c": ("sdc",), "raid": ("sda", "sdb"), "d": (), "e": ()}
        monkeypatch.setattr(drives, "_disks", disks.__getitem__)
        assert by_drive(disks) == {"sdc": ["c"], "sda, sdb": ["a", "b", "raid"], "": ["d", "e"]}
        assert check_drives(["raid", "c", "d"]).found == "3 directories on 2 drives: sda, sdb, sdc"
        assert check_drives(["c", "b", "raid"]).found == "b, raid lie on one drive, sdb, sda"

    def test_two_files_as_drives(self, tmp_path: Path, mount: Mount) -> None:
        places = []
        for name in ("a", "b"):
            image = tmp_path / name
            with image.open("wb") as file:
                file.truncate(16 << 20)
            subprocess.run(["mkfs.ext4", "-q", image], check=True)
            places.append(str(mount("-o", "loop", str(image))))
        finding = check_drives(places)
        assert finding.outcome is Outcome.OK and finding.found.startswith("2 directories on 2 drives: loop")

"""The bound is the formula of the bytes that a step moves, and the verdict explains it in one line."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tiered
from tiered.bytes.device.profile import LinkProfile, Profile, write_profile
from tiered.tools.bench.report import Bandwidth
from tiered.tools.train.summary import Bound, profiled_bandwidth, profiled_link

PROFILE = Profile(
    engine="threads", read_bytes_per_s=3e9, write_bytes_per_s=2e9, block_nbytes=4 << 20, read_depth=8,
    write_depth=8, duplex=0.1, measured_at="2026-11-21T03:50:00+00:00", kernel="6.18",
)  # fmt: skip


def bound(step_s: float = 10.0, **given: Any) -> Bound:
    values: dict[str, Any] = {
        "waits": {}, "update_s": 0.0, "read_bytes": 0, "write_bytes": 0, "device_busy_s": 0.0, "bandwidth": None
    }  # fmt: skip
    return Bound(step_s, **{**values, **given})


@pytest.mark.parametrize(("duplex", "expected"), [(0.0, 7 + 3), (1.0, 7), (0.5, 7 + 1.5), (-0.5, 7 + 4.5)])
def test_reads_and_writes_share_the_drive_as_far_as_it_is_not_duplex(duplex: float, expected: float) -> None:
    assert Bandwidth(2, 4, duplex).seconds(14, 12) == expected


def test_the_bound_is_the_largest_of_compute_nvme_and_update() -> None:
    waits = {"demand read": 4.0, "commit": 1.0}
    drive = Bandwidth(1e9, 1e9)
    assert bound(waits=waits).seconds == 5.0
    assert bound(waits=waits, update_s=6.0).seconds == 6.0
    assert bound(waits=waits, update_s=6.0, read_bytes=7e9, bandwidth=drive).seconds == 7.0
    assert bound(waits=waits, read_bytes=7e9, bandwidth=drive).step_over_bound == pytest.approx(10 / 7)
    assert bound(waits=waits).stall == 0.5


def test_what_was_done_in_a_time_can_be_done_in_it() -> None:
    drive = Bandwidth(1e9, 1e9)
    assert bound(read_bytes=7e9, device_busy_s=6.0, bandwidth=drive).nvme_s == 6.0
    assert bound(read_bytes=5e9, device_busy_s=6.0, bandwidth=drive).nvme_s == 5.0
    assert bound(read_bytes=5e9, device_busy_s=6.0).nvme_s == 6.0


def test_no_part_exceeds_the_step() -> None:
    """Of updates, some threads' seconds may: together they are longer than the clock's."""
    assert bound(update_s=12.0, copy_s=11.0, device_busy_s=11.0).step_over_bound == 1.0


@pytest.mark.parametrize(
    ("given", "verdict"),
    [
        ({"waits": {"demand read": 0.2}}, "compute bound: I/O is hidden (stall 2%)"),
        (
            {"waits": {"demand read": 7.0}, "device_busy_s": 7.1, "read_bytes": 2, "write_bytes": 1},
            "disk-read bound: 71% of the step; a second drive would save 50%",
        ),
        (
            {"waits": {"write-back": 4.0}, "device_busy_s": 8.0, "read_bytes": 1, "write_bytes": 2},
            "disk-write bound: 80% of the step; a second drive would save 25%",
        ),
        ({"waits": {"update": 6.0}, "update_s": 9.0}, "update bound: 90% of the step; more CPU cores would help"),
        (
            {"waits": {"update": 6.0}, "update_s": 9.0, "updates_on_device": True},
            "update bound: 90% of the step; a larger batch would hide it",
        ),
        (
            {"waits": {"commit": 2.0, "demand read": 1.0}},
            "compute bound, and 30% of the step waits, most of it for commits",
        ),
    ],
)
def test_verdicts(given: dict[str, Any], verdict: str) -> None:
    assert bound(**given).verdict == verdict


def test_a_step_that_took_no_time_has_no_verdict() -> None:
    nothing = bound(0.0)
    assert (nothing.verdict, nothing.step_over_bound, nothing.stall) == ("nothing was measured", 1.0, 0.0)


def test_the_bandwidth_is_the_profiles(tmp_path: Path) -> None:
    assert profiled_bandwidth([tmp_path]) is None
    write_profile(tmp_path, PROFILE)
    (tmp_path / "other").mkdir()
    for directories in ([tmp_path], [tmp_path / "run", tmp_path / "other"]):
        assert profiled_bandwidth(directories) == Bandwidth(3e9, 2e9, 0.1)
    num_before = threading.active_count()
    with tiered.Store(tmp_path / "run", dram="8MiB") as store:  # the profile of the directory above
        assert [device.engine for device in store.working_set.space.devices] == ["threads"]
        assert threading.active_count() >= num_before + 8
    write_profile(tmp_path / "run", replace(PROFILE, read_bytes_per_s=1e9))
    nearest = profiled_bandwidth([tmp_path / "run" / "inner"])
    assert nearest is not None and nearest.read_bytes_per_s == 1e9


def test_the_bandwidth_of_directories_is_that_of_each_drive_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two file systems of one disk share it."""
    disks = {tmp_path / "a": ("sda",), tmp_path / "b": ("sda",), tmp_path / "c": ("sdb",)}
    monkeypatch.setattr("tiered.tools.doctor.description._disks", lambda directory: disks[Path(directory)])
    for directory in disks:
        directory.mkdir()
        write_profile(directory, PROFILE)
    assert profiled_bandwidth(list(disks)) == Bandwidth(6e9, 4e9, 0.1)


def test_the_bandwidth_of_a_link_is_that_of_a_device_of_the_type(tmp_path: Path) -> None:
    directories = [tmp_path / "never measured", tmp_path / "a" / "run"]
    assert profiled_link(directories, "cuda") is None
    (tmp_path / "a").mkdir()
    profile = LinkProfile(
        device="cuda", in_bytes_per_s=25e9, out_bytes_per_s=20e9, duplex=0.8,
        measured_at="2026-11-21T03:50:00+00:00", kernel="6.18",
    )  # fmt: skip
    write_profile(tmp_path / "a", profile)
    assert profiled_link(directories, "cuda") == Bandwidth(25e9, 20e9, 0.8)
    assert profiled_link(directories, "xpu") is None

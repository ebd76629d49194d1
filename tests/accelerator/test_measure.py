"""`tiered bench --device`, tiny, on the simulated device: its rows, its bytes, its refusals; no figure is judged."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import tiered
from tests.measure.test_bench import FEW, written_nbytes
from tiered.bytes.device.profile import LINK_PROFILE_NAME, PROFILE_NAME, load_link_profile
from tiered.errors import CapacityError, UsageError
from tiered.tools.bench.accelerator import (
    COPY_OPS,
    accelerator_of,
    bound_gb_per_s,
    link_of,
    measure_link,
    measure_three_tiers,
)
from tiered.tools.bench.command import BenchRequest, bench
from tiered.tools.bench.report import TITLE, Bandwidth, BenchReport, BenchRow, ComputeDeviceReport
from tiered.tools.bench.settings import NUM_TIER_WARM_UPS, BenchSettings
from tiered.tools.bench.suite import Session
from tiered.tools.cli import main
from tiered.tools.doctor.description import machine_description
from tiered.tools.train.summary import profiled_link
from tiered.units import KiB, MiB

TINY = replace(
    FEW,
    rounds=2,
    tensors_nbytes=16 * MiB,
    tensor_rounds=2,
    copy_nbytes=256 * KiB,
    copies_nbytes=2 * MiB,
    copy_memory_nbytes=MiB,
)
SWAP = replace(TINY, tensors_nbytes=12 * MiB, tensor_rounds=1)
NUM_BUFFERS = 4  # that are filled once, to be copied out in the rounds over three tiers


def test_everything_is_measured_reported_and_cleaned_up(
    sim: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, json_file = tmp_path / "drive", tmp_path / "bench.json"
    directory.mkdir()
    before = written_nbytes()
    assert bench(BenchRequest((directory,), engine="threads", device="sim", yes=True, json_file=json_file), TINY) == 0
    assert written_nbytes() - before <= TINY.write_nbytes(has_device=True)
    assert sorted(file.name for file in directory.iterdir()) == [LINK_PROFILE_NAME, PROFILE_NAME]

    report = json.loads(json_file.read_text())
    found = report["compute_device"]
    assert (found["device"], found["device_type"], found["why_pageable"]) == ("sim:0", "sim", None)
    copies = [row for row in report["results"] if row["reference"] == "torch"]
    assert [row["op"] for row in copies] == list(COPY_OPS)
    for row in copies:
        assert (row["block_bytes"], row["rounds"]) == (256 * KiB, 2)
        assert 0 < row["gb_per_s_min"] <= row["gb_per_s"] <= row["gb_per_s_max"]
    swap, moved = found["swap"], found["swap_bytes"]
    assert swap["directory"] == str(directory)
    assert moved["in"] == moved["out"] == moved["written"] == 2 * TINY.tensors_nbytes
    assert moved["read"] >= 2 * TINY.tensors_nbytes - TINY.tier_dram_nbytes
    assert swap["ratio"] == pytest.approx(swap["gb_per_s"] / swap["reference_gb_per_s"])

    check_counts(sim, swap)
    check_said(capsys.readouterr().out.splitlines(), report)
    check_profile(directory, found["link"])


def check_counts(sim: ModuleType, swap: dict[str, Any]) -> None:
    """The device has seen the bytes of the report, those of torch's rounds and warm-ups, and no others."""
    counts = sim.counts()
    each_way = 2 * 2 * (1 + TINY.rounds) * TINY.copies_nbytes  # two ops, two sides
    each_way += (NUM_TIER_WARM_UPS + TINY.tensor_rounds) * TINY.tensors_nbytes
    assert counts.host_to_device.nbytes == each_way + NUM_BUFFERS * swap["block_bytes"]
    assert counts.device_to_host.nbytes == each_way
    assert counts.pageable_host_to_device.nbytes == counts.device_to_pageable_host.nbytes == 0


def check_said(lines: list[str], report: dict[str, Any]) -> None:
    """The rows are in tables of one width, and the verdict has the last word."""
    start = lines.index(TITLE)
    assert lines[start - 1] == "sim:0 through page-locked DRAM, beside torch's copies of its own tensors"
    assert [line[:8].strip() for line in lines[start + 1 : start + 4]] == list(COPY_OPS)
    assert [line for line in lines if line.startswith("3 tiers   512K")]
    assert " ".join(" ".join(lines).split()).endswith(report["verdict"])
    assert "copies to sim:0 run at" in report["verdict"] and lines[-1].endswith("% of min(PCIe, NVMe)")


def check_profile(directory: Path, link: dict[str, float]) -> None:
    """The rates are kept beside the drive's, for the bound of a step."""
    profile, bandwidth = load_link_profile(directory), profiled_link([directory / "run"], "sim")
    assert profile is not None and bandwidth is not None
    assert (profile.in_bytes_per_s, profile.out_bytes_per_s) == (link["read_bytes_per_s"], link["write_bytes_per_s"])
    assert (bandwidth.read_bytes_per_s, bandwidth.duplex) == (profile.in_bytes_per_s, link["duplex"])
    assert profiled_link([directory], "cuda") is None


def test_without_the_option_nothing_is_said_of_a_device(
    sim: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    json_file = tmp_path / "bench.json"
    assert bench(BenchRequest((tmp_path,), engine="threads", yes=True, json_file=json_file), FEW) == 0
    assert json.loads(json_file.read_text())["compute_device"] is None
    said = capsys.readouterr().out
    assert "sim:0" not in said and "three tiers" not in said
    assert not (tmp_path / LINK_PROFILE_NAME).exists()
    assert sim.counts().host_to_device.num == 0


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("auto", "this process has none"),
        ("cuda", "there is none"),
        ("cpu", "the CPU computes in DRAM, and nothing is copied"),
        ("/nvme0/run", "expected 'auto', 'cpu' or an accelerator such as 'cuda'"),
    ],
)
def test_without_an_accelerator_it_is_refused_and_nothing_written(
    word: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", str(tmp_path), "--quick", "--yes", "--device", word]) == 2
    error = capsys.readouterr().err
    assert says in error and error.startswith("tiered: --device") and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_device_of_the_type_that_is_not_there_is_refused(sim: ModuleType) -> None:
    assert accelerator_of("sim") == accelerator_of("auto") == torch.device("sim", 0)
    with pytest.raises(UsageError, match="expected one of 2 devices of that type, counted from 0"):
        accelerator_of("sim:2")
    with pytest.raises(UsageError, match="it is 'sim'"):
        accelerator_of("cuda")


def test_memory_that_cannot_be_page_locked_is_said(sim: ModuleType, tmp_path: Path) -> None:
    sim.fail_registration(1)
    found = copies_in(tmp_path)
    assert found.why_pageable is not None
    counts = sim.counts()
    assert counts.pageable_host_to_device.nbytes == counts.device_to_pageable_host.nbytes
    assert counts.pageable_host_to_device.nbytes == 2 * 2 * TINY.copies_nbytes  # the store's, not torch's


def session_in(folder: Path, settings: BenchSettings, check: Callable[[], object] = lambda: None) -> Session:
    return Session(BenchReport(machine_description([folder]), settings), "threads", check)


def copies_in(folder: Path, check: Callable[[], object] = lambda: None) -> ComputeDeviceReport:
    """Measure one round of copies."""
    session = session_in(folder, replace(TINY, rounds=1), check)
    measure_link(session, torch.device("sim", 0), str(folder))
    assert session.report.compute_device is not None
    return session.report.compute_device


def three_tiers(folder: Path, check: Callable[[], object] = lambda: None) -> None:
    report = ComputeDeviceReport("sim:0", "sim", None, Bandwidth(1e9, 1e9), 1.0)
    measure_three_tiers(
        session_in(folder, SWAP, check), [folder], torch.device("sim", 0), report, [Bandwidth(1e9, 1e9)]
    )


def test_copies_that_end_late_are_in_order(sim: ModuleType, tmp_path: Path) -> None:
    """No host access comes before the event that it must wait for, and the bytes come back from the device."""
    sim.set_query_delay(3)
    sim.set_allocation_writes()
    copies_in(tmp_path)
    three_tiers(tmp_path)
    assert sim.races() == []
    with tiered.Store(tmp_path, dram="8MiB", mode="r") as store:
        for number in range(SWAP.tensors_nbytes // SWAP.tier_tensor_nbytes):
            assert torch.equal(store[f"out/{number}"], store[f"in/{number % NUM_BUFFERS}"])


class Stopped(Exception):
    """The user's wish."""


@pytest.mark.parametrize("part", ["link", "swap"])
def test_an_end_between_rounds_leaves_nothing_behind(part: str, sim: ModuleType, tmp_path: Path) -> None:
    num_calls, before = 0, torch.accelerator.memory_allocated()  # references that other tests keep

    def check() -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2:
            raise Stopped

    with pytest.raises(Stopped):
        copies_in(tmp_path, check) if part == "link" else three_tiers(tmp_path / "store", check)
    if part == "link":
        assert not list(tmp_path.iterdir())
    assert torch.accelerator.memory_allocated() <= before


def test_a_device_without_memory_is_refused_before_the_drives_are_measured(sim: ModuleType, tmp_path: Path) -> None:
    sim.set_memory_limit(MiB)
    with pytest.raises(CapacityError, match="sim:0 has too little free memory for the bench"):
        bench(BenchRequest((tmp_path,), engine="threads", device="sim", yes=True), TINY)
    assert not list(tmp_path.iterdir())


class TestArithmetic:
    @pytest.mark.parametrize(("both", "duplex"), [(20.0, 0.0), (40.0, 1.0), (80 / 3, 0.5)])
    def test_the_link_is_duplex_as_far_as_both_directions_overlap(self, both: float, duplex: float) -> None:
        found = link_of(*(BenchRow.of("copy", 1, "", [rate], "torch", [1.0]) for rate in (20.0, 20.0, both)))
        assert (found.read_bytes_per_s, found.write_bytes_per_s) == (20e9, 20e9)
        assert found.duplex == pytest.approx(duplex)

    def test_a_ratio_is_the_median_over_the_pairs(self) -> None:
        row = BenchRow.of("copy in", 1, "", [1.0, 2.0, 3.0], "torch", [2.0, 4.0, 1.0])
        assert (row.gb_per_s_min, row.gb_per_s, row.gb_per_s_max, row.ratio) == (1.0, 2.0, 3.0, 0.5)

    @pytest.mark.parametrize(
        ("link", "drives", "bound"),
        [
            (Bandwidth(20e9, 20e9, 1.0), [Bandwidth(2e9, 4e9, 1.0)], 4.0),  # the drive: 10 read at 2, beside 10 written
            (Bandwidth(20e9, 20e9, 1.0), [Bandwidth(2e9, 4e9, 1.0), Bandwidth(2e9, 4e9, 0.0)], 20 / 3.75),
            (Bandwidth(2e9, 2e9, 0.0), [Bandwidth(20e9, 20e9, 1.0)], 2.0),  # the link
        ],
    )
    def test_the_bound_is_the_slower_of_both_borders(
        self, link: Bandwidth, drives: list[Bandwidth], bound: float
    ) -> None:
        nbytes = 10 * 10**9
        assert bound_gb_per_s((nbytes, nbytes), (nbytes, nbytes), link, drives) == pytest.approx(bound)
        held = bound_gb_per_s((nbytes, nbytes), (0, 0), Bandwidth(2e9, 2e9, 0.0), drives)
        assert held == pytest.approx(2.0)

"""`tiered bench`, tiny: what it reports, keeps and refuses, and that it leaves nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.bytes.moving import exit_code_of_child
from tests.rigs.warm_python import WarmPython
from tiered.bytes.device.profile import PROFILE_NAME, load_profile
from tiered.errors import UsageError
from tiered.tools.bench.command import BenchRequest, _finish, bench, confirm_writes
from tiered.tools.bench.report import Bandwidth, BenchReport, Best, DirectoryReport
from tiered.tools.bench.settings import FULL, QUICK, BenchSettings
from tiered.tools.cli import main
from tiered.tools.doctor.description import directory_description, machine_description
from tiered.units import GiB, KiB, MiB, format_bytes

TINY = BenchSettings(
    blocks=(128 * KiB,),
    depths=(2,),
    rounds=2,
    round_s=0.05,
    warm_up_s=0.01,
    round_nbytes=4 * MiB,
    file_nbytes=8 * MiB,
    tensor_nbytes=(64 * KiB,),
    tensors_nbytes=MiB,
    tensor_rounds=1,
    sustained_s=0.06,
    window_s=0.01,
)
FEW = replace(TINY, rounds=1, tensor_nbytes=(), sustained_s=0.0)


def written_nbytes() -> int:
    """Return what storage was made to write for this process."""
    return psutil.Process().io_counters().write_bytes


def last_paragraph(output: str) -> str:
    """Return the verdict, which is folded at the page's width."""
    return " ".join(output.strip().split("\n\n")[-1].split())


class TestReport:
    def test_everything_is_measured_reported_and_cleaned_up(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        directory, json_file = tmp_path / "drive", tmp_path / "bench.json"
        directory.mkdir()
        request = BenchRequest((directory,), yes=True, json_file=json_file)
        assert bench(request, TINY) == 0

        assert [file.name for file in directory.iterdir()] == [PROFILE_NAME]
        found = json.loads(json_file.read_text())
        assert (found["schema"], found["version"]) == ("tiered-bench", 5)
        rows = found["results"]
        assert [row["op"] for row in rows] == ["read", "write", "mixed", "put", "get", "lease"]
        for row in rows:
            assert row["gb_per_s_min"] <= row["gb_per_s"] <= row["gb_per_s_max"]
        for row in rows[:3]:
            assert (row["block_bytes"], row["depth"], row["rounds"]) == (128 * KiB, 2, 2)
            assert row["reference"] == "fio" and (row["ratio"] is not None) == (shutil.which("fio") is not None)
            assert row["latency"]["p50_s"] <= row["latency"]["p99_s"] <= row["latency"]["max_s"]
        (one,) = found["directories"]
        assert one["directory"] == str(directory)
        assert {sample["op"] for sample in one["sustained"]} == {"read", "write"}
        assert found["machine"]["kernel"]

        profile = load_profile(directory)
        assert profile is not None
        best, swap = one["best"], one["swap"]
        assert (profile.block_nbytes, profile.read_depth) == (best["block_bytes"], best["read_depth"]) == (128 * KiB, 2)
        assert (profile.read_bytes_per_s, profile.write_bytes_per_s, profile.duplex) == tuple(swap.values())
        assert profile.engine == one["engine"]

        assert last_paragraph(capsys.readouterr().out) == found["verdict"]

    def test_a_fio_that_does_not_work_is_said_and_done_without(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "fio").write_text("#!/bin/sh\necho out of order >&2\nexit 1\n")
        (tmp_path / "fio").chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        json_file = tmp_path / "bench.json"
        assert bench(BenchRequest((tmp_path,), engine="threads", yes=True, json_file=json_file), FEW) == 0
        said = capsys.readouterr().out
        assert "does not work: fio did not report: out of order" in " ".join(said.split())
        assert last_paragraph(said).endswith("fio did not work, so there is no reference")
        assert {row["ratio"] for row in json.loads(json_file.read_text())["results"]} == {None}

    def test_directories_are_measured_alone_and_then_together(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Those of one drive are said to be, and its rate is not added to itself."""
        monkeypatch.setenv("PATH", "")  # as where fio is not installed
        directories = (tmp_path / "a", tmp_path / "b")
        for directory in directories:
            directory.mkdir()
        json_file = tmp_path / "bench.json"
        assert bench(BenchRequest(directories, engine="threads", yes=True, json_file=json_file), FEW) == 0
        found = json.loads(json_file.read_text())
        names = [str(directory) for directory in directories]
        alone, together = found["results"][:6], found["results"][6:]
        assert [row["directory"] for row in alone] == [names[0]] * 3 + [names[1]] * 3
        assert [(row["op"], row["directory"]) for row in together] == [
            (op, "+".join(names)) for op in ("put", "get", "lease")
        ]
        drive = found["directories"][0]["swap"]["write_bytes_per_s"]
        assert together[0]["reference_gb_per_s"] == pytest.approx(drive / 1e9)
        assert f"read {together[1]['gb_per_s']:.1f} GB/s" in found["verdict"] and "this drive" in found["verdict"]
        assert f"{names[0]}, {names[1]} lie on one drive" in " ".join(capsys.readouterr().out.split())
        assert {row["ratio"] for row in alone} == {None}
        for directory in directories:
            assert [file.name for file in directory.iterdir()] == [PROFILE_NAME]


class TestTheEnd:
    """What is made of minutes of measuring, whatever else fails."""

    def report(self, directory: Path) -> BenchReport:
        best, swap = Best(4 * MiB, 8, 8, 3.5, 6.0, None, None), Bandwidth(3e9, 5e9, 0.1)
        one = DirectoryReport(str(directory), engine="threads", engine_reason="it was asked for", best=best, swap=swap)
        return BenchReport(machine_description(), FEW, directories=[one])

    def test_a_file_that_cannot_be_written_after_all_is_named_and_takes_nothing_with_it(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        report = self.report(tmp_path)
        with pytest.raises(UsageError, match="cannot write /dev/full: No space left on device"):
            _finish(report, BenchRequest((tmp_path,), json_file=Path("/dev/full")))
        assert load_profile(tmp_path) is not None
        assert last_paragraph(capsys.readouterr().out) == report.verdict

    def test_a_profile_that_cannot_be_kept_is_a_warning(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        request = BenchRequest((tmp_path,), json_file=tmp_path / "bench.json")
        _finish(self.report(tmp_path / "gone"), request)
        said = capsys.readouterr().out
        assert last_paragraph(said) == json.loads((tmp_path / "bench.json").read_text())["verdict"]
        assert said.startswith("best: engine threads") and "not kept (cannot write" in " ".join(said.split())


class TestRefusals:
    @pytest.mark.parametrize(
        ("options", "says"),
        [
            (["--sustained", "1000000"], "there is no terminal to ask on: add --yes"),
            (["--sustained", "-1"], "--sustained takes seconds"),
            (["--json", "/nowhere/at/all.json"], "cannot write /nowhere/at/all.json"),
            (["--json", "/tmp"], "cannot write /tmp: it is a directory"),
            (["--quick", "--yes", "--engine", "steam"], "--engine must be one of auto, uring"),
        ],
    )
    def test_one_line_and_nothing_written(
        self, options: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["bench", str(tmp_path), *options]) == 2
        error = capsys.readouterr().err
        assert says in error
        assert error.count("\n") == 1
        assert not list(tmp_path.iterdir())

    def test_directories_that_are_missing_or_twice(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="is no directory"):
            BenchRequest((tmp_path / "missing",))
        with pytest.raises(UsageError, match="different ones"):
            BenchRequest((tmp_path, tmp_path / "." / ""))

    def test_a_file_that_is_not_ours_to_write_is_refused_before_minutes_of_measuring(self, tmp_path: Path) -> None:
        place = tmp_path / "theirs"
        place.mkdir(0o755)

        def check() -> None:
            os.setresuid(65534, 65534, 65534)  # root may write anywhere
            with pytest.raises(UsageError, match="is not yours to write"):
                BenchRequest((Path("/tmp"),), json_file=place / "bench")

        for parent in [tmp_path, *tmp_path.parents][:-2]:
            parent.chmod(parent.stat().st_mode | 0o011)
        assert exit_code_of_child(check) == 0

    @pytest.mark.parametrize("stream", ["stdin", "stdout"])
    def test_a_closed_stream_is_no_terminal(self, stream: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("sys.stdin.isatty", lambda: True)
        monkeypatch.setattr("sys.stdout.isatty", lambda: True)
        monkeypatch.setattr(f"sys.{stream}", None)
        described = replace(directory_description(tmp_path), free_nbytes=100 * GiB)
        confirm_writes([described], 10 * GiB, GiB, yes=False)  # a tenth is not more than a tenth
        with pytest.raises(UsageError, match=r"up to 11\.0 GiB .*no terminal to ask on: add --yes"):
            confirm_writes([described], 11 * GiB, GiB, yes=False)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing_behind(number: signal.Signals, tmp_path: Path, warm_python: WarmPython) -> None:
    command = [warm_python.executable, "-m", "tiered.tools.cli", "bench", str(tmp_path), "--quick", "--yes"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("op  "):  # the points begin
                break
        process.send_signal(number)
        output, error = process.communicate(timeout=300)
    assert process.returncode == 128 + number, error
    assert f"stopped by {'Ctrl-C' if number == signal.SIGINT else 'SIGTERM'}; nothing was left behind" in output
    assert not list(tmp_path.iterdir())


class TestSettings:
    @pytest.mark.parametrize("num_directories", [1, 4])
    def test_quick_has_the_pairs_that_matter_in_a_minute_and_30_gib(self, num_directories: int) -> None:
        points = {(point.op, point.block_nbytes) for point in QUICK.points}
        assert points >= {(op, size * MiB) for op in ("read", "write") for size in (1, 4, 8)}
        assert QUICK.rounds >= 5 and QUICK.sustained_s == 0
        for settings in (QUICK, QUICK.fitted(GiB)):
            assert settings.write_nbytes(num_directories=num_directories, has_device=True) <= 30 * GiB

    def test_the_full_grid(self) -> None:
        points = FULL.points
        assert {point.block_nbytes for point in points} >= {128 * KiB << shift for shift in range(8)}
        assert max(point.block_nbytes * point.depth for point in points) == 128 * MiB
        assert FULL.memory_nbytes == 256 * MiB  # more than a processor's cache
        assert FULL.rounds >= 5

    def test_no_more_is_written_than_was_said(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """By the kernel's count for this process, so without fio."""
        monkeypatch.setenv("PATH", "")
        directories = (tmp_path / "a", tmp_path / "b")
        for directory in directories:
            directory.mkdir()
        settings = replace(TINY, sustained_s=0.0)
        most = settings.write_nbytes(num_directories=2)
        before = written_nbytes()
        assert bench(BenchRequest(directories, yes=True), settings) == 0
        written = written_nbytes() - before
        assert written <= 2 * most
        assert not written or written >= 2 * settings.file_nbytes  # nothing is counted on a RAM disk
        said = capsys.readouterr().out.splitlines()[0]
        assert said == f"this writes at most {format_bytes(most)} to each of the directories"

    def test_tensors_that_pass_three_tiers_exceed_their_dram(self) -> None:
        for settings in (FULL, QUICK):
            assert settings.tier_dram_nbytes <= settings.tensors_nbytes // 2
            assert settings.tier_tensor_nbytes == 16 * MiB <= settings.tier_dram_nbytes // 16

    def test_files_fit_and_tensors_that_find_no_room_twice_are_left_out(self) -> None:
        assert FULL.fitted(1000 * GiB) == FULL
        assert (FULL.fitted(10 * GiB).file_nbytes, FULL.fitted(0).file_nbytes) == (GiB, 64 * MiB)
        assert FULL.fitted(10 * GiB).tensor_nbytes == FULL.tensor_nbytes
        assert FULL.fitted(576 * MiB).tensor_nbytes == FULL.tensor_nbytes  # 64 MiB of file, twice 256 MiB
        assert FULL.fitted(576 * MiB - 1).tensor_nbytes == FULL.tensor_nbytes[:-1]
        assert FULL.fitted(100 * MiB).tensor_nbytes == ()

"""`tiered doctor`: what is printed, for people and for programs, and the exit status."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tiered.tools.cli import main
from tiered.tools.doctor.checks import MACHINE, Finding, Outcome
from tiered.tools.doctor.description import machine_description
from tiered.tools.doctor.doctor import DoctorReport, examined, worst_first

FINDINGS = (
    Finding(MACHINE, "process groups", Outcome.OK, "one rank"),
    Finding("/a[b]", "direct I/O", Outcome.SLOWER, "refused [here]", cost="half", mend="move"),
    Finding("/c", "writing", Outcome.BROKEN, "no", cost="all", mend="mkdir /c"),
    Finding("/c", "profile", Outcome.OK, "none", mend="measure"),
)


class TestReport:
    """The worst first, and a verdict."""

    def report(self, *findings: Finding) -> DoctorReport:
        return DoctorReport(worst_first(findings), machine_description())

    def test_the_worst_comes_first_and_the_verdict_last(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.report(*FINDINGS).show()
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in lines if line.startswith(("ok", "slower", "broken"))] == [
            "broken",
            "slower",
            "ok",
            "ok",
        ]
        assert lines[-1] == "1 thing is broken here: writing in /c; mend that before training"
        words = {"costs: half", "mend:  move", "costs: all", "mend:  mkdir /c", "next:  measure"}
        assert words <= {line.strip() for line in lines}
        assert "/a[b]" in "\n".join(lines) and "refused [here]" in "\n".join(lines), "no markup"
        found = self.report(FINDINGS[3], FINDINGS[0]).findings
        assert [finding.subject for finding in found] == [MACHINE, "/c"], "the machine first within an outcome"

    @pytest.mark.parametrize(
        ("findings", "status", "verdict"),
        [
            (FINDINGS[:1], 0, "everything works here"),
            (FINDINGS[:2], 0, "everything works here, and 1 thing is slower than could be: direct I/O in /a[b]"),
            (FINDINGS, 1, "1 thing is broken here: writing in /c; mend that before training"),
            (
                (Finding(MACHINE, "open files", Outcome.BROKEN, "8", "all", "more"), FINDINGS[2]),
                1,
                "2 things are broken here: open files, writing in /c; mend that before training",
            ),
        ],
    )
    def test_verdict_and_status(self, findings: tuple[Finding, ...], status: int, verdict: str) -> None:
        report = self.report(*findings)
        assert (report.status, report.verdict) == (status, verdict)


class TestCommandLine:
    """In this process, as a user calls it, but for a machine that is busy: what works answers, whenever that is."""

    @pytest.fixture(autouse=True)
    def patience(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(examined, "__defaults__", (120.0,))

    def test_a_report_for_people_and_one_for_programs(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        place, file = tmp_path / "run", tmp_path / "report.json"
        place.mkdir()
        status = main(["doctor", str(place), "/dev/shm", "--json", str(file)])
        report = json.loads(file.read_text())
        assert report.keys() == {"version", "status", "verdict", "findings", "machine"}
        assert (report["version"], report["status"], status) == (2, 1, 1), "tmpfs is broken"
        said = capsys.readouterr().out
        assert said.splitlines()[-1] == report["verdict"]
        for finding in report["findings"]:
            assert finding.keys() == {"subject", "check", "outcome", "found", "cost", "mend"}
            assert finding["check"] in said
        assert [described["path"] for described in report["machine"]["directories"]] == [str(place), "/dev/shm"]
        assert not os.listdir(place)

    def test_json_on_standard_output_is_nothing_but_that(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["doctor", "/nowhere/at/all", "--json", "-"]) == 1
        report = json.loads(capsys.readouterr().out)
        assert report["findings"][0]["subject"] == "/nowhere/at/all"
        assert report["machine"]["directories"] == []

    @pytest.mark.parametrize("where", ["/nowhere/at/all.json", "/tmp"])
    def test_bad_usage(self, where: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["doctor", "--json", where]) == 2
        assert capsys.readouterr().err.startswith(f"tiered: cannot write {where}: ")
        assert main(["doctor", "--fast"]) == 2

    def test_the_default_is_here_and_a_directory_given_twice_counts_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.chdir(tmp_path)
        main(["doctor"])
        assert str(tmp_path) in capsys.readouterr().out
        subjects = [finding.subject for finding in examined([tmp_path, ".", f"{tmp_path}/"]).findings]
        assert set(subjects) == {MACHINE, str(tmp_path)}
        assert "drives" not in {finding.check for finding in examined([tmp_path, "."]).findings}

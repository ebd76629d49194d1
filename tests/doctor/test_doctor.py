"""`tiered doctor`: what is printed, for people and for programs, and the exit status."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from rich.console import Console

from tiered.tools.cli import main
from tiered.tools.doctor.description import machine_description
from tiered.tools.doctor.doctor import DoctorReport, examined
from tiered.tools.doctor.finding import MACHINE, Finding, Outcome, broken, ok, slower

FINDINGS = (
    ok(MACHINE, "SQLite", "version 3"),
    slower("/a[b]", "direct I/O", "refused [here]", cost="half", mend="move"),
    broken("/c", "writing", "no", cost="all", mend="mkdir /c"),
    ok("/c", "profile", "none", mend="measure"),
)


class TestReport:
    """The worst first, and a verdict."""

    def report(self, *findings: Finding) -> DoctorReport:
        return DoctorReport.of(findings, machine_description())

    def shown(self, report: DoctorReport, *, width: int = 200) -> list[str]:
        out = io.StringIO()
        report.show(Console(file=out, width=width))
        return [line.rstrip() for line in out.getvalue().splitlines()]

    def test_the_worst_comes_first_and_the_verdict_last(self) -> None:
        lines = self.shown(self.report(*FINDINGS))
        assert [line.split()[0] for line in lines if line.startswith(("ok", "slower", "broken"))] == [
            "broken",
            "slower",
            "ok",
            "ok",
        ]
        assert lines[-1] == "1 thing is broken here: writing in /c; mend that before training"

    def test_cost_and_mend_are_said_where_something_is_lacking(self) -> None:
        lines = [line.strip() for line in self.shown(self.report(*FINDINGS))]
        assert {"costs: half", "mend:  move", "costs: all", "mend:  mkdir /c", "next:  measure"} <= set(lines)

    def test_brackets_are_kept(self) -> None:
        said = "\n".join(self.shown(self.report(*FINDINGS)))
        assert "/a[b]" in said and "refused [here]" in said

    def test_it_keeps_to_the_width(self) -> None:
        lines = self.shown(self.report(ok(MACHINE, "a", "word " * 40), *FINDINGS), width=60)
        assert max(map(len, lines)) <= 60 and " ".join(lines).split().count("word") == 40

    def test_a_terminal_has_colours(self) -> None:
        out = io.StringIO()
        console = Console(file=out, width=60, force_terminal=True, color_system="standard")
        self.report(ok(MACHINE, "a", "word " * 40), *FINDINGS[1:]).show(console)
        assert "\x1b[1;31mbroken" in out.getvalue(), "coloured"
        plain = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue()).splitlines()
        assert max(map(len, plain)) <= 60
        assert " ".join(plain).split().count("word") == 40

    @pytest.mark.parametrize(
        ("findings", "status", "verdict"),
        [
            (FINDINGS[:1], 0, "everything works here"),
            (FINDINGS[:2], 0, "everything works here, and 1 thing is slower than could be: direct I/O in /a[b]"),
            (FINDINGS, 1, "1 thing is broken here: writing in /c; mend that before training"),
            (
                (broken(MACHINE, "open files", "8", cost="all", mend="more"), FINDINGS[2]),
                1,
                "2 things are broken here: open files, writing in /c; mend that before training",
            ),
        ],
    )
    def test_verdict_and_status(self, findings: tuple[Finding, ...], status: int, verdict: str) -> None:
        report = self.report(*findings)
        assert (report.status, report.verdict) == (status, verdict)

    def test_findings_survive_json(self) -> None:
        report = self.report(*FINDINGS)
        known = json.loads(json.dumps(report.as_json()))["findings"]
        assert [{**each, "outcome": Outcome(each["outcome"])} for each in known] == [asdict(f) for f in report.findings]

    def test_within_an_outcome_the_machine_comes_first(self) -> None:
        report = self.report(FINDINGS[3], FINDINGS[0])
        assert [finding.subject for finding in report.findings] == [MACHINE, "/c"]


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
        assert (report["version"], report["status"], status) == (1, 1, 1), "tmpfs is broken"
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

    def test_a_report_that_fails_after_all_is_named_below_the_table(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["doctor", "/nowhere/at/all", "--json", "/dev/full"]) == 2
        said = capsys.readouterr()
        assert "1 thing is broken here: writing in /nowhere/at/all" in said.out
        assert said.err == "tiered: cannot write /dev/full: No space left on device; everything else is done\n"

    def test_the_default_is_here_and_a_directory_given_twice_counts_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.chdir(tmp_path)
        main(["doctor"])
        assert str(tmp_path) in capsys.readouterr().out
        subjects = [finding.subject for finding in examined([tmp_path, ".", f"{tmp_path}/"]).findings]
        assert set(subjects) == {MACHINE, str(tmp_path)}
        assert "drives" not in {finding.check for finding in examined([tmp_path, "."]).findings}

    def test_a_tilde_in_a_name_is_a_tilde(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The shell has made of it what it means."""
        monkeypatch.chdir(tmp_path)
        (tmp_path / "~root").mkdir()
        report = examined([Path("./~root")])
        assert {finding.subject for finding in report.findings} == {MACHINE, str(tmp_path / "~root")}
        assert [described.path for described in report.machine.directories] == [str(tmp_path / "~root")]

    def test_what_is_broken_is_the_exit_status_of_the_program(self, tmp_path: Path) -> None:
        command = [sys.executable, "-m", "tiered.tools.cli", "doctor", str(tmp_path / "missing")]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 1 and not done.stderr
        assert "mkdir -p -m 700" in done.stdout
        verdict = " ".join(done.stdout.split()).partition(" broken here: ")[2]  # more is where it is too busy
        assert f"writing in {tmp_path / 'missing'}" in verdict

    def test_the_slowest_machine_is_not_waited_for(self, tmp_path: Path) -> None:
        report = examined([tmp_path], deadline_s=0)
        assert {finding.outcome for finding in report.findings} == {Outcome.BROKEN}
        assert "no answer within 0 s" in report.findings[0].found

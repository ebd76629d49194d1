"""The doctor: every check on this machine and in the given directories, in a bounded time."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from tiered.console.report_file import check_writable, write_report
from tiered.doctor.compute import compute_checks, group_checks, kernel_checks
from tiered.doctor.description import machine_description
from tiered.doctor.directory import directory_checks, drive_checks
from tiered.doctor.examination import examine
from tiered.doctor.finding import Check
from tiered.doctor.machine import machine_checks
from tiered.doctor.report import DoctorReport

__all__ = ["doctor", "examined"]

_DEADLINE_S = 6.0  # with torch's import and a margin, less than 10 s in all


def doctor(directories: Sequence[Path], json_file: str | None = None) -> int:
    """Examine ``directories``, print the findings, and return the exit status: 1 if something is broken.

    ``json_file`` gets the report for programs; "-" prints that instead of the table. Raises UsageError where it cannot
    be written.
    """
    if json_file not in (None, "-"):
        check_writable(Path(str(json_file)))
    report = examined(directories)
    text = f"{json.dumps(report.as_json(), indent=1)}\n"
    if json_file == "-":
        print(text, end="")
    else:
        report.show()
        if json_file is not None:
            write_report(Path(json_file), text)
    return report.status


def examined(directories: Sequence[str | os.PathLike[str]], deadline_s: float = _DEADLINE_S) -> DoctorReport:
    """Return the report on this machine and ``directories``; blocks for little more than ``deadline_s``.

    Leaves nothing in the directories. Starts child processes by fork, and touches neither CUDA nor a drive itself
    before they have answered.
    """
    # Not realpath: a link that leads to a drive that hangs must not be followed here.
    paths = list(dict.fromkeys(os.path.abspath(directory) for directory in directories))
    groups: list[list[Check]] = [machine_checks(), compute_checks(), group_checks(), kernel_checks()]
    groups += [checks for checks in (drive_checks(paths), *map(directory_checks, paths)) if checks]
    findings = examine(groups, deadline_s)
    answered = [path for path in paths if len(directory_checks(path)) == sum(f.subject == path for f in findings)]
    return DoctorReport.of(findings, machine_description(answered))

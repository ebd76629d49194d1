"""`tiered doctor`: every check on this machine and in the given directories in a bounded time, and the report."""

from __future__ import annotations

import faulthandler
import io
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tiered.bytes import kernel_file
from tiered.bytes.critical_section import BoundedThread
from tiered.tools.console import MAY_HANG, check_writable, say, write_report
from tiered.tools.doctor.checks import (
    MACHINE,
    Checks,
    Finding,
    Outcome,
    broken,
    check_drives,
    check_nodes,
    directory_checks,
    machine_checks,
)
from tiered.tools.doctor.description import MachineDescription, machine_description

__all__ = ["DoctorReport", "doctor", "examine", "examined", "worst_first"]

_DEADLINE_S = 6.0  # with torch's import and a margin, less than 10 s in all
_HEAD_START_S = 0.25  # of a group before the next: the time of a flush is the drive's, not that of another check
_SEE_LOG = "see the kernel log (dmesg) for the reason"
_VERSION = 2


def doctor(directories: Sequence[Path], json_file: str | None = None) -> int:
    """Examine ``directories``, print the findings, and return the exit status: 1 if something is broken.

    ``json_file`` gets the report for programs; "-" prints that instead of the table. Raises UsageError where it cannot
    be written. Python prints the place of a check that crashes the process.
    """
    if json_file not in (None, "-"):
        check_writable(Path(str(json_file)))
    faulthandler.enable(2)
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
    """Return the report on this machine and ``directories``, the worst findings first; leaves nothing there.

    Blocks for little more than ``deadline_s``. A directory in which a check hangs or was not tried is not described.
    """
    # Not realpath: a link that leads to a drive that hangs must not be followed here.
    paths = list(dict.fromkeys(os.path.abspath(directory) for directory in directories))
    groups = [directory_checks(path) for path in paths]
    drives: list[Checks] = [(MACHINE, {"drives": lambda: check_drives(paths)})] if paths[1:] else []
    drives.append((MACHINE, {"NUMA nodes": lambda: check_nodes(paths)}))
    findings = examine([*groups, *drives, *machine_checks()], deadline_s)
    answered = [path for path, named in groups if sum(finding.subject == path for finding in findings) == len(named)]
    return DoctorReport(worst_first(findings), machine_description(answered))


def worst_first(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Return the findings by outcome; within an outcome the machine's come first."""
    return tuple(sorted(findings, key=lambda one: (list(Outcome).index(one.outcome), one.subject != MACHINE)))


def examine(groups: Sequence[Checks], deadline_s: float) -> list[Finding]:
    """Run the checks of each group in order, in a thread of its own; return all findings after ``deadline_s``.

    A check that raises or has not answered by then is broken, and the rest of the group of a check without an answer
    is not tried; nor is it after a first check that is broken. Blocks for little more than ``deadline_s``, whatever the
    drives do: the thread of a check that hangs is left to the drive.
    """
    give_up = time.monotonic() + deadline_s
    trials = [_Trial(subject, named) for subject, named in groups]
    with _silence():
        for trial in trials:
            trial.start()
            trial.join(min(_HEAD_START_S, deadline_s))
        for trial in trials:
            trial.join(max(0.0, give_up - time.monotonic()))
    return [finding for trial in trials for finding in trial.findings(deadline_s)]


class _Trial(BoundedThread):
    """The thread of one group of checks, and the findings so far."""

    def __init__(self, subject: str, named: dict[str, Callable[[], Finding]]) -> None:
        super().__init__(target=self._run_checks, name=MAY_HANG)
        self._subject = subject
        self._checks = named
        self._found: list[Finding] = []

    def _run_checks(self) -> None:
        for name, check in self._checks.items():
            try:
                finding = check()
            except Exception as error:
                failed = f"the trial failed: {str(error) or repr(error)}"[:1000]
                finding = broken(failed, cost="not known", mend=_SEE_LOG)
            self._found.append(replace(finding, subject=self._subject, check=name))
            if self._found[0].outcome is Outcome.BROKEN:
                return

    def findings(self, deadline_s: float) -> list[Finding]:
        """Return the findings; a check without an answer is broken."""
        is_alive, found = self.is_alive(), list(self._found)
        waiting = list(self._checks)[len(found) :]
        if is_alive and waiting:
            what = f"no answer within {deadline_s:g} s"
            if "State:\tD" in (kernel_file.text(Path(f"/proc/self/task/{self.native_id}/status")) or ""):
                what += "; the trial hangs in the kernel, and this process ends when the kernel lets the trial go"
            cost = "whatever needs it hangs as well"
            if waiting[1:]:
                cost += f"; not tried after it: {', '.join(waiting[1:])}"
            found.append(Finding(self._subject, waiting[0], Outcome.BROKEN, what, cost, _SEE_LOG))
        return found


@contextmanager
def _silence() -> Iterator[None]:
    """Discard the logs and Python's warnings of the checks: the findings say it."""
    level = logging.root.manager.disable
    logging.disable()
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(level)


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """The findings of one examination, and the machine they are of."""

    findings: tuple[Finding, ...]  # the worst first
    machine: MachineDescription

    @property
    def status(self) -> int:
        """The exit status: 1 if something is broken."""
        return int(any(finding.outcome is Outcome.BROKEN for finding in self.findings))

    @property
    def verdict(self) -> str:
        """One line that says what to do."""
        for outcome, says in (
            (Outcome.BROKEN, "{} broken here: {}; mend that before training"),
            (Outcome.SLOWER, "everything works here, and {} slower than could be: {}"),
        ):
            found = [finding for finding in self.findings if finding.outcome is outcome]
            names = [f"{one.check} in {one.subject}" if one.subject != MACHINE else one.check for one in found]
            if names:
                return says.format("1 thing is" if len(names) == 1 else f"{len(names)} things are", ", ".join(names))
        return "everything works here"

    def as_json(self) -> dict[str, object]:
        """Return the report for programs; ``version`` changes when the meaning of anything in it does."""
        return {"version": _VERSION, "status": self.status, "verdict": self.verdict, **asdict(self)}

    def show(self) -> None:
        """Print a paragraph for each finding, and the verdict as the last one; all fit the page."""
        margin = 10 + max((len(finding.check) for finding in self.findings), default=0)
        for finding in self.findings:
            head = finding.found if finding.subject == MACHINE else f"{finding.subject}: {finding.found}"
            say(f"{f'{finding.outcome:<7} {finding.check}':<{margin}}{head}", indent=margin)
            mend = "mend:" if finding.cost else "next:"
            for label, words in (("costs:", finding.cost), (mend, finding.mend)):
                if words:
                    say(f"{' ' * margin}{label:<7}{words}", indent=margin + 7)
        say(self.verdict, indent=2)

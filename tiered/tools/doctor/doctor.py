"""`tiered doctor`: every check on this machine and in the given directories in a bounded time, and the report."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tiered.bytes import kernel_file
from tiered.bytes.critical_section import BoundedThread
from tiered.tools.console import INTERRUPTED, check_writable, fold, page_width, write_report
from tiered.tools.doctor.checks import (
    MACHINE,
    Check,
    Finding,
    Outcome,
    broken,
    directory_checks,
    drive_checks,
    machine_checks,
)
from tiered.tools.doctor.description import MachineDescription, machine_description

__all__ = ["DoctorReport", "doctor", "examine", "examined"]

_DEADLINE_S = 6.0  # with torch's import and a margin, less than 10 s in all
_HEAD_START_S = 0.25  # of a group before the next: the time of a flush is the drive's, not that of another check
_GRACE_S = 5.0  # after the deadline, for a check that lets no other thread run
_THREAD = "tiered-doctor"
_SEE_LOG = "see the kernel log (dmesg) for the reason"
_VERSION = 1
_STYLES = {Outcome.BROKEN: "bold red", Outcome.SLOWER: "yellow", Outcome.OK: "green"}


def doctor(directories: Sequence[Path], json_file: str | None = None) -> int:
    """Examine ``directories``, print the findings, and return the exit status: 1 if something is broken.

    ``json_file`` gets the report for programs; "-" prints that instead of the table. Raises UsageError where it cannot
    be written. Ends the process itself where a check hangs.
    """
    if json_file not in (None, "-"):
        check_writable(Path(str(json_file)))
    try:
        report = examined(directories)
    except KeyboardInterrupt:
        _leave(INTERRUPTED, "\ninterrupted\n")
        raise
    text = f"{json.dumps(report.as_json(), indent=1)}\n"
    if json_file == "-":
        print(text, end="")
    else:
        report.show()
        if json_file is not None:
            write_report(Path(json_file), text)
    _leave(report.status)
    return report.status


def _leave(status: int, notice: str = "") -> None:
    """End the process where a check hangs: the interpreter would wait for the check."""
    if any(thread.name == _THREAD for thread in threading.enumerate()):
        sys.stderr.write(notice)
        sys.stdout.flush()
        os._exit(status)


def examined(directories: Sequence[str | os.PathLike[str]], deadline_s: float = _DEADLINE_S) -> DoctorReport:
    """Return the report on this machine and ``directories``; blocks for little more than ``deadline_s``.

    Leaves nothing in the directories.
    """
    # Not realpath: a link that leads to a drive that hangs must not be followed here.
    paths = list(dict.fromkeys(os.path.abspath(directory) for directory in directories))
    groups = [directory_checks(path) for path in paths]
    findings = examine([*groups, drive_checks(paths), *machine_checks()], deadline_s)
    answered = [path for path, checks in zip(paths, groups, strict=True) if len(_of(path, findings)) == len(checks)]
    return DoctorReport.of(findings, machine_description(answered))


def _of(subject: str, findings: Sequence[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.subject == subject]


def examine(groups: Sequence[Sequence[Check]], deadline_s: float) -> list[Finding]:
    """Run the checks of each group in order, in a thread of its own; return all findings after ``deadline_s``.

    A check that raises or has not answered by then is broken, and the rest of the group of a check without an answer
    is not tried. Blocks for little more than ``deadline_s``, whatever the drives do: the thread of a check that hangs
    is left to the drive. A check that hangs with Python's lock ends the process, which prints the place of the check.
    """
    give_up = time.monotonic() + deadline_s
    trials = [_Trial(checks) for checks in groups]
    with _silence(deadline_s):
        for trial in trials:
            if (left_s := give_up - time.monotonic()) > 0:
                trial.start()
                trial.join(min(_HEAD_START_S, left_s))
        for trial in trials:
            if trial.native_id is not None:
                trial.join(max(0.0, give_up - time.monotonic()))
    return [finding for trial in trials for finding in trial.findings(deadline_s)]


class _Trial(BoundedThread):
    """The thread of one group of checks, and the findings so far."""

    def __init__(self, checks: Sequence[Check]) -> None:
        super().__init__(target=self._run_checks, name=_THREAD)
        self._checks = checks
        self._found: list[Finding] = []

    def _run_checks(self) -> None:
        for check in self._checks:
            try:
                finding = check.run()
            except Exception as error:
                failed = f"the trial failed: {str(error) or repr(error)}"[:1000]
                finding = broken(failed, cost="not known", mend=_SEE_LOG)
            self._found.append(replace(finding, subject=check.subject, check=check.name))
            if check.is_essential and finding.outcome is Outcome.BROKEN:
                return

    def findings(self, deadline_s: float) -> list[Finding]:
        """Return the findings; a check without an answer is broken."""
        has_ended, found = self.native_id is not None and not self.is_alive(), list(self._found)
        if not has_ended and len(found) < len(self._checks):
            check = self._checks[len(found)]
            what = f"no answer within {deadline_s:g} s"
            if "State:\tD" in (kernel_file.text(Path(f"/proc/self/task/{self.native_id}/status")) or ""):
                what += "; the trial hangs in the kernel, and this process ends when the kernel lets the trial go"
            cost = "whatever needs it hangs as well; what comes after it was not tried"
            found.append(Finding(check.subject, check.name, Outcome.BROKEN, what, cost, _SEE_LOG))
        return found


@contextmanager
def _silence(deadline_s: float) -> Iterator[None]:
    """Discard output and logs of this process: the findings say it. The place of a crash or a hang is printed."""
    level, kept = logging.root.manager.disable, [os.dup(stream) for stream in (1, 2)]
    is_enabled = faulthandler.is_enabled()
    try:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
            logging.disable()
            for stream in (1, 2):
                os.dup2(nowhere.fileno(), stream)
            if not is_enabled:
                faulthandler.enable(kept[1])
            faulthandler.dump_traceback_later(deadline_s + _GRACE_S, exit=True, file=kept[1])
            yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        if not is_enabled:
            faulthandler.disable()
        for stream, descriptor in zip((1, 2), kept, strict=True):
            os.dup2(descriptor, stream)
            os.close(descriptor)
        logging.disable(level)


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """The findings of one examination, and the machine they are of."""

    findings: tuple[Finding, ...]  # the worst first
    machine: MachineDescription

    @classmethod
    def of(cls, findings: Sequence[Finding], machine: MachineDescription) -> DoctorReport:
        """Return the report of ``findings`` in any order; within an outcome the machine's come first."""
        worst_first = list(Outcome)
        in_order = sorted(findings, key=lambda one: (worst_first.index(one.outcome), one.subject != MACHINE))
        return cls(tuple(in_order), machine)

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

    def show(self, console: Console | None = None) -> None:
        """Print a paragraph for each finding, and the verdict as the last one; all fit the page."""
        console = console or Console(width=page_width())
        margin = 10 + max((len(finding.check) for finding in self.findings), default=0)
        for finding in self.findings:
            word, subject = finding.outcome.value, finding.subject
            head = finding.found if subject == MACHINE else f"{subject}: {finding.found}"
            lines = fold(f"{f'{word:<7} {finding.check}':<{margin}}{head}", indent=margin, width=console.width)
            mend = "mend:" if finding.cost else "next:"
            for label, words in (("costs:", finding.cost), (mend, finding.mend)):
                if words:
                    lines += fold(f"{' ' * margin}{label:<7}{words}", indent=margin + 7, width=console.width)
            # Text, not str: a finding may contain brackets, which a string would lose as markup.
            text = Text.assemble((word, _STYLES[finding.outcome]), "\n".join(lines)[len(word) :])
            console.print(text, soft_wrap=True, highlight=False)
        for line in fold(self.verdict, indent=2, width=console.width):
            console.print(Text(line, style="bold"), soft_wrap=True)

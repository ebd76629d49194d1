"""All that was found, the worst first: a table and a verdict for people, one object for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tiered.doctor.description import MachineDescription
from tiered.doctor.finding import MACHINE, Finding, Outcome

__all__ = ["DoctorReport"]

_VERSION = 1
_WORST_FIRST = tuple(Outcome)
_STYLES = {Outcome.BROKEN: "bold red", Outcome.SLOWER: "yellow", Outcome.OK: "green"}
_FILE_WIDTH = 1000  # columns, where the output is no terminal: a check is a line there


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """The findings of one examination, and the machine they are of."""

    findings: tuple[Finding, ...]  # the worst first
    machine: MachineDescription

    @classmethod
    def of(cls, findings: Sequence[Finding], machine: MachineDescription) -> DoctorReport:
        """Return the report of ``findings`` in any order; within an outcome they stay in theirs."""
        return cls(tuple(sorted(findings, key=lambda finding: _WORST_FIRST.index(finding.outcome))), machine)

    @property
    def status(self) -> int:
        """The exit status: 1 if something is broken."""
        return int(bool(self._of(Outcome.BROKEN)))

    @property
    def verdict(self) -> str:
        """One line that says what to do."""
        wrong, slow = self._of(Outcome.BROKEN), self._of(Outcome.SLOWER)
        if wrong:
            return f"{_counted(wrong)} broken here: {_named(wrong)}; mend that before training"
        if slow:
            return f"everything works here, and {_counted(slow)} slower than could be: {_named(slow)}"
        return "everything works here"

    def as_json(self) -> dict[str, object]:
        """Return the report for programs; ``version`` changes when the meaning of anything in it does."""
        return {
            "version": _VERSION,
            "status": self.status,
            "verdict": self.verdict,
            "findings": [finding.as_json() for finding in self.findings],
            "machine": self.machine.as_json(),
        }

    def show(self, console: Console | None = None) -> None:
        """Print the table, and the verdict as the last line."""
        console = console or Console()
        if not console.is_terminal:
            console.width = _FILE_WIDTH
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
        for heading in ("", "check", "where"):
            table.add_column(heading, no_wrap=heading != "where", overflow="fold")
        table.add_column("found", overflow="fold")
        for finding in self.findings:
            outcome = Text(finding.outcome.value, style=_STYLES[finding.outcome])
            # Text, not str: a finding may contain brackets, which a string would lose as markup.
            table.add_row(outcome, Text(finding.check), Text(finding.subject), Text("\n".join(_lines(finding))))
        with console.capture() as capture:
            console.print(table)
        for line in capture.get().splitlines():  # the padding of the last column would wrap in a narrower window
            console.out(line.rstrip(), highlight=False)
        console.print(Text(self.verdict, style="bold"), soft_wrap=True)

    def _of(self, outcome: Outcome) -> list[Finding]:
        return [finding for finding in self.findings if finding.outcome is outcome]


def _lines(finding: Finding) -> list[str]:
    lines = [finding.found]
    if finding.cost:
        lines.append(f"costs: {finding.cost}")
    if finding.mend:
        lines.append(f"mend:  {finding.mend}" if finding.cost else f"next:  {finding.mend}")
    return lines


def _counted(findings: Sequence[Finding]) -> str:
    return "1 thing is" if len(findings) == 1 else f"{len(findings)} things are"


def _named(findings: Sequence[Finding]) -> str:
    return ", ".join(
        finding.check if finding.subject == MACHINE else f"{finding.check} in {finding.subject}" for finding in findings
    )

"""All that was found, the worst first: a table and a verdict for people, one object for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from tiered.console.page import fold, page_width
from tiered.doctor.description import MachineDescription
from tiered.doctor.finding import MACHINE, Finding, Outcome

__all__ = ["DoctorReport"]

_VERSION = 1
_WORST_FIRST = tuple(Outcome)
_STYLES = {Outcome.BROKEN: "bold red", Outcome.SLOWER: "yellow", Outcome.OK: "green"}


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
        """Print a paragraph for each finding, and the verdict as the last one; all fit the page."""
        console = console or Console(width=page_width())
        titles = {finding: f"{finding.outcome.value:<7} {finding.check}" for finding in self.findings}
        margin = max(map(len, titles.values()), default=0) + 2
        for finding in self.findings:
            head, *others = _lines(finding)
            first = fold(f"{titles[finding]:<{margin}}{head}", indent=margin, width=console.width)
            rest = [fold(f"{' ' * margin}{other}", indent=margin + 7, width=console.width) for other in others]
            word = finding.outcome.value
            # Text, not str: a finding may contain brackets, which a string would lose as markup.
            line = Text.assemble((word, _STYLES[finding.outcome]), first[0][len(word) :])
            console.print(line, soft_wrap=True, highlight=False)
            for lines in (first[1:], *rest):
                for text in lines:
                    console.print(Text(text), soft_wrap=True, highlight=False)
        for text in fold(self.verdict, indent=2, width=console.width):
            console.print(Text(text, style="bold"), soft_wrap=True)

    def _of(self, outcome: Outcome) -> list[Finding]:
        return [finding for finding in self.findings if finding.outcome is outcome]


def _lines(finding: Finding) -> list[str]:
    where = "" if finding.subject == MACHINE else f"{finding.subject}: "
    lines = [f"{where}{finding.found}"]
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

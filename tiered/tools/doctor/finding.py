"""The finding of one check: the attempt and its outcome, the cost of the lack, and how to mend it."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["MACHINE", "Check", "Finding", "Outcome", "broken", "ok", "slower"]

MACHINE = "machine"
"""The subject of findings that concern no directory."""


class Outcome(enum.StrEnum):
    """How well it works, the worst first."""

    BROKEN = "broken"  # wrong, unsafe or impossible as it is
    SLOWER = "slower"  # works, and costs time
    OK = "ok"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's report, and one object of its JSON."""

    subject: str  # MACHINE or the directory
    check: str
    outcome: Outcome
    found: str  # the attempt and its result
    cost: str = ""  # of the lack; "" where nothing is lacking
    mend: str = ""  # the command, or the next step


@dataclass(frozen=True, slots=True)
class Check:
    """One thing to try. ``run`` blocks as long as the drive or the kernel does, and may raise any exception."""

    subject: str
    name: str
    run: Callable[[], Finding]
    is_essential: bool = False  # where it is broken, the checks of this subject after it make no sense


def ok(subject: str, check: str, found: str, *, mend: str = "") -> Finding:
    """Return the finding that nothing is lacking; ``mend`` is a step that may still be worth it."""
    return Finding(subject, check, Outcome.OK, found, mend=mend)


def slower(subject: str, check: str, found: str, *, cost: str, mend: str) -> Finding:
    """Return the finding that something is lacking and ``tiered`` does without."""
    return Finding(subject, check, Outcome.SLOWER, found, cost, mend)


def broken(subject: str, check: str, found: str, *, cost: str, mend: str) -> Finding:
    """Return the finding that something does not work."""
    return Finding(subject, check, Outcome.BROKEN, found, cost, mend)

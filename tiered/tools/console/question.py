"""A question before something that cannot be undone."""

from __future__ import annotations

import sys

from tiered.errors import UsageError
from tiered.tools.console.page import fold

__all__ = ["confirm"]


def confirm(question: str, *, unasked: str, declined: str, yes: bool) -> None:
    """Return once ``question`` is answered with yes, on the terminal or by ``yes`` beforehand; blocks.

    Raises UsageError: ``unasked`` where there is no terminal to ask on, ``declined`` for any other answer.
    """
    if yes:
        return
    if not all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout)):  # None: closed
        raise UsageError(unasked)
    if input("\n".join(fold(f"{question} [y/N]", indent=2)) + " ").strip().lower() not in ("y", "yes"):
        raise UsageError(declined)

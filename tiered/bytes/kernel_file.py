"""The kernel's small files: their text, a number, the choice in brackets; None where a file has no answer."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["choice", "lines", "number", "said", "text"]

_NBYTES = 1 << 20  # /proc/cpuinfo of a large machine; no more is read of any file


def text(path: Path, most_nbytes: int = _NBYTES) -> str | None:
    """Return the text of ``path`` without white space around it; None where it is missing, closed to us or empty."""
    try:
        with path.open("rb") as file:
            return file.read(most_nbytes).decode(errors="replace").strip() or None
    except (OSError, ValueError):
        return None


def lines(path: Path) -> list[str]:
    """Return the lines of ``path``; none where it is missing, closed to us or empty."""
    return (text(path) or "").splitlines()


def number(path: Path) -> int | None:
    """Return the whole number in ``path``; None where there is none."""
    try:
        return int(text(path) or "")
    except ValueError:
        return None


def choice(path: Path) -> str | None:
    """Return the word in brackets of a line such as ``always [madvise] never``; the line where nothing is."""
    line = text(path)
    found = re.search(r"\[([^\]]+)\]", line or "")
    return found[1] if found else line


def said(value: object) -> str:
    """Return an answer for people."""
    return "not readable" if value is None else str(value)

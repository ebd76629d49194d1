"""Text for people that fits the page: lines folded at the terminal's width, and tables of columns.

The page is as wide as the terminal, or as COLUMNS says; 80 columns where neither is known, such as in a pipe.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence

__all__ = ["columns", "fold", "page_width", "say", "shorten"]

_NARROWEST = 40  # below it a line of figures is worse folded than broken by the terminal


def page_width() -> int:
    """Return the columns of a line."""
    return max(_NARROWEST, shutil.get_terminal_size((80, 24)).columns)


def fold(text: str, *, indent: int = 8, width: int | None = None) -> list[str]:
    """Return ``text`` in lines that fit the page, or ``width``, all but the first indented; its own line ends stay.

    A word is never divided, a path of the user's above all: a longer one has a longer line.
    """
    space = " " * indent
    return [
        line
        for part in text.split("\n")
        for line in textwrap.wrap(
            part, width or page_width(), subsequent_indent=space, break_long_words=False, break_on_hyphens=False,
            replace_whitespace=False,
        ) or [""]
    ]  # fmt: skip


def say(*texts: str, indent: int = 8) -> None:
    """Print ``texts``, each from the start of a line and folded, at once."""
    print("\n".join(line for text in texts for line in fold(text, indent=indent)), flush=True)


def columns(rows: Sequence[Sequence[str]], right: Sequence[int] = (), *, indent: int = 0) -> Iterator[str]:
    """Yield ``rows`` as lines of aligned columns, those numbered in ``right`` flush right; the last one is free.

    The first column is a name. One that leaves the others no room is shortened in its middle on a terminal, and
    elsewhere, where a program may read it, has a line of its own.
    """
    sizes = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    room = max(12, page_width() - indent - sum(2 + size for size in sizes[1:]))
    own, is_terminal = min(sizes[0], room) if sizes else 0, sys.stdout.isatty()
    for name, *others in rows:
        cells = [
            cell.rjust(size) if number in right else cell.ljust(size)
            for number, (cell, size) in enumerate(zip(others, sizes[1:], strict=True), 1)
        ]
        if len(name) > own and not is_terminal:
            yield f"{' ' * indent}{name}"
            name = ""
        yield f"{' ' * indent}{'  '.join([shorten(name, own).ljust(own), *cells])}".rstrip()


def shorten(text: str, most: int) -> str:
    """Return ``text`` with its middle left out where it is longer than ``most`` characters."""
    if len(text) <= most:
        return text
    left = (most - 3) // 2
    return f"{text[:left]}...{text[len(text) - (most - 3 - left) :]}"

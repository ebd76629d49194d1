"""The output of a bench while it measures: one line that moves on a terminal, and finished rows anywhere."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from tiered.console.page import fold, say

__all__ = ["BenchDisplay"]


class BenchDisplay:
    """Prints lines, and below them the present measurement while it is open; used by one thread."""

    def __init__(self, *, is_live: bool | None = None) -> None:
        """``is_live`` shows the moving line; by default that is for a terminal."""
        self._console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._progress = Progress(
            TextColumn("measuring"),
            BarColumn(bar_width=16),
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not (_is_terminal() if is_live is None else is_live),
            auto_refresh=False,  # a thread that draws would be measured too
        )
        self._task = self._progress.add_task("", total=1.0)

    def __enter__(self) -> BenchDisplay:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def line(self, text: str) -> None:
        """Print ``text`` for good, folded where it is wider than the page."""
        if self._progress.disable:
            say(text, indent=2)
        else:
            self._console.print("\n".join(fold(text, indent=2)))

    def now(self, text: str, *, done: float) -> None:
        """Show ``text`` as the present measurement, with the share ``done`` of the whole bench."""
        self._progress.update(self._task, description=text, completed=done)
        self._progress.refresh()


def _is_terminal() -> bool:
    return sys.stdout is not None and sys.stdout.isatty()

"""Session: a bench while it measures, with its output, the user's wish to end it, and the folders of its stores."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from tiered.bytes.device.profile import write_profile
from tiered.tools.bench.report import BenchReport, BenchRow
from tiered.tools.bench.settings import BenchSettings
from tiered.tools.console import fold, say

__all__ = ["Session"]

_PREFIX = ".tiered-bench-"  # which `tiered gc` knows


class Session(AbstractContextManager["Session"]):
    """Fills in ``report``. It prints finished rows anywhere, and below them one line that moves on a terminal.

    ``check`` is called between rounds and may raise to end it all. ``engine`` is the one that was asked for, or "auto".
    One thread at a time, but for ``remove_folders`` from a signal handler.
    """

    def __init__(self, report: BenchReport, engine: str, check: Callable[[], object] = lambda: None) -> None:
        self.report = report
        self.engine = engine
        self.check = check
        self._folders: list[Path] = []
        self._console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._progress = Progress(
            TextColumn("measuring"),
            BarColumn(bar_width=16),
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=sys.stdout is None or not sys.stdout.isatty(),
            auto_refresh=False,  # a thread that draws would be measured too
        )
        self._task = self._progress.add_task("", total=1.0)

    @property
    def settings(self) -> BenchSettings:
        """The settings of the bench."""
        return self.report.settings

    def __enter__(self) -> Session:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def line(self, *rows: object) -> None:
        """Print ``rows`` for good, each folded where it is wider than the page."""
        text = "\n".join(map(str, rows))
        if self._progress.disable:
            say(text, indent=2)
        else:
            self._console.print("\n".join(fold(text, indent=2)))

    def add(self, *rows: BenchRow) -> None:
        """Add ``rows`` to the report, and print them."""
        self.report.results += rows
        self.line(*rows)

    def now(self, text: str, done: float) -> None:
        """Show ``text`` as the present measurement, with the share ``done`` of the whole bench, unless it is to end."""
        self.check()
        self._progress.update(self._task, description=text, completed=done)
        self._progress.refresh()

    @contextmanager
    def folders(self, *directories: str) -> Iterator[list[Path]]:
        """Lend a new folder in each of ``directories``, and remove them whatever happens.

        By default it is in each measured directory, with its profile, which deals out the bytes of a store.
        """
        try:
            for directory in directories or [one.directory for one in self.report.directories]:
                self._folders.append(Path(tempfile.mkdtemp(dir=directory, prefix=_PREFIX)))  # order: at once, a signal
            if not directories:
                for folder, one in zip(self._folders, self.report.directories, strict=True):
                    write_profile(folder, self.report.profile_of(one))
            yield list(self._folders)
        finally:
            self.remove_folders()
            self._folders.clear()

    def remove_folders(self) -> None:
        """Remove all folders."""
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)

"""Session: a bench while it measures, with its output, the user's wish to end it, and the folders of its stores."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tiered.bytes.device.profile import write_profile
from tiered.tools.bench.report import BenchReport, BenchRow
from tiered.tools.console import say

__all__ = ["Session"]

_PREFIX = ".tiered-bench-"  # which `tiered gc` knows


class Session:
    """Fills in ``report``, and prints what is finished.

    ``check`` is called between rounds and may raise to end it all. ``engine`` is the one that was asked for, or "auto".
    One thread at a time, but for ``remove_folders`` from a signal handler.
    """

    def __init__(self, report: BenchReport, engine: str, check: Callable[[], object] = lambda: None) -> None:
        self.report = report
        self.settings = report.settings
        self.engine = engine
        self.check = check
        self._folders: list[Path] = []

    def line(self, *rows: object) -> None:
        """Print ``rows``, each folded where it is wider than the page."""
        say(*map(str, rows), indent=2)

    def add(self, *rows: BenchRow) -> None:
        """Add ``rows`` to the report, and print them."""
        self.report.results += rows
        self.line(*rows)

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

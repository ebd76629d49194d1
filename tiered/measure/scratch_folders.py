"""Folders for the stores of a bench in the directories that it measures, which are removed whatever happens."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from tiered.bytes.device.profile import write_profile
from tiered.measure.report import BenchReport

__all__ = ["ScratchFolders"]

_PREFIX = ".tiered-bench-"  # which `tiered gc` knows


class ScratchFolders:
    """Makes folders, and removes them. One thread at a time, but for ``remove`` from a signal handler."""

    def __init__(self) -> None:
        self._folders: list[Path] = []

    def make(self, directories: Iterable[str]) -> list[Path]:
        """Return a new folder in each of ``directories``."""
        made: list[Path] = []
        for directory in directories:
            made.append(Path(tempfile.mkdtemp(dir=directory, prefix=_PREFIX)))
            self._folders.append(made[-1])  # order: at once, for a signal
        return made

    def make_profiled(self, report: BenchReport) -> list[Path]:
        """Return a new folder in each measured directory, with its profile, which deals out the bytes of a store."""
        made = self.make(one.directory for one in report.directories)
        for folder, one in zip(made, report.directories, strict=True):
            write_profile(folder, report.profile_of(one))
        return made

    def remove(self) -> None:
        """Remove all folders."""
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)

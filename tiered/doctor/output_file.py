"""The file that a command is asked to leave its result in: looked at before the work, which may take minutes."""

from __future__ import annotations

import os
from pathlib import Path

from tiered.errors import UsageError

__all__ = ["check_writable"]


def check_writable(file: Path) -> None:
    """Return if ``file`` can be written, or made where it does not exist. Raises UsageError."""
    place = file.absolute().parent
    if not place.is_dir():
        raise UsageError(f"cannot write {file}: the directory does not exist")
    if file.is_dir() or not os.access(file if file.exists() else place, os.W_OK):
        raise UsageError(f"cannot write {file}: it is a directory, or not yours to write")

"""Files that the user names for reports: found out to be writable before the work, and named where they are not."""

from __future__ import annotations

import os
from pathlib import Path

from tiered.errors import UsageError

__all__ = ["check_writable", "write_report"]


def check_writable(*files: Path | None) -> None:
    """Raise UsageError unless each of ``files`` can be written, and no two are one; leaves nothing behind."""
    given = [file for file in files if file is not None]
    for file in given:
        _check_writable(file)
    if len({os.path.realpath(file) for file in given}) < len(given):
        raise UsageError(f"{given[0]} is given for two reports: give each a file of its own")


def _check_writable(file: Path) -> None:
    """Open the file as the report will be. A pipe is not opened, because its reader would see its end."""
    if not file.absolute().parent.is_dir():
        raise UsageError(f"cannot write {file}: the directory does not exist")
    if file.is_dir():
        raise UsageError(f"cannot write {file}: it is a directory")
    real = os.path.realpath(file)
    is_new = not os.path.lexists(real)
    try:
        if is_new or os.path.isfile(real):
            os.close(os.open(real, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666))
        elif not os.access(real, os.W_OK):
            raise PermissionError(0, "it is not yours to write")
        if is_new:
            os.unlink(real)
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror}") from error


def write_report(file: Path, content: str) -> None:
    """Write ``content`` to ``file``; blocks. Raises UsageError, which names the file, when that fails after all."""
    try:
        file.write_text(content, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror}; everything else is done") from error

"""Small files of one directory with figures that were measured there: found from below, read warily, written whole.

They are advice: a wrong one costs a warning and nothing else. profile.py says what is in them.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from tiered.bytes.device.files import translate

__all__ = ["LONGEST_TEXT", "find_profile_file", "write_profile_file"]

LONGEST_TEXT = 200
"""Characters of a text in such a file, and about as many of a complaint."""

_LARGEST_NBYTES = 64 * 1024  # never read more of a file that may be anybody's

_T = TypeVar("_T")


def find_profile_file(
    directory: str | os.PathLike[str], name: str, parse: Callable[[dict[str, object]], _T], *, options: str = ""
) -> tuple[_T | None, list[str]]:
    """Return ``parse`` of the file ``name`` in ``directory``, or in the nearest one above it, and complaints.

    The search ends at the mount point. A directory that does not exist yet counts as its parent. A file is passed over
    with a complaint unless only we or root may write to it, and ``parse`` takes its object: it raises ValueError or
    TypeError. ``options`` of ``tiered bench`` measure such a file again. Never raises for the contents of the disk;
    blocks.
    """
    complaints: list[str] = []
    for place in _places(directory):
        try:
            return parse(_read(place / name)), complaints
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError, TypeError, RecursionError) as error:
            reason = str((isinstance(error, OSError) and error.strerror) or error or repr(error))
            complaints.append(
                f"{place / name} is ignored: {reason[: 2 * LONGEST_TEXT]}; "
                f"remove it, or measure again: tiered bench {place}{options}"
            )
    return None, complaints


def write_profile_file(directory: str | os.PathLike[str], name: str, values: Mapping[str, object]) -> Path:
    """Put ``values`` into the file ``name`` of ``directory`` and return its path; durable when it returns.

    The file is 0600 under any umask. At any instant either the old or the new one is there. Raises TieredError.
    """
    path = Path(directory) / name
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _replace(descriptor, name, f"{json.dumps(values, indent=1)}\n".encode())
        finally:
            os.close(descriptor)
    except OSError as error:
        raise translate(error, f"cannot write {path}") from error
    return path


def _places(directory: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield the directory, or its nearest existing parent, and those above it up to the mount point."""
    path = Path(os.path.realpath(directory))
    device = None
    for place in (path, *path.parents):
        try:
            status = os.stat(place)
        except OSError:
            if device is None:
                continue
            return
        if device not in (None, status.st_dev):
            return
        device = status.st_dev
        yield place


def _read(path: Path) -> dict[str, object]:
    """Return the object in ``path``. Raises OSError, ValueError or RecursionError for anything else."""
    # NONBLOCK: a FIFO must not hang the open.
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check_private(os.fstat(fd))
        content = os.read(fd, _LARGEST_NBYTES + 1)
    finally:
        os.close(fd)
    if len(content) > _LARGEST_NBYTES:
        raise ValueError(f"it is larger than {_LARGEST_NBYTES} bytes")
    try:
        values = json.loads(content)
    except ValueError as error:
        raise ValueError("it is not JSON") from error
    if not isinstance(values, dict):
        raise ValueError(f"expected one JSON object, got {type(values).__name__}")
    return values


def _check_private(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
        raise ValueError("it is not a regular file with one name")
    if status.st_uid not in (0, os.geteuid()):
        raise ValueError(f"it belongs to user {status.st_uid}, neither you nor root")
    if status.st_mode & 0o022:
        raise ValueError(f"others may write to it ({stat.filemode(status.st_mode)})")


def _replace(descriptor: int, name: str, content: bytes) -> None:
    """Make ``content`` the file ``name`` in the directory open as ``descriptor``, durably. Raises OSError."""
    temporary = f"{name}.{secrets.token_hex(4)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(temporary, flags, 0o600, dir_fd=descriptor)
    try:
        try:
            os.fchmod(fd, 0o600)  # against the umask
            with memoryview(content) as rest:
                done = 0
                while done < len(rest):
                    done += os.write(fd, rest[done:])
            os.fsync(fd)  # order: before the rename, or a power cut could leave the name on an empty file
        finally:
            os.close(fd)
        os.rename(temporary, name, src_dir_fd=descriptor, dst_dir_fd=descriptor)
    except BaseException:
        os.unlink(temporary, dir_fd=descriptor)
        raise
    os.fsync(descriptor)

"""Private files: how a store makes a file for its owner alone, which it refuses, and which process locks one."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tiered.bytes import kernel_file
from tiered.errors import UsageError

__all__ = ["create_private_file", "fsync_directory", "lock_owner", "opened", "refuse_trap"]


@contextmanager
def opened(path: str | os.PathLike[str], flags: int) -> Iterator[int]:
    """Lend a descriptor of ``path`` for a block. Raises OSError."""
    fd = os.open(path, flags | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def create_private_file(path: Path) -> int:
    """Create ``path`` for its owner alone, under any umask, and return its descriptor.

    Raises FileExistsError where anything has that name already, a dangling symbolic link included.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(fd, 0o600)
    except BaseException:
        os.close(fd)
        raise
    return fd


def refuse_trap(path: Path, status: os.stat_result) -> None:
    """Raise UsageError where ``status``, that of ``path``, is not that of a file as the store makes them."""
    is_own = os.geteuid() in (0, status.st_uid) and status.st_nlink == 1  # a second name may be another's file
    if not stat.S_ISREG(status.st_mode) or status.st_mode & 0o077 or not is_own:
        raise UsageError(
            f"{path} must be a regular file of your own with one name and permissions 0600, got "
            f"{stat.filemode(status.st_mode)} of user {status.st_uid} with {status.st_nlink} names: look whether it is "
            "what you wrote"
        )


def fsync_directory(path: Path) -> None:
    """Make the names in ``path`` durable."""
    with opened(path, os.O_RDONLY | os.O_DIRECTORY) as fd:
        os.fsync(fd)


def lock_owner(fd: int) -> str:
    """Return the pid of a process that holds a lock on the file ``fd``, from the kernel's list; "" if it has none."""
    status = os.fstat(fd)
    place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    held = [line.split() for line in kernel_file.lines(Path("/proc/locks"))]
    pids = (words[4] for words in held if words[1] == "FLOCK" and place in words)
    return next((pid for pid in pids if pid.isdigit() and pid != "0"), "")

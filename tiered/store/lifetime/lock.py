"""Lock: one writer or several readers of a directory; the kernel releases it when the process ends."""

from __future__ import annotations

import errno
import fcntl
import os
import weakref
from pathlib import Path

from tiered.bytes.private_file import create_private_file, lock_owner, refuse_trap
from tiered.errors import UsageError

__all__ = ["LOCK_NAME", "Lock"]

LOCK_NAME = "lock"

_NO_FILE = {errno.EROFS, errno.EACCES, errno.EPERM}  # where none can be made


class Lock:
    """The lock of one directory, held from its making until ``release``; a forked child never holds it."""

    def __init__(self, directory: Path, *, shared: bool) -> None:
        """Take it, ``shared`` with other readers. Raises UsageError that names its holder, OSError."""
        self._pid = os.getpid()
        self._fd = _open(directory, shared=shared)
        try:
            _take(self._fd, directory, shared=shared)
            _check_place(self._fd, directory)
            if not shared:
                pid = f"{os.getpid()}\n".encode()
                os.ftruncate(self._fd, os.pwrite(self._fd, pid, 0))  # in place: a full drive has no room
        except BaseException:
            os.close(self._fd)
            raise
        _guard_against_fork(self)

    def release(self) -> None:
        """Give it back; in a forked child only its copy of the descriptor. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            try:
                if self._pid == os.getpid():
                    fcntl.flock(fd, fcntl.LOCK_UN)  # also the lock of a child that was only just forked
            finally:
                os.close(fd)


def _open(directory: Path, *, shared: bool) -> int:
    """Return a descriptor to lock: of the file, which is made where it is missing."""
    name = directory / LOCK_NAME
    try:
        fd = create_private_file(name)
    except FileExistsError:
        refuse_trap(name, os.lstat(name))
        # Read-only will do for a reader on a file system that is.
        flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(name, (os.O_RDONLY if shared else os.O_RDWR) | flags)
    except OSError as error:
        if not shared or error.errno not in _NO_FILE:
            raise
        # A copy without the file, on a medium that cannot be written: the directory itself will do among readers.
        return os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        refuse_trap(name, os.fstat(fd))  # the same name may be another file by now
    except BaseException:
        os.close(fd)
        raise
    return fd


def _take(fd: int, directory: Path, *, shared: bool) -> None:
    operation = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB
    try:
        fcntl.flock(fd, operation)
    except BlockingIOError as error:
        owner = _owner(fd)
        where = "here, with close() of the Store that has it" if owner == str(os.getpid()) else "there"
        raise UsageError(
            f"{directory} is open in process {owner}: one writer or several readers at a time; close it first {where}"
        ) from error


def _check_place(fd: int, directory: Path) -> None:
    name = directory / LOCK_NAME
    try:
        is_there = os.path.samestat(os.fstat(fd), os.lstat(name))
    except FileNotFoundError:
        is_there = os.path.samestat(os.fstat(fd), os.lstat(directory))
    if not is_there:
        raise UsageError(f"{name} was replaced while it was being locked: open the store again")


def _owner(fd: int) -> str:
    """Return the pid that holds the lock: from the kernel's list, else from the last writer's note in the file."""
    return lock_owner(fd) or os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"


_all: weakref.WeakSet[Lock] = weakref.WeakSet()
_hooks: list[bool] = []


def _guard_against_fork(lock: Lock) -> None:
    """Release the lock in every forked child: else it would outlive the parent in an orphan."""
    if not _hooks:
        _hooks.append(True)
        os.register_at_fork(after_in_child=_release_in_child)
    _all.add(lock)


def _release_in_child() -> None:
    for lock in list(_all):
        lock.release()

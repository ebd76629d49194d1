"""Lock: one writer or several readers of a directory; the kernel releases it when the process ends."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from tiered.bytes.exit_and_fork import after_fork, this_process
from tiered.bytes.private_file import create_private_file, lock_owner, refuse_trap
from tiered.errors import DeviceError, UsageError

__all__ = ["LOCK_NAME", "Lock"]

LOCK_NAME = "lock"

_NO_FILE = {errno.EROFS, errno.EACCES, errno.EPERM}  # where none can be made


class Lock:
    """The lock of one directory, held from its making until ``release``; a forked child never holds it.

    ``hold`` locks the identity, too: whoever removes the file ``lock`` as a stale one lets no second writer in.
    """

    def __init__(self, directory: Path, *, shared: bool) -> None:
        """Take it, ``shared`` with other readers. Raises UsageError that names its holder, OSError."""
        self._process = this_process()
        self._directory, self._shared = directory, shared
        fd = _open(directory, shared=shared)
        self._fds = {LOCK_NAME: fd}
        try:
            _take(fd, directory, shared=shared)
            if not _is_in_place(fd, directory, LOCK_NAME):
                raise UsageError(
                    f"{directory / LOCK_NAME} was replaced while it was being locked: open the store again"
                )
            if not shared:
                pid = f"{os.getpid()}\n".encode()
                os.ftruncate(fd, os.pwrite(fd, pid, 0))  # in place: a full drive has no room
        except BaseException:
            os.close(fd)
            raise
        after_fork(self, Lock.release)  # else a child would outlive its parent with the lock

    def hold(self, name: str) -> None:
        """Lock the file ``name``, which is there, as well. Raises UsageError that names its holder, OSError."""
        flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(self._directory / name, (os.O_RDONLY if self._shared else os.O_RDWR) | flags)
        try:
            _take(fd, self._directory, shared=self._shared)
        except BaseException:
            os.close(fd)
            raise
        self._fds[name] = fd

    def check(self) -> None:
        """Raise DeviceError where a locked file has lost its name: what is locked keeps nobody away any more."""
        for name, fd in self._fds.items():
            if not _is_in_place(fd, self._directory, name):
                raise DeviceError(
                    f"{self._directory / name} was moved, or removed, while the store was open, so another process may"
                    " write to the store by now: end it, and open the store again"
                )

    def release(self) -> None:
        """Give it back; in a forked child only its copy of the descriptor. Idempotent."""
        while self._fds:
            fd = self._fds.popitem()[1]
            try:
                if self._process.is_here:
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


def _is_in_place(fd: int, directory: Path, name: str) -> bool:
    """Whether ``fd`` is the file ``name``, or the directory itself, which readers lock where there is none."""
    for path in (directory / name, directory):
        try:
            return os.path.samestat(os.fstat(fd), os.lstat(path))
        except FileNotFoundError:
            continue
    return False


def _owner(fd: int) -> str:
    """Return the pid that holds the lock: from the kernel's list, else from the last writer's note in the file."""
    noted = os.pread(fd, 32, 0).decode(errors="replace").strip()
    return lock_owner(fd) or (noted if noted.isdigit() else "unknown")

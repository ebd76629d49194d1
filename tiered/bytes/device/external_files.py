"""ExternalFiles: regular files of the user's that a device reads in place, wherever they lie, and never writes.

They are numbered from 0 in the order given. Nothing is created in their directories, and no mode or owner is asked for.
Each has a shared lock (flock) while it is open: tiered's own writers of checkpoints replace no file that has one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

from tiered.bytes.critical_section import CRITICAL_SECTION
from tiered.bytes.device.direct_io import MIN_ALIGNMENT, DirectProbe, ReadInto, probe_direct_read, report_buffered
from tiered.bytes.device.files import DataFile, NumberedFiles, translate
from tiered.bytes.exit_and_fork import this_process
from tiered.errors import UsageError
from tiered.units import round_up

__all__ = ["ExternalFiles", "absolute_paths", "open_regular", "refuse_one_path"]

_OF_THE_CALLER = {errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG}


class _Identity(NamedTuple):
    """The facts about a file that differ once it is another file, or has other bytes."""

    device: int
    inode: int
    nbytes: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> _Identity:
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


class ExternalFiles(NumberedFiles):
    """Open descriptors of given files, their true lengths, and what the kernel said of each when it was opened.

    Links are followed. A file that is shorter than a multiple of the alignment counts as that long.
    """

    is_external = True

    def __init__(self, paths: Sequence[str | os.PathLike[str]], direct: bool | None, pread: ReadInto) -> None:
        """Open the files at ``paths``, made absolute now, and try direct I/O on each; see FileDevice for ``direct``.

        Blocks for one read of each. Raises UsageError for a file that is missing, unreadable, empty or not regular.
        """
        self._paths = absolute_paths(paths)
        others = f" and {len(self._paths) - 1} more" if len(self._paths) > 1 else ""
        super().__init__(f"{self._paths[0]}{others}")
        self._process = this_process()
        self._identities: list[_Identity] = []
        self._status_lock = threading.Lock()  # held over system calls
        self._locks = (self._status_lock,)
        refusals: dict[str, str] = {}  # by directory: one warning for each
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            for number, path in enumerate(self._paths):
                refusal = self._open(number, path, direct, pread)
                if refusal is not None:
                    refusals.setdefault(os.path.dirname(path), refusal)
            for directory, refusal in refusals.items():
                report_buffered(directory, refusal, direct)
            undo.pop_all()

    def nbytes(self, file: int) -> int:
        """Return the true length of ``file``, as it was opened."""
        return self._files[file].nbytes

    def sizes(self) -> dict[int, int]:
        """Return the number and size of each file, rounded up to the alignment."""
        return {number: round_up(file.nbytes, self.alignment) for number, file in self._files.items()}

    def path(self, file: int) -> str:
        return self._paths[file] if 0 <= file < len(self._paths) else f"external file {file}, which was not given,"

    def changed(self, file: int | None = None, *, ignores_ctime: bool = False) -> str | None:
        """Return how ``file``, or any of them, differs from the file that was opened; None where it does not.

        Asks the kernel about the open file and about its path, and reads no data; blocks. A change of owner, mode or
        number of names counts, because its time cannot be told from that of new bytes; with ``ignores_ctime`` not, nor
        do new bytes then whose time somebody has set back. Kernels before 6.13 keep time in steps of 1 to 10 ms: new
        bytes of the same length in the step of the opening do not show. Raises ClosedError.
        """
        self._check_open()  # order: before the lock, which a forked child may find held for ever
        with CRITICAL_SECTION.lock, self._status_lock:
            self._check_open()
            for number in range(len(self._paths)) if file is None else (file,):
                difference = self._difference(number, ignores_ctime=ignores_ctime)
                if difference is not None:
                    return f"{self.path(number)} is not what it was when it was opened: {difference}"
        return None

    def lost(self, file: int) -> str | None:
        """Return how the path of ``file`` does not lead to the file that was opened; None where it does.

        Asks the kernel, and reads no data; blocks. Raises ClosedError.
        """
        self._check_open()  # order: as in ``changed``
        with CRITICAL_SECTION.lock, self._status_lock:
            self._check_open()
            return self._lost(file)

    def free_bytes(self) -> int:
        """Return 0: nothing can be written."""
        return 0

    def grow(self, file: int, nbytes: int) -> NoReturn:
        """Raise UsageError."""
        raise UsageError(f"{self.path(file)} cannot grow to {nbytes} bytes: external files are only read")

    def flush(self, fdatasync: Callable[[int], None]) -> None:
        """Do nothing: there is nothing to make durable."""

    def close(self) -> None:
        """Close all descriptors, and unlock the files: a ring that has just ended keeps them for a moment."""
        for file in self._files.values() if not self._is_closed and self._process.is_here else ():
            with contextlib.suppress(OSError):
                fcntl.flock(file.fd, fcntl.LOCK_UN)
        super().close()

    def _open(self, number: int, path: str, direct: bool | None, pread: ReadInto) -> str | None:
        """Open ``path`` as ``number``, and return why not with direct I/O, where that was tried."""
        fd, probe = (None, None) if direct is False else _open_direct(path, pread)
        if fd is None:
            fd = open_regular(path)
        data_file = self._files[number] = DataFile(fd, 0)
        identity = _Identity.of(os.fstat(fd))
        self._identities.append(identity)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(f"{path} is being replaced by a save or an export: open it once that has ended") from error
        except OSError:
            pass  # no locks there: a file that is replaced is found by the next commit
        data_file.nbytes = identity.nbytes
        if not identity.nbytes:
            raise UsageError(f"{path} is empty: get it again, or leave it out")
        if probe is None or not probe.is_direct:
            return None if probe is None else probe.refusal
        self.alignment = max(self.alignment, probe.alignment)
        self.is_direct = True
        return None

    def _difference(self, number: int, *, ignores_ctime: bool) -> str | None:
        before = self._identities[number]
        try:
            now = _Identity.of(os.fstat(self._files[number].fd))
        except OSError as error:
            return f"it cannot be asked: {error.strerror}"
        if ignores_ctime:
            now = now._replace(ctime_ns=before.ctime_ns)
        if now != before:
            names = [name for name, old, new in zip(_Identity._fields, before, now, strict=True) if old != new]
            return ", ".join(f"{name} was {getattr(before, name)} and is {getattr(now, name)}" for name in names)
        return self._lost(number)

    def _lost(self, number: int) -> str | None:
        before = self._identities[number]
        try:
            there = os.stat(self._paths[number])
        except OSError as error:
            return f"its path leads nowhere: {error.strerror}"
        if (there.st_dev, there.st_ino) != (before.device, before.inode):
            return "another file has been put in its place"
        return None


def absolute_paths(paths: Sequence[str | os.PathLike[str]]) -> list[str]:
    """Return ``paths`` made absolute. Raises UsageError where there is none, or where one cannot be a path."""
    refuse_one_path(paths)
    absolute = [os.path.abspath(os.fsdecode(path)) for path in paths]
    if not absolute:
        raise UsageError("no external file was given: name at least one")
    for path in absolute:
        if "\0" in path:
            raise UsageError(f"{path!r} is no path: it has a null character; check the path")
    return absolute


def refuse_one_path(paths: object) -> None:
    """Raise TypeError for a path in place of a sequence of them: its letters would be the paths."""
    if isinstance(paths, str | bytes | os.PathLike):
        raise TypeError(f"expected a sequence of paths, got the one path {paths!r}: give [{paths!r}]")


def open_regular(path: str, flags: int = 0) -> int:
    """Return a descriptor of the regular file ``path`` for reading; links are followed, and a FIFO is not waited for.

    Raises UsageError for a path that the caller has to mend, DeviceError, and OSError for ``flags`` that it refuses.
    """
    try:
        _check_regular(os.stat(path), path)  # order: before an open, which sets some devices in motion
        fd = os.open(path, flags | os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if flags and error.errno == errno.EINVAL:
            raise
        raise _refusal(error, path) from error
    try:
        _check_regular(os.fstat(fd), path)  # the same path may be another file by now
        os.set_blocking(fd, True)  # order: io_uring gives up on a non-blocking file that its file system must wait for
    except BaseException:
        os.close(fd)
        raise
    return fd


def _open_direct(path: str, pread: ReadInto) -> tuple[int | None, DirectProbe]:
    """Return a descriptor of ``path`` for direct I/O with the answer of the trial; None where that is a refusal."""
    try:
        fd = open_regular(path, os.O_DIRECT)
    except OSError:
        return None, DirectProbe(MIN_ALIGNMENT, "the file system refuses to open files with O_DIRECT")
    is_kept = False
    try:
        probe = probe_direct_read(fd, pread)
        is_kept = probe.is_direct
        return (fd if is_kept else None), probe
    except OSError as error:
        raise translate(error, f"cannot read {path}") from error
    finally:
        if not is_kept:
            os.close(fd)


def _check_regular(status: os.stat_result, path: str) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise UsageError(f"{path} is a directory: name the files in it")
    if not stat.S_ISREG(status.st_mode):
        raise UsageError(f"{path} is no regular file ({stat.filemode(status.st_mode)}): name one")


def _refusal(error: OSError, path: str) -> Exception:
    """Return the error for a file that cannot be opened."""
    if error.errno not in _OF_THE_CALLER:
        return translate(error, f"cannot open {path}")
    if error.errno == errno.ENOENT:
        what = "is a link to a file that is missing" if os.path.islink(path) else "is missing"
        return UsageError(f"{path} {what}: get it again, or name the file where it is now")
    if error.errno in {errno.EACCES, errno.EPERM}:
        return UsageError(f"{path} cannot be read: {error.strerror}; let this user read it and enter its directories")
    return UsageError(f"{path} cannot be opened: {error.strerror}; check the path")

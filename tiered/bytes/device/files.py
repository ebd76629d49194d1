"""The numbered files of a device: those of a directory, and what they share with files of other kinds.

They are opened, grown, flushed and named here. Reads and writes are the engines' affair.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import mmap
import os
import re
import stat
import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from tiered.bytes.device.base import SCRATCH
from tiered.bytes.device.direct_io import (
    MIN_ALIGNMENT,
    DirectProbe,
    ReadInto,
    WriteFrom,
    choose_direct,
    open_unnamed,
    probe_direct,
)
from tiered.bytes.device.mount import RAM_COST, RAM_MEND, find_mount
from tiered.errors import CapacityError, ClosedError, DeadlineError, DeviceError, TieredError, UsageError
from tiered.units import MiB, format_bytes

__all__ = [
    "DataFile", "DataFiles", "NumberedFiles", "allocate", "open_data_files", "punch_hole", "translate", "translating",
]  # fmt: skip

_log = logging.getLogger("tiered")
_NAME = re.compile(r"data-(\d{3,})")
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NO_WRITING = {errno.EROFS, errno.EACCES, errno.EPERM}
_NO_FALLOCATE = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENODEV}
_fallocate = ctypes.CDLL(None, use_errno=True).fallocate  # Python's has no mode
_fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # linux/falloc.h
# linux/fiemap.h: start, length, flags, mapped, room, reserved; of an extent, those that are used here.
_FS_IOC_FIEMAP, _FIEMAP, _MAPPED = 0xC020660B, struct.Struct("=QQIIII"), struct.Struct("=Q8xQ16xI12x")
_MAPPED_LAST, _NUM_MAPPED = 1, 1024


_NEXT_STEP = {
    errno.EIO: "see the kernel log (dmesg) for this drive",
    errno.EROFS: "the file system is read-only: see the kernel log (dmesg) for the reason",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENOMEM: "raise the limits on memory and on locked memory (ulimit -l)",
    errno.ENOENT: "create it first",
    errno.EACCES: "run as the owner of the directory",
}


def translate(error: OSError, what: str) -> TieredError:
    """Return the TieredError for ``error`` while doing ``what``, with ``error`` as its cause."""
    reason = error.strerror or str(error)
    if error.errno in _NO_SPACE:
        translated: TieredError = CapacityError(f"{what}: {reason}; free space there, or add a directory")
    else:
        next_step = _NEXT_STEP.get(error.errno or 0, "check that the drive is there and mounted")
        translated = DeviceError(f"{what}: {reason}; {next_step}")
    translated.__cause__ = error
    return translated


@contextlib.contextmanager
def translating(what: str) -> Iterator[None]:
    """Raise the TieredError for an OSError of the block, which does ``what``."""
    try:
        yield
    except OSError as error:
        raise translate(error, what) from error


@dataclass(slots=True)
class DataFile:
    """One open file. Only ``is_dirty`` and ``nbytes`` ever change."""

    fd: int
    nbytes: int
    is_dirty: bool = False  # has writes or growth that no flush has covered


class NumberedFiles(ABC):
    """Open descriptors of numbered files, and whether direct I/O works for them.

    Thread-safe. Every OSError comes out as a TieredError that names the path.
    """

    is_external: ClassVar[bool] = False  # only read, of any length, and with zeros behind their ends

    def __init__(self, name: str) -> None:
        self.name = name  # for messages
        self.alignment = MIN_ALIGNMENT  # bytes
        self.is_direct = False
        self._files: dict[int, DataFile] = {}
        self._locks: tuple[threading.Lock, ...] = ()  # that are held over system calls
        self._is_closed = False

    def get(self, file: int) -> DataFile | None:
        """Return the open file with this number. Does not block."""
        return self._files.get(file)

    def mark(self, file: int) -> None:
        """Have the next flush cover ``file``, where it is open: a write to it has ended, well or not."""
        data_file = self._files.get(file)
        if data_file is not None:
            data_file.is_dirty = True

    def sizes(self) -> dict[int, int]:
        """Return the number and size in bytes of each file."""
        return {number: file.nbytes for number, file in list(self._files.items())}

    @abstractmethod
    def path(self, file: int) -> str:
        """Return the path of ``file`` for messages."""

    @abstractmethod
    def free_bytes(self) -> int:
        """Return how many more bytes ``grow`` could allocate."""

    @abstractmethod
    def grow(self, file: int, nbytes: int) -> None:
        """Make ``file`` at least ``nbytes`` long, really allocated; on failure it is as it was."""

    def punch(self, file: int, start: int, end: int) -> bool:
        """Give the space of [start, end) of ``file`` to the file system; False where that has no holes."""
        with self._change(file, f"give back [{start}, {end})") as fd:
            self._files[file].is_dirty = True
            return punch_hole(fd, start, end)

    def fill(self, file: int, start: int, end: int) -> None:
        """Allocate [start, end) of ``file``."""
        with self._change(file, f"allocate [{start}, {end})") as fd:
            self._files[file].is_dirty = True
            _allocate(fd, start, end)

    def holes(self, file: int) -> list[tuple[int, int]]:
        """Return start and end of each range of ``file`` that has no space of its own, or may have none.

        A file system that does not tell where (tmpfs, NFS) is asked for the sum alone: then it is all of a file.
        """
        with self._change(file, "ask for the holes") as fd:
            status = os.fstat(fd)
            with contextlib.suppress(OSError):  # of any number: a sandbox, too, may refuse to tell
                return _holes_of(fd, status.st_size)
            return [(0, status.st_size)] if status.st_blocks * 512 < status.st_size else []

    @contextlib.contextmanager
    def _change(self, file: int, what: str) -> Iterator[int]:
        """Keep ``file`` open, and its space for one caller; yield its descriptor."""
        with self._locks[0]:
            self._check_open()
            with translating(f"cannot {what} of {self.path(file)}"):
                yield self._files[file].fd

    @abstractmethod
    def flush(self, fdatasync: Callable[[int], None]) -> None:
        """Make all writes marked dirty, growths and new names durable."""

    def end(self, deadline_s: float) -> None:
        """Close once the system calls of other threads have ended; blocks. Never call it with I/O in flight.

        Raises DeadlineError when they do not, with nothing closed.
        """
        # Order: never under a system call, or its descriptor may be another file's by the time it is made.
        with contextlib.ExitStack() as held:
            for lock in self._locks:
                if not lock.acquire(timeout=deadline_s):
                    raise DeadlineError(
                        f"closing the files of {self.name}: growth or a flush, or a look at them, has not ended in "
                        f"{deadline_s:g} s; check the drive, then close again or end the process"
                    )
                held.callback(lock.release)
            self.close()

    def close(self) -> None:
        """Close all descriptors. Idempotent; for a caller alone with them, such as a forked child: see ``end``."""
        if not self._is_closed:
            self._is_closed = True
            for file in self._files.values():
                os.close(file.fd)

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError(f"{self.name} is closed")


class DataFiles(NumberedFiles):
    """Open descriptors of ``data-000``, ``data-001``, ... and of the unnamed scratch file.

    Files are 0600 under any umask, never followed through a link, and never shrink.
    """

    def __init__(self, directory: str, descriptor: int, probe: DirectProbe) -> None:
        """Open the existing files of ``directory``, itself open as ``descriptor``, with the I/O that ``probe`` found.

        Takes over ``descriptor``. Raises UsageError for a file that is a link, no file, or open to others.
        """
        super().__init__(directory)
        self._directory = directory
        self._descriptor = descriptor
        self.alignment = probe.alignment
        self.is_direct = probe.is_direct
        self._flags = os.O_DIRECT if self.is_direct else 0
        self._grow_lock = threading.Lock()  # held over system calls; readers of the table do not need it
        self._flush_lock = threading.Lock()  # a second flush must wait for the dirty files of the first
        self._locks = (self._grow_lock, self._flush_lock)
        self._directory_is_dirty = False
        self._flush_error: Exception | None = None
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            self._discover()
            undo.pop_all()

    def path(self, file: int) -> str:
        return f"{self._directory}/{'(scratch)' if file == SCRATCH else _file_name(file)}"

    def free_bytes(self) -> int:
        with translating(f"cannot ask for the free space of {self._directory}"):
            status = os.fstatvfs(self._descriptor)
        return status.f_bavail * status.f_frsize

    def grow(self, file: int, nbytes: int) -> None:
        with self._grow_lock:
            self._check_open()
            data_file = self._files.get(file)
            if data_file is not None and data_file.nbytes >= nbytes:
                return
            old_size = data_file.nbytes if data_file else 0
            what = f"cannot grow {self.path(file)} from {format_bytes(old_size)} to {format_bytes(nbytes)}"
            with translating(what):
                if data_file is None:
                    self._create(file, nbytes)
                    return
                # Order: dirty before the size is known, so that a flush which sees the new size covers it.
                data_file.is_dirty = True
                allocate(data_file.fd, old_size, nbytes)
                data_file.nbytes = nbytes

    def flush(self, fdatasync: Callable[[int], None]) -> None:
        """Make all writes marked dirty, growths and new names durable. After one failure, fail for ever."""
        with self._flush_lock:
            self._check_open()
            if self._flush_error is not None:
                raise DeviceError(
                    f"an earlier flush of {self._directory} failed, so its contents are unknown; reopen the store"
                ) from self._flush_error
            what = self._directory
            try:
                for number, file in sorted(self._files.items()):
                    if number != SCRATCH:
                        what = self.path(number)
                        self._check_place(number, file)
                    if number != SCRATCH and file.is_dirty:
                        what = self.path(number)
                        try:
                            file.is_dirty = False  # order: a write that ends while fdatasync runs marks it again
                            fdatasync(file.fd)
                        except BaseException:  # interrupted, the next flush has it to do
                            file.is_dirty = True
                            raise
                if self._directory_is_dirty:
                    what = self._directory
                    try:
                        self._directory_is_dirty = False  # order: as above, for new names
                        os.fsync(self._descriptor)
                    except BaseException:
                        self._directory_is_dirty = True
                        raise
            except OSError as error:
                # The kernel reports a failed write-back once and then forgets it: a second fdatasync would say "ok".
                self._flush_error = error
                raise DeviceError(
                    f"flush of {what} failed: {error.strerror}; what it holds is unknown, nothing more is written; "
                    f"reopen the store"
                ) from error

    def _check_place(self, number: int, file: DataFile) -> None:
        """Raise OSError when the name is gone or another file's by now: written bytes could not be found again."""
        there = os.stat(_file_name(number), dir_fd=self._descriptor, follow_symlinks=False)
        here = os.fstat(file.fd)
        if (here.st_dev, here.st_ino) != (there.st_dev, there.st_ino):
            raise OSError(errno.ESTALE, "another file has been put in its place")

    def close(self) -> None:
        """Close all descriptors, that of the directory too."""
        if not self._is_closed:
            super().close()
            os.close(self._descriptor)

    def _discover(self) -> None:
        with translating(f"cannot list {self._directory}"):
            names = sorted(os.listdir(self._descriptor))
        for name in names:
            match = _NAME.fullmatch(name)
            if match is not None and name == _file_name(int(match[1])):
                fd = self._open_existing(name)
                self._files[int(match[1])] = DataFile(fd, os.fstat(fd).st_size)

    def _open_existing(self, name: str) -> int:
        path = f"{self._directory}/{name}"
        flags = self._flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # NONBLOCK: a FIFO must not hang the open
        with translating(f"cannot open {path}"):
            _check_private(os.stat(name, dir_fd=self._descriptor, follow_symlinks=False), path)
            try:
                fd = os.open(name, flags | os.O_RDWR, dir_fd=self._descriptor)
            except OSError as error:
                if error.errno not in _NO_WRITING:
                    raise
                fd = os.open(name, flags | os.O_RDONLY, dir_fd=self._descriptor)  # enough for mode "r"
        try:
            _check_private(os.fstat(fd), path)  # the same name may be another file by now
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _create(self, file: int, nbytes: int) -> None:
        with contextlib.ExitStack() as undo:
            if file == SCRATCH:
                fd = open_unnamed(self._descriptor, self._flags)
                undo.callback(os.close, fd)
            else:
                name = _file_name(file)
                flags = self._flags | os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
                fd = os.open(name, flags, 0o600, dir_fd=self._descriptor)
                undo.callback(os.unlink, name, dir_fd=self._descriptor)
                undo.callback(os.close, fd)
                os.fchmod(fd, 0o600)  # against the umask
            allocate(fd, 0, nbytes)
            self._directory_is_dirty |= file != SCRATCH  # order: before the file can be seen, as in ``grow``
            self._files[file] = DataFile(fd, nbytes, is_dirty=True)
            undo.pop_all()


def open_data_files(directory: str, direct: bool | None, pread: ReadInto, pwrite: WriteFrom) -> DataFiles:
    """Return the files of ``directory``, after a trial of direct I/O; see FileDevice for ``direct`` and errors."""

    def probe() -> DirectProbe:
        with translating(f"cannot do I/O in {directory}"):
            return probe_direct(descriptor, pread, pwrite)

    with translating(f"cannot open the directory {directory}"):
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        mount = find_mount(directory)
        in_ram = mount is not None and mount.kind == "memory"
        if in_ram:
            _log.warning("%s: %s: %s; %s", directory, mount, RAM_COST, RAM_MEND)
        answer = probe() if in_ram and direct is None else choose_direct(directory, direct, probe)
    except BaseException:
        os.close(descriptor)
        raise
    return DataFiles(directory, descriptor, answer)


def _check_private(status: os.stat_result, path: str) -> None:
    """Refuse a data file that another user may have put in its place, or may write to."""
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1 or status.st_mode & 0o077:
        raise UsageError(
            f"{path} must be a regular file with one name and mode 0600, and has {status.st_nlink} names and mode "
            f"{stat.filemode(status.st_mode)}: check who made it, then chmod 600 it or move it away"
        )


def _file_name(file: int) -> str:
    return f"data-{file:03d}"


def allocate(fd: int, start: int, end: int) -> None:
    """Allocate [start, end) of the file, or leave it ``start`` bytes long. Raises OSError.

    Both are aligned where ``fd`` is for direct I/O: a file system without fallocate is given zeros.
    """
    if start == end:
        return
    try:
        _allocate(fd, start, end)
    except OSError:
        with contextlib.suppress(OSError):  # the first error is the one to report
            os.ftruncate(fd, start)
        raise


def _allocate(fd: int, start: int, end: int) -> None:
    try:
        os.posix_fallocate(fd, start, end - start)
    except OSError as error:
        if error.errno not in _NO_FALLOCATE:
            raise
        _write_zeros(fd, start, end)  # the only way left to own the space


def punch_hole(fd: int, start: int, end: int) -> bool:
    """Give the space of [start, end) of the file to the file system; False where that has no holes. Raises OSError."""
    if _fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, start, end - start):
        number = ctypes.get_errno()
        if number not in _NO_FALLOCATE:
            raise OSError(number, os.strerror(number))
        return False
    return True


def _holes_of(fd: int, nbytes: int) -> list[tuple[int, int]]:
    """Return the ranges of the first ``nbytes`` of a file that have no space. Raises OSError where nobody tells."""
    holes: list[tuple[int, int]] = []
    place, is_last = 0, False  # up to where it is known
    while place < nbytes and not is_last:
        request = bytearray(_FIEMAP.size + _NUM_MAPPED * _MAPPED.size)
        _FIEMAP.pack_into(request, 0, place, nbytes - place, 0, 0, _NUM_MAPPED, 0)
        fcntl.ioctl(fd, _FS_IOC_FIEMAP, request)
        number = _FIEMAP.unpack_from(request)[3]
        for index in range(number):
            start, length, flags = _MAPPED.unpack_from(request, _FIEMAP.size + index * _MAPPED.size)
            if start > place:
                holes.append((place, start))
            place, is_last = max(place, start + length), bool(flags & _MAPPED_LAST)
        if not number:
            break
    return [*holes, (place, nbytes)] if place < nbytes else holes


def _write_zeros(fd: int, start: int, end: int) -> None:
    with mmap.mmap(-1, min(MiB, end - start)) as zeros, memoryview(zeros) as block:
        while start < end:
            num_written = os.pwritev(fd, [block[: end - start]], start)
            if num_written == 0:
                raise OSError(errno.EIO, "wrote 0 bytes")
            start += num_written

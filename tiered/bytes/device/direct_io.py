"""The probe of a directory or of a file, before any I/O: does it take O_DIRECT, at which alignment?"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
import secrets
import struct
from collections.abc import Callable
from dataclasses import dataclass

from tiered.errors import DeviceError
from tiered.units import round_up

__all__ = [
    "MIN_ALIGNMENT",
    "DirectProbe",
    "ReadInto",
    "WriteFrom",
    "choose_direct",
    "open_unnamed",
    "probe_direct",
    "probe_direct_read",
    "report_buffered",
]

MIN_ALIGNMENT = 4096  # bytes; also what the arena guarantees for addresses
_NO_WRITING = {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT}
_NO_DIRECT = {errno.EINVAL, errno.EOPNOTSUPP, errno.EIO}
_NO_TMPFILE = {errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL}

# <linux/stat.h>
_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000
_STATX_NBYTES = 256
_STATX_DIO_ALIGN_OFFSET = 152  # u32 stx_dio_mem_align, u32 stx_dio_offset_align

_log = logging.getLogger("tiered")

ReadInto = Callable[[int, memoryview, int], int]
WriteFrom = Callable[[int, memoryview, int], int]


@dataclass(frozen=True, slots=True)
class DirectProbe:
    """The answer: direct I/O at ``alignment``, or the reason why not."""

    alignment: int  # bytes, at least 4096
    refusal: str | None  # None: direct I/O works

    @property
    def is_direct(self) -> bool:
        """Whether direct I/O works."""
        return self.refusal is None


def choose_direct(name: str, direct: bool | None, probe: Callable[[], DirectProbe]) -> DirectProbe:
    """Return the answer of ``probe`` for ``name``, or without asking that I/O is buffered for ``direct=False``.

    A refusal is one warning for ``direct=None``, and a DeviceError for True.
    """
    if direct is False:
        return DirectProbe(MIN_ALIGNMENT, "buffered I/O was asked for")
    answer = probe()
    if answer.refusal is not None:
        report_buffered(name, answer.refusal, direct)
    return answer


def report_buffered(name: str, refusal: str, direct: bool | None) -> None:
    """Log that the I/O of ``name`` is buffered. Raises DeviceError instead where ``direct`` insists on direct I/O."""
    if direct:
        raise DeviceError(f"{name} has no direct I/O: {refusal}; give direct=None to do without")
    _log.warning(
        "%s: I/O is buffered, slower and takes page cache, because direct I/O does not work there: %s", name, refusal
    )


def probe_direct(directory: int, pread: ReadInto, pwrite: WriteFrom) -> DirectProbe:
    """Try direct I/O on an unnamed file in the directory open as ``directory``; blocks for one write and one read.

    Raises OSError only for errors that would stop buffered I/O as well.
    """
    try:
        fd = open_unnamed(directory, os.O_DIRECT)
    except OSError as error:
        if error.errno in _NO_WRITING:  # a reader may read there nevertheless
            return DirectProbe(MIN_ALIGNMENT, f"it could not be tried: {error.strerror}")
        if error.errno != errno.EINVAL:
            raise
        return DirectProbe(MIN_ALIGNMENT, "the file system refuses to open files with O_DIRECT")
    try:
        return _probe(fd, lambda alignment: _trial(fd, alignment, pread, pwrite))
    finally:
        os.close(fd)


def probe_direct_read(fd: int, pread: ReadInto) -> DirectProbe:
    """Try direct I/O on ``fd``, open with O_DIRECT: one read of its first block, which blocks. Nothing is written.

    Raises OSError only for errors that would stop buffered I/O as well.
    """
    return _probe(fd, lambda alignment: _read_trial(fd, alignment, pread))


def open_unnamed(directory: int, flags: int) -> int:
    """Open a new file, 0600, that has no name in ``directory`` and goes when its descriptor is closed."""
    flags |= os.O_RDWR | os.O_CLOEXEC | os.O_EXCL
    try:
        fd = os.open(".", flags | os.O_TMPFILE, 0o600, dir_fd=directory)
    except OSError as error:
        if error.errno not in _NO_TMPFILE:
            raise
        fd = _open_and_unname(directory, flags)
    try:
        os.fchmod(fd, 0o600)  # against the umask
    except BaseException:
        os.close(fd)
        raise
    return fd


def _open_and_unname(directory: int, flags: int) -> int:
    name, fd = f"scratch-{secrets.token_hex(8)}", -1
    try:
        try:
            fd = os.open(name, flags | os.O_CREAT | os.O_NOFOLLOW, 0o600, dir_fd=directory)
        finally:
            with contextlib.suppress(FileNotFoundError):  # an open that O_DIRECT makes fail leaves the file behind
                os.unlink(name, dir_fd=directory)
    except BaseException:
        if fd >= 0:
            os.close(fd)
        raise
    return fd


def _probe(fd: int, trial: Callable[[int], str | None]) -> DirectProbe:
    """Return the alignment that statx tells for ``fd``, and the refusal of ``trial`` with that alignment."""
    memory_alignment, offset_alignment = _dio_alignment(fd)
    if not memory_alignment or not offset_alignment:
        return DirectProbe(MIN_ALIGNMENT, "statx says that files here have no direct I/O")
    if memory_alignment > MIN_ALIGNMENT:
        return DirectProbe(MIN_ALIGNMENT, f"it needs memory aligned to {memory_alignment} bytes")
    alignment = max(MIN_ALIGNMENT, offset_alignment)
    return DirectProbe(alignment, trial(alignment))


def _dio_alignment(fd: int) -> tuple[int, int]:
    """Return statx's (memory, offset) alignment; the minimum where it has none; 0 for no direct I/O."""
    buffer = ctypes.create_string_buffer(_STATX_NBYTES)
    statx = getattr(ctypes.CDLL(None, use_errno=True), "statx", None)
    if statx is None or statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, buffer) != 0:
        return MIN_ALIGNMENT, MIN_ALIGNMENT
    (mask,) = struct.unpack_from("=I", buffer, 0)
    if not mask & _STATX_DIOALIGN:  # before Linux 6.1, and file systems that do not tell
        return MIN_ALIGNMENT, MIN_ALIGNMENT
    memory_alignment, offset_alignment = struct.unpack_from("=II", buffer, _STATX_DIO_ALIGN_OFFSET)
    return memory_alignment, offset_alignment


def _trial(fd: int, alignment: int, pread: ReadInto, pwrite: WriteFrom) -> str | None:
    """Write and read one aligned block; return why that is not possible, or None."""
    pattern = secrets.token_bytes(alignment)
    with mmap.mmap(-1, round_up(alignment, mmap.PAGESIZE)) as pages, memoryview(pages)[:alignment] as block:
        block[:] = pattern
        try:
            num_written = pwrite(fd, block, 0)
            block[:] = bytes(alignment)
            num_read = pread(fd, block, 0)
        except OSError as error:
            if error.errno not in _NO_WRITING | _NO_DIRECT:
                raise
            return f"a trial write and read failed: {error.strerror}"
        if num_written == num_read == alignment and block == pattern:
            return None
        return f"a trial moved {num_written} bytes out and {num_read} back, of {alignment}"


def _read_trial(fd: int, alignment: int, pread: ReadInto) -> str | None:
    """Read one aligned block, or the whole of a shorter file; return why that is not possible, or None."""
    expected = min(alignment, os.fstat(fd).st_size)
    with mmap.mmap(-1, round_up(alignment, mmap.PAGESIZE)) as pages, memoryview(pages)[:alignment] as block:
        try:
            num_read = pread(fd, block, 0)
        except OSError as error:
            if error.errno not in _NO_DIRECT:
                raise
            return f"a trial read failed: {error.strerror}"
    return None if num_read == expected else f"a trial read gave {num_read} bytes of {expected}"

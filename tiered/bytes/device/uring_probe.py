"""Whether io_uring works: in a directory, by one write and read, or for a file, by one read. See uring.py, too."""

from __future__ import annotations

import ctypes
import errno
import os
import time
from collections.abc import Callable

from tiered.bytes.device.direct import open_unnamed
from tiered.bytes.device.ring import READ, WRITE, Ring
from tiered.errors import DeadlineError, DeviceError

__all__ = ["probe_uring", "probe_uring_read"]

_TRIAL_NBYTES = 4096
_abandoned: list[tuple[Ring, ctypes.c_char]] = []
"""Lifetime: the ring and the memory of trials that a drive did not answer in time."""


def probe_uring(directory: str | os.PathLike[str], *, deadline_s: float = 60.0) -> str | None:
    """Return why io_uring does not work in ``directory``, or None: a ring, one aligned write and read.

    Blocks, for ``deadline_s`` at most each. An operation that is late stays with the kernel, and its ring open.
    """
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fd = open_unnamed(descriptor, 0)
        finally:
            os.close(descriptor)
    except OSError as error:
        return f"cannot make a file in {os.fspath(directory)}: {error.strerror}"
    expected = os.urandom(_TRIAL_NBYTES)

    def trial() -> str | None:
        num_written = _move_once(fd, memoryview(bytearray(expected)), deadline_s, is_write=True)
        if num_written != _TRIAL_NBYTES:
            return f"a trial write through io_uring moved {num_written} bytes of {_TRIAL_NBYTES}"
        return _read_trial(fd, expected, deadline_s)

    try:
        return _refusal(os.fspath(directory), trial)
    finally:
        os.close(fd)


def probe_uring_read(path: str, fd: int, *, deadline_s: float = 60.0) -> str | None:
    """Return why io_uring does not read ``path``, open and buffered as ``fd``, or None: a ring, one read.

    Blocks as ``probe_uring`` does. Nothing is written.
    """
    return _refusal(path, lambda: _read_trial(fd, os.pread(fd, _TRIAL_NBYTES, 0), deadline_s))


def _refusal(name: str, trial: Callable[[], str | None]) -> str | None:
    """Return what ``trial`` returns, or the error that it ended with in ``name``."""
    try:
        return trial()
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            return f"it could not be tried in {name}: {error.strerror}"
        return f"io_uring is refused here: {error.strerror}" + _hint(error.errno)
    except DeviceError as error:
        return str(error)


def _read_trial(fd: int, expected: bytes, deadline_s: float) -> str | None:
    page = bytearray(_TRIAL_NBYTES)
    num_read = _move_once(fd, memoryview(page), deadline_s, is_write=False)
    if num_read == len(expected) and page.startswith(expected):
        return None
    return f"a trial through io_uring read {num_read} bytes of {len(expected)}, or others"


def _hint(number: int | None) -> str:
    if number in {errno.EPERM, errno.EACCES}:
        return " (a container's seccomp filter, or /proc/sys/kernel/io_uring_disabled)"
    return " (this kernel has none)" if number == errno.ENOSYS else ""


def _move_once(fd: int, memory: memoryview, deadline_s: float, *, is_write: bool) -> int:
    """Move ``memory`` at the start of ``fd`` through a ring of its own and return how many bytes; blocks.

    Raises OSError, and DeadlineError with all that the kernel has kept for good.
    """
    ring = Ring(1)
    is_in_flight = False
    try:
        ring.register_files(1)
        ring.set_file(0, fd)
        pinned = ctypes.c_char.from_buffer(memory)
        ring.prepare(WRITE if is_write else READ, 0, ctypes.addressof(pinned), len(memory), 0, 0)
        completions: list[tuple[int, int, int]] = []
        end_s = time.monotonic() + deadline_s
        is_in_flight = True
        while not completions:
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                raise DeadlineError(
                    f"a trial {'write' if is_write else 'read'} through io_uring did not complete within "
                    f"{deadline_s:g} s: check the drive"
                )
            ring.enter(1, min(1.0, left_s))
            completions = ring.completions()
        is_in_flight = False
        result = completions[0][1]
        if result < 0:
            raise OSError(-result, os.strerror(-result))
        return result
    finally:
        if is_in_flight:
            _abandoned.append((ring, pinned))
        else:
            ring.close()

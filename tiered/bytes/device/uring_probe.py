"""Whether io_uring works in a directory: a ring, one aligned write, one read. The engine itself is in uring.py."""

from __future__ import annotations

import ctypes
import errno
import os
import time

from tiered.bytes.device.direct import open_unnamed
from tiered.bytes.device.ring import READ, WRITE, Ring
from tiered.errors import DeadlineError, DeviceError

__all__ = ["probe_uring"]


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
    try:
        page = bytearray(os.urandom(4096))
        expected = bytes(page)
        num_written = _move_once(fd, memoryview(page), deadline_s, is_write=True)
        page[:] = bytes(4096)
        num_read = _move_once(fd, memoryview(page), deadline_s, is_write=False)
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            return f"it could not be tried in {os.fspath(directory)}: {error.strerror}"
        return f"io_uring is refused here: {error.strerror}" + _hint(error.errno)
    except DeviceError as error:
        return str(error)
    finally:
        os.close(fd)
    if num_written == num_read == 4096 and page == expected:
        return None
    return f"a trial through io_uring moved {num_written} bytes out and {num_read} back, of 4096"


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

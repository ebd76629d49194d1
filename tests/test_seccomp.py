"""The filter refuses what it should and nothing else: what stands on it would pass for no reason otherwise."""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.seccomp import forbid


def status_of(child: Callable[[], int]) -> int:
    """Return what ``child()`` returns in a forked process; 255 for an exception."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the child takes no lock that another thread may hold
        pid = os.fork()
    if pid == 0:
        try:
            os._exit(child())
        finally:
            os._exit(255)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def call(function: Callable[[], object]) -> int:
    """Return the errno that ``function`` fails with; 0 where it does not."""
    try:
        function()
    except OSError as error:
        return error.errno or 255
    return 0


@pytest.mark.parametrize("errno_", [errno.EPERM, errno.ENOSYS, errno.EIO])
def test_a_forbidden_call_fails_with_the_given_errno(tmp_path: Path, errno_: int) -> None:
    def child() -> int:
        fd = os.open(tmp_path, os.O_RDONLY)
        forbid(["fdatasync", "io_uring_setup"], errno_)
        assert call(lambda: os.fsync(fd)) == 0, "the neighbour is allowed"
        return call(lambda: os.fdatasync(fd))

    assert status_of(child) == errno_


def test_io_uring_is_refused(tmp_path: Path) -> None:
    def child() -> int:
        forbid(["io_uring_setup"], errno.EPERM)
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.syscall(ctypes.c_long(425), ctypes.c_uint(1), ctypes.create_string_buffer(120)) == -1
        return ctypes.get_errno()

    assert status_of(child) == errno.EPERM


def test_filters_add_up_and_are_inherited(tmp_path: Path) -> None:
    def child() -> int:
        forbid(["fdatasync"], errno.EPERM)
        forbid(["fsync"], errno.EIO)
        fd = os.open(tmp_path, os.O_RDONLY)
        assert (call(lambda: os.fsync(fd)), call(lambda: os.fdatasync(fd))) == (errno.EIO, errno.EPERM)
        program = f"import os\ntry: os.fsync({fd})\nexcept OSError as error: exit(error.errno)"
        return subprocess.run([sys.executable, "-c", program], pass_fds=[fd], check=False).returncode

    assert status_of(child) == errno.EIO


def test_a_call_without_a_number_is_refused() -> None:
    with pytest.raises(ValueError, match=r"getpid.*known: "):
        forbid(["getpid"], errno.EPERM)

"""Refuse system calls as containers do: with a seccomp filter, for the calling process and its children, for good."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from collections.abc import Sequence

__all__ = ["forbid"]

# audit's number of the machine, and the numbers of the system calls there: <asm/unistd.h>
_MACHINES = {
    "x86_64": (0xC000003E, {
        "pread64": 17, "pwrite64": 18, "madvise": 28, "fsync": 74, "fdatasync": 75, "mlock": 149, "fallocate": 285,
        "eventfd2": 290, "preadv": 295, "pwritev": 296, "process_vm_readv": 310, "preadv2": 327, "pwritev2": 328,
        "statx": 332, "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427,
    }),
    "aarch64": (0xC00000B7, {
        "eventfd2": 19, "fallocate": 47, "pread64": 67, "pwrite64": 68, "preadv": 69, "pwritev": 70, "fsync": 82,
        "fdatasync": 83, "mlock": 228, "madvise": 233, "process_vm_readv": 270, "preadv2": 286, "pwritev2": 287,
        "statx": 291, "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427,
    }),
}  # fmt: skip

# <linux/bpf_common.h>, <linux/seccomp.h>, <linux/prctl.h>
_LOAD_WORD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_NUMBER_OFFSET, _MACHINE_OFFSET = 0, 4  # in struct seccomp_data
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _FILTER = 22, 38, 2


def forbid(system_calls: Sequence[str], errno_: int) -> None:
    """Make each of ``system_calls`` fail with ``errno_`` in this thread and whatever it forks or starts from now on.

    There is no way back: call it in a forked child, or as the ``preexec_fn`` of a subprocess. Raises ValueError for a
    system call or machine that is not listed here, OSError where the kernel has no seccomp. ``os.preadv`` of Python
    calls preadv2, and preadv where that answers ENOSYS; ``os.pwritev`` likewise.
    """
    machine = platform.machine()
    if machine not in _MACHINES:
        raise ValueError(f"seccomp filters are written for {', '.join(_MACHINES)}, not for {machine}")
    audit_number, numbers = _MACHINES[machine]
    unknown = [name for name in system_calls if name not in numbers]
    if unknown:
        raise ValueError(f"no number is listed for {', '.join(unknown)}; known: {', '.join(numbers)}")
    program = _program(audit_number, [numbers[name] for name in system_calls], errno_)
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(code))  # struct sock_fprog
    libc = ctypes.CDLL(None, use_errno=True)
    unused = ctypes.c_ulong(0)
    for option, first, second in (
        (_PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), unused),  # order: without it only root may install a filter
        (_PR_SET_SECCOMP, ctypes.c_ulong(_FILTER), ctypes.c_char_p(header)),
    ):
        if libc.prctl(option, first, second, unused, unused) != 0:
            error = ctypes.get_errno()
            raise OSError(error, f"prctl({option}): {os.strerror(error)}")


def _program(audit_number: int, numbers: Sequence[int], errno_: int) -> bytes:
    """Return the filter in classic BPF: struct sock_filter {u16 code; u8 if_true, if_false; u32 value}."""
    instructions = [
        (_LOAD_WORD, 0, 0, _MACHINE_OFFSET),
        (_JUMP_IF_EQUAL, 1, 0, audit_number),
        (_RETURN, 0, 0, _ALLOW),  # another machine's numbers (32-bit programs) mean other calls
        (_LOAD_WORD, 0, 0, _NUMBER_OFFSET),
        *((_JUMP_IF_EQUAL, len(numbers) - index, 0, number) for index, number in enumerate(numbers)),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _ERRNO | errno_),
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in instructions)

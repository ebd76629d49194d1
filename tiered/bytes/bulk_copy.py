"""Copies of large pieces of memory past the processor's caches, where that can be had; elsewhere libc's.

An ordinary store reads the line that it is about to overwrite, and leaves it in the cache, where nobody will look for
it before the next tensor has pushed it out. libc avoids that only from a share of the last cache on (99 MiB where that
has 260 MiB), and no library in reach does; so the loop is here, in the processor's own words.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import mmap
import platform
import sys
from collections.abc import Callable

from tiered.units import MiB

__all__ = ["copy_bytes"]

_Copy = Callable[[int, int, int], object]

_LEAST_NBYTES = 4 * MiB  # more than a core's own cache: of less, whoever wants it next may find it there
_LINE_NBYTES = 64
_ALIGNMENT = 16  # of what a streaming store writes
_PROT_READ_EXEC = 0x5  # <sys/mman.h>
_CODE = bytes.fromhex(  # void copy(void *target (rdi), const void *source (rsi), size_t nbytes (rdx)), System V x86-64
    "f30f1efa"  # endbr64
    "f30f6f06 f30f6f4e10 f30f6f5620 f30f6f5e30"  # movdqu xmm0 to xmm3, [rsi], [rsi+16], [rsi+32], [rsi+48]
    "660fe707 660fe74f10 660fe75720 660fe75f30"  # movntdq [rdi], [rdi+16], [rdi+32], [rdi+48], xmm0 to xmm3
    "4883c640 4883c740 4883ea40"  # add rsi, 64; add rdi, 64; sub rdx, 64
    "75cc"  # jnz to the first movdqu
    "0faef8"  # sfence: the stores can be seen before anything that follows
    "c3"  # ret
)
_log = logging.getLogger("tiered")


def copy_bytes(target: int, source: int, nbytes: int) -> None:
    """Copy ``nbytes`` from address ``source`` to address ``target``, which do not overlap, in this thread alone.

    Other Python threads run meanwhile.
    """
    if nbytes < _LEAST_NBYTES:
        ctypes.memmove(target, source, nbytes)
        return
    head = -target % _ALIGNMENT
    middle = (nbytes - head) // _LINE_NBYTES * _LINE_NBYTES
    done = head + middle
    ctypes.memmove(target, source, head)
    _streaming_copy()(target + head, source + head, middle)
    ctypes.memmove(target + done, source + done, nbytes - done)


@functools.cache
def _streaming_copy() -> _Copy:
    """Return what copies multiples of 64 bytes to a multiple of 16."""
    if platform.machine() != "x86_64" or sys.platform != "linux" or sys.maxsize < 2**32:
        return ctypes.memmove
    try:
        return _load(_CODE)
    except OSError as error:  # a hardened kernel lets nobody make code
        _log.warning("large copies go through the caches (%s): about twice the processor time", error)
        return ctypes.memmove


def _load(code: bytes) -> _Copy:
    """Return the function that ``code`` is, in a page of its own that nobody can write. Raises OSError."""
    page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    page.write(code)
    first = ctypes.c_char.from_buffer(page)  # lifetime: while it is alive the page cannot be unmapped
    address = ctypes.addressof(first)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if libc.mprotect(address, mmap.PAGESIZE, _PROT_READ_EXEC):
        raise OSError(ctypes.get_errno(), "mprotect refused to make a page executable")
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(address)

    def copy(target: int, source: int, nbytes: int) -> None:
        assert first is not None
        function(target, source, nbytes)

    return copy

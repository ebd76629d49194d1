"""Memory of the kernel: private with huge pages, which children of a fork do not inherit; and the pages of a file."""

from __future__ import annotations

import ctypes
import functools
import os
import weakref

from tiered.bytes.exit_and_fork import Process, this_process
from tiered.units import MiB, round_up

__all__ = ["DONTNEED", "HUGE_PAGE_NBYTES", "MemoryMapping", "advise", "array_type", "map_file"]

HUGE_PAGE_NBYTES = 2 * MiB

# <sys/mman.h> and <asm-generic/mman-common.h> on Linux
DONTNEED = 4
_DONTFORK, _HUGEPAGE, _DONTDUMP = 10, 14, 16
_PROT_READ_WRITE = 0x3
_MAP_PRIVATE_ANONYMOUS_NORESERVE = 0x02 | 0x20 | 0x4000
_MAP_SHARED = 0x01
_MAP_FAILED = ctypes.c_void_p(-1).value


class MemoryMapping:
    """A private anonymous mapping with huge pages, which children of a fork do not inherit.

    It ends by ``unmap``, or with the last view of ``memory`` and the last object that refers to its ``obj``.
    """

    __slots__ = ("_end", "memory", "start")

    def __init__(self, address: int, nbytes: int, start: int, usable_nbytes: int) -> None:
        self.start = start  # multiple of a huge page
        array = array_type(usable_nbytes).from_address(start)
        self.memory = memoryview(array).cast("B")
        self._end = weakref.finalize(array, _unmap, address, nbytes, this_process())
        self._end.atexit = False  # the process's end is theirs, too

    @classmethod
    def create(cls, nbytes: int) -> MemoryMapping | None:
        """Map ``nbytes`` at a multiple of a huge page, or return None when the kernel refuses."""
        # Rounding up to a huge page leaves at least a small page of the extra one behind the usable range: a gap that
        # keeps the ranges of two mappings from ever being neighbours.
        total = nbytes + HUGE_PAGE_NBYTES
        address = _libc().mmap(None, total, _PROT_READ_WRITE, _MAP_PRIVATE_ANONYMOUS_NORESERVE, -1, 0)
        if address == _MAP_FAILED:
            return None
        # Order: all advice before the first touch. DONTFORK also keeps a fork from moving pages under running I/O.
        advise(address, total, _HUGEPAGE)
        advise(address, total, _DONTFORK)
        advise(address, total, _DONTDUMP)
        return cls(address, total, round_up(address, HUGE_PAGE_NBYTES), nbytes)

    def unmap(self) -> None:
        """Give memory and addresses back to the kernel; nothing may use them any more."""
        self.memory.release()
        _kept.pop(self.start, None)
        self._end()

    def keep(self) -> None:
        """Have the addresses stay mapped until ``unmap``, or for good, whatever becomes of the views."""
        _kept[self.start] = self.memory.obj


_kept: dict[int, object] = {}


def map_file(fd: int, nbytes: int) -> memoryview:
    """Return the first ``nbytes`` of the file open as ``fd`` as memory; it is unmapped with the last view of it.

    The descriptor may be closed then. Raises OSError.
    """
    address = _libc().mmap(None, nbytes, _PROT_READ_WRITE, _MAP_SHARED, fd, 0)
    if address == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    array = array_type(nbytes).from_address(address)
    weakref.finalize(array, _unmap, address, nbytes, this_process()).atexit = False  # the process's end is theirs, too
    return memoryview(array).cast("B")


def _unmap(address: int, nbytes: int, process: Process) -> None:
    if process.is_here:  # a forked child has no such mapping, and may use its addresses for something else
        _libc().munmap(address, nbytes)


@functools.lru_cache(maxsize=4096)  # a ctypes array type costs 20 us to make, and each size needs its own
def array_type(nbytes: int) -> type[ctypes.Array[ctypes.c_uint8]]:
    """Return the type of ``nbytes`` bytes."""
    return ctypes.c_uint8 * nbytes


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


def advise(address: int, nbytes: int, advice: int) -> None:
    """Tell the kernel how the memory is used."""
    _libc().madvise(address, nbytes, advice)  # only ever a hint, except DONTNEED, which cannot fail on our own pages

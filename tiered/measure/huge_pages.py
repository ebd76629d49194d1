"""Huge pages that the kernel lends to whoever may ask for some, and memory made of them: for fio, and for what runs
beside it in the same memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path

from tiered.units import MiB, round_up

__all__ = ["HUGE_PAGE_NBYTES", "NR_HUGEPAGES", "LentPages", "RepeatedMemory"]

HUGE_PAGE_NBYTES = 2 * MiB
NR_HUGEPAGES = Path("/proc/sys/vm/nr_hugepages")
_PAUSES_S = (0.005, 0.02, 0.1, 0.4)  # after ENOMEM
_LOCK_S = 10.0  # for how long another process may hold the setting; measured: 0.1 ms

# <sys/mman.h> and <linux/memfd.h>
_MAP_FIXED, _MAP_NORESERVE, _MAP_POPULATE = 0x10, 0x4000, 0x8000
_MAP_FAILED = ctypes.c_void_p(-1).value
_MADV_DONTFORK = 10
_HUGE_2MB = 21 << 26


class LentPages:
    """So many huge pages more in the kernel's pool, from ``lend`` until ``restore``.

    What is given back is what was added, and the setting is changed under a lock on its file, so that two of us at a
    time do not put back each other's pages.
    """

    def __init__(self, num_pages: int, setting: Path = NR_HUGEPAGES) -> None:
        self._num_pages = num_pages
        self._setting = setting
        self._num_added = 0
        self._is_locked = False

    def lend(self) -> bool:
        """Add the pages; whether all are there: not where we may not, or the kernel finds too few. Raises nothing."""
        try:
            with self._lock():
                before = int(self._setting.read_text())
                self._num_added = self._num_pages  # order: known before the setting changes, for whoever interrupts us
                self._setting.write_text(f"{before + self._num_pages}\n")
                self._num_added = max(0, int(self._setting.read_text()) - before)
        except (OSError, ValueError):
            self._num_added = 0
        except BaseException:  # a signal's: nobody knows of them yet, so nobody will give them back
            self.restore()
            raise
        return self._num_added >= self._num_pages

    def restore(self) -> None:
        """Give the pages back; those in use are gone when they no longer are. Idempotent; never raises."""
        num_added, self._num_added = self._num_added, 0
        if num_added:
            with contextlib.suppress(OSError, ValueError), self._lock():
                self._setting.write_text(f"{max(0, int(self._setting.read_text()) - num_added)}\n")

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Keep others away from the setting for a while. Raises OSError where there is none.

        Who restores from a signal handler that interrupted us while we held the lock goes on under it.
        """
        if self._is_locked:
            yield
            return
        with self._setting.open("rb") as file:
            deadline_s = time.monotonic() + _LOCK_S
            while time.monotonic() < deadline_s:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(0.001)
            self._is_locked = True
            try:
                yield
            finally:
                self._is_locked = False


class RepeatedMemory:
    """``nbytes`` of addresses over ``period`` bytes of huge pages, mapped again and again: byte i is byte i + period.

    What is moved through it in order stays in the processor's caches as what is moved through ``period`` bytes does.
    The pages come from the kernel's pool (LentPages), and a child of a fork has none of it.
    """

    def __init__(self, period: int, nbytes: int) -> None:
        """``period`` is a multiple of a huge page. Blocks for up to half a second while the pool has too few.

        Raises ValueError, OSError: ENOMEM where it still has.
        """
        if period < 1 or period % HUGE_PAGE_NBYTES:
            raise ValueError(f"period must be a multiple of {HUGE_PAGE_NBYTES} bytes, got {period}")
        self._nbytes = round_up(nbytes, HUGE_PAGE_NBYTES) + HUGE_PAGE_NBYTES  # to begin at a multiple of one
        self._address: int | None = None
        self.memory = memoryview(b"")  # shape (nbytes,), uint8; empty once it is closed
        fd = os.memfd_create("tiered-repeated", os.MFD_CLOEXEC | os.MFD_HUGETLB | _HUGE_2MB)
        try:
            os.ftruncate(fd, period)
            self._address = _map(None, self._nbytes, _MAP_NORESERVE | mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
            start = round_up(self._address, HUGE_PAGE_NBYTES)
            try:
                for place in range(start, start + nbytes, period):
                    left = round_up(start + nbytes - place, HUGE_PAGE_NBYTES)
                    _map_patiently(place, min(period, left), _MAP_FIXED | _MAP_POPULATE | mmap.MAP_SHARED, fd)
                _libc.madvise(self._address, self._nbytes, _MADV_DONTFORK)
            except BaseException:
                self.close()
                raise
        finally:
            os.close(fd)  # lifetime: the mappings hold the pages
        self.memory = memoryview((ctypes.c_uint8 * nbytes).from_address(start)).cast("B")

    def close(self) -> None:
        """Unmap it; nothing may be in flight. Idempotent."""
        address, self._address = self._address, None
        self.memory = memoryview(b"")
        if address is not None:
            _libc.munmap(address, self._nbytes)


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def _map_patiently(address: int, nbytes: int, flags: int, fd: int) -> int:
    """Map once there is memory: a closed ring has what was registered with it for a little longer, huge pages too."""
    for pause_s in _PAUSES_S:
        try:
            return _map(address, nbytes, flags, fd)
        except OSError as error:
            if error.errno != errno.ENOMEM:
                raise
            time.sleep(pause_s)
    return _map(address, nbytes, flags, fd)


def _map(address: int | None, nbytes: int, flags: int, fd: int) -> int:
    found = _libc.mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
    if found == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(found)

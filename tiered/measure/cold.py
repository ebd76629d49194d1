"""Proof that reads came from the drive: the pages of the file in the page cache, and the kernel's counts.

A cache inside the drive, or the one of a host below a virtual machine, cannot be seen from here, and is not ruled out.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tiered.measure.rounds import Round
from tiered.units import divide_up

__all__ = ["ColdProof", "disk_read_nbytes", "forget", "process_read_nbytes", "prove_cold", "resident_pages"]

_SECTOR_NBYTES = 512  # of /sys/block/*/stat, on any drive
_AGREES = 0.02  # the share by which the kernel's count may differ


@dataclass(frozen=True, slots=True)
class ColdProof:
    """The kernel's counts around one round of reads."""

    is_direct: bool
    nbytes: int  # that the round read
    num_pages: int  # of the file
    num_resident_pages: int | None  # after the round; None: not known
    process_nbytes: int | None  # the kernel's count for this process
    disk_nbytes: int | None  # the kernel's count for the disks below: others may have read too

    @property
    def is_cold(self) -> bool:
        """Whether the drive was made to read all of it, and direct I/O left nothing in the page cache."""
        counts = [count for count in (self.process_nbytes, self.disk_nbytes) if count is not None]
        return (
            (not self.is_direct or self.num_resident_pages in (0, None))
            and bool(counts)
            and all(count >= (1 - _AGREES) * self.nbytes for count in counts)
        )

    def __str__(self) -> str:
        gb = self.nbytes / 1e9
        seen = [
            "direct I/O" if self.is_direct else "buffered I/O",
            f"{_said(self.num_resident_pages)} of {self.num_pages:,} pages in the page cache afterwards",
            f"{gb:.2f} GB read, the kernel counted {_gb(self.process_nbytes)} for this process "
            f"and {_gb(self.disk_nbytes)} for the disk",
        ]
        return f"{'reads were cold' if self.is_cold else 'it is not shown that reads were cold'}: {', '.join(seen)}"


def prove_cold(
    read: Callable[[], Round], *, path: str, nbytes: int, is_direct: bool, disks: tuple[str, ...]
) -> ColdProof:
    """Run ``read``, a round of reads over the file at ``path`` of ``nbytes``, and return the counts around it."""
    process, disk = process_read_nbytes(), disk_read_nbytes(disks)
    moved = read().read_nbytes
    process_after, disk_after = process_read_nbytes(), disk_read_nbytes(disks)
    return ColdProof(
        is_direct=is_direct,
        nbytes=moved,
        num_pages=divide_up(nbytes, mmap.PAGESIZE),
        num_resident_pages=resident_pages(path, nbytes),
        process_nbytes=None if process is None or process_after is None else process_after - process,
        disk_nbytes=None if disk is None or disk_after is None else disk_after - disk,
    )


def forget(path: str) -> None:
    """Write the file's dirty pages back to the drive, and drop its pages from the cache; blocks. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fdatasync(fd)  # order: only clean pages are dropped
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def process_read_nbytes() -> int | None:
    """Return the bytes that storage was made to read for this process; None where the kernel does not tell."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))
    except (OSError, StopIteration):
        return None


def disk_read_nbytes(disks: tuple[str, ...], place: Path = Path("/sys/class/block")) -> int | None:
    """Return the bytes read from all of ``disks`` since they came up; None where that is not readable."""
    try:
        sectors = [int((place / disk / "stat").read_text().split()[2]) for disk in disks]
    except (OSError, IndexError, ValueError):
        return None
    return sum(sectors) * _SECTOR_NBYTES if sectors else None


def resident_pages(path: str, nbytes: int) -> int | None:
    """Return how many pages of the file the page cache holds; None where mincore does not say."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # mmap's own object has no address to give to mincore without being writeable.
        address = libc.mmap(None, nbytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
        if address == ctypes.c_void_p(-1).value:
            return None
        try:
            found = ctypes.create_string_buffer(divide_up(nbytes, mmap.PAGESIZE))
            if libc.mincore(address, nbytes, found) != 0:
                return None
            return sum(state & 1 for state in found.raw[: divide_up(nbytes, mmap.PAGESIZE)])
        finally:
            libc.munmap(address, nbytes)
    finally:
        os.close(fd)


def _said(count: int | None) -> str:
    return "not readable" if count is None else f"{count:,}"


def _gb(nbytes: int | None) -> str:
    return "(not readable)" if nbytes is None else f"{nbytes / 1e9:.2f} GB"

"""The engine for data that is read again and again: reads come out of the page cache through mapped windows.

A read maps its range, lets the kernel read all of it at once (MADV_POPULATE_READ) and copies it by a system call. Where
the file was cut off meanwhile, the system call reports an error, and a copy by the processor would die of SIGBUS.
Writes are ordinary buffered ones. Cold reads are slower than direct I/O (2.6 against 3.5 GB/s).
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os

import numpy as np

from tiered.bytes.device.file_device import Place
from tiered.bytes.device.threads import ThreadsDevice
from tiered.errors import UsageError
from tiered.units import MiB

__all__ = ["MmapDevice"]

_MADV_POPULATE_READ = 22  # <asm-generic/mman-common.h>, Linux 5.14
_WINDOW_NBYTES = 16 * MiB  # at most so much is mapped for one read at a time; the rest follows
_UNKNOWN = {errno.EINVAL, errno.ENODEV, errno.ENOSYS, errno.EPERM}
_log = logging.getLogger("tiered")


class _Vector(ctypes.Structure):
    """struct iovec of <sys/uio.h>."""

    _fields_ = (("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


class MmapDevice(ThreadsDevice):
    """Numbered files read through mappings and written through the page cache, by ``num_threads`` threads.

    Where the mapping gives nothing (a range that cannot be populated, a kernel or a sandbox without these calls),
    preadv reads the bytes. Nothing stays mapped between two reads.
    """

    engine = "mmap"

    def __init__(
        self,
        place: Place,
        *,
        num_threads: int = 8,
        deadline_s: float = 60.0,
        direct: bool | None = None,
    ) -> None:
        """Open the files of ``place`` and start the threads; see FileDevice. UsageError for ``direct=True``."""
        if direct:
            raise UsageError('engine="mmap" reads through the page cache: direct=True takes "uring" or "threads"')
        self._is_mapping = True  # until the kernel refuses
        super().__init__(place, num_threads=num_threads, deadline_s=deadline_s, direct=False)

    def _pread(self, fd: int, memory: memoryview, offset: int) -> int:
        moved = self._copy_mapped(fd, memory, offset) if self._is_mapping else 0
        return moved or super()._pread(fd, memory, offset)

    def _copy_mapped(self, fd: int, memory: memoryview, offset: int) -> int:
        """Copy bytes from ``offset`` on through a window over the file; return how many, 0 where it gives none."""
        skipped = offset % mmap.ALLOCATIONGRANULARITY
        nbytes = min(len(memory), _WINDOW_NBYTES, os.fstat(fd).st_size - offset)
        if nbytes <= 0:
            return 0
        try:
            with mmap.mmap(fd, skipped + nbytes, mmap.MAP_SHARED, mmap.PROT_READ, offset=offset - skipped) as window:
                window.madvise(_MADV_POPULATE_READ)
                return _copy(window, skipped, memory[:nbytes])
        except ValueError:  # the file has been cut off since
            return 0
        except OSError as error:
            if error.errno in _UNKNOWN:
                self._is_mapping = False
                _log.warning("%s: reads go through preadv, because the kernel refuses the mapped way: %s",
                             self.name, error.strerror)  # fmt: skip
            return 0  # EFAULT: not all of it is there to be read; preadv says how much, or why not


def _copy(window: mmap.mmap, start: int, memory: memoryview) -> int:
    """Copy len(memory) bytes of ``window`` from ``start`` on; return how many there were. Raises OSError."""
    source = np.frombuffer(window, dtype=np.uint8)  # (window,) for its address only
    target = np.frombuffer(memory, dtype=np.uint8)  # (nbytes,)
    here = _Vector(target.ctypes.data, len(memory))
    there = _Vector(source.ctypes.data + start, len(memory))
    del source, target  # order: a window that is still looked at cannot be closed
    moved = _process_vm_readv(os.getpid(), ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
    if moved < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(moved)


_process_vm_readv = ctypes.CDLL(None, use_errno=True).process_vm_readv
_process_vm_readv.restype = ctypes.c_ssize_t
_process_vm_readv.argtypes = (
    ctypes.c_int,
    ctypes.POINTER(_Vector),
    ctypes.c_ulong,
    ctypes.POINTER(_Vector),
    ctypes.c_ulong,
    ctypes.c_ulong,
)

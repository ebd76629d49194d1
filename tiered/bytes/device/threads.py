"""The engines that call the kernel in threads: preadv and pwritev on O_DIRECT files, aiofiles, and mapped windows.

The first works everywhere. Idle, it reaches what io_uring reaches; under a busy Python thread it falls behind. The one
of aiofiles works on any file system and kernel, and is slower: each operation crosses two threads and the page cache
(1.2 GB/s where direct I/O gave 3.5). The one of mapped windows is for data that is read again and again. A read maps
its range, lets the kernel read all of it at once (MADV_POPULATE_READ) and copies it by a system call. Where the file
was cut off meanwhile, the system call reports an error, and a copy by the processor would die of SIGBUS. Writes are
ordinary buffered ones. Cold reads are slower than direct I/O (2.6 against 3.5 GB/s).
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import logging
import mmap
import os
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor  # order: before any device, whose entry at the end must run first

import numpy as np
from aiofiles.os import wrap

from tiered.bytes.critical_section import ServiceThread
from tiered.bytes.device.file_device import FileDevice, Place
from tiered.bytes.device.queue import InFlight
from tiered.errors import UsageError
from tiered.units import MiB

__all__ = ["AiofilesDevice", "MmapDevice", "ThreadsDevice"]


_PAUSE_S = 0.001  # before a call that said "try again" is made again


class ThreadsDevice(FileDevice):
    """Numbered files served by ``num_threads`` threads, one operation each at a time.

    Subclasses may override ``_pread``, ``_pwrite`` and ``_fdatasync`` to inject faults.
    """

    engine = "threads"
    _has_work: threading.Condition  # over the device's lock

    def __init__(
        self,
        place: Place,
        *,
        num_threads: int = 8,
        deadline_s: float = 60.0,
        direct: bool | None = None,
    ) -> None:
        """Open the files of ``place`` and start the threads; see FileDevice for ``direct`` and errors."""
        self._num_threads = num_threads
        self._at_work: list[InFlight | None] = [None] * num_threads
        super().__init__(place, num_slots=num_threads, deadline_s=deadline_s, direct=direct)

    def _make_threads(self) -> Sequence[threading.Thread]:
        self._has_work = threading.Condition(self._lock)
        return [
            ServiceThread(target=self._serve, args=(index,), name=f"tiered-io-{index}")
            for index in range(self._num_threads)
        ]

    def _wake(self) -> None:
        with self._lock:  # not the condition's own "with", which Ctrl-C can leave with the lock held
            if self._is_closed:
                self._has_work.notify_all()
            else:
                self._has_work.notify()  # the thread that takes one wakes the next, while there is more

    def _running(self) -> Iterable[InFlight]:
        return [flight for flight in list(self._at_work) if flight is not None]

    def _serve(self, index: int) -> None:
        while (flight := self._take()) is not None:
            self._at_work[index] = flight
            try:
                self._carry_out(flight)
            except Exception as error:
                self._note_error(flight.operation, error)
            self._finish([flight])
            self._at_work[index] = None
            del flight  # lifetime: its memory and callback must not live until the next one comes

    def _take(self) -> InFlight | None:
        """Wait for an operation and return it; None when the device is closed and nothing is queued."""
        with self._has_work:
            while True:
                flight = self._queue.take(time.monotonic())
                if flight is not None and self._queue.num_queued:
                    self._has_work.notify()
                if flight is not None:
                    return flight
                if self._is_closed and not self._queue.num_queued:
                    self._has_work.notify_all()
                    return None
                self._has_work.wait()

    def _carry_out(self, flight: InFlight) -> None:
        """Move all bytes of ``flight``; short transfers go on where they stopped. Raises TieredError."""
        file = self._file_of(flight)
        operation = flight.operation
        transfer = self._pwrite if operation.is_write else self._pread
        is_complete = False
        while not is_complete:
            try:
                moved = transfer(file.fd, self._rest(flight), operation.offset + flight.moved)
            except OSError as error:
                flight.retry(error, self.deadline_s, self._describe(operation))
                time.sleep(_PAUSE_S)
                continue
            if moved == flight.nbytes:
                flight.moved = moved
                return
            is_complete = flight.advance(moved, self._granularity(), self._describe(operation))


# -- the engine of aiofiles --------------------------------------------------------------------------------------------


class AiofilesDevice(FileDevice):
    """Numbered files served by an event loop in a thread of its own, ``num_threads`` operations at a time.

    An operation is carried out by one task of the loop; callbacks run in the loop's thread. I/O is buffered; only
    ``direct=True`` asks for O_DIRECT.
    """

    engine = "aiofiles"

    def __init__(
        self,
        place: Place,
        *,
        num_threads: int = 8,
        deadline_s: float = 60.0,
        direct: bool | None = None,
    ) -> None:
        """Open the files of ``place`` and start the loop; see FileDevice for errors."""
        self._num_threads = num_threads
        self._end_lock = threading.Lock()  # guards the loop's end
        self._loop = asyncio.new_event_loop()
        self._has_work = asyncio.Event()  # the loop's thread alone uses it
        self._tasks: dict[asyncio.Task[None], InFlight] = {}
        try:
            super().__init__(place, num_slots=num_threads, deadline_s=deadline_s, direct=bool(direct))
        except BaseException:
            if not self._loop.is_running():
                self._loop.close()
            raise

    def close(self) -> None:
        """Complete queued operations, then end the loop and close files; see FileDevice."""
        super().close()
        if self._process.is_here:
            with self._end_lock:
                self._loop.close()

    def _make_threads(self) -> Sequence[threading.Thread]:
        return [ServiceThread(target=self._run, name="tiered-io-loop")]

    def _wake(self) -> None:
        with self._end_lock:  # order: never into a descriptor that was closed, and may be another file's by now
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._has_work.set)

    def _running(self) -> Iterable[InFlight]:
        return list(self._tasks.values())

    def _close_in_child(self) -> None:
        super()._close_in_child()
        for owner, name in ((self._loop, "_ssock"), (self._loop, "_csock"), (self._loop, "_selector")):
            part = getattr(owner, name, None)  # the loop's own close would write to what the parent reads
            if part is not None:
                part.close()

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        with ThreadPoolExecutor(self._num_threads, thread_name_prefix="tiered-io") as executor:
            while True:
                self._has_work.clear()  # order: before looking, so that nothing that comes now is missed
                with self._lock:
                    begun = list(iter(lambda: self._queue.take(time.monotonic()), None))
                    is_over = self._is_closed and not self._queue.num_queued
                for flight in begun:
                    task = self._loop.create_task(self._carry_out(flight, executor))
                    self._tasks[task] = flight
                    task.add_done_callback(self._end)
                if is_over and not self._tasks:
                    return
                begun.clear()  # lifetime: memory and callbacks must not live until the next ones come
                await self._has_work.wait()

    def _end(self, task: asyncio.Task[None]) -> None:
        flight = self._tasks.pop(task)
        error = task.exception()
        if error is not None:
            self._note_error(flight.operation, error)
        self._finish([flight])
        self._has_work.set()

    async def _carry_out(self, flight: InFlight, executor: ThreadPoolExecutor) -> None:
        """Move all bytes of ``flight``; short transfers go on where they stopped. Raises TieredError."""
        file = self._file_of(flight)
        operation = flight.operation
        transfer = wrap(self._pwrite if operation.is_write else self._pread)
        is_complete = False
        while not is_complete:
            try:
                moved = await transfer(file.fd, self._rest(flight), operation.offset + flight.moved, executor=executor)
            except OSError as error:
                flight.retry(error, self.deadline_s, self._describe(operation))
                await asyncio.sleep(_PAUSE_S)
                continue
            is_complete = flight.advance(moved, self._granularity(), self._describe(operation))


# -- the engine of mapped windows --------------------------------------------------------------------------------------


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

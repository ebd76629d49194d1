"""FileDevice: the shared part of all engines over numbered files: growing, queue, counters, forks, end.

The engines (threads.py, uring.py) move the bytes. files.py has the files of a directory, external_files.py files that
are only read, and direct_io.py finds out whether they take direct I/O.

CPython lets a busy thread keep the interpreter's lock for 5 ms. A drive moves 16 MiB in that time and would then idle.
Beside a busy thread, 8 blocks of 4 MiB in flight move at 0.75 of the idle rate with an interval of 5 ms, and at 0.95
with one of 1 ms. Two threads of pure Python that compete for the lock lose 6 % (bench/LOG.md).
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar, TypeVar

from tiered.bytes.critical_section import CRITICAL_SECTION
from tiered.bytes.device.base import Device, DeviceStatistics, Operation
from tiered.bytes.device.external_files import ExternalFiles
from tiered.bytes.device.files import DataFile, NumberedFiles, open_data_files
from tiered.bytes.device.queue import InFlight, IOQueue
from tiered.bytes.exit_and_fork import after_fork, at_exit, this_process
from tiered.errors import CapacityError, ClosedError, DeadlineError, DeviceError, TieredError, UsageError

__all__ = ["FileDevice", "Place", "ShortSwitchInterval"]


_DEFAULT_S = 0.005  # of CPython
_SHORT_S = 0.001


class ShortSwitchInterval:
    """Makes ``sys.setswitchinterval`` 1 ms in the whole process, from its construction to its ``end``. Thread-safe.

    The first instance shortens the default, and the last one restores it. An interval that the program has set
    itself, before or since, is kept.
    """

    __slots__ = ("_is_over",)

    def __init__(self) -> None:
        self._is_over = False
        _interval.begin()

    def end(self) -> None:
        """Restore the interval, unless other instances need it short. Idempotent."""
        if not self._is_over:
            self._is_over = True
            _interval.end()


class _Interval:
    """The process's interval and how many need it short."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_users = 0
        self._is_ours = False  # we have set it
        after_fork(self, _Interval._end_in_child)

    def begin(self) -> None:
        with self._lock:
            self._num_users += 1
            if not self._is_ours and sys.getswitchinterval() == _DEFAULT_S:
                sys.setswitchinterval(_SHORT_S)
                self._is_ours = True

    def end(self) -> None:
        with self._lock:
            self._num_users -= 1
            if not self._num_users:
                self._restore()

    def _restore(self) -> None:
        if self._is_ours and sys.getswitchinterval() == _SHORT_S:
            sys.setswitchinterval(_DEFAULT_S)
        self._is_ours = False

    def _end_in_child(self) -> None:
        """Start anew: a child serves no drive, and another thread of its parent may have held the lock."""
        self._lock = threading.Lock()
        self._num_users = 0
        self._restore()


_interval = _Interval()


# -- file device -------------------------------------------------------------------------------------------------------


Place = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""A directory, whose files a device reads and writes; or the paths of external files, which it only reads."""

_T = TypeVar("_T")
_log = logging.getLogger("tiered")


class FileDevice(Device):
    """Numbered files; the most urgent operation goes first, then in order of submission.

    An operation belongs to exactly one of: the queue, the engine (an InFlight), its submitter (``on_done`` was called).
    An engine takes from ``_queue`` under ``_lock``, moves the bytes without it, and gives back through ``_finish``.
    Its threads end by themselves once ``_is_closed`` is set and the queue is empty.
    """

    engine: ClassVar[str]  # its name in messages and in ``Store(engine=)``

    def __init__(self, place: Place, *, num_slots: int, deadline_s: float, direct: bool | None) -> None:
        """Open the files of ``place``, probe direct I/O there, start the engine's threads.

        ``place`` is a directory or, as a sequence, the paths of external files: regular files of any length, which are
        numbered from 0, never written, and followed through links. A read that contains the end of one gives zeros
        behind it; ``external`` knows more of them.

        ``direct=None`` takes direct I/O where it works and logs one warning where it does not; True insists on it,
        False asks for buffered I/O. Raises UsageError, DeviceError, CapacityError, ValueError.
        """
        if not deadline_s > 0 or num_slots < 1:
            raise ValueError(f"deadline_s and num_threads must be positive, got {deadline_s} and {num_slots}")
        self.deadline_s = deadline_s
        self._process = this_process()
        self._lock = threading.Lock()  # guards the queue, the counters and _is_closed
        self._queue = IOQueue(num_slots)
        self._is_closed = False
        self._read_bytes = self._write_bytes = 0
        self._num_reads = self._num_writes = self._num_flushes = 0
        self._step_nbytes = self._due_bytes = sys.maxsize
        self._on_written: Callable[[], None] = lambda: None
        self._files = self._open(place, direct)
        self.name = self._files.name
        self.alignment = self._files.alignment
        after_fork(self, _close_in_child)
        at_exit(self, _stop_at_exit)  # Order: before threads are joined: ours would wait for operations for ever
        self._threads: Sequence[threading.Thread] = ()
        self._switch_interval = ShortSwitchInterval()
        try:
            self._threads = self._make_threads()
            for thread in self._threads:
                self._start(thread)
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise

    @property
    def is_direct(self) -> bool:
        """Whether I/O bypasses the page cache; of external files, that of at least one does."""
        return self._files.is_direct

    @property
    def external(self) -> ExternalFiles:
        """The external files, which know their true lengths and whether they have changed.

        Raises UsageError where the device serves a directory, and ClosedError.
        """
        self._check_open()
        if not isinstance(self._files, ExternalFiles):
            raise UsageError(f"{self.name} is a directory of data files: only a device of external files has them")
        return self._files

    @property
    def _num_in_flight(self) -> int:
        """Operations that were submitted and not handed back; exact under the lock."""
        return self._queue.num_queued + self._queue.num_in_flight + self._queue.num_listed

    def files(self) -> dict[int, int]:
        """Return the number and size of each file; the size is rounded down to the alignment, an external one's up."""
        self._process.check(self.name)
        return {file: nbytes // self.alignment * self.alignment for file, nbytes in self._files.sizes().items()}

    def grow(self, file: int, nbytes: int) -> None:
        self._check_open()
        if nbytes % self.alignment:
            raise ValueError(f"{self.path(file)} cannot be {nbytes} bytes: not a multiple of {self.alignment}")
        with CRITICAL_SECTION.lock:
            self._files.grow(file, nbytes)

    def punch(self, file: int, start: int, end: int) -> bool:
        self._check_open()
        with CRITICAL_SECTION.lock:
            return self._files.punch(file, start, end)

    def fill(self, file: int, start: int, end: int) -> None:
        self._check_open()
        with CRITICAL_SECTION.lock:
            self._files.fill(file, start, end)

    def holes(self, file: int) -> list[tuple[int, int]]:
        self._check_open()
        with CRITICAL_SECTION.lock:
            return self._files.holes(file)

    def submit(self, operations: Sequence[Operation]) -> None:
        """Queue ``operations``. Does not block. Raises UsageError for a write to external files."""
        if self._is_closed:  # order: before the lock, which a forked child may find held for ever
            self._check_open()
        if self._files.is_external and any(operation.is_write for operation in operations):
            raise UsageError(f"{self.name}: external files are only read, and were to be written")
        self._hand_over(self._queue.put, operations)

    def flush(self) -> None:
        self._check_open()
        with CRITICAL_SECTION.lock:
            self._files.flush(self._fdatasync)
            with self._lock:
                self._num_flushes += 1

    def free_bytes(self) -> int:
        self._check_open()
        return self._files.free_bytes() // self.alignment * self.alignment

    def path(self, file: int) -> str:
        return self._files.path(file)

    def descriptor(self, file: int) -> int:
        """Return the descriptor of ``file``, for code that reads it past the device. Raises DeviceError."""
        self._check_open()
        found = self._files.get(file)
        if found is None:
            raise DeviceError(f"{self.path(file)} is not open: grow it first")
        return found.fd

    def statistics(self) -> DeviceStatistics:
        self._process.check(self.name)
        with CRITICAL_SECTION.lock, self._lock:
            return DeviceStatistics(
                read_bytes=self._read_bytes,
                write_bytes=self._write_bytes,
                num_reads=self._num_reads,
                num_writes=self._num_writes,
                num_flushes=self._num_flushes,
                num_in_flight=self._num_in_flight,
                file_bytes=sum(self._files.sizes().values()),
            )

    def watch_writes(self, nbytes: int, on_written: Callable[[], None]) -> None:
        """Have ``on_written()`` called each time that ``nbytes`` more were written; again replaces the first.

        It comes from any thread, under no lock of the device; it must be brief, and must not raise or block.
        """
        with CRITICAL_SECTION.lock, self._lock:
            self._on_written = on_written
            self._step_nbytes, self._due_bytes = nbytes, self._write_bytes + nbytes

    def close(self) -> None:
        """Complete queued operations, then end threads and close files. Idempotent; does nothing in a forked child.

        Raises DeadlineError when nothing completes for ``deadline_s``. Threads, descriptors and the memory in flight
        then stay as they are, and close may be called again.
        """
        if not self._process.is_here:
            return
        self._stop()
        stuck = self._wait_for_threads()
        if stuck is not None:
            raise DeadlineError(
                f"closing {self.name}: {stuck}, with {self._num_in_flight} operations outstanding; their buffers stay "
                f"in use until the drive answers; check it, then close again or end the process"
            )
        self._switch_interval.end()
        self._files.end(self.deadline_s)

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "open"
        mode = "direct" if self._files.is_direct else "buffered"
        return f"{type(self).__name__}({self.name}, {state}, {mode}, {self._num_in_flight} in flight)"

    # Below: the part of each engine

    @abstractmethod
    def _make_threads(self) -> Sequence[threading.Thread]:
        """Return the engine's threads, not started."""

    @abstractmethod
    def _wake(self) -> None:
        """Let the engine see that operations were queued, or that the device is closed. Called without the lock."""

    @abstractmethod
    def _running(self) -> Iterable[InFlight]:
        """Return the engine's present work, from any thread, for messages."""

    def _wait_until_ready(self) -> None:
        """Wait until the engine's threads can serve; raises the error that stopped them."""

    def _close_in_child(self) -> None:
        """Release the descriptors in a forked child, where there are no threads and nothing is served."""
        self._is_closed = True
        self._files.close()

    # Below: the system calls, for engines to choose and for tests to override

    def _pread(self, fd: int, memory: memoryview, offset: int) -> int:
        return os.preadv(fd, [memory], offset)

    def _pwrite(self, fd: int, memory: memoryview, offset: int) -> int:
        return os.pwritev(fd, [memory], offset)

    def _fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    # Below: for the engines to call

    def _hand_over(self, put: Callable[[_T], None], operations: _T) -> None:
        """Have ``put``, of the queue, take ``operations``, and the engine see them. Raises ClosedError."""
        with CRITICAL_SECTION.lock:
            try:
                with self._lock:
                    if self._is_closed:
                        raise ClosedError(f"{self.name} is closed")
                    put(operations)
            finally:  # order: an exception after the queue has them must not leave them unseen
                self._wake()

    def _file_of(self, flight: InFlight) -> DataFile:
        """Return the file that ``flight`` moves bytes of; raises DeviceError when it does not reach so far."""
        file = self._files.get(flight.operation.file)
        if file is None:
            raise self._beyond_end(flight, 0)
        if not 0 <= flight.offset <= file.nbytes - flight.nbytes:
            self._pass_end(flight, file.nbytes)
        return file

    def _pass_end(self, flight: InFlight, end: int) -> None:
        """Let ``flight`` give zeros behind ``end`` of an external file, where it begins before; else DeviceError."""
        if not (self._files.is_external and 0 <= flight.offset < end):
            raise self._beyond_end(flight, end)
        flight.padding = flight.offset + flight.nbytes - end

    def _beyond_end(self, flight: InFlight, end: int) -> DeviceError:
        return DeviceError(f"{self._describe(flight.operation)} failed: the file has {end} bytes")

    def _rest(self, flight: InFlight) -> memoryview:
        """Return the memory that is moved next in one go."""
        most = self._queue.most_nbytes(flight, time.monotonic())
        memory = flight.operation.memory
        return memory[flight.moved : flight.moved + most] if flight.moved or most < flight.nbytes else memory

    def _note_error(self, operation: Operation, error: BaseException) -> None:
        """Let ``operation`` end with ``error``; a bug of the submitter, such as released memory, is its error, too."""
        operation.error = error if isinstance(error, TieredError) else None
        if operation.error is None:
            operation.error = DeviceError(f"{self._describe(operation)} failed: {error!r}")
            operation.error.__cause__ = error

    def _granularity(self) -> int:
        """Return the multiple of bytes that a short transfer goes on at: direct I/O needs aligned offsets."""
        return self.alignment if self._files.is_direct else 1

    def _finish(self, flights: Sequence[InFlight]) -> None:
        """Count ``flights``, whose operations say how they ended, and hand them back to their submitters."""
        if not flights:
            return
        read_bytes = write_bytes = num_reads = num_writes = 0
        marked: int | None = None
        for flight in flights:
            operation = flight.operation
            if operation.is_write:
                if operation.file != marked:  # order: before on_done; a flush during the write has not covered it
                    marked = operation.file
                    self._files.mark(marked)
                write_bytes += flight.moved
                num_writes += operation.error is None
            else:
                if flight.padding:
                    self._pad(flight)
                read_bytes += flight.moved
                num_reads += operation.error is None
        now = time.monotonic()
        with self._lock:
            self._queue.done(flights, now)
            self._read_bytes += read_bytes
            self._write_bytes += write_bytes
            self._num_reads += num_reads
            self._num_writes += num_writes
            is_due = self._write_bytes >= self._due_bytes
            if is_due:
                self._due_bytes = self._write_bytes + self._step_nbytes
        if is_due:
            self._on_written()
        for flight in flights:
            operation = flight.operation
            flight.pinned = None  # lifetime: the submitter may release the memory from now on
            try:
                operation.on_done(operation)
            except BaseException:  # ours or the store's bug, SystemExit too; this thread still has others to serve
                _log.exception("the completion of %s raised", self._describe(operation))

    def _pad(self, flight: InFlight) -> None:
        """Put zeros behind the end of the file, where a drive may have left other bytes of its last block."""
        operation = flight.operation
        if operation.error is None:
            try:
                operation.memory[-flight.padding :] = bytes(flight.padding)
            except ValueError as error:
                self._note_error(operation, error)
            flight.moved -= flight.padding

    def _describe(self, operation: Operation) -> str:
        verb = "write" if operation.is_write else "read"
        try:
            nbytes = str(len(operation.memory))
        except ValueError:  # a message about memory that was released too early must not fail for that reason
            nbytes = "released"
        return f"{verb} of {nbytes} bytes at offset {operation.offset} of {self.path(operation.file)}"

    # Below: the end

    def _stop(self) -> None:
        """Refuse new operations; threads end once the queue is empty."""
        with self._lock:
            self._is_closed = True
        self._wake()

    def _wait_for_threads(self) -> str | None:
        """Wait for all threads; when nothing completes for ``deadline_s``, return the operation they are stuck in."""
        give_up, num_left = time.monotonic() + self.deadline_s, self._num_in_flight
        for thread in self._threads:
            while thread.ident is not None and thread.is_alive():
                thread.join(max(0.0, give_up - time.monotonic()))
                if self._num_in_flight < num_left:
                    give_up, num_left = time.monotonic() + self.deadline_s, self._num_in_flight
                elif thread.is_alive() and time.monotonic() >= give_up:
                    return self._oldest_running()
        return None

    def _oldest_running(self) -> str:
        oldest = min(self._running(), key=lambda flight: flight.start, default=None)
        if oldest is None:
            return "a thread does not end"
        return f"{self._describe(oldest.operation)} has been running for {time.monotonic() - oldest.start:.1f} s"

    # Below: opening and checks

    def _open(self, place: Place, direct: bool | None) -> NumberedFiles:
        if isinstance(place, str | os.PathLike):
            return open_data_files(os.fspath(place), direct, self._pread, self._pwrite)
        return ExternalFiles(place, direct, self._pread)

    def _start(self, thread: threading.Thread) -> None:
        try:
            thread.start()
        except CapacityError as error:
            raise DeviceError(f"{self.name} has no I/O thread: {error}") from error

    def _check_open(self) -> None:
        self._process.check(self.name)
        if self._is_closed:
            raise ClosedError(f"{self.name} is closed")


def _close_in_child(device: FileDevice) -> None:
    device._close_in_child()


def _stop_at_exit(device: FileDevice) -> None:
    """Complete queued operations of a device that was never closed, at the end of the process.

    Should the drive not answer, the interpreter would wait for our threads for ever, before any ``atexit`` function:
    past the deadline the process ends here and now, and says why.
    """
    if not device._process.is_here:
        return
    device._stop()
    stuck = device._wait_for_threads()
    if stuck is not None:
        _log.critical("the process ends without waiting any longer for %s: %s", device.name, stuck)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(os.EX_IOERR)

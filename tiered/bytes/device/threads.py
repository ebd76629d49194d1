"""The portable engine: a few threads that call preadv and pwritev on O_DIRECT files.

Idle, it reaches what io_uring reaches; under a busy Python thread it falls behind. How files are laid out in the
directory is in files.py, whether the directory takes direct I/O in direct.py.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import logging
import os
import queue
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence

from tiered.bytes.device.base import Device, DeviceStatistics, IOClass, Operation
from tiered.bytes.device.direct import MIN_ALIGNMENT, DirectProbe, probe_direct
from tiered.bytes.device.files import DataFile, DataFiles, translate
from tiered.errors import ClosedError, DeadlineError, DeviceError, TieredError, UsageError

__all__ = ["ThreadsDevice"]

_NUM_READ_RETRIES = 3  # after EIO
_log = logging.getLogger("tiered")


class ThreadsDevice(Device):
    """One directory served by ``num_threads`` threads, the most urgent operation first, then in order of submission.

    An operation belongs to exactly one of: a class's queue, a thread (``_running``), its submitter (``on_done`` was
    called). Subclasses may override ``_pread``, ``_pwrite`` and ``_fdatasync`` to inject faults.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        num_threads: int = 8,
        deadline_s: float = 60.0,
        direct: bool | None = None,
    ) -> None:
        """Open the files of ``directory``, probe direct I/O there, start the threads.

        ``direct=None`` takes direct I/O where it works and logs one warning where it does not; True insists on it,
        False asks for buffered I/O. Raises UsageError, DeviceError, CapacityError, ValueError.
        """
        if num_threads < 1 or not deadline_s > 0:
            raise ValueError(f"num_threads and deadline_s must be positive, got {num_threads} and {deadline_s}")
        self.name = os.fspath(directory)
        self.deadline_s = deadline_s
        self._pid = os.getpid()
        self._lock = threading.Lock()  # guards the counters, _is_closed and the order of queue and tokens
        self._is_closed = False
        self._read_bytes = self._write_bytes = 0
        self._num_reads = self._num_writes = self._num_flushes = self._num_in_flight = 0
        self._queues: tuple[deque[Operation], ...] = tuple(deque() for _ in IOClass)
        self._tokens: queue.SimpleQueue[bool] = queue.SimpleQueue()  # True: an operation is queued; False: stop
        self._running: list[tuple[Operation, float] | None] = [None] * num_threads  # and when each began
        self._files = self._open(direct)
        os.register_at_fork(after_in_child=functools.partial(_close_in_child, weakref.ref(self)))
        # Order: at the end of the process threads are joined before ``atexit`` functions run, and ours would wait for
        # tokens for ever. threading's own list runs first; concurrent.futures uses it for the same reason.
        register: Callable[..., object] = getattr(threading, "_register_atexit", atexit.register)
        register(_stop_at_exit, weakref.ref(self))
        self._threads = [
            threading.Thread(target=self._serve, args=(index,), name=f"tiered-io-{index}")
            for index in range(num_threads)
        ]
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:
            self.close()
            raise

    @property
    def is_direct(self) -> bool:
        """Whether I/O bypasses the page cache."""
        return self._is_direct

    def files(self) -> dict[int, int]:
        """Return the number and size of each file; the size is rounded down to the alignment."""
        self._check_process()
        return {file: nbytes // self.alignment * self.alignment for file, nbytes in self._files.sizes().items()}

    def grow(self, file: int, nbytes: int) -> None:
        """Make ``file`` at least ``nbytes`` long; blocks."""
        self._check_open()
        if nbytes % self.alignment:
            raise ValueError(f"{self.path(file)} cannot be {nbytes} bytes: not a multiple of {self.alignment}")
        self._files.grow(file, nbytes)

    def submit(self, operations: Sequence[Operation]) -> None:
        """Queue ``operations``. Does not block."""
        self._check_process()
        with self._lock:
            self._check_open()
            self._num_in_flight += len(operations)
            for operation in operations:
                # Order: operation before token, so whoever takes a token finds one; both before close's stop tokens.
                self._queues[operation.io_class].append(operation)
                self._tokens.put(True)

    def flush(self) -> None:
        """Make completed writes, growth and new files durable; blocks."""
        self._check_open()
        self._files.flush(self._fdatasync)
        with self._lock:
            self._num_flushes += 1

    def free_bytes(self) -> int:
        """Return how many more bytes ``grow`` could allocate."""
        self._check_open()
        return self._files.free_bytes() // self.alignment * self.alignment

    def path(self, file: int) -> str:
        """Return the path of ``file``."""
        return self._files.path(file)

    def statistics(self) -> DeviceStatistics:
        """Return the counters."""
        self._check_process()
        with self._lock:
            return DeviceStatistics(
                read_bytes=self._read_bytes,
                write_bytes=self._write_bytes,
                num_reads=self._num_reads,
                num_writes=self._num_writes,
                num_flushes=self._num_flushes,
                num_in_flight=self._num_in_flight,
                file_bytes=sum(self._files.sizes().values()),
            )

    def close(self) -> None:
        """Complete what is queued, then end threads and close files. Idempotent; nothing happens in a forked child.

        Raises DeadlineError when nothing completes for ``deadline_s``; then threads, descriptors and the memory of
        what is in flight stay as they are, and close may be called again.
        """
        if self._pid != os.getpid():
            return
        self._stop()
        stuck = self._wait_for_threads()
        if stuck is not None:
            raise DeadlineError(
                f"closing {self.name}: {stuck}, with {self._num_in_flight} operations outstanding; their buffers stay "
                f"in use until the drive answers; check it, then close again or end the process"
            )
        self._files.close()

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "open"
        mode = "direct" if self._is_direct else "buffered"
        return f"ThreadsDevice({self.name}, {state}, {mode}, {self._num_in_flight} in flight)"

    # Below: the system calls, for tests to override

    def _pread(self, fd: int, memory: memoryview, offset: int) -> int:
        return os.preadv(fd, [memory], offset)

    def _pwrite(self, fd: int, memory: memoryview, offset: int) -> int:
        return os.pwritev(fd, [memory], offset)

    def _fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    # Below: the threads

    def _serve(self, index: int) -> None:
        while self._tokens.get():
            operation = self._take()
            self._running[index] = (operation, time.monotonic())
            nbytes = 0
            try:
                nbytes = self._carry_out(operation)
            except TieredError as error:
                operation.error = error
            except Exception as error:  # a bug of the submitter, such as released memory: its error, not our end
                operation.error = DeviceError(f"{self._describe(operation)} failed: {error!r}")
                operation.error.__cause__ = error
            self._complete(operation, nbytes)
            self._running[index] = None
            del operation  # lifetime: its memory and callback must not live until the next one comes

    def _take(self) -> Operation:
        """Return the most urgent operation; there is one, because the caller holds a token."""
        while True:  # not found only if one went to another thread and a more urgent one came in behind our back
            for queue_ in self._queues:
                with contextlib.suppress(IndexError):
                    return queue_.popleft()

    def _carry_out(self, operation: Operation) -> int:
        """Move all bytes of ``operation`` and return how many; raises TieredError."""
        file = self._files.get(operation.file)
        end = operation.offset + len(operation.memory)
        if file is None or operation.offset < 0 or end > file.nbytes:
            raise DeviceError(f"{self._describe(operation)} failed: the file has {file.nbytes if file else 0} bytes")
        try:
            return self._move(operation, file)
        except OSError as error:
            raise translate(error, f"{self._describe(operation)} failed") from error
        finally:
            if operation.is_write:  # a failed write may have changed some bytes
                file.is_dirty = True

    def _move(self, operation: Operation, file: DataFile) -> int:
        """Read or write until all bytes have moved; short transfers go on where they stopped."""
        transfer = self._pwrite if operation.is_write else self._pread
        nbytes, done, num_retries = len(operation.memory), 0, 0
        give_up = time.monotonic() + self.deadline_s
        while done < nbytes:
            memory = operation.memory[done:] if done else operation.memory
            try:
                moved = transfer(file.fd, memory, operation.offset + done)
            except OSError as error:
                if error.errno in {errno.EAGAIN, errno.EINTR} and time.monotonic() < give_up:
                    continue
                if operation.is_write or error.errno != errno.EIO or num_retries == _NUM_READ_RETRIES:
                    raise
                num_retries += 1
                continue
            if self._is_direct and moved < nbytes - done:
                moved -= moved % self.alignment  # direct I/O goes on at an aligned offset only: the rest is redone
            if moved <= 0:
                raise DeviceError(f"{self._describe(operation)} failed: it stopped after {done} bytes")
            done += moved
        return nbytes

    def _complete(self, operation: Operation, nbytes: int) -> None:
        with self._lock:
            self._num_in_flight -= 1
            if operation.is_write:
                self._write_bytes += nbytes
                self._num_writes += not operation.error
            else:
                self._read_bytes += nbytes
                self._num_reads += not operation.error
        try:
            operation.on_done(operation)
        except Exception:  # ours or the store's bug; this thread still has others to serve
            _log.exception("the completion of %s raised", self._describe(operation))

    def _stop(self) -> None:
        """Refuse new operations; let each thread end once the queues are empty."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                for _ in self._running:
                    self._tokens.put(False)

    def _wait_for_threads(self) -> str | None:
        """Wait for all threads; when nothing completes for ``deadline_s``, return what they are stuck in."""
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
        running = [pair for pair in list(self._running) if pair is not None]
        if not running:
            return "a thread does not end"
        operation, start = min(running, key=lambda pair: pair[1])
        return f"{self._describe(operation)} has been running for {time.monotonic() - start:.1f} s"

    # Below: opening and checks

    def _open(self, direct: bool | None) -> DataFiles:
        try:
            descriptor = os.open(self.name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise translate(error, f"cannot open the directory {self.name}") from error
        try:
            probe = self._probe(descriptor, direct)
        except BaseException:
            os.close(descriptor)
            raise
        self.alignment = probe.alignment
        self._is_direct = probe.refusal is None
        return DataFiles(self.name, descriptor, flags=os.O_DIRECT if self._is_direct else 0)

    def _probe(self, descriptor: int, direct: bool | None) -> DirectProbe:
        if direct is False:
            return DirectProbe(MIN_ALIGNMENT, "buffered I/O was asked for")
        try:
            probe = probe_direct(descriptor, self._pread, self._pwrite)
        except OSError as error:
            raise translate(error, f"cannot do I/O in {self.name}") from error
        if probe.refusal is not None and direct:
            raise DeviceError(f"{self.name} has no direct I/O: {probe.refusal}; give direct=None to do without")
        if probe.refusal is not None:
            _log.warning(
                "%s: I/O is buffered, slower and takes page cache, because direct I/O does not work there: %s",
                self.name,
                probe.refusal,
            )
        return probe

    def _describe(self, operation: Operation) -> str:
        verb = "write" if operation.is_write else "read"
        try:
            nbytes = str(len(operation.memory))
        except ValueError:  # a message about memory that was released too early must not fail for that reason
            nbytes = "released"
        return f"{verb} of {nbytes} bytes at offset {operation.offset} of {self.path(operation.file)}"

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise UsageError(
                f"{self.name} was opened by process {self._pid} and cannot be used in its fork {os.getpid()}; "
                f"open a store of its own in this process"
            )

    def _check_open(self) -> None:
        self._check_process()
        if self._is_closed:
            raise ClosedError(f"{self.name} is closed")


def _close_in_child(reference: weakref.ref[ThreadsDevice]) -> None:
    device = reference()
    if device is not None:
        device._files.close()


def _stop_at_exit(reference: weakref.ref[ThreadsDevice]) -> None:
    """Complete what is queued: nobody closed the device, and the process is ending.

    Should the drive not answer, the interpreter would wait for our threads for ever, before any ``atexit`` function:
    past the deadline the process ends here and now, and says why.
    """
    device = reference()
    if device is None or device._pid != os.getpid():
        return
    device._stop()
    stuck = device._wait_for_threads()
    if stuck is not None:
        _log.critical("the process ends without waiting any longer for %s: %s", device.name, stuck)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(os.EX_IOERR)

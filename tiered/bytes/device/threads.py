"""The engine that works everywhere: a few threads that call preadv and pwritev on O_DIRECT files.

Idle, it reaches what io_uring reaches; under a busy Python thread it falls behind.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence

from tiered.bytes.critical_section import ServiceThread
from tiered.bytes.device.file_device import FileDevice, Place
from tiered.bytes.device.in_flight import InFlight
from tiered.errors import DeviceError, TieredError

__all__ = ["ThreadsDevice"]

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
        if num_threads < 1:
            raise ValueError(f"num_threads must be positive, got {num_threads}")
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
            except TieredError as error:
                flight.operation.error = error
            except Exception as error:  # a bug of the submitter, such as released memory: its error, not our end
                flight.operation.error = DeviceError(f"{self._describe(flight.operation)} failed: {error!r}")
                flight.operation.error.__cause__ = error
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
            most = self._queue.most_nbytes(flight, time.monotonic())
            memory = operation.memory
            if flight.moved or most < flight.nbytes:
                memory = memory[flight.moved : flight.moved + most]
            try:
                moved = transfer(file.fd, memory, operation.offset + flight.moved)
            except OSError as error:
                flight.retry(error, self.deadline_s, self._describe(operation))
                time.sleep(_PAUSE_S)
                continue
            if moved == flight.nbytes:
                flight.moved = moved
                return
            is_complete = flight.advance(moved, self._granularity(), self._describe(operation))

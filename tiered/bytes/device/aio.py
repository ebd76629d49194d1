"""The engine for any file system: buffered reads and writes through aiofiles' thread pool, under one event loop.

It works on any file system and kernel, and is slower than the other engines: each operation crosses two threads and
the page cache (1.2 GB/s where direct I/O gave 3.5).
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor  # order: before any device, whose entry at the end must run first

from aiofiles.os import wrap

from tiered.bytes.critical_section import ServiceThread
from tiered.bytes.device.file_device import FileDevice, Place
from tiered.bytes.device.in_flight import InFlight
from tiered.errors import DeviceError, TieredError

__all__ = ["AiofilesDevice"]

_PAUSE_S = 0.001  # before a call that said "try again" is made again


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
        if num_threads < 1:
            raise ValueError(f"num_threads must be positive, got {num_threads}")
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
        if self._pid == os.getpid():
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
        if isinstance(error, TieredError):
            flight.operation.error = error
        elif error is not None:  # a bug of the submitter, such as released memory: its error, not our end
            flight.operation.error = DeviceError(f"{self._describe(flight.operation)} failed: {error!r}")
            flight.operation.error.__cause__ = error
        self._finish([flight])
        self._has_work.set()

    async def _carry_out(self, flight: InFlight, executor: ThreadPoolExecutor) -> None:
        """Move all bytes of ``flight``; short transfers go on where they stopped. Raises TieredError."""
        file = self._file_of(flight)
        operation = flight.operation
        transfer = wrap(self._pwrite if operation.is_write else self._pread)
        is_complete = False
        while not is_complete:
            most = self._queue.most_nbytes(flight, time.monotonic())
            memory = operation.memory
            if flight.moved or most < flight.nbytes:
                memory = memory[flight.moved : flight.moved + most]
            try:
                moved = await transfer(file.fd, memory, operation.offset + flight.moved, executor=executor)
            except OSError as error:
                flight.retry(error, self.deadline_s, self._describe(operation))
                await asyncio.sleep(_PAUSE_S)
                continue
            is_complete = flight.advance(moved, self._granularity(), self._describe(operation))

"""Window: bytes moved past the working set through a few buffers, several movements in flight, finished in order.

The jobs know which bytes move: blocks of large records (streaming.py, rows), or many small records at a time
(batches.py).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from tiered.bytes.arena import Buffer
from tiered.bytes.device.base import Device, IOClass, OperationList
from tiered.bytes.interrupt import INTERRUPTS
from tiered.errors import TieredError
from tiered.store.format.places import Places
from tiered.store.residency.residency import Residency
from tiered.store.transfers.checked_transfer import Transfer
from tiered.store.waiting.deadline import Deadline

__all__ = ["NUM_IN_FLIGHT", "Batch", "Movement", "OnDone", "Window", "WindowJob"]

NUM_IN_FLIGHT = 3
"""Movements of at most 4 MiB that keep one drive busy. It may complete all that it has at once: with more of them the
caller would have nothing to look at while the drive works, and then too much."""


OnDone = Callable[[Any], None]
"""The callback of a movement, which takes the movement once it is done."""


class Batch:
    """Operations that are done together; a Movement. ``error`` is one that an operation ended with; no digests."""

    __slots__ = ("_lists", "_lock", "_num_left", "_on_done", "error", "is_done", "is_write")

    def __init__(
        self, devices: Sequence[Device], places: Places, memory: memoryview, io_class: IOClass, on_done: OnDone
    ) -> None:
        """Each of ``places`` is aligned, and begins at its ``start`` in ``memory``."""
        self.error: Exception | None = None
        self.is_done = False  # for the window, which sets it under the store's lock
        self.is_write = is_write = io_class is IOClass.WRITE
        self._on_done = on_done
        self._lock = threading.Lock()
        self._lists: list[tuple[Device, OperationList]] = []
        for index in range(len(devices)) if len(places.start) else ():
            some = places if len(devices) == 1 else places.take(places.device == index)
            if len(some.start):
                start, _, file, offset, nbytes = some
                operations = OperationList(
                    is_write=is_write, file=file, offset=offset, nbytes=nbytes, start=start, memory=memory,
                    io_class=io_class, on_done=self._list_done,
                )  # fmt: skip
                self._lists.append((devices[index], operations))
        self._num_left = len(self._lists)

    def start(self) -> None:
        """Submit everything."""
        lists, self._lists = self._lists, []  # lifetime: each refers to this batch
        for device, operations in lists:
            try:
                device.submit_list(operations)
            except (TieredError, OSError, ValueError) as error:  # none of them was started
                operations.error = error
                self._list_done(operations)
        if not lists:
            self._on_done(self)

    def _list_done(self, operations: OperationList) -> None:
        with self._lock:
            self.error = self.error or operations.error
            self._num_left -= 1
            is_last = not self._num_left
        if is_last:
            self._on_done(self)


Movement = Transfer | Batch
"""A transfer in flight. ``start`` raises interrupts only; ``on_done`` is called once all the same, from any thread."""


class WindowJob(NamedTuple):
    """One use of one buffer.

    ``movements(buffer, on_done)`` runs in the window's caller, without the store's lock. The iterator fills the buffer
    and yields a movement to be started; it goes on once that movement is done, uses the moved bytes, and may yield the
    next movement in the same buffer. An exception of the iterator ends the window.
    """

    nbytes: int  # of the buffer
    what: str  # for messages about waiting
    movements: Callable[[Buffer, OnDone], Iterator[Movement]]


class Window:
    """Jobs with at most an eighth of the budget in flight (but one buffer). The caller's thread does all but the I/O.

    As much again may have arrived and wait to be used: the next movements start first. In any case a buffer goes back
    to the arena only when nothing is in flight on it. Entered once, ``run`` once in the block.
    """

    def __init__(self, working_set: Residency) -> None:
        self.at_end: Callable[[Window], object] = _nothing  # after the block and all movements; under the store's lock
        self.has_failed = False  # a write has
        self._working_set = working_set
        self._flying: deque[tuple[WindowJob, Iterator[Movement], Movement]] = deque()  # oldest first
        self._buffers: dict[Movement, Buffer] = {}
        self._idle: list[Buffer] = []
        self._num_done = 0
        self._num_moving = 0
        self._moving_nbytes = 0
        self._has_ended = False

    def __enter__(self) -> Window:
        return self

    def __exit__(self, *_: object) -> None:
        """Give the buffers back: now where the movement is done, else when its completion arrives."""
        self._give_idle_back()
        with self._working_set.condition:
            self._has_ended = True
            for movement in [movement for movement in self._buffers if movement.is_done]:
                self._working_set.unreserve(self._buffers.pop(movement))
            if not self._buffers:
                self.at_end(self)

    def run(self, jobs: Iterable[WindowJob], first: Buffer | None = None) -> None:
        """Carry out ``jobs``; the first exception of one of them ends it.

        ``first``, reserved by the caller, becomes the window's: jobs that fit in it never wait for memory.
        """
        if first is not None:
            self._idle.append(first)
        for job in jobs:
            INTERRUPTS.look()
            self._idle.append(self._next_buffer(job.nbytes))
            movements = job.movements(self._idle[-1], self._done)
            self._start(job, movements, next(movements), self._idle.pop())
        self.drain()

    def drain(self) -> None:
        """Finish everything that is in flight, and keep no buffer: for jobs that wait for something else."""
        while self._flying:
            self._finish_oldest()
        self._give_idle_back()

    def _give_idle_back(self) -> None:
        while self._idle:
            self._working_set.unreserve(self._idle.pop())

    def _start(self, job: WindowJob, movements: Iterator[Movement], movement: Movement, buffer: Buffer) -> None:
        self._flying.append((job, movements, movement))
        with self._working_set.condition:
            self._buffers[movement] = buffer
            self._num_moving += 1
            self._moving_nbytes += buffer.nbytes
        movement.start()

    def _next_buffer(self, nbytes: int) -> Buffer:
        """Return a buffer of at least ``nbytes``; waits for the oldest movement when the window is full."""
        working_set = self._working_set
        while True:
            while self._idle:
                buffer = self._idle.pop()
                if buffer.nbytes >= nbytes:
                    return buffer
                working_set.unreserve(buffer)
            if not self._flying:
                return working_set.reserve(nbytes)
            extra = self._extra_buffer(nbytes)
            if extra is not None:
                return extra
            if self._flying[0][2].is_done:
                self._finish_oldest()
            else:
                self._wait_for_oldest()

    def _extra_buffer(self, nbytes: int) -> Buffer | None:
        """Return a buffer for one more movement, if one more may be in flight."""
        working_set = self._working_set
        most = NUM_IN_FLIGHT * len(self._working_set.space.devices)
        if self._num_moving >= most or self._moving_nbytes + nbytes > working_set.budget_bytes // 8:
            return None
        held = sum(buffer.nbytes for buffer in self._buffers.values())
        if len(self._flying) >= 2 * most or held + nbytes > working_set.budget_bytes // 4:
            return None
        return working_set.reserve_nowait(nbytes)

    def _wait_for_oldest(self) -> None:
        job, _, movement = self._flying[0]
        deadline = Deadline(job.what, self._working_set.deadline_s)
        with self._working_set.condition:
            while not movement.is_done:
                deadline.wait(self._working_set.condition, self._num_done)

    def _finish_oldest(self) -> None:
        """Wait for the oldest movement; its buffer is idle then, or on the way with the job's next one."""
        self._wait_for_oldest()
        job, movements, movement = self._flying.popleft()
        following = next(movements, None)
        with self._working_set.condition:
            buffer = self._buffers.pop(movement)
        if following is None:
            self._idle.append(buffer)
        else:
            self._start(job, movements, following, buffer)

    def _done(self, movement: Movement) -> None:
        with self._working_set.condition:
            movement.is_done = True
            self._num_done += 1
            self._num_moving -= 1
            self._moving_nbytes -= self._buffers[movement].nbytes
            self.has_failed = self.has_failed or (movement.is_write and movement.error is not None)
            if self._has_ended:
                self._working_set.unreserve(self._buffers.pop(movement))
                if not self._buffers:
                    self.at_end(self)
            self._working_set.condition.notify_all()


def _nothing(window: Window) -> None:
    pass

"""The engine for Linux: one thread and one io_uring, O_DIRECT files, nothing that a busy interpreter can starve.

The kernel's interface is in ring.py. Which engine a directory gets is decided in engines.py.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import logging
import os
import resource
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest

import numpy as np

from tiered.bytes.critical_section import ServiceThread
from tiered.bytes.device.base import IOClass, Operation, OperationList
from tiered.bytes.device.file_device import FileDevice, Place
from tiered.bytes.device.files import DataFile, translate, translating
from tiered.bytes.device.queue import (
    CALM_NBYTES,
    FIRST_LIST_TAG,
    MOST_REQUESTS,
    InFlight,
    IOQueue,
    ListInFlight,
    ReadLists,
    Requests,
)
from tiered.bytes.device.ring import READ, WRITE, Ring, address_of, pin
from tiered.errors import DeadlineError, DeviceError, TieredError
from tiered.units import GiB, KiB, MiB

__all__ = ["UringDevice", "WakeUp"]


# -- wake up -----------------------------------------------------------------------------------------------------------


class WakeUp:
    """Order: the thread says that it waits, then looks for work. A submitter queues its work, then wakes the thread.

    ``wake`` and ``close`` from any thread, the others from the ring's alone.
    """

    def __init__(self) -> None:
        self.is_waiting = False
        self.fd = -1
        self._lock = threading.Lock()  # guards the descriptor's life
        self._buffer = ctypes.c_uint64()  # lifetime: the kernel writes here

    def open(self) -> None:
        """Open the descriptor. Raises OSError."""
        self.fd = os.eventfd(0, os.EFD_CLOEXEC)

    def arm(self, ring: Ring, slot: int, tag: int) -> None:
        """Let ``ring`` have a completion tagged ``tag`` when it is woken; ``slot`` is that of the descriptor there."""
        ring.prepare(READ, slot, ctypes.addressof(self._buffer), 8, 0, tag)

    def wake(self) -> None:
        """Wake the thread if it waits."""
        if self.is_waiting:
            with self._lock:  # order: never into a descriptor that was closed, and may be another file's by now
                if self.fd >= 0:
                    self.is_waiting = False
                    os.eventfd_write(self.fd, 1)

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        with self._lock:
            self.close_in_child()

    def close_in_child(self) -> None:
        """Close it in a forked child, where some thread of the parent may have held the lock."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


# -- uring -------------------------------------------------------------------------------------------------------------


_NUM_SLOTS = 128  # requests in flight; their bytes are bounded by the queue's budgets
_LEAST_SLOTS = 4  # the rings count as locked memory on some kernels: fewer, where the limit is tight
_NUM_FILE_SLOTS = 257  # of a ring's table, its wake-up's included, or more for files that are there from the start
_WAKE = _NUM_SLOTS  # the tag of the read on the eventfd; above it, those of cancellations
_CANCEL = _NUM_SLOTS + 1
_LEAST_LISTED = 8  # shorter lists are read one by one
_CHAINED_NBYTES = 32 * MiB  # from here on half a batch keeps a drive busy
_APART_NBYTES = 128 * KiB  # from here on a request of its own is worth a system call
_REQUEST_NBYTES = MiB  # with 4 MiB at a time a virtual drive moved 9 to 15 % less (bench/LOG.md)
_DEPTH = 32  # requests with the kernel: work for the drive while a busy Python thread keeps this one waiting
_PIECE_NBYTES = 16 * MiB  # of a large operation that count against its class's budget
_MOST_NBYTES = GiB  # of a request: its length has 32 bits
_TICK_S = 1.0  # the longest wait, after which overdue operations are looked for
_log = logging.getLogger("tiered")


class UringDevice(FileDevice):
    """Numbered files served by one thread that owns a ring: up to 128 operations in flight, batches of system calls.

    Each slot is free or holds an InFlight, whose tag is the slot. Only the completion of all its bytes frees it, so
    memory and extent stay the operation's past any deadline. An operation that is overdue by ``deadline_s`` is reported
    and cancelled; the kernel can only cancel requests that the drive has not begun.

    An operation of at most 1 MiB is one request to the kernel. A larger one is cut into such requests (``cut``), and
    each of them has a slot.
    """

    engine = "uring"

    def __init__(
        self,
        place: Place,
        *,
        deadline_s: float = 60.0,
        direct: bool | None = None,
    ) -> None:
        """Open the files of ``place`` and the ring; see FileDevice for ``direct`` and errors.

        Raises DeviceError where io_uring does not work.
        """
        self._slots: list[InFlight | None] = [None] * _NUM_SLOTS
        self._num_slots = _NUM_SLOTS  # that are used
        self._free_slots = list(range(_NUM_SLOTS))
        self._file_slots: dict[int, tuple[int, DataFile]] = {}  # a file's number -> its slot in the ring
        self._wake_slot = 0  # the wake-up's: the last
        self._requests = Requests()  # of operations that are larger than one
        self._lists = ReadLists()
        self._request_nbytes = _REQUEST_NBYTES  # the longest request to the kernel; larger operations are cut
        self._wake_up = WakeUp()
        self._ring: Ring | None = None
        self._is_ready = threading.Event()
        self._failure: Exception | None = None
        super().__init__(place, num_slots=_NUM_SLOTS, deadline_s=deadline_s, direct=direct)

    def cut(self, request_nbytes: int = _REQUEST_NBYTES, depth: int = _DEPTH) -> None:
        """Cut operations of more than ``request_nbytes`` into such requests from now on.

        ``depth`` of these requests may be with the kernel at a time, 1 to 64, fewer where the ring is small. The length
        is a multiple of ``alignment``, at most 1 GiB; else ValueError. Any thread may call; it changes nothing in
        flight.
        """
        if not (0 < request_nbytes <= _MOST_NBYTES and request_nbytes % self.alignment == 0):
            raise ValueError(f"request_nbytes must be a multiple of {self.alignment} up to 1 GiB, got {request_nbytes}")
        if not 0 < depth <= MOST_REQUESTS:
            raise ValueError(f"depth must be from 1 to {MOST_REQUESTS}, got {depth}")
        self._request_nbytes = request_nbytes
        self._requests.depth = min(depth, max(1, self._num_slots // 2))

    def _make_threads(self) -> Sequence[threading.Thread]:
        with translating(f"cannot open what wakes the I/O thread of {self.name}"):
            self._wake_up.open()
        return [ServiceThread(target=self._run, name="tiered-io-ring")]

    def _wait_until_ready(self) -> None:
        if not self._is_ready.wait(self.deadline_s):
            raise DeviceError(f"{self.name}: the I/O thread has not set up its ring within {self.deadline_s:g} s")
        if self._failure is not None:
            raise self._failure

    def submit_list(self, operations: OperationList) -> None:
        """Queue a list. Reads that a caller waits for go to the kernel as arrays, some 128 at a time."""
        if operations.io_class is not IOClass.DEMAND or len(operations.start) < _LEAST_LISTED:
            super().submit_list(operations)
            return
        self._check_open()
        self._hand_over(self._queue.put_list, operations)

    def _wake(self) -> None:
        self._wake_up.wake()

    def _running(self) -> Iterable[InFlight]:
        flights = [flight for flight in list(self._slots) if flight is not None]
        for listed in list(self._lists.running.values()):
            for place in np.flatnonzero(listed.with_kernel)[:1].tolist():
                one = listed.operations.operation(place, lambda _: None)
                flights.append(InFlight(one, IOClass.DEMAND, listed.changed))
        return flights

    def close(self) -> None:
        """Complete queued operations, then end the thread, the ring and the files; as FileDevice.close."""
        super().close()
        if self._process.is_here:
            self._wake_up.close()

    def _close_in_child(self) -> None:
        super()._close_in_child()
        self._wake_up.close_in_child()
        if self._ring is not None and self._ring.fd >= 0:
            os.close(self._ring.fd)  # only the descriptor: the rings are not mapped here

    # Below: the thread

    def _run(self) -> None:
        """Own the ring from its making to its end."""
        try:
            ring = self._ring = self._make_ring()
        except Exception as error:  # the opening thread waits for it
            self._failure = translate(error, "cannot set up io_uring") if isinstance(error, OSError) else error
            self._is_ready.set()
            return
        self._is_ready.set()
        try:
            self._serve(ring)
        except BaseException as error:
            self._give_up(error)
            raise
        finally:
            if not any(self._slots):  # lifetime: a ring must not go while the kernel has our memory
                ring.close()

    def _make_ring(self) -> Ring:
        """Return a ring that has the wake-up armed."""
        num_slots = _NUM_SLOTS
        while True:
            try:
                ring = self._new_ring(4 * num_slots)  # room for lists, the wake-up and cancellations
                break
            except OSError as error:
                if error.errno != errno.ENOMEM or num_slots == _LEAST_SLOTS:
                    raise
                num_slots //= 2
        self._free_slots = list(reversed(range(num_slots)))
        self._num_slots = num_slots
        self._queue = IOQueue(num_slots, piece_nbytes=_PIECE_NBYTES)  # still empty: no caller has this device yet
        self._requests.depth = min(_DEPTH, max(1, num_slots // 2))
        self._lists.depth = num_slots
        try:
            num_file_slots = max(_NUM_FILE_SLOTS, len(self._files.sizes()) + 1)
            num_file_slots = min(num_file_slots, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
            ring.register_files(num_file_slots)
            self._wake_slot = num_file_slots - 1
            ring.set_file(self._wake_slot, self._wake_up.fd)
            self._wake_up.arm(ring, self._wake_slot, _WAKE)
        except BaseException:
            ring.close()
            raise
        return ring

    def _new_ring(self, num_entries: int) -> Ring:
        """Return a ring; tests override it to choose the completions."""
        return Ring(num_entries)

    def _serve(self, ring: Ring) -> None:
        next_look = time.monotonic() + _TICK_S
        while True:
            self._wake_up.is_waiting = True  # order: before the queue is looked at for the last time
            self._start_queued(ring)
            self._start_requests(ring)
            self._start_lists(ring)
            if self._is_closed and self._is_empty():
                return
            ring.enter(1, _TICK_S)
            self._wake_up.is_waiting = False
            finished = self._reap(ring)
            if finished and (self._queue.num_queued or self._requests.can_start):
                self._start_queued(ring)
                self._start_requests(ring)
                if self.is_direct:  # buffered, the kernel would copy here and now
                    ring.enter_briefly()  # order: the drive goes on while callbacks run
            self._finish(finished)
            if time.monotonic() > next_look:
                next_look = time.monotonic() + _TICK_S
                self._look_for_overdue(ring)

    def _is_empty(self) -> bool:
        """Whether nothing is queued, waiting or with the kernel."""
        if self._requests.num_waiting or self._lists.running or len(self._free_slots) < self._num_slots:
            return False
        with self._lock:
            return not self._queue.num_queued and not self._queue.lists

    def _give_up(self, error: BaseException) -> None:
        """Fail the queued operations after a bug has ended the thread. The kernel keeps those that it has."""
        _log.critical("the I/O thread of %s has ended: %r", self.name, error)
        with self._lock:
            self._is_closed = True
            flights = self._queue.take_all(time.monotonic())
            lists, self._queue.lists = self._queue.lists, deque()
        for operations in lists:
            operations.error = DeviceError(f"reads of {self.name} failed: the I/O thread has ended")
            self._finish_list(ListInFlight(operations, time.monotonic()))
        for flight in flights:
            flight.operation.error = DeviceError(f"{self._describe(flight.operation)} failed: the I/O thread has ended")
        self._finish(flights)

    def _start_queued(self, ring: Ring) -> None:
        """Prepare operations that the queue lets go; large operations wait for ``_start_requests``."""
        if not self._queue.num_queued:
            return
        with self._lock:
            taken = self._queue.take_some(time.monotonic(), len(self._free_slots))
        ended = [flight for flight in taken if not self._locate(ring, flight)]
        if ended:
            taken = [flight for flight in taken if flight not in ended]
        most = self._request_nbytes  # order: once, because it may change at any moment
        flights = [flight for flight in taken if flight.nbytes <= most]
        if len(flights) < len(taken):
            for flight in taken:
                if flight.nbytes > most:
                    self._requests.add(flight, most)
        nbytes = sum([flight.nbytes for flight in flights])
        if nbytes < _CHAINED_NBYTES:
            # More than two at once the kernel holds back, and makes one request of neighbours: the drive begins later,
            # and with 4 MiB instead of 1 MiB moved 2 to 15 % less (bench/LOG.md). Buffered, it would copy here and now.
            are_apart = self.is_direct and nbytes >= _APART_NBYTES * len(flights)
            for number, flight in enumerate(flights):
                if are_apart and number and number % 2 == 0:
                    ring.enter_briefly()
                self._submit(ring, flight)
        else:
            for flight, follower in _chains(flights):
                self._submit(ring, flight)
                if follower is not None:
                    self._submit(ring, follower)
                    ring.link()
        self._finish(ended)

    def _start_requests(self, ring: Ring) -> None:
        """Prepare the parts of large operations that the kernel may have."""
        if not self._requests.can_start:
            return
        now = time.monotonic()
        most_writes = max(1, self._queue.calm_nbytes(now) // self._request_nbytes)
        are_apart = self.is_direct and self._request_nbytes >= _APART_NBYTES
        number = 0
        while self._free_slots and (part := self._requests.take(now, most_writes=most_writes)) is not None:
            if are_apart and number and number % 2 == 0:
                ring.enter_briefly()
            self._submit(ring, part)
            number += 1

    def _submit(self, ring: Ring, flight: InFlight) -> None:
        """Give ``flight`` a slot and prepare it."""
        slot = self._free_slots[-1]
        self._prepare(ring, slot, flight)
        self._slots[self._free_slots.pop()] = flight

    def _prepare(self, ring: Ring, slot: int, flight: InFlight) -> None:
        """Write the submission of the rest of ``flight``."""
        moved, is_write = flight.moved, flight.operation.is_write
        nbytes = flight.nbytes - moved
        if is_write and nbytes > CALM_NBYTES:
            nbytes = min(nbytes, self._queue.most_nbytes(flight, time.monotonic()))
        opcode = WRITE if is_write else READ
        ring.prepare(opcode, flight.file_slot, flight.address + moved, nbytes, flight.offset + moved, slot)

    def _locate(self, ring: Ring, flight: InFlight) -> bool:
        """Find the file and the memory of ``flight``; False when its operation has ended instead.

        That is when it has failed, or has no bytes to move.
        """
        operation = flight.operation
        try:
            flight.file_slot, file = self._file_slots.get(operation.file) or self._register_file(ring, flight)
            if not 0 <= flight.offset <= file.nbytes - flight.nbytes:
                self._pass_end(flight, file.nbytes)
            if not flight.nbytes:
                return False
            flight.pinned = pin(operation.memory, is_read_only=operation.is_write)
            flight.address = address_of(flight.pinned)
        except Exception as error:
            self._note_error(operation, error)
            return False
        return True

    # Below: lists

    def _start_lists(self, ring: Ring) -> None:
        """Prepare the reads of lists that the kernel may have."""
        lists = self._lists
        while lists.room and (lists.can_start or self._queue.lists):
            if not lists.can_start:
                with self._lock:
                    operations = self._queue.lists.popleft()
                self._begin_list(ring, operations)
                continue
            flight, places, tags = lists.take()
            found = flight.operations
            addresses = flight.address + found.start[places]
            ring.prepare_reads(flight.file_slots[places], addresses, found.nbytes[places], found.offset[places], tags)

    def _begin_list(self, ring: Ring, operations: OperationList) -> None:
        """Find files and memory of a list; what does not lie in a file as a whole is read alone."""
        flight = ListInFlight(operations, time.monotonic())
        fits = (operations.offset >= 0) & (operations.nbytes > 0) & (operations.nbytes <= self._request_nbytes)
        try:
            flight.pinned = pin(operations.memory)
            flight.address = address_of(flight.pinned)
            for number in np.unique(operations.file).tolist():
                ours = operations.file == number
                slot, nbytes = self._slot_of(ring, number)
                flight.file_slots[ours] = slot
                fits &= ~ours | (operations.offset + operations.nbytes <= nbytes)
        except Exception as error:  # released memory, or a file that the ring does not take
            operations.error = DeviceError(f"reads of {self.name} failed: {error!r}")
            operations.error.__cause__ = error
            self._finish_list(flight)
            return
        flight.places = np.flatnonzero(fits)
        self._lists.add(flight)
        for place in np.flatnonzero(~fits).tolist():
            self._read_alone(flight, place)

    def _slot_of(self, ring: Ring, number: int) -> tuple[int, int]:
        """Return where file ``number`` is in the ring, and its bytes; -1 and 0 where it is not and cannot be."""
        file = self._files.get(number)
        if number not in self._file_slots and file is not None and len(self._file_slots) < self._wake_slot:
            ring.set_file(len(self._file_slots), file.fd)
            self._file_slots[number] = len(self._file_slots), file
        slot, file = self._file_slots.get(number, (-1, None))
        return slot, 0 if file is None else file.nbytes

    def _read_alone(self, flight: ListInFlight, place: int) -> None:
        """Queue one read of a list as an operation of its own, with its retries and its error."""
        operation = flight.operations.operation(place, functools.partial(self._end_alone, flight))
        with self._lock:
            self._queue.put([operation])

    def _end_alone(self, flight: ListInFlight, operation: Operation) -> None:
        self._note_end(flight, operation.error)
        if not flight.left:
            self._finish_list(flight)

    def _note_end(self, flight: ListInFlight, error: Exception | None) -> None:
        flight.operations.error = flight.operations.error or error
        flight.left -= 1

    def _reap_lists(self, tagged: list[tuple[int, int]]) -> None:
        """Take ``tagged`` completions of lists, each a tag and a result, and finish the lists that have ended."""
        tags, results = np.array(tagged, np.int64).T
        for flight, failed in self._lists.end(tags, results, time.monotonic()):
            for place, result in failed:
                if result == -errno.ECANCELED and flight.is_slow:
                    what = self._describe(flight.operations.operation(place, lambda _: None))
                    late = DeadlineError(f"{what} was not begun within {self.deadline_s:g} s; check the drive")
                    self._note_end(flight, late)
                else:
                    self._read_alone(flight, place)
            if not flight.left:
                self._finish_list(flight)

    def _finish_list(self, flight: ListInFlight) -> None:
        """Count a list and hand it back to its submitter."""
        operations = flight.operations
        self._lists.running.pop(flight.number, None)
        with self._lock:
            self._queue.list_done(operations, time.monotonic())
            self._read_bytes += flight.moved_nbytes
            self._num_reads += flight.num_moved
        flight.pinned = None  # lifetime: the submitter may release the memory from now on
        try:
            operations.on_done(operations)
        except BaseException:  # as in ``_finish``
            _log.exception("the completion of reads of %s raised", self.name)

    def _register_file(self, ring: Ring, flight: InFlight) -> tuple[int, DataFile]:
        file, number, slot = self._file_of(flight), flight.operation.file, len(self._file_slots)
        if slot == self._wake_slot:
            raise DeviceError(f"{self.path(number)} is one file too many: {slot} fit; use engine='threads'")
        ring.set_file(slot, file.fd)
        self._file_slots[number] = slot, file
        return slot, file

    def _reap(self, ring: Ring) -> list[InFlight]:
        """Take the completions that are there; return the finished operations, with their errors set."""
        finished: list[InFlight] = []
        listed: list[tuple[int, int]] = []
        slots, free_slots = self._slots, self._free_slots
        for tag, result, _ in ring.completions():
            if tag >= _WAKE:
                if tag == _WAKE:
                    self._wake_up.arm(ring, self._wake_slot, _WAKE)
                elif tag >= FIRST_LIST_TAG:
                    listed.append((tag, result))
                continue
            flight = slots[tag]
            assert flight is not None, f"a completion for the free slot {tag}"
            if result == flight.nbytes:
                flight.moved = result
            elif not self._is_finished(flight, result):
                self._prepare(ring, tag, flight)
                continue
            slots[tag] = None
            free_slots.append(tag)
            if flight.whole is None:
                finished.append(flight)
            elif (whole := self._requests.end(flight)) is not None:
                finished.append(whole)
        if listed:
            self._reap_lists(listed)
        return finished

    def _is_finished(self, flight: InFlight, result: int) -> bool:
        """Count ``result``; whether nothing is left to do, because all moved or because of an error."""
        operation = flight.operation
        if operation.error is not None:  # of another part of it
            return True
        try:
            if result >= 0:
                return flight.advance(result, self._granularity(), self._describe(operation))
            error = OSError(-result, os.strerror(-result))
            if result == -errno.ECANCELED and not flight.is_slow and time.monotonic() < flight.start + self.deadline_s:
                return False  # the operation that it was linked to has failed
            if result == -errno.ECANCELED:
                what = self._describe(operation)
                raise DeadlineError(f"{what} was not begun within {self.deadline_s:g} s; check the drive") from error
            flight.retry(error, self.deadline_s, self._describe(operation))
        except TieredError as error:
            operation.error = error
            return True
        return False

    def _look_for_overdue(self, ring: Ring) -> None:
        """Cancel each request that the drive has had for ``deadline_s``, and report its operation, once."""
        now = time.monotonic()
        for slot, flight in enumerate(self._slots):
            if flight is None or flight.is_slow or now - flight.start <= self.deadline_s:
                continue
            # Order: room is left for what the next turn may prepare; what does not fit is reported then.
            if ring.num_free <= len(self._free_slots) + 1:
                return
            flight.is_slow = True
            ring.prepare_cancel(slot, _CANCEL)
            whole = flight.whole or flight
            if whole is flight or not whole.is_slow:
                whole.is_slow = True
                _log.warning(
                    "%s has not completed for %.0f s; its memory and extent stay in use until the drive answers",
                    self._describe(flight.operation),
                    now - flight.start,
                )
        for listed in self._lists.running.values():
            late = np.flatnonzero(listed.with_kernel).tolist()
            if listed.is_slow or now - listed.changed <= self.deadline_s or not late:
                continue
            if ring.num_free <= len(self._free_slots) + self._lists.room + len(late):
                return
            listed.is_slow = True
            for place in late:
                ring.prepare_cancel(listed.number * FIRST_LIST_TAG + place, _CANCEL)
            _log.warning(
                "%d reads of %s have not completed for %.0f s; their memory and extents stay in use until the drive"
                " answers",
                len(late), self.name, now - listed.changed,
            )  # fmt: skip


def _chains(flights: list[InFlight]) -> Iterator[tuple[InFlight, InFlight | None]]:
    """Pair the second half of a large batch of one class with the first, for the kernel to begin when that completes.

    A drive may complete all its operations at once. It would then idle until this thread has the interpreter's lock, a
    switch interval of a busy Python thread later. Small batches, and reads that a thread waits for, go at once.
    """
    by_class: dict[IOClass, list[InFlight]] = {}
    for flight in flights:
        by_class.setdefault(flight.io_class, []).append(flight)
    for io_class, batch in by_class.items():
        half = (len(batch) + 1) // 2
        if io_class <= IOClass.UPDATE or sum(flight.nbytes for flight in batch) < _CHAINED_NBYTES:
            half = len(batch)
        yield from zip_longest(batch[:half], batch[half:])

"""The operations of a device on their way: IOQueue, InFlight that an engine has begun, Requests and ReadLists.

All engines share them, so that order, budgets, short transfers and retries are the same on all. No I/O and no lock: the
device's lock guards the queue, and one thread of the engine the rest.
"""

from __future__ import annotations

import ctypes
import errno
import sys
import time
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from tiered.bytes.device.base import IOClass, Operation, OperationList
from tiered.bytes.device.files import translate
from tiered.errors import DeviceError
from tiered.units import MiB

__all__ = [
    "CALM_NBYTES", "FIRST_LIST_TAG", "MOST_REQUESTS", "IOQueue", "InFlight", "ListInFlight", "ReadLists", "Requests",
]  # fmt: skip


_NUM_RETRIES = 3
_TRY_AGAIN = frozenset({errno.EAGAIN, errno.EINTR})


class InFlight:
    """``operation`` from the moment an engine takes it: ``moved`` of ``nbytes`` bytes are done.

    Its engine alone uses it, one thread at a time. The queue made it, and keeps its place until ``IOQueue.done``.
    A ring cuts a large one into parts; each part is an InFlight with the large one as its ``whole``.
    """

    __slots__ = (
        "address", "file_slot", "given", "io_class", "is_slow", "left", "moved", "nbytes", "num_overtaken",
        "num_retries", "offset", "operation", "padding", "pinned", "request_nbytes", "start", "whole",
    )  # fmt: skip

    def __init__(self, operation: Operation, io_class: IOClass, start: float) -> None:
        self.operation = operation
        self.io_class = io_class  # as it was queued: the operation's own may be raised meanwhile
        self.nbytes = operation.nbytes
        self.offset = operation.offset  # in the file
        self.start = start  # s, of time.monotonic
        self.moved = 0
        self.padding = 0  # bytes of these that lie behind the end of an external file: its read ends before them
        self.num_retries = 0  # after EIO, and of less than one granule
        self.is_slow = False  # a warning has been logged
        self.pinned: ctypes.c_char | None = None  # lifetime: holds the memory while the kernel has its address
        self.address = self.file_slot = 0  # a ring's: of the memory, and of the file
        self.whole: InFlight | None = None  # that this is a part of
        self.request_nbytes = 0  # of its parts, where it is cut; then also:
        self.given = 0  # bytes that the kernel has been given, from the operation's start
        self.left = 0  # bytes that neither moved nor were given up
        self.num_overtaken = 0  # later ones that were put before it

    def next_part(self, now: float) -> InFlight:
        """Return the next part that the kernel is given, ``now``; there must be one."""
        part = InFlight(self.operation, self.io_class, now)
        part.whole = self
        part.nbytes = min(self.request_nbytes, self.nbytes - self.given)
        part.offset = self.offset + self.given
        part.address = self.address + self.given
        part.file_slot = self.file_slot
        self.given += part.nbytes
        part.padding = max(0, self.padding - (self.nbytes - self.given))
        return part

    def advance(self, moved: int, granularity: int, what: str) -> bool:
        """Count ``moved`` more bytes; return whether all are done.

        A short transfer goes on at a multiple of ``granularity`` (bytes), and moves the rest of a granule again. One of
        less than a granule is repeated 3 times. Raises DeviceError, which begins with ``what``, for a transfer that
        stopped.
        """
        left = self.nbytes - self.moved
        if left - self.padding <= moved < left:  # the end of an external file
            moved = left
        if moved < left:
            if 0 < moved < granularity and self.num_retries < _NUM_RETRIES:
                self.num_retries += 1
                return False
            moved -= moved % granularity
        if moved <= 0 < left or moved > left:
            raise DeviceError(f"{what} failed: it stopped after {self.moved} bytes")
        self.moved += moved
        return self.moved == self.nbytes

    def retry(self, error: OSError, deadline_s: float, what: str) -> None:
        """Return when the rest may be tried again after ``error``; else raise its TieredError, beginning with ``what``.

        An interruption is tried again until ``deadline_s`` have passed since the start, a read 3 times after EIO, a
        write never.
        """
        if error.errno in _TRY_AGAIN and time.monotonic() < self.start + deadline_s:
            return
        if self.operation.is_write or error.errno != errno.EIO or self.num_retries == _NUM_RETRIES:
            raise translate(error, f"{what} failed") from error
        self.num_retries += 1


# -- requests ----------------------------------------------------------------------------------------------------------


MOST_REQUESTS = 64
"""How many parts of large operations the kernel may have at a time."""

_MOST_OVERTAKEN = 8


class Requests:
    """Large operations that the kernel has only in part. At most ``depth`` of their parts are with the kernel.

    Operations go in the order of their class, then in that of ``add``. The first of those that wait lets at most eight
    later ones overtake it, so that each makes progress in its turn. One thread uses it.
    """

    def __init__(self) -> None:
        self.depth = 1
        self._waiting: list[InFlight] = []
        self._num_with_kernel = 0  # parts
        self._num_writing = 0  # of those, writes

    @property
    def num_waiting(self) -> int:
        """How many operations have bytes that the kernel was never given."""
        return len(self._waiting)

    @property
    def can_start(self) -> bool:
        """Whether ``take`` has a part, unless it is a write that waits for calm to end."""
        return bool(self._waiting) and self._num_with_kernel < self.depth

    def add(self, flight: InFlight, request_nbytes: int) -> None:
        """Let ``take`` hand out ``flight`` in parts of at most ``request_nbytes``."""
        flight.request_nbytes = request_nbytes
        flight.left = flight.nbytes
        place = len(self._waiting)
        while place and self._lets_pass(self._waiting[place - 1], flight):
            place -= 1
        if place < len(self._waiting):
            self._waiting[place].num_overtaken += 1
        self._waiting.insert(place, flight)

    def take(self, now: float, *, most_writes: int) -> InFlight | None:
        """Return the part that the kernel is given next, which is with the kernel then; None: nothing may start.

        At most ``most_writes`` parts of writes are with the kernel, and reads behind others go on.
        """
        if self._num_with_kernel >= self.depth:
            return None
        for place, whole in enumerate(self._waiting):
            is_write = whole.operation.is_write
            if is_write and self._num_writing >= most_writes:
                continue
            part = whole.next_part(now)
            if whole.given == whole.nbytes:
                del self._waiting[place]
            self._num_with_kernel += 1
            self._num_writing += is_write
            return part
        return None

    def end(self, part: InFlight) -> InFlight | None:
        """Take back ``part``, which the kernel has ended; return its operation when that has ended with it.

        After an error the kernel is given no more of the operation.
        """
        whole = part.whole
        assert whole is not None, f"{part.operation!r} was never cut"
        self._num_with_kernel -= 1
        self._num_writing -= whole.operation.is_write
        whole.moved += part.moved
        whole.left -= part.nbytes
        if whole.operation.error is not None and whole.given < whole.nbytes:
            whole.left -= whole.nbytes - whole.given
            whole.given = whole.nbytes
            self._waiting.remove(whole)
        return None if whole.left else whole

    def _lets_pass(self, flight: InFlight, later: InFlight) -> bool:
        return later.io_class < flight.io_class and flight.num_overtaken < _MOST_OVERTAKEN


# -- lists -------------------------------------------------------------------------------------------------------------


FIRST_LIST_TAG = 1 << 32
"""From here on a tag in the ring is that of a read of a list: the list's number, and in 32 bits its place there."""

Ints = NDArray[np.int64]


class ListInFlight:
    """A list of reads from the moment that a ring takes it; ``left`` of them have not ended."""

    __slots__ = (
        "address", "changed", "file_slots", "given", "is_slow", "left", "moved_nbytes", "num_moved", "number",
        "operations", "pinned", "places", "with_kernel",
    )  # fmt: skip

    def __init__(self, operations: OperationList, now: float) -> None:
        self.operations = operations
        self.left = len(operations.start)
        self.changed = now  # s, of time.monotonic: when something of it last ended
        self.number = self.given = 0  # given: of ``places``
        self.num_moved = self.moved_nbytes = 0
        self.is_slow = False  # a warning has been logged
        self.address = 0  # of the memory
        self.pinned: ctypes.c_char | None = None  # lifetime: holds the memory while the kernel has its address
        self.file_slots = np.full(self.left, -1)
        self.places: Ints = np.empty(0, np.int64)  # of the reads that the ring carries out by the list
        self.with_kernel = np.zeros(self.left, np.bool_)


class ReadLists:
    """Lists of reads that a ring has taken, in the order in which they came; one thread uses it.

    At most ``depth`` of their reads are with the kernel.
    """

    def __init__(self) -> None:
        self.depth = 1
        self.running: dict[int, ListInFlight] = {}  # by number, until all reads have ended
        self._waiting: deque[ListInFlight] = deque()  # that have reads which the kernel was never given
        self._num_with_kernel = 0
        self._last_number = 0

    @property
    def room(self) -> int:
        """How many more reads the kernel may be given."""
        return self.depth - self._num_with_kernel

    @property
    def can_start(self) -> bool:
        """Whether ``take`` has any."""
        return bool(self._waiting) and self.room > 0

    def add(self, flight: ListInFlight) -> None:
        """Let ``take`` hand out the reads of ``flight``."""
        self._last_number = flight.number = self._last_number + 1
        self.running[flight.number] = flight
        if len(flight.places):
            self._waiting.append(flight)

    def take(self) -> tuple[ListInFlight, Ints, Ints]:
        """Return places of a list that the kernel is given next, and their tags; they are with the kernel then."""
        flight = self._waiting[0]
        places = flight.places[flight.given : flight.given + self.room]
        flight.given += len(places)
        if flight.given == len(flight.places):
            self._waiting.popleft()
        flight.with_kernel[places] = True
        self._num_with_kernel += len(places)
        return flight, places, places + flight.number * FIRST_LIST_TAG

    def end(self, tags: Ints, results: Ints, now: float) -> list[tuple[ListInFlight, list[tuple[int, int]]]]:
        """Take back the reads of ``tags``; return their lists, each with the place and the result of those that failed.

        All others have ended, and are no longer ``left``.
        """
        self._num_with_kernel -= len(tags)
        numbers = tags // FIRST_LIST_TAG
        found = []
        for number in np.unique(numbers).tolist():
            flight, ours = self.running[number], numbers == number
            places, moved = tags[ours] % FIRST_LIST_TAG, results[ours]
            flight.with_kernel[places] = False
            flight.changed = now
            is_right = moved == flight.operations.nbytes[places]
            num_right = int(np.count_nonzero(is_right))
            flight.left -= num_right
            flight.num_moved += num_right
            flight.moved_nbytes += int(moved[is_right].sum())
            found.append((flight, list(zip(places[~is_right].tolist(), moved[~is_right].tolist(), strict=True))))
        return found


# -- queue -------------------------------------------------------------------------------------------------------------


_WRITE = IOClass.WRITE  # an enum's member is looked up slowly
_AHEAD_S = 0.02  # a busy Python thread keeps the interpreter's lock for 1 to 5 ms, a busy machine for longer
_LEAST_NBYTES, _MOST_NBYTES = 32 * MiB, 128 * MiB
_LEAST_READ_NBYTES = 64 * MiB  # a drive may complete half of that at once: then it has the other half
_SAMPLE_NBYTES = 64 * MiB
_PAUSE_S = 0.02  # a shorter one is the drive's, or the interpreter's, and counts
_CALM_S = 0.02  # a caller that reads one key after the other comes back sooner
_CALM_SHARE = 4
_PIECE_NBYTES = 16 * MiB  # that a thread moves in one call
CALM_NBYTES = 1 * MiB
"""Bytes of writes that may be in flight while a caller waits for a read, however short that is."""


class IOQueue:
    """Operations in four classes; the most urgent one that its class's budget admits goes first, then the oldest.

    An operation is queued, in flight (between ``take`` and ``done``), or not known here.

    The bytes of a class in flight stay within its budget: the bytes that it moved in 20 ms when last seen, between 32
    (reads: 64) and 128 MiB. One operation of a class may always be in flight, however large; each counts as
    ``piece_nbytes`` at most. ``num_slots`` operations may be in flight in all. Where there are more than four, all but
    demand reads leave the last two to a class that has fewer than two in flight. Every class leaves a slot to each less
    urgent class that has something queued and nothing in flight, except for its own first operation. So no class waits
    for ever beside steady demand reads, where there are four slots or more.

    Writes are calm while a caller waits for a read, and 20 ms after: those in flight are a quarter of the bytes of
    demand reads, or 1 MiB. A demand read that comes then takes a quarter longer than alone, or as long as 1 MiB takes;
    the first one meets what the drive has. Reads of updates and reads ahead hold no write back.
    """

    def __init__(self, num_slots: int, *, piece_nbytes: int = sys.maxsize) -> None:
        """Make an empty queue for an engine that carries out ``num_slots`` operations at a time.

        ``piece_nbytes`` is for an engine that interleaves several large operations; it bounds the bytes at the drive.
        """
        self._piece_nbytes = piece_nbytes
        self.num_in_flight = 0
        self._num_slots = num_slots
        self._num_open = num_slots - 2 if num_slots > 4 else num_slots  # slots that any class may take
        self._queues = tuple(_ClassQueue(io_class) for io_class in IOClass)
        self._queued = tuple(queue.queued for queue in self._queues)
        self._demand = self._queues[IOClass.DEMAND]
        self._last_demand = float("-inf")
        self.lists: deque[OperationList] = deque()  # of demand reads, which a ring takes one by one
        self.num_listed = self._listed_nbytes = 0  # reads of lists that have not ended

    @property
    def num_queued(self) -> int:
        """Operations that were put and not taken."""
        return sum(map(len, self._queued))

    def put(self, operations: Iterable[Operation]) -> None:
        """Queue ``operations``, each behind those of its class: all of them or, should anything raise, none.

        Its length is read from its memory now, and an error of an earlier submission is forgotten.
        """
        batches: tuple[list[Operation], ...] = ([], [], [], [])
        for operation in operations:
            operation.error = None
            try:
                operation.nbytes = len(operation.memory)
            except ValueError:  # released too early: its engine says so
                pass
            batches[operation.io_class].append(operation)
        any(map(deque.extend, self._queued, batches))  # order: one call, which no signal comes in between

    def put_list(self, operations: OperationList) -> None:
        """Queue a list of demand reads for its ring."""
        operations.error = None
        self.num_listed += len(operations.start)
        self._listed_nbytes += int(operations.nbytes.sum())
        self.lists.append(operations)

    def list_done(self, operations: OperationList, now: float) -> None:
        """Note that a list ended ``now``."""
        self.num_listed -= len(operations.start)
        self._listed_nbytes -= int(operations.nbytes.sum())
        self._last_demand = now

    def take(self, now: float) -> InFlight | None:
        """Return the operations to start ``now``, which are then in flight; None when none may start."""
        taken = self.take_some(now, 1)
        return taken[0] if taken else None

    def take_some(self, now: float, most: int) -> list[InFlight]:
        """Return at most ``most`` that may start ``now``, in the order to start them; they are then in flight."""
        taken: list[InFlight] = []
        num_waiting = 0  # classes with nothing in flight, the queue's own and more urgent ones left out
        for queue in self._queues:
            if queue.queued and not queue.num_taken:
                num_waiting += 1
        for queue in self._queues:
            queued = queue.queued
            if not queued:
                continue
            if not queue.num_taken:
                num_waiting -= 1
            io_class = queue.io_class
            left = min(queue.budget, self.calm_nbytes(now)) if queue.is_write else queue.budget
            left -= queue.taken_nbytes
            num_others, num_taken = self.num_in_flight - queue.num_taken, queue.num_taken
            most_taken = min(most - len(taken) + num_taken, self._num_slots - num_others)
            num_open = max(1, self._num_slots - num_others - num_waiting)
            if queue is not self._demand:
                num_open = min(num_open, max(2, self._num_open - num_others))
            while queued and num_taken < most_taken and num_taken < num_open:
                nbytes = min(queued[0].nbytes, self._piece_nbytes)
                if num_taken and nbytes > left:
                    break
                left -= nbytes
                num_taken += 1
                taken.append(InFlight(queued.popleft(), io_class, now))
                queue.taken_nbytes += nbytes
            self._count_taken(queue, num_taken - queue.num_taken, now)
        return taken

    def take_all(self, now: float) -> list[InFlight]:
        """Return all that is queued, budgets or not: for an engine that has come to its end."""
        taken: list[InFlight] = []
        for queue in self._queues:
            flights = [InFlight(operation, queue.io_class, now) for operation in queue.queued]
            queue.queued.clear()
            queue.taken_nbytes += sum(min(flight.nbytes, self._piece_nbytes) for flight in flights)
            self._count_taken(queue, len(flights), now)
            taken += flights
        return taken

    def _count_taken(self, queue: _ClassQueue, number: int, now: float) -> None:
        if number and not queue.num_taken:
            queue.sample.begin(now)
        queue.num_taken += number
        self.num_in_flight += number

    def done(self, flights: Sequence[InFlight], now: float) -> None:
        """Take back the places of ``flights``, which ended ``now``."""
        self.num_in_flight -= len(flights)
        for flight in flights:
            queue = self._queues[flight.io_class]
            queue.num_taken -= 1
            queue.num_done += 1
            queue.taken_nbytes -= min(flight.nbytes, self._piece_nbytes)
            queue.done_nbytes += flight.nbytes
        for queue in self._queues:
            if queue.num_done:
                queue.learn(now)
                if queue is self._demand:
                    self._last_demand = now

    def most_nbytes(self, flight: InFlight, now: float) -> int:
        """Return how much of ``flight`` its engine may move in one go: 16 MiB, or less while writes are calm."""
        most = CALM_NBYTES if flight.io_class is _WRITE and self.calm_nbytes(now) < sys.maxsize else _PIECE_NBYTES
        return min(flight.nbytes, most)

    def calm_nbytes(self, now: float) -> int:
        """Return how many bytes of writes may be in flight ``now`` for the sake of demand reads; sys.maxsize: all."""
        demand = self._demand
        if demand.num_taken or demand.queued or self.num_listed or now - self._last_demand < _CALM_S:
            return max(CALM_NBYTES, (demand.taken_nbytes + self._listed_nbytes) // _CALM_SHARE)
        return sys.maxsize


class _ClassQueue:
    """One class: its queued operations, those in flight and their budget, and those that have just ended."""

    __slots__ = (
        "budget", "done_nbytes", "io_class", "is_write", "num_done", "num_taken", "queued", "sample", "taken_nbytes",
    )  # fmt: skip

    def __init__(self, io_class: IOClass) -> None:
        self.io_class = io_class
        self.is_write = io_class is IOClass.WRITE
        self.queued: deque[Operation] = deque()
        self.num_taken = self.num_done = 0
        self.taken_nbytes = self.done_nbytes = 0
        self.budget = _MOST_NBYTES // 2  # bytes
        self.sample = _BandwidthSample()

    def learn(self, now: float) -> None:
        """Let the budget follow the operations that ended ``now``."""
        bytes_per_s = self.sample.add(self.done_nbytes, now)
        self.num_done = self.done_nbytes = 0
        if bytes_per_s is not None:
            least = _LEAST_NBYTES if self.is_write else _LEAST_READ_NBYTES
            self.budget = min(max(int(bytes_per_s * _AHEAD_S), least), _MOST_NBYTES)


class _BandwidthSample:
    """The bandwidth of one class over its last 64 MiB, pauses left out."""

    __slots__ = ("_last", "_nbytes", "_start")

    def __init__(self) -> None:
        self._start = self._last = float("-inf")
        self._nbytes = 0

    def begin(self, now: float) -> None:
        """Note that an operation is taken and none was in flight: a new sample, unless that was for a moment only."""
        if now - self._last > _PAUSE_S:
            self._start, self._nbytes = now, 0

    def add(self, nbytes: int, now: float) -> float | None:
        """Count bytes that completed; return bytes/s when a sample is complete, and begin the next."""
        self._nbytes += nbytes
        self._last = now
        if self._nbytes < _SAMPLE_NBYTES or now <= self._start:
            return None
        bytes_per_s = self._nbytes / (now - self._start)
        self._start, self._nbytes = now, 0
        return bytes_per_s

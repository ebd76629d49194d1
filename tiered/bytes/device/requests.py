"""Operations that are larger than one request: which parts of them the kernel has, and which come next.

A ring's thread cuts them up here, and compiled code (request_loop.py) does on the same table, without the interpreter,
what there is most of: take a request that has moved all its bytes, and start the next one. All else is for the thread.
"""

from __future__ import annotations

import ctypes
import struct

from tiered.bytes.device.base import IOClass
from tiered.bytes.device.queue import CALM_NBYTES
from tiered.bytes.device.ring import WRITE, WRITE_FIXED, Ring

__all__ = ["MOST_REQUESTS", "NUM_ROWS", "Requests"]

NUM_ROWS = 128  # operations; a row's number is the slot of its operation
MOST_REQUESTS = 64  # with the kernel
FIRST_TAG = 1 << 16  # a request's tag is its number and this

# The table's words, int64. First what the loop is told and tells:
TAIL, NUM_SUBMITTED, HEAD = 0, 1, 2  # of the ring, while the loop has it
NUM_FREE = 3  # numbers of requests; so many of FREE's words count
NUM_KEPT = 4  # of those, which stay free: the depth is what is above
NEXT_WAITING, NUM_WAITING = 5, 6  # in WAITING: rows that have bytes the kernel was never given, in the order to start
NUM_ENDED = 7  # in ENDED: rows of which all requests have ended in the loop
# Then a row for each operation:
ROWS, ROW = 16, 11  # where they begin, and the words of each:
OPCODE, FILE, ADDRESS, OFFSET, NBYTES, INDEX = 0, 1, 2, 3, 4, 5  # as Ring.prepare has them, of the whole operation
MOST = 6  # bytes of a request
GIVEN = 7  # bytes that the kernel has been given, from the operation's start
LEFT = 8  # bytes that were not moved yet, nor given up
URGENCY = 9  # a lower one goes first
OVERTAKEN = 10  # how many later ones were put right before it
# Then a row for each request:
REQUESTS, REQUEST = ROWS + NUM_ROWS * ROW, 3
OWNER, START, LENGTH = (
    0,
    1,
    2,
)  # the operation's row; bytes from its start; bytes, negative where Python must see the end
# Then three lists:
FREE = REQUESTS + MOST_REQUESTS * REQUEST
WAITING = FREE + MOST_REQUESTS
ENDED = WAITING + NUM_ROWS
_NUM_WORDS = ENDED + NUM_ROWS
_ROW = struct.Struct(f"={ROW}q")

_WRITES = (WRITE, WRITE_FIXED)
_MOST_OVERTAKEN = 8


class Requests:
    """The table: each of its operations is waiting (bytes are left to give), with the kernel, or both, until it ended.

    Operations go in the order of their class, then in that of ``add``, but of those that are overtaken the first lets
    eight pass and no more, so that each gets on; at most ``depth`` requests are with the kernel.
    One thread uses it, and lends it to the loop. Bytes are moved or given up once, so an operation ends once.
    """

    def __init__(self) -> None:
        self._words = (ctypes.c_int64 * _NUM_WORDS)()  # lifetime: the loop has its address
        self.table = memoryview(self._words).cast("B").cast("q")
        self.address = ctypes.addressof(self._words)
        self.table[NUM_FREE] = MOST_REQUESTS
        for number in range(MOST_REQUESTS):
            self.table[FREE + number] = MOST_REQUESTS - 1 - number

    @property
    def num_with_kernel(self) -> int:
        """How many requests the kernel has."""
        return MOST_REQUESTS - self.table[NUM_FREE]

    @property
    def num_startable(self) -> int:
        """How many requests more it may have."""
        return max(0, self.table[NUM_FREE] - self.table[NUM_KEPT])

    @property
    def can_start(self) -> bool:
        """Whether ``fill`` has something to start, unless it is a write that must wait for calm to end."""
        table = self.table
        return table[NEXT_WAITING] < table[NUM_WAITING] and table[NUM_FREE] > table[NUM_KEPT]

    @property
    def num_waiting(self) -> int:
        """How many operations have bytes that the kernel was never given."""
        return self.table[NUM_WAITING] - self.table[NEXT_WAITING]

    @property
    def are_writes_waiting(self) -> bool:
        """Whether a write is among those."""
        return any(self.table[ROWS + row * ROW + OPCODE] in _WRITES for row in self._waiting())

    def set_depth(self, depth: int) -> None:
        """Let ``depth`` requests be with the kernel from now on, 1 to 64."""
        self.table[NUM_KEPT] = MOST_REQUESTS - depth

    def add(
        self, row: int, io_class: IOClass, opcode: int, file: int, address: int, offset: int, nbytes: int, index: int,
        *, most: int,
    ) -> None:  # fmt: skip
        """Let ``fill`` start an operation in the free ``row``, in requests of at most ``most`` bytes.

        The other words are those of Ring.prepare.
        """
        base = ROWS + row * ROW
        _ROW.pack_into(
            self._words, base * 8, opcode, file, address, offset, nbytes, index, most, 0, nbytes, io_class, 0
        )  # fmt: skip
        rows = self._waiting()
        place = len(rows)
        while place and self._lets_pass(rows[place - 1], io_class):
            place -= 1
        if place < len(rows):
            self.table[ROWS + rows[place] * ROW + OVERTAKEN] += 1
        rows.insert(place, row)
        self._set_waiting(rows)

    def fill(self, ring: Ring, *, is_calm: bool, are_apart: bool) -> None:
        """Prepare requests until as many as may be are with the kernel, or prepared for it.

        ``is_calm``: writes one at a time, and no more of them than a demand read may have to wait for; reads behind
        them go on.
        ``are_apart``: two are submitted at a time, so that the kernel does not make one request of neighbours.
        """
        table = self.table
        num_prepared = num_passed = 0  # waiting rows that the next one is behind
        while table[NEXT_WAITING] + num_passed < table[NUM_WAITING] and table[NUM_FREE] > table[NUM_KEPT]:
            row = table[WAITING + table[NEXT_WAITING] + num_passed]
            base = ROWS + row * ROW
            start = table[base + GIVEN]
            length = min(table[base + MOST], table[base + NBYTES] - start)
            if is_calm and table[base + OPCODE] in _WRITES:
                if self._is_writing():
                    num_passed += 1
                    continue
                length = min(length, CALM_NBYTES)
            if are_apart and num_prepared and num_prepared % 2 == 0:
                ring.enter_briefly()
            table[NUM_FREE] -= 1
            number = table[FREE + table[NUM_FREE]]
            place = REQUESTS + number * REQUEST
            table[place + OWNER], table[place + START], table[place + LENGTH] = row, start, length
            table[base + GIVEN] = start + length
            if start + length == table[base + NBYTES]:
                if num_passed:
                    self._set_waiting([each for each in self._waiting() if each != row])
                else:
                    table[NEXT_WAITING] += 1
            self.prepare(ring, number, 0)
            num_prepared += 1

    def prepare(self, ring: Ring, number: int, moved: int) -> None:
        """Write the submission of what is left of request ``number`` when ``moved`` bytes of it are done."""
        table = self.table
        place = REQUESTS + number * REQUEST
        base = ROWS + table[place + OWNER] * ROW
        start = table[place + START] + moved
        ring.prepare(
            table[base + OPCODE], table[base + FILE], table[base + ADDRESS] + start, abs(table[place + LENGTH]) - moved,
            table[base + OFFSET] + start, FIRST_TAG + number, table[base + INDEX],
        )  # fmt: skip

    def request(self, number: int) -> tuple[int, int]:
        """Return the row that request ``number`` is part of, and its bytes."""
        place = REQUESTS + number * REQUEST
        return self.table[place + OWNER], abs(self.table[place + LENGTH])

    def set_aside(self, number: int) -> None:
        """Keep request ``number`` from the loop: it is tried again, and how it ends is for Python to see."""
        place = REQUESTS + number * REQUEST
        self.table[place + LENGTH] = -abs(self.table[place + LENGTH])

    def owner(self, number: int) -> int:
        """Return the row that request ``number`` is part of, or was."""
        return self.table[REQUESTS + number * REQUEST + OWNER]

    def requests_of(self, row: int) -> list[int]:
        """Return the numbers of the requests of ``row`` that the kernel has."""
        return [number for number in self._with_kernel() if self.request(number)[0] == row]

    def left(self, row: int) -> int:
        """Return how many bytes of ``row`` were neither moved nor given up."""
        return self.table[ROWS + row * ROW + LEFT]

    def end(self, number: int) -> bool:
        """Take request ``number`` back, all of whose bytes were moved or are lost; whether its operation has ended."""
        table = self.table
        row, nbytes = self.request(number)
        table[FREE + table[NUM_FREE]] = number
        table[NUM_FREE] += 1
        table[ROWS + row * ROW + LEFT] -= nbytes
        return not table[ROWS + row * ROW + LEFT]

    def give_up(self, row: int) -> int:
        """Start no more requests of ``row``; return how many bytes will not be moved for that."""
        base = ROWS + row * ROW
        nbytes = self.table[base + NBYTES] - self.table[base + GIVEN]
        self.table[base + GIVEN] += nbytes
        self.table[base + LEFT] -= nbytes
        self._set_waiting([each for each in self._waiting() if each != row])
        return nbytes

    def take_ended(self) -> list[int]:
        """Return the rows that the loop saw end."""
        number = self.table[NUM_ENDED]
        if not number:
            return []
        self.table[NUM_ENDED] = 0
        return self.table[ENDED : ENDED + number].tolist()

    def _waiting(self) -> list[int]:
        return self.table[WAITING + self.table[NEXT_WAITING] : WAITING + self.table[NUM_WAITING]].tolist()

    def _lets_pass(self, row: int, io_class: IOClass) -> bool:
        base = ROWS + row * ROW
        return io_class < self.table[base + URGENCY] and self.table[base + OVERTAKEN] < _MOST_OVERTAKEN

    def _set_waiting(self, rows: list[int]) -> None:
        for place, row in enumerate(rows):
            self.table[WAITING + place] = row
        self.table[NEXT_WAITING], self.table[NUM_WAITING] = 0, len(rows)

    def _with_kernel(self) -> list[int]:
        free = {self.table[FREE + place] for place in range(self.table[NUM_FREE])}
        return [number for number in range(MOST_REQUESTS) if number not in free]

    def _is_writing(self) -> bool:
        return any(self.table[ROWS + self.request(each)[0] * ROW + OPCODE] in _WRITES for each in self._with_kernel())

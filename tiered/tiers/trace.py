"""The recorded order in which keys are used, and how far away the next use of a key is.

Pure bookkeeping: no bytes, no budget. What to do with the order is schedule.py's business.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

__all__ = ["Trace"]


class Trace:
    """The order of use of one training step, learnt while it happens and replayed as a prediction.

    ``expected`` is the last complete step (or a guess given at the start), read cyclically from a cursor that follows
    the uses as they are recorded. A use that the prediction does not contain moves nothing; one that it contains
    further on moves the cursor there. So a model that changes its order costs hints, never correctness.

    ``promise`` notes uses that another thread will make soon, in the order in which they were handed over: they are
    recorded right after this thread's next use, which comes at the same time and has somebody waiting for it, so that
    the order does not depend on which thread runs faster; and they count as the next uses until ``kept``. All methods
    are thread-safe.
    """

    def __init__(self, guess: Sequence[str] = ()) -> None:
        self._expected: list[str] = []
        self._positions: dict[str, list[int]] = {}
        self._recorded: list[str] = []
        self._cursor = 0
        self._promised: dict[str, int] = {}  # in order -> number of the promise
        self._to_record: list[str] = []  # promised since this thread's last use
        self._num_promises = 0
        self._lock = threading.Lock()
        self._expect(guess)

    def __repr__(self) -> str:
        return f"Trace({len(self._expected)} uses expected, at {self._cursor})"

    def record(self, key: str) -> bool:
        """Note that ``key`` is used now; return False when it merely repeats the use before it."""
        with self._lock:
            is_new = self._record(key)
            self._record_promised()
            return is_new

    def promise(self, keys: Iterable[str], *, unrecorded: Iterable[str] = ()) -> None:
        """Note that another thread will use ``unrecorded`` and ``keys`` soon, in this order; ``keys`` are recorded."""
        with self._lock:
            for key in unrecorded:
                self._promise(key)
            for key in keys:
                self._to_record.append(key)
                self._promise(key)

    def kept(self, key: str) -> None:
        """Note that a promised use has happened, or will not."""
        with self._lock:
            self._promised.pop(key, None)

    def promised(self, num: int) -> list[str]:
        """Return the next ``num`` promised keys."""
        with self._lock:
            return list(islice(self._promised, num))

    def rewind(self) -> None:
        """Say that a new step begins: the prediction starts again, what was recorded since the last step is dropped."""
        with self._lock:
            self._rewind()

    def end_step(self) -> None:
        """Say that a step is complete: what was recorded becomes the prediction for the next one."""
        with self._lock:
            self._record_promised()
            if self._recorded and self._recorded != self._expected:
                self._expect(self._recorded)
            self._rewind()

    def upcoming(self) -> Iterator[str]:
        """Yield the keys expected from now on, soonest first, through one whole step."""
        with self._lock:
            expected, cursor = self._expected, self._cursor
        yield from islice(expected, cursor, None)
        yield from islice(expected, cursor)

    def distance(self, key: str) -> int:
        """Return after how many uses ``key`` is expected again; more than a whole step for a key never seen."""
        with self._lock:
            return self._distance(key)

    def farthest(self, keys: Iterable[str]) -> tuple[str | None, int]:
        """Return which of ``keys`` is expected last, the first of several, and its distance; (None, -1) for no keys."""
        farthest, found = -1, None
        with self._lock:
            for key in keys:
                distance = self._distance(key)
                if distance > farthest:
                    farthest, found = distance, key
        return found, farthest

    def _record(self, key: str) -> bool:
        if self._recorded and self._recorded[-1] == key:
            return False
        self._recorded.append(key)
        positions = self._positions.get(key)
        if positions:
            index = bisect_left(positions, self._cursor)
            if index < len(positions):
                self._cursor = positions[index] + 1
        return True

    def _record_promised(self) -> None:
        for key in self._to_record:
            self._record(key)
        self._to_record.clear()

    def _promise(self, key: str) -> None:
        self._num_promises += 1
        self._promised[key] = self._num_promises

    def _rewind(self) -> None:
        self._recorded.clear()
        self._to_record.clear()
        self._cursor = 0

    def _distance(self, key: str) -> int:
        promise = self._promised.get(key)
        if promise is not None:
            return min(promise - next(iter(self._promised.values())), self._expected_distance(key))
        return self._expected_distance(key)

    def _expected_distance(self, key: str) -> int:
        positions = self._positions.get(key)
        if not positions:
            return 2 * len(self._expected) + 1
        index = bisect_left(positions, self._cursor)
        if index < len(positions):
            return positions[index] - self._cursor
        return positions[0] + len(self._expected) - self._cursor

    def _expect(self, uses: Sequence[str]) -> None:
        self._expected = list(uses)
        self._positions = {}
        for position, key in enumerate(self._expected):
            self._positions.setdefault(key, []).append(position)

"""The recorded order in which keys are used, and how far away the next use of a key is.

Pure bookkeeping: no bytes, no budget. What to do with the order is schedule.py's business.
"""

from __future__ import annotations

import itertools
import threading
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence

__all__ = ["Trace"]

_MOST_STEPS = 8  # a step is not so much longer than the one before
_MOST_USES = 1 << 16  # nor than this, where nothing is expected
_NUM_FIRST = 4
"""Promised keys that come before anything else: one unit's parameters, gradients and what is read ahead for them."""
_NUM_LOOKED_AT = 256  # keys: a window of the schedule's, and the rooms between them


class Trace:
    """The order of use of one training step, learnt while it happens and replayed as a prediction.

    ``expected`` is the last complete step (or a guess given at the start), read cyclically from a cursor that follows
    the uses as they are recorded. A use that the prediction does not contain moves nothing; one that it contains
    further on moves the cursor there. So a model that changes its order costs hints, never correctness.

    ``promise`` notes uses that another thread will make soon, in the order in which they were handed over: they are
    recorded right after this thread's next use, which comes at the same time and has somebody waiting for it, so that
    the order does not depend on which thread runs faster. Until ``kept`` they come before all that is expected, but
    for what this thread uses before it waits for them: its next use where that is not recorded yet, and whatever it
    uses before the first promised key. That comes behind the first few promised ones. All methods are thread-safe.
    """

    def __init__(self, guess: Sequence[str] = ()) -> None:
        self._expected: list[str] = []
        self._positions: dict[str, list[int]] = {}
        self._recorded: list[str] = []
        self._cursor = 0
        self._next_uses: list[int] | None = None  # see _upcoming; None: not known
        self._next_uses_from = 0  # the cursor that they belong to
        self._promised: dict[str, int] = {}  # in order -> number of the promise
        self._to_record: list[str] = []  # promised since this thread's last use
        self._num_promises = 0
        self._num_recorded = 0  # promises that this thread's uses have passed: it waits for them next
        self._border: int | None = None  # see _first_waiting; None: not known
        self._lock = threading.Lock()
        self._expect(guess)

    def __repr__(self) -> str:
        return f"Trace({len(self._expected)} uses expected, at {self._cursor})"

    def record(self, *keys: str) -> bool:
        """Note that ``keys`` are used now, at one time; return False when it merely repeats the use before it."""
        with self._lock:
            is_new = tuple(self._recorded[-len(keys) :]) != keys
            if is_new:
                for key in keys:
                    self._record(key)
            if self._to_record:
                self._num_recorded = self._num_promises
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
            self._border = None

    def is_promised(self, key: str) -> bool:
        """Return whether ``key`` was promised, and that use has not happened. Takes no lock: one look at a dict."""
        return key in self._promised

    def rewind(self) -> None:
        """Say that a new step begins: the prediction starts again, what was recorded since the last step is dropped."""
        with self._lock:
            self._rewind()

    def end_step(self) -> None:
        """Say that a step is complete: what was recorded becomes the prediction for the next one."""
        with self._lock:
            self._record_promised()
            self._num_recorded = 0  # the next step waits for them one by one, if at all
            if self._recorded and self._recorded != self._expected:
                self._expect(self._recorded)
            self._rewind()

    def upcoming(self) -> Iterator[str]:
        """Yield the keys promised and expected from now on, soonest first, each once.

        Few are looked at until more are asked for: of ten thousand keys, each use looks at as many as a window has.
        """
        first = self._first_upcoming(_NUM_LOOKED_AT)
        yield from first
        if len(first) == _NUM_LOOKED_AT:
            known = set(first)  # what comes next may have changed meanwhile
            yield from (key for key in self._first_upcoming(None) if key not in known)

    def _first_upcoming(self, most: int | None) -> list[str]:
        with self._lock:
            expected, promised, uses = self._expected, self._promised, self._upcoming()
            num_before, num_expected = bisect_left(uses, self._first_waiting()), len(expected)
            later = (expected[at % num_expected] for at in uses)  # order: one iterator, the border takes a part of it
            upcoming = itertools.chain(
                itertools.islice(promised, _NUM_FIRST),
                (key for key in itertools.islice(later, num_before) if key not in promised),
                itertools.islice(promised, _NUM_FIRST, None),
                (key for key in later if key not in promised),
            )
            return list(itertools.islice(upcoming, most))

    def distance(self, key: str) -> int:
        """Return after how many uses ``key`` is expected again; more than a whole step for a key never seen."""
        with self._lock:
            return self._distance(key)

    def farthest(self, keys: Iterable[str]) -> tuple[str | None, int]:
        """Return which of ``keys`` is expected last, the first of several, and its distance; (None, -1) for no keys.

        Looks at no key behind the first one that is not expected at all: a million keys of others cost nothing.
        """
        farthest, found = -1, None
        with self._lock:
            positions, promised, cursor = self._positions, self._promised, self._cursor
            border, num_expected, num_promised = self._first_waiting(), len(self._expected), len(self._promised)
            num_first = min(num_promised, _NUM_FIRST)
            for key in keys:
                if key in promised:
                    distance = self._distance(key)
                elif not (uses := positions.get(key)):
                    return key, self._never()
                elif uses[-1] < cursor:
                    distance = uses[0] + num_expected - cursor + num_promised
                else:
                    at = uses[bisect_left(uses, cursor)]
                    distance = at - cursor + (num_promised if at >= border else num_first)
                if distance > farthest:
                    farthest, found = distance, key
        return found, farthest

    def _record(self, key: str) -> None:
        if self._recorded and self._recorded[-1] == key:
            return
        if len(self._recorded) > max(_MOST_USES, _MOST_STEPS * len(self._expected)):
            del self._recorded[: len(self._recorded) // 2]  # forwards that no step follows
        self._recorded.append(key)
        positions = self._positions.get(key)
        if positions:
            index = bisect_left(positions, self._cursor)
            if index < len(positions):
                self._cursor = positions[index] + 1
                self._border = None

    def _record_promised(self) -> None:
        for key in self._to_record:
            self._record(key)
        self._to_record.clear()
        self._border = None

    def _first_waiting(self) -> int:
        """Return the position of the first expected use that comes after the promised ones."""
        if self._border is None:
            self._border = self._find_border()
        return self._border

    def _find_border(self) -> int:
        first = next(iter(self._promised.values()), None)
        if first is None:
            return len(self._expected)
        if first <= self._num_recorded:
            return self._cursor
        this_step = itertools.takewhile(lambda at: at < len(self._expected), self._upcoming())
        return next((at for at in this_step if self._expected[at] in self._promised), len(self._expected))

    def _upcoming(self) -> list[int]:
        """Return the position of each expected key's next use, in order; those of the next step behind this step's.

        It follows the cursor: a loop over one key, a thousand times, costs each use no look at the others.
        """
        if self._next_uses is None or self._cursor < self._next_uses_from:
            self._next_uses = [positions[0] for positions in self._positions.values()]
        uses, num_expected = self._next_uses, len(self._expected)
        while uses and uses[0] < self._cursor:
            positions = self._positions[self._expected[uses.pop(0)]]
            index = bisect_left(positions, self._cursor)
            insort(uses, positions[index] if index < len(positions) else positions[0] + num_expected)
        self._next_uses_from = self._cursor
        return uses

    def _promise(self, key: str) -> None:
        self._num_promises += 1
        self._promised.pop(key, None)  # order: a key that is promised again goes to the end
        self._promised[key] = self._num_promises
        self._border = None

    def _rewind(self) -> None:
        self._recorded.clear()
        self._to_record.clear()
        self._num_recorded = 0
        self._cursor = 0
        self._border = None

    def _distance(self, key: str) -> int:
        expected = self._expected_distance(key)
        promise = self._promised.get(key)
        if promise is None:
            return expected
        rank = promise - next(iter(self._promised.values()))
        return min(expected, rank if rank < _NUM_FIRST else self._first_waiting() - self._cursor + rank)

    def _expected_distance(self, key: str) -> int:
        positions = self._positions.get(key)
        if not positions:
            return self._never()
        index = bisect_left(positions, self._cursor)
        if index < len(positions):
            at, num_before = positions[index], len(self._promised)
            return at - self._cursor + (num_before if at >= self._first_waiting() else min(num_before, _NUM_FIRST))
        return positions[0] + len(self._expected) - self._cursor + len(self._promised)

    def _never(self) -> int:
        """Return the distance of a key that is not expected: more than any other."""
        return 2 * len(self._expected) + self._num_promises + 1

    def _expect(self, uses: Sequence[str]) -> None:
        self._border = None
        self._next_uses = None
        self._expected = list(uses)
        self._positions = {}
        for position, key in enumerate(self._expected):
            self._positions.setdefault(key, []).append(position)

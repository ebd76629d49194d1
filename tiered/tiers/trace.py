"""The recorded order in which keys are used, and how far away the next use of a key is.

Pure bookkeeping: no bytes, no budget, and no thread, lock or clock; the caller has one lock around all calls.
schedule.py decides by this order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

__all__ = ["Trace"]

_MOST_STEPS = 8  # a step is not so much longer than the one before
_MOST_USES = 1 << 16  # nor than this, where nothing is expected
_NUM_FIRST = 4
"""Promised keys that come before anything else: one unit's parameters, gradients and the keys read ahead for them."""


class Trace:
    """The order of use of one training step, learnt while it happens and replayed as a prediction.

    ``expected`` is the last complete step (or a guess given at the start), read cyclically from a cursor that follows
    the uses as they are recorded. A use that the prediction does not contain moves nothing; one that it contains
    further on moves the cursor there. So a model that changes its order costs hints, never correctness.

    ``promise`` notes uses that another thread will make soon, in the order of the hand-over. They are recorded right
    after this thread's next use, which comes at the same time and which a thread waits for; so the order does not
    depend on which thread runs faster. Until ``kept`` they come before all expected keys but those that this thread
    uses before it waits for them: its next use where that is not recorded yet, and its uses before the first promised
    key. The latter come behind the first few promised ones.

    The invariant: *``_at`` has the position of each expected key's next use from the cursor on*, those of the next
    step counted on behind this one's. Each position knows the next use of its key, so that a use costs one look.
    """

    def __init__(self, guess: Sequence[str] = ()) -> None:
        self._expected: list[str] = []
        self._next: list[int] = []  # position -> that of the next use of its key
        self._first: dict[str, int] = {}  # key -> position of its first use
        self._at: dict[str, int] = {}
        self._cursor = 0
        self._recorded: list[str] = []
        self._promised: dict[str, int] = {}  # in order -> number of the promise
        self._to_record: list[str] = []  # promised since this thread's last use
        self._num_promises = 0
        self._num_recorded = 0  # promises that this thread's uses have passed: it waits for them next
        self._waiting_from = 0  # no promised key is expected between the cursor and there
        self._expect(guess)

    def __repr__(self) -> str:
        return f"Trace({len(self._expected)} uses expected, at {self._cursor})"

    def record(self, *keys: str) -> bool:
        """Note that ``keys`` are used now, at one time; return False when it merely repeats the use before it."""
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
        for key in unrecorded:
            self._promise(key)
        for key in keys:
            self._to_record.append(key)
            self._promise(key)

    def kept(self, key: str) -> None:
        """Note that a promised use has happened, or will not."""
        self._promised.pop(key, None)

    @property
    def has_promises(self) -> bool:
        """Whether any key was promised whose use has not happened. Any thread, without the lock."""
        return bool(self._promised)

    def is_promised(self, key: str) -> bool:
        """Return whether ``key`` was promised, and that use has not happened."""
        return key in self._promised

    def rewind(self) -> None:
        """Say that a new step begins: the prediction starts again; uses recorded since the last step are dropped."""
        self._recorded.clear()
        self._to_record.clear()
        self._num_recorded = 0
        if self._cursor:
            self._cursor = 0
            self._at = self._first.copy()
        self._waiting_from = 0

    def end_step(self) -> None:
        """Say that a step is complete: the recorded uses become the prediction for the next one."""
        self._record_promised()
        if self._recorded and self._recorded != self._expected:
            self._expect(self._recorded)
        self.rewind()  # the next step waits for promised keys one by one, if at all

    def upcoming(self) -> Iterator[str]:
        """Yield the keys promised and expected from now on, soonest first, each once. Nothing may be noted meanwhile.

        No more is looked at than is asked for: of ten thousand keys, each use looks at as many as a window has.
        """
        first, promised = self._first_waiting(), iter(self._promised)
        return itertools.chain(
            itertools.islice(promised, _NUM_FIRST),
            self._expected_between(self._cursor, first),
            promised,
            self._expected_between(first, self._cursor + len(self._expected)),
        )

    @property
    def end(self) -> int:
        """The position behind the last expected use, one step from the cursor."""
        return self._cursor + len(self._expected)

    def next_use(self, key: str) -> int:
        """Return the position of the next expected use of ``key``, to be compared with others; -1 where none is."""
        return self._at.get(key, -1)

    def distance(self, key: str) -> int:
        """Return after how many uses ``key`` is expected again; more than a whole step for a key never seen."""
        return self.farthest((key,))[1]

    def farthest(self, keys: Iterable[str]) -> tuple[str | None, int]:
        """Return which of ``keys`` is expected last, the first of several, and its distance; (None, -1) for no keys.

        Stops at the first key that is not expected at all: a million other keys cost nothing.
        """
        farthest, found = -1, None
        positions, promised, cursor, first = self._at, self._promised, self._cursor, self._first_waiting()
        num_promised = len(promised)
        num_first = min(num_promised, _NUM_FIRST)
        oldest = next(iter(promised.values()), 0)
        never = 2 * len(self._expected) + self._num_promises + 1
        for key in keys:
            at, promise = positions.get(key), promised.get(key)
            if at is None and promise is None:
                return key, never
            distance = never if at is None else at - cursor + (num_promised if at >= first else num_first)
            if promise is not None:
                rank = promise - oldest
                distance = min(distance, rank if rank < _NUM_FIRST else first - cursor + rank)
            if distance > farthest:
                farthest, found = distance, key
        return found, farthest

    def _record(self, key: str) -> None:
        if self._recorded and self._recorded[-1] == key:
            return
        if len(self._recorded) > max(_MOST_USES, _MOST_STEPS * len(self._expected)):
            del self._recorded[: len(self._recorded) // 2]  # forwards that no step follows
        self._recorded.append(key)
        expected, positions = self._expected, self._at
        used = positions.get(key, len(expected))
        if used < len(expected):
            for position in range(self._cursor, used + 1):
                positions[expected[position]] = self._next[position]
            self._cursor = used + 1

    def _record_promised(self) -> None:
        for key in self._to_record:
            self._record(key)
        self._to_record.clear()

    def _promise(self, key: str) -> None:
        self._num_promises += 1
        self._promised.pop(key, None)  # order: a key that is promised again goes to the end
        self._promised[key] = self._num_promises
        at = self._at.get(key, self._waiting_from)
        self._waiting_from = min(self._waiting_from, at)

    def _first_waiting(self) -> int:
        """Return the position of the first expected use of this step that comes after the promised ones."""
        oldest = next(iter(self._promised.values()), None)
        if oldest is not None and oldest <= self._num_recorded:
            return self._cursor
        first, num_expected = max(self._waiting_from, self._cursor), len(self._expected)
        if oldest is None:
            return num_expected
        while first < num_expected and self._expected[first] not in self._promised:
            first += 1
        self._waiting_from = first
        return first

    def _expected_between(self, start: int, stop: int) -> Iterator[str]:
        """Yield the keys whose next use is in [start, stop) and that were not promised."""
        expected, positions, promised, num_expected = self._expected, self._at, self._promised, len(self._expected)
        for position in range(start, stop):
            key = expected[position if position < num_expected else position - num_expected]
            if positions[key] == position and key not in promised:
                yield key

    def _expect(self, uses: Sequence[str]) -> None:
        self._expected = list(uses)
        num_expected = len(self._expected)
        self._next = [0] * num_expected
        self._first = {}
        for position in range(num_expected - 1, -1, -1):
            key = self._expected[position]
            self._next[position] = self._first.get(key, -1)
            self._first[key] = position
        for position, later in enumerate(self._next):
            if later < 0:  # the last use in a step: the next one is the first of the step after it
                self._next[position] = self._first[self._expected[position]] + num_expected
        self._at = self._first.copy()
        self._cursor = self._waiting_from = 0

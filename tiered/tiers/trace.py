"""The recorded order in which keys are used, and how far away the next use of a key is.

Pure bookkeeping: no bytes, no budget. What to do with the order is schedule.py's business.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

__all__ = ["Trace"]


class Trace:
    """The order of use of one training step, learnt while it happens and replayed as a prediction.

    ``expected`` is the last complete step (or a guess given at the start), read cyclically from a cursor that follows
    the uses as they are recorded. A use that the prediction does not contain moves nothing; one that it contains
    further on moves the cursor there. So a model that changes its order costs hints, never correctness.
    """

    def __init__(self, guess: Sequence[str] = ()) -> None:
        self._expected: list[str] = []
        self._positions: dict[str, list[int]] = {}
        self._recorded: list[str] = []
        self._cursor = 0
        self._expect(guess)

    def __repr__(self) -> str:
        return f"Trace({len(self._expected)} uses expected, at {self._cursor})"

    def record(self, key: str) -> bool:
        """Note that ``key`` is used now; return False when it merely repeats the use before it."""
        if self._recorded and self._recorded[-1] == key:
            return False
        self._recorded.append(key)
        positions = self._positions.get(key)
        if positions:
            index = bisect_left(positions, self._cursor)
            if index < len(positions):
                self._cursor = positions[index] + 1
        return True

    def rewind(self) -> None:
        """Say that a new step begins: the prediction starts again, what was recorded since the last step is dropped."""
        self._recorded.clear()
        self._cursor = 0

    def end_step(self) -> None:
        """Say that a step is complete: what was recorded becomes the prediction for the next one."""
        if self._recorded and self._recorded != self._expected:
            self._expect(self._recorded)
        self.rewind()

    def upcoming(self) -> Iterator[str]:
        """Yield the keys expected from now on, soonest first, through one whole step."""
        yield from self._expected[self._cursor :]
        yield from self._expected[: self._cursor]

    def distance(self, key: str) -> int:
        """Return after how many uses ``key`` is expected again; more than a whole step for a key never seen."""
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

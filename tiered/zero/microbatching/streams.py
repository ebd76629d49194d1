"""The random numbers of each micro-batch: those it would draw if the micro-batches ran one after another.

Then each begins where the one before ended. That place is not known while both are under way: the count of numbers that
a micro-batch of the same shapes drew last time predicts it. The prediction is checked at the end.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence

from tiered.errors import UsageError
from tiered.zero.microbatching.random_draws import Draws, RandomStates, advance, count_draws

__all__ = ["BackwardStreams", "DrawCounts", "ForwardStreams"]

_log = logging.getLogger("tiered")

_MAX_MISTAKES = 2


class DrawCounts:
    """The counts of random numbers that micro-batches of one model draw in their forward, by the micro-batch's kind."""

    def __init__(self) -> None:
        self._counts: dict[Hashable, Draws | None] = {}  # None: not draws of torch's generator alone
        self._num_mistakes = 0
        self._may_presume = True

    def count(self, kind: Hashable, *, draws_nothing: bool) -> Draws | None:
        """Return how many numbers a micro-batch of ``kind`` will draw, () for none; None where that is not known.

        ``draws_nothing`` is the presumption, as long as it was never wrong.
        """
        if self._num_mistakes >= _MAX_MISTAKES:
            return None
        return self._counts.get(kind, () if draws_nothing and self._may_presume else None)

    def learn(self, kind: Hashable, start: RandomStates, end: RandomStates) -> None:
        """A micro-batch of ``kind`` drew from ``start`` to ``end``, which was unknown or predicted otherwise."""
        if self._num_mistakes >= _MAX_MISTAKES or (kind in self._counts and self._counts[kind] is None):
            return  # such counts cannot be predicted
        count = count_draws(start, end)
        if count is not None and not any(count):
            count = ()
        if kind in self._counts and count != self._counts[kind]:
            self._was_wrong()
        self._may_presume = self._may_presume and count == ()
        self._counts[kind] = count

    def _was_wrong(self) -> None:
        self._num_mistakes += 1
        if self._num_mistakes == _MAX_MISTAKES:
            _log.warning(
                "tiered.micro_batches: how many random numbers a forward draws depends on more than the shapes of its"
                " inputs; from now on the forwards run one after another, and parameters are read again for each"
            )


class ForwardStreams:
    """Each lane's states of the generators. ``kinds``: the kind of each lane's micro-batch, see ``DrawCounts``.

    A lane of unknown kind runs to its end before those after it begin: they begin where it ended.
    """

    def __init__(self, draw_counts: DrawCounts, kinds: Sequence[Hashable], *, draws_nothing: bool) -> None:
        self._draw_counts = draw_counts
        self._kinds = list(kinds)
        self._draws_nothing = draws_nothing
        begin = RandomStates.now()
        self._starts = [begin] * len(kinds)
        self._now = [begin] * len(kinds)
        self._has_begun = [False] * len(kinds)
        self._has_ended = [False] * len(kinds)

    def enter(self, index: int) -> None:
        """Give lane ``index`` its states."""
        if not self._has_begun[index]:
            self._has_begun[index] = True
            self._starts[index] = self._now[index] = self._start(index)
        self._now[index].restore()

    def leave(self, index: int, *, has_ended: bool) -> None:
        """Keep lane ``index``'s states."""
        self._now[index] = RandomStates.now()
        self._has_ended[index] = has_ended
        if has_ended and self._count(index) is None:
            self._draw_counts.learn(self._kinds[index], self._starts[index], self._now[index])

    def must_go_on(self, index: int) -> bool:
        """Return whether the number of draws of lane ``index`` is unknown."""
        return self._count(index) is None

    def to_repeat(self) -> list[int]:
        """All lanes have ended: return those that must run again, as they did not begin where the one before ended.

        The first of them will begin rightly, the others as far as the counts predict now.
        """
        for index in range(1, len(self._kinds)):
            start = self._now[index - 1]
            if self._starts[index].same_as(start):
                continue
            self._draw_counts.learn(self._kinds[index - 1], self._starts[index - 1], start)
            if not self._now[index].same_as(self._starts[index]):
                rest = list(range(index, len(self._kinds)))
                for later in rest:
                    self._has_begun[later] = self._has_ended[later] = False
                return rest
            self._starts[index] = self._now[index] = start  # it has drawn nothing
        return []

    def finish(self) -> None:
        """Leave the generators as the last micro-batch has left them."""
        if not self._now[-1].same_as(self._starts[-1]) and self._count(-1) in (None, ()):
            self._draw_counts.learn(self._kinds[-1], self._starts[-1], self._now[-1])
        self._now[-1].restore()

    def _count(self, index: int) -> Draws | None:
        return self._draw_counts.count(self._kinds[index], draws_nothing=self._draws_nothing)

    def _start(self, index: int) -> RandomStates:
        """Return where lane ``index`` begins: where the one before has ended or, as far as is known, will end."""
        if index == 0:
            return self._starts[0]
        if self._has_ended[index - 1]:
            return self._now[index - 1]
        return advance(self._starts[index - 1], self._count(index - 1) or ())


class BackwardStreams:
    """Every lane finds the generators as the backward did, and must leave them so, as checkpoints do."""

    def __init__(self, num_lanes: int) -> None:
        self._begin = RandomStates.now()
        self._now = [self._begin] * num_lanes

    def enter(self, index: int) -> None:
        """Give lane ``index`` its states."""
        self._now[index].restore()

    def leave(self, index: int, *, has_ended: bool) -> None:
        """Keep lane ``index``'s states. Raises UsageError when it ends with others than it began with."""
        self._now[index] = RandomStates.now()
        if has_ended and not self._now[index].same_as(self._begin):
            raise UsageError(
                "tiered.micro_batches: the backward of a micro-batch drew random numbers, which the forward of the next"
                " would have had to come after; expected draws in forwards only: checkpoint with preserve_rng_state"
                "=True, or run the micro-batches one after another"
            )

    def must_go_on(self, index: int) -> bool:
        """Return False."""
        return False

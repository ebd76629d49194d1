"""Collation: the random numbers that a collator draws for batches which a commit finds made and not used yet.

accelerate's loader makes one batch ahead. Where its collator draws, as for a masked language model, the batch was drawn
for before the commit, and the next one is drawn for after it: a resumed run does the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from tiered.zero.model_state import RandomState

__all__ = ["Collation"]


class Collation:
    """Stands in for a collator in the training process. ``pending``: the random states before each unused batch."""

    def __init__(self) -> None:
        self.collate: Callable[[Any], Any] = lambda items: items
        self.pending: deque[dict[str, Any]] = deque()
        self._replay: deque[dict[str, Any]] = deque()

    def __call__(self, items: Any) -> Any:
        """Return the collator's batch of ``items``; of those that a resumed run had made, as they were."""
        is_again = len(self._replay) > 1
        if is_again:
            RandomState().load_state_dict(self._replay.popleft())
        self.pending.append(RandomState().state_dict())
        batch = self.collate(items)
        if is_again and len(self._replay) == 1:
            RandomState().load_state_dict(self._replay.popleft())
        return batch

    def used(self, number: int) -> None:
        """The loop has taken ``number`` batches."""
        for _ in range(min(number, len(self.pending))):
            self.pending.popleft()

    def replay(self, states: Sequence[dict[str, Any]], then: dict[str, Any]) -> None:
        """Make the next batches under ``states``, one each, and go on with ``then``."""
        self.pending.clear()
        self._replay = deque([*states, then])

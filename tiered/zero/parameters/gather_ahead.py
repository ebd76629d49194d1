"""GatherAhead: the next units' bytes on their way to a compute device of its own memory, while a unit computes."""

from __future__ import annotations

from collections.abc import Callable

from tiered.tiers.accelerator import AcceleratorTier
from tiered.tiers.compute_tier import ComputeTier
from tiered.zero.parameters.open_units import Ahead
from tiered.zero.parameters.unit import Unit

__all__ = ["GatherAhead", "ahead_on"]

_NUM_UNITS = 2  # ahead of the one that computes


class GatherAhead(Ahead):
    """Copies begin as a unit opens, or at an operation of it, once the next unit's bytes are in DRAM and updated.

    A hint: a wrong one costs a copy. The unit after the next one is what followed the same two units last time.
    """

    def __init__(self, tier: AcceleratorTier, is_pending: Callable[[Unit], bool]) -> None:
        """``is_pending(unit)``: whether an update is about to change its bytes."""
        self._tier = tier
        self._is_pending = is_pending
        self._followers: dict[tuple[Unit | None, Unit | None], Unit] = {}
        self._last: tuple[Unit | None, Unit | None] = (None, None)
        self._wanted: list[Unit] = []

    def opened(self, unit: Unit) -> None:
        """``unit`` was opened: those that follow it are wanted."""
        self._followers[self._last] = unit
        self._last = self._last[1], unit
        self._wanted.clear()
        two: tuple[Unit | None, Unit | None] = self._last
        while len(self._wanted) < _NUM_UNITS and (follower := self._followers.get(two)) is not None:
            self._wanted.append(follower)
            two = two[1], follower
        self.go_on()

    def go_on(self) -> None:
        """Begin the copies that can begin, in their order."""
        wanted = self._wanted
        while wanted and (wanted[0].is_open or self._begin(wanted[0])):
            del wanted[0]

    def _begin(self, unit: Unit) -> bool:
        return not self._is_pending(unit) and all(map(self._tier.gather_ahead, unit.keys))


def ahead_on(tier: ComputeTier, is_pending: Callable[[Unit], bool]) -> Ahead:
    """Return what works ahead on ``tier``."""
    return GatherAhead(tier, is_pending) if isinstance(tier, AcceleratorTier) else Ahead()

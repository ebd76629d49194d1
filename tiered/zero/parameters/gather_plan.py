"""GatherPlan: the one decision which unit is gathered, which units come next, and when a gathered unit is released.

Over several ranks a gather is a collective: all ranks must gather the same units in the same order. So the plan is pure
arithmetic on events of program order. It counts no bytes, asks no memory, and has no thread, lock or clock.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Generic, NamedTuple, TypeVar

__all__ = ["GatherPlan", "Moves"]

U = TypeVar("U")


class Moves(NamedTuple, Generic[U]):
    """The moves around one gather, in their order: releases ``before`` it, the gather, releases ``after`` it."""

    before: tuple[U, ...]
    after: tuple[U, ...]


class GatherPlan(Generic[U]):
    """The plan of one model's gathers: events of program order go in, gathers and releases come out. One thread.

    Invariants: *beside the root, at most ``num_slots`` units are gathered at one time*, but those that
    ``tiered.unsharded`` lends and those that one operation needs ``beyond`` the slots, which are the caller's share and
    are released as the operation ends. The one that is gathered ``ahead`` is among them. *Equal events give equal
    moves*: ``num_slots`` and ``keeps`` follow from budgets and sizes alone, and are decided between steps. Units are
    any hashable objects. With ``keeps`` all slots are there for good, and a unit that a forward with gradients uses
    stays gathered until its backward.
    """

    def __init__(self, root: U) -> None:
        self.root = root
        self.num_slots = 1
        self.keeps = False
        self.lent: set[U] = set()  # by tiered.unsharded: not released before its block ends
        self.gathered: dict[U, None] = {}  # the oldest first
        self.beyond: set[U] = set()  # gathered in the caller's share: one operation needs more units than slots
        self.ahead: U | None = None  # a unit that is gathered, and not open
        self._use = ""  # of the unit that was opened last
        self._followers: dict[tuple[U | None, U | None], U] = {}
        self._uses: dict[tuple[U | None, U | None], str] = {}  # of the followers
        self._last: tuple[U | None, U | None] = (None, None)

    def __repr__(self) -> str:
        return f"GatherPlan({len(self.gathered)} gathered, {self.num_slots} slots, keeps={self.keeps})"

    # -- events --------------------------------------------------------------------------------------------------

    def open(
        self,
        unit: U,
        *,
        used: Collection[U | None],
        running: Collection[U],
        until_backward: bool = False,
        use: str = "",
    ) -> Moves[U]:
        """``unit`` is about to be used, and is gathered between the two groups of releases that are returned.

        ``use``: a word for what, such as "backward". A unit that was gathered ahead for nothing goes.

        ``used``: the units whose modules are being called; ``running``: those that an operation uses at this moment,
        which stay. Other units are idle: they go, but with ``until_backward`` in a plan that ``keeps``. A unit whose
        module is being called goes where the slots are full, the oldest first. A release counts once ``released`` has
        told of it.
        """
        assert unit not in self.gathered, unit
        self._followers[self._last], self._uses[self._last], self._use = unit, use, use
        self._last = self._last[1], unit
        self.ahead = None if self.ahead is unit else self.ahead
        unused = [] if self.ahead is None else [self.ahead]
        if until_backward and self.keeps:
            self.gathered[unit] = None
            return Moves((), tuple(unused))
        idle, called, num_taken = unused, list[U](), len(unused)
        for each in self.gathered:
            if each is self.root or each in self.lent:
                continue
            num_taken += each not in self.beyond
            if each not in running:
                (called if each in used else idle).append(each)
        takes_slot = unit is not self.root and unit not in self.lent
        num_over = max(0, num_taken + 1 - self.num_slots) if takes_slot else 0
        before = [*idle, *called][:num_over]
        if num_over > len(before):
            self.beyond.add(unit)
        self.gathered[unit] = None
        return Moves(tuple(before), tuple(idle[len(before) :]))

    def next_ahead(self) -> U | None:
        """Return the unit to be gathered ahead of its use now, which takes a slot until then; None for none.

        It is the one that is expected next, for the same use: before another its bytes may change.
        """
        unit = self._followers.get(self._last)
        if unit is None or self.ahead is not None or unit in self.gathered or self._uses[self._last] != self._use:
            return None
        num_taken = sum(
            each is not self.root and each not in self.lent and each not in self.beyond for each in self.gathered
        )
        if unit is not self.root and num_taken + 1 > self.num_slots:
            return None
        self.ahead = unit
        return unit

    def last_use(self, unit: U, *, used: Collection[U | None], until_backward: bool) -> bool:
        """A call of the module of ``unit`` ends; return whether the unit is released. ``used``: as for ``open``."""
        return not (unit in used or unit in self.lent or (until_backward and self.keeps))

    def end(self, *, until_backward: bool = False) -> list[U]:
        """A forward or backward ends, or a step begins: return the units to be released, all but those that are lent.

        None with ``until_backward`` in a plan that ``keeps``.
        """
        if until_backward and self.keeps:
            return []
        return [unit for unit in self.gathered if unit not in self.lent] + ([] if self.ahead is None else [self.ahead])

    def released(self, unit: U) -> None:
        """``unit`` is gathered no more, for whatever reason. Idempotent."""
        self.gathered.pop(unit, None)
        self.beyond.discard(unit)
        self.ahead = None if self.ahead is unit else self.ahead

    def coming(self, num: int) -> list[U]:
        """Return the ``num`` units that are expected next, fewer where the order is not known.

        The unit after two others is the one that followed the same two units last time.
        """
        last, units = self._last, list[U]()
        while len(units) < num and (follower := self._followers.get(last)) is not None:
            units.append(follower)
            last = last[1], follower
        return units

    def forget(self) -> None:
        """In a forked child: all that is gathered is the parent's."""
        self.gathered.clear()
        self.beyond.clear()
        self.ahead = None
        self.lent.clear()

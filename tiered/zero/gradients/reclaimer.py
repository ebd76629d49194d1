"""Reclaimer: a model gives memory back to a caller that waits for bytes beyond the shares of the budget."""

from __future__ import annotations

import os
from collections.abc import Callable

from tiered.store.waiting.calling_thread import this_thread
from tiered.zero.gradients.open_gradients import OpenGradients
from tiered.zero.gradients.updates import Updates
from tiered.zero.parameters.open_units import OpenUnits

__all__ = ["Reclaimer"]


class Reclaimer:
    """Gives back leases of one model that the model can do without for now.

    Shares make that rare. The reclaimer helps where tensors of the user's keep bytes that are in no share, or where
    the forward of one unit calls another's. ``updates()`` returns the present updates.
    """

    def __init__(self, open_units: OpenUnits, open_gradients: OpenGradients, updates: Callable[[], Updates]) -> None:
        self._open_units = open_units
        self._open_gradients = open_gradients
        self._updates = updates
        self._pid = os.getpid()

    def reclaim(self, nbytes: int) -> bool:
        """Help the caller; return whether a lease was given back. The update thread asks the training thread."""
        if os.getpid() != self._pid:
            return False
        updates, tier = self._updates(), self._open_units.root.tier
        if tier.settle_one():
            return True
        if updates.is_this_thread():
            return updates.ask()
        if this_thread() != self._open_units.thread:
            return False
        return self.give_back() or updates.wait_for_one()

    def give_back(self) -> bool:
        """In the training thread: give the working set memory back; return whether there was some.

        A model on a compute device has nothing in DRAM but gradients that wait.
        """
        if self._open_units.root.tier.computes_in_dram:
            return self.make_way()
        return self._open_gradients.let_go_one() or self._updates().release_gradients()

    def make_way(self) -> bool:
        """In the training thread: give memory back where the model computes; return whether there was some.

        Idle units go first, then gradients. Units of a backward come late, for they are about to be used, and so does
        the root.
        """
        return (
            self._open_units.park_one(root=False, in_backward=False)
            or self._open_gradients.store_away_one()
            or self._open_units.park_one(root=True, in_backward=True)
            or self._updates_make_way()
            or self._open_gradients.store_away_one(in_use=True)
        )

    def _updates_make_way(self) -> bool:
        """Have updates that are pending give back what they have where the model computes."""
        updates, tier = self._updates(), self._open_units.root.tier
        if tier.computes_in_dram:
            return updates.release_gradients()
        return tier.keeps_gradients and updates.wait_for_one()

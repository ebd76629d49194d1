"""Which units and gradients of one model are leased now, by address and by age, and what to give back under pressure.

Mechanism only: what is opened and when is the engine's say, what becomes of parked bytes the working set's.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from tiered.store.working_set import Lease, WorkingSet

if TYPE_CHECKING:
    from tiered.zero.gradients import UnitGradients
    from tiered.zero.unit import Unit

__all__ = ["Residency"]


class Residency:
    """The open leases of one model's units and gradients, oldest first.

    Invariant: a unit is listed exactly while it has a lease. ``shielded`` units are never parked here (``unsharded``).
    """

    def __init__(self, working_set: WorkingSet, root: Unit) -> None:
        self.num_swaps = 0  # leases of units so far, for reports and tests
        self.shielded: set[Unit] = set()
        self._working_set = working_set
        self._root = root
        self._pid = os.getpid()
        self._units: dict[Unit, None] = {}
        self._gradients: dict[UnitGradients, None] = {}
        self._addresses: dict[int, tuple[Unit, Lease]] = {}
        self._to_delete: list[str] = []
        working_set.add_reclaimer(self._reclaim)

    def __repr__(self) -> str:
        return f"Residency({len(self._units)} units, {len(self._gradients)} gradients open)"

    def opened(self, unit: Unit, active: set[Unit | None]) -> None:
        """A unit has leased its bytes; park what is neither in ``active`` nor the root nor in use."""
        assert unit.lease is not None
        self.num_swaps += 1
        self._addresses[unit.lease.tensor.untyped_storage().data_ptr()] = (unit, unit.lease)
        self._units[unit] = None
        for other in list(self._units):
            if other is not unit and other is not self._root and other not in active | self.shielded:
                other.park()

    def parked(self, unit: Unit) -> None:
        """A unit has given its lease back."""
        self._units.pop(unit, None)

    def address_of(self, tensor: torch.Tensor) -> Unit | None:
        """Return the unit in whose living buffer ``tensor`` lies."""
        if tensor.layout is not torch.strided or tensor.device.type != "cpu" or not tensor.numel():
            return None
        found = self._addresses.get(tensor.untyped_storage().data_ptr())
        if found is None:
            return None
        unit, lease = found
        if unit.lease is not lease and lease.release():  # an address of the past
            return None
        return unit

    def gradients_opened(self, gradients: UnitGradients) -> None:
        """A unit's gradients are in DRAM and shown."""
        self._gradients[gradients] = None

    def gradients_closed(self, gradients: UnitGradients) -> None:
        """A unit's gradients are the working set's, or gone."""
        self._gradients.pop(gradients, None)

    def discard(self, key: str, *, ended: bool) -> None:
        """Delete a scratch key now, or at the next ``sweep`` when a caller still sees its bytes."""
        if ended:
            self._working_set.delete([key])
        else:
            self._to_delete.append(key)

    def sweep(self) -> None:
        """Delete the keys whose last views were alive when they were discarded."""
        keys, self._to_delete = self._to_delete, []
        self._working_set.delete(keys)

    def park_all(self) -> None:
        """Give every lease of a unit back."""
        for unit in list(self._units):
            if unit not in self.shielded:
                unit.park()

    def forget(self) -> None:
        """In a forked child: nothing of the parent's memory is there."""
        for unit in list(self._units):
            unit.forget()
        self._units.clear()
        self._gradients.clear()

    def _reclaim(self, nbytes: int) -> bool:
        """Give the working set something back: an idle unit first, then gradients. See ``add_reclaimer``."""
        if os.getpid() != self._pid:
            return False
        for unit in [*(u for u in self._units if u is not self._root), self._root]:
            if unit.lease is not None and unit.num_ops == 0 and unit not in self.shielded and unit.park():
                return True
        return any(gradients.store_away() for gradients in list(self._gradients))

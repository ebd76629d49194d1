"""Which units and gradients of one model are leased now, by address and by age, and what to give back under pressure.

Mechanism only: what is opened and when is the engine's say, what becomes of parked bytes the working set's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

from tiered.errors import UsageError
from tiered.store.residency.working_set import Lease, WorkingSet

if TYPE_CHECKING:
    from tiered.zero.gradients.gradients import UnitGradients
    from tiered.zero.optimizer.update_worker import UpdateWorker
    from tiered.zero.parameters.unit import Unit

__all__ = ["Residency"]


class Residency:
    """The open leases of one model's units and gradients, oldest first.

    Invariant: a unit is listed exactly while it has a lease. ``shielded`` units are never parked here (``unsharded``).
    """

    def __init__(self, working_set: WorkingSet, root: Unit, worker: UpdateWorker) -> None:
        self.num_swaps = 0  # leases of units so far, for reports and tests
        self.shielded: set[Unit] = set()
        self.opening: Unit | None = None  # in a backward, and will lease gradients as those that are open
        self.distance: Callable[[str], int] = lambda key: 0  # after how many uses the schedule expects a key
        self._working_set = working_set
        self._root = root
        self._worker = worker
        self._pid = os.getpid()
        self._units: dict[Unit, None] = {}
        self._gradients: dict[UnitGradients, None] = {}
        self._addresses: dict[int, tuple[Unit, int, Lease]] = {}  # of each span: its number, its lease
        self._to_delete: list[str] = []
        self._rooms: dict[str, UnitGradients] = {}
        worker.give = self.give_back
        working_set.add_reclaimer(self._reclaim)

    def __repr__(self) -> str:
        return f"Residency({len(self._units)} units, {len(self._gradients)} gradients open)"

    def opened(self, unit: Unit, active: set[Unit | None]) -> None:
        """A unit has leased its bytes; park what is neither in ``active`` nor the root nor in use."""
        self.num_swaps += 1
        self.opening = None
        for span, lease in enumerate(unit.buffer.leases):
            self._addresses[lease.tensor.untyped_storage().data_ptr()] = (unit, span, lease)
        self._units[unit] = None
        self.park_idle(active | {unit})

    def park_idle(self, active: set[Unit | None]) -> None:
        """Give the leases of all units back but the root's and those in ``active``."""
        for unit in list(self._units):
            if unit is not self._root and unit not in active | self.shielded:
                unit.park()

    def parked(self, unit: Unit) -> None:
        """A unit has given its lease back."""
        self._units.pop(unit, None)

    def address_of(self, tensor: torch.Tensor) -> Unit | None:
        """Return the unit in whose living buffer ``tensor`` lies. Raises UsageError for what torch.func wraps."""
        found = self.place_of(tensor)
        return None if found is None else found[0]

    def place_of(self, tensor: torch.Tensor) -> tuple[Unit, int] | None:
        """Return the unit and span number in whose living bytes ``tensor`` lies; raises as ``address_of`` does."""
        if (
            tensor.layout is not torch.strided
            or tensor.device.type != "cpu"
            or not tensor.numel()
            or tensor._is_zerotensor()
        ):
            return None
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError as error:  # a wrapper has none
            raise UsageError(
                "torch.func (vmap, grad, jvp, ...) over a forward of a sharded model; expected over a model in memory:"
                " one built afresh with model.state_dict() loaded"
            ) from error
        found = self._addresses.get(storage.data_ptr())
        if found is None:
            return None
        unit, span, lease = found
        if lease not in unit.buffer.leases and lease.release():  # an address of the past
            return None
        return unit, span

    def gradients_opened(self, gradients: UnitGradients) -> None:
        """A unit's gradients are in DRAM and shown."""
        self._gradients[gradients] = None

    def gradients_closed(self, gradients: UnitGradients) -> None:
        """A unit's gradients are the working set's, or gone."""
        self._gradients.pop(gradients, None)

    def discard(self, key: str, lease: Lease | None) -> None:
        """Delete a scratch key now, with its lease, or at the next ``sweep`` when a caller still sees its bytes."""
        if lease is None:
            self._working_set.delete([key])
        elif not self._working_set.discard(lease):
            self._to_delete.append(key)

    # -- what will be leased, for the schedule --------------------------------------------------------------------

    def due(self) -> int:
        """Return the bytes of gradients that the units open in a backward have yet to lease. Any thread."""
        units = [unit for unit in list(self._units) if unit.is_in_backward]
        opening = self.opening
        units += [opening] if opening is not None and opening not in units else []
        return sum(unit.gradients.nbytes for unit in units if not unit.gradients.key)

    def of(self, name: str) -> int | None:
        """Return the bytes of gradients that will be leased under ``name``; None where it is no such name."""
        gradients = self._rooms.get(name)
        if gradients is None:
            return None
        return 0 if gradients.key or self._working_set.has(name) else gradients.nbytes

    def given_back(self, name: str) -> int | None:
        """Return the bytes of gradients that are the working set's, or an update's, under ``name``; else None."""
        gradients = self._rooms.get(name)
        if gradients is None or gradients.lease is not None or not self._working_set.has(name):
            return None
        return gradients.nbytes

    def add_room(self, gradients: UnitGradients) -> None:
        """Know the name under which ``gradients`` will be leased."""
        self._rooms[gradients.room] = gradients

    def make_way(self, soon: Mapping[str, int], *, pending: bool) -> None:
        """Give gradients back ahead of need until ``soon`` (bytes by key or room) has room.

        Waits for nothing, unless a new tensor that somebody put into ``.grad`` has no place in the buffer yet.
        Whoever waits for memory would have them, too, but one by one, and what is read ahead would not. With
        ``pending`` those that wait for an update are given back as well.
        """
        if not self._gradients and not pending:
            return
        if self._working_set.shortage(soon, self.due()) == 0:
            return  # order: before all that is open is looked through, which would cost a thousand units a square
        idle = self._idle_gradients()
        while (idle or pending) and self._working_set.shortage(soon, self.due()) > 0:
            if idle:
                idle.pop().store_away()
            else:
                pending = self._worker.release_gradients()

    def _idle_gradients(self) -> list[UnitGradients]:
        """Return the open gradients that are not being added to, the one that is used last at the end.

        The root's are not among them: a backward adds to them at its beginning and at its end.
        """
        used = {self._root, self.opening, *self.shielded}
        open_ = [each for each in self._gradients if not each.num_accumulating and not each.unit.is_in_backward]
        idle = [each for each in open_ if each.unit not in used]
        return sorted(idle, key=lambda gradients: self.distance(gradients.key))

    def sweep(self) -> None:
        """Delete the keys whose last views were alive when they were discarded."""
        keys, self._to_delete = self._to_delete + self._worker.take_leftovers(), []
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
        """Help a caller that waits for memory; see ``add_reclaimer``.

        What is open here is the main thread's: the worker asks for it. The main thread lets the worker's update go on
        first, which frees memory without giving up anything; where that needs memory too, it gives back what is idle.
        """
        if os.getpid() != self._pid:
            return False
        worker = self._worker
        if worker.is_this_thread():
            return worker.starve(nbytes)
        return worker.wait_for_progress() or self.give_back(nbytes) or worker.make_yield()

    def give_back(self, nbytes: int) -> bool:
        """Give the working set something back: an idle unit first, then gradients. In the main thread.

        Of units, the one in a backward is about to be used again, and the root will be.
        """
        units = [unit for unit in self._units if unit is not self._root]
        if any(self._give_back_unit(unit) for unit in units if not unit.is_in_backward):
            return True
        if any(gradients.store_away() for gradients in reversed(self._idle_gradients())):
            return True
        if any(self._give_back_unit(unit) for unit in [*units, self._root]):
            return True
        if self._worker.release_gradients():
            return True
        last_of_all = sorted(self._gradients, key=lambda gradients: gradients.num_accumulating)
        return any(gradients.store_away() for gradients in last_of_all)

    def _give_back_unit(self, unit: Unit) -> bool:
        return unit.is_open and unit.num_ops == 0 and unit not in self.shielded and unit.park()

"""OpenUnits: the units of one model that are leased now, by age and by address.

This is mechanism only: the engine decides which unit is opened and when, the working set where parked bytes go. The
bytes of the next units go to a compute device while a unit computes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tiered.bytes.host_tensor import storage_address
from tiered.errors import UsageError
from tiered.store.waiting.calling_thread import this_thread
from tiered.tiers.accelerator import AcceleratorTier
from tiered.tiers.compute_tier import ComputeTier, Gathered
from tiered.zero.parameters.unit import Unit
from tiered.zero.step import graph_task

__all__ = ["Ahead", "OpenUnits", "ahead_on"]


class Ahead:
    """The work that is done ahead of need as units open: none where bytes in DRAM are used as they lie."""

    def opened(self, unit: Unit) -> None:
        """``unit`` was opened."""

    def go_on(self) -> None:
        """An operation of the unit that computes begins."""


class OpenUnits:
    """The open leases of one model's units, oldest first.

    Invariant: a unit is listed exactly while it has a lease. ``shielded`` units are never parked here (``unsharded``).
    """

    def __init__(self, root: Unit) -> None:
        self.num_swaps = 0  # leases of units so far, for reports and tests
        self.shielded: set[Unit] = set()
        self.root = root
        self._device_type = root.tier.device.type
        self.thread = -1  # that opened the last unit: the training thread
        self._units: dict[Unit, None] = {}
        self._addresses: dict[int, tuple[Unit, int, Gathered]] = {}  # of each span: its unit, its number, its bytes

    def __repr__(self) -> str:
        return f"OpenUnits({len(self._units)} units)"

    @property
    def nbytes(self) -> int:
        """Bytes of the units that are open."""
        return sum([unit.nbytes for unit in self._units])

    def opened(self, unit: Unit) -> None:
        """A unit has leased its bytes."""
        self.num_swaps += 1
        if graph_task() == -1:
            self.thread = this_thread()
        gathered = unit.buffer.gathered
        assert gathered is not None
        for span, tensor in enumerate(gathered.tensors):
            self._addresses[tensor.untyped_storage().data_ptr()] = (unit, span, gathered)
        self._units[unit] = None

    def parked(self, unit: Unit) -> None:
        """A unit has given its lease back."""
        self._units.pop(unit, None)

    def in_backward(self) -> list[Unit]:
        """Return the units that were opened in the backward that runs. Any thread."""
        return [unit for unit in list(self._units) if unit.is_in_backward]

    def park_idle(self, active: set[Unit | None]) -> None:
        """Give the leases of all units back but the root's and those in ``active``."""
        for unit in list(self._units):
            if unit is not self.root and unit not in active and unit not in self.shielded:
                unit.park()

    def park_all(self) -> None:
        """Give every lease of a unit back."""
        for unit in list(self._units):
            if unit not in self.shielded:
                unit.park()

    def park_one(self, *, root: bool, in_backward: bool) -> bool:
        """Give the oldest idle unit back; return whether there was one.

        The root is given back only with ``root``. Units opened in a backward will be used again, and are given back
        only with ``in_backward``.
        """
        for unit in list(self._units):
            if (unit is self.root and not root) or (unit.is_in_backward and not in_backward):
                continue
            if unit.is_open and unit.num_ops == 0 and unit not in self.shielded and unit.park():
                return True
        return False

    def place_of(self, tensor: torch.Tensor) -> tuple[Unit, int] | None:
        """Return the unit and span number in whose living bytes ``tensor`` lies.

        Raises UsageError for a wrapper of torch.func.
        """
        if (
            tensor.layout is not torch.strided
            or tensor.device.type != self._device_type
            or not tensor.numel()
            or tensor._is_zerotensor()
        ):
            return None
        try:
            address = storage_address(tensor)
        except NotImplementedError as error:  # a wrapper has none
            raise UsageError(
                "torch.func (vmap, grad, jvp, ...) over a forward of a sharded model; expected over a model in memory:"
                " one built afresh with model.state_dict() loaded"
            ) from error
        found = self._addresses.get(address)
        if found is None:
            return None
        unit, span, gathered = found
        if gathered is not unit.buffer.gathered and not gathered.is_there(span):  # an address of the past
            return None
        return unit, span

    def forget(self) -> None:
        """In a forked child: forget all leases, for the bytes are the parent's."""
        for unit in list(self._units):
            unit.forget()
        self._units.clear()


# -- gather ahead ------------------------------------------------------------------------------------------------------


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

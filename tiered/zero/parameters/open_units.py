"""OpenUnits: the units of one model that are leased now, by address.

This is mechanism only: the GatherPlan decides which unit is opened and when, the working set where parked bytes go. The
bytes of the next units go to a compute device while a unit computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from tiered.bytes.host_tensor import storage_address
from tiered.errors import UsageError
from tiered.store.waiting.calling_thread import this_thread
from tiered.tiers.accelerator import AcceleratorTier
from tiered.tiers.compute_tier import ComputeTier, Gathered
from tiered.zero.parameters.gather_plan import GatherPlan
from tiered.zero.parameters.unit import Unit
from tiered.zero.parameters.unit_collectives import UnitCollectives
from tiered.zero.step import graph_task

__all__ = ["Ahead", "OpenUnits", "ahead_on"]


class Ahead:
    """The work that is done ahead of need as units open: none where bytes in DRAM are used as they lie."""

    def opened(self, unit: Unit) -> None:
        """``unit`` was opened."""

    def go_on(self) -> None:
        """An operation of the unit that computes begins."""

    def drop(self, unit: Unit) -> None:
        """``unit``, which the plan has ahead, is not wanted any more."""


class OpenUnits:
    """The open leases of one model's units. Invariant: a unit has one only while ``plan`` has it gathered."""

    def __init__(self, root: Unit, plan: GatherPlan[Unit]) -> None:
        self.num_swaps = 0  # leases of units so far, for reports and tests
        self.plan = plan
        self.root = root
        self._device_type = root.tier.device.type
        self.thread = -1  # that opened the last unit: the training thread
        self._addresses: dict[int, tuple[Unit, int, Gathered]] = {}  # of each span: its unit, its number, its bytes

    def __repr__(self) -> str:
        return f"OpenUnits({len(self.plan.gathered)} units)"

    @property
    def nbytes(self) -> int:
        """Bytes in DRAM of the units that are open, and over ranks of what is kept for others."""
        comm = self.root.comm
        kept = comm.dram_slots.free_nbytes if isinstance(comm, UnitCollectives) else 0
        return kept + sum([unit.nbytes for unit in self.plan.gathered if self.root.tier.computes_in_dram])

    def opened(self, unit: Unit) -> None:
        """A unit has leased its bytes."""
        self.num_swaps += 1
        if graph_task() == -1:
            self.thread = this_thread()
        gathered = unit.buffer.gathered
        assert gathered is not None
        for span, tensor in enumerate(gathered.whole):
            self._addresses[tensor.untyped_storage().data_ptr()] = (unit, span, gathered)

    def in_backward(self) -> list[Unit]:
        """Return the units that were opened in the backward that runs. Any thread."""
        return [unit for unit in list(self.plan.gathered) if unit.is_in_backward]

    def park_all(self, *, until_backward: bool = False) -> None:
        """Give every lease of a unit back that is not to stay: see ``GatherPlan.end``."""
        for unit in self.plan.end(until_backward=until_backward):
            unit.park()

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
        for unit in list(self.plan.gathered):
            unit.forget()
        self.plan.forget()
        if isinstance(comm := self.root.comm, UnitCollectives):
            comm.forget()


# -- gather ahead ------------------------------------------------------------------------------------------------------


_NUM_UNITS = 2  # ahead of the one that computes


class PendingUpdates(Protocol):
    """The updates that are about to change bytes."""

    def is_pending(self, unit: Unit) -> bool:
        """Return whether an update of ``unit`` is pending. Any thread."""
        ...

    def wait_beside(self, unit: Unit) -> None:
        """In another thread than the training thread: wait until no update of ``unit`` is pending."""
        ...


class CopyAhead(Ahead):
    """Copies begin as a unit opens, or at an operation of it, once the next unit's bytes are in DRAM and updated.

    A hint on one rank, where a wrong one costs a copy.
    """

    def __init__(self, tier: AcceleratorTier, plan: GatherPlan[Unit], updates: Callable[[], PendingUpdates]) -> None:
        """``updates()``: the present ones."""
        self._tier = tier
        self._plan = plan
        self._updates = updates
        self._wanted: list[Unit] = []

    def opened(self, unit: Unit) -> None:
        self._wanted = self._plan.coming(_NUM_UNITS)
        self.go_on()

    def go_on(self) -> None:
        wanted = self._wanted
        while wanted and (wanted[0].is_open or self._begin(wanted[0])):
            del wanted[0]

    def _begin(self, unit: Unit) -> bool:
        return not self._updates().is_pending(unit) and all(map(self._tier.gather_ahead, unit.keys))


class GatherAhead(Ahead):
    """Over ranks: as a unit opens the gather of the next one begins, if the plan has a slot for it.

    The ranks' comm thread waits for the next unit's update and reads its shards, while this unit computes.
    """

    def __init__(self, plan: GatherPlan[Unit], comm: UnitCollectives, updates: Callable[[], PendingUpdates]) -> None:
        """``updates()``: the present ones."""
        self._plan = plan
        self._comm = comm
        self._updates = updates

    def opened(self, unit: Unit) -> None:
        following = self._plan.next_ahead()
        if following is not None:
            sizes = {span.key: span.shard_nbytes for span in following.layout.spans}
            self._comm.gather_ahead(following.tier, sizes, lambda: self._updates().wait_beside(following))

    def drop(self, unit: Unit) -> None:
        self._comm.drop(unit.keys)


def ahead_on(tier: ComputeTier, plan: GatherPlan[Unit], updates: Callable[[], PendingUpdates]) -> Ahead:
    """Return what works ahead on ``tier``, for the units that ``plan`` expects.

    Nothing in DRAM: what a second whole unit takes there costs more reads than the wait that it saves (bench/LOG.md).
    """
    if not isinstance(tier, AcceleratorTier):
        return Ahead()
    if isinstance(comm := plan.root.comm, UnitCollectives):
        return GatherAhead(plan, comm, updates)
    return CopyAhead(tier, plan, updates)

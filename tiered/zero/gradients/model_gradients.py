"""ModelGradients: the buffers of one model's gradients in DRAM, within their share of the budget.

TakenGradients are those that an update has. The Reclaimer gives memory back to a caller that waits for bytes beyond
the shares of the budget. Updates is what the rooms below the optimizer see of the updates that are pending.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Protocol

import torch

from tiered.bytes.exit_and_fork import this_process
from tiered.store.residency.residency import Lease
from tiered.store.waiting.calling_thread import this_thread
from tiered.tiers.compute_tier import GradientBuffer, UpdatePlace
from tiered.tiers.schedule import Rooms, SharedSchedule
from tiered.zero.gradients.stand_in import Change, Compute
from tiered.zero.parameters.open_units import OpenUnits
from tiered.zero.parameters.unit import Segment, Unit
from tiered.zero.step import graph_task

__all__ = ["ModelGradients", "Reclaimer", "TakenGradients", "Updates"]


_MOST_QUESTIONS = 4  # about a gradient: the norms that a loop clips with and a scaler looks at
_NUM_UNITS_AHEAD = 2  # one is being read while the other is waited for


class ModelGradients:
    """The gradients of one model, and the choice of those to store away where their share of DRAM is full.

    Invariant: before a unit's gradients are leased, idle ones are stored away until the budget has ``update_bytes`` for
    an update and ``gathered_bytes`` for units that compute beside all that is leased. Gradients that wait for their
    update, and those that tensors of the user's keep, are leased bytes like others.
    """

    schedule: SharedSchedule

    def __init__(self, units: Sequence[Unit], open_units: OpenUnits) -> None:
        """``units``: in the order in which their gradients are read."""
        self.gathered_bytes = 0  # the share of the units that compute
        self.update_bytes = 0  # of the update's share
        self.keep_whole = False  # gradients that were not exchanged yet are not stored away
        self.ahead_bytes = 0  # of the units that a compute device is to have room for beside gradients
        self._units = units
        self._open_units = open_units
        self._root = open_units.root
        self._working_set = self._root.working_set
        self._tier = self._root.tier
        self.rooms = Rooms(self._working_set.has_bytes)  # for the schedule: buffers that will be leased
        self.place = UpdatePlace(self._tier, self._working_set)  # of updates
        self.spares: dict[Unit, None] = {}  # units that have an empty buffer for gradients beside it
        self._open: dict[Unit, None] = {}
        self._open_shards: dict[Idle, None] = {}  # over ranks: the sums of exchanged gradients that are leased
        self.lent: tuple[Unit, GradientBuffer] | None = None  # leased for reading
        self._questions: dict[Hashable, Compute] = {}
        self._kept: dict[str, None] = {}  # keys of stored gradients that DRAM keeps

    def __repr__(self) -> str:
        return f"ModelGradients({len(self._open)} open)"

    # -- all units -----------------------------------------------------------------------------------------------

    def are_there(self) -> bool:
        """Return whether some unit has gradients that no step has used and no caller has dropped."""
        return any(unit.gradients.are_there() for unit in self._units)

    def drop_all(self) -> None:
        """Forget all gradients; see ``UnitGradients.drop``."""
        for unit in self._units:
            unit.gradients.drop()

    def zero_all(self) -> None:
        """Fill all gradients with zeros and keep them."""
        for unit in self._units:
            unit.gradients.zero()

    def reconcile_all(self) -> list[Unit]:
        """Take note of the caller's own changes to ``.grad``; return the units that have gradients."""
        for unit in self._units:
            unit.gradients.reconcile()
        return [unit for unit in self._units if unit.gradients.are_any]

    def opened(self, unit: Unit) -> None:
        """The gradients of ``unit`` are leased and shown."""
        self._open[unit] = None
        self.rooms.leased.add(unit.gradients.key)
        self.rooms.filled.add(unit.gradients.key)

    def closed(self, unit: Unit) -> None:
        """The gradients of ``unit`` are the working set's, or gone."""
        self._open.pop(unit, None)
        self.rooms.leased.discard(unit.gradients.key)

    def opened_shard(self, shard: Idle) -> None:
        """``shard``, the sum of exchanged gradients, is leased: it waits for its update, and may be stored away."""
        self._open_shards[shard] = None
        self.rooms.leased.add(shard.key)
        self.rooms.filled.add(shard.key)

    def closed_shard(self, shard: Idle) -> None:
        """``shard`` is the working set's, an update's, or gone."""
        self._open_shards.pop(shard, None)
        self.rooms.leased.discard(shard.key)

    def forget(self) -> None:
        """In a forked child: forget all leases, for the bytes are the parent's."""
        self._open.clear()
        self._open_shards.clear()
        self.spares.clear()
        self.lent = None

    # -- buffers beside gradients that stay where autograd puts them ---------------------------------------------

    def may_stay(self) -> bool:
        """Return whether gradients may stay where autograd puts them; where not, empty buffers are given up."""
        if self.schedule.is_settled:  # all keys are in DRAM for good, with room for all gradients beside them
            return True
        if self.spares:
            self.end_spares()
        return False

    def end_spares(self) -> bool:
        """Give up all empty buffers, and move the gradients in that lie beside them; return whether there were any."""
        were_any = bool(self.spares)
        while self.spares:  # order: one that fails leaves the others to the next call
            self.spares.popitem()[0].gradients.end_spare()
        return were_any

    # -- reading -------------------------------------------------------------------------------------------------

    def read_ahead(self, unit: Unit) -> None:
        """Ask for the gradients of ``unit`` and the next units: a caller that reads all of them reads these next."""
        index = self._units.index(unit)
        keys = [each.gradients.key for each in self._units[index : index + 1 + _NUM_UNITS_AHEAD]]
        self._working_set.prefetch([key for key in keys if key not in self.rooms.leased])

    def lend(self, unit: Unit) -> GradientBuffer:
        """Lend the stored gradients of ``unit`` for reading, kept for the next read of them, until ``end_lent``."""
        if self.lent is None or self.lent[0] is not unit:
            self.end_lent()
            self.lent = unit, self._tier.gradients(unit.gradients.key, "r")
        self.lent[1].use()
        return self.lent[1]

    def end_lent(self) -> bool:
        """Give the gradients back that were leased for reading; return whether there were any."""
        lent, self.lent = self.lent, None
        if lent is not None:
            lent[1].release()
        return lent is not None

    def note_question(self, question: Hashable, compute: Compute) -> None:
        """``question`` was asked about a stored gradient: those that leave the compute device answer it before."""
        if not self._tier.computes_in_dram and len(self._questions) < _MOST_QUESTIONS:
            self._questions[question] = compute

    def answers(self, values: torch.Tensor) -> dict[Hashable, torch.Tensor]:
        """Return the answers for ``values``, which are about to be stored."""
        return {question: compute(values) for question, compute in self._questions.items()}

    # -- memory --------------------------------------------------------------------------------------------------

    def make_room(self, nbytes: int) -> None:
        """Store idle gradients away until ``nbytes`` more find room in the share, or no idle ones are left.

        All of them go where they are not to stay: they leave the compute device while the backward goes on.
        """
        if self._tier.computes_in_dram:
            needed_bytes = nbytes + self.update_bytes
            if self._working_set.left_bytes < needed_bytes + self.gathered_bytes:
                self._shrink(needed_bytes)
            return
        idle = self._idle()
        while idle and not self.may_keep(nbytes):
            idle.pop().store_away()

    def make_room_for_shard(self, nbytes: int) -> None:
        """Store idle shards of gradients away until ``nbytes`` more find room in the share of DRAM."""
        if self._tier.computes_in_dram:
            self.make_room(nbytes)
        else:
            self._shrink(nbytes + self.update_bytes)

    def make_room_for_updates(self) -> None:
        """Store idle gradients away until an update finds its share, with the gradients of its unit in it."""
        self.end_lent()
        whole = self._open if self._tier.computes_in_dram else ()  # else the share, of DRAM, has none of them
        largest = max([*(unit.gradients.nbytes for unit in whole), *(each.nbytes for each in self._open_shards), 0])
        if largest:
            self._shrink(self.update_bytes - largest)

    def _shrink(self, needed_bytes: int) -> None:
        """Store idle gradients away until ``needed_bytes`` are left beside the share of the units that compute."""
        share = self._working_set
        needed_bytes += max(0, self.gathered_bytes - self._open_units.nbytes)
        if share.left_bytes >= needed_bytes:
            return
        idle = self._idle() if self._tier.computes_in_dram else self._by_use(self._open_shards)
        while idle and share.left_bytes < needed_bytes:
            idle.pop().store_away()

    def may_keep(self, nbytes: int) -> bool:
        """Return whether the compute device keeps gradients: an update uses them there, and units have room beside.

        ``nbytes``: of the gradients that come next.
        """
        return self._tier.keeps_gradients and self._tier.left_bytes() >= nbytes + self.ahead_bytes

    def keep(self, unit: Unit) -> GradientBuffer | None:
        """Return the gradients' buffer if their update uses it on the compute device; others there are stored."""
        buffer: GradientBuffer | None = unit.gradients.buffer
        if buffer is None or buffer.lease is not None:
            return None
        if self.may_keep(unit.gradients.nbytes if graph_task() != -1 else 0):  # in a backward others come
            return buffer
        unit.gradients.store_away()
        return None

    def storing(self, unit: Unit) -> None:
        """Gradients leave the compute device: DRAM keeps them where an update finds its share beside them."""
        if self._tier.computes_in_dram:
            return
        key, needed_bytes = unit.gradients.key, unit.gradients.nbytes + self.update_bytes + self.gathered_bytes
        if self._working_set.left_bytes >= needed_bytes:
            self._working_set.hold([key])
            self._kept[key] = None

    def let_go_one(self) -> bool:
        """Let DRAM write the kept gradients that are used last, and drop them; return whether there were any."""
        for key in sorted(self._kept, key=self.schedule.distance, reverse=True):
            self._kept.pop(key, None)
            if self._working_set.has_bytes(key):  # no update has used it up
                self._working_set.release_hold([key])
                self._working_set.swap_out([key])
                return True
        return False

    def store_away_one(self, *, in_use: bool = False) -> bool:
        """Store the idle gradients away that are used last, or with ``in_use`` any; return whether there were any."""
        if self.end_lent() or self.end_spares():
            return True
        if any(each.store_away() for each in reversed(self._idle())):
            return True
        in_use = in_use and not self.keep_whole
        last_of_all = sorted(self._open, key=lambda unit: unit.gradients.num_accumulating) if in_use else []
        return any(unit.gradients.store_away() for unit in last_of_all)

    def _idle(self) -> list[Idle]:
        """Return the leased gradients that are not being added to, those that are used last at the end.

        The root's are not among them: a backward adds to them at its beginning and at its end.
        """
        used, opening = {self._root, *self._open_units.plan.lent}, self.rooms.opening
        idle: list[Idle] = [
            unit.gradients
            for unit in ({} if self.keep_whole else self._open)
            if unit not in used
            and not (unit.gradients.num_accumulating or unit.is_in_backward or unit.gradients.key == opening)
        ]
        return self._by_use([*idle, *(self._open_shards if self._tier.computes_in_dram else ())])

    def _by_use(self, gradients: Iterable[Idle]) -> list[Idle]:
        return sorted(gradients, key=lambda each: self.schedule.distance(each.key))

    def store_away_shard(self) -> bool:
        """Have DRAM write the shard of gradients that is used last; return whether there was one."""
        return any(each.store_away() for each in reversed(self._by_use(self._open_shards)))


class Idle(Protocol):
    """Leased gradients of a unit that can be given to the working set."""

    key: str

    @property
    def nbytes(self) -> int: ...

    def store_away(self) -> bool:
        """Give the bytes to the working set; return whether there were any to give."""


# -- taken gradients ---------------------------------------------------------------------------------------------------


class TakenGradients:
    """The gradients of one unit that an update has taken over, with their clip factors. One owner at a time.

    They lie in the bytes of ``key``, without the changes that are pending until ``open``; or on the compute device,
    where the update computes, too; or they are tensors of autograd's, (numel,) each in memory order, whose bytes the
    budget has already. ``is_over``: ``delete`` has ended; any thread may look.
    """

    __slots__ = ("_factors", "_kept", "_lease", "_own", "_pending", "_place", "_tensor", "_tier", "_working_set",
                 "is_over", "key", "nbytes")  # fmt: skip

    def __init__(
        self,
        unit: Unit,
        place: UpdatePlace,
        *,
        factors: Mapping[Segment, torch.Tensor],
        pending: Mapping[Segment, list[Change]],
        own: Mapping[Segment, torch.Tensor] | None,
        lease: Lease | None,
        kept: GradientBuffer | None,
    ) -> None:
        """``own``: autograd's tensors; ``lease``: of the key; ``kept``: the buffer that the update uses where it is."""
        self.key, self.nbytes, self.is_over = unit.gradients.update_key, unit.layout.shard_gradient_nbytes, False
        self._working_set, self._tier, self._place = unit.working_set, unit.tier, place
        self._own, self._lease, self._kept = own, lease, kept
        self._tensor: torch.Tensor | None = None  # the leased bytes, where the update computes
        there = {id(factor): place.number(factor) for factor in factors.values()}  # often one for all
        self._factors = {segment: there[id(factor)] for segment, factor in factors.items()}
        self._pending = {s: [each.elsewhere(place.number) for each in found] for s, found in pending.items() if found}

    def open(self) -> None:
        """Lease the bytes for the update's share; stored bytes are swapped in, pending changes applied. Blocks."""
        if self._own is not None:
            return
        if self._kept is not None:
            self._tensor = self._place.take_over(self._kept)
            return
        if self._lease is None:
            self._lease = self._tier.lease(self.key, "rw" if self._pending else "r")
        if self._tensor is None:
            self._tensor = self._place.bring(self._lease)
            pending, self._pending = self._pending, {}
            for segment, changes in pending.items():
                for change in changes:
                    change(self.piece(segment))
        self._working_set.change_share(self._lease)

    def factor(self, segment: Segment) -> torch.Tensor | None:
        """Return the clip factor of ``segment``, () fp32 in DRAM, None where it was not clipped."""
        factor = self._factors.get(segment)
        return None if factor is None else factor()

    def piece(self, segment: Segment) -> torch.Tensor:
        """Return the gradient of ``segment`` in this rank's shard, (len(stretch),) in memory order; after ``open``."""
        if self._own is not None:
            return self._own[segment][segment.stretch.start : segment.stretch.stop]
        assert self._tensor is not None
        return segment.gradient_piece(self._tensor)

    def store_away(self) -> bool:
        """Give the bytes back to the working set, for now; return whether they were leased."""
        lease, self._lease, self._tensor = self._lease, None, None
        if lease is not None:
            lease.release()
            self._working_set.swap_out([self.key])
        return lease is not None

    def delete(self) -> None:
        """Forget the gradients, and drop their bytes: the update has ended, or will not run."""
        lease, self._lease, self._tensor = self._lease, None, None
        kept, self._kept = self._kept, None
        if self._own is not None:
            self._own = {}
        elif kept is not None:
            kept.discard()
        elif lease is not None and self._place.device.type == "cpu":
            self._working_set.drop_bytes(self.key, lease)  # order: bytes released first would be written for nothing
        else:
            if lease is not None:
                self._place.give_back(lease)
            self._tier.drop_bytes(self.key)
        self.is_over = True


# -- updates -----------------------------------------------------------------------------------------------------------


class Updates:
    """The pending updates of one model's units; these are the ones without an optimizer: none."""

    is_busy = False  # an update, or the seal of a commit behind it, is pending
    failure: BaseException | None = None  # the error of an update, not raised yet

    def is_this_thread(self) -> bool:
        """Whether the caller is the update thread."""
        return False

    def is_pending(self, unit: Unit) -> bool:
        """Return whether an update of ``unit`` is pending. Any thread, without the lock."""
        return False

    def wait_for(self, unit: Unit) -> None:
        """Wait for the update of ``unit``, if one is pending; it goes first. Raises the error of one that failed."""

    def wait_beside(self, unit: Unit) -> None:
        """In another thread than the training thread: wait for the update of ``unit``, if one is pending."""

    def wait_for_all(self) -> None:
        """Wait until nothing is pending. Ends early after a failure."""

    def finish_all(self) -> None:
        """Wait until nothing is pending, and raise the error of an update that failed."""

    def raise_failure(self) -> None:
        """Raise the error of an update that has failed since the last call, if any; the step is abandoned."""

    def cancel(self) -> None:
        """Finish the updates that a commit waits for, drop the rest, forget a failure."""

    def release_gradients(self) -> bool:
        """Give the working set gradients that wait for their update; return whether there were any in DRAM."""
        return False

    def ask(self) -> bool:
        """In the update thread: ask the training thread, if it waits for an update, to give memory back."""
        return False

    def wait_for_one(self) -> bool:
        """For a caller that waits for memory: wait for the end of an update; False where none is pending."""
        return False

    def forget(self) -> None:
        """In a forked child: the parent's threads do not run."""


# -- reclaimer ---------------------------------------------------------------------------------------------------------


class Reclaimer:
    """Gives back leases of one model that the model can do without for now.

    Shares make that rare. The reclaimer helps where tensors of the user's keep bytes that are in no share, or where
    the forward of one unit calls another's. ``updates()`` returns the present updates.
    """

    def __init__(self, open_units: OpenUnits, gradients: ModelGradients, updates: Callable[[], Updates]) -> None:
        self._open_units = open_units
        self._gradients = gradients
        self._updates = updates
        self._process = this_process()

    def reclaim(self, nbytes: int) -> bool:
        """Help the caller; return whether a lease was given back. The update thread asks the training thread."""
        if not self._process.is_here:
            return False
        updates = self._updates()
        if self._open_units.root.tier.settle_one():
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
        gradients = self._gradients
        return gradients.let_go_one() or self._updates().release_gradients() or gradients.store_away_shard()

    def make_way(self) -> bool:
        """In the training thread: give memory back where the model computes; return whether there was some.

        Gradients go, those in use last. A gathered unit stays: the GatherPlan alone releases it.
        """
        return (
            self._gradients.store_away_one() or self._updates_make_way() or self._gradients.store_away_one(in_use=True)
        )

    def _updates_make_way(self) -> bool:
        """Have updates that are pending give back what they have where the model computes."""
        updates, tier = self._updates(), self._open_units.root.tier
        if tier.computes_in_dram:
            return updates.release_gradients()
        return tier.keeps_gradients and updates.wait_for_one()

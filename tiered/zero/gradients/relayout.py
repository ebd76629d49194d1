"""UnitLayouts: how the units of a model are laid out now, and what follows: held keys, shares, the order of uses.

A unit with a parameter that was unfrozen is laid out anew as the next forward begins; the arithmetic is in layout.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import nn

from tiered.errors import UsageError
from tiered.store.residency.residency import Lease
from tiered.store.store import Store
from tiered.tiers.accelerator import AcceleratorTier
from tiered.tiers.schedule import SharedSchedule, choose_held
from tiered.zero.compute_device import smallest_device_budget
from tiered.zero.formats.budget import share_out_again, work_sizes
from tiered.zero.formats.codec import Bucket
from tiered.zero.gradients.model_gradients import ModelGradients
from tiered.zero.layout import Shares, UnitLayout, whole_pages
from tiered.zero.parameters.parameter import without_dispatch
from tiered.zero.parameters.unit import Segment, Unit
from tiered.zero.parameters.unit_collectives import UnitCollectives
from tiered.zero.step import Phase

__all__ = ["UnitLayouts"]

_PARAMETERS = "model/parameters/"
_NUM_AHEAD = 2  # units that a compute device copies in while another computes


class UnitLayouts:
    """The present layouts of one model's units, the shares of the budget that follow from them, and the held keys.

    ``nbytes`` has the size of each key that moves, for the schedule; ``rooms_nbytes`` that of each unit's gradients.
    ``is_stale``: ``requires_grad`` was set since the units were laid out.
    """

    def __init__(self, store: Store, units: Sequence[Unit], shares: Shares) -> None:
        self.shares = shares
        self.hold_is_auto = False  # shard(hold="auto"): gradients that wait for a step come before optimizer state
        self.update_on = "auto"  # where updates compute: "cpu", "device", or what is measured to be shorter
        self.nbytes: dict[str, int] = {}
        self.rooms_nbytes: dict[str, int] = {}
        self.are_held = False  # all keys, the optimizer's among them
        self.is_stale = False
        self.drops_frozen = False  # the next time, parameters frozen since move, too: after a resume
        self._store = store
        self._units = units
        self._buckets: Mapping[Unit, Sequence[Bucket[Segment]]] | None = None  # None: there is no optimizer yet
        self._follow: Callable[[Unit, UnitLayout], None] = lambda unit, old: None
        self._updates_in_backward = False
        self._held: list[str] = []

    def __repr__(self) -> str:
        return f"UnitLayouts({len(self._units)} units, {len(self.nbytes)} keys, {len(self._held)} held)"

    def set_state(
        self,
        buckets: Mapping[Unit, Sequence[Bucket[Segment]]],
        follow: Callable[[Unit, UnitLayout], None],
        *,
        updates_in_backward: bool,
    ) -> None:
        """Take note of the optimizer's keys, and of when it updates; ``follow`` is ``OptimizerState.follow``."""
        self._buckets, self._follow = buckets, follow
        self._updates_in_backward = updates_in_backward
        self.shares = self._shares([unit.layout for unit in self._units])

    def _shares(self, layouts: Sequence[UnitLayout]) -> Shares:
        """Return the shares of the budget for ``layouts``."""
        wait = self.hold_is_auto and self._buckets is not None and not self._updates_in_backward
        budget = self._store.working_set.budget_bytes
        return share_out_again(layouts, budget, self.shares, gradients_wait=wait)

    def _hold(self) -> None:
        """Hold the keys that placement chooses for the present layouts, and no others."""
        working_set, own = self._store.working_set, self._buckets or {}
        parameters = {span.key: span.shard_nbytes for unit in self._units for span in unit.layout.spans}
        buckets = [bucket for each in own.values() for bucket in each if working_set.has(bucket.key)]  # or rolled back
        for key in [key for key in self.nbytes if key.startswith(_PARAMETERS) and key not in parameters]:
            del self.nbytes[key]
        self.nbytes |= parameters | {bucket.key: bucket.nbytes for bucket in buckets}
        self.rooms_nbytes = {unit.gradients.key: unit.gradients.nbytes for unit in self._units}
        if self._units[0].world > 1:
            self.rooms_nbytes |= {u.gradients.update_key: u.layout.shard_gradient_nbytes for u in self._units}
        state = {bucket.key: whole_pages(bucket.nbytes) for bucket in buckets}
        chosen = choose_held(parameters, state, self.shares.held)
        working_set.release_hold([key for key in self._held if working_set.has(key)])
        working_set.hold(chosen)
        self._held = chosen
        self.are_held = self._buckets is not None and len(chosen) == len(parameters) + len(state)

    def expect_steps(self, gradients: ModelGradients) -> SharedSchedule:
        """Hold the keys that placement chooses of the present ones; return the schedule of a step's uses."""
        self._hold()
        gradients.gathered_bytes = self.shares.gathered
        if isinstance(comm := self._units[0].comm, UnitCollectives):
            kept = self.shares.gathered + max(unit.gradient_nbytes for unit in self._units)
            is_ahead = isinstance(self._units[0].tier, AcceleratorTier) and self.gather_slots()[0] > 1
            kept += max(unit.nbytes for unit in self._units) if is_ahead else 0
            comm.dram_slots.kept_nbytes = kept
        gradients.keep_whole = self.shares.stage == 1 and self._units[0].world > 1
        gradients.ahead_bytes = _NUM_AHEAD * max(unit.nbytes for unit in self._units)
        gradients.rooms.nbytes = self.rooms_nbytes
        scratch = work_sizes([unit.layout for unit in self._units]).scratch
        gradients.update_bytes = self.shares.update - scratch
        gradients.schedule = SharedSchedule(
            self._store.working_set,
            self._order(),
            self.nbytes,
            window_bytes=self.shares.read_ahead,
            rooms=gradients.rooms,
            rooms_nbytes=self.rooms_nbytes if self.are_held and self._units[0].tier.computes_in_dram else None,
        )
        return gradients.schedule

    def gather_slots(self) -> tuple[int, bool]:
        """Return how many units beside the root may be gathered at one time, and whether all stay until the backward.

        From the budgets and the sizes alone: one unit where the model computes in DRAM, two on a compute device, which
        copies the next one in, and as many more of the largest as half of the bytes beyond the smallest budget hold.
        The other half is for what the caller's tensors keep. Units stay where all keys and gradients have room in DRAM.
        """
        layouts, tier = [unit.layout for unit in self._units], self._units[0].tier
        if self.shares.stage < 3 and layouts[0].world > 1:
            return len(layouts), True
        if isinstance(tier, AcceleratorTier):
            smallest = smallest_device_budget(layouts, updates=self.update_on != "cpu", stage=self.shares.stage)
            num, spare = 2, tier.memory.budget_bytes - smallest
        else:
            num, spare = 1, self.shares.spare
            needed = [*map(whole_pages, self.nbytes.values()), *self.rooms_nbytes.values(), work_sizes(layouts).scratch]
            needed += [layout.nbytes for layout in layouts if layout.world > 1]
            if self.are_held and sum(needed) <= self._store.working_set.budget_bytes:
                return len(layouts), True
        for nbytes in sorted([layout.nbytes for layout in layouts[1:]], reverse=True)[num:]:
            spare -= 2 * nbytes
            num += spare >= 0
        return num, False

    def _order(self) -> list[str]:
        """Return the order in which a step is expected to use the keys and rooms."""
        units, buckets = self._units, self._buckets
        order = [key for unit in units for key in unit.keys]
        if buckets is None:
            return [*order, *(key for unit in reversed(units) for key in unit.keys)]
        in_backward = self._updates_in_backward
        if not in_backward:
            order += [key for unit in reversed(units) for key in (*unit.keys, unit.gradients.key)]
        handed_over: list[str] = []  # updates run while the unit after them in the backward does
        for unit in reversed(units) if in_backward else units:
            order += ([*unit.keys, unit.gradients.key] if in_backward else []) + handed_over
            gradients = [] if in_backward else [unit.gradients.update_key]
            handed_over = [*unit.trainable_keys, *gradients, *(bucket.key for bucket in buckets[unit])]
        return order + handed_over

    # -- unfreezing ----------------------------------------------------------------------------------------------

    def note_unfreezing(self, parameter: nn.Parameter, phase: Phase) -> None:
        """``requires_grad`` of ``parameter`` was set: the next forward looks whether its unit is to be laid out anew.

        Raises UsageError inside a step, where there can be no place for its gradient; it is frozen again then.
        """
        segment: Segment = parameter.segment  # type: ignore[attr-defined]
        with without_dispatch():
            if parameter.requires_grad and segment.grad_offset < 0 and phase.is_in_step:
                parameter.requires_grad_(False)
                raise _unfrozen_in_step(segment)
        self.is_stale = True

    def renew(self, lent: Collection[Unit], expect_steps: Callable[[], None]) -> None:
        """A forward begins: lay out anew each unit with a parameter that was unfrozen; ``lent`` units wait.

        ``expect_steps()`` is called where there are other keys now. Blocks. Raises CapacityError where budget or space
        are too small, UsageError for a parameter that was unfrozen between a forward and its backward, in whose step
        there is no place for its gradient; both with nothing changed.
        """
        has_gradients = [unit for unit in self._units if unit.gradients.are_any]
        for unit in has_gradients if torch.is_grad_enabled() else ():
            for segment in unit.trainable_segments():
                if segment.grad_offset < 0:
                    raise _unfrozen_in_step(segment)
        for unit in self._units:
            layout = self._layout_for_now(unit)
            if layout is unit.layout or unit in lent or unit in has_gradients:
                continue
            shares = self._shares([layout if each is unit else each.layout for each in self._units])
            unit.engine.finish_update(unit)
            if not unit.park():
                raise UsageError(
                    f"unit {unit.name!r}: a parameter was unfrozen while an operation uses its unit; expected before or"
                    " after it"
                )
            unit.gradients.forget_key()
            old = unit.layout
            self._move(unit, layout)
            self._follow(unit, old)
            self.shares = shares
            expect_steps()
        self.is_stale = bool(lent or has_gradients)
        self.drops_frozen = False

    def _layout_for_now(self, unit: Unit) -> UnitLayout:
        """Return the layout that fits the trained parameters of ``unit`` now; the present layout where that fits.

        Parameters that were frozen since keep their places among the trained ones, except with ``drops_frozen``. A
        gradient that the caller has put into ``.grad`` makes a parameter trained.
        """
        with without_dispatch():
            names = [
                segment.name
                for segment in unit.segments
                if segment.parameter.requires_grad
                or segment.parameter.grad is not None
                or (segment.trainable and not self.drops_frozen)
            ]
        if names == [segment.name for segment in unit.segments if segment.trainable]:
            return unit.layout
        return unit.layout.with_trainable(names)

    def _move(self, unit: Unit, layout: UnitLayout) -> None:
        """Move the bytes of ``unit``, which is parked, to where ``layout`` says; one read and one write of moved spans.

        The whole of each span that is left is gathered, and this rank's shards of the new ones are written. Harms
        nothing where it fails before the first key is deleted; later only the committed bytes are whole.
        """
        working_set, old = self._store.working_set, unit.layout
        before, after = _contents(old), _contents(layout)
        left = [number for number, span in enumerate(old.spans) if before[span.key] != after.get(span.key)]
        made = [number for number, span in enumerate(layout.spans) if before.get(span.key) != after[span.key]]
        spans = [layout.spans[number] for number in made]
        second_set = sum(span.shard_nbytes for span in spans if span.trainable) if self._store.durable else 0
        self._store.reserve_space(sum(span.shard_nbytes for span in spans) + second_set)
        leases: dict[int, Lease] = {}  # they keep the bytes of keys that are deleted
        try:
            for number in left:
                leases[number] = working_set.lease(old.spans[number].key, "r")
            whole = dict(zip(left, unit.comm.all_gather([leases[number].tensor for number in left]), strict=True))
            try:
                working_set.delete([old.spans[number].key for number in left])
                for number, span in zip(made, spans, strict=True):
                    working_set.create(span.key, span.shard_nbytes)
                    lease = working_set.lease(span.key, "w")
                    lease.tensor.zero_()
                    for each in layout.stretches(unit.comm.rank):
                        if each.span == number:
                            place, size = old.places[each.number], layout.specs[each.number].dtype.itemsize
                            start, nbytes = place.offset + each.start * size, (each.stop - each.start) * size
                            source = whole[place.span][start : start + nbytes]
                            lease.tensor[each.offset : each.offset + nbytes] = source
                            del source  # lifetime: a view would keep the lease
                    lease.release()
                    working_set.swap_out([span.key])
                unit.place(layout)
            except BaseException as error:
                unit.engine.phase.give_up(f"unit {unit.name!r} could not be laid out anew: {error}")
                raise
        finally:
            whole = {}
            for lease in leases.values():
                lease.release()


def _unfrozen_in_step(segment: Segment) -> UsageError:
    return UsageError(
        f"parameter {segment.name}: unfrozen inside a step; expected requires_grad_(True) after optimizer.step(),"
        " before the next forward"
    )


def _contents(layout: UnitLayout) -> dict[str, list[tuple[int, int]]]:
    """Return, by key, the segments that lie there and their offsets."""
    contents: dict[str, list[tuple[int, int]]] = {span.key: [] for span in layout.spans}
    for number, place in enumerate(layout.places):
        contents[layout.spans[place.span].key].append((number, place.offset))
    return contents

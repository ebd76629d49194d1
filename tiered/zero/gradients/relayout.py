"""Relayout: one unit laid out anew where its trained parameters have changed: one read and one write of moved spans.

UnitLayouts does that for all units of a model when the engine asks; the arithmetic is in layout.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import torch

from tiered.errors import UsageError
from tiered.store.residency.residency import Lease, Residency
from tiered.store.store import Store
from tiered.tiers.schedule import SharedSchedule, choose_held
from tiered.zero.formats.budget import share_out_again, work_sizes
from tiered.zero.formats.codec import Bucket
from tiered.zero.gradients.gradients import UnitGradients
from tiered.zero.gradients.open_gradients import OpenGradients
from tiered.zero.layout import Shares, Span, UnitLayout, whole_pages
from tiered.zero.parameters.parameter import without_dispatch
from tiered.zero.parameters.unit import Segment, Unit

__all__ = ["Relayout", "UnitLayouts", "layout_for_now"]

_PARAMETERS = "model/parameters/"
_NUM_AHEAD = 2  # units that a compute device copies in while another computes


def layout_for_now(unit: Unit, *, drops_frozen: bool) -> UnitLayout:
    """Return the layout that fits the trained parameters of ``unit`` now; the present layout where that fits.

    Parameters that were frozen since keep their places among the trained ones, except with ``drops_frozen``. A gradient
    that the caller has put into ``.grad`` makes a parameter trained.
    """
    with without_dispatch():
        names = [
            segment.name
            for segment in unit.segments
            if segment.parameter.requires_grad
            or segment.parameter.grad is not None
            or (segment.trainable and not drops_frozen)
        ]
    if names == [segment.name for segment in unit.segments if segment.trainable]:
        return unit.layout
    return unit.layout.with_trainable(names)


class Relayout:
    """The move of ``unit``'s bytes to where ``layout`` says. The unit must be parked and no update of it pending.

    ``copy`` harms nothing where it fails; after ``put`` has failed, only the committed bytes are whole.
    """

    def __init__(self, unit: Unit, layout: UnitLayout, store: Store) -> None:
        self._unit = unit
        self._layout = layout
        self._store = store
        self._working_set: Residency = store.working_set
        before, after = _contents(unit.layout), _contents(layout)
        self._left = [span for span in unit.layout.spans if before[span.key] != after.get(span.key)]
        self._made = [span for span in layout.spans if before.get(span.key) != after[span.key]]
        self._copies: dict[str, Lease] = {}

    def __repr__(self) -> str:
        return f"Relayout({self._unit.name!r}, {[span.key for span in self._made]})"

    @property
    def nbytes(self) -> int:
        """Bytes of the spans that are made."""
        return sum(span.nbytes for span in self._made)

    def copy(self) -> None:
        """Copy the moved spans to scratch keys of the new looks; blocks. Raises CapacityError for a lack of space."""
        second_set = sum(span.nbytes for span in self._made if span.trainable) if self._store.durable else 0
        self._store.reserve_space(self.nbytes + second_set)
        try:
            for span in self._made:
                self._copies[span.key] = self._new_lease(f"model/relayout/{span.key}", span, scratch=True)
            for span in self._left:
                lease = self._working_set.lease(span.key, "r")
                try:
                    self._copy_segments(span, lease.tensor)
                finally:
                    lease.release()
        except BaseException:
            self.end()
            raise

    def put(self) -> None:
        """Put the copies in the place of the old keys; blocks."""
        self._working_set.delete([span.key for span in self._left])
        for span in self._made:
            lease = self._new_lease(span.key, span, scratch=False)
            try:
                lease.tensor.copy_(self._copies[span.key].tensor)
            finally:
                lease.release()
            self._working_set.discard(self._copies.pop(span.key))
            self._working_set.swap_out([span.key])
        self._unit.place(self._layout)

    def end(self) -> None:
        """Delete the copies that are left. Idempotent."""
        while self._copies:
            self._working_set.discard(self._copies.popitem()[1])

    def _new_lease(self, key: str, span: Span, *, scratch: bool) -> Lease:
        self._working_set.create(key, span.nbytes, scratch=scratch)
        try:
            lease = self._working_set.lease(key, "w")
        except BaseException:
            self._working_set.delete([key])
            raise
        lease.tensor.zero_()
        return lease

    def _copy_segments(self, span: Span, source: torch.Tensor) -> None:
        old, new = self._unit.layout, self._layout
        number = old.spans.index(span)
        for spec, place, aim in zip(old.specs, old.places, new.places, strict=True):
            if place.span == number:
                target = self._copies[new.spans[aim.span].key].tensor
                target[aim.offset : aim.offset + spec.nbytes] = source[place.offset : place.offset + spec.nbytes]


def _contents(layout: UnitLayout) -> dict[str, list[tuple[int, int]]]:
    """Return, by key, the segments that lie there and their offsets."""
    contents: dict[str, list[tuple[int, int]]] = {span.key: [] for span in layout.spans}
    for number, place in enumerate(layout.places):
        contents[layout.spans[place.span].key].append((number, place.offset))
    return contents


def move_gradients(gradients: UnitGradients, lay_out_anew: Callable[[], None]) -> None:
    """Have ``lay_out_anew`` lay a unit out anew, and its ``gradients`` with it. Blocks."""
    open_gradients = gradients.open_gradients
    open_gradients.end_lent()
    gradients.end_spare()
    key, offsets = gradients.key, {s: s.grad_offset for s in gradients.unit.segments if s.has_gradient}
    if key:
        gradients.open()  # order: pending changes are applied where they belong
        gradients.store_away()
    gradients.key = ""
    try:
        lay_out_anew()
    except BaseException:
        gradients.key = key
        raise
    if not key:
        return
    unit = gradients.unit
    try:
        buffer, old = gradients.open(), unit.tier.gradients(key, "r")
    except BaseException as error:
        unit.engine.give_up(f"the gradients of unit {unit.name!r} found no room where it is laid out anew: {error}")
        raise
    old.use()
    for segment, offset in offsets.items():
        segment.gradient_flat(buffer).copy_(old.tensor[offset : offset + segment.nbytes].view(segment.dtype))
    gradients.note_clipped()
    open_gradients.discard(key, old)


class Moves(NamedTuple):
    """The calls around the move of a unit's bytes."""

    before: Callable[[Unit], None]  # waits for the pending update of the unit
    after: Callable[[], None]  # there are other keys now
    abandon: Callable[[str], None]  # a step is lost, for this reason


class UnitLayouts:
    """The present layouts of one model's units, the shares of the budget that follow from them, and the held keys.

    ``nbytes`` has the size of each key that moves, for the schedule; ``rooms_nbytes`` that of each unit's gradients.
    ``is_stale``: ``requires_grad`` was set since the units were laid out.
    """

    def __init__(
        self,
        store: Store,
        units: Sequence[Unit],
        shares: Shares,
        moves: Moves,
    ) -> None:
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
        self._updates_in_backward = False
        self._held: list[str] = []
        self._moves = moves

    def __repr__(self) -> str:
        return f"UnitLayouts({len(self._units)} units, {len(self.nbytes)} keys, {len(self._held)} held)"

    def set_state(self, buckets: Mapping[Unit, Sequence[Bucket[Segment]]], *, updates_in_backward: bool) -> None:
        """Take note of the optimizer's keys, and of when it updates."""
        self._buckets = buckets
        self._updates_in_backward = updates_in_backward
        self.shares = self._shares([unit.layout for unit in self._units])

    def _shares(self, layouts: Sequence[UnitLayout]) -> Shares:
        """Return the shares of the budget for ``layouts``."""
        wait = self.hold_is_auto and self._buckets is not None and not self._updates_in_backward
        return share_out_again(layouts, self._store.working_set.budget_bytes, self.shares, gradients_wait=wait)

    def hold(self) -> None:
        """Hold the keys that placement chooses for the present layouts, and no others."""
        working_set, own = self._store.working_set, self._buckets or {}
        parameters = {span.key: span.nbytes for unit in self._units for span in unit.layout.spans}
        buckets = [bucket for each in own.values() for bucket in each if working_set.has(bucket.key)]  # or rolled back
        for key in [key for key in self.nbytes if key.startswith(_PARAMETERS) and key not in parameters]:
            del self.nbytes[key]
        self.nbytes |= parameters | {bucket.key: bucket.nbytes for bucket in buckets}
        self.rooms_nbytes = {unit.gradients.room: unit.gradients.nbytes for unit in self._units}
        state = {bucket.key: whole_pages(bucket.nbytes) for bucket in buckets}
        chosen = choose_held(parameters, state, self.shares.held)
        working_set.release_hold([key for key in self._held if working_set.has(key)])
        working_set.hold(chosen)
        self._held = chosen
        self.are_held = self._buckets is not None and len(chosen) == len(parameters) + len(state)

    def expect_steps(self, open_gradients: OpenGradients) -> SharedSchedule:
        """Hold the keys that placement chooses of the present ones; return the schedule of a step's uses."""
        self.hold()
        open_gradients.gathered_bytes = self.shares.gathered
        open_gradients.ahead_bytes = _NUM_AHEAD * max(unit.nbytes for unit in self._units)
        open_gradients.rooms.nbytes = self.rooms_nbytes
        scratch = work_sizes([unit.layout for unit in self._units]).scratch
        open_gradients.update_bytes = self.shares.update - scratch
        return SharedSchedule(
            self._store.working_set,
            self.order(),
            self.nbytes,
            window_bytes=self.shares.read_ahead,
            rooms=open_gradients.rooms,
            rooms_nbytes=self.rooms_nbytes if self.are_held and self._units[0].tier.computes_in_dram else None,
        )

    def order(self) -> list[str]:
        """Return the order in which a step is expected to use the keys and rooms."""
        units, buckets = self._units, self._buckets
        order = [key for unit in units for key in unit.keys]
        if buckets is None:
            return [*order, *(key for unit in reversed(units) for key in unit.keys)]
        in_backward = self._updates_in_backward
        if not in_backward:
            order += [key for unit in reversed(units) for key in (*unit.keys, unit.gradients.room)]
        handed_over: list[str] = []  # updates run while the unit after them in the backward does
        for unit in reversed(units) if in_backward else units:
            order += ([*unit.keys, unit.gradients.room] if in_backward else []) + handed_over
            gradients = [] if in_backward else [unit.gradients.room]
            handed_over = [*unit.trainable_keys, *gradients, *(bucket.key for bucket in buckets[unit])]
        return order + handed_over

    def renew(self, shielded: Collection[Unit]) -> None:
        """Lay out anew each unit with a parameter that was unfrozen; units that are ``shielded`` wait."""
        for unit in self._units:
            if unit not in shielded:
                self.lay_out_anew(unit)
        self.is_stale = bool(shielded)
        self.drops_frozen = False

    def lay_out_anew(self, unit: Unit) -> None:
        """Lay ``unit`` out for its trained parameters of now, and its gradients with it. Blocks.

        Raises CapacityError where budget or space are too small, with nothing changed.
        """
        layout = layout_for_now(unit, drops_frozen=self.drops_frozen)
        if layout is unit.layout:
            return
        shares = self._shares([layout if each is unit else each.layout for each in self._units])
        self._moves.before(unit)
        if not unit.park():
            raise UsageError(
                f"unit {unit.name!r}: a parameter was unfrozen while an operation uses its unit; expected before or"
                " after it"
            )
        move_gradients(unit.gradients, lambda: self._move(Relayout(unit, layout, self._store)))
        self.shares = shares
        self._moves.after()

    def _move(self, relayout: Relayout) -> None:
        relayout.copy()
        try:
            relayout.put()
        except BaseException as error:
            self._moves.abandon(f"{relayout!r} failed: {error}")
            raise
        finally:
            relayout.end()

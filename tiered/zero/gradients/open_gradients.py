"""OpenGradients: the gradients of one model that are in DRAM, within their share of the budget.

StoredGradient and UsedGradient are the sources of stand-ins for those that are not. The Reclaimer gives memory back to
a caller that waits for bytes beyond the shares of the budget.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import NoReturn, Protocol, TypeAlias

import torch

from tiered.bytes.interrupt import uninterrupted_block
from tiered.errors import UsageError
from tiered.store.residency.residency import Residency
from tiered.store.waiting.calling_thread import this_thread
from tiered.tiers.compute_tier import ComputeTier, GradientBuffer, UpdatePlace
from tiered.tiers.device_tier import HostPlace
from tiered.tiers.schedule import Rooms
from tiered.zero.gradients.stand_in import Change, StandIn
from tiered.zero.gradients.updates import Updates
from tiered.zero.parameters.leased_units import OpenUnits
from tiered.zero.parameters.tensor_without_bytes import without_dispatch
from tiered.zero.parameters.unit import Unit
from tiered.zero.step import graph_task

__all__ = [
    "Compute",
    "OpenGradients",
    "Reclaimer",
    "StoredGradient",
    "UsedGradient",
    "check_used",
    "show_used",
    "with_pending",
]


Compute: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""A question about a gradient's values."""


class GradientOwner(Protocol):
    """The owner of the bytes of gradients."""

    def asked(self, question: Hashable, compute: Compute) -> None:
        """``question`` was asked: where that is cheap, the next gradients may answer it before they are stored."""

    def read(self, source: StoredGradient) -> AbstractContextManager[torch.Tensor]:
        """Lend the values of ``source`` as ``GradientSource.read`` does."""

    def change(self, source: StoredGradient, change: Change) -> None:
        """Apply ``change`` to the values of ``source`` now, or have it pending there."""


class StoredGradient:
    """One gradient of a unit, from its first way to NVMe to its end; see ``GradientSource``.

    ``pending`` are the changes that the stored bytes lack, in the order in which they were asked for. ``answers`` are
    those to questions that were asked before; they are of the stored bytes.
    """

    __slots__ = ("_owner", "answers", "name", "pending")

    where = "on NVMe"
    advice = (
        "norms, finite checks and scalings in place by numbers, as torch.nn.utils.clip_grad_norm_ and"
        " torch.amp.GradScaler do, or a store with a larger dram=, in which gradients find room"
    )
    is_readable = True

    def __init__(self, name: str, owner: GradientOwner) -> None:
        self.name = name
        self.pending: list[Change] = []
        self.answers: dict[Hashable, torch.Tensor] = {}
        # Lifetime: the parameter's gradient leads here, and the collector does not look into torch's objects.
        self._owner = weakref.ref(owner)

    def answer(self, question: Hashable | None, compute: Compute) -> torch.Tensor:
        """Return ``compute(values)``, reading them unless the answer is known. None: a question of this time alone."""
        if not self.pending and question in self.answers:
            return self.answers[question]
        if question is not None:
            self._owner_there().asked(question, compute)
        with self.read() as values:
            try:
                return compute(values)
            finally:
                del values  # lifetime: the bytes are lent

    def read(self) -> AbstractContextManager[torch.Tensor]:
        """Lend the values, a read of the whole unit's gradients if need be. Blocks."""
        return self._owner_there().read(self)

    def change(self, change: Change) -> None:
        """Apply ``change`` now where the values are in DRAM, else when they are read."""
        self._owner_there().change(self, change)

    def take_pending(self) -> list[Change]:
        """Return the changes that the stored bytes lack; the caller applies them, and may change the bytes further."""
        self.answers = {}
        pending, self.pending = self.pending, []
        return pending

    def gone(self) -> UsageError:
        """Return the error to raise once the owner has forgotten this gradient."""
        return UsageError(
            f"parameter {self.name}: the gradient that this stood for is gone: optimizer.step() has used it, or it was"
            " dropped or replaced; expected parameter.grad as it is now"
        )

    def _owner_there(self) -> GradientOwner:
        owner = self._owner()
        if owner is None:
            raise self.gone()
        return owner


@uninterrupted_block
def with_pending(tier: ComputeTier, stored: torch.Tensor, pending: Sequence[Change]) -> Iterator[torch.Tensor]:
    """Lend ``stored``, or where changes are pending a copy of it with these, within the budget of ``tier``.

    ``stored`` is a dense tensor and stays as it is. Blocks where memory is short.
    """
    if not pending or not stored.numel():
        yield stored
        return
    with tier.scratch(stored.nbytes) as flat:
        copy = flat.view(stored.dtype).as_strided(stored.shape, stored.stride()).copy_(stored)
        del flat, stored  # lifetime: only the caller refers to the copy
        for change in pending:
            change(copy)
        yield copy
        del copy


# -- used gradients ----------------------------------------------------------------------------------------------------


class UsedGradient:
    """A gradient that an update in a backward has used, until the step concludes; it has no values."""

    __slots__ = ("name",)

    where = 'used up, by the backward under update="backward"'
    advice = 'tiered.AdamW(..., update="step") for clipping, scaling and looking at gradients'
    is_readable = False

    def __init__(self, name: str) -> None:
        self.name = name

    def answer(self, question: object, compute: object) -> NoReturn:
        """Never called: there is nothing to ask about."""
        raise AssertionError(self.name)

    def read(self) -> NoReturn:
        """Never called: there is nothing to read."""
        raise AssertionError(self.name)

    def change(self, change: Change) -> NoReturn:
        """Never called: there is nothing to change."""
        raise AssertionError(self.name)

    def take_pending(self) -> list[Change]:
        """Return nothing: there is nothing to change."""
        return []


def check_used(unit: Unit) -> None:
    """Raise UsageError where the caller has put or dropped a gradient of ``unit`` that the backward has used."""
    with without_dispatch():
        dropped = next((segment for segment in unit.gradients.sources if segment.parameter.grad is None), None)
    if dropped is not None:
        raise UsageError(
            f"parameter {dropped.name}: .grad dropped between backward and optimizer.step() under"
            ' update="backward", which has used it: the step cannot be skipped any more; expected step() once more,'
            ' or tiered.AdamW(..., update="step")'
        )
    for segment, _ in unit.gradients.changed_by_hand():
        raise UsageError(
            f'parameter {segment.name}: a gradient put into .grad by hand under update="backward", where gradients'
            ' are used up as they become final; expected tiered.AdamW(..., update="step")'
        )


def show_used(unit: Unit) -> None:
    """Let each ``.grad`` of ``unit`` say again that the backward has used it; the caller's own tensors there go."""
    sources = unit.gradients.sources
    with without_dispatch():
        for segment in unit.segments:
            source = sources.get(segment)
            looks = segment.shape, segment.strides, segment.dtype, unit.tier.device
            segment.parameter.grad = StandIn.of(source, *looks) if source is not None else None


# -- open gradients ----------------------------------------------------------------------------------------------------


_MOST_QUESTIONS = 4  # about a gradient: the norms that a loop clips with and a scaler looks at
_NUM_UNITS_AHEAD = 2  # one is being read while the other is waited for


class _Gradients(Protocol):
    """The gradients of one unit, as ``UnitGradients`` has them."""

    unit: Unit
    buffer: GradientBuffer | None
    key: str
    room: str
    num_accumulating: int

    @property
    def nbytes(self) -> int: ...

    @property
    def are_any(self) -> bool: ...

    def end_spare(self) -> None: ...

    def store_away(self) -> bool: ...

    def are_there(self) -> bool: ...

    def drop(self) -> None: ...

    def zero(self) -> None: ...

    def reconcile(self) -> None: ...


class OpenGradients:
    """The open gradients of one model, and the choice of those to store away where their share of DRAM is full.

    Invariant: before a unit's gradients are leased, idle ones are stored away until the budget has ``update_bytes`` for
    an update and ``gathered_bytes`` for units that compute beside all that is leased. Gradients that wait for their
    update, and those that tensors of the user's keep, are leased bytes like others.
    """

    def __init__(
        self,
        open_units: OpenUnits,
        *,
        distance: Callable[[str], int],
        may_stay: Callable[[], bool],
    ) -> None:
        """``distance(key)``: after how many uses the schedule expects a key.

        ``may_stay()``: whether all keys are in DRAM for good, with room for all gradients beside them.
        """
        self.gathered_bytes = 0  # the share of the units that compute
        self.update_bytes = 0  # of the update's share
        self.ahead_bytes = 0  # of the units that a compute device is to have room for beside gradients
        self._shielded = open_units.shielded
        self._open_units = open_units
        self._working_set: Residency = open_units.root.working_set
        self.rooms = Rooms(self._working_set.has)  # for the schedule: buffers that will be leased
        self._root = open_units.root
        self._tier = open_units.root.tier
        self.place: UpdatePlace = HostPlace(self._tier, self._working_set)  # of updates
        self._distance = distance
        self._open: dict[_Gradients, None] = {}
        self._lent: tuple[_Gradients, GradientBuffer] | None = None
        self._each: dict[_Gradients, None] = {}
        self._to_delete: list[str] = []
        self._num_names = 0
        self.spares: dict[_Gradients, None] = {}  # those that have an empty buffer for gradients beside it
        self._may_stay = may_stay
        self._questions: dict[Hashable, Compute] = {}
        self._kept: dict[str, None] = {}  # keys of stored gradients that DRAM keeps

    def __repr__(self) -> str:
        return f"OpenGradients({len(self._open)} open)"

    def are_there(self) -> bool:
        """Return whether some unit has gradients that no step has used and no caller has dropped."""
        return any(gradients.are_there() for gradients in self._each)

    def drop_all(self) -> None:
        """Forget all gradients; see ``UnitGradients.drop``."""
        for gradients in self._each:
            gradients.drop()

    def zero_all(self) -> None:
        """Fill all gradients with zeros and keep them."""
        for gradients in self._each:
            gradients.zero()

    def reconcile_all(self) -> list[Unit]:
        """Take note of the caller's own changes to ``.grad``; return the units that have gradients."""
        for gradients in self._each:
            gradients.reconcile()
        return [gradients.unit for gradients in self._each if gradients.are_any]

    def may_stay(self) -> bool:
        """Return whether gradients may stay where autograd puts them; where not, empty buffers are given up."""
        if self._may_stay():
            return True
        if self.spares:
            self.end_spares()
        return False

    def end_spares(self) -> bool:
        """Give up all empty buffers, and move the gradients in that lie beside them; return whether there were any."""
        were_any = bool(self.spares)
        while self.spares:  # order: one that fails leaves the others to the next call
            gradients, _ = self.spares.popitem()
            gradients.end_spare()
        return were_any

    def new_buffer(self, gradients: _Gradients) -> tuple[str, GradientBuffer]:
        """Return a new buffer for ``gradients`` and its key, the name of their room if that is free. Blocks."""
        key = gradients.room
        if self._working_set.has(key):  # a caller still sees the bytes of an earlier lease, or they are being moved
            self._num_names += 1
            key = f"model/gradient/.{self._num_names}.{gradients.unit.name}"  # no unit's name begins with a dot
        self._working_set.create(key, gradients.nbytes, scratch=True)
        try:
            return key, self._tier.new_gradients(key, gradients.nbytes)
        except BaseException:
            self._working_set.delete([key])
            raise

    def read_ahead(self, gradients: _Gradients) -> None:
        """Ask for ``gradients`` and those of the next units: a caller that reads all of them reads these next."""
        each = list(self._each)
        index = each.index(gradients)
        coming = each[index : index + 1 + _NUM_UNITS_AHEAD]
        self._working_set.prefetch([each.key for each in coming if each.key and each.buffer is None])

    def lend(self, gradients: _Gradients) -> GradientBuffer:
        """Lend stored ``gradients`` for reading; they are kept for the next read of them, until ``end_lent``."""
        if self._lent is None or self._lent[0] is not gradients:
            self.end_lent()
            self._lent = gradients, self._tier.gradients(gradients.key, "r")
        self._lent[1].use()
        return self._lent[1]

    def note_question(self, question: Hashable, compute: Compute) -> None:
        """``question`` was asked about a stored gradient: those that leave the compute device answer it before."""
        if not self._tier.computes_in_dram and len(self._questions) < _MOST_QUESTIONS:
            self._questions[question] = compute

    def answer(self, source: StoredGradient | UsedGradient, values: torch.Tensor) -> None:
        """Have ``source`` know the answers for ``values``, which are about to be stored."""
        if isinstance(source, StoredGradient):
            source.answers = {question: compute(values) for question, compute in self._questions.items()}

    def end_lent(self) -> bool:
        """Give the gradients back that were leased for reading; return whether there were any."""
        lent, self._lent = self._lent, None
        if lent is not None:
            lent[1].release()
        return lent is not None

    def make_room(self, nbytes: int) -> None:
        """Store idle gradients away until ``nbytes`` more find room in the share, or no idle ones are left.

        All of them go where they are not to stay: they leave the compute device while the backward goes on.
        """
        if self._tier.computes_in_dram:
            self._shrink(nbytes + self.update_bytes)
            return
        idle = self._idle()
        while idle and not self.may_keep(nbytes):
            idle.pop().store_away()

    def may_keep(self, nbytes: int) -> bool:
        """Return whether the compute device keeps gradients: an update uses them there, and units have room beside.

        ``nbytes``: of the gradients that come next.
        """
        return self._tier.keeps_gradients and self._tier.left_bytes() >= nbytes + self.ahead_bytes

    def keep(self, gradients: _Gradients) -> GradientBuffer | None:
        """Return the buffer of ``gradients`` if their update uses it on the compute device; others there are stored."""
        buffer = gradients.buffer
        if buffer is None or buffer.lease is not None:
            return None
        if self.may_keep(gradients.nbytes if graph_task() != -1 else 0):  # in a backward others come
            return buffer
        gradients.store_away()
        return None

    def make_room_for_updates(self) -> None:
        """Store idle gradients away until an update finds its share, with the gradients of its unit in it."""
        self.end_lent()
        if not self._tier.computes_in_dram:  # the share is of DRAM, which has none of them
            return
        largest = max((gradients.nbytes for gradients in self._open), default=0)
        self._shrink(self.update_bytes - largest)

    def _shrink(self, needed_bytes: int) -> None:
        """Store idle gradients away until ``needed_bytes`` are left beside the share of the units that compute."""
        needed_bytes += max(0, self.gathered_bytes - self._open_units.nbytes)
        share = self._working_set
        if share.left_bytes >= needed_bytes:
            return
        idle = self._idle()
        while idle and share.left_bytes < needed_bytes:
            idle.pop().store_away()

    def add(self, gradients: _Gradients) -> None:
        """Take ``gradients`` of a unit into account; of all units, in the order in which they are read."""
        self._each[gradients] = None

    def opened(self, gradients: _Gradients) -> None:
        """A unit's gradients are in DRAM and shown."""
        self._open[gradients] = None
        self.rooms.leased.add(gradients.room)
        self.rooms.filled.add(gradients.room)

    def closed(self, gradients: _Gradients) -> None:
        """A unit's gradients are the working set's, or gone."""
        self._open.pop(gradients, None)
        self.rooms.leased.discard(gradients.room)

    def storing(self, gradients: _Gradients) -> None:
        """A unit's gradients leave the compute device: DRAM keeps them where an update finds its share beside them."""
        if self._tier.computes_in_dram:
            return
        needed_bytes = gradients.nbytes + self.update_bytes + self.gathered_bytes
        if self._working_set.left_bytes >= needed_bytes:
            self._working_set.hold([gradients.key])
            self._kept[gradients.key] = None

    def let_go_one(self) -> bool:
        """Let DRAM write the kept gradients that are used last, and drop them; return whether there were any."""
        for key in sorted(self._kept, key=self._distance, reverse=True):
            self._kept.pop(key, None)
            if self._working_set.has(key):  # no update has used it up
                self._working_set.release_hold([key])
                self._working_set.swap_out([key])
                return True
        return False

    def store_away_one(self, *, in_use: bool = False) -> bool:
        """Store the idle gradients away that are used last, or with ``in_use`` any; return whether there were any."""
        if self.end_lent() or self.end_spares() or any(gradients.store_away() for gradients in reversed(self._idle())):
            return True
        if not in_use:
            return False
        last_of_all = sorted(self._open, key=lambda gradients: gradients.num_accumulating)
        return any(gradients.store_away() for gradients in last_of_all)

    def _idle(self) -> list[_Gradients]:
        """Return the open gradients that are not being added to, the one that is used last at the end.

        The root's are not among them: a backward adds to them at its beginning and at its end.
        """
        used, opening = {self._root, *self._shielded}, self.rooms.opening
        open_ = [each for each in self._open if not each.num_accumulating and not each.unit.is_in_backward]
        idle = [each for each in open_ if each.unit not in used and each.room != opening]
        return sorted(idle, key=lambda gradients: self._distance(gradients.key))

    def discard(self, key: str, buffer: GradientBuffer | None) -> None:
        """Delete a scratch key now, with its buffer, or at the next ``sweep`` when a caller still sees its bytes."""
        if buffer is None:
            self._tier.delete(key)
        elif not buffer.discard():
            self._to_delete.append(key)

    def sweep(self, others: list[str]) -> None:
        """Delete the keys whose last views were alive when they were discarded, and ``others``."""
        keys, self._to_delete = self._to_delete + others, []
        self._working_set.delete(keys)

    def forget(self) -> None:
        """In a forked child: forget all leases, for the bytes are the parent's."""
        self._open.clear()
        self.spares.clear()
        self._lent = None


# -- reclaimer ---------------------------------------------------------------------------------------------------------


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

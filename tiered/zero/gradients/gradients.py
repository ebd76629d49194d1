"""The gradients of a unit: one flat buffer, a scratch key of the store, shown as the parameters' ``.grad``.

Gradients stay in DRAM while the budget allows; under pressure they go to NVMe and ``.grad`` becomes a stand-in. Where
all keys are in DRAM for good, they stay where autograd put them, and are not copied (OwnGradients).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager

import torch

from tiered.bytes.interrupt import uninterrupted, uninterrupted_block
from tiered.errors import UsageError
from tiered.tiers.compute_tier import GradientBuffer
from tiered.zero.gradients.open_gradients import Compute, OpenGradients, StoredGradient, UsedGradient, with_pending
from tiered.zero.gradients.stand_in import Change, StandIn
from tiered.zero.gradients.taken_gradients import TakenGradients
from tiered.zero.parameters.tensor_without_bytes import without_dispatch
from tiered.zero.parameters.unit import Segment, Unit

__all__ = ["BETWEEN_CLIP_AND_STEP", "ClipFactors", "OwnGradients", "UnitGradients"]


class OwnGradients:
    """The gradients of one unit while they stay where autograd put them, beside an empty buffer of their size.

    The invariant: *while such gradients are there, the unit's buffer is leased and its pages are the system's*. So they
    count in the budget as if they lay in it, no byte of theirs is copied, and the move into the buffer waits for
    nothing. ``buffer`` is kept from step to step; ``key`` is its key.
    """

    __slots__ = ("_clipped", "are_there", "buffer", "key")

    def __init__(self) -> None:
        self.are_there = False
        self.key = ""
        self.buffer: GradientBuffer | None = None
        # As the factors were made, with their versions. Lifetime: a tensor that is kept lends its address to no other.
        self._clipped: dict[Segment, tuple[torch.Tensor, int]] = {}

    def __repr__(self) -> str:
        return f"OwnGradients({'there' if self.are_there else 'none'}, buffer {self.key!r})"

    def keep(self, key: str, buffer: GradientBuffer) -> None:
        """Keep ``buffer``, whose bytes in DRAM are undefined, and its ``key``."""
        assert buffer.lease is not None
        buffer.lease.buffer.give_pages_back()
        self.key, self.buffer = key, buffer

    def take_buffer(self) -> tuple[str, GradientBuffer | None]:
        """Return the key and the buffer, for the gradients to be moved there; none are here any more."""
        found, self.key, self.buffer = (self.key, self.buffer), "", None
        self.drop()
        return found

    def drop(self) -> None:
        """Note that no gradient is here any more; the buffer is kept."""
        self.are_there = False
        self._clipped.clear()

    @staticmethod
    def can_have(segment: Segment, gradient: torch.Tensor) -> bool:
        """Return whether ``gradient`` is one that an update can read as it lies, and keeps no other bytes alive."""
        return (
            type(gradient) is torch.Tensor
            and gradient.layout is torch.strided
            and gradient.dtype == segment.dtype
            and gradient.stride() == segment.strides
            and segment.grad_offset >= 0
            and not gradient.is_neg()  # its bytes have the other sign, and kernels read bytes
            and gradient.untyped_storage().nbytes() <= segment.nbytes
        )

    @staticmethod
    def flat(gradient: torch.Tensor) -> torch.Tensor:
        """Return the (numel,) view of ``gradient``, which ``can_have`` has seen, in memory order."""
        return gradient.detach().as_strided((gradient.numel(),), (1,))

    def note_clipped(self, factors: Mapping[Segment, torch.Tensor]) -> None:
        """The ``factors`` are for the gradients as they are now."""
        gradients = {segment: segment.parameter.grad for segment in factors}
        self._clipped = {s: (g.detach(), g._version) for s, g in gradients.items() if g is not None}

    def changes(self, factors: dict[Segment, torch.Tensor]) -> bool:
        """Drop the factors of gradients that were replaced since; return whether others were written in place."""
        is_changed = False
        for segment in list(factors):
            before, now = self._clipped.get(segment), segment.parameter.grad
            if before is None or now is None or before[0].data_ptr() != now.data_ptr():
                del factors[segment]
            elif before[1] != now._version:
                is_changed = True
        return is_changed


# -- clip factors ------------------------------------------------------------------------------------------------------


BETWEEN_CLIP_AND_STEP = (
    "between tiered.clip_grad_norm_, whose factor is applied by the step, and optimizer.step(); expected changes, such"
    " as those of scaler.unscale_, before the clipping"
)


class ClipFactors:
    """The factors, () fp32 each, of the gradients as they were when they were clipped.

    Invariant: gradients that were written in place since are noticed before their bytes are elsewhere.
    """

    __slots__ = ("_is_changed", "_version", "factors")

    def __init__(self) -> None:
        self.factors: dict[Segment, torch.Tensor] = {}
        self._version = 0  # of the buffer, when the factors were made for it
        self._is_changed = False  # in place, since then

    def clear(self) -> None:
        """There are no factors."""
        self.factors.clear()
        self._is_changed = False

    def note(self, buffer: GradientBuffer | None, own: OwnGradients) -> None:
        """The factors are for the gradients as they are now."""
        if buffer is not None:
            self._version = buffer.tensor._version
        elif own.are_there and self.factors:
            with without_dispatch():
                own.note_clipped(self.factors)

    def note_changes(self, buffer: GradientBuffer | None, own: OwnGradients) -> None:
        """Take note of gradients that were written in place."""
        if not self.factors:
            return
        if buffer is not None and buffer.tensor._version != self._version:
            self._is_changed = True
        elif own.are_there:
            with without_dispatch():
                self._is_changed |= own.changes(self.factors)

    def check(self, name: str) -> None:
        """Raise UsageError where gradients of the unit ``name`` were clipped and then written in place."""
        if self._is_changed:
            raise UsageError(
                f"unit {name!r}: gradients written in place {BETWEEN_CLIP_AND_STEP}, or a new tensor as .grad, which is"
                " taken as it is"
            )


# -- gradients ---------------------------------------------------------------------------------------------------------


class UnitGradients:
    """The gradients of one unit in one buffer, laid out as the unit's trainable spans are, for good.

    Invariant: ``.grad`` of a parameter with a gradient is a view of the leased buffer, or a stand-in when the bytes are
    the working set's, or, all of them while ``own.are_there``, the tensor that autograd made. ``sources`` are the
    gradients of stand-ins, with the changes that the stored bytes lack; ``factors`` are the clip factors that the next
    update multiplies with, in fp32.

    ``room`` is the name under which the schedule knows that the buffer will be leased. The room is also the buffer's
    key, unless an earlier buffer still has that key. While ``num_accumulating`` autograd adds to the buffer, after
    hooks of the caller's that may use other units: until then the buffer is not given back.
    """

    __slots__ = (
        "__weakref__", "_lay_out_anew", "buffer", "clipped", "factors", "key",
        "num_accumulating", "open_gradients", "own", "room", "sources", "unit", "working_set",
    )  # fmt: skip

    def __init__(self, unit: Unit, open_gradients: OpenGradients, lay_out_anew: Callable[[Unit], None]) -> None:
        self.unit = unit
        self.open_gradients = open_gradients
        self._lay_out_anew = lay_out_anew
        self.working_set = unit.working_set
        self.buffer: GradientBuffer | None = None
        self.key = ""  # "": there are no gradients in a buffer
        self.own = OwnGradients()
        self.room = f"model/gradient/{unit.name}"
        self.clipped = ClipFactors()
        self.factors = self.clipped.factors
        self.num_accumulating = 0
        self.sources: dict[Segment, StoredGradient | UsedGradient] = {}

    @property
    def nbytes(self) -> int:
        """Bytes that the buffer takes; 0 for a unit whose spans are all frozen."""
        return self.unit.gradient_nbytes

    @property
    def are_any(self) -> bool:
        """Whether there are gradients, as far as the caller's own changes to ``.grad`` are known."""
        return bool(self.key) or self.own.are_there

    @uninterrupted
    def open(self) -> torch.Tensor:
        """Return the buffer, (nbytes,) uint8, where ``.grad`` shows what was stored, or lay beside it. Blocks."""
        with self.working_set.mark:
            if self.buffer is not None:
                self.buffer.use()
                return self.buffer.tensor
            self.open_gradients.end_lent()
            were_own = self.own.are_there
            if self.own.buffer is not None:
                self.clipped.note_changes(None, self.own)
                self.key, buffer = self.own.take_buffer()
                assert buffer is not None
            elif self.key:
                self.open_gradients.make_room(self.nbytes)
                buffer = self.unit.tier.gradients(self.key, "rw")
            else:
                self.open_gradients.make_room(self.nbytes)
                self.key, buffer = self.open_gradients.new_buffer(self)
            self.buffer = buffer
            buffer.use()
            self.open_gradients.opened(self)
            with without_dispatch():
                self._show(buffer.tensor, were_own=were_own)
            self.clipped.note(buffer, self.own)
            return buffer.tensor

    def _show(self, buffer: torch.Tensor, *, were_own: bool) -> None:
        """Show the gradients in ``buffer``; a tensor that is not theirs is the caller's: reconcile takes note of it."""
        for segment in self.unit.segments:
            gradient, source = segment.parameter.grad, self.sources.get(segment)
            for change in source.take_pending() if source is not None else ():
                change(segment.gradient_view(buffer))
            if not segment.has_gradient or gradient is None:
                continue
            if were_own and OwnGradients.can_have(segment, gradient):
                segment.parameter.grad = segment.gradient_view(buffer).copy_(gradient.detach())
            elif self._is_ours(segment, gradient):
                segment.parameter.grad = segment.gradient_view(buffer)

    @uninterrupted_block
    def lent(self, segment: Segment) -> Iterator[torch.Tensor]:
        """Lend the gradient of ``segment`` for reading; a stored one is swapped in for as long, and stays stored.

        Where changes are pending, the caller gets a copy with the changes, within the budget.
        """
        if self.own.are_there:
            gradient = segment.parameter.grad
            assert gradient is not None
            yield gradient.detach()
            return
        if self.buffer is not None:
            self.buffer.use()
            yield segment.gradient_view(self.buffer.tensor)
            return
        self.open_gradients.read_ahead(self)
        source = self.sources.get(segment)
        pending = source.pending if isinstance(source, StoredGradient) else []
        buffer = self.open_gradients.lend(self)
        with with_pending(self.unit.tier, segment.gradient_view(buffer.tensor), pending) as values:
            yield values
            del values  # lifetime: the bytes are lent

    def asked(self, question: Hashable, compute: Compute) -> None:
        """``question`` was asked: gradients on their way from the compute device answer it from now on."""
        self.open_gradients.note_question(question, compute)

    def answer(self, segment: Segment, question: Hashable | None, compute: Compute) -> torch.Tensor:
        """Return ``compute(the gradient of segment)``."""
        source = self.sources.get(segment)
        if self.buffer is None and isinstance(source, StoredGradient):
            return source.answer(question, compute)
        with self.lent(segment) as values:
            try:
                return compute(values)
            finally:
                del values  # lifetime: the bytes are lent

    def read(self, source: StoredGradient) -> AbstractContextManager[torch.Tensor]:
        """Lend the gradient of ``source``. Raises UsageError where it is gone."""
        return self.lent(self._segment_of(source))

    def change(self, source: StoredGradient, change: Change) -> None:
        """Apply ``change`` to the gradient of ``source``, or have it pending. Raises UsageError where it is gone."""
        segment = self._segment_of(source)
        if self.factors:
            raise UsageError(f"parameter {segment.name}: its gradient changed in place {BETWEEN_CLIP_AND_STEP}")
        if self.buffer is not None:
            self.buffer.use()
            change(segment.gradient_view(self.buffer.tensor))
        else:
            source.pending.append(change)

    def _segment_of(self, source: StoredGradient) -> Segment:
        for segment, each in self.sources.items():
            if each is source:
                return segment
        raise source.gone()

    def _is_ours(self, segment: Segment, gradient: torch.Tensor | None) -> bool:
        """Return whether ``gradient`` is a stand-in for the gradient that ``segment`` has here."""
        return isinstance(gradient, StandIn) and gradient.source is self.sources.get(segment)

    def are_there(self) -> bool:
        """Return whether there are gradients; the bytes go where the caller has dropped all, as model.zero_grad()."""
        if not self.are_any or self.num_accumulating:
            return self.are_any
        with without_dispatch():
            if any(segment.parameter.grad is not None for segment in self.unit.segments):
                return True
        self.drop()
        return False

    def recall(self, segment: Segment) -> None:
        """Autograd will add to the gradient of ``segment``: swap stored gradients in, refuse clipped ones."""
        if self.factors:
            self.changed_by_hand()  # a gradient that the caller has dropped is not clipped any more
        if self.factors:
            raise UsageError(
                f"unit {self.unit.name!r}: backward after tiered.clip_grad_norm_ and before optimizer.step(); expected"
                " all micro-steps first, then the clipping, then the step"
            )
        self.num_accumulating += 1
        if self.are_any:
            if self.key:
                self.open()
            with without_dispatch():
                gradient = segment.parameter.grad
            if gradient is not None and not self._is_in_place(segment, gradient):
                self.reconcile()  # order: before autograd adds, it must not lie where another's gradient will

    def adopt(self, segment: Segment) -> None:
        """Take over the gradient that autograd has accumulated in ``.grad``: it moves into the buffer if need be."""
        self.num_accumulating = max(0, self.num_accumulating - 1)
        with without_dispatch():
            gradient = segment.parameter.grad
            if gradient is None:  # a hook of the caller's has dropped it
                segment.has_gradient = False
            elif not self.key and OwnGradients.can_have(segment, gradient) and self._has_own_place():
                self.own.are_there = segment.has_gradient = True
                self.sources.pop(segment, None)
            else:
                self._adopt(segment, gradient)

    def _has_own_place(self) -> bool:
        """Return whether gradients may stay where autograd puts them: their buffer is leased, and is to stay so."""
        if not self.open_gradients.may_stay():
            return False
        if self.own.buffer is None:
            self.open_gradients.make_room(self.nbytes)
            self.own.keep(*self.open_gradients.new_buffer(self))
            self.open_gradients.spares[self] = None
        return True

    def end_spare(self) -> None:
        """Give up the empty buffer: gradients beside it move in."""
        if self.own.are_there:
            self.open()
        elif self.own.buffer is not None:
            self.open_gradients.discard(*self.own.take_buffer())

    def _adopt(self, segment: Segment, gradient: torch.Tensor) -> None:
        if isinstance(gradient, StandIn):
            raise UsageError(
                f"parameter {segment.name}: .grad is the stand-in of another gradient, of parameter"
                f" {gradient.source.name}, which is or was {gradient.source.where}; expected a tensor with values, or"
                " .grad as it was"
            )
        if gradient.layout is not torch.strided:
            raise UsageError(
                f"parameter {segment.name}: a {gradient.layout} gradient; expected a dense one:"
                " build the embedding with sparse=False"
            )
        with without_dispatch():
            if segment.grad_offset < 0:  # its span is frozen
                self._lay_out_anew(self.unit)
            view = segment.gradient_view(self.open())
            if gradient.data_ptr() != view.data_ptr():
                view.copy_(gradient.detach())
                segment.parameter.grad = view
                self.sources.pop(segment, None)
        segment.has_gradient = True

    def _is_in_place(self, segment: Segment, gradient: torch.Tensor) -> bool:
        """Return whether ``gradient`` lies where that of ``segment`` belongs: in the leased buffer, or beside it."""
        if self.own.are_there:
            return segment.has_gradient and OwnGradients.can_have(segment, gradient)
        if self.buffer is None or not segment.has_gradient or isinstance(gradient, StandIn):
            return False
        return gradient.data_ptr() == self.buffer.tensor.data_ptr() + segment.grad_offset

    @uninterrupted
    def reconcile(self) -> None:
        """Take note of the caller's own changes to ``.grad``: another tensor is taken over, None drops the gradient.

        Raises UsageError where gradients were clipped and then written in place.
        """
        with self.working_set.mark:
            self.clipped.note_changes(self.buffer, self.own)
            self.clipped.check(self.unit.name)
            for segment, gradient in self.changed_by_hand():
                self.factors.pop(segment, None)
                self._adopt(segment, gradient)
            self.note_clipped()

    def note_clipped(self) -> None:
        """The factors are for the gradients as they are now."""
        self.clipped.note(self.buffer, self.own)

    def changed_by_hand(self) -> list[tuple[Segment, torch.Tensor]]:
        """Drop the gradients that the caller has dropped; return the tensors that the caller has put into ``.grad``.

        None of them lies in the buffer: one gradient may have been put in the place of another.
        """
        changed: list[tuple[Segment, torch.Tensor]] = []
        start = end = 0
        if self.buffer is not None:
            start = self.buffer.tensor.data_ptr()
            end = start + self.buffer.tensor.numel()
        with without_dispatch():
            for segment in self.unit.segments:
                gradient = segment.parameter.grad
                if gradient is None:
                    segment.has_gradient = False
                    self.factors.pop(segment, None)
                    self.sources.pop(segment, None)
                elif isinstance(gradient, StandIn):
                    changed += [] if self._is_ours(segment, gradient) else [(segment, gradient)]
                elif not self._is_in_place(segment, gradient):
                    lies_here = gradient.layout is torch.strided and start <= gradient.data_ptr() < end
                    changed.append((segment, gradient.detach().clone() if lies_here else gradient))
        return changed

    @uninterrupted
    def store_away(self) -> bool:
        """Give the buffer back to the working set and leave stand-ins; return whether there was anything to give."""
        if self.buffer is None:
            return False
        self.clipped.note_changes(self.buffer, self.own)
        for segment, gradient in self.changed_by_hand():
            if segment.has_gradient and not isinstance(gradient, StandIn):  # others have no bytes of ours
                self.factors.pop(segment, None)
                self._adopt(segment, gradient)
        with without_dispatch():
            for segment in self.unit.segments:
                if segment.has_gradient and not isinstance(segment.parameter.grad, StandIn):
                    source = self.sources.setdefault(segment, StoredGradient(segment.name, self))
                    segment.parameter.grad = _stand_in(segment, source)
                    self.open_gradients.answer(source, segment.gradient_view(self.buffer.tensor))
        buffer, self.buffer = self.buffer, None
        self.open_gradients.closed(self)
        self.open_gradients.storing(self)  # order: or a copy that has ended offers the bytes to be written
        try:
            buffer.store()
        except BaseException as error:
            if buffer.lease is None:  # DRAM does not have them
                self.unit.engine.give_up(f"the gradients of unit {self.unit.name!r} could not be stored: {error}")
            buffer.release()
            raise
        return True

    def take(self, *, used: bool) -> TakenGradients:
        """Hand the gradients over to an update; there are none here afterwards (see ``drop`` for ``.grad``)."""
        self.open_gradients.end_lent()
        tiers = self.working_set, self.unit.tier, self.open_gradients.place
        if self.own.are_there:
            with without_dispatch():
                there = [(s, s.parameter.grad) for s in self.unit.segments if s.has_gradient]
                own = {s: OwnGradients.flat(gradient) for s, gradient in there if gradient is not None}
            taken = TakenGradients(*tiers, self.room, nbytes=self.nbytes, factors=self.factors, own=own)
            self.drop(used=used)
            return taken
        assert self.key
        kept = self.open_gradients.keep(self)
        pending = {s: source.take_pending() for s, source in self.sources.items() if s.has_gradient}
        taken = TakenGradients(
            *tiers, self.key, nbytes=self.nbytes, factors=self.factors, kept=kept,
            lease=None if self.buffer is None else self.buffer.lease,
            pending={segment: changes for segment, changes in pending.items() if changes},
        )  # fmt: skip
        if self.buffer is not None:
            self.open_gradients.closed(self)
        self.key, self.buffer = "", None
        self.drop(used=used)
        if kept is not None:
            kept.hand_over()
        return taken

    @uninterrupted
    def drop(self, *, used: bool = False) -> None:
        """Forget the gradients; bytes a caller still sees live as long as its view.

        ``.grad`` of each becomes None, or with ``used`` a stand-in that says so.
        """
        self.open_gradients.end_lent()
        self.sources = {s: UsedGradient(s.name) for s in self.unit.segments if used and s.has_gradient}
        with without_dispatch():
            for segment in self.unit.segments:
                parameter = segment.parameter
                if segment in self.sources:
                    parameter.grad = _stand_in(segment, self.sources[segment])
                elif not used or isinstance(parameter.grad, StandIn):
                    parameter.grad = None
                segment.has_gradient = False
        self.clipped.clear()
        self.own.drop()
        self.open_gradients.rooms.filled.discard(self.room)
        buffer, self.buffer = self.buffer, None
        if buffer is not None:
            self.open_gradients.closed(self)
        if self.key:
            self.open_gradients.discard(self.key, buffer)
        self.key = ""

    def zero(self) -> None:
        """Fill the gradients with zeros and keep them (``zero_grad(set_to_none=False)``)."""
        self.clipped.clear()
        self.reconcile()
        if self.own.are_there:
            with without_dispatch(), torch.no_grad():
                for segment in self.unit.segments:
                    if segment.has_gradient:
                        segment.parameter.grad.zero_()  # type: ignore[union-attr]  # it is there
        elif self.key:
            self.open().zero_()


def _stand_in(segment: Segment, source: StoredGradient | UsedGradient) -> StandIn:
    return StandIn.of(source, segment.shape, segment.strides, segment.dtype, segment.unit.tier.device)

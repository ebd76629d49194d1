"""UnitGradients: the one record of a unit's gradients, from autograd to the update that uses them up."""

from __future__ import annotations

import enum
import functools
import operator
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager

import torch

from tiered.errors import UsageError
from tiered.tiers.compute_tier import GradientBuffer
from tiered.zero.gradients.exchange import ShardGradient
from tiered.zero.gradients.model_gradients import ModelGradients, TakenGradients
from tiered.zero.gradients.stand_in import Change, Compute, SharedGradient, StandIn, StoredGradient, UsedGradient
from tiered.zero.parameters.tensor_without_bytes import without_dispatch
from tiered.zero.parameters.unit import Segment, Unit

__all__ = ["GradientState", "UnitGradients"]


# [Note: the life of a gradient]
#
# The gradients of a unit that computes are in one buffer, leased from the DRAM budget (or memory of the compute
# device), and each .grad is a view of the buffer. Where the budget is short, idle gradients are stored: the working
# set writes the bytes to NVMe, and each .grad becomes a stand-in, which answers norms, finite checks and scalings. The
# next backward through the unit leases the bytes again. Where all keys of a model are in DRAM for good, a gradient
# stays in the tensor that autograd made, and is not copied; the buffer is leased all the same, with its pages given
# back to the system, so that the budget counts each byte once. optimizer.step() hands the gradients to an update;
# under update="backward" the backward does, and .grad says so until the step concludes. The buffer's bytes are those
# of one scratch key, made once for the run; an update drops used bytes unwritten. GradientState has the transitions.
#
# Over several ranks the buffer lasts until all of a backward's gradients of the unit have come. An exchange takes it,
# and the sum of all ranks' stays in this rank's ShardGradient; each .grad says so until the step.


class GradientState(enum.Enum):
    """Where the bytes of a unit's gradients are, and what ``.grad`` of its parameters is; see the note above.

    The transitions, and the functions of UnitGradients that make them:

    - NONE, TAKEN, OWN, STORED -> LEASED [_leased]; NONE, TAKEN -> OWN [_keep_as_own]
    - LEASED -> STORED [store_away]
    - LEASED, OWN, STORED -> TAKEN or USED [take], NONE [drop]
    - NONE, LEASED, STORED, SHARED -> SHARED [give, shared]; SHARED -> NONE [recall], TAKEN or USED [take]
    - USED -> TAKEN, or NONE once the update has ended [drop], as the step concludes
    """

    NONE = "none"  # nowhere; .grad is None
    LEASED = "leased"  # in the buffer, where computing happens; .grad is a view of the buffer
    OWN = "own"  # in tensors that autograd made, beside an empty buffer; .grad is such a tensor
    STORED = "stored"  # the working set's, in DRAM or on NVMe; .grad is a StandIn that answers norms
    TAKEN = "taken"  # an update's, until it ends; .grad is None
    SHARED = "shared"  # summed over the ranks, in the shard of each; .grad is a StandIn that says so
    USED = "used"  # an update's in a backward, until it ends; .grad is a StandIn that says so


_IN_BUFFER = (GradientState.LEASED, GradientState.STORED)  # the bytes of the key
_ARE_THERE = (*_IN_BUFFER, GradientState.OWN)

BETWEEN_CLIP_AND_STEP = (
    "between tiered.clip_grad_norm_, whose factor is applied by the step, and optimizer.step(); expected changes, such"
    " as those of scaler.unscale_, before the clipping"
)


# -- unit gradients ----------------------------------------------------------------------------------------------------


class UnitGradients:
    """The gradients of one unit, laid out as its trainable spans are: all facts about them, in one ``state``.

    ``key`` names the scratch key of the buffer, and the room that the schedule leaves for it. ``buffer`` is leased: it
    has the gradients in LEASED; in other states it is empty, and kept for tensors that stay where autograd puts them.
    ``sources`` are those of the stand-ins. ``factors``, () fp32 each, are the clip factors that the next update
    multiplies with. While ``num_accumulating`` autograd adds to the buffer, after hooks of the caller's that may use
    other units: until then the buffer is not given back.
    """

    __slots__ = (
        "__weakref__", "_clipped", "_has_key", "_is_changed", "buffer", "factors", "key", "model", "num_accumulating",
        "shard", "sources", "state", "taken", "unit", "working_set",
    )  # fmt: skip

    def __init__(self, unit: Unit, model: ModelGradients) -> None:
        self.unit = unit
        self.model = model
        self.working_set = unit.working_set
        self.state = GradientState.NONE
        self.key = f"model/gradient/{unit.name}"
        self.shard = ShardGradient(unit) if unit.world > 1 else None
        self.buffer: GradientBuffer | None = None
        self.sources: dict[Segment, UsedGradient] = {}
        self.factors: dict[Segment, torch.Tensor] = {}
        self.taken: TakenGradients | None = None  # the last ones
        self.num_accumulating = 0
        self._has_key = False
        # The clipped gradients' addresses and versions. Lifetime: a tensor that is kept lends its address to no other.
        self._clipped: dict[Segment, tuple[torch.Tensor | None, int, int]] = {}
        self._is_changed = False  # a clipped one was written in place

    def __repr__(self) -> str:
        return f"UnitGradients({self.unit.name!r}, {self.state.value})"

    @property
    def nbytes(self) -> int:
        """Bytes that the buffer takes; 0 for a unit whose spans are all frozen."""
        return self.unit.gradient_nbytes

    @property
    def update_key(self) -> str:
        """The scratch key that an update takes over."""
        return self.key if self.shard is None else self.shard.key

    @property
    def are_whole(self) -> bool:
        """Whether there are gradients here that were not exchanged with other ranks."""
        return self.state in _ARE_THERE

    @property
    def are_any(self) -> bool:
        """Whether there are gradients, as far as the caller's own changes to ``.grad`` are known."""
        return self.are_whole or (self.shard is not None and bool(self.shard.segments))

    def are_there(self) -> bool:
        """Return whether there are gradients; the bytes go where the caller has dropped all, as model.zero_grad()."""
        if not self.are_any or self.num_accumulating:
            return self.are_any
        with without_dispatch():
            if any(segment.parameter.grad is not None for segment in self.unit.segments):
                return True
        self.drop()
        return False

    # -- from autograd to the buffer -----------------------------------------------------------------------------

    def recall(self, segment: Segment) -> None:
        """Autograd will add to the gradient of ``segment``: lease stored gradients, refuse clipped ones."""
        if self.factors:
            self.changed_by_hand()  # a gradient that the caller has dropped is not clipped any more
        if self.factors:
            raise UsageError(
                f"unit {self.unit.name!r}: backward after tiered.clip_grad_norm_ and before optimizer.step(); expected"
                " all micro-steps first, then the clipping, then the step"
            )
        self.num_accumulating += 1
        if self.state is GradientState.SHARED and self.shard is not None:
            self.reconcile()
            self.shard.apply(self.sources)
            self._forget(GradientState.NONE)  # the sum of earlier backwards stays in the shard
        if self.state in _IN_BUFFER:
            self.open()
        with without_dispatch():
            gradient = segment.parameter.grad
        if self.are_whole and gradient is not None and not self._is_in_place(segment, gradient):
            self.reconcile()  # order: before autograd adds, it must not lie where another's gradient will

    def adopt(self, segment: Segment) -> None:
        """Take over the gradient that autograd has accumulated in ``.grad``."""
        self.num_accumulating = max(0, self.num_accumulating - 1)
        with without_dispatch():
            gradient = segment.parameter.grad
            if gradient is None:  # a hook of the caller's has dropped it
                segment.has_gradient = False
            elif (
                self.shard is None
                and self.model.may_stay()
                and self.state not in _IN_BUFFER
                and _can_be_own(segment, gradient)
            ):
                self._keep_as_own(segment)
            else:
                self._move_in(segment, gradient)

    def _keep_as_own(self, segment: Segment) -> None:
        """Let the gradient of ``segment`` stay where autograd has put it, beside a leased buffer without pages."""
        if self.buffer is None:
            self.buffer = self._empty_buffer()
            assert self.buffer.lease is not None
            self.buffer.lease.buffer.give_pages_back()
            self.model.spares[self.unit] = None
        self.state = GradientState.OWN
        segment.has_gradient = True
        self.sources.pop(segment, None)

    def _move_in(self, segment: Segment, gradient: torch.Tensor) -> None:
        """Move ``gradient`` into the buffer, unless it is there; without torch's dispatch."""
        if isinstance(gradient, StandIn):
            raise UsageError(
                f"parameter {segment.name}: .grad is the stand-in of another gradient, of parameter"
                f" {gradient.source.name}, which is or was {gradient.source.where}; expected a tensor with values, or"
                " .grad as it was"
            )
        if gradient.layout is not torch.strided:
            raise UsageError(
                f"parameter {segment.name}: a {gradient.layout} gradient; expected a dense one: build the embedding"
                ' with sparse=False, or keep the table out of the model, in store.create_rows(..., state="adam"),'
                " and update its rows by tiered.RowSparseAdam"
            )
        if segment.grad_offset < 0:
            raise UsageError(
                f"parameter {segment.name}: a gradient for a parameter that was frozen as its step began; expected"
                " requires_grad_(True) after optimizer.step(), before the next forward"
            )
        view = segment.gradient_view(self._leased().tensor)
        if gradient.data_ptr() != view.data_ptr():
            view.copy_(gradient.detach())
            segment.parameter.grad = view
            self.sources.pop(segment, None)
        segment.has_gradient = True

    def open(self) -> torch.Tensor:
        """Return the buffer, (nbytes,) uint8, where ``.grad`` shows what was stored, or lay beside it. Blocks."""
        with self.working_set.mark, without_dispatch():
            return self._leased().tensor

    def _leased(self) -> GradientBuffer:
        """Return the buffer, to be used now, with all gradients in it, and shown; without torch's dispatch. Blocks."""
        before, buffer = self.state, self.buffer
        if before is GradientState.LEASED and buffer is not None:
            buffer.use()
            return buffer
        if self.model.lent is not None:
            self.model.end_lent()
        if self.factors:
            self._note_changes()
        if before is GradientState.STORED:
            self.model.make_room(self.nbytes)
            buffer = self.unit.tier.gradients(self.key, "rw")
        elif buffer is None:
            buffer = self._empty_buffer()
        self.buffer, self.state = buffer, GradientState.LEASED
        self.model.opened(self.unit)
        buffer.use()
        if before in _ARE_THERE:
            self._show(buffer.tensor, were_own=before is GradientState.OWN)
            self.note_clipped()
        return buffer

    def _empty_buffer(self) -> GradientBuffer:
        """Lease the bytes of the key, which are undefined then. Blocks."""
        if self.taken is not None and not self.taken.is_over:
            self.unit.engine.finish_update(self.unit)
        self.taken, nbytes = None, self.unit.gradient_nbytes
        self.model.make_room(nbytes)
        if not self._has_key:
            self.working_set.create(self.key, nbytes, scratch=True)
            self._has_key = True
        return self.unit.tier.new_gradients(self.key, nbytes)

    def _show(self, buffer: torch.Tensor, *, were_own: bool) -> None:
        """Show the gradients in ``buffer``; a tensor that is not theirs is the caller's: reconcile takes note of it."""
        for segment in self.unit.segments:
            gradient, source = segment.parameter.grad, self.sources.get(segment)
            for change in source.take_pending() if source is not None else ():
                change(segment.gradient_view(buffer))
            if not segment.has_gradient or gradient is None:
                continue
            if were_own and _can_be_own(segment, gradient):
                segment.parameter.grad = segment.gradient_view(buffer).copy_(gradient.detach())
            elif self._is_ours(segment, gradient):
                segment.parameter.grad = segment.gradient_view(buffer)

    # -- over several ranks --------------------------------------------------------------------------------------

    def give(self) -> tuple[GradientBuffer, bytes]:
        """Hand the whole gradients over to an exchange, zeros where this rank has none; ``shared`` must follow. Blocks.

        Returns the buffer, the caller's to give back, and a bit for each segment: whether it has a gradient here.
        """
        self.reconcile()
        with self.working_set.mark, without_dispatch():
            buffer = self._leased()
            bits = 0
            for number, segment in enumerate(self.unit.segments):
                bits |= segment.has_gradient << number
                if segment.grad_offset >= 0 and not segment.has_gradient:
                    segment.gradient_view(buffer.tensor).zero_()
            self.buffer = None
            self.model.closed(self.unit)
            self._forget(GradientState.NONE)
        return buffer, bits.to_bytes(-(-len(self.unit.segments) // 8), "little")

    def shared(self, received: torch.Tensor, masks: Sequence[bytes]) -> None:
        """Add what all ranks have given to the shard; ``masks`` are the bits of each. Blocks where DRAM is short."""
        assert self.shard is not None
        bits = functools.reduce(operator.or_, [int.from_bytes(mask, "little") for mask in masks])
        self.shard.add(received, [s for number, s in enumerate(self.unit.segments) if bits >> number & 1])
        self.state = GradientState.SHARED
        self.sources = {segment: SharedGradient(segment) for segment in self.shard.segments}
        with without_dispatch():
            for segment, source in self.sources.items():
                segment.parameter.grad, segment.has_gradient = source.stand_in(), True

    def end_spare(self) -> None:
        """Give up the empty buffer; tensors that stayed where autograd put them move in."""
        if self.state is GradientState.OWN:
            self.open()
        elif self.state is not GradientState.LEASED and self.buffer is not None:
            buffer, self.buffer = self.buffer, None
            buffer.discard()

    def forget_key(self) -> None:
        """Delete the key: the unit, which has no gradients and no update pending, is about to be laid out anew."""
        self.end_spare()
        if self._has_key:
            self._has_key = False
            self.working_set.delete([self.key])
        if self.shard is not None:
            self.shard.forget_key()

    # -- reading -------------------------------------------------------------------------------------------------

    @contextmanager
    def lent(self, segment: Segment) -> Iterator[torch.Tensor]:
        """Lend the gradient of ``segment`` for reading; a stored one is swapped in for as long, and stays stored.

        Where changes are pending, the caller gets a copy with the changes, within the budget. Blocks.
        """
        if self.state is GradientState.OWN:
            gradient = segment.parameter.grad
            assert gradient is not None
            yield gradient.detach()
            return
        if self.state is GradientState.LEASED:
            yield segment.gradient_view(self.open())
            return
        self.model.read_ahead(self.unit)
        source = self.sources.get(segment)
        stored = segment.gradient_view(self.model.lend(self.unit).tensor)
        if source is None or not source.pending or not stored.numel():
            yield stored
            return
        with self.unit.tier.scratch(stored.nbytes) as flat:
            copy = flat.view(stored.dtype).as_strided(stored.shape, stored.stride()).copy_(stored)
            del flat, stored  # lifetime: only the caller refers to the copy
            for change in source.pending:
                change(copy)
            yield copy
            del copy

    def answer(self, segment: Segment, question: Hashable | None, compute: Compute) -> torch.Tensor:
        """Return ``compute(the gradient of segment)``."""
        source = self.sources.get(segment)
        if self.state in (GradientState.STORED, GradientState.SHARED) and source is not None:
            return source.answer(question, compute)
        return self.ask(segment, compute)

    def ask(self, segment: Segment, compute: Compute) -> torch.Tensor:
        """Return ``compute(the gradient of segment)``, of the values themselves."""
        with self.lent(segment) as values:
            try:
                return compute(values)
            finally:
                del values  # lifetime: the bytes are lent

    def change(self, segment: Segment, source: UsedGradient, change: Change) -> None:
        """Apply ``change`` to the gradient of ``segment``, or have it pending in its ``source``."""
        if self.factors:
            raise UsageError(f"parameter {segment.name}: its gradient changed in place {BETWEEN_CLIP_AND_STEP}")
        if self.state is GradientState.LEASED:
            change(segment.gradient_view(self.open()))
        else:
            source.pending.append(change)

    # -- the caller's own changes --------------------------------------------------------------------------------

    def reconcile(self) -> None:
        """Take note of the caller's own changes to ``.grad``: another tensor is taken over, None drops the gradient.

        Raises UsageError where gradients were clipped and then written in place.
        """
        with self.working_set.mark, without_dispatch():
            self._note_changes()
            if self._is_changed:
                raise UsageError(
                    f"unit {self.unit.name!r}: gradients written in place {BETWEEN_CLIP_AND_STEP}, or a new tensor as"
                    " .grad, which is taken as it is"
                )
            for segment, gradient in self.changed_by_hand():
                if self.state is GradientState.SHARED:
                    raise UsageError(
                        f"parameter {segment.name}: a gradient put into .grad by hand, in place of the ranks' sum;"
                        " expected .grad as the backward left it, or changes in a hook, before the backward ends"
                    )
                self.factors.pop(segment, None)
                self._move_in(segment, gradient)
            self.note_clipped()

    def changed_by_hand(self) -> list[tuple[Segment, torch.Tensor]]:
        """Drop the gradients that the caller has dropped; return the tensors that the caller has put into ``.grad``.

        None of them lies in the buffer: one gradient may have been put in the place of another.
        """
        changed: list[tuple[Segment, torch.Tensor]] = []
        places = range(0)
        if self.state is GradientState.LEASED and self.buffer is not None:
            start = self.buffer.tensor.data_ptr()
            places = range(start, start + self.buffer.tensor.numel())
        with without_dispatch():
            for segment in self.unit.segments:
                gradient = segment.parameter.grad
                if gradient is None:
                    segment.has_gradient = False
                    self.factors.pop(segment, None)
                    self.sources.pop(segment, None)
                    if self.shard is not None and self.state is GradientState.SHARED:
                        self.shard.segments.pop(segment, None)
                elif isinstance(gradient, StandIn):
                    changed += [] if self._is_ours(segment, gradient) else [(segment, gradient)]
                elif not self._is_in_place(segment, gradient):
                    changed.append((segment, gradient.detach().clone() if _address(gradient) in places else gradient))
        return changed

    def _is_ours(self, segment: Segment, gradient: torch.Tensor) -> bool:
        """Return whether ``gradient`` is a stand-in for the gradient that ``segment`` has here."""
        return isinstance(gradient, StandIn) and gradient.source is self.sources.get(segment)

    def _is_in_place(self, segment: Segment, gradient: torch.Tensor) -> bool:
        """Return whether ``gradient`` lies where that of ``segment`` belongs: in the leased buffer, or beside it."""
        if not segment.has_gradient or self.buffer is None:
            return False
        if self.state is GradientState.OWN:
            return _can_be_own(segment, gradient)
        place = self.buffer.tensor.data_ptr() + segment.grad_offset
        return self.state is GradientState.LEASED and _address(gradient) == place

    def note_clipped(self) -> None:
        """The factors are for the gradients as they are now."""
        self._clipped.clear()
        is_own = self.state is GradientState.OWN
        with without_dispatch():
            for segment in self.factors:
                gradient = segment.parameter.grad
                if gradient is not None and not isinstance(gradient, StandIn):
                    kept = gradient.detach() if is_own else None  # lifetime: a view would keep the lease
                    self._clipped[segment] = kept, _address(gradient), gradient._version

    def _note_changes(self) -> None:
        """Drop the factors of gradients that were replaced since the clipping; note others written in place."""
        if self.state in (GradientState.STORED, GradientState.SHARED):
            return
        with without_dispatch():
            for segment in list(self.factors):
                _, address, version = self._clipped.get(segment, (None, -1, 0))
                gradient = segment.parameter.grad
                if gradient is None or _address(gradient) != address or address < 0:
                    del self.factors[segment]
                else:
                    self._is_changed |= gradient._version != version

    # -- to NVMe, to an update, to the end -----------------------------------------------------------------------

    def store_away(self) -> bool:
        """Give the buffer to the working set and leave stand-ins; return whether there was anything to give."""
        if self.state is not GradientState.LEASED:
            return False
        with without_dispatch():
            self._note_changes()
            for segment, gradient in self.changed_by_hand():
                if segment.has_gradient and not isinstance(gradient, StandIn):  # others have no bytes of ours
                    self.factors.pop(segment, None)
                    self._move_in(segment, gradient)
            buffer, self.buffer = self._leased(), None
            for segment in self.unit.segments:
                if segment.has_gradient and not isinstance(segment.parameter.grad, StandIn):
                    source = self.sources.setdefault(segment, StoredGradient(segment))
                    segment.parameter.grad = source.stand_in()
                    source.answers = self.model.answers(segment.gradient_view(buffer.tensor))
        self.state = GradientState.STORED
        self._clipped.clear()
        self.model.closed(self.unit)
        self.model.storing(self.unit)  # order: or a copy that has ended offers the bytes to be written
        try:
            buffer.store()
        except BaseException as error:
            if buffer.lease is None:  # DRAM does not have them
                self.unit.engine.phase.give_up(f"the gradients of unit {self.unit.name!r} could not be stored: {error}")
            buffer.release()
            raise
        return True

    def take(self, *, used: bool) -> TakenGradients:
        """Hand the gradients over to an update; ``used``: in a backward. There are none here afterwards."""
        assert self.are_any
        self.model.end_lent()
        if self.shard is not None:
            self.buffer = self.shard.take()
        is_own = self.state is GradientState.OWN
        kept = None if is_own else self.model.keep(self.unit)
        with without_dispatch():
            found = [(s, s.parameter.grad) for s in self.unit.segments if s.has_gradient and is_own]
            own = {s: gradient.detach().as_strided((s.numel,), (1,)) for s, gradient in found if gradient is not None}
        self.taken = taken = TakenGradients(
            self.unit, self.model.place, factors=self.factors, own=own if is_own else None, kept=kept,
            pending={s: source.take_pending() for s, source in self.sources.items() if s.has_gradient},
            lease=None if is_own or self.buffer is None else self.buffer.lease,
        )  # fmt: skip
        if self.state in (GradientState.LEASED, GradientState.SHARED):
            self.model.closed(self.unit)
            self.buffer = None
        self._forget(GradientState.USED if used else GradientState.TAKEN)
        if kept is not None:
            kept.hand_over()
            self.model.rooms.filled.add(self.key)  # of the schedule's: no DRAM is due for it
        return taken

    def drop(self, *, used: bool = False) -> None:
        """Forget the gradients; bytes a caller still sees live as long as its view.

        ``.grad`` of each becomes None, or with ``used`` a stand-in that says so.
        """
        self.model.end_lent()
        before, is_over = self.state, self.taken is None or self.taken.is_over
        none = GradientState.NONE if is_over else GradientState.TAKEN
        self._forget(GradientState.USED if used else none)  # order: views of the buffer die before its lease
        if before is GradientState.LEASED and self.buffer is not None:
            buffer, self.buffer = self.buffer, None
            self.model.closed(self.unit)
            buffer.discard()
        elif before is GradientState.STORED:
            self.unit.tier.drop_bytes(self.key)
        if self.shard is not None:
            self.shard.drop()

    def _forget(self, state: GradientState) -> None:
        """There are no gradients here any more; ``.grad`` of each parameter is what ``state`` says."""
        is_used = state is GradientState.USED
        self.sources = {s: UsedGradient(s) for s in self.unit.segments if is_used and s.has_gradient}
        with without_dispatch():
            for segment in self.unit.segments:
                parameter, source = segment.parameter, self.sources.get(segment)
                if source is not None:
                    parameter.grad = source.stand_in()
                elif not is_used or isinstance(parameter.grad, StandIn):
                    parameter.grad = None
                segment.has_gradient = False
        self.factors.clear()
        self._clipped.clear()
        self._is_changed = False
        self.model.rooms.filled.discard(self.key)
        self.state = state

    def zero(self) -> None:
        """Fill the gradients with zeros and keep them (``zero_grad(set_to_none=False)``)."""
        self.factors.clear()
        self._is_changed = False
        self.reconcile()
        if self.state is GradientState.SHARED and self.shard is not None:
            return self.shard.zero()
        with torch.no_grad():
            for segment in self.unit.segments if self.are_any else ():
                if segment.parameter.grad is not None:
                    segment.parameter.grad.zero_()  # of a stand-in: as the gradient is read

    def check_used(self) -> None:
        """Raise UsageError where the caller has put or dropped a gradient that the backward has used."""
        with without_dispatch():
            dropped = next((segment for segment in self.sources if segment.parameter.grad is None), None)
        if dropped is not None:
            raise UsageError(
                f"parameter {dropped.name}: .grad dropped between backward and optimizer.step() under"
                ' update="backward", which has used it: the step cannot be skipped any more; expected step() once more,'
                ' or tiered.AdamW(..., update="step")'
            )
        for segment, _ in self.changed_by_hand():
            raise UsageError(
                f'parameter {segment.name}: a gradient put into .grad by hand under update="backward", where gradients'
                ' are used up as they become final; expected tiered.AdamW(..., update="step")'
            )

    def show_used(self) -> None:
        """Let each ``.grad`` say again that the backward has used it; the caller's own tensors there go."""
        with without_dispatch():
            for segment in self.unit.segments:
                source = self.sources.get(segment)
                segment.parameter.grad = None if source is None else source.stand_in()


def _address(gradient: torch.Tensor) -> int:
    """Return where the values of ``gradient`` begin in memory; -1 where they are no strided ones in memory."""
    return -1 if isinstance(gradient, StandIn) or gradient.layout is not torch.strided else gradient.data_ptr()


def _can_be_own(segment: Segment, gradient: torch.Tensor) -> bool:
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

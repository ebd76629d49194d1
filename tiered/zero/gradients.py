"""The gradients of a unit: one flat buffer, a scratch key of the store, shown as the parameters' ``.grad``.

Gradients stay in DRAM while the budget allows; under pressure they go to NVMe and ``.grad`` becomes a guard. Clipping
by global norm lives here because it must see them all, streamed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import nn

from tiered.errors import UsageError
from tiered.store.working_set import Lease, WorkingSet
from tiered.units import round_up
from tiered.zero.parameter import (
    GuardedGradient,
    TieredParameter,
    UsedGradient,
    guarded_gradient,
    without_dispatch,
)

if TYPE_CHECKING:
    from tiered.zero.unit import Segment, Unit

__all__ = ["TakenGradients", "UnitGradients", "check_unused", "clip_grad_norm_"]


class TakenGradients:
    """The gradients of one unit that an update has taken over, with their clip factors. One owner at a time.

    Segments lie at ``offsets`` of the bytes of ``key``, a scratch key that ``delete`` ends.
    """

    __slots__ = ("_working_set", "factors", "key", "lease", "nbytes", "offsets")

    def __init__(
        self,
        working_set: WorkingSet,
        key: str,
        lease: Lease | None,
        nbytes: int,
        offsets: dict[Segment, int],
        factors: dict[Segment, torch.Tensor],
    ) -> None:
        self._working_set = working_set
        self.key = key
        self.lease = lease
        self.nbytes = nbytes
        self.offsets = offsets
        self.factors = factors

    def open(self) -> None:
        """Lease the bytes; what is stored is swapped in. Blocks."""
        if self.lease is None:
            self.lease = self._working_set.lease(self.key, "r")

    def flat(self, segment: Segment) -> torch.Tensor:
        """Return the (numel,) gradient of ``segment`` in memory order; the bytes must be leased."""
        assert self.lease is not None
        return segment.flat(self.lease.tensor, self.offsets[segment])

    def store_away(self) -> bool:
        """Give the bytes back to the working set, for now; return whether they were leased."""
        lease, self.lease = self.lease, None
        if lease is not None:
            lease.release()
            self._working_set.swap_out([self.key])
        return lease is not None

    def delete(self) -> str:
        """Forget the gradients; return the key when a caller still sees its bytes and it must be deleted later."""
        lease, self.lease = self.lease, None
        if lease is None:
            self._working_set.delete([self.key])
        elif not self._working_set.discard(lease):  # order: released first, they would be written for nothing
            return self.key
        return ""


class UnitGradients:
    """The gradients of one unit in one buffer, in the parameters' dtypes, each segment on 64 bytes.

    Invariant: ``.grad`` of a parameter with a gradient is a view of the leased buffer, or a guard when the bytes are
    the working set's. ``factors`` are the clip factors that the next update multiplies with, in fp32.

    ``room`` is the name under which the schedule knows that the buffer will be leased.
    """

    __slots__ = ("_num_leases", "factors", "key", "lease", "nbytes", "room", "unit", "working_set")

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.working_set = unit.working_set
        self.lease: Lease | None = None
        self.key = ""  # "": there are no gradients
        self.room = f"model/gradient/{unit.name}"
        self.nbytes = self.lay_out()
        self.factors: dict[Segment, torch.Tensor] = {}
        self._num_leases = 0

    def lay_out(self) -> int:
        """Place the trainable segments; return the bytes their gradients take."""
        offset = 0
        for segment in self.unit.trainable_segments():
            segment.grad_offset = offset
            offset = round_up(offset + segment.nbytes, 64)
        return offset

    def open(self) -> torch.Tensor:
        """Lease the buffer and return it: (nbytes,) uint8; what is stored is swapped in and shown as ``.grad``."""
        if self.lease is not None:
            return self.lease.tensor
        if self.key:
            self.lease = self.working_set.lease(self.key, "rw")
        else:
            self.nbytes = self.lay_out()
            self._num_leases += 1
            key = f"model/gradient/{self.unit.name}/{self._num_leases}"
            self.working_set.create(key, self.nbytes, scratch=True)
            self.lease = self.working_set.lease(key, "w")
            self.key = key
        self.unit.engine.residency.gradients_opened(self)
        with without_dispatch():
            for segment in self.unit.segments:
                if segment.has_gradient:
                    segment.parameter.grad = segment.view(self.lease.tensor, segment.grad_offset)
        return self.lease.tensor

    def recall(self) -> None:
        """Before autograd adds to a gradient: bring back what is stored, refuse what is clipped already."""
        if self.factors:
            raise UsageError(
                f"unit {self.unit.name!r}: backward after tiered.clip_grad_norm_ and before optimizer.step(); expected"
                " all micro-steps first, then the clipping, then the step"
            )
        if self.key and self.lease is None:
            self.open()

    def adopt(self, segment: Segment) -> None:
        """Take over what autograd has accumulated in ``.grad``: move it into the buffer unless it is there."""
        with without_dispatch():
            gradient = segment.parameter.grad
            assert gradient is not None
            if gradient.layout is not torch.strided:
                raise UsageError(
                    f"parameter {segment.name}: a {gradient.layout} gradient; expected a dense one:"
                    " build the embedding with sparse=False"
                )
            view = segment.view(self.open(), segment.grad_offset)
            if gradient.data_ptr() != view.data_ptr():
                view.copy_(gradient.detach())
                segment.parameter.grad = view
        segment.has_gradient = True

    def reconcile(self) -> None:
        """Take note of what the caller did to ``.grad`` by hand: another tensor is taken over, None drops it."""
        with without_dispatch():
            for segment in self.unit.segments:
                gradient = segment.parameter.grad
                if gradient is None:
                    segment.has_gradient = False
                elif not isinstance(gradient, GuardedGradient):
                    self.adopt(segment)

    def store_away(self) -> bool:
        """Give the buffer back to the working set and leave guards; return whether there was anything to give."""
        if self.lease is None:
            return False
        with without_dispatch():
            for segment in self.unit.segments:
                if segment.has_gradient:
                    segment.parameter.grad = guarded_gradient(segment.shape, segment.dtype)
        lease, self.lease = self.lease, None
        self.unit.engine.residency.gradients_closed(self)
        lease.release()
        self.working_set.swap_out([self.key])
        return True

    def take(self, *, used: bool) -> TakenGradients:
        """Hand the gradients over to an update; there are none here afterwards (see ``drop`` for ``.grad``)."""
        assert self.key
        offsets = {segment: segment.grad_offset for segment in self.unit.segments if segment.has_gradient}
        taken = TakenGradients(self.working_set, self.key, self.lease, self.nbytes, offsets, dict(self.factors))
        if self.lease is not None:
            self.unit.engine.residency.gradients_closed(self)
        self.key, self.lease = "", None
        self.drop(used=used)
        return taken

    def drop(self, *, used: bool = False) -> None:
        """Forget the gradients; bytes a caller still sees live as long as its view.

        ``.grad`` of each becomes None, or with ``used`` a guard that says so.
        """
        with without_dispatch():
            for segment in self.unit.segments:
                parameter = segment.parameter
                if used and segment.has_gradient:
                    parameter.grad = guarded_gradient(segment.shape, segment.dtype, UsedGradient)
                elif segment.has_gradient or isinstance(parameter.grad, GuardedGradient):
                    parameter.grad = None
                segment.has_gradient = False
        self.factors.clear()
        lease, self.lease = self.lease, None
        if lease is not None:
            self.unit.engine.residency.gradients_closed(self)
        if self.key:
            self.unit.engine.residency.discard(self.key, lease)
        self.key = ""

    def zero(self) -> None:
        """Fill the gradients with zeros and keep them (``zero_grad(set_to_none=False)``)."""
        if self.key:
            self.open().zero_()
        self.factors.clear()


def clip_grad_norm_(
    model: nn.Module | Iterable[torch.Tensor],
    max_norm: float,
    *,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Clip the global norm of the gradients of ``model``'s parameters; return it as a fp32 scalar.

    The bits are those of ``torch.nn.utils.clip_grad_norm_`` over the fp32 gradients in the order of
    ``model.parameters()``: a norm per whole parameter, then the norm of the norms, then
    ``max_norm / (norm + 1e-6)`` clamped to 1. The factor is applied in fp32 by the next ``optimizer.step()``; the
    gradients themselves are left as they are. Streams gradients that are on NVMe. Blocks. Raises RuntimeError for a
    non-finite norm when ``error_if_nonfinite``, UsageError under ``update="backward"``.
    """
    tensors = list(model.parameters()) if isinstance(model, nn.Module) else list(model)
    norms: list[torch.Tensor] = []
    clipped: list[torch.Tensor] = []
    with torch.no_grad(), without_dispatch():
        for unit in {tensor.segment.unit: None for tensor in tensors if isinstance(tensor, TieredParameter)}:
            check_unused(unit, "tiered.clip_grad_norm_")
            unit.gradients.reconcile()
        for tensor in tensors:
            if tensor.grad is None:
                continue
            clipped.append(tensor)
            norms.append(_norm(tensor, float(norm_type)))
        if not norms:
            return torch.tensor(0.0)
        total = _vector_norm(torch.stack(norms), float(norm_type))
        if error_if_nonfinite and not math.isfinite(total.item()):
            raise RuntimeError(f"the total norm of order {norm_type} of the gradients is {total.item()}: not clipped")
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for tensor in clipped:
            _scale(tensor, factor)
    return total


def check_unused(unit: Unit, what: str) -> None:
    """Raise UsageError where the optimizer uses gradients as they come, before ``what`` could see them."""
    updater = unit.engine.updater
    if updater is not None and updater.in_backward:
        raise UsageError(
            f'{what} under update="backward", where gradients are used up as they become final; expected'
            ' tiered.AdamW(..., update="step")'
        )


def _norm(tensor: torch.Tensor, norm_type: float) -> torch.Tensor:
    """Return the fp32 norm of one parameter's gradient."""
    if not isinstance(tensor, TieredParameter):
        assert tensor.grad is not None
        return _vector_norm(tensor.grad, norm_type)
    segment = tensor.segment
    gradients = segment.unit.gradients
    view = segment.view(gradients.open(), segment.grad_offset)
    factor = gradients.factors.get(segment)
    if factor is not None:
        return _vector_norm(view.to(_accumulator(view.dtype)) * factor, norm_type)
    return _vector_norm(view, norm_type)


def _vector_norm(tensor: torch.Tensor, norm_type: float) -> torch.Tensor:
    norm: torch.Tensor = torch.linalg.vector_norm(tensor, norm_type, dtype=_accumulator(tensor.dtype))
    return norm


def _scale(tensor: torch.Tensor, factor: torch.Tensor) -> None:
    if not isinstance(tensor, TieredParameter):
        assert tensor.grad is not None and not isinstance(tensor.grad, GuardedGradient)
        tensor.grad.mul_(factor.to(tensor.grad.dtype))
        return
    factors = tensor.segment.unit.gradients.factors
    old = factors.get(tensor.segment)
    factors[tensor.segment] = factor if old is None else old * factor


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32

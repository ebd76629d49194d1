"""Clipping by the global norm of gradients, in DRAM or on NVMe, read one unit after the other; and GradScaler."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler as TorchGradScaler
from torch.utils._foreach_utils import _device_has_foreach_support

from tiered.errors import UsageError
from tiered.zero.compute_device import accelerator_type
from tiered.zero.parameters.parameter import TieredParameter, without_dispatch
from tiered.zero.parameters.unit import Unit

__all__ = ["GradScaler", "clip_grad_norm_"]


def clip_grad_norm_(
    model: nn.Module | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Clip the global norm of the gradients of ``model``'s parameters, or of those given; return it as a fp32 scalar.

    The bits are those of ``torch.nn.utils.clip_grad_norm_`` over the fp32 gradients in the order of
    ``model.parameters()``: a norm per whole parameter, then the norm of the norms, then
    ``max_norm / (norm + 1e-6)`` clamped to 1. The factor is applied in fp32 by the next ``optimizer.step()``, and the
    gradients of sharded parameters are left as they are; those of other tensors are scaled in place. A gradient that is
    clipped twice is multiplied with the product of both factors. A sparse gradient is coalesced. Streams gradients that
    are on NVMe; ``foreach`` is torch's, and chooses the norm alone. Blocks. Raises RuntimeError for a non-finite norm
    when ``error_if_nonfinite``, UsageError under ``update="backward"``.
    Where fp64 gradients are among others, torch adds the norms up in an order of its own: last bits may differ.
    """
    if isinstance(model, torch.Tensor):
        model = [model]
    tensors = list(model.parameters()) if isinstance(model, nn.Module) else list(model)
    with torch.no_grad(), without_dispatch():
        for unit in {tensor.segment.unit: None for tensor in tensors if isinstance(tensor, TieredParameter)}:
            unit.engine.phase.check_unused("tiered.clip_grad_norm_")
            unit.gradients.reconcile()
        clipped = [tensor for tensor in tensors if tensor.grad is not None]
        norms = list(_norms(clipped, float(norm_type), foreach is not False))
        if not norms:
            return torch.tensor(0.0, dtype=torch.float32, device="cpu")
        total: torch.Tensor = torch.linalg.vector_norm(
            torch.stack([norm.to(norms[0].device) for norm in norms]), float(norm_type)
        )
        if error_if_nonfinite and not math.isfinite(total.item()):
            raise RuntimeError(f"the total norm of order {norm_type} of the gradients is {total.item()}: not clipped")
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for tensor in clipped:
            _scale(tensor, factor)
            if isinstance(tensor, TieredParameter):
                tensor.segment.unit.gradients.note_clipped()
    return total


def _norms(tensors: Sequence[torch.Tensor], norm_type: float, foreach: bool) -> Iterator[torch.Tensor]:
    """Yield the fp32 norm of each parameter's gradient."""
    for tensor in tensors:
        if not isinstance(tensor, TieredParameter):
            assert tensor.grad is not None
            if tensor.grad.is_sparse:  # the norm is that of the sums
                tensor.grad = tensor.grad.coalesce()
            yield _norm(_values(tensor.grad), norm_type=norm_type, foreach=foreach)
            continue
        gradients = tensor.segment.unit.gradients
        factor = gradients.factors.get(tensor.segment)
        norm = functools.partial(_norm, norm_type=norm_type, foreach=foreach, factor=factor)
        yield gradients.answer(tensor.segment, ("clip", norm_type, foreach) if factor is None else None, norm)


def _norm(values: torch.Tensor, *, norm_type: float, foreach: bool, factor: torch.Tensor | None = None) -> torch.Tensor:
    """Return the norm of ``values`` times ``factor``, () fp32, by the operator that torch's own clipping takes there.

    Its two operators add in different orders on a GPU. That of lists casts each number before it is added, and gives a
    tensor the same norm alone as among others.
    """
    dtype = _accumulator(values.dtype)
    if factor is not None:
        values = values.to(dtype) * factor
    if foreach and _device_has_foreach_support(values.device):
        return torch._foreach_norm([values], norm_type, dtype=dtype)[0]
    norm: torch.Tensor = torch.linalg.vector_norm(values.to(dtype), norm_type)
    return norm


def _scale(tensor: torch.Tensor, factor: torch.Tensor) -> None:
    factor = factor.to(tensor.device)
    if not isinstance(tensor, TieredParameter):
        assert tensor.grad is not None
        _values(tensor.grad).mul_(factor.to(tensor.grad.dtype))
        return
    factors = tensor.segment.unit.gradients.factors
    old = factors.get(tensor.segment)
    factors[tensor.segment] = factor if old is None else old * factor


def _values(gradient: torch.Tensor) -> torch.Tensor:
    """Return the numbers of a gradient: of a sparse one, which is coalesced, those that are there."""
    return gradient._values() if gradient.is_sparse else gradient


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


# -- grad scaler -------------------------------------------------------------------------------------------------------


_Found = dict[torch.device, torch.Tensor]
"""By device: () fp32, not 0 where a gradient has an inf or NaN."""


class GradScaler(TorchGradScaler):
    """``torch.amp.GradScaler`` that knows when it comes too late; for sharded and plain parameters alike.

    ``scale``, ``unscale_``, ``step``, ``update`` and ``state_dict`` are torch's, and so are the bits; a step whose
    gradients are not finite is skipped. Clip after ``unscale_``. ``store.register("scaler", scaler)`` makes it part of
    each commit. ``device`` is that of the losses; "auto" is the accelerator, if there is one. Not thread-safe.
    ``unscale_`` and ``step`` block while gradients stream, and raise UsageError under ``update="backward"`` and after
    clipping.
    """

    def __init__(
        self,
        device: str = "auto",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        if device == "auto":
            device = accelerator_type() or "cpu"
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back a ``state_dict``; a step under way is forgotten, as by a rollback."""
        super().load_state_dict(state_dict)
        if self.is_enabled():
            self._per_optimizer_states.clear()

    def _unscale_grads_(
        self, optimizer: Any, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> _Found:
        """Refuse a call that comes too late, then do as torch does (its own hook)."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for unit in {p.segment.unit: None for p in parameters if isinstance(p, TieredParameter)}:
            _check(unit)  # order: a refusal changes nothing
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)


def _check(unit: Unit) -> None:
    unit.engine.phase.check_unused("tiered.GradScaler")
    if unit.gradients.factors:
        raise UsageError(
            f"unit {unit.name!r}: scaler.unscale_ or scaler.step after tiered.clip_grad_norm_, which clipped scaled"
            " gradients; expected scaler.unscale_(optimizer) first, then the clipping, then scaler.step(optimizer)"
        )

"""GradScaler: torch's loss scaling, which refuses a call that comes too late for a sharded model's gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler as TorchGradScaler

from tiered.errors import UsageError
from tiered.zero.accelerator_state import accelerator_type
from tiered.zero.parameters.parameter import TieredParameter
from tiered.zero.parameters.unit import Unit

__all__ = ["GradScaler"]

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
    unit.engine.check_unused("tiered.GradScaler")
    if unit.gradients.factors:
        raise UsageError(
            f"unit {unit.name!r}: scaler.unscale_ or scaler.step after tiered.clip_grad_norm_, which clipped scaled"
            " gradients; expected scaler.unscale_(optimizer) first, then the clipping, then scaler.step(optimizer)"
        )

"""GradScaler: torch's loss scaling over gradients that may be on NVMe; only the way to the gradients is ours."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler as TorchGradScaler

from tiered.errors import UsageError
from tiered.zero.gradients.clipping import check_unused
from tiered.zero.parameters.parameter import TieredParameter, without_dispatch
from tiered.zero.parameters.unit import Segment, Unit

__all__ = ["GradScaler"]

_Found = dict[torch.device, torch.Tensor]
"""By device: () fp32, not 0 where a gradient has an inf or NaN."""


class GradScaler(TorchGradScaler):
    """``torch.amp.GradScaler`` for sharded and plain parameters alike, a unit's gradients at a time.

    ``scale``, ``unscale_``, ``step``, ``update`` and ``state_dict`` are torch's, and so are the bits; a step whose
    gradients are not finite is skipped. Clip after ``unscale_``. ``store.register("scaler", scaler)`` makes it part of
    each commit. ``device`` is that of the losses: "auto", "cpu" or "cuda". Not thread-safe. ``unscale_`` and ``step``
    block while gradients stream, and raise UsageError under ``update="backward"`` and after clipping.
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
            device = "cuda" if torch.cuda.is_available() else "cpu"
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what ``state_dict`` returned; a step under way is forgotten, as by a rollback."""
        super().load_state_dict(state_dict)
        if self.is_enabled():
            self._per_optimizer_states.clear()

    def _unscale_grads_(
        self, optimizer: Any, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> _Found:
        """Multiply the gradients by ``inv_scale`` in place and return where one is not finite (torch's own hook)."""
        units: dict[Unit, list[Segment]] = {}
        plain: list[torch.Tensor] = []
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if isinstance(parameter, TieredParameter):
                units.setdefault(parameter.segment.unit, []).append(parameter.segment)
            else:
                plain.append(parameter)
        for unit in units:
            _check(unit)

        def unscale(parameters: Iterable[torch.Tensor]) -> _Found:
            holder: Any = SimpleNamespace(param_groups=[{"params": parameters}])
            return super(GradScaler, self)._unscale_grads_(holder, inv_scale, found_inf, allow_fp16)

        found = unscale(plain)
        with torch.no_grad(), without_dispatch():
            for unit, segments in units.items():
                for device, value in unscale(_stand_ins(unit, segments)).items():
                    found[device] = torch.maximum(found[device], value) if device in found else value
        return found


def _check(unit: Unit) -> None:
    check_unused(unit, "tiered.GradScaler")
    if unit.gradients.factors:
        raise UsageError(
            f"unit {unit.name!r}: scaler.unscale_ or scaler.step after tiered.clip_grad_norm_, which clipped scaled"
            " gradients; expected scaler.unscale_(optimizer) first, then the clipping, then scaler.step(optimizer)"
        )
    unit.gradients.reconcile()


def _stand_ins(unit: Unit, segments: Iterable[Segment]) -> list[torch.Tensor]:
    """Return, for each parameter with a gradient, a tensor whose ``.grad`` is that gradient, in the unit's buffer."""
    stand_ins = []
    for segment in segments:
        if segment.has_gradient:
            view = segment.view(unit.gradients.open(), segment.grad_offset)
            stand_in = view.detach()
            stand_in.grad = view
            stand_ins.append(stand_in)
    return stand_ins

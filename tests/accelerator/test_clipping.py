"""Clipping on a device: the operators that torch's own clipping takes there, whose bits differ from each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiered
from tests.accelerator.training import DEVICE, ROOMY_NBYTES

Clip = Callable[..., Tensor]


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 300), nn.Tanh(), nn.Linear(300, 96)).to(DEVICE)


def clipped(parameters: Sequence[Tensor], clip: Clip, foreach: bool | None) -> list[Tensor]:
    """Clip twice, by two orders; return the norms."""
    return [clip(parameters, 0.5, 2.0, foreach=foreach), clip(parameters, 0.1, 1.0, foreach=foreach)]


@pytest.mark.parametrize("is_stored", [True, False])
@pytest.mark.parametrize("is_ours", [True, False])
@pytest.mark.parametrize("foreach", [None, False])
def test_a_norm_is_torchs_wherever_the_gradient_is(
    foreach: bool | None, is_ours: bool, is_stored: bool, accelerator: Any, tmp_path: Path
) -> None:
    rows = torch.randn(16, 96, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    plain = build()
    plain(rows).square().sum().backward()
    expected = clipped(list(plain.parameters()), nn.utils.clip_grad_norm_, foreach)
    with tiered.Store(tmp_path, dram=ROOMY_NBYTES, device_memory=ROOMY_NBYTES, durable=False) as store:
        model = tiered.shard(build(), store, device=DEVICE)
        optimizer = tiered.AdamW(model.parameters())
        model(rows).square().sum().backward()
        parameters = list(model.parameters())
        for unit in {parameter.segment.unit for parameter in parameters} if is_stored else ():  # type: ignore[attr-defined]
            unit.gradients.open()
            assert unit.gradients.store_away()
        clip = tiered.clip_grad_norm_ if is_ours else nn.utils.clip_grad_norm_
        found = clipped(parameters, clip, foreach)
        optimizer.step()
    assert all(map(torch.equal, found, expected)), (found, expected)


def test_parameters_in_memory_are_clipped_with_those_of_the_device(accelerator: Any, tmp_path: Path) -> None:
    here = nn.Parameter(torch.ones(3))
    with tiered.Store(tmp_path, dram=ROOMY_NBYTES, device_memory=ROOMY_NBYTES, durable=False) as store:
        model = tiered.shard(build(), store, device=DEVICE)
        optimizer = tiered.AdamW(model.parameters(), lr=0.0)
        (model(torch.ones(1, 96, device=DEVICE)).sum() + here.sum().to(DEVICE)).backward()
        for parameters in ([here, *model.parameters()], [*model.parameters(), here]):
            norm = tiered.clip_grad_norm_(parameters, 1e-3)
        assert here.grad is not None and norm.item() == pytest.approx(1e-3, rel=1e-3)
        optimizer.step()

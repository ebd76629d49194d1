"""The caller's own streams, and operations that no module makes: what was made there is used in order."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiered
from tests.accelerator.training import DEVICE, ROOMY_NBYTES
from tiered.tiers.device_memory import DeviceMemory, on_stream

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

WIDTH = 24


class Scaled(torch.autograd.Function):
    """A product with a weight that the function saves, and saves again transposed."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight, weight.t())
        return rows @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        rows, weight, transposed = ctx.saved_tensors
        assert torch.equal(weight.t(), transposed)
        return gradient @ transposed, rows.t() @ gradient


class Block(nn.Module):
    """A layer by ``Scaled``, and one that runs on a stream of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.side = nn.Linear(WIDTH, WIDTH)

    def forward(self, rows: Tensor) -> Tensor:
        here, side = torch.accelerator.current_stream(), torch.Stream(device=DEVICE)
        side.wait_stream(here)
        with on_stream(side):
            aside = self.side(rows).tanh()
        rows.record_stream(side)
        made = Scaled.apply(rows, self.weight)
        here.wait_stream(side)
        aside.record_stream(here)
        return rows + made + aside


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, rows: Tensor) -> Tensor:
        for block in self.blocks:
            rows = block(rows)
        return rows.square().mean()


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Train three steps, each in a stream of its own."""
    losses, here = [], torch.accelerator.current_stream()
    for step in range(3):
        rows = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(step)).to(DEVICE)
        own = torch.Stream(device=DEVICE)
        own.wait_stream(here)
        with on_stream(own):
            loss = model(rows)
            loss.backward()
            if type(optimizer) is torch.optim.AdamW:  # gradients of its own, some of them of the side streams
                for parameter in model.parameters():
                    parameter.grad.record_stream(own)  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
        here.wait_stream(own)
        losses.append(loss.detach())
        rows.record_stream(own)
    return losses, {name: value.cpu().clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("update", ["step", "backward"])
def test_bits_on_the_callers_own_streams(update: str, accelerator: Any, tmp_path: Path) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        with torch.device(DEVICE):
            return Blocks()

    model = build()
    losses, state = train(model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True))
    del model
    assert accelerator.races() == []
    accelerator.reset()
    with tiered.Store(tmp_path, dram=ROOMY_NBYTES, device_memory=ROOMY_NBYTES) as store:
        model = tiered.shard(build(), store, device=DEVICE, hold=0)
        ours, values = train(model, tiered.AdamW(model.parameters(), lr=1e-2, update=update))
    assert all(map(torch.equal, ours, losses))
    assert all(torch.equal(values[name], state[name]) for name in state)


@pytest.mark.parametrize("is_at_home", [True, False])
def test_a_buffer_is_used_again_after_the_tensors_that_outlived_it(is_at_home: bool, sim: ModuleType) -> None:
    filling, here, side = (torch.Stream(device="sim") for _ in range(3))
    memory = DeviceMemory(torch.device("sim:0"), 4096, filling, lambda _: 0)
    buffer = memory.take(4096)
    assert buffer is not None
    buffer.use(here)
    tensor = buffer.tensor[:512]
    memory.give(buffer)
    assert memory.take(4096) is None, "a tensor lies there"
    with on_stream(here if is_at_home else side):
        if not is_at_home:
            side.wait_stream(here)
            tensor.record_stream(side)
        tensor.square()
    address = tensor.data_ptr()
    del tensor, buffer
    buffer = memory.take(4096)
    assert buffer is not None and buffer.tensor.data_ptr() == address and sim.blocking() == {}
    buffer.begin_filling(filling)
    with on_stream(filling):
        buffer.tensor.zero_()

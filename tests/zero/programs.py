"""What a program of a user is run on: a small net, by plain PyTorch and through tiered, whose bits are compared.

A program is a function of the model, its optimizer and a list to which it adds what it sees.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiered
from tests.zero.training import ROOMY_NBYTES, debug_store

WIDTH = 8
ADAMW: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.05}
UPDATES = ("step", "backward")
WORDS = ("keep", "recompute", "swap")

Program = Callable[[nn.Module, torch.optim.Optimizer, list[Any]], None]

every_update = pytest.mark.parametrize("update", UPDATES)
every_word = pytest.mark.parametrize("word", WORDS)


class Block(nn.Module):
    """A unit of several parameters, so that all but one begin somewhere in the middle of its bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.weight = nn.Parameter(torch.rand(WIDTH))
        self.square = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * self.weight + self.bias + x @ self.square


class Net(nn.Module):
    """Two blocks; methods as users write them beside ``forward``."""

    def __init__(self, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()

    def matrices(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.parameters() if parameter.dim() > 1]

    def groups(self) -> dict[str, Any]:
        return {"decay": self.matrices(), "others": tuple(p for p in self.parameters() if p.dim() < 2)}

    def num_params(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())


def batch(number: int, num_rows: int = 3) -> Tensor:
    return torch.randn(num_rows, WIDTH, generator=torch.Generator().manual_seed(number)).requires_grad_()


def plain_steps(model: nn.Module, optimizer: torch.optim.Optimizer, seen: list[Any]) -> None:
    for number in range(3):
        loss = model(batch(number))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.detach().clone())


def in_memory(build: Callable[[], nn.Module], program: Program) -> list[Any]:
    torch.manual_seed(3)
    model, seen = build(), list[Any]()
    program(model, torch.optim.AdamW(model.parameters(), fused=True, **ADAMW), seen)
    return seen + [value.clone() for value in model.state_dict().values()]


def through_tiered(
    directory: Path, build: Callable[[], nn.Module], program: Program, update: str = "step", word: str = "auto"
) -> list[Any]:
    with debug_store(directory, ROOMY_NBYTES, durable=False) as store:
        torch.manual_seed(3)
        model, seen = tiered.shard(build(), store, activations=word), list[Any]()
        program(model, tiered.AdamW(model.parameters(), update=update, **ADAMW), seen)
        return seen + list(model.state_dict().values())


def assert_same(ours: list[Any], theirs: list[Any]) -> None:
    assert len(ours) == len(theirs)
    assert all(map(torch.equal, ours, theirs))


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()

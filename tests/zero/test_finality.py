"""When a unit's gradients are final under update="backward": a parameter that no forward used is not waited for."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tiered
from tests.zero.training import debug_store
from tiered.zero.gradients.backward import Backward
from tiered.zero.parameters.parameter import TieredParameter
from tiered.zero.parameters.unit import Unit

WIDTH, NUM_BLOCKS = 16, 8


class Block(nn.Module):
    """Half of the parameters are used in each forward; ``rare`` where the caller says so."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(WIDTH, WIDTH)
        self.rare = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, with_rare: bool = False) -> Tensor:
        x = self.used(x).tanh()
        return self.rare(x) if with_rare else x


class Blocks(nn.Module):
    def __init__(self, *, use_reentrant: bool | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(NUM_BLOCKS)])
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor, rare: int = -1) -> Tensor:
        for number, block in enumerate(self.blocks):
            run: Callable[..., Tensor] = block
            if self.use_reentrant is not None:
                x = checkpoint(run, x, with_rare=number == rare, use_reentrant=False) if rare == number else checkpoint(
                    run, x, use_reentrant=self.use_reentrant
                )  # fmt: skip
            else:
                x = run(x, with_rare=number == rare)
        return x.square().sum()


Loss = Callable[[nn.Module, int], Tensor]


def batch(step: int) -> Tensor:
    torch.manual_seed(step)
    return torch.randn(3, WIDTH).requires_grad_()


LOSSES: dict[str, Loss] = {
    "half_unused": lambda model, step: model(batch(step)),
    "another_in_each_step": lambda model, step: model(batch(step), step),
    "used_beside_the_forward": lambda model, step: (
        model(batch(step)) + model.blocks[2].rare.weight.square().sum()  # type: ignore[index,union-attr,operator]
    ),
    "used_before_the_forward": lambda model, step: (
        model.blocks[1].rare(batch(step)).sum() + model(batch(step))  # type: ignore[index,union-attr]
    ),
    "two_forwards": lambda model, step: model(batch(step), 3) + model(batch(step + 100)),
}


def assert_bits(plain: nn.Module, directory: Path, run: Callable[[Any, int], None], num_steps: int) -> None:
    """Train a copy of ``plain`` in a store and ``plain`` in memory, ``run(model, step)`` each step; compare."""
    with debug_store(directory, durable=False) as store:
        model = tiered.shard(copy.deepcopy(plain), store)
        ours = tiered.AdamW(model.parameters(), lr=0.01, update="backward")
        theirs = torch.optim.AdamW(plain.parameters(), lr=0.01, fused=True)
        for step in range(num_steps):
            for trained, optimizer in ((model, ours), (plain, theirs)):
                run(trained, step)
                optimizer.step()
                optimizer.zero_grad()
        for (key, value), expected in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
            assert torch.equal(value, expected), key


@pytest.mark.parametrize("use_reentrant", [None, False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_bits(name: str, use_reentrant: bool | None, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = Blocks(use_reentrant=use_reentrant)
    assert_bits(plain, tmp_path, lambda model, step: LOSSES[name](model, step).backward(), 4)


def test_unused_parameters_delay_no_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each unit is updated while the backward runs, and at most two units have gradients at one time."""
    most, during, is_over = 0, 0, False
    update, ended = Backward._update, Backward._ended

    def count(backward: Backward, unit: Unit) -> None:
        nonlocal most, during
        most = max(most, sum(each.gradients.are_any for each in backward._units))
        during += not is_over
        update(backward, unit)

    def end(backward: Backward) -> None:
        nonlocal is_over
        is_over = True
        ended(backward)

    monkeypatch.setattr(Backward, "_update", count)
    monkeypatch.setattr(Backward, "_ended", end)
    with debug_store(tmp_path, durable=False) as store:
        model = tiered.shard(Blocks(), store)
        optimizer = tiered.AdamW(model.parameters(), update="backward")
        for step in range(2):
            most, during, is_over = 0, 0, False
            LOSSES["half_unused"](model, step).backward()
            optimizer.step()
            assert during >= NUM_BLOCKS - 1 and most <= 2


class Root(nn.Module):
    """Weights of the root before and behind blocks that are recomputed, of which a method has used one before."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.held: Tensor | None = None

    def prepare(self, x: Tensor) -> None:
        self.held = self.first(x)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x) if self.held is None else self.held
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=True)
        self.held = None
        return self.last(h).square().sum()


def prepared(model: Root, step: int) -> None:
    model.prepare(batch(step))
    model(batch(step)).backward()


def two_graphs_live(model: Root, step: int) -> None:
    losses = [model(batch(step)), model(batch(step + 100))]
    with tiered.accumulate(model) if isinstance(model.first.weight, TieredParameter) else nullcontext():
        losses[0].backward()
    losses[1].backward()


def regulariser_first(model: Root, step: int) -> None:
    loss, term = model(batch(step)), model.last.weight.square().sum()
    with tiered.accumulate(model) if isinstance(model.first.weight, TieredParameter) else nullcontext():
        term.backward()
    loss.backward()


@pytest.mark.parametrize("run", [prepared, two_graphs_live, regulariser_first])
def test_counts_of_uses_end_before_graphs_do(run: Callable[[Root, int], None], tmp_path: Path) -> None:
    torch.manual_seed(0)
    assert_bits(Root(), tmp_path, run, 3)

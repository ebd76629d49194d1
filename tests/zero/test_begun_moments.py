"""Moments begin with the first update that uses them, and masters before any update: across commits and state dicts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiered
from tests.zero.training import debug_store

SGD = {"lr": 0.1, "momentum": 0.9, "dampening": 0.25}
MOMENTA = (0.0, 0.0, 0.9, 0.9, 0.0, 0.9)
"""Of the second group, by step; the first group's is 0.9 from the beginning."""


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.param_groups[1]["momentum"] = MOMENTA[number]
    x = torch.randn(2, 5, generator=torch.Generator().manual_seed(number))
    model(x.to(next(model.parameters()).dtype)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def groups(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": list(layer.parameters())} for layer in model]


def layers() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))


def momenta(optimizer: torch.optim.Optimizer) -> dict[int, Tensor]:
    state = optimizer.state_dict()["state"]
    found = {index: each.get("momentum_buffer") for index, each in state.items()}
    return {index: buffer for index, buffer in found.items() if buffer is not None}


def assert_same(found: dict[Any, Tensor], expected: dict[Any, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize("way", ["resume", "rollback", "state_dict"])
def test_momentum_that_is_switched_on_later_begins_as_torchs_does(way: str, tmp_path: Path) -> None:
    """Its first buffer is the gradient, which is not dampened; what has begun is part of a commit and a state dict."""
    plain = layers()
    theirs = torch.optim.SGD(groups(plain), fused=True, **SGD)
    with debug_store(tmp_path) as store:
        model = tiered.shard(layers(), store)
        ours = tiered.SGD(groups(model), **SGD)
        for number in range(6):
            if way == "state_dict":
                ours.load_state_dict(ours.state_dict())
            elif way == "rollback":
                store.commit({"step": number})
                step(model, ours, number)
                store.rollback()
            elif number in (1, 3):
                store.commit({"step": number})
                store.close()
                store = tiered.Store(tmp_path, dram="32MiB")
                model = tiered.shard(layers(), store)
                ours = tiered.SGD(groups(model), **SGD)
                assert store.resume() == {"step": number}
            step(model, ours, number)
            step(plain, theirs, number)
            assert_same(momenta(ours), momenta(theirs))
        assert_same(model.state_dict(), plain.state_dict())
        store.commit()
        store.close()


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "Lion"])
def test_a_state_dict_before_the_first_update_has_the_masters(kind: str, tmp_path: Path) -> None:
    """They are the values before the cast, which the parameters have lost."""

    def run(directory: Path, *, reload: bool) -> dict[str, Tensor]:
        with debug_store(directory, durable=False) as store:
            model = tiered.shard(layers(), store, param_dtype=torch.bfloat16)
            optimizer = getattr(tiered, kind)(groups(model), **(SGD if kind == "SGD" else {"lr": 1e-2}))
            if reload:
                parameters, state = model.state_dict(), optimizer.state_dict()
                model.load_state_dict(parameters)
                optimizer.load_state_dict(state)
            for number in range(2, 4):
                if kind == "SGD":
                    step(model, optimizer, number)
                else:
                    model(torch.ones(2, 5).bfloat16()).square().sum().backward()
                    optimizer.step()
            state = optimizer.state_dict()["state"]
            return {f"{index}.{name}": value for index, each in state.items() for name, value in each.items()}

    assert_same(run(tmp_path / "reloaded", reload=True), run(tmp_path / "plain", reload=False))

"""state_dict of an optimizer goes to torch's own and back with the bits of torch's own, whatever the target chose."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tiered
from tests.zero.training import debug_store

KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "adamw": (tiered.AdamW, torch.optim.AdamW, {"lr": 3e-2, "weight_decay": 0.07}),
    "sgd": (tiered.SGD, torch.optim.SGD, {"lr": 3e-2, "momentum": 0.9, "weight_decay": 0.07}),
}


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(37, 53), nn.Tanh(), nn.Linear(53, 29))


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        model(torch.randn(8, 37, generator=torch.Generator().manual_seed(step))).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("choice", [{"fused": True}, {"foreach": True}, {}], ids=["fused", "foreach", "default"])
@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_with_the_same_bits_there_and_back(kind: str, choice: dict[str, bool], tmp_path: Path) -> None:
    tiered_kind, torch_kind, options = KINDS[kind]
    make: Callable[[nn.Module], Any] = lambda model: torch_kind(model.parameters(), **options, **choice)  # noqa: E731
    expected = layers()
    fused = torch_kind(expected.parameters(), **options, fused=True)
    train(expected, fused, range(6))

    first = layers()
    begun = torch_kind(first.parameters(), **options, fused=True)
    train(first, begun, range(2))
    with debug_store(tmp_path) as store:
        model = tiered.shard(layers(), store)
        optimizer = tiered_kind(model.parameters(), **options)
        model.load_state_dict(first.state_dict())
        optimizer.load_state_dict(begun.state_dict() if not choice else unfused(begun.state_dict()))
        train(model, optimizer, range(2, 4))
        parameters, state = copy.deepcopy((dict(model.state_dict()), optimizer.state_dict()))
    last = layers()
    target = make(last)
    last.load_state_dict(parameters)
    target.load_state_dict(state)
    assert set(target.param_groups[0]) == set(fused.param_groups[0])
    train(last, target, range(4, 6))
    for name, value in expected.state_dict().items():
        assert torch.equal(last.state_dict()[name], value), name


def unfused(state: dict[str, Any]) -> dict[str, Any]:
    """Return ``state`` as an optimizer of torch that is not fused has it."""
    return state | {"param_groups": [group | {"fused": None} for group in state["param_groups"]]}

"""A backward through values that were written since its forward is refused, whichever way they were written."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tiered
from tiered.errors import UsageError
from tiered.units import MiB

Way = Callable[[Any, tiered.Store, torch.Tensor], None]
WAYS: dict[str, Way] = {}


def way(function: Way) -> Way:
    WAYS[function.__name__] = function
    return function


def key_of(model: Any) -> tuple[Any, str]:
    segment = model[2].weight.segment
    return segment, segment.unit.keys[segment.span]


@way
def write_inside_unsharded_and_go_back_there(model: Any, store: tiered.Store, loss: torch.Tensor) -> None:
    with tiered.unsharded(model):
        with torch.no_grad():
            model[2].weight.mul_(0)
        loss.backward()


@way
def write_inside_unsharded(model: Any, store: tiered.Store, loss: torch.Tensor) -> None:
    with tiered.unsharded(model), torch.no_grad():
        model[2].weight.mul_(0)


@way
def load(model: Any, store: tiered.Store, loss: torch.Tensor) -> None:
    model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})


@way
def put(model: Any, store: tiered.Store, loss: torch.Tensor) -> None:
    _, key = key_of(model)
    store[key] = store[key] * 2


@way
def put_many(model: Any, store: tiered.Store, loss: torch.Tensor) -> None:
    _, key = key_of(model)
    store.put_many({key: store[key] * 2})


@way
def delete_and_put(model: Any, store: tiered.Store, loss: torch.Tensor) -> None:
    _, key = key_of(model)
    values = store[key]
    del store[key]
    store[key] = values * 2


@way
def lease(model: Any, store: tiered.Store, loss: torch.Tensor) -> None:
    segment, key = key_of(model)
    with store.lease(key, mode="rw") as values:
        segment.view(values).mul_(0)


@way
def write_part(model: Any, store: tiered.Store, loss: torch.Tensor) -> None:
    segment, key = key_of(model)
    store.write_part(key, segment.offset, torch.zeros(segment.nbytes, dtype=torch.uint8))


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])


@pytest.mark.parametrize("activations", ["keep", "swap"])
@pytest.mark.parametrize("name", WAYS)
def test_a_backward_through_values_written_since_is_refused(name: str, activations: str, tmp_path: Path) -> None:
    with tiered.Store(tmp_path, dram=32 * MiB, durable=False) as store:
        model = tiered.shard(build(), store, unit=nn.Linear, activations=activations)
        loss = model(torch.ones(4, 8)).square().sum()
        with pytest.raises(UsageError, match="updated since the forward"):
            WAYS[name](model, store, loss)
            loss.backward()


@pytest.mark.parametrize("is_written_first", [True, False])
def test_a_write_after_a_forward_in_one_block_is_refused_and_one_before_is_not(
    is_written_first: bool, tmp_path: Path
) -> None:
    with tiered.Store(tmp_path, dram=32 * MiB, durable=False) as store:
        model: Any = tiered.shard(build(), store, unit=nn.Linear)

        def write() -> None:
            with torch.no_grad():
                model[2].weight.mul_(2)

        with tiered.unsharded(model):
            if is_written_first:
                write()
            loss = model(torch.ones(4, 8)).square().sum()
            if not is_written_first:
                write()
        with nullcontext() if is_written_first else pytest.raises(UsageError, match="updated since the forward"):
            loss.backward()


def test_what_changes_nothing_outdates_no_graph(tmp_path: Path) -> None:
    with tiered.Store(tmp_path, dram=32 * MiB, durable=False) as store:
        model: Any = tiered.shard(build(), store, unit=nn.Linear)
        loss = model(torch.ones(4, 8)).square().sum()
        with tiered.unsharded(model):
            model[2].weight.sum().item()
        assert model.to("cpu") is model and model.cpu() is model
        loss.backward()

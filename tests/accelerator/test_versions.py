"""The device computes with the bytes that DRAM has, whoever wrote them: those it keeps from before are of no use."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tiered
from tests.accelerator.training import DEVICE, ROOMY_NBYTES, case_on, reference_on
from tests.reference import Recipe
from tests.zero.training import assert_same, start
from tiered.errors import UsageError

pytestmark = pytest.mark.filterwarnings("ignore:An output with one or more elements was resized:UserWarning")

BF16 = torch.bfloat16
ON = pytest.mark.parametrize("update_on", ["cpu", "device"])


def build() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)]).to(DEVICE)
    model[1].requires_grad_(False)
    return model


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    """Return an optimizer of all layers but the last."""
    is_plain = type(model[0].weight) is nn.Parameter
    kind: Any = torch.optim.AdamW if is_plain else tiered.AdamW
    return kind(model[:3].parameters(), lr=1e-2, **({"fused": True} if is_plain else {}))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> torch.Tensor:
    rows = torch.randn(4, 32, generator=torch.Generator().manual_seed(number)).to(DEVICE)
    loss = model(rows).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    model.zero_grad()  # of the layer that is not trained
    return loss.detach().cpu()


def same(ours: nn.Module, plain: nn.Module) -> bool:
    theirs = plain.state_dict()
    return all(torch.equal(value.cpu(), theirs[name].cpu()) for name, value in ours.state_dict().items())


def load(model: Any, _: Any) -> None:
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})


def load_one_module(model: Any, _: Any) -> None:
    model[1].load_state_dict({"weight": torch.full((32, 32), 0.01), "bias": torch.zeros(32)})


def write_unsharded(model: Any, _: Any) -> None:
    with torch.no_grad(), nullcontext() if type(model[0].weight) is nn.Parameter else tiered.unsharded(model):
        model[2].weight.mul_(-1)
        model[3].bias.fill_(0.25)


def put_into_the_store(model: Any, _: Any) -> None:
    weight = model[1].weight
    if type(weight) is nn.Parameter:
        weight.data.mul_(0.5)
        return
    segment = weight.segment
    store, key = segment.unit.engine.store, segment.unit.keys[segment.span]
    span = store[key]
    segment.view(span).mul_(0.5)
    store[key] = span


def train_what_was_frozen(model: Any, _: Any) -> None:
    load(model, _)
    model[1].requires_grad_(True)


def add_a_group(model: Any, optimizer: Any) -> None:
    load(model, optimizer)
    optimizer.add_param_group({"params": list(model[3].parameters()), "lr": 1e-3})


def reset_the_state(model: Any, optimizer: Any) -> None:
    load(model, optimizer)
    if isinstance(optimizer, torch.optim.AdamW):
        optimizer.state.clear()
    else:
        optimizer.reset_state()


@ON
@pytest.mark.parametrize(
    "change",
    [load, load_one_module, write_unsharded, put_into_the_store, train_what_was_frozen, add_a_group, reset_the_state],
)
def test_values_that_were_written_are_computed_with(
    change: Callable[[Any, Any], None], update_on: str, accelerator: Any, tmp_path: Path
) -> None:
    plain = build()
    in_memory = optimizer_of(plain)
    options: dict[str, Any] = {"device": DEVICE, "update_on": update_on, "hold": 0}
    with tiered.Store(tmp_path, dram=ROOMY_NBYTES, device_memory=ROOMY_NBYTES) as store:
        model = tiered.shard(build(), store, unit=nn.Linear, **options)
        optimizer = optimizer_of(model)
        for number in range(2):
            assert torch.equal(step(model, optimizer, number), step(plain, in_memory, number))
        change(plain, in_memory)
        change(model, optimizer)
        with torch.no_grad():
            rows = torch.ones(2, 32, device=DEVICE)
            assert torch.equal(model(rows), plain(rows))
        assert same(model, plain)
        for number in range(2):
            assert torch.equal(step(model, optimizer, number), step(plain, in_memory, number))
        store.commit()
    with tiered.Store(tmp_path, dram=ROOMY_NBYTES, device_memory=ROOMY_NBYTES) as store:
        model = tiered.shard(build(), store, unit=nn.Linear, **options)
        store.resume()
        assert same(model, plain)


@ON
@pytest.mark.parametrize("dtype", [None, BF16])
def test_a_step_that_is_loaded_back_has_the_same_bits_again(
    dtype: torch.dtype | None, update_on: str, accelerator: Any, tmp_path: Path
) -> None:
    recipe = Recipe(param_dtype=dtype, num_steps=3)
    with tiered.Store(tmp_path, dram=ROOMY_NBYTES, device_memory=ROOMY_NBYTES) as store:
        session = start(case_on(DEVICE, "called_twice"), recipe, store, device=DEVICE, update_on=update_on)
        for number in range(2):
            session.run_step(number)
        values, state = session.model.state_dict(), session.optimizer.state_dict()
        session.run_step(2)
        session.model.load_state_dict(values)
        session.optimizer.load_state_dict(state)
        session.trained.losses.pop()
        session.run_step(2)
        assert_same(session.collect(), reference_on(DEVICE, "called_twice", recipe, update_on))


@pytest.mark.parametrize("change", [load, write_unsharded])
@pytest.mark.parametrize("device", ["cpu", DEVICE])
def test_a_graph_of_values_that_were_written_since_is_refused(
    device: str, change: Callable[[Any, Any], None], accelerator: Any, tmp_path: Path
) -> None:
    with tiered.Store(tmp_path, dram=ROOMY_NBYTES, device_memory=ROOMY_NBYTES) as store:
        model = tiered.shard(build().to(device), store, device=device)
        loss = model(torch.ones(2, 32, device=device)).square().mean()
        change(model, None)
        with pytest.raises(UsageError, match="updated since the forward"):
            loss.backward()


def test_a_move_of_the_model_to_where_it_is_changes_nothing(accelerator: Any, tmp_path: Path) -> None:
    with tiered.Store(tmp_path, dram=ROOMY_NBYTES, device_memory=ROOMY_NBYTES, durable=False) as store:
        model = tiered.shard(build(), store, device=DEVICE)
        assert model.to(DEVICE) is model and model.to(f"{DEVICE}:0") is model
        with pytest.raises(UsageError, match="device= to"):
            model.to("meta")

"""Modules added to a model after ``shard``, such as adapters: their values are part of commits, or refused."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import tiered
from tests.zero.training import debug_store
from tiered.errors import CapacityError, UsageError
from tiered.zero import model_state


class Adapted(nn.Module):
    """A linear layer with an adapter beside it, and a count of its calls, as added to a model that is sharded."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Parameter(torch.randn(2, 8)), nn.Parameter(torch.zeros(8, 2))
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return self.base(x) + x @ self.down.T @ self.up.T


def adapt(model: nn.Module) -> nn.Module:
    model.requires_grad_(False)
    model[0] = Adapted(model[0])
    model[1] = nn.Sequential(model[1])  # a buffer of the sharded model has another name then
    return model


def layers() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))


def train_adapters(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[Tensor]:
    losses = []
    for step in steps:
        loss = model(torch.randn(4, 8, generator=torch.Generator().manual_seed(step))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("with_frozen", [False, True])
def test_adapters_added_after_shard_ride_along_with_a_commit(with_frozen: bool, tmp_path: Path) -> None:
    plain = adapt(layers())
    trained = [p for p in plain.parameters() if p.requires_grad]
    expected = train_adapters(plain, torch.optim.AdamW(trained, lr=0.1, fused=True), range(5))
    losses: list[Tensor] = []
    for until in (2, 5):
        with debug_store(tmp_path) as store:
            model = adapt(tiered.shard(layers(), store))
            parameters = [p for p in model.parameters() if with_frozen or p.requires_grad]
            optimizer = tiered.AdamW(parameters, lr=0.1, store=store)
            step = store.resume().get("step", 0)
            losses += train_adapters(model, optimizer, range(step, until))
            store.commit({"step": until})
            before = model.state_dict()
            train_adapters(model, optimizer, range(1))
            store.rollback()
            after = model.state_dict()
            assert all(torch.equal(after[name], before[name]) for name in before)
    assert all(map(torch.equal, losses, expected))
    assert all(torch.equal(after[name], value) for name, value in plain.state_dict().items())


def test_a_run_with_adapters_is_refused_without_them(tmp_path: Path) -> None:
    with debug_store(tmp_path) as store:
        adapt(tiered.shard(layers(), store))
        store.commit()
    with pytest.raises(UsageError, match=r"added after tiered\.shard: 0\.down: the store has \(2, 8\)"):
        with debug_store(tmp_path) as store:
            tiered.shard(layers(), store)
            store.resume()


def test_more_added_parameters_than_a_commit_carries_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_state, "MAX_ADDED_NBYTES", 100)
    with debug_store(tmp_path / "lasting") as store:
        model = tiered.shard(layers(), store)
        adapt(model)
        with pytest.raises(CapacityError, match=r"before tiered\.shard"):
            tiered.AdamW(model.parameters())
        with pytest.raises(CapacityError, match=r"before tiered\.shard"):
            store.commit()
        model[0] = model[0].base
    with debug_store(tmp_path / "passing", durable=False) as store:
        tiered.AdamW(adapt(tiered.shard(layers(), store)).parameters())


def test_trained_parameters_outside_of_the_model_are_in_its_commits(tmp_path: Path) -> None:
    """Nothing else has their values, and moments without them would be another run's."""

    def scaled(model: nn.Module, scale: nn.Parameter) -> nn.Module:
        model.register_forward_hook(lambda module, args, y: y * scale)
        return model

    plain, scale = layers(), nn.Parameter(torch.ones(3, 1, 1))
    theirs = torch.optim.AdamW([*plain.parameters(), scale], lr=0.1, fused=True)
    expected = train_adapters(scaled(plain, scale), theirs, range(5))
    losses: list[Tensor] = []
    for until in (2, 5):
        with debug_store(tmp_path) as store:
            model, ours = tiered.shard(layers(), store), nn.Parameter(torch.ones(3, 1, 1))
            optimizer = tiered.AdamW([*model.parameters(), ours], lr=0.1)
            step = store.resume().get("step", 0)
            losses += train_adapters(scaled(model, ours), optimizer, range(step, until))
            store.commit({"step": until})
            before = ours.detach().clone()
            train_adapters(model, optimizer, range(1))
            store.rollback()
            assert torch.equal(ours, before)
    assert all(map(torch.equal, losses, expected)) and torch.equal(ours, scale)

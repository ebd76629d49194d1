"""Gradients that do not fit: they make way before anything waits for their room, and only those that are used last."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import tiered
from tests.devices.simulated_disk import SimulatedDisk
from tests.store.rig import simulated_store
from tests.zero.training import counted_swaps
from tiered.store.store import Store
from tiered.units import KiB
from tiered.zero.formats.budget import share_out_as_asked
from tiered.zero.gradients.stand_in import StandIn
from tiered.zero.layout import Shares

TWO_THREADS = True  # how long the layers compute beside I/O is left as users have it

NUM_UNITS = 8
WIDTH = 128
SMALLEST_NBYTES = 528 * KiB
BUDGET_NBYTES = 800 * KiB  # gradients alone take 520


class Trainer:
    """A chain of equal layers on a device that completes at once: what was asked for ahead is there."""

    def __init__(self, store: Store, *, hold: str | int = 0, **options: Any) -> None:
        torch.manual_seed(1)
        self.store = store
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(NUM_UNITS)]
        self.model = tiered.shard(nn.Sequential(*layers), store, unit=nn.Linear, hold=hold)
        self.optimizer = tiered.AdamW(self.model.parameters(), lr=1e-3, store=store, **options)

    def backward(self, seed: int) -> None:
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))
        self.model(x).square().mean().backward()

    def step(self, *, num_micro_steps: int = 2, clip: bool = False) -> None:
        for seed in range(num_micro_steps):
            self.backward(seed)
        if clip:
            tiered.clip_grad_norm_(self.model, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def stored_gradients(self) -> list[bool]:
        """Return for each layer whether its gradient is the working set's now."""
        return [isinstance(layer.weight.grad, StandIn) for layer in self.model]

    def finish(self) -> None:
        self.model[0].weight.segment.unit.engine.updates.finish_all()  # type: ignore[union-attr]

    @property
    def shares(self) -> Shares:
        shares: Shares = self.model[0].weight.segment.unit.engine.layouts.shares  # type: ignore[union-attr]
        return shares

    @property
    def num_demands(self) -> int:
        return self.store.statistics().working_set.swaps.num_demands


@contextmanager
def trainer(budget_nbytes: int = BUDGET_NBYTES, **options: Any) -> Iterator[Trainer]:
    with simulated_store(SimulatedDisk(), budget_nbytes=budget_nbytes, durable=False) as store:
        yield Trainer(store, **options)


def adamw(model: nn.Module, store: Store | None) -> torch.optim.Optimizer:
    """Return the optimizer of ``model``, which is in memory where there is no store."""
    if store is None:
        return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return tiered.AdamW(model.parameters(), lr=1e-3, store=store, update="step")


def test_micro_steps_whose_gradients_do_not_fit_wait_for_nothing() -> None:
    """Each of the sixteen uses of parameters in a micro-step, and eight of gradients, was a demand read once.

    Two are; a thread that the machine lets wait adds some.
    """
    with trainer(update="step") as t:
        for _ in range(3):
            t.step()
        t.finish()
        before = t.num_demands
        t.step()
        t.finish()
        assert t.num_demands - before <= 8


@pytest.mark.parametrize("state_kib", [300, 450])
def test_gradients_that_wait_find_room_before_optimizer_state_is_held(state_kib: int) -> None:
    """The state took their room, and each step wrote gradients that it read again."""
    with trainer(SMALLEST_NBYTES + (2 * 520 + state_kib) * KiB, hold="auto", update="step") as t:
        for _ in range(3):
            t.backward(0)
            t.backward(1)
            assert not any(t.stored_gradients())
            t.optimizer.step()
            t.optimizer.zero_grad()
        assert t.shares.held >= 520 * KiB, "the parameters, and what of the state fits"


@pytest.mark.parametrize(("beyond_kib", "update"), [(300, "step"), (1000, "backward")])
def test_what_no_gradient_waits_for_is_held_as_before(beyond_kib: int, update: str) -> None:
    """A byte of a parameter saves as many as one of a gradient."""
    with trainer(SMALLEST_NBYTES + beyond_kib * KiB, hold="auto", update=update) as t:
        engine = t.model[0].weight.segment.unit.engine  # type: ignore[union-attr]
        asked = share_out_as_asked([unit.layout for unit in engine.units], SMALLEST_NBYTES + beyond_kib * KiB, "auto")
        assert t.shares == asked and asked.held > 0


def test_gradients_that_are_used_last_make_way() -> None:
    with trainer(update="step") as t:
        for _ in range(2):
            t.step()
        t.finish()
        t.backward(0)
        t.model(torch.zeros(1, WIDTH)).sum()
        stored = t.stored_gradients()
        assert any(stored) and not any(stored[-2:]), "the backward that comes uses the last layers' first"


def test_a_norm_writes_no_gradient_again_and_leaves_it_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with trainer(update="step") as t:
        t.backward(0)
        t.backward(1)
        stored, written = t.stored_gradients(), t.store.statistics().write_bytes
        assert any(stored)
        with counted_swaps(monkeypatch) as swaps:
            tiered.clip_grad_norm_(t.model, 1.0)
        assert t.stored_gradients() == stored
        assert t.store.statistics().write_bytes == written
        assert max(swaps.values()) == 1


@pytest.mark.parametrize("budget_kib", [540, 600, 700, 800])
def test_what_autograd_adds_to_is_not_given_back_for_a_unit_that_a_hook_uses(budget_kib: int) -> None:
    """The hook opens another unit, which parks its own, between ours and the addition."""

    def train(store: Store | None) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(NUM_UNITS)])
        if store is not None:
            model = tiered.shard(model, store, unit=nn.Linear, hold=0)
        optimizer = adamw(model, store)
        for index, layer in enumerate(model):
            weight = model[(index + 3) % NUM_UNITS].weight
            layer.weight.register_hook(lambda gradient, weight=weight: gradient + 0.01 * weight.detach())
        losses = []
        for step in range(2):
            for micro_step in range(3):
                x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(3 * step + micro_step))
                losses.append(model(x).square().mean())
                losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        return losses

    with simulated_store(SimulatedDisk(), budget_nbytes=budget_kib * KiB, durable=False) as store:
        assert train(store) == train(None)


@pytest.mark.parametrize("budget_kib", [200, 800])
def test_units_whose_names_look_like_numbered_ones_keep_their_gradients_apart(budget_kib: int) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in ("x/1", "x", "x/2"):
                self.add_module(name, nn.Linear(64, 64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.children():
                x = layer(x)
            return x

    def train(store: Store | None) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model: Any = Named()
        if store is not None:
            model = tiered.shard(model, store, unit=nn.Linear, hold=0)
        optimizer = adamw(model, store)
        losses, seen = [], []
        for seed in range(4):
            for _ in range(2):
                losses.append(model(torch.randn(4, 64, generator=torch.Generator().manual_seed(seed))).square().mean())
                losses[-1].backward()
            seen.append(model.get_submodule("x").weight.grad)
            optimizer.step()
            optimizer.zero_grad()
        return losses

    with simulated_store(SimulatedDisk(), budget_nbytes=budget_kib * KiB, durable=False) as store:
        assert train(store) == train(None)


def test_a_gradient_has_one_key_in_all_steps_and_bytes_that_are_still_seen_stay_what_they_were() -> None:
    with trainer(update="step") as t:
        t.backward(0)
        kept = t.model[0].weight.grad
        assert kept is not None
        before = kept.clone()
        for number in range(2):
            t.optimizer.step()
            t.finish()
            t.backward(number + 1)
            assert torch.equal(kept, before)

"""Steps that users skip, clip, drop gradients of or set up wrongly: the same bits, or an error that says why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tiered
from tests.zero.programs import (
    ADAMW,
    WIDTH,
    Block,
    Net,
    assert_same,
    batch,
    in_memory,
    through_tiered,
)
from tests.zero.training import debug_store
from tiered.errors import UsageError


def test_gradients_that_are_dropped_after_an_adding_backward_are_not_used(tmp_path: Path) -> None:
    def program(model: Any, optimizer: torch.optim.Optimizer, seen: list[Any]) -> None:
        is_ours = hasattr(model.head.weight, "segment")
        for number in range(3):
            if is_ours:
                with tiered.accumulate(model):
                    model(batch(number)).backward()
            else:
                model(batch(number)).backward()
            if number == 0:
                model.zero_grad()
            else:
                model.blocks[0].weight.grad = torch.ones(WIDTH)
            model.blocks[1](batch(number)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    assert_same(through_tiered(tmp_path, Net, program, "backward"), in_memory(Net, program))


def test_a_step_that_the_backward_has_made_cannot_be_skipped(tmp_path: Path) -> None:
    with debug_store(tmp_path, durable=False) as store:
        model = tiered.shard(Net(), store)
        optimizer = tiered.AdamW(model.parameters(), update="backward")
        for drop in (optimizer.zero_grad, model.zero_grad):
            model(batch(0)).backward()
            with pytest.raises(UsageError, match="cannot be skipped"):
                drop()
                optimizer.step()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("by_model", [False, True])
def test_a_step_that_is_skipped_after_clipping_leaves_nothing(by_model: bool, tmp_path: Path) -> None:
    def program(model: nn.Module, optimizer: torch.optim.Optimizer, seen: list[Any]) -> None:
        clip = tiered.clip_grad_norm_ if hasattr(model.head.weight, "segment") else torch.nn.utils.clip_grad_norm_
        for number in range(4):
            model(batch(number)).backward()
            seen.append(clip(model.parameters(), 0.5).clone())
            if number % 2:
                (model if by_model else optimizer).zero_grad()
                model.state_dict()
                continue
            optimizer.step()
            optimizer.zero_grad()

    assert_same(through_tiered(tmp_path, Net, program), in_memory(Net, program))


def test_gradients_with_a_graph_of_their_own_are_refused(tmp_path: Path) -> None:
    with debug_store(tmp_path, durable=False) as store:
        model = tiered.shard(Net(), store)
        loss = model(batch(0).detach())  # an input's gradient would keep its graph, and that the input
        with pytest.raises(UsageError, match=r"torch\.autograd\.grad\(loss, parameters, create_graph=True\)"):
            loss.backward(create_graph=True)


def test_a_plain_parameter_that_is_unfrozen_later_is_trained_as_by_torch(tmp_path: Path) -> None:
    def trained(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> list[torch.Tensor]:
        first, second = (nn.Parameter(torch.full((3,), value)) for value in (1.0, 2.0))
        second.requires_grad_(False)
        optimizer = make([first, second])
        for step in range(4):
            second.requires_grad_(step > 0)
            (first * second).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        averages = [state["exp_avg"] for state in optimizer.state_dict()["state"].values()]
        return [first.detach(), second.detach(), *averages]

    with debug_store(tmp_path) as store:
        found = trained(lambda parameters: tiered.AdamW(parameters, store=store, **ADAMW))
        assert all(map(torch.equal, found, trained(lambda p: torch.optim.AdamW(p, fused=True, **ADAMW))))


def test_a_step_that_is_refused_for_its_gradients_has_changed_nothing(tmp_path: Path) -> None:
    """A store without commits could not go back."""
    with debug_store(tmp_path, durable=False) as store:
        torch.manual_seed(3)
        model = Net(Block)
        last = model.blocks[-1]
        model = tiered.shard(model, store)
        optimizer = tiered.AdamW(model.parameters(), **ADAMW)
        model(batch(0)).backward()
        optimizer.step()
        before = model.state_dict()
        model(batch(1)).backward()
        tiered.clip_grad_norm_(model.parameters(), 1e-3)
        last.bias.grad.zero_()
        with pytest.raises(UsageError, match="written in place"):
            optimizer.step()
        optimizer.zero_grad()
        after = model.state_dict()
        assert all(torch.equal(after[name], before[name]) for name in before)
        model(batch(1)).backward()
        optimizer.step()
        assert optimizer.state_dict()["state"][0]["step"] == 2


def test_a_plain_parameter_keeps_the_order_of_its_elements(tmp_path: Path) -> None:
    with debug_store(tmp_path, durable=False) as store:
        convolution = nn.Conv2d(3, 4, 2)
        optimizer = tiered.AdamW(convolution.parameters(), store=store)
        convolution.to(memory_format=torch.channels_last)
        convolution(torch.randn(1, 3, 5, 5)).sum().backward()
        with pytest.raises(UsageError, match="expected the memory format to stay"):
            optimizer.step()

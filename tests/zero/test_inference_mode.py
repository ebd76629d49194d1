"""Regions without gradients inside of programs that train: what they leave open is of use to autograd afterwards."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.zero.programs import Block, Net, assert_same, batch, every_word, in_memory, through_tiered

REGIONS = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


class Borrowing(Net):
    """Uses a weight of a block beside the block's forward, first as of a teacher, then to learn."""

    def __init__(self, region: str) -> None:
        super().__init__(Block)
        self.region = region

    def teach(self, x: Tensor) -> Tensor:
        with REGIONS[self.region]():
            return torch.tanh(x @ self.blocks[1].square)

    def forward(self, x: Tensor) -> Tensor:
        taught = self.teach(x)
        return self.head(x @ self.blocks[1].square[:, ::1] + taught).square().mean() + super().forward(x)


@every_word
@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.usefixtures("swap_all")
def test_a_weight_used_without_gradients_first_is_learnt_afterwards(region: str, word: str, tmp_path: Path) -> None:
    def build() -> nn.Module:
        return Borrowing(region)

    def program(model: Any, optimizer: torch.optim.Optimizer, seen: list[Any]) -> None:
        for number in range(2):
            with REGIONS[region]():
                seen.append(model(batch(number)).clone())
            loss = model(batch(number))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.detach().clone())

    assert_same(through_tiered(tmp_path, build, program, "step", word), in_memory(build, program))


@pytest.mark.parametrize("word", ["keep", "swap"])  # nothing can be recorded again in inference_mode
@pytest.mark.parametrize("region", REGIONS)
def test_gradients_may_be_asked_for_where_no_graph_is_made(region: str, word: str, tmp_path: Path) -> None:
    def program(model: Any, optimizer: torch.optim.Optimizer, seen: list[Any]) -> None:
        loss = model(batch(0))
        with REGIONS[region]():
            seen.extend(each.clone() for each in torch.autograd.grad(loss, list(model.parameters())))

    assert_same(through_tiered(tmp_path, Net, program, "step", word), in_memory(Net, program))

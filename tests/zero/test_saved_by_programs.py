"""What autograd saves for a user's own functions, checkpoints and hooks: the same bits under every word."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from tests.pairwise import pairwise
from tests.zero.programs import (
    UPDATES,
    WIDTH,
    WORDS,
    Block,
    Net,
    assert_same,
    batch,
    every_update,
    every_word,
    in_memory,
    plain_steps,
    through_tiered,
)


class Affine(torch.autograd.Function):
    """x w + b with a backward of its own, which keeps both parameters."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        return x * weight + bias

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0), gradient.sum(0)


class AffineBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return Affine.apply(torch.tanh(self.linear(x)), self.weight, self.bias) + x @ self.square


class CheckpointBlock(Block):
    """A reentrant checkpoint is a function that saves the parameters it is given."""

    def forward(self, x: Tensor) -> Tensor:
        mixed = checkpoint(lambda x, square: torch.tanh(x @ square), x, self.square, use_reentrant=True)
        return mixed * self.weight + self.bias + self.linear(x)


class StridedBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        diagonal = torch.as_strided(self.square, (WIDTH,), (WIDTH + 1,), 0)
        above = self.square.as_strided((WIDTH - 1,), (WIDTH + 1,), storage_offset=1).sum()
        own = self.square.as_strided((WIDTH,), (WIDTH + 1,), self.square.storage_offset())
        inner = self.square[2:].as_strided((4,), (WIDTH + 1,), self.square[2:].storage_offset()).sum()
        return super().forward(x) * (diagonal + own) + above + inner


@every_word
@every_update
@pytest.mark.parametrize("block", [AffineBlock, CheckpointBlock, StridedBlock])
@pytest.mark.usefixtures("swap_all")
def test_parameters_that_functions_keep_are_themselves_in_backward(
    block: type[nn.Module], update: str, word: str, tmp_path: Path
) -> None:
    def build() -> nn.Module:
        return Net(block)

    assert_same(through_tiered(tmp_path, build, plain_steps, update, word), in_memory(build, plain_steps))


PAIRS: dict[str, Callable[[], Any]] = {
    "save_on_cpu": torch.autograd.graph.save_on_cpu,
    "identity": lambda: saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor),
    "nested": lambda: saved_tensors_hooks(
        lambda tensor: {"all": [tensor, tensor.t()]}, lambda packed: packed["all"][0]
    ),
    "rounded": lambda: saved_tensors_hooks(lambda tensor: tensor.bfloat16(), lambda packed: packed.float()),
}


@every_update
@every_word
@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.usefixtures("swap_all")
def test_saved_tensor_hooks_in_a_forward_may_hand_back_the_weights_they_see(
    name: str, word: str, update: str, tmp_path: Path
) -> None:
    class Hooked(Block):
        def forward(self, x: Tensor) -> Tensor:
            with PAIRS[name]():
                return super().forward(x)

    class HookedNet(Net):
        def forward(self, x: Tensor) -> Tensor:
            with PAIRS[name]():
                x = self.blocks[0](x)
            return self.head(self.blocks[1](x)).square().mean()

    def build() -> nn.Module:
        return HookedNet(Hooked)

    assert_same(through_tiered(tmp_path, build, plain_steps, update, word), in_memory(build, plain_steps))


class Attending(nn.Module):
    """nn.MultiheadAttention asks whether query, key and value are one tensor, and goes another way where they are."""

    def __init__(self, is_checkpointed: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.MultiheadAttention(WIDTH, 2, batch_first=True) for _ in range(2))
        self.is_checkpointed = is_checkpointed

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(3, -1, WIDTH)
        for layer in self.layers:
            arguments = {"query": x, "key": x, "value": x}
            x = x + (checkpoint(layer, x, x, x, use_reentrant=False) if self.is_checkpointed else layer(**arguments))[0]
        return x.float().square().mean()


@pairwise(
    is_checkpointed={"whole": False, "checkpointed": True}, is_cast={"fp32": False, "cast": True},
    word=[*WORDS, "auto"], update=UPDATES,
)  # fmt: skip
@pytest.mark.usefixtures("swap_all")
def test_arguments_that_are_one_tensor_are_one_where_they_are_computed_again(
    is_checkpointed: bool, is_cast: bool, word: str, update: str, tmp_path: Path
) -> None:
    def program(model: nn.Module, optimizer: torch.optim.Optimizer, seen: list[Any]) -> None:
        for number in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
                loss = model(batch(number, num_rows=6))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.detach().clone())

    def build() -> nn.Module:
        return Attending(is_checkpointed)

    assert_same(through_tiered(tmp_path, build, program, update, word), in_memory(build, program))


class Asking(Block):
    """Goes by which of its arguments are one tensor."""

    def forward(self, *tensors: Tensor) -> Tensor:  # type: ignore[override]
        total = sum((number + 1) * tensor for number, tensor in enumerate(tensors))
        for tensor in tensors:
            total = super().forward(total) if tensor is tensors[0] else total.sin()
        return total


GIVEN: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "one": lambda x: (x, x, x),
    "one_and_its_values": lambda x: (x, x.detach(), x),
    "one_and_a_view": lambda x: (x, x.view_as(x), x),
    "one_and_a_copy": lambda x: (x, x.clone(), x),
}


@pytest.mark.parametrize("word", ["keep", "recompute"])
@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("kind", ["leaf", "data", "computed"])
def test_arguments_are_one_tensor_where_they_were_and_no_others(
    kind: str, given: str, word: str, tmp_path: Path
) -> None:
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = {"leaf": x, "data": x.detach(), "computed": x * 2}[kind]
            y = checkpoint(self.blocks[0], *GIVEN[given](x), use_reentrant=False)
            return self.head(self.blocks[1](y)).square().mean()

    def build() -> nn.Module:
        return Checkpointed(Asking)

    assert_same(through_tiered(tmp_path, build, plain_steps, "step", word), in_memory(build, plain_steps))


@pytest.mark.parametrize("word", ["keep", "swap"])
def test_a_functional_call_has_the_bits_of_its_own_tensors(word: str, tmp_path: Path) -> None:
    assert_same(through_tiered(tmp_path, Net, meta_steps, "step", word), in_memory(Net, meta_steps))


def meta_steps(model: nn.Module, optimizer: torch.optim.Optimizer, seen: list[Any]) -> None:
    """The second loss is that of parameters that were changed, as in meta-learning."""
    for number in range(3):
        first = model(batch(number))
        changed = {name: parameter * 1.5 for name, parameter in model.named_parameters()}
        second = functional_call(model, changed, (batch(9),))
        (first + second).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(second.detach().clone())

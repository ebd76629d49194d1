"""torch.compile of what is sharded, or calls it: the modules run as they are, to the same bits."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiered
from tests.zero.programs import (
    ADAMW,
    Block,
    Net,
    assert_same,
    batch,
    in_memory,
    plain_steps,
    through_tiered,
)
from tests.zero.training import debug_store

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's tracer itself asks for it


class Penalised(Net):
    def loss(self, x: Tensor) -> Tensor:
        return self(x) + self.head.weight.square().sum()


def losses(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[Tensor], Tensor]) -> list[Tensor]:
    found = []
    for number in range(2):
        value = loss(batch(number))
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(value.detach())
    return [*found, *model.state_dict().values()]


def expected(of: Callable[[Any], Callable[[Tensor], Tensor]]) -> list[Tensor]:
    torch.manual_seed(3)
    model = Penalised()
    return losses(model, torch.optim.AdamW(model.parameters(), fused=True, **ADAMW), of(model))


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    yield
    torch.compiler.reset()


def compiled(what: Any) -> Any:
    return torch.compile(what, backend="eager")


LOSSES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "model": (lambda model: model, compiled),
    "function": (lambda model: model, lambda model: compiled(lambda x: model(x))),
    "method": (lambda model: model.loss, lambda model: compiled(lambda x: model.loss(x))),
    "parameter": (
        lambda model: model.loss,
        lambda model: compiled(lambda x: model(x) + model.head.weight.square().sum()),
    ),
}


@pytest.mark.parametrize("what", LOSSES)
def test_what_calls_a_sharded_model_may_be_compiled(what: str, tmp_path: Path) -> None:
    plain, ours = LOSSES[what]
    with debug_store(tmp_path, durable=False) as store:
        torch.manual_seed(3)
        model = tiered.shard(Penalised(), store)
        found = losses(model, tiered.AdamW(model.parameters(), **ADAMW), ours(model))
    assert all(map(torch.equal, found, expected(plain)))


@torch.compile(backend="eager")
def rotate(x: Tensor, weight: Tensor) -> Tensor:
    return torch.tanh(x) * torch.sin(x @ weight)


class Rotated(Block):
    """A block that calls a compiled function, as attention does, and gives it a parameter."""

    def forward(self, x: Tensor) -> Tensor:
        return rotate(super().forward(x), self.square)


@pytest.mark.parametrize("word", ["auto", "recompute", "swap"])
def test_a_block_may_call_a_compiled_function(word: str, tmp_path: Path) -> None:
    def build() -> nn.Module:
        return Net(Rotated)

    assert_same(through_tiered(tmp_path, build, plain_steps, word=word), in_memory(build, plain_steps))


def test_a_whole_step_may_be_compiled(tmp_path: Path) -> None:
    def program(model: nn.Module, optimizer: torch.optim.Optimizer, seen: list[Any]) -> None:
        def step(x: Tensor) -> Tensor:
            loss: Tensor = model(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        does_compile = hasattr(model.head.weight, "segment")
        for number in range(2):
            seen.append((compiled(step) if does_compile else step)(batch(number)).detach())

    assert_same(through_tiered(tmp_path, Net, program), in_memory(Net, program))


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("what", ["model", "block"])
def test_compile_of_a_module_changes_nothing_and_says_so(
    what: str, when: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with debug_store(tmp_path, durable=False) as store, caplog.at_level(logging.WARNING, "tiered"):
        torch.manual_seed(3)
        model = Penalised()
        module = model if what == "model" else model.blocks[1]
        if when == "before":
            module.compile(backend="eager")
        tiered.shard(model, store)
        if when == "after":
            module.compile(backend="eager")
        found = losses(model, tiered.AdamW(model.parameters(), **ADAMW), model)
        assert f"compile() of {type(module).__name__}, which is sharded, changes nothing" in caplog.text
    assert all(map(torch.equal, found, expected(lambda model: model)))

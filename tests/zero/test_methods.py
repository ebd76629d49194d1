"""Methods of the user's model that train, save, load and look: what their lines would do outside of the method."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tiered
from tests.zero.programs import (
    ADAMW,
    WIDTH,
    Net,
    assert_same,
    batch,
    every_update,
    every_word,
    in_memory,
    through_tiered,
)
from tests.zero.training import debug_store
from tiered.errors import UsageError


class Agent(Net):
    """A model that brings its training loop along."""

    def fit(self, optimizer: torch.optim.Optimizer, loss: Callable[[Tensor], Tensor], seen: list[Any]) -> Tensor:
        for number in range(3):
            value = self.training_step(optimizer, loss, batch(number))
            seen.append(value.detach().clone())
        return value

    def training_step(self, optimizer: torch.optim.Optimizer, loss: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        value = loss(x)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value

    def plain_loss(self, x: Tensor) -> Tensor:
        return self(x)

    def loss_of_parts(self, x: Tensor) -> Tensor:
        """Calls no ``forward`` of its own."""
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()

    def loss_with_penalty(self, x: Tensor) -> Tensor:
        return self(x) + 0.1 * torch.stack([p.square().sum() for p in self.parameters()]).sum()

    def loss_after_a_look(self, x: Tensor) -> Tensor:
        scale = self.head.weight.t().norm()
        return self(x) * scale + self.blocks[0].square.t().sum() * (x @ self.blocks[1].square.t()).mean()

    def loss_of_checkpoints(self, x: Tensor) -> Tensor:
        x = checkpoint(lambda x: torch.tanh(x @ self.blocks[0].square), x, use_reentrant=True)
        x = checkpoint(lambda x: torch.tanh(x @ self.blocks[0].square.t()), x, use_reentrant=False)
        return checkpoint(self.loss_of_parts, x, use_reentrant=False)

    @torch.no_grad()
    def norms(self) -> Tensor:
        return torch.stack([parameter.norm() for parameter in self.parameters()])

    def evaluated(self) -> list[Tensor]:
        with torch.no_grad():
            return [self(batch(7)), self.loss_of_parts(batch(8)), self.norms()]

    def fit_and_look(self, optimizer: torch.optim.Optimizer, seen: list[Any]) -> None:
        """Parameters are looked at before a forward, between it and the backward, and after the step."""
        for number in range(3):
            seen.append(self.norms())
            loss = self.loss_of_parts(batch(number))
            seen += [self.norms(), *(value.clone() for value in self.state_dict().values())]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen += [*self.evaluated(), self.head.weight.detach().clone()]

    def save(self, path: Path) -> None:
        torch.save(self.state_dict(), path)

    def load(self, path: Path) -> None:
        self.load_state_dict(torch.load(path))

    def look(self, module: nn.Module) -> list[Tensor]:
        with tiered.unsharded(module), torch.no_grad():
            module.bias.mul_(2)
            return [parameter.detach().clone() for parameter in module.parameters()]

    def fit_and_commit(self, optimizer: torch.optim.Optimizer, store: tiered.Store, seen: list[Any]) -> None:
        self.fit(optimizer, self.loss_after_a_look, seen)
        store.commit({"step": 3})
        self.fit(optimizer, self.loss_after_a_look, [])
        seen.append(self.norms())
        store.rollback()
        self.fit(optimizer, self.loss_after_a_look, seen)
        store.resume()


LOSSES = ("plain_loss", "loss_of_parts", "loss_with_penalty", "loss_after_a_look", "loss_of_checkpoints")


@every_word
@every_update
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.usefixtures("swap_all")
def test_a_method_trains(loss: str, update: str, word: str, tmp_path: Path) -> None:
    def program(model: Any, optimizer: torch.optim.Optimizer, seen: list[Any]) -> None:
        model.fit(optimizer, getattr(model, loss), seen)
        for number in range(2):
            seen.append(model.training_step(optimizer, getattr(model, loss), batch(number)).detach())

    assert_same(through_tiered(tmp_path, Agent, program, update, word), in_memory(Agent, program))


def test_a_method_looks_at_parameters_whenever_it_likes(tmp_path: Path) -> None:
    def program(model: Any, optimizer: torch.optim.Optimizer, seen: list[Any]) -> None:
        model.fit_and_look(optimizer, seen)

    assert_same(through_tiered(tmp_path, Agent, program), in_memory(Agent, program))


def test_a_method_saves_loads_and_writes(tmp_path: Path) -> None:
    torch.manual_seed(3)
    plain = Agent()
    with debug_store(tmp_path / "store", durable=False) as store:
        model: Any = tiered.shard(Agent(), store)
        plain.save(tmp_path / "weights.pt")
        model.load(tmp_path / "weights.pt")
        model.save(tmp_path / "again.pt")
        assert_same(list(torch.load(tmp_path / "again.pt").values()), list(plain.state_dict().values()))
        bias = plain.blocks[1].bias.detach() * 2
        assert torch.equal(model.look(model.blocks[1])[0], bias)
        assert torch.equal(model.state_dict()["blocks.1.bias"], bias)
        with pytest.raises(UsageError, match="outside a forward"):
            model.head.weight.sum()


@every_update
def test_a_method_commits_rolls_back_and_resumes(update: str, tmp_path: Path) -> None:
    def train(directory: Path, by_method: bool) -> list[Any]:
        seen: list[Any] = []
        torch.manual_seed(3)
        with debug_store(directory) as store:
            model: Any = tiered.shard(Agent(), store)
            optimizer = tiered.AdamW(model.parameters(), update=update, **ADAMW)
            if by_method:
                model.fit_and_commit(optimizer, store, seen)
            else:
                Agent.fit_and_commit(model, optimizer, store, seen)
            assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
            return [*seen, *model.state_dict().values()]

    losses = train(tmp_path / "method", True)
    assert_same(losses, train(tmp_path / "function", False))
    assert_same(losses[:3], in_memory(Agent, lambda m, o, seen: m.fit(o, m.loss_after_a_look, seen))[:3])


class Trainer(Agent):
    def forward(self, x: Tensor) -> Tensor:
        self.save(Path("/dev/null"))
        return super().forward(x)


def test_a_method_in_a_forward_is_a_part_of_it(tmp_path: Path) -> None:
    with debug_store(tmp_path, durable=False) as store:
        model = tiered.shard(Trainer(), store)
        with pytest.raises(UsageError, match="inside a forward"):
            model(batch(0))


class Interrupted(Agent):
    is_due = True

    def forward(self, x: Tensor) -> Tensor:
        if self.is_due:
            self.is_due = False
            self.blocks[0](x)
            raise KeyboardInterrupt
        return super().forward(x)

    def fit(self, optimizer: torch.optim.Optimizer, loss: Callable[[Tensor], Tensor], seen: list[Any]) -> Tensor:
        self.norms()
        try:
            self(batch(0))
        except KeyboardInterrupt:
            self.state_dict()
        return super().fit(optimizer, loss, seen)


@every_update
def test_a_method_goes_on_after_an_interrupt_in_a_forward(update: str, tmp_path: Path) -> None:
    def program(model: Any, optimizer: torch.optim.Optimizer, seen: list[Any]) -> None:
        model.fit(optimizer, model.loss_after_a_look, seen)

    assert_same(through_tiered(tmp_path, Interrupted, program, update), in_memory(Interrupted, program))
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def test_auto_decides_by_all_forwards_of_a_method(tmp_path: Path) -> None:
    with debug_store(tmp_path, durable=False) as store:
        model: Any = tiered.shard(Agent(), store, activations="auto")
        engine = model.head.weight.segment.unit.engine
        model.fit(tiered.AdamW(model.parameters()), model.loss_of_parts, [])
        units = [block.weight.segment.unit for block in model.blocks]
        assert engine.activations.swapping is not None
        assert all(engine.activations._saved[unit] == engine.activations._saved[units[0]] > 0 for unit in units)


def test_the_modules_that_a_method_calls_without_gradients_are_one_forward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with debug_store(tmp_path, durable=False) as store:
        model: Any = tiered.shard(Agent(), store)
        rewound: list[int] = []
        trace = model.head.weight.segment.unit.engine.schedule.trace
        monkeypatch.setattr(trace, "rewind", lambda: rewound.append(1))
        with torch.no_grad():
            assert torch.equal(model.loss_of_parts(batch(0)), model(batch(0)))
        assert len(rewound) == 2
        assert model.blocks[0](batch(0)).shape == (3, WIDTH)

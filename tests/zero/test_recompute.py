"""Units whose forward runs again in backward: the bits of plain PyTorch with torch's checkpoint around each unit."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

import tiered
from tests.models import CASES, Block, Case, Vectors, batch_of_images, batch_of_tokens, batch_of_vectors
from tests.reference import Recipe
from tests.zero.saved_tensors import WORDS
from tests.zero.training import assert_same, checkpointed, debug_store, reference, smallest_budget, start


def num_forwards(model: nn.Module) -> list[int]:
    return [module.num_forwards for module in model.modules() if isinstance(module, Block)]


@pytest.mark.parametrize(
    ("name", "word", "expected"),
    [
        ("gpt", "keep", [1, 1, 1, 1]),
        ("gpt", "recompute", [2, 2, 2, 2]),
        ("checkpoint_around", "recompute", [2, 2, 2, 2]),
        ("gpt", {"blocks.1": "recompute", "blocks.2": "keep", "blocks.3": "keep", "blocks.0": "swap"}, [1, 2, 1, 1]),
        ("gpt", lambda name, module: "recompute" if name == "blocks.3" else "keep", [1, 1, 1, 2]),
    ],
)
def test_a_unit_that_recomputes_runs_once_more(name: str, word: Any, expected: list[int], tmp_path: Path) -> None:
    with debug_store(tmp_path, durable=False) as store:
        session = start(CASES[name], Recipe(), store, activations=word)
        loss = session.model(*batch_of_tokens(0))
        assert num_forwards(session.model) == [1, 1, 1, 1]
        loss.backward()
        assert num_forwards(session.model) == expected
        with torch.no_grad():
            session.model(*batch_of_tokens(1))
        assert num_forwards(session.model) == [number + 1 for number in expected]
        session.model.zero_grad()


class Spinning(nn.Module):
    """A buffer that each forward turns and uses, random numbers, keyword and nested inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(24, 24)
        self.register_buffer("spin", torch.linspace(0.5, 1.5, 24))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, first: tuple[Tensor, dict[str, Tensor]], *, scale: float) -> Tensor:
        x, more = first
        self.spin.copy_(self.spin.roll(1))
        self.count += 1
        y = torch.tanh(self.linear(x * self.spin.to(x.dtype)) * (1 + torch.rand(()) * self.count))
        return y * more["gate"].sigmoid() * scale


class Spun(Vectors):
    def __init__(self) -> None:
        super().__init__(Spinning)

    def apply_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block((x, {"gate": x.sin()}), scale=0.5)
        return x


def test_a_recompute_has_the_bits_of_a_checkpoint(tmp_path: Path) -> None:
    """Random numbers are drawn again; buffers are those of two forwards."""
    case, recipe = Case(Spun, batch_of_vectors), Recipe()
    expected = reference(checkpointed(case), recipe)
    after = torch.rand(())
    with debug_store(tmp_path, durable=False) as store:
        assert_same(start(case, recipe, store, activations="recompute").run(), expected)
    assert torch.equal(torch.rand(()), after)


def test_a_recompute_after_an_update_is_refused(tmp_path: Path) -> None:
    with debug_store(tmp_path, durable=False) as store:
        session = start(CASES["gpt"], Recipe(), store, activations="recompute")
        loss = session.model(*batch_of_tokens(0))
        loss.backward(retain_graph=True)
        session.optimizer.step()
        session.optimizer.zero_grad()
        with pytest.raises(tiered.UsageError, match="updated since the forward"):
            loss.backward()


def test_a_batch_norm_is_updated_twice_as_by_a_checkpoint(tmp_path: Path) -> None:
    """Running statistics are buffers; the model is torch's own, in fp32."""
    case = Case(
        lambda: nn.Sequential(
            *(nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU()) for _ in range(3))
        ),
        batch_of_images,
        lambda model, batch: model(batch[0]).square().mean(),
    )
    for word in WORDS:
        expected = reference(checkpointed(case) if word == "recompute" else case, Recipe(num_steps=3))
        assert expected.buffers["0.1.num_batches_tracked"] == (6 if word == "recompute" else 3)
        with debug_store(tmp_path / word, durable=False) as store:
            assert_same(start(case, Recipe(num_steps=3), store, activations=word).run(), expected)


class Outer(nn.Module):
    """A unit of several units, which returns several tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(24, 24) for _ in range(8))

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        y = x
        for linear in self.inner:
            y = y + torch.tanh(linear(y))
        return y.exp(), {"gate": x * y.detach(), "mask": x > 0}


class Nested(Vectors):
    def __init__(self) -> None:
        super().__init__(Outer, num_blocks=2)

    def apply_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            y, more = block(x)
            x = torch.tanh(y + more["gate"]) * more["mask"]
        return x


@pytest.mark.parametrize("update", ["step", "backward"])
def test_a_unit_of_units_takes_no_larger_budget(update: str, tmp_path: Path) -> None:
    """What it computes again holds the weights of one unit at a time, as the forward does."""
    case, recipe = Case(Nested, batch_of_vectors, unit=(Outer, nn.Linear)), Recipe(num_steps=2)
    nbytes = smallest_budget(case, recipe, update, tmp_path / "probe")
    with debug_store(tmp_path / "store", nbytes, durable=False) as store:
        session = start(case, recipe, store, update, activations="recompute")
        session.is_squeezed = True
        assert_same(session.run(), reference(case, recipe))


# -- forwards that cannot run again --------------------------------------------------------------------------------


class InPlace(nn.Module):
    """Writes its argument in place, as a ResNet does that activates first."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.relu_(x))


class Alternating(InPlace):
    """Goes by a count that torch knows nothing of."""

    calls = itertools.count()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if next(self.calls) % 2 else self.linear(torch.cat([x, x]))[: len(x)]


class Emptying(InPlace):
    """Empties the iterator that it is given."""

    def forward(self, x: Iterator[Tensor]) -> Tensor:  # type: ignore[override]
        return self.linear(next(x))


def case_of(block: type[InPlace]) -> Case:
    class Stacked(Vectors):
        def __init__(self) -> None:
            super().__init__(block, num_blocks=3)

        def apply_blocks(self, x: Tensor) -> Tensor:
            for module in self.blocks:
                x = x * 2 + module(x=iter([x]) if block is Emptying else x * 1.0)
            return x

    return Case(Stacked, batch_of_vectors)


FAILURES = {
    InPlace: (RuntimeError, "modified by an inplace operation"),
    Alternating: (CheckpointError, "different metadata"),
    Emptying: (StopIteration, None),
}


@pytest.mark.parametrize("block", FAILURES)
def test_a_second_forward_that_fails_is_a_backward_that_fails(block: type[InPlace], tmp_path: Path) -> None:
    case = case_of(block)
    error, message = FAILURES[block]
    for update in ("step", "backward"):
        with debug_store(tmp_path / update, durable=False) as store:
            model = start(case, Recipe(), store, update, activations="recompute").model
            with pytest.raises(error, match=message):
                model(*batch_of_vectors(0)).backward()
            if update == "step":
                model.zero_grad()
                with torch.no_grad():
                    model(*batch_of_vectors(1))
                continue
            with pytest.raises(tiered.StoreLostError, match="a backward"):
                model(*batch_of_vectors(1))


def test_a_forward_that_cannot_run_again_trains_under_keep(tmp_path: Path) -> None:
    words = {f"blocks.{number}": "keep" for number in range(3)}
    with debug_store(tmp_path, durable=False) as store:
        session = start(case_of(InPlace), Recipe(), store, activations=words)
        assert_same(session.run(), reference(case_of(InPlace), Recipe()))

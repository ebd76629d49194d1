"""The shards of N ranks give the bits of one rank: values, moments and masters, by updates, writes and relayouts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from tests.ranks.rig import Outcome, Ranks, RigComm, bytes_of
from tiered.errors import TieredError
from tiered.zero.layout import UnitLayout
from tiered.zero.optimizer.optimizer_state import OptimizerState

WORLDS = [2, 3, 4, 7]
FORMATS = {"fp32": (torch.float32, "exact"), "bf16": (torch.bfloat16, "exact"), "compact": (torch.bfloat16, "compact"),
           "fp32_compact": (torch.float32, "compact")}  # fmt: skip
FROZEN = ("head.weight", "scale")


def model() -> dict[str, nn.Parameter]:
    """A vocabulary of 509, parameters of one element and of none, odd sizes, and strides of another order."""
    torch.manual_seed(0)
    shapes = {"emb": (509, 24), "one": (1,), "none": (0, 5), "fc.weight": (96, 24), "fc.bias": (7,), "odd": (3, 43)}
    found = {name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}
    found["turned"] = nn.Parameter(torch.randn(24, 300).t())
    found |= {"head.weight": nn.Parameter(torch.randn(509, 8)), "scale": nn.Parameter(torch.randn(()))}
    for name in FROZEN:
        found[name].requires_grad_(False)
    return found


@contextmanager
def ranks(world: int, dtype: torch.dtype, word: str) -> Iterator[Ranks]:
    found = Ranks(copy.deepcopy(model()), world, dtype=dtype, word=word)
    try:
        yield found
    finally:
        found.close()


def gradients(step: int, dtype: torch.dtype, names: list[str]) -> dict[str, Tensor]:
    torch.manual_seed(100 + step)
    return {name: torch.randn(p.shape).to(dtype) for name, p in model().items() if name in names}


def run(world: int, dtype: torch.dtype, word: str) -> Outcome:
    """Train, unfreeze, train on, write by hand, leave a parameter out of a step, freeze, and train on."""
    names = [name for name, parameter in model().items() if parameter.requires_grad]
    with ranks(world, dtype, word) as trained:
        for step in range(2):
            trained.update(gradients(step, dtype, names))
        trained.train([*names, *FROZEN])
        trained.update(gradients(2, dtype, [*names, *FROZEN]))
        trained.write(lambda name, values: values.mul_(0.5).add_(len(name)))
        trained.update(gradients(3, dtype, [*names[1:], *FROZEN]))
        trained.train([*names[2:], *FROZEN])
        trained.update(gradients(4, dtype, [*names[2:], *FROZEN]))
        return trained.outcome()


@pytest.mark.parametrize("name", FORMATS)
def test_bits(name: str) -> None:
    dtype, word = FORMATS[name]
    expected = run(1, dtype, word)
    assert not any(value.isnan().any() for value in (*expected.values.values(), *expected.state.values()))
    for world in WORLDS:
        found = run(world, dtype, word)
        for key, value in expected.values.items():
            assert torch.equal(found.values[key], value), (world, key)
        assert found.state.keys() == expected.state.keys()
        for state, value in expected.state.items():
            assert torch.equal(found.state[state], value), (world, state)


@pytest.mark.parametrize("world", WORLDS)
def test_shards_cut_parameters_in_the_middle(world: int) -> None:
    with ranks(world, torch.float32, "exact") as trained:
        stretches = [segment.stretch for unit in trained.units for segment in unit.segments if segment.name == "emb"]
        assert sum(len(stretch) for stretch in stretches) == 509 * 24
        assert sum(0 < len(stretch) < 509 * 24 for stretch in stretches) >= 2
        for store, unit in zip(trained.stores, trained.units, strict=True):
            assert sum(len(bytes_of(store, key)) for key in unit.keys) == unit.layout.shard_nbytes


def world_is_dropped_in_relayout(patch: pytest.MonkeyPatch) -> None:
    real = UnitLayout.with_trainable
    patch.setattr(UnitLayout, "with_trainable", lambda layout, names: replace(real(replace(layout, world=1), names)))


def state_does_not_follow(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OptimizerState, "follow", lambda *_: None)


def pieces_of_other_ranks_are_written(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RigComm, "shard_of", lambda comm, whole: whole[: whole.numel() // comm.world])


@pytest.mark.parametrize(
    "mutant", [world_is_dropped_in_relayout, state_does_not_follow, pieces_of_other_ranks_are_written]
)
def test_a_mutant_dies(mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    with pytest.raises((AssertionError, TieredError, KeyError, RuntimeError, ValueError)):
        test_bits("fp32")

"""Checkpoints of the caller's over regions of several units: the bits and the forwards of plain PyTorch.

At the smallest budget, with everything driven out of DRAM between forward and backward and after each step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from tests.models import GPT, Block, Case, Table, Vectors, batch_of_tokens, batch_of_vectors
from tests.pairwise import pairwise
from tests.reference import Recipe, train
from tests.zero.training import SEED, assert_same, debug_store, reference, smallest_budget, start

NUM_BLOCKS = 4
REGION = 2
DTYPES = {"fp32": None, "bf16": torch.bfloat16}

KINDS = {"non_reentrant": False, "reentrant": True}
UPDATES = ("step", "backward")
WORDS = ("keep", "recompute", "swap")

every_kind = pytest.mark.parametrize("use_reentrant", KINDS.values(), ids=KINDS)
every_update = pytest.mark.parametrize("update", UPDATES)


def count_forwards(model: nn.Module) -> Counter[str]:
    """Have the forwards of each block counted, second ones included."""
    counts: Counter[str] = Counter()
    for name, module in model.named_modules():
        if isinstance(module, Block):
            module.register_forward_pre_hook(lambda _, __, name=name: counts.update([name]))
    return counts


def assert_trains_as_in_memory(case: Case, recipe: Recipe, update: str, directory: Path, **options: Any) -> None:
    torch.manual_seed(SEED)
    plain = case.build()
    torch.manual_seed(SEED + 1)
    expected_forwards = count_forwards(plain)
    expected = train(plain, case.batch, case.loss, recipe)
    nbytes = smallest_budget(case, recipe, update, directory / "probe")
    with debug_store(directory / "store", nbytes, durable=False) as store:
        session = start(case, recipe, store, update, **options)
        session.is_squeezed = True
        forwards = count_forwards(session.model)
        assert_same(session.run(), expected)
        assert forwards == expected_forwards


@pairwise(
    region={str(num): num for num in (1, REGION, NUM_BLOCKS)}, use_reentrant=KINDS, param_dtype=DTYPES, update=UPDATES
)
def test_regions_of_several_units(
    region: int, use_reentrant: bool, param_dtype: torch.dtype | None, update: str, quick_path: Path
) -> None:
    """With dropout, which draws the same random numbers again."""
    case = Case(partial(GPT, NUM_BLOCKS, around=use_reentrant, region=region), batch_of_tokens)
    assert_trains_as_in_memory(case, Recipe(param_dtype=param_dtype, num_steps=2), update, quick_path)


def whole_model(model: nn.Module, batch: tuple[Tensor, Tensor], *, use_reentrant: bool) -> Tensor:
    """The reentrant kind wants an input that requires a gradient."""
    anchor = torch.zeros((), requires_grad=True)
    loss: Tensor = checkpoint(lambda _, *inputs: model(*inputs), anchor, *batch, use_reentrant=use_reentrant)
    return loss


def parts_of_a_loop(model: Any, batch: tuple[Tensor, Tensor], *, use_reentrant: bool) -> Tensor:
    """A training loop that calls the blocks itself, and touches weights between them."""
    tokens, targets = batch
    x = model.emb(tokens)

    def part(first: int, x: Tensor) -> Tensor:
        for block in model.blocks[first : first + REGION]:
            x = block(x) + model.pos.weight[: x.shape[1]]
        return x @ model.head.weight.t() @ model.head.weight

    for first in range(0, NUM_BLOCKS, REGION):
        x = checkpoint(partial(part, first), x, use_reentrant=use_reentrant)
    return F.cross_entropy(F.linear(x, model.emb.weight).flatten(0, -2).float(), targets.flatten())


def parts_in_parts(model: Any, batch: tuple[Tensor, Tensor], *, use_reentrant: bool) -> Tensor:
    """Checkpoints inside checkpoints, those of the non-reentrant kind inside either."""

    def part(first: int, num: int, x: Tensor) -> Tensor:
        if num == 1:
            y: Tensor = model.blocks[first](x)
            return y
        for half in (first, first + num // 2):
            x = checkpoint(partial(part, half, num // 2), x, use_reentrant=False)
        return x

    x = checkpoint(partial(part, 0, NUM_BLOCKS), model.emb(batch[0]), use_reentrant=use_reentrant)
    return F.cross_entropy(model.head(x).flatten(0, -2).float(), batch[1].flatten())


@pairwise(
    loss={part.__name__: part for part in (whole_model, parts_of_a_loop, parts_in_parts)},
    use_reentrant=KINDS, param_dtype=DTYPES, update=UPDATES, word=WORDS,
)  # fmt: skip
@pytest.mark.usefixtures("swap_all")
def test_regions_that_the_training_loop_makes(
    loss: Callable[..., Tensor],
    use_reentrant: bool,
    param_dtype: torch.dtype | None,
    update: str,
    word: str,
    quick_path: Path,
) -> None:
    """A checkpoint knows saved tensors by their number, which counts weights too."""
    case = Case(partial(GPT, NUM_BLOCKS), batch_of_tokens, partial(loss, use_reentrant=use_reentrant))
    recipe = Recipe(param_dtype=param_dtype, num_steps=2)
    assert_trains_as_in_memory(case, recipe, update, quick_path, activations=word)


class FrozenParts(GPT):
    """Blocks of which every second one is frozen, as under adapters, and one with a frozen matrix."""

    def __init__(self, **options: Any) -> None:
        super().__init__(NUM_BLOCKS, **options)
        for frozen in (self.emb, *self.blocks[::2], self.blocks[1].fc):
            frozen.requires_grad_(False)


@every_update
@every_kind
def test_a_region_with_frozen_units(use_reentrant: bool, update: str, quick_path: Path) -> None:
    case = Case(partial(FrozenParts, around=use_reentrant, region=REGION), batch_of_tokens)
    assert_trains_as_in_memory(case, Recipe(num_steps=2), update, quick_path)


@every_kind
@pytest.mark.parametrize("word", ["recompute", "swap"])
def test_a_region_under_other_words(word: str, use_reentrant: bool, quick_path: Path, swap_all: None) -> None:
    """A unit does not recompute on its own inside a region: it would run three times."""
    case = Case(partial(GPT, NUM_BLOCKS, around=use_reentrant, region=REGION), batch_of_tokens)
    assert_trains_as_in_memory(case, Recipe(num_steps=2), "step", quick_path, activations=word)


class Straight(nn.Module):
    """A bias whose gradient is complete before the recomputation, which needs its values."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(24))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x + self.bias.detach()) + self.bias


class CheckpointedVectors(Vectors):
    def __init__(self) -> None:
        super().__init__(Straight)

    def apply_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


@pytest.mark.parametrize("word", ["keep", "recompute"])
def test_a_unit_is_not_updated_before_it_has_been_recomputed(word: str, tmp_path: Path) -> None:
    """By the caller's checkpoint, or by tiered's."""
    case = Case(CheckpointedVectors if word == "keep" else lambda: Vectors(Straight), batch_of_vectors)
    with debug_store(tmp_path, durable=False) as store:
        assert_same(start(case, Recipe(), store, "backward", activations=word).run(), reference(case, Recipe()))


class WeightsHandedOut(Vectors):
    """Units that return views of their weights, and others that use these, each called by the region itself."""

    def __init__(self) -> None:
        super().__init__(Table)

    def apply_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            weight, bias, transposed = block(x.shape[0])
            x = torch.tanh(self.last(x @ weight) + bias) @ transposed
        return x


def tables_in_a_region(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    y: Tensor = checkpoint(model.apply_blocks, batch[0].requires_grad_(), use_reentrant=False)
    return y.square().mean()


def test_a_region_of_units_that_hand_out_their_weights(tmp_path: Path) -> None:
    case = Case(WeightsHandedOut, batch_of_vectors, tables_in_a_region)
    torch.manual_seed(SEED)
    plain = case.build()
    expected = train(plain, case.batch, case.loss, Recipe())
    with debug_store(tmp_path, durable=False) as store:
        assert_same(start(case, Recipe(), store).run(), expected)


# -- pairs of hooks of the caller's own ----------------------------------------------------------------------------


class Packing:
    """A pair of hooks that counts what it is given and hands it back, as a profiler does."""

    def __init__(self) -> None:
        self.shapes: list[torch.Size] = []
        self.num_unpacked = 0

    def hooks(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Tensor:
        self.shapes.append(tensor.shape)
        return tensor

    def _unpack(self, tensor: Tensor) -> Tensor:
        self.num_unpacked += 1
        return tensor


class Paired(GPT):
    """A caller's pair inside each region (``is_inside``), or around all of them."""

    def __init__(self, pair: Callable[[], Any], *, is_inside: bool) -> None:
        super().__init__(NUM_BLOCKS, around=False, region=REGION)
        self.pair, self.is_inside = pair, is_inside

    def run(self, first: int, x: Tensor) -> Tensor:
        if not self.is_inside:
            return super().run(first, x)
        with self.pair():
            return super().run(first, x)

    def logits(self, tokens: Tensor) -> Tensor:
        if self.is_inside:
            return super().logits(tokens)
        with self.pair():
            return super().logits(tokens)


@every_update
@pytest.mark.parametrize("is_inside", [True, False], ids=["inside", "around"])
def test_a_callers_pair_and_regions(is_inside: bool, update: str, tmp_path: Path) -> None:
    recipe = Recipe(num_steps=2)
    for name in ("save_on_cpu", "counting"):
        seen: list[list[Packing]] = []

        def new_pair(seen: list[list[Packing]] = seen) -> Any:
            seen[-1].append(Packing())
            return seen[-1][-1].hooks()

        pair = save_on_cpu if name == "save_on_cpu" else new_pair
        case = Case(partial(Paired, pair, is_inside=is_inside), batch_of_tokens)
        torch.manual_seed(SEED)
        plain = case.build()
        torch.manual_seed(SEED + 1)
        seen.append([])
        expected = train(plain, case.batch, case.loss, recipe)
        seen.append([])
        with debug_store(tmp_path / name, durable=False) as store:
            assert_same(start(case, recipe, store, update).run(), expected)
        theirs, ours = ([(each.shapes, each.num_unpacked) for each in pairs] for pairs in seen)
        assert ours == theirs

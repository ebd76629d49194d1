"""Training through the tiers gives the bits of plain PyTorch in memory.

Every run has an arena that poisons what is released and never leases an address twice.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiered
from tests.models import CASES, GPT, Case, batch_of_tokens
from tests.pairwise import pairwise
from tests.reference import MasterAdamW, Recipe, Trained, train
from tests.zero.training import (
    SEED,
    assert_same,
    counted_swaps,
    debug_store,
    reference,
    reference_of,
    smallest_budget,
    start,
)

TWO_THREADS = True  # sums that two of them divide are among the bits

DTYPES = {"fp32": None, "bf16": torch.bfloat16}
UPDATES = ("step", "backward")

FIRST_LAYERS = {"emb", "first", "pos"}  # units that no backward reads: their input has no gradient

every_dtype = pytest.mark.parametrize("param_dtype", DTYPES.values(), ids=DTYPES)
every_update = pytest.mark.parametrize("update", UPDATES)


@pairwise(name=CASES.keys(), param_dtype=DTYPES, update=UPDATES)
def test_bits_with_the_smallest_budget(
    name: str, param_dtype: torch.dtype | None, update: str, quick_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything is driven out after each forward and step; counters prove that each unit was swapped in again."""
    case, recipe = CASES[name], Recipe(param_dtype=param_dtype, num_steps=3)
    expected = reference_of(name, param_dtype, num_steps=3)
    nbytes = smallest_budget(case, recipe, update, quick_path / "probe")
    with counted_swaps(monkeypatch) as swaps, debug_store(quick_path / "store", nbytes, durable=False) as store:
        session = start(case, recipe, store, update)
        session.is_squeezed = True
        session.squeeze()
        assert_same(session.run(), expected)
        units = {parameter.segment.unit for parameter in session.model.parameters()}  # type: ignore[attr-defined]
    for unit in units:
        # What an update behind the next forward has swapped in, that forward finds.
        # The units that the loop itself uses last stay in their slots from then to the backward.
        stays = name == "penalty_in_loop" and unit.name in ("root", "blocks.3")
        least = 1 if update == "step" or unit.name in FIRST_LAYERS or stays else 2
        num_updates = max(expected.num_updates.get(segment.name, 0) for segment in unit.segments)
        assert swaps[unit.key] >= least * num_updates, f"{unit.name}: {num_updates} updates, {swaps[unit.key]} swaps in"


@every_update
@every_dtype
@pytest.mark.parametrize("name", ["gpt", "cnn", "lstm", "data_dependent_order", "mixed_dtypes"])
def test_bits_with_a_roomy_budget(name: str, param_dtype: torch.dtype | None, update: str, tmp_path: Path) -> None:
    with debug_store(tmp_path, durable=False) as store:
        session = start(CASES[name], Recipe(param_dtype=param_dtype), store, update)
        assert_same(session.run(), reference_of(name, param_dtype))


# -- features of the loop ------------------------------------------------------------------------------------------


def by_decay(model: nn.Module) -> list[dict[str, Any]]:
    """Groups that cut through every unit: no decay and other betas for vectors, another rate for the biases."""
    named = list(model.named_parameters())
    return [
        {"params": [p for _, p in named if p.ndim >= 2], "weight_decay": 0.3},
        {"params": [p for n, p in named if p.ndim < 2 and "bias" not in n], "weight_decay": 0.0, "betas": (0.8, 0.9)},
        {"params": [p for n, p in named if p.ndim < 2 and "bias" in n], "weight_decay": 0.0, "lr": 3e-3},
    ]


def cosine(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)


def generate(model: nn.Module, step: int) -> list[Tensor]:
    """Evaluate without gradients and generate a few tokens, greedily, between two steps."""
    model.eval()
    with torch.no_grad():
        loss = model(*batch_of_tokens(1000 + step))
        tokens = batch_of_tokens(2000 + step)[0][:, :4]
        for _ in range(3):
            tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], 1)
    with torch.inference_mode():
        logits = model(tokens)
    model.train()
    return [loss, tokens, logits.clone()]


FEATURES: dict[str, tuple[str, Recipe]] = {
    "clipping": ("gpt", Recipe(max_norm=0.5)),
    "clipping_that_changes_nothing": ("gpt", Recipe(max_norm=1e6)),
    "accumulation": ("gpt", Recipe(num_micro_steps=3)),
    "schedule": ("gpt", Recipe(schedule=cosine)),
    "groups": ("gpt", Recipe(param_groups=by_decay)),
    "generation": ("gpt", Recipe(between=generate)),
    "accumulation_with_recompute": ("checkpoint_around", Recipe(num_micro_steps=3)),
    "accumulation_with_nested_backward": ("checkpoint_inside_reentrant", Recipe(num_micro_steps=3)),
    "accumulation_with_unused": ("unused_parameter", Recipe(num_micro_steps=3)),
    "accumulation_in_changing_order": ("data_dependent_order", Recipe(num_micro_steps=3)),
    "clipping_with_unused": ("unused_parameter", Recipe(max_norm=0.5)),
    "clipping_with_ties": ("tied_head", Recipe(max_norm=0.5)),
    "all_with_a_frozen_part": (
        "frozen_part",
        Recipe(max_norm=0.5, num_micro_steps=3, schedule=cosine, param_groups=by_decay, between=generate),
    ),
    "all_but_clipping_with_a_frozen_part": (
        "frozen_part",
        Recipe(num_micro_steps=3, schedule=cosine, param_groups=by_decay, between=generate),
    ),
}


@cache
def reference_with(feature: str, param_dtype: torch.dtype | None) -> Trained:
    """Return what both updates are compared with."""
    name, recipe = FEATURES[feature]
    return reference(CASES[name], replace(recipe, param_dtype=param_dtype, num_steps=3))


@pairwise(feature=FEATURES.keys(), param_dtype=DTYPES, update=UPDATES)
def test_bits_with(feature: str, param_dtype: torch.dtype | None, update: str, quick_path: Path) -> None:
    """Each with the smallest budget."""
    name, recipe = FEATURES[feature]
    recipe = replace(recipe, param_dtype=param_dtype, num_steps=3)
    if update == "backward" and recipe.max_norm is not None:
        with debug_store(quick_path, durable=False) as store, pytest.raises(tiered.UsageError, match='update="step"'):
            start(CASES[name], recipe, store, update).run()
        return
    nbytes = smallest_budget(CASES[name], recipe, update, quick_path / "probe")
    with debug_store(quick_path / "store", nbytes, durable=False) as store:
        assert_same(start(CASES[name], recipe, store, update).run(), reference_with(feature, param_dtype))


class Turned(nn.Module):
    """A product of which torch asks whether its second factor requires a gradient, to choose how to compute it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 5))

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2) @ self.weight.t()


def test_inference_mode_has_the_bits_of_torch_and_leaves_nothing_behind(tmp_path: Path) -> None:
    torch.manual_seed(SEED)
    plain, x = nn.Sequential(*(Turned() for _ in range(3))), torch.randn(3, 5, 5)
    with torch.inference_mode():
        expected = plain(x)
    with debug_store(tmp_path, durable=False) as store:
        model = tiered.shard(plain, store)
        with torch.inference_mode():
            assert torch.equal(model(x), expected)
            with tiered.unsharded(model):
                assert not any(parameter.is_inference() for parameter in model.parameters())
        model(x).sum().backward()


# -- the tie -------------------------------------------------------------------------------------------------------

TIE_BITS = 0x8000


def wide() -> nn.Module:
    """Return 2.6 M parameters in five units."""
    blocks = nn.ModuleList(nn.Linear(724, 724) for _ in range(5))

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = blocks

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = torch.tanh(block(x.to(block.weight.dtype)))
            return x.float().square().mean()

    return Wide()


def wide_batch(index: int) -> tuple[Tensor]:
    return (torch.randn(2, 724, generator=torch.Generator().manual_seed(index)),)


WIDE, WIDE_RECIPE = Case(wide, wide_batch), Recipe(param_dtype=torch.bfloat16, num_steps=20)


@pytest.fixture(scope="module")
def trained_over_ties() -> Trained:
    """Train in memory, and see masters lie on the tie."""
    num_ties = 0

    def count_ties(step: int, optimizer: MasterAdamW) -> None:
        nonlocal num_ties
        for master in optimizer.masters.values():
            num_ties += int(((master.detach().view(torch.int32) & 0x1FFFF) == TIE_BITS).sum())

    torch.manual_seed(SEED)
    model = WIDE.build()
    torch.manual_seed(SEED + 1)
    expected = train(model, WIDE.batch, WIDE.loss, WIDE_RECIPE, after_step=count_ties)
    num_params = sum(parameter.numel() for parameter in model.parameters())
    assert num_params > 2_600_000
    assert num_ties > 20 * num_params / 131_072 / 2, "the tie that this test is about did not occur"
    return expected


@every_update
def test_bits_when_masters_lie_on_ties(update: str, trained_over_ties: Trained, tmp_path: Path) -> None:
    """1 master in 131,072 has a remainder of +0x8000 below an even high half, which 16 signed bits cannot hold."""
    with debug_store(tmp_path, 16 << 20, durable=False) as store:
        assert_same(start(WIDE, WIDE_RECIPE, store, update).run(), trained_over_ties)


@pytest.mark.parametrize("hold", [0, 1 << 14, "auto"])
def test_bits_whatever_is_held(hold: Any, tmp_path: Path) -> None:
    case, recipe = Case(lambda: GPT(3), batch_of_tokens), Recipe(num_steps=2)
    with debug_store(tmp_path, 2 << 20, durable=False) as store:
        assert_same(start(case, recipe, store, hold=hold).run(), reference(case, recipe))

"""The words for what autograd saves in a forward; the bits of plain PyTorch under each of them."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiered
from tests.models import CASES, Case, Vectors, batch_of_vectors
from tests.pairwise import pairwise
from tests.reference import Recipe
from tests.zero.saved_tensors import WORDS, engine_of, swapped_of, wide_vectors
from tests.zero.training import assert_same, checkpointed, debug_store, reference, reference_of, smallest_budget, start
from tiered.zero.activations.activations import words_of

RECIPES = {"fp32-backward": (None, "backward"), "bf16-step": (torch.bfloat16, "step")}


@pairwise(name=CASES.keys(), word=["recompute", "swap"], recipe_name=RECIPES.keys())
def test_bits_with_the_smallest_budget(
    name: str, word: str, recipe_name: str, quick_path: Path, swap_all: None
) -> None:
    """Everything is driven out between forward and backward."""
    param_dtype, update = RECIPES[recipe_name]
    case, recipe = CASES[name], Recipe(param_dtype=param_dtype, num_steps=2)
    nbytes = smallest_budget(case, recipe, update, quick_path / "probe")
    expected = reference_of(name, param_dtype, num_steps=2) if word == "swap" else reference(checkpointed(case), recipe)
    with debug_store(quick_path / "store", nbytes, durable=False) as store:
        session = start(case, recipe, store, update, activations=word)
        session.is_squeezed = True
        assert_same(session.run(), expected)
        assert (swapped_of(session).num_swapped > 0) == (word == "swap")
        session.model.zero_grad()
        swapped_of(session).sweep()
        assert not [key for key in store if key.startswith("model/activation/")]


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("name", ["gpt", "cnn", "checkpoint_around", "checkpoint_inside_reentrant"])
def test_bits_with_micro_steps_and_a_roomy_budget(name: str, word: str, tmp_path: Path, swap_all: None) -> None:
    case, recipe = CASES[name], Recipe(num_micro_steps=2, max_norm=0.5, num_steps=2)
    with debug_store(tmp_path) as store:
        session = start(case, recipe, store, activations=word, hold=0)
        assert_same(session.run(), reference(checkpointed(case) if word == "recompute" else case, recipe))
        store.commit({})
        assert not [record for record in store.records() if "activation" in record.name and record.generation > 0]


# -- autocast ------------------------------------------------------------------------------------------------------


def autocast_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(*batch)


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("name", ["gpt", "tied_head", "called_twice"])
def test_bits_under_autocast(name: str, word: str, tmp_path: Path, swap_all: None, caplog: Any) -> None:
    case, recipe = replace(CASES[name], loss=autocast_loss), Recipe()
    with caplog.at_level(logging.WARNING, "tiered"), debug_store(tmp_path, durable=False) as store:
        session = start(case, recipe, store, activations=word)
        assert_same(session.run(), reference(case, recipe))
    warnings = [record.message for record in caplog.records if "autocast" in record.message]
    assert len(warnings) == (word in ("keep", "swap")), warnings


# -- backwards of other kinds --------------------------------------------------------------------------------------


def twice(loss: Tensor, model: nn.Module) -> list[Tensor]:
    """Retain the graph, then use it again."""
    loss.backward(retain_graph=True)
    loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def penalised(loss: Tensor, model: nn.Module) -> list[Tensor]:
    """Differentiate twice: a penalty on the gradient of the loss."""
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    sum(gradient.square().sum() for gradient in gradients).backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def without_accumulation(loss: Tensor, model: nn.Module) -> list[Tensor]:
    return [gradient.clone() for gradient in torch.autograd.grad(loss, list(model.parameters()))]


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("differentiate", [twice, penalised, without_accumulation])
def test_gradients_of(
    differentiate: Callable[[Tensor, nn.Module], list[Tensor]], word: str, tmp_path: Path, swap_all: None
) -> None:
    torch.manual_seed(3)
    plain = Vectors()
    expected = differentiate(plain(*batch_of_vectors(0)), plain)
    with debug_store(tmp_path, durable=False) as store:
        torch.manual_seed(3)
        model = tiered.shard(Vectors(), store, activations=word)
        loss = model(*batch_of_vectors(0))
        found = differentiate(loss, model)
        assert len(found) == len(expected) > 0
        assert all(map(torch.equal, found, expected))
        model.zero_grad()
        del loss, found


# -- the words -----------------------------------------------------------------------------------------------------


def test_auto_keeps_what_fits_and_swaps_the_rest(tmp_path: Path) -> None:
    case, recipe = Case(lambda: Vectors(num_blocks=8), wide_vectors), Recipe(num_steps=3)
    expected = reference(case, recipe)
    for room, is_over in ((None, False), (1 << 20, True), (0, True)):
        with debug_store(tmp_path / str(room), 4 << 20, durable=False) as store:
            session = start(case, recipe, store, activations="auto", hold=0)
            activations = engine_of(session).activations
            activations.most_kept_bytes = room
            assert_same(session.run(), expected)
            assert (swapped_of(session).num_swapped > 0) == is_over
            assert (len(activations.swapping) > 0) == is_over
            assert (len(activations.swapping) < 8) == (room != 0)


def test_words_of_units() -> None:
    modules = {"root": nn.Identity(), "a": nn.Identity(), "b.c": nn.Linear(1, 1)}
    assert words_of("swap", modules) == dict.fromkeys(modules, "swap")
    assert words_of("recompute", modules) == {"root": "keep", "a": "recompute", "b.c": "recompute"}
    assert words_of({"a": "keep"}, modules) == {"root": "auto", "a": "keep", "b.c": "auto"}
    by_kind = words_of(lambda name, module: "swap" if isinstance(module, nn.Linear) else "keep", modules)
    assert by_kind == {"root": "keep", "a": "keep", "b.c": "swap"}


@pytest.mark.parametrize(
    ("rule", "error", "match"),
    [
        ("often", tiered.UsageError, "often"),
        ({"b.d": "keep"}, tiered.UsageError, r"is it b\.c"),
        ({"root": "recompute"}, tiered.UsageError, "root"),
        (7, TypeError, "7"),
        (lambda name, module: None, tiered.UsageError, "None"),
    ],
)
def test_other_words_are_refused(rule: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        words_of(rule, {"root": nn.Identity(), "b.c": nn.Identity()})

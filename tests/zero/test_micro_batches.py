"""Micro-batches that take turns at the units give the bits of ordinary accumulation, and read parameters once."""

import copy
import random
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tiered
from tests.models import CASES, GPT, MLP, Case, Stage, Vectors, batch_of_tokens, batch_of_vectors
from tests.pairwise import pairwise
from tests.reference import Recipe, Trained
from tests.transformer import WIDTH, cross_entropy
from tests.zero.training import (
    SEED,
    Session,
    assert_same,
    counted_swaps,
    debug_store,
    reference,
    smallest_budget,
    start,
)
from tiered.store.residency.working_set import WorkingSet

DTYPES = {"fp32": None, "bf16": torch.bfloat16}
UPDATES = ("step", "backward")

QUALIFYING = [name for name in CASES if not name.startswith("cnn")]


def run(session: Session) -> Trained:
    """Train as ``Session.run`` does, the micro-steps of each step taking turns."""
    recipe, num = session.recipe, session.recipe.num_micro_steps
    for step in range(recipe.num_steps):
        batches = [session.case.batch(step * num + index) for index in range(num)]
        losses = tiered.micro_batches(
            session.model, batches, loss=lambda model, *batch: session.case.loss(model, batch)
        )
        if session.is_squeezed:
            session.squeeze()
        torch.stack(losses).mean().backward()
        session.trained.losses += [loss.detach().clone() for loss in losses]
        del losses
        if recipe.max_norm is not None:
            session.trained.norms.append(tiered.clip_grad_norm_(session.model, recipe.max_norm).clone())
        session.optimizer.step()
        session.optimizer.zero_grad()
    return session.collect()


def taking_turns(param_dtype: torch.dtype | None) -> Recipe:
    return Recipe(param_dtype=param_dtype, num_micro_steps=3, num_steps=2)


@cache
def reference_in_turns(name: str, param_dtype: torch.dtype | None) -> Trained:
    """Return what both updates are compared with."""
    return reference(CASES[name], taking_turns(param_dtype))


@pytest.mark.filterwarnings("ignore:grad and param do not obey")  # torch compares with the strides of a placeholder
@pairwise(name=QUALIFYING, param_dtype=DTYPES, update=UPDATES)
def test_bits_with_the_smallest_budget(
    name: str, param_dtype: torch.dtype | None, update: str, quick_path: Path
) -> None:
    case, recipe = CASES[name], taking_turns(param_dtype)
    nbytes = smallest_budget(case, recipe, update, quick_path / "probe")
    with debug_store(quick_path / "store", nbytes, durable=False) as store:
        session = start(case, recipe, store, update)
        session.is_squeezed = True
        assert_same(run(session), reference_in_turns(name, param_dtype))


# -- the loop's features -------------------------------------------------------------------------------------------


def small(num_blocks: int = 2, **options: Any) -> GPT:
    return GPT(num_blocks, **options)


def quiet() -> GPT:
    """Return a GPT that draws no random numbers."""
    model = GPT(4)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def of_different_length(index: int) -> tuple[Tensor, Tensor]:
    """Return one to four rows of five to fourteen tokens, some targets of which are to be ignored."""
    tokens, targets = batch_of_tokens(index, 1 + index % 4, 5 + index * 3 % 10)
    return tokens, targets.masked_fill(targets % 5 == 0, -100)


def ignoring(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), ignore_index=-100)


def with_autocast(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(*batch)


class Lottery(nn.Module):
    """How many random numbers a forward draws depends on the numbers it draws: small normals, skipped blocks."""

    def __init__(self) -> None:
        super().__init__()
        random.seed(SEED)
        np.random.seed(SEED)
        self.first, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = F.dropout(block(x), 0.2) if torch.rand(()) < 0.5 else x + torch.randn(3).sum()
            x = x * float(np.random.rand()) + random.random()
        return F.mse_loss(x, y)


FEATURES: dict[str, tuple[Case, Recipe]] = {
    "one": (Case(small, batch_of_tokens), Recipe(num_micro_steps=1)),
    "eight": (Case(small, batch_of_tokens), Recipe(num_micro_steps=8, num_steps=2)),
    "clipping": (Case(small, batch_of_tokens), Recipe(num_micro_steps=3, max_norm=0.5)),
    "lengths_and_ignored_targets": (Case(small, of_different_length, ignoring), Recipe(num_micro_steps=4)),
    "autocast": (Case(small, batch_of_tokens, with_autocast), Recipe(num_micro_steps=3)),
    "no_random_numbers": (Case(quiet, batch_of_tokens), Recipe(num_micro_steps=3, num_steps=2)),
    "unforeseeable_random_numbers": (Case(Lottery, batch_of_vectors), Recipe(num_micro_steps=3)),
    "experts": (CASES["data_dependent_order"], Recipe(num_micro_steps=8, num_steps=2)),
    "recompute_of_tied_reentrant": (
        Case(partial(small, head="tied", around=True), batch_of_tokens),
        Recipe(num_micro_steps=3, num_steps=2),
    ),
}


@pytest.mark.filterwarnings("ignore:.*use_reentrant")
@pairwise(feature=FEATURES.keys(), param_dtype=DTYPES, update=UPDATES)
def test_bits_with(feature: str, param_dtype: torch.dtype | None, update: str, quick_path: Path) -> None:
    case, recipe = FEATURES[feature]
    if (update == "backward" and recipe.max_norm is not None) or (feature == "autocast" and param_dtype):
        return  # refused, or the same as without
    if feature == "unforeseeable_random_numbers" and param_dtype:
        return  # its inputs are fp32
    recipe = replace(recipe, param_dtype=param_dtype)
    with debug_store(quick_path, 2 << 20, durable=False) as store:
        session = start(case, recipe, store, update)
        assert_same(run(session), reference(case, recipe))
        drawn = torch.get_rng_state()
        reference(case, recipe)
    assert torch.equal(drawn, torch.get_rng_state()), "the generator is left as the plainest loop leaves it"


class Buffered(Stage):
    """A unit with units inside, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((WIDTH,), 1.5))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale)


KEEPING: dict[str, Case] = {
    **{name: CASES[name] for name in ("gpt", "tied_head", "nested_units", "checkpoint_inside", "lstm")},
    "buffers": Case(partial(Vectors, Buffered), batch_of_vectors, unit=(Buffered, MLP)),
}


@pairwise(name=KEEPING.keys(), update=UPDATES, activations=["recompute", "swap"])
def test_bits_whatever_becomes_of_activations(activations: str, update: str, name: str, quick_path: Path) -> None:
    recipe = Recipe(num_micro_steps=3, num_steps=2)
    with debug_store(quick_path, durable=False) as store:
        session = start(KEEPING[name], recipe, store, update, activations=activations)
        buffers = {name: id(buffer) for name, buffer in session.model.named_buffers()}
        assert_same(run(session), reference(KEEPING[name], recipe))
        assert {name: id(buffer) for name, buffer in session.model.named_buffers()} == buffers


def test_lanes_compute_with_the_number_of_threads_that_the_caller_has_set(quick_path: Path) -> None:
    torch.manual_seed(SEED)
    batches = [(torch.randn(64, 4096),) for _ in range(4)]
    model = nn.Sequential(nn.Linear(4096, 64), nn.Linear(64, 10))
    alone = copy.deepcopy(model)
    expected = [alone(*batch).square().mean() for batch in batches]
    for loss in expected:
        (loss / 4).backward()
    with debug_store(quick_path, durable=False) as store:
        sharded = tiered.shard(model, store)
        losses = tiered.micro_batches(sharded, batches, loss=lambda model, batch: model(batch).square().mean())
        torch.stack(losses).mean().backward()
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(losses, expected, strict=True))
        gradients = zip(sharded.parameters(), alone.parameters(), strict=True)
        assert all(torch.equal(ours.grad, theirs.grad) for ours, theirs in gradients)


def test_autocast_around_the_call(tmp_path: Path) -> None:
    case, losses = Case(small, batch_of_tokens), []
    for directory in (None, tmp_path):
        torch.manual_seed(SEED)
        batches = [case.batch(index) for index in range(3)]
        with debug_store(tmp_path, durable=False) if directory else nullcontext() as store:
            model = start(case, Recipe(), store).model if store else case.build()
            torch.manual_seed(SEED)
            with torch.autocast("cpu", torch.bfloat16):
                found = tiered.micro_batches(model, batches) if store else [model(*batch) for batch in batches]
            losses.append([loss.detach() for loss in found])
            del found
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*losses, strict=True))


def test_parameters_are_read_once_for_all(drive_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass reads a unit as often for eight micro-batches as for one; ordinary accumulation eight times as often."""
    case, num_reads = Case(quiet, batch_of_tokens), {}
    nbytes = smallest_budget(case, Recipe(), "backward", drive_path / "probe")
    for num, train in ((1, run), (8, run), (8, Session.run)):
        recipe = Recipe(num_micro_steps=num, num_steps=3)
        with counted_swaps(monkeypatch) as swaps, debug_store(drive_path / "store", nbytes, durable=False) as store:
            session = start(case, recipe, store, "backward", hold=0)
            session.is_squeezed = True
            session.squeeze()
            swaps.clear()
            monkeypatch.setattr(Session, "collect", lambda session: session.trained)
            monkeypatch.setattr(WorkingSet, "prefetch", lambda *_: 0)  # what is read ahead may be evicted again
            train(session)
            monkeypatch.undo()
        num_reads[num, train] = sum(count for key, count in swaps.items() if key.startswith("model/parameters/blocks"))
    per_pass = 2 * 4 * 3  # forward and backward, four units, three steps; what is written late is read once more
    assert num_reads[1, run] <= per_pass + 6
    assert num_reads[8, run] <= per_pass + 6
    turns = 2 * 3  # where forward ends, and where backward ends, the unit in use may stay
    assert num_reads[8, Session.run] >= 8 * (per_pass - turns)


def test_units_are_opened_once_for_all(tmp_path: Path) -> None:
    num_opened = []
    for num in (1, 2, 8):
        with debug_store(tmp_path, durable=False) as store:
            session = start(Case(quiet, batch_of_tokens), Recipe(num_micro_steps=num, num_steps=1), store)
            engine = next(session.model.parameters()).segment.unit.engine  # type: ignore[attr-defined]
            losses = tiered.micro_batches(session.model, [batch_of_tokens(index) for index in range(num)])
            forward = engine.open_units.num_swaps
            torch.stack(losses).mean().backward()
            num_opened.append((forward, engine.open_units.num_swaps - forward))
            del losses
    assert num_opened == [(5, 4)] * 3  # the root unit stays open


# -- what micro-batches and losses may be --------------------------------------------------------------------------


@pytest.mark.parametrize("is_sharded", [True, False])
def test_arguments_losses_and_plain_models(is_sharded: bool, tmp_path: Path) -> None:
    x, y = batch_of_tokens(0)

    def form(kind: str, model: nn.Module, *args: Tensor, **kwargs: Tensor) -> Any:
        loss = model(*args, **kwargs) if len(args) + len(kwargs) == 2 else cross_entropy(model(args[0]), y)
        return {"tensor": loss, "tuple": (loss, 1), "mapping": {"loss": loss}, "object": SimpleNamespace(loss=loss)}[
            kind
        ]

    with debug_store(tmp_path, durable=False) if is_sharded else nullcontext() as store:
        torch.manual_seed(SEED)
        model = start(Case(quiet, batch_of_tokens), Recipe(), store).model if store else quiet()
        expected = model(x, y).detach()
        for kind in ("tensor", "tuple", "mapping", "object"):
            batches = [(x, y), [x, y], {"tokens": x, "targets": y}, x]
            losses = tiered.micro_batches(model, iter(batches), loss=partial(form, kind))
            assert all(torch.equal(loss, expected) and loss.requires_grad for loss in losses)
            (losses[0] + losses[2]).backward()
            model.zero_grad()
            losses[1].backward()  # one by one works as well
            with pytest.raises(tiered.UsageError, match="second backward"):
                losses[1].backward()
            del losses
            model.zero_grad()
        with torch.no_grad():
            losses = tiered.micro_batches(model, [(x, y)] * 2)
        assert all(torch.equal(loss, expected) and not loss.requires_grad for loss in losses)


def test_plain_models_get_the_bits_of_accumulation() -> None:
    gradients = []
    for num in (0, 1):
        torch.manual_seed(SEED)
        model, batches = quiet(), [batch_of_tokens(index) for index in range(5)]
        if num:
            torch.stack(tiered.micro_batches(model, batches)).mean().backward()
        else:
            for batch in batches:
                (model(*batch) / 5).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*gradients, strict=True))

"""Programs whose blocks change what they are given, or what they keep: the bits of plain PyTorch when they run again.

A block is either recomputed from what it found, or kept, or refused by name, at its forward.
"""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import tiered
from tests.models import Case, batch_of_vectors
from tests.reference import Recipe
from tests.zero.changing_blocks import (
    RIGHT,
    Alternating,
    Averaged,
    Averaging,
    Block,
    Counting,
    CountingOn,
    InPlace,
    InPlaceByName,
    Iterating,
    Normed,
    Remembering,
    case_of,
    runs,
)
from tests.zero.saved_tensors import engine_of
from tests.zero.test_activations import autocast_loss
from tests.zero.training import assert_same, debug_store, reference, start
from tiered.errors import UsageError
from tiered.zero.activations import activations
from tiered.zero.activations.snapshot import Snapshot

pytestmark = pytest.mark.usefixtures("one_thread")

HOW = ("recompute", "auto under autocast", "auto without memory")


@pytest.fixture
def no_memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "how" in request.fixturenames and request.getfixturevalue("how") == "auto without memory":
        monkeypatch.setattr(activations, "free_memory", lambda: 0)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("block", RIGHT)
@pytest.mark.usefixtures("no_memory", "swap_all")
def test_a_block_runs_again_with_what_it_found(block: Any, how: str, tmp_path: Path) -> None:
    case, recipe = case_of(block, is_cast="autocast" in how), Recipe(num_steps=3)
    runs.clear()
    expected = reference(case, recipe)
    num_plain = runs[block.__name__]
    with debug_store(tmp_path, durable=False) as store:
        session = start(case, recipe, store, activations=how.split()[0])
        assert_same(session.run(), expected)
    once_less = num_plain // 3 if "memory" in how else 0  # the first step is measured
    assert runs[block.__name__] == 3 * num_plain - once_less


@pytest.mark.parametrize("how", HOW[:2])
def test_a_block_with_a_hook_that_sets_its_weight_runs_again_with_that(how: str, tmp_path: Path) -> None:
    case = Case(Normed, batch_of_vectors, **({"loss": autocast_loss} if "autocast" in how else {}))
    expected = reference(case, Recipe())
    with debug_store(tmp_path, durable=False) as store:
        torch.manual_seed(7)
        model = tiered.shard(Normed(), store, activations=how.split()[0])
        optimizer = tiered.AdamW(model.parameters(), **Recipe().adamw)
        for step in range(4):
            loss = case.loss(model, batch_of_vectors(step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            assert torch.equal(loss, expected.losses[step])


def test_what_a_block_keeps_is_there_once_after_the_backward(tmp_path: Path) -> None:
    for block, name, wanted in ((Counting, "num_calls", 2), (Counting, "is_late", False), (Averaging, "seen", None)):
        with debug_store(tmp_path / name, durable=False) as store:
            model: Any = start(case_of(block), Recipe(), store, activations="recompute").model
            loss = model(*batch_of_vectors(0))
            kept = getattr(model.blocks[0], name)
            loss.backward()
            assert getattr(model.blocks[0], name) is kept
            assert kept == wanted if wanted is not None else len(kept) == 1
            model.zero_grad()


def test_modules_whose_attributes_are_constants_are_not_looked_through_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as torch's own, with all that ``shard`` adds to them."""
    places: list[str] = []
    take = Snapshot.take
    with debug_store(tmp_path, durable=False) as store:
        layers = [nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(2)]
        model = tiered.shard(nn.Sequential(*layers), store, activations="recompute")
        for _ in range(2):
            places.clear()
            monkeypatch.setattr(Snapshot, "take", lambda self, value, at: places.append(at) or take(self, value, at))
            model(torch.randn(2, 4, 16)).sum().backward()
            model.zero_grad()
    assert places == ["argument 0"] * 2


def test_a_forward_without_a_backward_leaves_nothing(tmp_path: Path) -> None:
    """An object that a block was given, and now holds outputs; outputs in attributes, which the next forward finds."""
    gc.disable()  # a cycle through a graph is not collected anyway
    try:
        with debug_store(tmp_path, durable=False) as store:
            model: Any = start(case_of(Remembering), Recipe(), store, activations="recompute").model
            given, outputs = [], []
            for number in range(3):
                model(*batch_of_vectors(number))
                given.append(model.blocks[0].given)
                outputs.append(StorageWeakRef(model.blocks[0].last.untyped_storage()))
            assert [reference() for reference in given] == [None] * 3
            assert [output.expired() for output in outputs] == [True, False, False]
    finally:
        gc.enable()


# -- what cannot run again -----------------------------------------------------------------------------------------


REFUSED = {
    InPlace: r"wrote argument 0 in place",
    InPlaceByName: r"wrote argument 'pair' in place",
    Averaged: r"wrote blocks\.0\.means in place",
    CountingOn: r"blocks\.0\.count, of type count, cannot be copied",
    Iterating: r"argument 0, of type generator, cannot be copied",
}


@pytest.mark.parametrize("how", HOW[1:])
@pytest.mark.parametrize("block", REFUSED)
@pytest.mark.usefixtures("no_memory", "swap_all")
def test_auto_does_not_recompute_what_cannot_run_again(block: Any, how: str, tmp_path: Path) -> None:
    case, recipe = case_of(block, is_cast="autocast" in how), Recipe(num_steps=3)
    runs.clear()
    expected = reference(case, recipe)
    num_plain = runs[block.__name__]
    with debug_store(tmp_path, durable=False) as store:
        session = start(case, recipe, store, activations="auto")
        assert_same(session.run(), expected)
        assert len(engine_of(session).activations.refused) == 3
    assert runs[block.__name__] == 2 * num_plain


@pytest.mark.parametrize(("block", "match"), REFUSED.items())
def test_recompute_refuses_by_name_at_the_forward_what_cannot_run_again(block: Any, match: str, tmp_path: Path) -> None:
    case = case_of(block)
    with debug_store(tmp_path / "refused", durable=False) as store:
        model = start(case, Recipe(), store, activations="recompute").model
        with pytest.raises(UsageError, match=rf"unit 'blocks\.0': .*{match}.*'blocks\.0': 'keep'"):
            model(*batch_of_vectors(0))
    with debug_store(tmp_path / "kept", durable=False) as store:
        words = {f"blocks.{number}": "keep" for number in range(3)}
        assert_same(start(case, Recipe(), store, activations=words).run(), reference(case, Recipe()))


def test_a_second_forward_that_is_another_is_an_error_that_names_the_unit(tmp_path: Path) -> None:
    with debug_store(tmp_path, durable=False) as store:
        case = case_of(Alternating)
        model = start(case, Recipe(), store, activations="recompute").model
        loss = model(*batch_of_vectors(0))
        with pytest.raises(UsageError, match=r"unit 'blocks\.2'.*other tensors.*'keep'"):
            loss.backward()
        model.zero_grad()


def test_an_attribute_that_is_written_in_place_before_the_backward_is_refused(tmp_path: Path) -> None:
    with debug_store(tmp_path, durable=False) as store:
        model: Any = start(case_of(Averaging), Recipe(), store, activations="recompute").model
        mean = model.blocks[1].mean
        loss = model(*batch_of_vectors(0))
        mean.add_(1)
        with pytest.raises(UsageError, match=r"blocks\.1\.mean was written in place since the forward"):
            loss.backward()
        model.zero_grad()


# -- micro-batches that take turns ---------------------------------------------------------------------------------


class Outer(Block):
    """A unit with units in it, and with a list that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(Block() for _ in range(2))
        self.register_buffer("scale", torch.full((), 1.5))
        self.scales = [0.5]

    def forward(self, x: Tensor) -> Tensor:
        return Block.stack(self.inner, self.mix(x) * self.scale * self.scales[0])


def test_micro_batches_leave_the_attributes_as_they_were(tmp_path: Path) -> None:
    """A second forward is not interrupted by others, which would take what it was given for the module's own."""
    case, batches = case_of(Outer), [batch_of_vectors(number) for number in range(3)]
    with debug_store(tmp_path, 128 << 10, durable=False) as store:
        model: Any = tiered.shard(case.build(), store, unit=(Outer, Block), activations="recompute", hold=0)
        kept = [(block.scale, block.scales) for block in model.blocks]
        torch.stack(tiered.micro_batches(model, batches)).mean().backward()
        for block, (scale, scales) in zip(model.blocks, kept, strict=True):
            assert block.scale is scale
            assert block.scales is scales
        model.zero_grad()

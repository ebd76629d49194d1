"""Programs whose blocks change what they are given, or what they keep: the bits of plain PyTorch when they run again.

A block is either recomputed from what it found, or kept, or refused by name, at its forward.
"""

import collections
import dataclasses
import gc
import itertools
import random
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import tiered
from tests.models import Case, Vectors, batch_of_vectors
from tests.reference import Recipe
from tests.zero.saved_tensors import engine_of
from tests.zero.test_activations import autocast_loss
from tests.zero.training import assert_same, debug_store, reference, start
from tiered.errors import UsageError
from tiered.zero.activations import activations

WIDTH = 24

pytestmark = pytest.mark.usefixtures("one_thread")

runs: collections.Counter[str] = collections.Counter()
"""How often blocks ran, by class: what a module keeps itself is put back."""


class Block(nn.Module):
    """A Linear and something else; ``stack`` applies the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def mix(self, x: Tensor) -> Tensor:
        runs[type(self).__name__] += 1
        return x + torch.tanh(self.linear(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x)

    @staticmethod
    def stack(blocks: Any, x: Tensor) -> Tensor:
        for block in blocks:
            x = block(x)
        return x


# -- arguments that change -----------------------------------------------------------------------------------------


class Appending(Block):
    """Auxiliary losses, as of the gates of experts, in a list, a deque or an object of the caller's."""

    make: Callable[[], Any] = list

    def forward(self, x: Tensor, *, seen: Any) -> Tensor:
        y = self.mix(x) * (1 + len(seen))
        seen.append(y.square().mean())
        return y

    @classmethod
    def stack(cls, blocks: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        seen = cls.make()
        for block in blocks:
            x = block(x, seen=seen)
        assert len(seen) == len(blocks)
        return x + sum(seen)


class AppendingToDeque(Appending):
    make = collections.deque


class Seen:
    __slots__ = ("__weakref__", "items")

    def __init__(self) -> None:
        self.items: list[Tensor] = []

    def append(self, item: Tensor) -> None:
        self.items.append(item)

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.items)


class AppendingToObject(Appending):
    make = Seen


class Popping(Block):
    """Skip connections, as in a U-Net."""

    def forward(self, x: Tensor, skips: list[Tensor]) -> Tensor:
        return self.mix(x) + skips.pop()

    @staticmethod
    def stack(blocks: Any, x: Tensor) -> Tensor:
        skips = [x * number for number in range(len(blocks))]
        for block in blocks:
            x = block(x, skips)
        return x


class Writing(Block):
    """A dict that is passed along."""

    def forward(self, state: dict[str, Tensor]) -> None:
        state["h"] = self.mix(state["h"])

    @staticmethod
    def stack(blocks: Any, x: Tensor) -> Tensor:
        state = {"h": x}
        for block in blocks:
            block(state)
        return state["h"]


@dataclasses.dataclass
class Stream:
    h: Tensor
    counts: collections.OrderedDict[str, int]


class WritingToDataclass(Block):
    def forward(self, stream: Stream) -> Stream:
        stream.counts["calls"] += 1
        stream.h = self.mix(stream.h) / stream.counts["calls"]
        return stream

    @staticmethod
    def stack(blocks: Any, x: Tensor) -> Tensor:
        stream = Stream(x, collections.OrderedDict(calls=0))
        for block in blocks:
            assert block(stream) is stream
        return stream.h


class KeyValues:
    """A cache of keys, as of Hugging Face's models."""

    def __init__(self) -> None:
        self.layers: dict[int, Tensor] = {}

    def update(self, index: int, key: Tensor) -> Tensor:
        known = self.layers.get(index)
        self.layers[index] = key if known is None else torch.cat([known, key])
        return self.layers[index]


class Attending(Block):
    """Segment by segment, each attends to all before it."""

    def forward(self, x: Tensor, *, index: int, cache: KeyValues) -> Tensor:
        keys = cache.update(index, self.mix(x))
        return x + torch.softmax(x @ keys.T, -1) @ keys

    @staticmethod
    def stack(blocks: Any, x: Tensor) -> Tensor:
        cache, found = KeyValues(), []
        for part in x.split(2):
            for index, block in enumerate(blocks):
                part = block(part, index=index, cache=cache)
            found.append(part)
        assert len(cache.layers[0]) == len(x)
        return torch.cat(found)


class Mark:
    """What says that an argument was not given; asked for by ``is``, as in many a library."""

    def __init__(self, name: str) -> None:
        self.name = name


NOT_GIVEN = Mark("not given")


class Optional(Block):
    """Marks, numbers and namespaces, by which its forward goes, and which change afterwards."""

    def forward(self, x: Tensor, mark: Mark, *, config: types.SimpleNamespace) -> Tensor:
        y = self.mix(x) * config.scales[config.number]
        return y if mark is NOT_GIVEN else -y

    @staticmethod
    def stack(blocks: Any, x: Tensor) -> Tensor:
        config = types.SimpleNamespace(number=0, scales=[0.5])
        for number, block in enumerate(blocks):
            config.number = number
            config.scales.append(number + 2.0)
            x = block(x, NOT_GIVEN if number else Mark("given"), config=config)
        return x


class SelfAttention(nn.MultiheadAttention):
    """torch's own, which asks whether query, key and value are one object."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 2, batch_first=True)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        runs["SelfAttention"] += 1
        return super().forward(*args, **kwargs)

    @staticmethod
    def stack(blocks: Any, x: Tensor) -> Tensor:
        x = x.unsqueeze(0)
        for block in blocks:
            x = x + block(x, x, x, need_weights=False)[0]
        return x.squeeze(0)


# -- what a block keeps --------------------------------------------------------------------------------------------


class Counting(Block):
    """A warm-up by the number of calls, of which there are two before the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0
        self.is_late: bool | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        self.is_late = self.num_calls > 3
        return self.mix(x) / self.num_calls

    @staticmethod
    def stack(blocks: Any, x: Tensor) -> Tensor:
        return Block.stack(blocks, Block.stack(blocks, x))


class Averaging(Block):
    """A running mean in a plain attribute, and a list of what was seen."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(WIDTH)
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.seen.append(float(self.mean[0]))
        return self.mix(x - self.mean) * (1 + sum(self.seen))


class Recurrent(Block):
    """What it computed last, with its graph, is its state."""

    def __init__(self) -> None:
        super().__init__()
        self.state: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.state = self.mix(x if self.state is None else x + self.state)
        return self.state

    @staticmethod
    def stack(blocks: Any, x: Tensor) -> Tensor:
        for block in blocks:
            block.state = None
        return Block.stack(blocks, x) + Block.stack(blocks, x * 2)


class Drawing(Block):
    """Generators of its own, and one that is passed to it."""

    def __init__(self) -> None:
        super().__init__()
        self.torch_rng = torch.Generator().manual_seed(1)
        self.numpy_rng = np.random.default_rng(2)
        self.python_rng = random.Random(3)

    def forward(self, x: Tensor, rng: torch.Generator) -> Tensor:
        own = torch.rand((), generator=self.torch_rng) * float(self.numpy_rng.random()) * self.python_rng.random()
        return self.mix(x) * own * torch.rand((), generator=rng)

    @staticmethod
    def stack(blocks: Any, x: Tensor) -> Tensor:
        rng = torch.Generator().manual_seed(5)
        for block in blocks:
            x = block(x, rng)
        return x


def normed() -> nn.Module:
    """Return torch's old spectral norm, which sets a plain ``weight`` from outside before each call."""
    return nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))


class Normed(Vectors):
    """Two calls before one backward, as of the discriminator of a GAN."""

    def __init__(self) -> None:
        super().__init__(normed)

    def apply_blocks(self, x: Tensor) -> Tensor:
        return Block.stack(self.blocks, x) - Block.stack(self.blocks, x * 0.5)


RIGHT = [Appending, AppendingToDeque, AppendingToObject, Popping, Writing, WritingToDataclass, Attending]
RIGHT += [Optional, SelfAttention, Counting, Averaging, Recurrent, Drawing]


def case_of(block: Any, *, is_cast: bool = False) -> Case:
    class Stacked(Vectors):
        def __init__(self) -> None:
            super().__init__(block, num_blocks=3)

        def apply_blocks(self, x: Tensor) -> Tensor:
            stacked: Tensor = block.stack(self.blocks, x)
            return stacked

    return Case(Stacked, batch_of_vectors, **({"loss": autocast_loss} if is_cast else {}))


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


class Remembering(AppendingToObject):
    def forward(self, x: Tensor, *, seen: Any) -> Tensor:
        self.given = weakref.ref(seen)
        self.last = super().forward(x, seen=seen)
        return self.last


# -- what cannot run again -----------------------------------------------------------------------------------------


class InPlace(Block):
    """A ResNet that activates first: the block's own input is written."""

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(torch.relu_(x))

    @staticmethod
    def stack(blocks: Any, x: Tensor) -> Tensor:
        for block in blocks:
            x = x * 2 + block(x * 1.0)
        return x


class InPlaceByName(InPlace):
    def forward(self, *, pair: list[Tensor]) -> Tensor:  # type: ignore[override]
        return self.mix(pair[1].mul_(0.5))

    @staticmethod
    def stack(blocks: Any, x: Tensor) -> Tensor:
        for block in blocks:
            x = x + block(pair=[x, x * 1.0])
        return x


class Averaged(Block):
    """A running mean written in place, but no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.means = {"x": torch.zeros(WIDTH)}

    def forward(self, x: Tensor) -> Tensor:
        self.means["x"].lerp_(x.detach().mean(0).float(), 0.1)
        return self.mix(x - self.means["x"])


class Iterating(Block):
    def forward(self, parts: Iterator[Tensor]) -> Tensor:
        return self.mix(sum(parts, torch.zeros(())))

    @staticmethod
    def stack(blocks: Any, x: Tensor) -> Tensor:
        for block in blocks:
            x = block(part for part in (x, x * 0.5))
        return x


REFUSED = {
    InPlace: r"wrote argument 0 in place",
    InPlaceByName: r"wrote argument 'pair' in place",
    Averaged: r"wrote blocks\.0\.means in place",
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


class Alternating(Block):
    """Goes by something that nobody can know of."""

    calls = itertools.count()

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x) if next(self.calls) % 2 else self.mix(torch.cat([x, x]))[: len(x)]


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

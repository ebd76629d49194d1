"""Blocks that change what they are given, or what they keep, or that cannot run again."""

import collections
import dataclasses
import itertools
import random
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.models import Case, Vectors, batch_of_vectors
from tests.zero.test_activations import autocast_loss

WIDTH = 24

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
        self.systems_rng = random.SystemRandom()
        self.table = np.zeros(2)

    def forward(self, x: Tensor, rng: torch.Generator) -> Tensor:
        own = torch.rand((), generator=self.torch_rng) * float(self.numpy_rng.random()) * self.python_rng.random()
        self.table += 0.25
        return self.mix(x) * own * torch.rand((), generator=rng) * float(self.table[0])

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


class CountingOn(Block):
    """A count that cannot be turned back."""

    def __init__(self) -> None:
        super().__init__()
        self.count = itertools.count(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x) / next(self.count)


class Iterating(Block):
    def forward(self, parts: Iterator[Tensor]) -> Tensor:
        return self.mix(sum(parts, torch.zeros(())))

    @staticmethod
    def stack(blocks: Any, x: Tensor) -> Tensor:
        for block in blocks:
            x = block(part for part in (x, x * 0.5))
        return x


class Alternating(Block):
    """Goes by something that nobody can know of."""

    calls = itertools.count()

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x) if next(self.calls) % 2 else self.mix(torch.cat([x, x]))[: len(x)]


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

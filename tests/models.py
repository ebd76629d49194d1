"""The models that training must leave unchanged: one case per habit of PyTorch users that a swapping engine can break.

A case builds its model by the ordinary constructor, makes batch number ``i`` from ``i`` alone, and computes a loss.
Models cast float inputs to the dtype of their weights, so that each also runs with bf16 parameters.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.transformer import GPT, VOCAB, WIDTH, Block, batch_of_tokens, cross_entropy

__all__ = ["CASES", "GPT", "Block", "Case", "Vectors", "batch_of_tokens", "batch_of_vectors"]


@dataclass(frozen=True, slots=True)
class Case:
    """A model, its data, its loss, and its units."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Any, ...]]
    loss: Callable[..., Tensor] = lambda model, batch: model(*batch)
    unit: tuple[type[nn.Module], ...] | None = None  # what moves together, where it is not the default


def batch_of_vectors(index: int, num_rows: int = 4, width: int = WIDTH) -> tuple[Tensor, Tensor]:
    """Return float inputs and targets, fp32 (num_rows, width)."""
    both = torch.randn(2, num_rows, width, generator=torch.Generator().manual_seed(index))
    return both[0], both[1]


def batch_of_images(index: int) -> tuple[Tensor, Tensor]:
    """Return images fp32 (3, 3, 9, 7) and classes int64 (3,)."""
    generator = torch.Generator().manual_seed(index)
    return torch.randn(3, 3, 9, 7, generator=generator), torch.randint(0, 10, (3,), generator=generator)


def squared_error(x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(x.float(), y)


class BatchNorm(nn.BatchNorm2d):
    """Batch norm in fp32, as its buffers are, whatever the dtype of its weights."""

    def forward(self, x: Tensor) -> Tensor:
        self.num_batches_tracked += 1
        weight, bias = self.weight.float(), self.bias.float()
        statistics = (self.running_mean, self.running_var)
        return F.batch_norm(x.float(), *statistics, weight, bias, self.training, self.momentum, self.eps).to(x.dtype)


class CNN(nn.Module):
    """Convolutions, batch norm (fp32 buffers) and dropout."""

    def __init__(self, *, channels_last: bool = False) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 3, padding=1)
        self.stages = nn.Sequential(*(self.stage() for _ in range(3)))
        self.head = nn.Linear(12, 10)
        if channels_last:
            self.to(memory_format=torch.channels_last)

    @staticmethod
    def stage() -> nn.Module:
        return nn.Sequential(nn.Conv2d(12, 12, 3, padding=1, bias=False), BatchNorm(12), nn.ReLU(), nn.Dropout(0.2))

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        x = self.stages(self.stem(images.to(self.stem.weight.dtype)))
        return cross_entropy(self.head(x.mean((2, 3))), classes)


class Recurrent(nn.Module):
    """Two recurrent layers of ``kind``, each with flat weights of its own, and a dict output in between."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(kind(WIDTH, WIDTH, num_layers=2, dropout=0.1, batch_first=True) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.emb(tokens)
        for layer in self.layers:
            x, _ = layer(x)
        return cross_entropy(self.head(x), targets)


class MLP(nn.Module):
    """A residual block on vectors."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))

    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(x, self.up.weight, self.up.bias))

    def decode(self, x: Tensor) -> Tensor:
        return self.down(x)


class Vectors(nn.Module):
    """Base of the cases on vectors: a stack of blocks between two Linear layers; ``apply_blocks`` is the case."""

    def __init__(self, make: Callable[[], nn.Module] = MLP, num_blocks: int = 4) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(make() for _ in range(num_blocks))

    def apply_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.apply_blocks(self.first(x.to(self.first.weight.dtype)))
        return squared_error(self.last(x), y)


class Ordered(Vectors):
    """The data decide which experts of a ModuleDict run, and in which order; some have no gradient in a step."""

    orders = tuple(itertools.permutations("abcd", 3))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({name: MLP() for name in "abcd"})

    def apply_blocks(self, x: Tensor) -> Tensor:
        order = self.orders[int(x.detach().float().abs().sum().item() * 1e4) % len(self.orders)]
        for name in order:
            x = self.blocks[name](x)
        return x


class Twice(Vectors):
    """Each unit is called twice, the first a third time."""

    def apply_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(torch.sin(block(x)))
        return self.blocks[0](x)


class Stage(nn.Module):
    """A unit with units inside."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(MLP() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        for block in self.blocks:
            y = block(y)
        return x + self.norm(y)


@dataclass
class Answer:
    """An output that is a dataclass."""

    hidden: Tensor
    extra: list[Tensor | None]


class Keyword(nn.Module):
    """Called by keyword only; returns a dict or a dataclass."""

    def __init__(self, num: int) -> None:
        super().__init__()
        self.inner, self.dataclass = MLP(), num % 2 == 1

    def forward(self, *, hidden: Tensor, scale: float = 1.0) -> dict[str, Any] | Answer:
        hidden = self.inner(hidden) * scale
        extra = [hidden.sin(), None]
        return Answer(hidden, extra) if self.dataclass else {"hidden": hidden, "rest": {"extra": extra}}


class Keywords(Vectors):
    """Dict and dataclass outputs, keyword-only calls."""

    def __init__(self) -> None:
        super().__init__(partial(Keyword, 0))
        self.blocks = nn.ModuleList(Keyword(num) for num in range(4))

    def apply_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            out = block(hidden=x, scale=0.5)
            x, extra = (out.hidden, out.extra) if block.dataclass else (out["hidden"], out["rest"]["extra"])
            x = x + extra[0]
        return x


class Table(nn.Module):
    """Returns views of its own weights: the whole, a slice, a transposition."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)
        self.bias = nn.Parameter(torch.randn(4, WIDTH) / 8)

    def forward(self, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.weight, self.bias[:num_rows], self.weight.t()


class Views(Vectors):
    """Outputs that lie in a unit's own buffer."""

    def __init__(self) -> None:
        super().__init__(Table)

    def apply_blocks(self, x: Tensor) -> Tensor:
        tables = [block(x.shape[0]) for block in self.blocks]
        for weight, bias, transposed in tables:
            x = torch.tanh(x @ weight + bias) @ transposed
        return x


class NoGrad(Vectors):
    """Units whose input needs no gradient, and a unit that runs under no_grad inside the forward."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x.to(self.first.weight.dtype)
        with torch.no_grad():
            target = self.blocks[0](x)
        outs = [block(x) for block in self.blocks]
        return squared_error(self.last(self.first(sum(outs[1:], outs[0]))) - target, y)


class Methods(Vectors):
    """Units used by other methods than forward, and by reaching into them."""

    def apply_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block.decode(block.encode(x))
        return x + F.linear(x, self.blocks[1].down.weight @ self.blocks[1].up.weight)


class Penalty(Vectors):
    """A penalty over all parameters inside the forward."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y) + penalty(self)


def penalty(model: nn.Module) -> Tensor:
    """Return a weight penalty over all parameters, summed in fp32."""
    return 1e-3 * sum((p.float().square().sum() for p in model.parameters()), torch.zeros(()))


def loss_with_penalty(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the loss with the penalty computed by the training loop, after the forward."""
    return model(*batch) + penalty(model)


class Mixed(nn.Module):
    """fp32, bf16 and fp64 parameters, an integer and a frozen one, in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)
        self.scale = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.randn(WIDTH).bfloat16(), requires_grad=False)
        self.shifts = nn.Parameter(torch.arange(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(self.norm(x.to(self.norm.weight.dtype)).to(self.linear.weight.dtype)) + self.frozen
        return x + (y.roll(self.shifts.tolist(), (0, 0, 1)) * self.scale).to(x.dtype)


class Odd(nn.Module):
    """Odd sizes: primes, one element, no dimension, no element, transposed strides."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 37), nn.Linear(37, WIDTH)
        self.scalar, self.single = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.tensor([0.3]))
        self.empty = nn.Parameter(torch.empty(0, 37))
        self.turned = nn.Parameter((torch.randn(37, 29) / 6).t())  # (29, 37), strides (1, 29)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cat([self.up(x), self.empty]) * self.scalar
        return x + self.down(torch.tanh(y @ self.turned.t()) @ self.turned) + self.single


class Frozen(GPT):
    """A frozen embedding, a frozen block, and one frozen bias inside a trained block."""

    def __init__(self) -> None:
        super().__init__()
        for frozen in (self.emb, self.blocks[1], self.blocks[2].fc.bias):
            frozen.requires_grad_(False)


class Unused(Vectors):
    """A block that never runs, a parameter never used, and one used in every second step only."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Parameter(torch.randn(7))
        self.sometimes = nn.Parameter(torch.randn(WIDTH))
        self.blocks[0].unused = nn.Linear(5, 3)
        self.num_forwards = 0

    def apply_blocks(self, x: Tensor) -> Tensor:
        self.num_forwards += 1
        if self.num_forwards % 2:
            x = x + self.sometimes
        for block in (self.blocks[0], self.blocks[1], self.blocks[3]):
            x = block(x)
        return x


one_row_of_tokens = partial(batch_of_tokens, num_rows=1)
one_vector = partial(batch_of_vectors, num_rows=1)

CASES: dict[str, Case] = {
    "gpt": Case(GPT, batch_of_tokens),
    "gpt_batch_1": Case(GPT, one_row_of_tokens),
    "tied_head": Case(partial(GPT, head="tied"), batch_of_tokens),
    "tied_functional": Case(partial(GPT, head="functional"), batch_of_tokens),
    "checkpoint_around_reentrant": Case(partial(GPT, around=True), batch_of_tokens),
    "checkpoint_around": Case(partial(GPT, around=False), batch_of_tokens),
    "checkpoint_inside_reentrant": Case(partial(GPT, inside=True), batch_of_tokens),
    "checkpoint_inside": Case(partial(GPT, inside=False), batch_of_tokens),
    "cnn": Case(CNN, batch_of_images),
    "cnn_channels_last": Case(partial(CNN, channels_last=True), batch_of_images),
    "lstm": Case(partial(Recurrent, nn.LSTM), batch_of_tokens),
    "gru": Case(partial(Recurrent, nn.GRU), batch_of_tokens),
    "data_dependent_order": Case(Ordered, batch_of_vectors),
    "called_twice": Case(Twice, batch_of_vectors),
    "nested_units": Case(partial(Vectors, Stage), batch_of_vectors, unit=(Stage, MLP)),
    "units_of_one_layer": Case(GPT, batch_of_tokens, unit=(nn.Linear, nn.Embedding)),
    "units_across_checkpoints": Case(partial(GPT, inside=True), batch_of_tokens, unit=(Block, nn.LayerNorm)),
    "keyword_dict_dataclass": Case(Keywords, batch_of_vectors),
    "output_is_view_of_weight": Case(Views, batch_of_vectors),
    "input_without_grad": Case(NoGrad, batch_of_vectors),
    "other_methods": Case(Methods, batch_of_vectors),
    "penalty_in_forward": Case(Penalty, batch_of_vectors),
    "penalty_in_loop": Case(Vectors, batch_of_vectors, loss_with_penalty),
    "mixed_dtypes": Case(partial(Vectors, Mixed), batch_of_vectors),
    "odd_sizes": Case(partial(Vectors, Odd), batch_of_vectors),
    "vectors_batch_1": Case(Vectors, one_vector),
    "frozen_part": Case(Frozen, batch_of_tokens),
    "unused_parameter": Case(Unused, batch_of_vectors),
}

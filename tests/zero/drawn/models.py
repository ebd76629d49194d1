"""Models drawn at random: trees of blocks, each from (rows, times, width) fp32 to the same.

They cast what comes in to the dtype of their weights, so that a model runs with bf16 and fp64 parameters too."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["Make", "describe", "draw_model"]

Make = Callable[[], nn.Module]


class Block(nn.Module):
    """Base: ``run`` computes in the dtype of the block's own weights."""

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x.to(next(self.parameters()).dtype)).float()


class Perceptron(Block):
    def __init__(self, width: int, hidden: int, bias: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden, bias=bias), nn.Linear(hidden, width)

    def run(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


NORMS: dict[str, Callable[[int], nn.Module]] = {
    "layer": nn.LayerNorm,
    "rms": nn.RMSNorm,
    "group": lambda width: nn.GroupNorm(2 if width % 2 == 0 else 1, width),
    "batch": nn.BatchNorm1d,
}


class Normed(Block):
    """Batch norm in fp32, as its buffers are, whatever the dtype of its weights."""

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.kind, self.norm = kind, NORMS[kind](width)

    def run(self, x: Tensor) -> Tensor:
        if self.kind in ("layer", "rms"):
            return self.norm(x)
        if self.kind == "group":
            return self.norm(x.transpose(1, 2)).transpose(1, 2)
        norm = self.norm
        weight, bias = norm.weight.float(), norm.bias.float()
        y = x.transpose(1, 2).float()
        return F.batch_norm(y, norm.running_mean, norm.running_var, weight, bias, self.training, 0.1).transpose(1, 2)


class Convolved(Block):
    def __init__(self, width: int, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind == "channels_last":
            self.conv = nn.Conv2d(1, 3, 3, padding=1).to(memory_format=torch.channels_last)
            self.back = nn.Conv2d(3, 1, 1)
        elif kind == "transposed":
            self.conv = nn.ConvTranspose1d(width, width, 3, padding=1)
        else:
            self.conv = nn.Conv1d(width, width, 3, padding=1, groups=width if kind == "depthwise" else 1)

    def run(self, x: Tensor) -> Tensor:
        if self.kind == "channels_last":
            return x + self.back(torch.relu(self.conv(x[:, None]))).squeeze(1)
        return x + torch.tanh(self.conv(x.transpose(1, 2)).transpose(1, 2))


class Recurrent(Block):
    def __init__(self, width: int, kind: type[nn.RNNBase], num_layers: int, bidirectional: bool) -> None:
        super().__init__()
        options = {"num_layers": num_layers, "dropout": 0.1 * (num_layers > 1), "bidirectional": bidirectional}
        self.rnn = kind(width, width, batch_first=True, **options)

    def run(self, x: Tensor) -> Tensor:
        return x + self.rnn(x)[0][..., : x.shape[-1]]


class Attention(Block):
    def __init__(self, width: int, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind == "encoder":
            self.layer = nn.TransformerEncoderLayer(width, 1, 2 * width, dropout=0.1, batch_first=True)
        elif kind == "own":
            self.q, self.kv = nn.Linear(width, width, bias=False), nn.Linear(width, 2 * width)
        else:
            self.layer = nn.MultiheadAttention(width, 1, dropout=0.1, batch_first=True, add_bias_kv=kind == "bias")

    def run(self, x: Tensor) -> Tensor:
        if self.kind == "own":
            k, v = self.kv(x).chunk(2, -1)
            return x + F.scaled_dot_product_attention(self.q(x), k, v, is_causal=True)
        return self.layer(x) if self.kind == "encoder" else x + self.layer(x, x, x, need_weights=False)[0]


class Embedded(Block):
    def __init__(self, width: int, num: int, kind: str) -> None:
        super().__init__()
        self.kind, self.num_rows = kind, num
        self.table: nn.Module
        if kind == "bag":
            self.table = nn.EmbeddingBag(num, width, mode="mean")
        else:
            padding = 0 if kind == "padded" else None
            self.table = nn.Embedding(num, width, padding_idx=padding, scale_grad_by_freq=kind == "frequency")

    def run(self, x: Tensor) -> Tensor:
        index = (x.detach().float().sum(-1) * 100).nan_to_num().clamp(-1e6, 1e6).long() % self.num_rows
        if self.kind == "functional":
            return x + F.embedding(index, self.table.weight) @ self.table.weight.t()[:, :1]
        return x + (self.table(index)[:, None] if self.kind == "bag" else self.table(index))


class Odd(nn.Module):
    """One element, no element, no dimension, turned and permuted strides."""

    def __init__(self, width: int, odd: int) -> None:
        super().__init__()
        self.scalar, self.single = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.tensor([0.3]))
        self.empty, self.nothing = nn.Parameter(torch.empty(0, width)), nn.Parameter(torch.empty(0))
        self.turned = nn.Parameter((torch.randn(width, odd) / 4).t())
        self.permuted = nn.Parameter(torch.randn(2, width, 3).permute(2, 0, 1) / 4)

    def forward(self, x: Tensor) -> Tensor:
        y = x.to(self.turned.dtype)
        y = torch.cat([y.reshape(-1, y.shape[-1]), self.empty]).reshape(x.shape) * self.scalar
        y = y @ self.turned.t() @ self.turned + self.single + self.permuted[1].sum(0) + self.nothing.sum()
        return torch.tanh(y).float() + x


class Typed(nn.Module):
    """bf16, fp64, integer and bool parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.low = nn.Linear(width, width, dtype=torch.bfloat16)
        self.high = nn.Parameter(torch.ones(width, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.randn(width).bfloat16(), requires_grad=False)
        self.ints = nn.Parameter(torch.arange(3), requires_grad=False)
        self.flags = nn.Parameter(torch.tensor([True, False, True]), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.low(x.to(self.low.weight.dtype)) + self.frozen
        return x + (y.roll(int(self.ints[1]), -1) * self.high).float() * self.flags.sum()


class Listed(nn.Module):
    """What functions make of parameters: stacks, rows, norms, sums of products, parts.

    No gradients that share memory, which torch adds to several times.
    """

    def __init__(self, width: int, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.vectors = nn.ParameterList(torch.randn(width) / 4 for _ in range(3))
        self.named = nn.ParameterDict({"a": torch.randn(width, width) / 4, "b": torch.randn(1, width)})

    def forward(self, x: Tensor) -> Tensor:
        (u, v, w), a, b = self.vectors, self.named["a"], self.named["b"]
        y = x.to(u.dtype)
        if self.kind == "stack":
            y = y + (torch.stack([u, v, w]) * torch.arange(1, 4)[:, None]).sum(0) + torch.cat([a, b])[-2:].mean(0)
        elif self.kind == "index":
            y = y + a[torch.tensor([0, 0, y.shape[-1] - 1])].sum(0) + a[:, 0] + v[None].expand(2, -1)[1]
        elif self.kind == "norm":
            y = y / (1 + a.norm()) + F.normalize(b, dim=-1)[0] + sum(p.square().mean() for p in self.parameters())
        elif self.kind == "einsum":
            y = torch.einsum("btw,wv->btv", y, a) * torch.softmax(u, 0) + b.view(-1) + w.detach()
        else:
            y = y + torch.where(y > 0, u, v) + a.split([1, len(a) - 1])[0].sum(0) + a.T.contiguous().view(-1)[: len(a)]
        return torch.tanh(y.to(a.dtype)).float()


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return grad @ weight, torch.einsum("bto,bti->oi", grad, x)


class Function(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(Product.apply(x.to(self.weight.dtype), self.weight)).float() + x


class Parametrized(Block):
    def __init__(self, width: int, kind: str) -> None:
        super().__init__()
        self.linear = getattr(nn.utils.parametrizations, kind)(nn.Linear(width, width))

    def run(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Drawing(Block):
    """Random numbers of every generator, in-place operations, products of three."""

    def __init__(self, width: int, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.main = nn.Bilinear(width, width, width) if kind == "bilinear" else nn.Linear(width, width)
        self.act = nn.PReLU(width)

    def run(self, x: Tensor) -> Tensor:
        y = self.main(x, x) if self.kind == "bilinear" else self.main(x)
        if self.kind == "in_place":
            y = F.relu(y, inplace=True).add_(x).mul_(0.5)
        elif self.kind == "dropout":
            y = F.dropout(y, 0.3, self.training)
        elif self.kind == "noise":
            y = y + torch.randn(y.shape).to(y.dtype) * self.training
        elif self.kind == "others":
            y = y * float(np.random.rand()) + random.random()
        return x + self.act(y.transpose(1, 2)).transpose(1, 2)


class Tied(nn.Module):
    def __init__(self, width: int, hidden: int, is_functional: bool) -> None:
        super().__init__()
        self.is_functional = is_functional
        self.a, self.b, self.c = nn.Linear(width, hidden), nn.Linear(width, hidden), nn.Linear(width, width)
        self.b.weight = self.b.weight if is_functional else self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        y = x.to(self.a.weight.dtype)
        z = torch.tanh(self.a(y)) + (F.linear(y, self.a.weight) if self.is_functional else self.b(y))
        return (x + self.c(F.linear(z, self.b.weight.t())).float()).tanh()


# -- blocks around blocks -------------------------------------------------------------------------------------------


class Chain(nn.Module):
    """Blocks in a container, called in ``order``; "data": the input says which one."""

    def __init__(self, makes: Sequence[Make], kind: str, order: Sequence[int] | str) -> None:
        super().__init__()
        blocks = [make() for make in makes]
        self.kind, self.order = kind, order
        self.blocks: nn.Module
        if kind == "dict":
            self.blocks = nn.ModuleDict({f"b{i}": block for i, block in enumerate(blocks)})
        else:
            self.blocks = nn.Sequential(*blocks) if kind == "sequential" else nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "sequential":
            return self.blocks(x)
        blocks = list(self.blocks.children())
        order = [int(x.detach().abs().sum().nan_to_num() * 1e3)] if self.order == "data" else self.order
        for index in order:
            x = blocks[int(index) % len(blocks)](x)
        return x


class Around(nn.Module):
    """Something that programs do around a block, with parameters of its own that are not always used."""

    def __init__(self, make: Make, kind: str, width: int) -> None:
        super().__init__()
        self.inner, self.kind = make(), kind
        self.gate, self.unused = nn.Parameter(torch.tensor(0.5)), nn.Linear(2, 3)
        self.sometimes = nn.Parameter(torch.randn(width) / 4)
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("count", torch.tensor(0), persistent=False)
        for index, parameter in enumerate(self.inner.parameters()):
            if kind == "frozen" or (kind == "half_frozen" and index % 2):
                parameter.requires_grad_(False)
        if kind == "forward_hook":
            self.inner.register_forward_hook(lambda *args: args[2] * 1.5)
        elif kind == "forward_pre_hook":
            self.inner.register_forward_pre_hook(lambda _, args: (args[0] + 0.25,))
        elif kind == "backward_hook":
            self.inner.register_full_backward_hook(lambda _, grads, __: tuple(g if g is None else g * 2 for g in grads))

    def forward(self, x: Tensor) -> Tensor:
        act = getattr(self, f"_{self.kind}", None)
        return x + self.inner(x) * self.gate.float() if act is None else act(x)

    def _no_grad(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = self.inner(x)
        return x + y

    def _detached(self, x: Tensor) -> Tensor:
        return x + self.inner(x.detach())

    def _sometimes(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        return self.inner(x) + self.sometimes.float() if int(self.count) % 2 else self.inner(x)

    def _reentrant(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=True) if torch.is_grad_enabled() else self.inner(x)

    def _recomputed(self, x: Tensor) -> Tensor:
        return checkpoint(lambda y: self.inner(y).sin(), x, use_reentrant=False)

    def _autocast(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(x).float()

    def _buffered(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        if self.training:
            self.mean.mul_(0.9).add_(y.detach().mean((0, 1)), alpha=0.1)
            self.count = self.count + 1
        return y - self.mean


AROUND = (
    "residual", "frozen", "half_frozen", "no_grad", "detached", "sometimes", "reentrant", "recomputed", "autocast",
    "buffered", "forward_hook", "forward_pre_hook", "backward_hook",
)  # fmt: skip


class Net(nn.Module):
    """A layer, blocks, a layer: the output, or the loss where targets are given."""

    def __init__(self, makes: Sequence[Make], width: int, container: str, penalty: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)
        self.blocks = Chain(makes, container, range(len(makes)))
        self.scale = nn.Parameter(torch.ones(width))
        self.penalty = penalty

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        x = self.blocks(self.first(x.to(self.first.weight.dtype)).float())
        x = (self.last(x.to(self.last.weight.dtype)) * self.scale).float()
        loss = x if y is None else F.smooth_l1_loss(x, y)
        if self.penalty and y is not None:
            loss = loss + 1e-3 * sum(p.float().square().sum() for p in self.parameters() if p.is_floating_point())
        return loss


def _draw_block(rng: random.Random, width: int, depth: int) -> Make:
    pick = rng.choice
    if depth <= 0 or rng.random() < 0.45:
        leaves: list[Callable[[], Make]] = [
            lambda: partial(Perceptron, width, pick([1, 2 * width, 7, 37]), rng.random() < 0.7),
            lambda: partial(Normed, pick(list(NORMS)), width),
            lambda: partial(Convolved, width, pick(["plain", "channels_last", "transposed", "depthwise"])),
            lambda: partial(Recurrent, width, pick([nn.RNN, nn.LSTM, nn.GRU]), pick([1, 2]), rng.random() < 0.3),
            lambda: partial(Attention, width, pick(["encoder", "own", "plain", "bias"])),
            lambda: partial(Embedded, width, pick([1, 5, 331]), pick(["padded", "frequency", "bag", "functional"])),
            lambda: partial(Odd, width, pick([1, 3, 29])),
            lambda: partial(Typed, width),
            lambda: partial(Listed, width, pick(["stack", "index", "norm", "einsum", "split"])),
            lambda: partial(Function, width),
            lambda: partial(Parametrized, width, pick(["weight_norm", "spectral_norm", "orthogonal"])),
            lambda: partial(Drawing, width, pick(["bilinear", "in_place", "dropout", "noise", "others"])),
            lambda: partial(Tied, width, pick([3, 2 * width]), rng.random() < 0.5),
        ]
        return pick(leaves)()
    if rng.random() < 0.7:
        return partial(Around, _draw_block(rng, width, depth - 1), pick(AROUND), width)
    makes = [_draw_block(rng, width, depth - 1) for _ in range(rng.randint(1, 3))]
    return partial(Chain, makes, pick(["list", "sequential", "dict"]), pick([(0, 1, 2), (0, 1, 0), (2, 0), "data"]))


def draw_model(rng: random.Random) -> tuple[Make, int]:
    """Return what builds a model, and the width of its input."""
    width = rng.choice([1, 2, 3, 5, 8, 16, 33])
    makes = [_draw_block(rng, width, rng.randint(0, 3)) for _ in range(rng.randint(1, 5))]
    if rng.random() < 0.3:
        makes += [makes[0]] * rng.randint(1, 3)
    return partial(Net, makes, width, rng.choice(["list", "sequential"]), rng.random() < 0.1), width


def describe(make: Any) -> str:
    """Return ``make`` as a program would write it."""
    if isinstance(make, partial):
        return f"{make.func.__name__}({', '.join(map(describe, make.args))})"  # type: ignore[attr-defined]
    return f"[{', '.join(map(describe, make))}]" if isinstance(make, list) else getattr(make, "__name__", repr(make))

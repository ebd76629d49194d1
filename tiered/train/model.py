"""A byte-level GPT and the shape it takes.

Plain PyTorch: nothing here knows of stores, budgets or units, and any other module would train the same way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["GPT", "VOCAB", "Block", "Shape"]

VOCAB = 256
"""One token per byte value."""

_HEAD_WIDTHS = (128, 64, 16, 4)
"""Widths of a head in shapes chosen by size: as in the default (2048 / 16) where at least four of them fit."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How large a GPT is. Raises ValueError for sizes that do not go together."""

    layers: int = 8
    width: int = 2048
    heads: int = 16
    context: int = 256

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.width % self.heads:
            nearest = max(self.heads, round(self.width / self.heads) * self.heads)
            raise ValueError(
                f"width {self.width} is not a multiple of heads {self.heads}: "
                f"use width {nearest}, or a number of heads that divides {self.width}"
            )

    @property
    def num_params(self) -> int:
        """The number of parameters of ``GPT(shape)``, without building it."""
        block = 12 * self.width**2 + 13 * self.width  # four matrices of 3, 1, 4 and 4 widths; biases; two norms
        return self.layers * block + (2 * VOCAB + self.context + 2) * self.width

    @classmethod
    def of_size(cls, num_params: int, *, context: int = 256) -> Shape:
        """Return the well-proportioned shape whose number of parameters is nearest to ``num_params``.

        A width of 64 to 512 per layer is well proportioned; one near 256, as in the default, is preferred where several
        come within 2 % of the size. Raises ValueError when no shape comes within a quarter of it.
        """
        shapes = [shape for shape in _shapes(num_params, context) if _misses(shape, num_params) <= 0.25]
        if not shapes:
            raise ValueError(f"no shape has about {num_params:,} parameters: give --layers and --width instead")
        best = min(_misses(shape, num_params) for shape in shapes)
        near = [shape for shape in shapes if _misses(shape, num_params) <= max(best, 0.02)]
        return min(near, key=lambda shape: abs(math.log(shape.width / shape.layers / 256)))


def _misses(shape: Shape, num_params: int) -> float:
    """Return the part of ``num_params`` by which the shape is larger or smaller."""
    return abs(shape.num_params / num_params - 1)


def _shapes(num_params: int, context: int) -> Iterator[Shape]:
    """Yield for each number of layers the two shapes nearest to ``num_params``."""
    for layers in range(1, 257):
        per_width = 13 * layers + 2 * VOCAB + context + 2  # num_params = 12 layers width^2 + per_width width
        width = (math.sqrt(per_width**2 + 48 * layers * num_params) - per_width) / (24 * layers)
        head_width = next(head_width for head_width in _HEAD_WIDTHS if width >= 4 * head_width or head_width == 4)
        for heads in (int(width / head_width), int(width / head_width) + 1):
            if heads and (layers == 1 or 64 <= heads * head_width / layers <= 512):
                yield Shape(layers, heads * head_width, heads, context)


class Block(nn.Module):
    """Attention over the past and a feed-forward layer, each normalised before and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, time, width) to the same shape."""
        batch, time, width = x.shape
        qkv = self.qkv(self.ln1(x)).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each (batch, heads, time, width / heads)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, time, width))
        out: Tensor = x + self.out(F.gelu(self.fc(self.ln2(x))))
        return out


class GPT(nn.Module):
    """A decoder-only transformer over bytes that returns its own loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.emb, self.pos = nn.Embedding(VOCAB, shape.width), nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape.width, shape.heads) for _ in range(shape.layers))
        self.ln, self.head = nn.LayerNorm(shape.width), nn.Linear(shape.width, VOCAB, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy, in nats per byte, of ``targets`` after ``tokens``: int64, (batch, time)."""
        x = self.emb(tokens) + self.pos(torch.arange(tokens.shape[1], dtype=torch.int64, device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.ln(x)).float()  # (batch, time, VOCAB); a bf16 loss would move in steps of 0.02
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

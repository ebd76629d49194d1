"""The transformer that most tests train: a small GPT on tokens, checkpointed around or inside its blocks or not."""

from functools import partial
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["GPT", "VOCAB", "WIDTH", "Block", "batch_of_tokens", "cross_entropy"]

VOCAB = 61
WIDTH = 24


def batch_of_tokens(
    index: int, num_rows: int = 2, num_tokens: int = 12, *, vocab: int = VOCAB
) -> tuple[Tensor, Tensor]:
    """Return tokens and their successors, int64 (num_rows, num_tokens)."""
    tokens = torch.randint(0, vocab, (num_rows, num_tokens + 1), generator=torch.Generator().manual_seed(index))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())


_num_forwards: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
"""Of each block. What a module keeps in an attribute does not count second runs: it is put back after them."""


class Block(nn.Module):
    """A transformer block that counts how often it ran; ``inside`` checkpoints its second half."""

    def __init__(self, width: int = WIDTH, heads: int = 2, *, inside: bool | None = None) -> None:
        super().__init__()
        self.heads, self.inside = heads, inside
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    @property
    def num_forwards(self) -> int:
        return _num_forwards.get(self, 0)

    def attend(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        return x + self.dropout(self.proj(y))

    def think(self, x: Tensor) -> Tensor:
        _num_forwards[self] = self.num_forwards + 1
        return x + self.dropout(self.out(F.gelu(self.fc(self.ln2(x)))))

    def forward(self, x: Tensor) -> Tensor:
        x = self.attend(x)
        return self.think(x) if self.inside is None else checkpoint(self.think, x, use_reentrant=self.inside)


class GPT(nn.Module):
    """``head``: its own Linear, "tied" to the embedding, or "functional" use of the embedding's weight.

    ``around`` checkpoints ``region`` blocks at a time, ``inside`` half of each block (True: the reentrant kind).
    """

    def __init__(
        self,
        num_blocks: int = 4,
        *,
        head: str = "own",
        around: bool | None = None,
        inside: bool | None = None,
        region: int = 2,
        vocab: int = VOCAB,
    ) -> None:
        super().__init__()
        self.around, self.region = around, region
        self.emb, self.pos = nn.Embedding(vocab, WIDTH), nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(Block(inside=inside) for _ in range(num_blocks))
        self.ln = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocab, bias=False) if head != "functional" else None
        if head == "tied":
            self.head.weight = self.emb.weight

    def run(self, first: int, x: Tensor) -> Tensor:
        for block in self.blocks[first : first + self.region]:
            x = block(x)
        return x

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.emb(tokens) + self.pos(torch.arange(tokens.shape[1], device=tokens.device))
        for first in range(0, len(self.blocks), self.region):
            run = partial(self.run, first)
            x = run(x) if self.around is None else checkpoint(run, x, use_reentrant=self.around)
        x = self.ln(x)
        return self.head(x) if self.head is not None else F.linear(x, self.emb.weight)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        logits = self.logits(tokens)
        return logits if targets is None else cross_entropy(logits, targets)

"""The task of `tiered train`: a byte-level GPT with the shape that it takes, and the text that it learns from.

The model is plain PyTorch: any other module would train the same way. The bytes of a batch depend on the files, the
seed, the number of the batch and the rank alone, never on earlier batches nor on memory. No file is kept open or in
memory.
"""

from __future__ import annotations

import hashlib
import math
import os
import sysconfig
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tiered.errors import UsageError
from tiered.units import KiB

__all__ = ["GPT", "VOCAB", "Block", "Corpus", "Loader", "Shape"]

# -- model ---------------------------------------------------------------------------------------------------------

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
        misses = {shape: abs(shape.num_params / num_params - 1) for shape in _shapes(num_params, context)}
        best = min(misses.values(), default=1.0)
        if best > 0.25:
            raise ValueError(f"no shape has about {num_params:,} parameters: give --layers and --width instead")
        near = [shape for shape, miss in misses.items() if miss <= max(best, 0.02)]
        return min(near, key=lambda shape: abs(math.log(shape.width / shape.layers / 256)))


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


# -- text ----------------------------------------------------------------------------------------------------------

_SNIFF_NBYTES, _SAMPLE_NBYTES, _NUM_SAMPLES = 4096, 256 * KiB, 256
_NOT_OURS = {"site-packages", "dist-packages", "__pycache__"}


class Corpus:
    """The bytes of ``files`` one after the other, read on demand.

    The files must not change while it is used: sizes are taken once, and a file that has become shorter raises
    UsageError when it is read.
    """

    def __init__(self, files: Iterable[Path], *, name: str) -> None:
        self.name = name
        self._files = tuple(files)
        self._ends = tuple(accumulate(map(_size, self._files)))
        self.num_files, self.nbytes = len(self._files), self._ends[-1] if self._ends else 0

    @classmethod
    def of_paths(cls, paths: Sequence[str | Path]) -> Corpus:
        """Return the corpus of the given text files and of all text files under the given directories.

        Hidden files, links and files with a zero byte near their start are left out of directories; a file named
        itself is taken as it is. The order is that of the names. Raises UsageError for a path that is not there.
        """
        files: list[Path] = []
        for path in map(Path, paths):
            if not path.exists():
                raise UsageError(f"no data at {path}: the path does not exist; name a text file or a directory of them")
            files += [path] if path.is_file() else filter(_is_text, _walk(path, suffix=""))
        return cls(files, name=", ".join(map(str, paths)))

    @classmethod
    def of_standard_library(cls) -> Corpus:
        """Return the corpus of the source of the Python that runs: about 30 MB of text, found on every machine."""
        root = Path(sysconfig.get_paths()["stdlib"])
        return cls(_walk(root, suffix=".py"), name=f"the source of Python's standard library, {root}")

    @cached_property
    def fingerprint(self) -> str:
        """A digest of names, sizes and content: another one means another corpus; blocks while it reads, once.

        It sees every byte of a corpus of up to 64 MiB; of a larger one 256 blocks of 256 KiB, evenly spread, the first
        and the last among them: a change between them that leaves all sizes as they are is not seen.
        """
        digest = hashlib.sha256()
        for file, end in zip(self._files, self._ends, strict=True):
            digest.update(f"{end} {file.name}\n".encode("utf-8", "surrogateescape"))
        offsets: Iterable[int] = range(0, self.nbytes, _SAMPLE_NBYTES)
        if self.nbytes > _NUM_SAMPLES * _SAMPLE_NBYTES:
            room = self.nbytes - _SAMPLE_NBYTES
            offsets = (number * room // (_NUM_SAMPLES - 1) for number in range(_NUM_SAMPLES))
        for offset in offsets:
            digest.update(self.read(offset, min(_SAMPLE_NBYTES, self.nbytes - offset)))
        return f"2-{digest.hexdigest()[:16]}"

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return the ``nbytes`` bytes at ``offset`` of the stream; blocks on the files' device."""
        parts = []
        number = bisect_right(self._ends, offset)
        while nbytes:
            file, start = self._files[number], self._ends[number - 1] if number else 0
            expected = min(nbytes, self._ends[number] - offset)
            part = _read(file, offset - start, expected)
            if len(part) != expected:
                raise UsageError(
                    f"the data file {file} has changed while in use: expected {expected} bytes at {offset - start}, "
                    f"got {len(part)}; give the run data that stays as it is"
                )
            parts.append(part)
            offset, nbytes, number = offset + expected, nbytes - expected, number + 1
        return b"".join(parts)


def _size(file: Path) -> int:
    with _refusing(f"cannot use {file} as data"):
        return file.stat().st_size


def _read(file: Path, offset: int, nbytes: int) -> bytes:
    with _refusing(f"cannot read the data file {file}"), open(file, "rb", buffering=0) as stream:
        return os.pread(stream.fileno(), nbytes, offset)


def _is_text(file: Path) -> bool:
    return b"\0" not in _read(file, 0, _SNIFF_NBYTES)


@contextmanager
def _refusing(message: str) -> Iterator[None]:
    """Raise UsageError with ``message`` in the place of an OSError."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{message}: {error.strerror}") from error


def _walk(root: Path, *, suffix: str) -> Iterator[Path]:
    """Yield the regular, visible files under ``root`` by name, links and other people's packages left out."""
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in _NOT_OURS)
        for name in sorted(names):
            file = Path(folder, name)
            if name.endswith(suffix) and not name.startswith(".") and file.is_file() and not file.is_symlink():
                yield file


class Loader:
    """An endless iterator of (tokens, targets), each int64 of shape (batch, context); one thread at a time.

    Each ``rank`` draws batches of its own; those of rank 0 are those of one process. Its state is the number of the
    next batch: register it with a store, and a resumed run draws what the undisturbed one would have drawn.
    ``load_state_dict`` refuses the state of a loader over other data or of another seed or size.
    """

    def __init__(self, corpus: Corpus, *, batch: int, context: int, seed: int, rank: int = 0) -> None:
        if batch < 1:
            raise ValueError(f"batch must be at least 1, got {batch}")
        if corpus.nbytes <= context:
            raise UsageError(
                f"too little data: {corpus.name} has {corpus.num_files} text files with {corpus.nbytes} bytes, "
                f"a context of {context} needs at least {context + 1}"
            )
        self.corpus = corpus
        self.position = 0
        self._identity: dict[str, int | str] = {
            "seed": seed, "batch": batch, "context": context, "num_files": corpus.num_files, "nbytes": corpus.nbytes,
            "fingerprint": corpus.fingerprint,  # order: now, not in the first commit
        }  # fmt: skip
        self._batch, self._context, self._seed = batch, context, seed
        self._of_rank = f" {rank}" if rank else ""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        nbytes = self._context + 1
        windows = b"".join(self.corpus.read(self._offset(row), nbytes) for row in range(self._batch))
        self.position += 1
        window = torch.frombuffer(bytearray(windows), dtype=torch.uint8).view(self._batch, nbytes).long()
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()

    def _offset(self, row: int) -> int:
        """Return where the next batch's ``row`` starts. A digest, not a generator: the same in every version of all."""
        digest = hashlib.blake2b(f"{self._seed} {self.position} {row}{self._of_rank}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") % (self.corpus.nbytes - self._context)

    def state_dict(self) -> dict[str, int | str]:
        """Return the position, and the identity of the data it is in."""
        return {"position": self.position, **self._identity}

    def load_state_dict(self, state: dict[str, int | str]) -> None:
        """Go to the state's position. Raises UsageError, and stays where it is, when the state is another loader's."""
        differing = [
            f"{name}: was {state.get(name)!r}, is {value!r}"
            for name, value in self._identity.items()
            if state.get(name) != value
        ]
        if differing:
            raise UsageError(
                f"the run was trained on other data ({'; '.join(differing)}); name the same data with --data"
            )
        self.position = int(state["position"])

"""Whole models of the usual kinds, against plain PyTorch on the same device; the suite has smaller ones.

`pytest tests/accelerator/whole_models.py` runs them on the device of TIERED_TEST_DEVICE.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

import tiered
from tests.accelerator.training import DEVICE
from tests.reference import MasterAdamW, Recipe
from tiered.tiers.device_memory import on_stream
from tiered.zero.activations import swapped_activations

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

NUM_STEPS = 4
WORDS, WIDTH = 61, 32


class Translator(nn.Module):
    """An encoder and a decoder with cross attention and dropout, whose embedding is the head as well."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.Transformer(WIDTH, 4, 2, 2, 2 * WIDTH, dropout=0.1, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1] - 1).to(target.device)
        hidden = self.layers(self.embedding(source), self.embedding(target[:, :-1]), tgt_mask=mask)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), target[:, 1:].flatten())


class Denoiser(nn.Module):
    """A U-Net: convolutions down and transposed ones up, both kinds of norms, skips, a condition."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.start, self.down = self._block(3, width), self._block(width, 2 * width)
        self.deepest, self.condition = self._block(2 * width, 2 * width), nn.Linear(8, 2 * width)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.end, self.head = self._block(2 * width, width), nn.Conv2d(width, 3, 1)

    @staticmethod
    def _block(num_in: int, num_out: int) -> nn.Module:
        convolution = nn.Conv2d(num_in, num_out, 3, padding=1)
        return nn.Sequential(convolution, nn.GroupNorm(4, num_out), nn.SiLU(), nn.BatchNorm2d(num_out))

    def forward(self, images: Tensor, condition: Tensor, wanted: Tensor) -> Tensor:
        start = self.start(images)
        deep = self.deepest(self.down(F.avg_pool2d(start, 2))) + self.condition(condition)[:, :, None, None]
        return F.mse_loss(self.head(self.end(torch.cat([self.up(deep), start], 1))), wanted)


class Listener(nn.Module):
    """A GRU in both directions, attention over its steps, then an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.first = nn.GRU(WIDTH, WIDTH, 2, batch_first=True, bidirectional=True)
        self.query = nn.Parameter(torch.randn(2 * WIDTH) / 7)
        self.second, self.head = nn.LSTM(2 * WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        hidden, _ = self.first(self.embedding(words[:, :-1]))
        hidden, _ = self.second(hidden * torch.softmax(hidden @ self.query, 1)[..., None])
        return F.cross_entropy(self.head(hidden).flatten(0, 1), words[:, 1:].flatten())


class Experts(nn.Module):
    """Layers of experts: the data say which row goes through which, and some experts have none in a step."""

    def __init__(self, num_layers: int = 2, num_experts: int = 4) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, WIDTH), nn.Linear(WIDTH, 4)
        self.gates = nn.ModuleList(nn.Linear(WIDTH, num_experts) for _ in range(num_layers))
        self.layers = nn.ModuleList(
            nn.ModuleList(
                nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
                for _ in range(num_experts)
            )
            for _ in range(num_layers)
        )

    def forward(self, rows: Tensor, classes: Tensor) -> Tensor:
        hidden = self.first(rows)
        for gate, experts in zip(self.gates, self.layers, strict=True):
            weights, chosen = gate(hidden).softmax(-1).max(-1)
            made = torch.zeros_like(hidden, dtype=torch.float32)
            for number, expert in enumerate(experts):  # type: ignore[arg-type]
                places = torch.nonzero(chosen == number).flatten()
                if places.numel():
                    made = made.index_add(0, places, (expert(hidden[places]) * weights[places, None]).float())
            hidden = hidden + made
        return F.cross_entropy(self.last(hidden), classes)


class Checkpointed(nn.Module):
    """Transformer layers with dropout, each under torch's checkpoint."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.1, batch_first=True) for _ in range(4)
        )

    def forward(self, rows: Tensor) -> Tensor:
        hidden = rows.requires_grad_()
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=self.reentrant)
        return hidden.square().mean()


class Parallel(nn.Module):
    """Pairs of layers, of which the second runs on a stream of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.ModuleList(nn.ModuleList([nn.Linear(24, 24), nn.Linear(24, 24)]) for _ in range(3))

    def forward(self, rows: Tensor) -> Tensor:
        for first, second in self.pairs:  # type: ignore[misc]
            here, side = torch.accelerator.current_stream(), torch.Stream(device=rows.device)
            side.wait_stream(here)
            with on_stream(side):
                aside = second(rows).tanh()
            rows.record_stream(side)
            made = first(rows)
            here.wait_stream(side)
            aside.record_stream(here)
            rows = rows + made + aside
        return rows.square().mean()


@dataclass(frozen=True, slots=True)
class Whole:
    """A model that returns its loss, and how to make its batch from a generator of numbers, on the CPU."""

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], tuple[Tensor, ...]]
    recomputes: bool = True  # whether activations="recompute" is for it: it has no checkpoints or streams of its own


def words(generator: torch.Generator, *shape: int, num: int = WORDS) -> Tensor:
    return torch.randint(0, num, shape, generator=generator)


def some_hidden(generator: torch.Generator) -> tuple[Tensor]:
    return (torch.randn(2, 5, WIDTH, generator=generator),)


MODELS: dict[str, Whole] = {
    "translator": Whole(Translator, lambda g: (words(g, 3, 7), words(g, 3, 6))),
    "denoiser": Whole(Denoiser, lambda g: tuple(torch.randn(2, *s, generator=g) for s in ((3, 8, 8), (8,), (3, 8, 8)))),
    "listener": Whole(Listener, lambda g: (words(g, 3, 6),)),
    "experts": Whole(Experts, lambda g: (torch.randn(5, 16, generator=g), words(g, 5, num=4))),
    "checkpoint": Whole(partial(Checkpointed, reentrant=False), some_hidden, recomputes=False),
    "checkpoint_reentrant": Whole(partial(Checkpointed, reentrant=True), some_hidden, recomputes=False),
    "parallel": Whole(Parallel, lambda g: (torch.randn(3, 24, generator=g),), recomputes=False),
}

OPTIONS: list[tuple[str, str, str, bool]] = [  # update, activations, update_on, whether under bf16 autocast
    ("step", "swap", "device", False),
    ("backward", "keep", "cpu", False),
    ("step", "recompute", "device", True),
    ("step", "auto", "cpu", True),
]

ROWS = [(name, *row) for name, model in MODELS.items() for row in OPTIONS if model.recomputes or row[1] != "recompute"]


def build(whole: Whole) -> nn.Module:
    """Build the model on the device; what it draws later is the same each time."""
    torch.manual_seed(0)
    model = whole.build().to(DEVICE)
    torch.manual_seed(1)
    return model


def train(model: nn.Module, optimizer: Any, whole: Whole, *, is_bf16: bool, num_micro_steps: int) -> list[Tensor]:
    """Return all losses, after each step that of an evaluation, and last the state, each a copy on the CPU."""
    seen: list[Tensor] = []

    def loss(number: int) -> Tensor:
        batch = whole.batch(torch.Generator().manual_seed(number))
        context = torch.autocast(DEVICE, dtype=torch.bfloat16) if is_bf16 else nullcontext()
        with context:
            value: Tensor = model(*tree_map_only(Tensor, lambda tensor: tensor.to(DEVICE), batch))
        seen.append(value.detach().cpu().clone())
        return value

    for step in range(NUM_STEPS):
        for micro_step in range(num_micro_steps):
            loss(step * num_micro_steps + micro_step).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            loss(1000 + step)
        model.train()
    return seen + [value.detach().cpu().clone() for value in model.state_dict().values()]


@pytest.fixture(autouse=True)
def whole_settings(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Activations of any size are swapped, and torch's fused layers, which take plain parameters alone, are off."""
    monkeypatch.setattr(swapped_activations, "SMALLEST_NBYTES", 1)
    was = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(was)


@pytest.mark.parametrize(("name", "update", "activations", "update_on", "is_bf16"), ROWS)
def test_a_whole_model_has_the_bits_of_plain_torch(
    name: str, update: str, activations: str, update_on: str, is_bf16: bool, accelerator: Any, tmp_path: Path
) -> None:
    whole, options = MODELS[name], {"is_bf16": is_bf16, "num_micro_steps": 2 if update == "step" else 1}
    model = build(whole)
    recipe = Recipe(updates_on="cpu" if update_on == "cpu" else "", adamw={"lr": 1e-2})
    expected = train(model, MasterAdamW(model, recipe), whole, **options)
    accelerator.reset()
    accelerator.set_query_delay(3)
    with tiered.Store(tmp_path, dram="24MiB", device_memory="24MiB") as store:
        sharding = {"device": DEVICE, "activations": activations, "update_on": update_on, "hold": 0}
        sharded = tiered.shard(build(whole), store, **sharding)
        optimizer = tiered.AdamW(sharded.parameters(), lr=1e-2, update=update)
        torch.manual_seed(1)
        trained = train(sharded, optimizer, whole, **options)
    assert list(map(torch.equal, trained, expected)) == [True] * len(expected)

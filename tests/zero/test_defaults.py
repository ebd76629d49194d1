"""torch's default dtype and default device are the user's: whatever they are, every bit is the same."""

import contextlib
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import tiered
from tests.store.places import quick_directory
from tests.zero.training import debug_store
from tiered.zero.formats import state_layout
from tiered.zero.formats.compact_codes import tried_compact_kernels

WIDTH = 16
COUNT = 300  # of updates before the first one here: bf16 has 256 and 258, fp16 as many as it needs
OTHER_DTYPES = (torch.bfloat16, torch.float16, torch.float64)
BF16: dict[str, Any] = {"param_dtype": torch.bfloat16}
WAYS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "fp32": ("AdamW", {}, {}),
    "bf16": ("AdamW", {}, BF16),
    "bf16, state compact": ("AdamW", {"state": "compact"}, BF16),
    "bf16, state compact by torch": ("AdamW", {"state": "compact"}, BF16),
    "recompute": ("AdamW", {}, {"activations": "recompute"}),
    "swap": ("AdamW", {}, {"activations": "swap"}),
    "SGD": ("SGD", {"momentum": 0.9}, BF16),
    "Lion": ("Lion", {"state": "compact"}, BF16),
}

every_dtype = pytest.mark.parametrize("dtype", OTHER_DTYPES, ids=str)


@pytest.fixture
def kernels_of_word(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have compact state work by its kernels, which must be there, or by torch operations where ``word`` says so."""
    assert tried_compact_kernels() is not None
    if word.endswith("by torch"):
        monkeypatch.setattr(state_layout, "tried_compact_kernels", lambda: None)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def batch(index: int) -> Tensor:
    generator = torch.Generator().manual_seed(index)
    return torch.randn(5, WIDTH, dtype=torch.float32, device="cpu", generator=generator)


class Block(nn.Sequential):
    """A unit, in fp32 and on the CPU whatever the defaults are."""

    def __init__(self) -> None:
        first, second = (nn.Linear(WIDTH, WIDTH, dtype=torch.float32, device="cpu") for _ in range(2))
        super().__init__(first, nn.Dropout(0.1), nn.Tanh(), second)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = model(x.to(next(model.parameters()).dtype))
    return y.float().square().mean()


def trained(directory: Path, way: str, weights: Path | None = None) -> list[Tensor]:
    """Make steps of every kind, the first of them after update 300; return all that can be seen of them."""
    name, options, sharding = WAYS[way]
    torch.manual_seed(1)
    with debug_store(directory, durable=False) as store:
        with tiered.construct(store) if weights is None else contextlib.nullcontext():
            model: nn.Module = nn.Sequential(Block(), Block())
        model = tiered.shard(model, store, unit=(Block,), weights=weights, **sharding)
        optimizer = getattr(tiered, name)(model.parameters(), lr=1e-2, weight_decay=0.05, **options)
        loss_of(model, batch(0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        state = optimizer.state_dict()
        for values in state["state"].values():
            values["step"].fill_(COUNT)
        optimizer.load_state_dict(state)

        with tiered.accumulate(model):
            loss_of(model, batch(1)).backward()
        loss_of(model, batch(2)).backward()
        seen = [tiered.clip_grad_norm_(model, 0.01)]
        optimizer.step()
        optimizer.zero_grad()
        seen.append(tiered.clip_grad_norm_(model, 1.0))  # of no gradients

        losses = [loss_of(model, batch(3)), loss_of(model, batch(4))]
        torch.stack(losses).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

        scaler = tiered.GradScaler("cpu")
        scaler.scale(loss_of(model, batch(5))).backward()
        scaler.step(optimizer)
        scaler.update()

        with tiered.unsharded(model):
            seen.append(next(model.parameters()).detach().clone())
        seen += model.state_dict().values()
        for values in optimizer.state_dict()["state"].values():
            assert values["step"].item() == COUNT + 3
            seen += [values[key] for key in sorted(values)]
    return [*losses, *seen]


@functools.cache
def trained_by_default(way: str) -> list[Tensor]:
    with quick_directory() as path:
        return trained(path, way)


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    assert [each.dtype for each in found] == [each.dtype for each in expected]
    assert all(each.is_cpu for each in found)
    different = [index for index, (a, b) in enumerate(zip(found, expected, strict=True)) if not torch.equal(a, b)]
    assert not different, different


@every_dtype
@pytest.mark.parametrize("word", WAYS)
@pytest.mark.usefixtures("swap_all", "kernels_of_word")
def test_training_is_the_same_under_every_default_dtype(tmp_path: Path, word: str, dtype: torch.dtype) -> None:
    expected = trained_by_default(word)
    with default_dtype(dtype):
        found = trained(tmp_path / "b", word)
    assert_equal(found, expected)


@pytest.mark.parametrize("word", WAYS)
@pytest.mark.usefixtures("swap_all", "kernels_of_word")
def test_training_is_the_same_under_a_default_device(tmp_path: Path, word: str) -> None:
    expected = trained_by_default(word)
    with torch.device("meta"):
        found = trained(tmp_path / "b", word)
    assert_equal(found, expected)


def test_weights_are_read_to_the_cpu_under_a_default_device(tmp_path: Path) -> None:
    model = nn.Sequential(Block(), Block(), nn.BatchNorm1d(WIDTH))
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    with debug_store(tmp_path / "run", durable=False) as store, torch.device("meta"):
        found = nn.Sequential(Block(), Block(), nn.BatchNorm1d(WIDTH, device="cpu"))
        state = tiered.shard(found, store, weights=tmp_path / "weights.safetensors").state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(state[name], value), name


def test_tiered_may_be_imported_under_any_defaults(tmp_path: Path) -> None:
    program = (
        "import torch; torch.set_default_dtype(torch.bfloat16); torch.set_default_device('meta'); import tiered\n"
        "with tiered.Store(engine='memory', dram='16MiB') as store:\n"
        "    store['a'] = torch.ones(3000, dtype=torch.float32, device='cpu'); print(store['a'].sum().item())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "3000.0\n", done.stderr

"""The rig's own checks, in pytest's words but no part of the suite: two cards, kills, memory, errors of the device."""

from __future__ import annotations

import json
import logging
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiered
from tests.accelerator.training import device_memory_named_in
from tests.rigs.fake_cuda import device
from tests.store.places import quick_directory, short_files
from tiered.errors import CapacityError
from tiered.units import MiB

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

NUM_STEPS = 30  # of a training that is killed
PROGRAM = (sys.executable, "-m", "tests.rigs.fake_cuda.training")


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A directory in memory."""
    with quick_directory() as path, short_files():
        yield path


@pytest.fixture
def small_card() -> Iterator[int]:
    """Give each device 128 MiB, in bytes, of which torch holds none yet."""
    torch.cuda.empty_cache()
    device.set_device_nbytes(128 * MiB)
    yield 128 * MiB
    device.set_device_nbytes(4096 * MiB)


def trained_by(*arguments: str | Path) -> dict[str, Any]:
    """Run the program to its end and return its last line."""
    output = subprocess.run([*PROGRAM, *map(str, arguments)], check=True, stdout=subprocess.PIPE, text=True).stdout
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    assert found["complaints"] == []
    return found


@cache
def digest_of_plain_torch(num_steps: int) -> str:
    return str(trained_by("--steps", str(num_steps))["digest"])


@pytest.mark.parametrize("update_on", ["cpu", "device"])
def test_a_model_on_the_second_card_leaves_the_first_one_alone(update_on: str, tmp_path: Path) -> None:
    found = trained_by(tmp_path / "store", "--device", "cuda:1", "--is-current", "--update-on", update_on)
    assert found["digest"] == digest_of_plain_torch(3)
    assert found["contexts"] == [1]


@pytest.mark.parametrize("update_on", ["cpu", "device"])
def test_a_model_on_the_second_card_leaves_the_current_device(update_on: str, tmp_path: Path) -> None:
    found = trained_by(tmp_path / "store", "--device", "cuda:1", "--update-on", update_on)
    assert found["digest"] == digest_of_plain_torch(3)
    assert found["moved"] == []


@pytest.mark.parametrize("update_on", ["cpu", "device"])
def test_a_run_that_is_killed_twice_ends_with_the_bits_of_plain_torch(update_on: str, tmp_path: Path) -> None:
    arguments = [str(tmp_path / "store"), "--update-on", update_on, "--steps", str(NUM_STEPS)]
    chance = random.Random(update_on)
    for num_steps in (3, 9):
        with subprocess.Popen([*PROGRAM, *arguments], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for _ in range(num_steps):
                assert process.stdout.readline().startswith("step ")
            time.sleep(chance.random() * 0.02)
            process.kill()
    assert trained_by(*arguments)["digest"] == digest_of_plain_torch(NUM_STEPS)


def wide(width: int = 256) -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(6))
    return nn.Sequential(*layers).cuda()


def rows(index: int, num_rows: int = 4, width: int = 256) -> Tensor:
    """Return fp32 (num_rows, width)."""
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(index)).cuda()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> Tensor:
    """Train on ``batch``, and return the loss on the CPU."""
    loss: Tensor = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach().cpu()


@pytest.mark.parametrize("update_on", ["cpu", "device"])
def test_a_model_computes_with_the_state_that_it_has_loaded(update_on: str, tmp_path: Path) -> None:
    with tiered.Store(tmp_path, dram="24MiB", device_memory="24MiB") as store:
        model = tiered.shard(wide(), store, device="cuda", hold=0, update_on=update_on)
        optimizer = tiered.AdamW(model.parameters(), lr=1e-2)
        step(model, optimizer, rows(0))
        state = {name: value.clone() for name, value in model.state_dict().items()}
        expected = model(rows(1)).detach().cpu()
        step(model, optimizer, rows(2))
        model.load_state_dict(state)
        assert torch.equal(model(rows(1)).detach().cpu(), expected)
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_training_goes_on_after_a_batch_that_had_no_room(small_card: int, tmp_path: Path) -> None:
    plain = wide()
    optimizers: list[Any] = [torch.optim.AdamW(plain.parameters(), lr=1e-3, fused=True)]
    with tiered.Store(tmp_path, dram="24MiB", device_memory="8MiB") as store:
        model = tiered.shard(wide(), store, device="cuda", unit=nn.Sequential, hold=0, activations="keep")
        optimizers.append(tiered.AdamW(model.parameters(), lr=1e-3))
        for too_large in (False, True, True, False):
            if too_large:
                with pytest.raises(torch.OutOfMemoryError) as error:
                    step(model, optimizers[1], rows(1, num_rows=small_card // 2048))
                assert "device_memory" in "".join(error.value.__notes__)
                error.value.__traceback__ = None  # or it holds the activations
                optimizers[1].zero_grad()
            else:
                assert torch.equal(step(model, optimizers[1], rows(2)), step(plain, optimizers[0], rows(2)))


def budget_of(directory: Path) -> int:
    """Return the device budget, in bytes, that tiered gives a model where no budget is named."""
    with tiered.Store(directory, dram="128MiB", durable=False) as store:
        model: Any = tiered.shard(wide(1024), store, device="cuda", unit=nn.Sequential, hold=0)
        return int(next(model.parameters()).segment.unit.tier.memory.budget_bytes)


def test_what_torch_has_cached_is_free_device_memory(small_card: int, tmp_path: Path) -> None:
    emptied = budget_of(tmp_path / "emptied")
    torch.cuda.empty_cache()
    held = [torch.empty(8 * MiB, dtype=torch.uint8, device="cuda") for _ in range(8)]
    held.clear()
    assert torch.cuda.memory_reserved() >= small_card // 2
    assert budget_of(tmp_path / "cached") >= 0.95 * emptied


def uneven(width: int = 1024) -> nn.Module:
    """Build blocks of several sizes on the CPU, of 8 to 16 MiB, so that few units have buffers of one size."""
    widths = (2048, 1200, 2000, 1600, 2048, 1000)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, n), nn.GELU(), nn.Linear(n, width)) for n in widths))


@pytest.mark.parametrize("factor", [1, 1.1, 2.5])
@pytest.mark.parametrize("update_on", ["cpu", "device"])
def test_torch_reserves_little_more_than_the_device_budget(update_on: str, factor: float, tmp_path: Path) -> None:
    options: Any = {"device": "cuda", "unit": nn.Sequential, "hold": 0, "activations": "keep", "update_on": update_on}
    with tiered.Store(tmp_path / "refused", dram="384MiB", device_memory=1, durable=False) as store:
        with pytest.raises(CapacityError) as refusal:
            tiered.shard(uneven(), store, **options)
    budget = int(factor * device_memory_named_in(refusal.value))
    torch.cuda.empty_cache()
    torch.cuda.reset_accumulated_memory_stats()  # of checks before
    with tiered.Store(tmp_path / "store", dram="384MiB", device_memory=budget, durable=False) as store:
        model = tiered.shard(uneven(), store, **options)
        optimizer = tiered.AdamW(model.parameters())
        for index in range(3):
            step(model, optimizer, rows(index, num_rows=2, width=1024))
        caller = torch.cuda.current_stream().cuda_stream  # whose are activations, and gradients as autograd makes them
        pieces = [piece for piece in torch.cuda.memory_snapshot() if piece["stream"] != caller]
    assert sum(piece["total_size"] for piece in pieces) <= 1.05 * budget + 4 * MiB  # of which torch takes 2 at a time
    assert torch.cuda.memory_stats()["num_alloc_retries"] == 0


def test_memory_that_cannot_be_registered_is_used_unregistered(tmp_path: Path, caplog: Any) -> None:
    plain, losses = wide(), []
    optimizers: list[Any] = [torch.optim.AdamW(plain.parameters(), fused=True)]
    device.fail_registration(0)
    with caplog.at_level(logging.WARNING), tiered.Store(tmp_path, dram="24MiB", device_memory="24MiB") as store:
        model = tiered.shard(wide(), store, device="cuda", hold=0)
        optimizers.append(tiered.AdamW(model.parameters()))
        for index in range(2):
            losses += [step(model, optimizers[1], rows(index)), step(plain, optimizers[0], rows(index))]
    assert torch.equal(losses[0], losses[1]) and torch.equal(losses[2], losses[3])
    assert len([record for record in caplog.records if "not page-locked" in record.getMessage()]) == 1
    assert device.registered_nbytes() == 0


def test_an_error_of_the_device_ends_the_run_at_its_last_commit(tmp_path: Path) -> None:
    store = tiered.Store(tmp_path, dram="24MiB", device_memory="24MiB")
    model = tiered.shard(wide(), store, device="cuda")
    optimizer = tiered.AdamW(model.parameters())
    step(model, optimizer, rows(0))
    store.commit({"step": 1}, wait=True)
    expected = {name: value.cpu() for name, value in model.state_dict().items()}
    batch = rows(1)
    device.break_devices(True)
    try:
        with pytest.raises(torch.AcceleratorError):
            step(model, optimizer, batch)
        store.close()
    finally:
        device.break_devices(False)
        store.close()
    with tiered.Store(tmp_path, dram="24MiB", device_memory=0) as again:
        resumed = tiered.shard(wide().cpu(), again, device="cpu", update_on="cpu")
        tiered.AdamW(resumed.parameters())
        assert again.resume() == {"step": 1}
        assert all(torch.equal(value, expected[name]) for name, value in resumed.state_dict().items())

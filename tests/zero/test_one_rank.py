"""Several ranks never train apart in silence: shard refuses them, and DistributedDataParallel works or is named."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import tiered
from tests.rigs.warm_python import WarmPython
from tests.test_docs import ROOT, blocks
from tests.zero.training import debug_store
from tiered.errors import UsageError

CHILD = """
import os, sys, torch, tiered
from torch.nn.parallel import DistributedDataParallel

path, rank, where = sys.argv[1], int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo", init_method=f"file://{path}/group", rank=rank, world_size=2)

def train(through_store):
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3))))
    inner = model.module
    if through_store:
        store = tiered.Store(f"{path}/rank{rank}", dram="32MiB", durable=False, process_group=False)
        tiered.shard(model if where == "around" else inner, store)
        optimizer = tiered.AdamW(model.parameters(), lr=1e-2)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    torch.manual_seed(1 + rank)
    for _ in range(3):
        model(torch.randn(4, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return inner.state_dict()

expected, found = train(False), train(True)
assert all(torch.equal(found[name], expected[name]) for name in expected)
if where == "around":
    os.chdir(path)
    loader, mse_loss = [(torch.randn(4, 8), torch.randn(4, 8))] * 2, torch.nn.functional.mse_loss
    exec(sys.argv[4], globals() | {"Net": lambda: torch.nn.Linear(8, 8)})
torch.distributed.destroy_process_group()
"""


@contextmanager
def group(size: int) -> Iterator[None]:
    """A process group of ``size`` ranks that sends nothing."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def test_shard_refuses_a_world_of_several_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with debug_store(tmp_path / "one") as store:
        store["x"] = torch.ones(3)  # a store is any program's
        model = nn.Linear(4, 4)
        with pytest.raises(UsageError, match=r"WORLD_SIZE=2.*process_group=False"):
            tiered.shard(model, store)
        monkeypatch.setenv("WORLD_SIZE", "1")
        tiered.shard(model, store)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with debug_store(tmp_path / "two", process_group=False) as store:
        tiered.shard(nn.Linear(4, 4), store)


def test_shard_refuses_a_group_that_came_after_the_store(tmp_path: Path) -> None:
    with debug_store(tmp_path) as store, group(2), pytest.raises(UsageError, match="group of 2 ranks"):
        tiered.shard(nn.Linear(4, 4), store)
    with group(1), debug_store(tmp_path) as store:
        tiered.shard(nn.Linear(4, 4), store)


def test_a_store_for_this_process_alone_opens_beside_a_group(tmp_path: Path) -> None:
    with group(2), tiered.Store(tmp_path, dram="16MiB", process_group=False) as store:
        assert store.ranks is None


@pytest.mark.parametrize(
    ("value", "error"), [(True, TypeError), (0, TypeError), ("gloo", TypeError), (object(), TypeError)]
)
def test_a_store_takes_groups_and_meshes_alone(value: Any, error: type[Exception], tmp_path: Path) -> None:
    with group(1), pytest.raises(error, match="expected None, False, a process group or a DeviceMesh"):
        tiered.Store(tmp_path, dram="16MiB", process_group=value)
    with pytest.raises(UsageError, match=r"expected init_process_group\(\)"):
        tiered.Store(tmp_path, dram="16MiB", process_group=value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("part", ["whole", "part"])
def test_ddp_around_a_sharded_model_is_refused_by_name(part: str, tmp_path: Path) -> None:
    with group(1), debug_store(tmp_path) as store:
        model = tiered.shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), store)
        with pytest.raises(UsageError, match=r"DistributedDataParallel first"):
            DistributedDataParallel(model if part == "whole" else model[0], init_sync=part == "whole")


@pytest.mark.parametrize("where", ["around", "inside", "outside"])
def test_ddp_with_updates_in_backward_is_refused_by_name(where: str, tmp_path: Path) -> None:
    with group(1), debug_store(tmp_path) as store:
        ddp = DistributedDataParallel(nn.Linear(4, 4))
        model = tiered.shard({"around": ddp, "inside": nn.Sequential(ddp), "outside": ddp.module}[where], store)
        with pytest.raises(UsageError, match=r'DistributedDataParallel.*update="step"'):
            tiered.AdamW(model.parameters(), update="backward")
            ddp(torch.ones(1, 4))
        with torch.no_grad():
            assert ddp(torch.ones(1, 4)).shape == (1, 4)


@pytest.mark.parametrize("where", ["around", "outside"])
def test_ddp_made_first_has_its_bits_through_a_store(where: str, tmp_path: Path, warm_python: WarmPython) -> None:
    """And docs/recipes.md's lines run."""
    (lines,) = [text for text in blocks(ROOT / "docs/recipes.md", "python") if "DistributedDataParallel(" in text]
    command = [warm_python.executable, "-c", CHILD, str(tmp_path)]
    ranks = [subprocess.Popen([*command, str(rank), where, lines]) for rank in range(2)]
    assert [rank.wait(240) for rank in ranks] == [0, 0]

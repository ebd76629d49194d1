"""sharded_state_dict on one rank: what is loaded is what was saved, and what is refused changes nothing."""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import tiered
from tiered.errors import UsageError
from tiered.interop import checkpoint_shards
from tiered.interop.checkpoint_shards import _order, _rectangles


@pytest.fixture(autouse=True)
def one_process() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # which no_dist=True says, too
        yield


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 7), nn.Linear(7, 5)
        self.norm = nn.BatchNorm1d(7, affine=False)
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.last.weight = nn.Parameter(self.first.weight.detach().t().clone(memory_format=torch.preserve_format))

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 4}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"version": 4}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x.to(self.scale.dtype)) * self.scale
        found = self.last(self.norm(hidden.float()).to(hidden.dtype)).float()
        return found if not hasattr(self, "added") else self.added(found.to(hidden.dtype)).float()


class Run:
    """A model in training, in a store of its own."""

    def __init__(self, path: Path, seed: int, *, dtype: torch.dtype | None = None, **options: Any) -> None:
        torch.manual_seed(seed)
        self.store = tiered.Store(path / str(seed), dram="16MiB")
        self.model = tiered.shard(Net(), self.store, **({} if dtype is None else {"param_dtype": dtype}))
        if options.pop("added", False):
            self.model.added = nn.Linear(5, 5, dtype=dtype)
        make = options.pop("make", tiered.AdamW)
        self.optimizer = make(self.model.parameters(), lr=1e-2 * (seed + 1), **options)

    def step(self, num: int, seed: int = 5) -> list[float]:
        return train(self.model, self.optimizer, num, seed)

    def values(self) -> dict[str, Any]:
        state = self.optimizer.state_dict()
        return copy.deepcopy({"model": self.model.state_dict(), **state})

    def close(self) -> None:
        self.store.close()

    def save(self, folder: Path, **options: Any) -> None:
        with tiered.sharded_state_dict(self.model, self.optimizer, **options) as (model, optimizer):
            dcp.save({"model": model, "optim": optimizer}, checkpoint_id=folder, no_dist=True)

    def load(self, folder: Path, planner: Any = None, **options: Any) -> None:
        with tiered.sharded_state_dict(self.model, self.optimizer, mode="rw", **options) as (model, optimizer):
            dcp.load({"model": model, "optim": optimizer}, checkpoint_id=folder, no_dist=True, planner=planner)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, num: int, seed: int) -> list[float]:
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(num):
        loss = model(torch.randn(4, 5, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_a_stretch_is_at_most_2n_minus_1_rectangles(shape: list[int], data: Any) -> None:
    order = data.draw(st.permutations(range(len(shape))))
    dense = torch.arange(math.prod(shape)).view([shape[dim] for dim in order])
    tensor = dense.permute(sorted(range(len(order)), key=order.__getitem__))
    start = data.draw(st.integers(0, dense.numel() - 1))
    elements = range(start, data.draw(st.integers(start + 1, dense.numel())))
    found = _rectangles(tensor.shape, tensor.stride(), elements, dense.numel())
    assert len(found) <= max(1, 2 * len(shape) - 1)
    most = data.draw(st.integers(1, dense.numel()))
    for rectangles in (found, _rectangles(tensor.shape, tensor.stride(), elements, most)):
        assert [each for rectangle in rectangles for each in rectangle.elements] == list(elements)
        for each in rectangles:
            flat = torch.arange(each.elements.start, each.elements.stop)
            part = tensor[tuple(map(slice, each.offsets, map(sum, zip(each.offsets, each.sizes, strict=True))))]
            assert torch.equal(each.view(flat, _order(tensor.stride())), part)
    assert all(len(each.elements) <= most for each in rectangles)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": torch.bfloat16},
        {"dtype": torch.bfloat16, "state": "compact"},
        {"make": tiered.SGD, "momentum": 0.9, "dtype": torch.bfloat16},
        {"make": tiered.SGD},
        {"make": tiered.Lion},
    ],
)
def test_a_run_goes_on_with_what_it_saved(options: dict[str, Any], tmp_path: Path) -> None:
    with closing(Run(tmp_path, 0, **options)) as run, closing(Run(tmp_path, 1, **options)) as other:
        run.step(3)
        run.save(tmp_path / "saved")
        values = run.values()
        other.step(1)
        other.load(tmp_path / "saved")
        loaded = other.values()
        if options.get("make") is tiered.SGD:  # torch's counts no steps, and has all buffers or none
            for each in (values["state"], loaded["state"]):
                each.pop(0, None)
                for state in each.values():
                    del state["step"]
        assert same(loaded, values)
        assert other.step(2, seed=9) == run.step(2, seed=9)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_plain_torch_and_tiered_load_what_the_other_has_saved(dtype: torch.dtype | None, tmp_path: Path) -> None:
    with closing(Run(tmp_path, 0, dtype=dtype)) as run, closing(Run(tmp_path, 1, dtype=dtype)) as other:
        run.step(3)
        run.save(tmp_path / "saved", master_weights=True)
        net = Net()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.5, fused=True)
        model, state = get_state_dict(net, optimizer)
        dcp.load({"model": model, "optim": state}, checkpoint_id=tmp_path / "saved", no_dist=True)
        set_state_dict(net, optimizer, model_state_dict=model, optim_state_dict=state)
        losses = train(net, optimizer, 2, 9)
        model, state = get_state_dict(net, optimizer)
        dcp.save({"model": model, "optim": state}, checkpoint_id=tmp_path / "plain", no_dist=True)
        if dtype is None:
            assert run.step(2, seed=9) == losses
        other.load(tmp_path / "plain", master_weights=True)
        states = other.optimizer.state_dict()["state"]
        for index, (name, value) in enumerate(net.named_parameters()):
            if optimizer.state[value]["step"]:
                assert torch.equal(states[index].get("master", value), value), name
                for kind in ("exp_avg", "exp_avg_sq", "step"):
                    assert torch.equal(states[index][kind], optimizer.state[value][kind])


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("master_weights", [False, True])
def test_parameters_in_ordinary_memory_ride_along(
    master_weights: bool, dtype: torch.dtype | None, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"added": True, "dtype": dtype}
    with closing(Run(tmp_path, 0, **options)) as run, closing(Run(tmp_path, 1, **options)) as other:
        run.step(2)
        run.save(tmp_path / "saved", master_weights=master_weights)
        values = run.values()
        other.step(1)
        torch.optim.lr_scheduler.ConstantLR(other.optimizer, factor=1)  # which notes an initial_lr
        other.load(tmp_path / "saved", master_weights=master_weights)
        assert other.optimizer.param_groups[0].pop("initial_lr") == 2e-2
        assert same(other.values(), values)
        assert other.step(2, seed=9) == run.step(2, seed=9)


@pytest.fixture
def trained(tmp_path: Path) -> Iterator[Run]:
    with closing(Run(tmp_path, 0, dtype=torch.bfloat16)) as run:
        run.step(2)
        run.save(tmp_path / "saved")
        run.step(1)
        yield run


def test_an_error_in_the_block_changes_nothing(trained: Run, tmp_path: Path) -> None:
    before = trained.values()
    with (
        pytest.raises(ZeroDivisionError),
        tiered.sharded_state_dict(trained.model, trained.optimizer, mode="rw") as (model, optimizer),
    ):
        dcp.load({"model": model, "optim": optimizer}, checkpoint_id=tmp_path / "saved", no_dist=True)
        raise ZeroDivisionError
    assert same(trained.values(), before)
    with pytest.raises(dcp.api.CheckpointException, match=r"the block of tiered\.sharded_state_dict has ended"):
        dcp.save({"model": model}, checkpoint_id=tmp_path / "late", no_dist=True)


def test_a_block_is_for_one_of_both(trained: Run, tmp_path: Path) -> None:
    before = trained.values()
    with tiered.sharded_state_dict(trained.model, trained.optimizer, mode="rw") as (model, optimizer):
        with pytest.raises(dcp.api.CheckpointException, match="has mode='rw'; expected mode='r' to save"):
            dcp.save({"model": model, "optim": optimizer}, checkpoint_id=tmp_path / "zeros", no_dist=True)
    with tiered.sharded_state_dict(trained.model, trained.optimizer) as (model, optimizer):
        with pytest.raises(dcp.api.CheckpointException, match="has mode='r'; expected mode='rw' to load"):
            dcp.load({"model": model, "optim": optimizer}, checkpoint_id=tmp_path / "saved", no_dist=True)
    assert same(trained.values(), before)


def test_a_load_that_failed_and_was_caught_changes_nothing(trained: Run, tmp_path: Path) -> None:
    before = trained.values()
    (file,) = (tmp_path / "saved").glob("*.distcp")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with (
        pytest.raises(UsageError, match=r"of this rank's .* rectangles were loaded, and nothing was changed"),
        tiered.sharded_state_dict(trained.model, trained.optimizer, mode="rw") as (model, optimizer),
        contextlib.suppress(dcp.api.CheckpointException),
    ):
        dcp.load({"model": model, "optim": optimizer}, checkpoint_id=tmp_path / "saved", no_dist=True)
    assert same(trained.values(), before)


def test_tensors_that_a_checkpoint_lacks_stay(trained: Run, tmp_path: Path) -> None:
    with tiered.sharded_state_dict(trained.model) as (model, _):
        dcp.save({"model": {"first.bias": model["first.bias"]}}, checkpoint_id=tmp_path / "part", no_dist=True)
    trained.step(1)
    before = trained.values()
    with pytest.raises(dcp.api.CheckpointException, match="Missing key"):
        trained.load(tmp_path / "part")
    trained.load(tmp_path / "part", planner=DefaultLoadPlanner(allow_partial_load=True))
    after = trained.values()
    assert [name for name in before["model"] if not same(before["model"][name], after["model"][name])] == ["first.bias"]
    masters = [number for number in before["state"] if not same(before["state"][number], after["state"][number])]
    assert len(masters) == 1 and torch.equal(after["state"][masters[0]]["master"], after["model"]["first.bias"].float())


def _without_weights(run: Run, folder: Path) -> None:
    folder = folder.with_name("with master weights")
    run.save(folder, master_weights=True)
    with tiered.sharded_state_dict(run.model, run.optimizer, mode="rw", master_weights=True) as (_, optimizer):
        dcp.load({"optim": optimizer}, checkpoint_id=folder, no_dist=True)


def _of_others(run: Run, folder: Path) -> None:
    with tiered.sharded_state_dict(run.model, run.optimizer, mode="rw") as (_, optimizer):
        dcp.load({"optim": optimizer}, checkpoint_id=folder, no_dist=True)


def _negative(run: Run, folder: Path) -> None:
    with tiered.sharded_state_dict(run.model, run.optimizer, mode="rw") as (model, optimizer):
        dcp.load({"model": model, "optim": optimizer}, checkpoint_id=folder, no_dist=True)
        shard = optimizer["state"]["first.bias"]["exp_avg_sq"].shard
        shard.values(slice(0, 7)).neg_()


def _other_groups(run: Run, folder: Path) -> None:
    with tiered.sharded_state_dict(run.model, run.optimizer, mode="rw") as (model, optimizer):
        dcp.load({"model": model, "optim": optimizer}, checkpoint_id=folder, no_dist=True)
        optimizer["param_groups"][0]["params"].reverse()


def _without_a_moment(run: Run, folder: Path) -> None:
    with tiered.sharded_state_dict(run.model, run.optimizer, mode="rw") as (model, optimizer):
        del optimizer["state"]["first.bias"]["exp_avg"]
        dcp.load({"model": model, "optim": optimizer}, checkpoint_id=folder, no_dist=True)


@pytest.mark.parametrize(
    ("load", "message"),
    [
        (_without_weights, "loaded without its master or the model's weight"),
        (_of_others, "the masters loaded for .* are not those of its values"),
        (_negative, "exp_avg_sq of first.bias has elements below zero"),
        (_other_groups, r"'param_groups'\[0\]\['params'\]"),
        (_without_a_moment, "first.bias was loaded without exp_avg"),
    ],
)
def test_state_that_does_not_fit_changes_nothing(load: Any, message: str, trained: Run, tmp_path: Path) -> None:
    before = trained.values()
    with pytest.raises(UsageError, match=message):
        load(trained, tmp_path / "saved")
    assert same(trained.values(), before)


def test_calls_that_cannot_be(trained: Run, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected mode='r' to save or 'rw' to load, got 'w'"):
        trained.save(tmp_path, mode="w")
    optimizer = trained.optimizer
    with pytest.raises(UsageError, match="expected an optimizer of tiered's, got SGD"):
        trained.optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
        trained.save(tmp_path)
    with pytest.raises(UsageError, match="master_weights=True without the optimizer"):
        tiered.sharded_state_dict(trained.model, master_weights=True).__enter__()
    with pytest.raises(UsageError, match="Linear is not sharded"):
        tiered.sharded_state_dict(nn.Linear(1, 1)).__enter__()
    with pytest.raises(UsageError, match="trains empty, which is not in Linear; expected the whole model"):
        tiered.sharded_state_dict(trained.model.first, optimizer).__enter__()
    with tiered.sharded_state_dict(trained.model) as (model, _):
        with pytest.raises(UsageError, match=r"async_save copies all values first.* store.commit\(wait=False\)"):
            model["first.bias"] + 1
        assert repr(model["first.bias"]).startswith("CheckpointTensor(")
        dcp.save(model, checkpoint_id=tmp_path / "blocking", no_dist=True)
    trained.store.commit(wait=False)
    trained.model(torch.ones(2, 5)).sum().backward()
    with pytest.raises(UsageError, match=r"tiered\.sharded_state_dict"):
        tiered.sharded_state_dict(trained.model).__enter__()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_names_are_those_of_torch_without_wrappers(tmp_path: Path) -> None:
    net = Net()
    net.first = checkpoint_wrapper(net.first)
    model, _ = get_state_dict(net, ())
    with tiered.Store(tmp_path, dram="16MiB") as store:
        sharded = tiered.shard(torch.compile(net), store)
        with tiered.sharded_state_dict(sharded, mode="rw") as (names, _):
            assert names.keys() == model.keys() and "first.weight" in names


def test_a_writer_that_keeps_one_piece_of_a_tensor_is_refused(
    trained: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_shards, "_MOST_NBYTES", 32)
    with tiered.sharded_state_dict(trained.model) as (model, _):
        del model["_extra_state"]
        writer = dcp.HuggingFaceStorageWriter(str(tmp_path / "files"), save_distributed=True)
        with pytest.raises(dcp.api.CheckpointException, match=r"expected dcp.save with torch's own .*save_pretrained"):
            dcp.save(model, storage_writer=writer, no_dist=True)
    tiered.save_pretrained(trained.model.first, tmp_path / "files")
    assert torch.equal(
        load_file(tmp_path / "files" / "model.safetensors")["weight"], trained.model.state_dict()["first.weight"]
    )


def test_the_memory_of_copies_that_were_saved_is_taken_back(
    trained: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_shards, "_WINDOW_NBYTES", 100)
    copies = checkpoint_shards.SavedCopies()
    given = [copies.add(torch.ones(10)) for _ in range(5)]  # of 40 bytes
    assert [each.untyped_storage().nbytes() for each in given] == [0, 0, 0, 40, 40]
    assert given[-1].sum() == 10
    with pytest.raises(RuntimeError):
        given[0].sum()
    before = trained.values()
    trained.save(tmp_path / "window")
    trained.step(1)
    trained.load(tmp_path / "window")
    assert same(trained.values(), before)


def test_a_writer_with_threads(trained: Run, tmp_path: Path) -> None:
    before = trained.values()
    with tiered.sharded_state_dict(trained.model, trained.optimizer) as (model, optimizer):
        writer = dcp.FileSystemWriter(tmp_path / "threads", thread_count=4)
        dcp.save({"model": model, "optim": optimizer}, storage_writer=writer, no_dist=True)
    trained.step(1)
    trained.load(tmp_path / "threads")
    assert same(trained.values(), before)

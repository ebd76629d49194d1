"""RowSparseAdam beside torch.optim.SparseAdam on the table in memory: the same bits, whatever is closed in between."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tiered
from tests.store.rig import simulated_store
from tiered.errors import UsageError
from tiered.units import MiB

NUM_ROWS = 300

torch.sparse.check_sparse_tensor_invariants.disable()


def gradients(step: int, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows that a step touches, repeats among them, and their gradients."""
    generator = torch.Generator().manual_seed(step)
    index = torch.randint(-NUM_ROWS, NUM_ROWS, (40 if step % 7 else 0,), generator=generator)
    return index, torch.randn(len(index), *shape, generator=generator)


def in_memory(shape: tuple[int, ...], num_steps: int) -> torch.Tensor:
    table = torch.nn.Parameter(torch.ones(NUM_ROWS, *shape))
    optimizer = torch.optim.SparseAdam([table], lr=0.01, betas=(0.8, 0.99), eps=1e-6)
    for step in range(num_steps):
        index, grad = gradients(step, shape)
        table.grad = torch.sparse_coo_tensor(index[None] % NUM_ROWS, grad, table.shape)
        optimizer.step()
    return table.detach()


@pytest.mark.parametrize("shape", [(64,), (1024,), (5, 3), ()])
@pytest.mark.parametrize("state", ["adam", None])
def test_the_bits_are_those_of_torch(tmp_path: Path, shape: tuple[int, ...], state: str | None) -> None:
    with tiered.Store(tmp_path, dram="16MiB") as store:
        rows = store.create_rows("t", NUM_ROWS, shape, torch.float32, state=state)
        rows.put(range(NUM_ROWS), torch.ones(NUM_ROWS, *shape))
        optimizer = tiered.RowSparseAdam(rows, lr=0.01, betas=(0.8, 0.99), eps=1e-6)
        for step in range(100):
            optimizer.step(*gradients(step, shape))
            if step == 49:
                store.commit()
        store.rollback()  # to step 50
        for step in range(50, 120):
            optimizer.step(*gradients(step, shape))
        store.commit()
    with tiered.Store(tmp_path, dram="16MiB") as store:
        rows = store.rows("t", state=state)
        assert rows.row_shape == shape and len(rows) == NUM_ROWS
        optimizer = tiered.RowSparseAdam(rows, lr=7.0)
        store.resume()
        for step in range(120, 200):
            optimizer.step(*gradients(step, shape))
        assert torch.equal(rows.get(range(NUM_ROWS)), in_memory(shape, 200))


def test_a_step_before_resume_is_refused_and_loses_no_count(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with tiered.Store(tmp_path, dram="16MiB") as store:
        rows = store.create_rows("t", NUM_ROWS, (8,), torch.float32, state="adam")
        with pytest.raises(UsageError, match="the key is there"):
            store.create_rows("t", 3, (8,), torch.float32)
        optimizer = tiered.RowSparseAdam(rows, lr=0.1)
        optimizer.step([1], torch.ones(1, 8))
        store.commit()
    with tiered.Store(tmp_path, dram="16MiB") as store:
        optimizer = tiered.RowSparseAdam(store.rows("t", state="adam"), lr=0.5)
        with pytest.raises(UsageError, match=r"has 1 steps .* call store.resume\(\) before the first step"):
            optimizer.step([1], torch.ones(1, 8))
        store["other"] = torch.ones(3)
        store.commit()  # keeps the count
        store.resume()
        assert "goes on with the commit's lr=0.1 and not 0.5" in caplog.text
        optimizer.step([1], torch.ones(1, 8))
        assert optimizer.state_dict()["step"] == 2 and optimizer.lr == 0.1
        optimizer.lr = 0.5
        store.commit()
        store.rollback()
        assert optimizer.lr == 0.5
        with pytest.raises(TypeError, match="expected gradients as a dense tensor"):
            optimizer.step([1], torch.ones(1, 8).to_sparse())
        store.commit()
    with tiered.Store(tmp_path, dram="16MiB") as store:  # the other way: a table made anew
        del store["t"]
        rows = store.create_rows("t", NUM_ROWS, (8,), torch.float32, state="adam")
        store.drop_state("rows/t")
        store.commit()
        optimizer = tiered.RowSparseAdam(rows, lr=0.5)
        optimizer.step([1], torch.ones(1, 8))
        assert optimizer.state_dict()["step"] == 1


SCRIPT = """
import sys, torch, tiered
from tests.store.test_row_sparse_adam import NUM_ROWS, gradients
with tiered.Store(sys.argv[1], dram="16MiB") as store:
    if "t" not in store:
        rows = store.create_rows("t", NUM_ROWS, (64,), torch.float32, state="adam")
        rows.put(range(NUM_ROWS), torch.ones(NUM_ROWS, 64))
        store.commit({"step": 0})
    optimizer = tiered.RowSparseAdam(store.rows("t", state="adam"), lr=0.01, betas=(0.8, 0.99), eps=1e-6)
    if store.state["step"]:
        store.resume()
    for step in range(store.state["step"], 200):
        optimizer.step(*gradients(step, (64,)))
        store.commit({"step": step + 1})
        print(step, flush=True)
"""


def test_kills_lose_nothing(tmp_path: Path) -> None:
    for last in (20, 75, 199):
        command = [sys.executable, "-c", SCRIPT, str(tmp_path / "run")]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
        assert process.stdout is not None
        for line in process.stdout:
            if int(line) == last and last < 199:
                os.kill(process.pid, signal.SIGKILL)
                break
        process.stdout.close()
        assert process.wait() == (0 if last == 199 else -signal.SIGKILL)
    with tiered.Store(tmp_path / "run", dram="16MiB") as store:
        assert torch.equal(store.rows("t", state="adam").get(range(NUM_ROWS)), in_memory((64,), 200))


def test_what_cannot_be_updated_is_refused() -> None:
    with simulated_store(budget_nbytes=1 * MiB) as store:
        with pytest.raises(TypeError, match=r"expected rows of torch\.float32, got torch\.bfloat16"):
            tiered.RowSparseAdam(store.create_rows("b", 3, (2,), torch.bfloat16))
        with pytest.raises(ValueError, match=r"state='adam' is for rows of torch\.float32"):
            store.create_rows("b", 3, (2,), torch.bfloat16, state="adam")
        rows = store.create_rows("t", 30, (2,), torch.float32)
        with pytest.raises(ValueError, match="expected lr >= 0"):
            tiered.RowSparseAdam(rows, lr=-1.0)
        with pytest.raises(UsageError, match=r"and no table that create_rows made with state=.adam."):
            store.rows("t", state="adam")
        with pytest.raises(ValueError, match="expected state None or"):
            store.rows("t", state="sgd")
        store["t/exp_avg"] = torch.zeros(3)
        with pytest.raises(UsageError, match=r"'t/exp_avg' holds no moments of <Rows of t: 30 .*; delete the key"):
            tiered.RowSparseAdam(rows)
        del store["t/exp_avg"]  # the remedy
        optimizer = tiered.RowSparseAdam(rows)
        for grad in (torch.zeros(1, 3), torch.zeros(2, 2), torch.zeros(1, 2).double()):
            with pytest.raises(ValueError, match="expected gradients of"):
                optimizer.step([0], grad)
        with pytest.raises(IndexError):
            optimizer.step([30], torch.zeros(1, 2))
        for keys in ("t", ["t", "t/exp_avg"]):
            with pytest.raises(UsageError, match="the rows of 't' have an optimizer already, which is rows/t"):
                tiered.RowSparseAdam(store.rows(keys))
        assert optimizer.state_dict()["step"] == 0


def test_a_sparse_embedding_of_a_sharded_model_is_refused_and_its_rows_are_trained_beside_it(tmp_path: Path) -> None:
    torch.manual_seed(1)
    with tiered.Store(tmp_path, dram="16MiB") as store:
        model = torch.nn.Sequential(torch.nn.Embedding(50, 8, sparse=True), torch.nn.Linear(8, 1))
        weight, head = model[0].weight.detach().clone(), [p.detach().clone() for p in model[1].parameters()]
        tiered.shard(model, store)
        with pytest.raises(UsageError, match=r"read and written under tiered\.unsharded"):
            store.rows("model/parameters/0")
        with tiered.unsharded(model[0]):  # the remedy
            assert torch.equal(model[0].weight, weight)
        with pytest.raises(UsageError, match=r"store\.create_rows\(\.\.\., state=.adam.\), and update its rows"):
            model(torch.tensor([1, 2])).sum().backward()
    layer = torch.nn.Linear(8, 1)
    with tiered.Store(tmp_path / "again", dram="16MiB") as store:
        rows = store.create_rows("table", 50, (8,), torch.float32, state="adam")
        rows.put(range(50), weight)
        optimizer = tiered.RowSparseAdam(rows, lr=0.1)
        layer.load_state_dict(dict(zip(("weight", "bias"), head, strict=True)))
        plain, table = torch.nn.Linear(8, 1), torch.nn.Embedding.from_pretrained(weight, freeze=False, sparse=True)
        plain.load_state_dict(layer.state_dict())
        in_memory = torch.optim.SparseAdam(table.parameters(), lr=0.1)
        for step in range(5):
            tokens = (torch.arange(9) * 7 + step) % 50
            found = rows.get(tokens).requires_grad_()
            layer(found).square().sum().backward()
            assert found.grad is not None
            optimizer.step(tokens, found.grad)
            in_memory.zero_grad()
            plain(table(tokens)).square().sum().backward()
            in_memory.step()
        assert torch.equal(rows.get(range(50)), table.weight)


def test_sparse_gradients_are_clipped_by_the_norm_of_their_sums() -> None:
    table, other = torch.nn.Embedding(50, 8, sparse=True), torch.nn.Linear(8, 3)
    other(table(torch.tensor([3, 4, 3]))).square().sum().backward()
    assert table.weight.grad is not None and other.weight.grad is not None and other.bias.grad is not None
    dense = [table.weight.grad.to_dense(), other.weight.grad.clone(), other.bias.grad.clone()]
    norm = torch.stack([each.norm() for each in dense]).norm()
    found = tiered.clip_grad_norm_([table.weight, *other.parameters()], 0.25)
    assert torch.allclose(found, norm, rtol=1e-6)
    factor = 0.25 / (found + 1e-6)
    assert torch.equal(table.weight.grad.to_dense(), dense[0] * factor)
    assert torch.equal(other.weight.grad, dense[1] * factor)

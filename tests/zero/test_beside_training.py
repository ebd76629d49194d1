"""Training beside other uses of its store: threads that read, leases of most of the budget, views that are kept."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import tiered
from tests.devices.simulated_disk import SimulatedDisk
from tests.store.rig import simulated_store
from tests.zero.training import debug_store
from tiered.errors import CapacityError, StepAbandonedError
from tiered.store.store import Store
from tiered.units import KiB
from tiered.zero.optimizer.background_updates import UpdateThread

TWO_THREADS = True  # how long the layers compute beside I/O is left as users have it

WIDTH = 128
NUM_KEYS = 6


def chain() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(8)])


def losses_of(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> list[Tensor]:
    found = []
    for step in range(num_steps):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach().clone())
    return found


def expected(num_steps: int) -> list[Tensor]:
    plain = chain()
    return losses_of(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3, fused=True), num_steps)


def sharded(store: Store, update: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = tiered.shard(chain(), store, unit=nn.Linear, hold=0)
    return model, tiered.AdamW(model.parameters(), lr=1e-3, update=update)


def read_own(store: Store, index: int) -> None:
    key = index % NUM_KEYS
    assert int(store[f"data/{key}"][0]) == key


def lease_own(store: Store, index: int) -> None:
    key = index % NUM_KEYS
    with store.lease(f"data/{key}", "r") as view:
        assert int(view[0]) == key


def read_parameters(store: Store, index: int) -> None:
    assert store[f"model/parameters/{index % 8}"].numel()


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("use", [read_own, lease_own, read_parameters])
def test_a_thread_that_reads_changes_nothing_and_comes_to_its_turn(
    use: Callable[[Store, int], None], update: str
) -> None:
    disk = SimulatedDisk(capacity_nbytes=64 << 20, can_lose_power=False)
    with simulated_store(disk, budget_nbytes=800 * KiB, durable=False, deadline_s=30) as store:
        for index in range(NUM_KEYS):
            store[f"data/{index}"] = torch.full((100 * KiB,), index, dtype=torch.uint8)
        model, optimizer = sharded(store, update)
        is_over, num_reads, failures = threading.Event(), 0, []

        def read() -> None:
            nonlocal num_reads
            while not is_over.is_set():
                try:
                    use(store, num_reads)
                except Exception as error:
                    failures.append(error)
                    return
                num_reads += 1

        reader = threading.Thread(target=read)
        reader.start()
        try:
            found = losses_of(model, optimizer, 12)
        finally:
            is_over.set()
            reader.join()
        assert not failures
        assert num_reads >= 3, "the reader waited until training was over"
    assert all(torch.equal(a, b) for a, b in zip(found, expected(12), strict=True))


def test_a_lease_of_most_of_the_budget_is_told_of_at_once() -> None:
    with simulated_store(SimulatedDisk(), budget_nbytes=560 * KiB, durable=False, deadline_s=60) as store:
        store["mine"] = torch.zeros(224 * KiB, dtype=torch.uint8)
        model, optimizer = sharded(store, "step")
        losses_of(model, optimizer, 1)
        model(torch.randn(4, WIDTH)).sum().backward()
        with store.lease("mine", "r"), pytest.raises(CapacityError, match=r"'mine'"):
            optimizer.step()
            model(torch.randn(4, WIDTH))


@pytest.mark.parametrize("num_kept", [3, 6])
@pytest.mark.parametrize("spare_kib", [0, 44])
def test_views_of_gradients_that_are_kept_across_steps(num_kept: int, spare_kib: int) -> None:
    with simulated_store(SimulatedDisk(), budget_nbytes=(528 + spare_kib) * KiB, durable=False) as store:
        model, optimizer = sharded(store, "step")
        for _ in range(4):
            model(torch.randn(4, WIDTH)).square().mean().backward()
            kept = [layer.weight.grad for layer in list(model)[:num_kept]]
            optimizer.step()
            optimizer.zero_grad()
        del kept
        model(torch.randn(4, WIDTH))


def test_an_update_that_fails_at_the_end_of_a_backward_abandons_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """retain_graph keeps every unit in use until then; with one unit updated the step is half done."""
    with debug_store(tmp_path) as store:
        model, optimizer = sharded(store, "backward")
        losses_of(model, optimizer, 1)
        store.commit({"step": 1})
        before = {name: value.clone() for name, value in model.state_dict().items()}
        submit, num_submitted = UpdateThread.submit, 0

        def failing(self: UpdateThread, update: object, **options: bool) -> None:
            nonlocal num_submitted
            num_submitted += 1
            if num_submitted == 3:
                raise CapacityError
            submit(self, update, **options)  # type: ignore[arg-type]

        with monkeypatch.context() as patch:
            patch.setattr(UpdateThread, "submit", failing)
            with pytest.raises(CapacityError):
                model(torch.randn(4, WIDTH)).sum().backward(retain_graph=True)
        with pytest.raises(StepAbandonedError):
            optimizer.step()
        store.rollback()
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("activations", ["swap", "auto"])
def test_a_model_is_made_and_fed_of_leases_for_reading(tmp_path: Path, activations: str) -> None:
    """Torch refuses writes to such bytes, and with them each pointer that could write."""
    plain, x = chain(), torch.randn(256, WIDTH)
    plain(x).square().mean().backward()
    torch.optim.AdamW(plain.parameters(), lr=1e-3, fused=True).step()
    with debug_store(tmp_path) as store:
        model = chain()
        store["x"], store["w"] = x, model[0].weight
        with store.lease("w") as weight:
            model[0].weight.data = weight
            model = tiered.shard(model, store, unit=nn.Linear, hold=0, activations=activations)
        optimizer = tiered.AdamW(model.parameters(), lr=1e-3)
        with store.lease("x") as view:
            batch = torch.empty(0)
            batch.data = view
            model(batch).square().mean().backward()
            del batch
        optimizer.step()
        assert torch.equal(model(x), plain(x))

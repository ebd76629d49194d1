"""Where all keys are in DRAM for good, gradients stay in the tensors that autograd made, counted and not copied."""

import ctypes
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiered
from tests.models import CASES
from tests.reference import Recipe
from tests.zero.training import assert_same, debug_store, reference, start
from tiered.bytes.arena import PAGE_NBYTES
from tiered.errors import CapacityError, UsageError
from tiered.zero.gradients.unit_gradients import GradientState

CASE = CASES["gpt"]
WIDTH = 128
Step = Callable[[nn.Module, torch.optim.Optimizer], None]


def gradients_of(model: nn.Module) -> list[Any]:
    units = {parameter.segment.unit: None for parameter in model.parameters()}  # type: ignore[attr-defined]
    return [unit.gradients for unit in units if unit.gradients.nbytes]


def num_own(model: nn.Module) -> int:
    return sum(gradients.state is GradientState.OWN for gradients in gradients_of(model))


def num_pages_in_memory(address: int, nbytes: int) -> int:
    pages = (ctypes.c_ubyte * (nbytes // PAGE_NBYTES))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), pages) == 0
    return sum(page & 1 for page in pages)


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(num_steps=7),
        Recipe(num_steps=7, num_micro_steps=3, max_norm=0.05),
        Recipe(num_steps=7, param_dtype=torch.bfloat16, max_norm=0.05),
    ],
    ids=["plain", "accumulated and clipped", "bf16 and clipped"],
)
def test_bits(recipe: Recipe, update: str, tmp_path: Path) -> None:
    if update == "backward" and recipe.max_norm is not None:
        recipe = dataclasses.replace(recipe, max_norm=None)
    with debug_store(tmp_path, durable=False) as store:
        session = start(CASE, recipe, store, update)
        assert_same(session.run(), reference(CASE, recipe))
        assert all(gradients.buffer is not None for gradients in gradients_of(session.model))


def chain() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])


def batch(step: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))


def backward(model: nn.Module, step: int) -> None:
    model(batch(step)).square().sum().backward()


def settled(store: tiered.Store, *, num_steps: int = 3) -> tuple[nn.Module, Any]:
    model = tiered.shard(chain(), store, unit=nn.Linear)
    optimizer = tiered.AdamW(model.parameters(), lr=1e-3, update="step")
    for step in range(num_steps):
        backward(model, step)
        optimizer.step()
    backward(model, num_steps)
    assert num_own(model) == 4
    return model, optimizer


def expected(*, change: Step | None = None, num_steps: int = 5) -> dict[str, Tensor]:
    """Train in memory; ``change`` comes between the fourth backward and its step."""
    model = chain()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for step in range(num_steps):
        backward(model, step)
        if step == 3 and change is not None:
            change(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def go_on(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    optimizer.step()
    backward(model, 4)
    optimizer.step()
    return model.state_dict()


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_the_budget_has_their_bytes_and_the_arena_keeps_no_pages_for_them(tmp_path: Path) -> None:
    with tiered.Store(tmp_path, dram=32 << 20, durable=False) as store:
        model, optimizer = settled(store)
        for gradients in gradients_of(model):
            buffer = gradients.buffer.lease.buffer
            assert buffer.nbytes >= gradients.nbytes
            assert num_pages_in_memory(buffer.address, buffer.nbytes) == 0
        assert_equal(go_on(model, optimizer), expected())


def ask_for_memory(store: tiered.Store, model: nn.Module) -> None:
    """Take all the memory that the store gives, and give it back."""
    buffers = []
    with pytest.raises(CapacityError):
        while True:
            buffers.append(store.working_set.reserve(64 << 10))
    assert num_own(model) == 0
    for buffer in buffers:
        store.working_set.unreserve(buffer)


def test_under_pressure_they_go_to_nvme_and_come_back(tmp_path: Path) -> None:
    with debug_store(tmp_path, 4 << 20, durable=False) as store:
        model, optimizer = settled(store)
        ask_for_memory(store, model)
        assert_equal(go_on(model, optimizer), expected())


def test_under_pressure_between_clip_and_step(tmp_path: Path) -> None:
    def clip(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)

    with debug_store(tmp_path, 4 << 20, durable=False) as store:
        model, optimizer = settled(store)
        tiered.clip_grad_norm_(model, 0.01)
        assert num_own(model) == 4
        ask_for_memory(store, model)
        assert_equal(go_on(model, optimizer), expected(change=clip))


def test_written_in_place_after_the_clipping_is_refused(tmp_path: Path) -> None:
    with debug_store(tmp_path, durable=False) as store:
        model, optimizer = settled(store)
        tiered.clip_grad_norm_(model, 0.01)
        model[1].weight.grad.mul_(2)  # type: ignore[index,union-attr,operator]
        with pytest.raises(UsageError, match="written in place between"):
            optimizer.step()


def test_a_new_tensor_at_the_address_of_a_clipped_one_has_no_factor(tmp_path: Path) -> None:
    """Memory that is given back is used again: a new tensor may lie where the old one lay, and be as new as it."""
    with debug_store(tmp_path, durable=False) as store:
        model, _ = settled(store)
        for parameter in model.parameters():
            tiered.clip_grad_norm_(model, 0.01)
            parameter.grad = None
            parameter.grad = torch.zeros(parameter.shape)
            gradients = parameter.segment.unit.gradients  # type: ignore[attr-defined]
            gradients.reconcile()
            assert parameter.segment not in gradients.factors  # type: ignore[attr-defined]


def test_gradients_kept_by_the_caller_stay_as_they_are(tmp_path: Path) -> None:
    with debug_store(tmp_path, durable=False) as store:
        model, optimizer = settled(store)
        kept = [parameter.grad for parameter in model.parameters()]
        copies = [gradient.clone() for gradient in kept if gradient is not None]
        go_on(model, optimizer)
        assert all(torch.equal(one, other) for one, other in zip(kept, copies, strict=True))


def test_a_gradient_that_is_part_of_a_larger_tensor_is_copied(tmp_path: Path) -> None:
    """The gradients of joined parameters are parts of one tensor, which any of them would keep alive."""

    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(2))

        def forward(self, rows: Tensor) -> Tensor:
            return rows @ torch.cat([self.first, self.second])

    torch.manual_seed(3)
    with debug_store(tmp_path, durable=False) as store:
        model = tiered.shard(nn.Sequential(Joined()), store, unit=Joined)
        optimizer = tiered.AdamW(model.parameters(), lr=1e-3)
        for step in range(4):
            model(torch.randn(4, 2 * WIDTH)).square().sum().backward()
            assert step < 3 or next(model.parameters()).segment.unit.engine.schedule.is_settled  # type: ignore[attr-defined]
            assert num_own(model) == 0
            optimizer.step()


def test_a_rollback_drops_them_and_the_run_goes_on(tmp_path: Path) -> None:
    recipe = Recipe(num_steps=6)
    with debug_store(tmp_path) as store:
        session = start(CASE, recipe, store, "step")
        for step in range(6):
            if step == 4:
                session.case.loss(session.model, session.case.batch(99)).backward()
                assert num_own(session.model)
                store.rollback()
                assert not num_own(session.model)
            session.run_step(step)
            store.commit()
        assert_same(session.collect(), reference(CASE, recipe))

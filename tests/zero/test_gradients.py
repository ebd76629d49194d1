"""``.grad`` is an ordinary attribute: what autograd, a hook or the caller puts, swaps or drops there is what counts.

Each loop is run over a model in memory and over a sharded one, with gradients in their buffers, where autograd put
them, and driven to NVMe.
"""

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tiered
from tests.models import Case
from tests.reference import Recipe
from tests.zero.training import SEED, debug_store, start
from tiered.errors import CapacityError, UsageError

WIDTH = 16


class Block(nn.Module):
    """Two layers and a norm, on a residual path."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(torch.tanh(self.a(self.norm(x))))


class Blocks(nn.Module):
    """Blocks that are called in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(4)), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor, order: tuple[int, ...] = (0, 1, 2, 3)) -> torch.Tensor:
        for index in order:
            x = self.blocks[index](x)
        return self.head(x).square().mean()


def batch(index: int) -> torch.Tensor:
    """Return fp32 (4, WIDTH)."""
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(index))


CASE = Case(Blocks, lambda index: (batch(index),), unit=(Block,))


class Run:
    """What a loop has: a model, sharded or not, and what to do between two of its statements."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, squeeze: Callable[[], None]) -> None:
        self.model, self.optimizer, self.squeeze = model, optimizer, squeeze
        self.is_sharded = isinstance(optimizer, tiered.AdamW)
        self.first, self.second = (model.get_parameter(f"blocks.1.{layer}.weight") for layer in "ab")
        self.bias = model.get_parameter("blocks.1.a.bias")
        self.seen: list[torch.Tensor] = []

    def backward(self, index: int, order: tuple[int, ...] = (0, 1, 2, 3)) -> None:
        loss = self.model(batch(index), order)
        self.seen.append(loss.detach().clone())
        loss.backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def adding(self) -> AbstractContextManager[None]:
        return tiered.accumulate(self.model) if self.is_sharded else nullcontext()

    def clip(self) -> None:
        if self.is_sharded:
            tiered.clip_grad_norm_(self.model, 0.1)
        else:
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)


def unfrozen_between(run: Run) -> None:
    for parameter in (run.first, run.bias):
        parameter.requires_grad_(False)
    with run.adding():
        run.backward(0)
    run.squeeze()
    for parameter in (run.first, run.bias):
        parameter.requires_grad_(True)
    run.backward(1)


def frozen_and_unfrozen_at_random(run: Run) -> None:
    choice = random.Random(len(run.seen))
    for index in range(3):
        for parameter in run.model.parameters():
            parameter.requires_grad_(choice.random() < 0.5)
        run.model.head.bias.requires_grad_(True)
        with run.adding() if index < 2 else nullcontext():
            run.backward(index, tuple(choice.randrange(4) for _ in range(3)))
    run.model.requires_grad_(True)


def given_to_a_frozen_one(run: Run) -> None:
    run.first.requires_grad_(False)
    run.backward(0)
    run.first.grad = torch.full_like(run.second.grad, 0.5)
    run.first.requires_grad_(True)


def exchanged(run: Run) -> None:
    run.backward(0)
    run.first.grad, run.second.grad = run.second.grad, run.first.grad


def exchanged_before_another_backward(run: Run) -> None:
    exchanged(run)
    run.backward(1)


def handed_on(run: Run) -> None:
    run.backward(0)
    run.first.grad, run.second.grad = run.second.grad, torch.ones(WIDTH, WIDTH)


def replaced_while_stored(run: Run) -> None:
    run.backward(0)
    run.squeeze()
    run.first.grad, run.second.grad, run.bias.grad = torch.ones(WIDTH, WIDTH), torch.zeros(WIDTH, WIDTH), None


def replaced_while_stored_before_another_backward(run: Run) -> None:
    replaced_while_stored(run)
    run.backward(1)


def stored_when_replaced(run: Run) -> None:
    run.backward(0)
    run.first.grad, run.second.grad = run.first.grad * 0.5, None
    run.squeeze()


def zeroed_when_replaced(run: Run) -> None:
    run.backward(0)
    run.first.grad = torch.ones(WIDTH, WIDTH)
    run.optimizer.zero_grad(set_to_none=False)
    run.backward(1)


def dropped_when_given(run: Run) -> None:
    run.first.grad = torch.ones(WIDTH, WIDTH)
    run.optimizer.zero_grad()
    run.backward(0, (0, 3))


def replaced_when_clipped(run: Run) -> None:
    run.backward(0)
    run.clip()
    run.first.grad, run.second.grad = torch.ones(WIDTH, WIDTH), None
    run.squeeze()


def replaced_by_a_strided_one(run: Run) -> None:
    run.backward(0)
    gradient = torch.arange(WIDTH * WIDTH, dtype=torch.float32).view(WIDTH, WIDTH).t()
    run.first.grad = gradient if run.is_sharded else gradient.contiguous()  # torch's kernel reads memory in its order


def scaled_and_clipped_by_torch(run: Run) -> None:
    run.backward(0)
    for parameter in run.model.parameters():
        parameter.grad.mul_(0.25)
    nn.utils.clip_grad_norm_(run.model.parameters(), 0.01)


def dropped_and_repeated(run: Run) -> None:
    run.backward(0)
    run.optimizer.zero_grad()
    run.backward(1)


def ends_at_some(run: Run) -> None:
    run.model(batch(0)).backward(inputs=[run.first, run.bias, run.model.head.weight])


def ends_at_all(run: Run) -> None:
    run.model(batch(0)).backward(inputs=list(run.model.parameters()))


BY_HAND = (
    exchanged,
    exchanged_before_another_backward,
    given_to_a_frozen_one,
    handed_on,
    replaced_while_stored,
    replaced_while_stored_before_another_backward,
    replaced_when_clipped,
    stored_when_replaced,
    zeroed_when_replaced,
    dropped_when_given,
    dropped_and_repeated,
    replaced_by_a_strided_one,
    scaled_and_clipped_by_torch,
)


def trained(run: Run, micro_steps: Callable[[Run], None]) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    for number in range(3):
        run.backward(number)
        run.step()
    for _ in range(2):
        micro_steps(run)
        run.step()
    return run.seen, {name: value.clone() for name, value in run.model.state_dict().items()}


def assert_as_in_memory(
    micro_steps: Callable[[Run], None], directory: Path, *, update: str = "step", activations: str = "auto"
) -> None:
    torch.manual_seed(SEED)
    model = CASE.build()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **Recipe().adamw)
    expected = trained(Run(model, optimizer, lambda: None), micro_steps)
    for hold, is_squeezed in ((0, False), (0, True), ("auto", False)):  # in their buffers, stored, autograd's own
        with debug_store(directory, durable=False) as store:
            session = start(CASE, Recipe(), store, update, hold=hold, activations=activations)
            squeeze = session.squeeze if is_squeezed else lambda: None
            found = trained(Run(session.model, session.optimizer, squeeze), micro_steps)
            assert session.model.head.weight.segment.unit.engine.schedule.is_settled is (hold == "auto")
        assert all(map(torch.equal, found[0], expected[0]))
        assert [name for name, value in expected[1].items() if not torch.equal(found[1][name], value)] == []


@pytest.mark.parametrize("change", BY_HAND)
def test_gradients_put_swapped_and_dropped_by_hand(change: Callable[[Run], None], tmp_path: Path) -> None:
    assert_as_in_memory(change, tmp_path)


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("micro_steps", [unfrozen_between, frozen_and_unfrozen_at_random])
def test_gradients_of_what_is_unfrozen_in_the_middle_of_a_step(
    micro_steps: Callable[[Run], None], update: str, tmp_path: Path
) -> None:
    assert_as_in_memory(micro_steps, tmp_path, update=update)


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("micro_steps", [ends_at_some, ends_at_all])
def test_a_backward_that_ends_at_named_parameters(
    micro_steps: Callable[[Run], None], update: str, tmp_path: Path
) -> None:
    """What recomputes needs its parameters one unit at a time, whatever autograd was given."""
    assert_as_in_memory(micro_steps, tmp_path, update=update, activations="recompute")


def test_a_hook_from_before_shard_that_drops_the_gradient(tmp_path: Path) -> None:
    def build() -> nn.Module:
        model = Blocks()

        def drop(parameter: torch.Tensor) -> None:
            parameter.grad = None

        model.get_parameter("blocks.1.a.weight").register_post_accumulate_grad_hook(drop)
        return model

    def losses(model: nn.Module, optimizer: Any) -> Any:
        return trained(Run(model, optimizer, lambda: None), lambda run: run.backward(len(run.seen)))

    torch.manual_seed(SEED)
    model = build()
    expected = losses(model, torch.optim.AdamW(model.parameters(), fused=True, **Recipe().adamw))
    with debug_store(tmp_path, durable=False) as store:
        session = start(Case(build, CASE.batch, unit=CASE.unit), Recipe(), store)
        found = losses(session.model, session.optimizer)
    assert all(map(torch.equal, found[0], expected[0]))
    assert [name for name, value in expected[1].items() if not torch.equal(found[1][name], value)] == []


@pytest.mark.parametrize("is_squeezed", [False, True])
def test_a_gradient_written_in_place_after_the_clipping_is_refused(is_squeezed: bool, tmp_path: Path) -> None:
    with debug_store(tmp_path, durable=False) as store:
        session = start(CASE, Recipe(), store)
        run = Run(session.model, session.optimizer, session.squeeze)
        run.backward(0)
        run.clip()
        run.first.grad.add_(1.0)
        if is_squeezed:
            run.squeeze()
        with pytest.raises(UsageError, match="clip_grad_norm_"):
            run.step()


def test_a_gradient_that_comes_after_the_update_in_the_backward_is_refused(tmp_path: Path) -> None:
    with debug_store(tmp_path, durable=False) as store:
        session = start(CASE, Recipe(), store, "backward")
        run = Run(session.model, session.optimizer, session.squeeze)
        run.backward(0)
        run.first.grad = torch.ones(WIDTH, WIDTH)
        with pytest.raises(UsageError, match='update="step"'):
            run.step()
        with pytest.raises(UsageError, match="cannot be skipped"):
            run.optimizer.zero_grad()
        run.step()


def test_a_unit_has_one_key_for_the_run_with_bytes_from_its_backward_to_its_update(tmp_path: Path) -> None:
    with debug_store(tmp_path) as store:
        session = start(CASE, Recipe(), store, hold=0)
        run = Run(session.model, session.optimizer, session.squeeze)
        keys = {f"model/gradient/{name}": None for name in ("root", *(f"blocks.{number}" for number in range(4)))}
        key_ids = []
        for step in range(3):
            run.backward(step)
            assert all(map(store.working_set.has_bytes, keys))
            run.squeeze()
            run.step()
            session.model.state_dict()  # waits for the updates
            store.commit({"step": step})
            assert not any(map(store.working_set.has_bytes, keys))
            entries = [store.working_set.entries[key] for key in keys]
            assert not any(entry.residence or entry.row or entry.landing for entry in entries)
            assert not keys.keys() & set(store)
            key_ids.append([entry.key_id for entry in entries])
        assert key_ids[0] == key_ids[1] == key_ids[2]
    with debug_store(tmp_path) as store:
        assert not any(name.startswith("model/gradient/") for name in store) and store.verify().is_clean


def test_after_a_lack_of_room_for_gradients_a_backward_goes_on(tmp_path: Path) -> None:
    with debug_store(tmp_path, durable=False) as store:
        session = start(CASE, Recipe(), store)
        run = Run(session.model, session.optimizer, session.squeeze)
        lease = store.working_set.lease_anew

        def refuse(_: str) -> None:
            raise CapacityError

        store.working_set.lease_anew = refuse  # type: ignore[method-assign]
        with pytest.raises(CapacityError):
            run.first.segment.unit.gradients.open()
        store.working_set.lease_anew = lease  # type: ignore[method-assign]
        run.backward(0)
        run.step()

"""Loss scaling gives the bits of torch's GradScaler over a model in memory, wherever the gradients are."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiered
from tests.models import CASES
from tests.pairwise import pairwise
from tests.reference import MasterAdamW, Recipe
from tests.zero.training import ROOMY_NBYTES, SEED, Session, debug_store, smallest_budget, start
from tiered.errors import UsageError
from tiered.zero.gradients.stand_in import StandIn

CASE = CASES["gpt"]
NAME = "blocks.1.fc.weight"
SCALES: dict[str, dict[str, Any]] = {
    "overflow": {"init_scale": 2.0**127, "growth_factor": 2.0**40, "backoff_factor": 2.0**-40, "growth_interval": 2},
    "odd": {"init_scale": 1000.0 / 3, "growth_factor": 1.7, "growth_interval": 2},
}
DTYPES = {"fp32": None, "bf16": torch.bfloat16}
RECIPES = {"plain": Recipe(), "clip": Recipe(max_norm=0.5), "accumulate": Recipe(num_micro_steps=3)}
NUM_STEPS = 7


def loss_of(model: nn.Module, index: int) -> Tensor:
    """Return the loss of batch ``index``, large enough for gradients that overflow when scaled by 2**127."""
    return CASE.loss(model, CASE.batch(index)) * 1024


class Course:
    """What a training with a scaler showed on its way."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.norms: list[Tensor] = []
        self.scales: list[float] = []
        self.num_stand_ins = 0

    def check(self, other: "Course") -> None:
        """Assert that both are the same, bit for bit."""
        assert self.scales == other.scales
        for ours, theirs in ((self.losses, other.losses), (self.norms, other.norms)):
            assert len(ours) == len(theirs)
            assert all(torch.equal(a, b) or (a != a and b != b) for a, b in zip(ours, theirs, strict=True))


def in_memory(recipe: Recipe, scale: dict[str, Any]) -> tuple[nn.Module, MasterAdamW, Course]:
    """Train by plain PyTorch: torch's scaler over the gradients as they are, then fp32 clipping, then the update."""
    torch.manual_seed(SEED)
    model, course = CASE.build(), Course()
    torch.manual_seed(SEED + 1)
    optimizer = MasterAdamW(model, recipe)
    scaler = torch.amp.GradScaler("cpu", **scale)
    gradients: Any = SimpleNamespace(
        param_groups=[{"params": list(model.parameters())}],
        step=lambda: course.norms.append(norm) if (norm := optimizer.step(recipe.max_norm)) is not None else None,
    )
    for step in range(NUM_STEPS):
        for micro_step in range(recipe.num_micro_steps):
            loss = loss_of(model, step * recipe.num_micro_steps + micro_step)
            scaler.scale(loss / recipe.num_micro_steps).backward()
            course.losses.append(loss.detach().clone())
        scaler.step(gradients)
        scaler.update()
        optimizer.zero_grad()
        course.scales.append(scaler.get_scale())
    return model, optimizer, course


def run_step(session: Session, scaler: torch.amp.GradScaler, step: int, course: Course) -> None:
    """Train one step through the tiers; clips between ``unscale_`` and ``step``."""
    recipe = session.recipe
    for micro_step in range(recipe.num_micro_steps):
        loss = loss_of(session.model, step * recipe.num_micro_steps + micro_step)
        scaler.scale(loss / recipe.num_micro_steps).backward()
        course.losses.append(loss.detach().clone())
        del loss
    if session.is_squeezed:
        session.squeeze()
    course.num_stand_ins += sum(isinstance(p.grad, StandIn) for p in session.model.parameters())
    if recipe.max_norm is not None:
        scaler.unscale_(session.optimizer)
        norm = tiered.clip_grad_norm_(session.model, recipe.max_norm)
        course.norms += [norm.clone()] if norm.isfinite() else []
    scaler.step(session.optimizer)
    scaler.update()
    session.optimizer.zero_grad()
    course.scales.append(scaler.get_scale())


def assert_same(session: Session, model: nn.Module, optimizer: MasterAdamW) -> None:
    found, state = session.model.state_dict(), session.optimizer.state_dict()["state"]
    for index, (name, parameter) in enumerate(model.named_parameters()):
        assert torch.equal(found[name], parameter), name
        master = optimizer.masters[parameter]
        for what in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(state[index][what], optimizer.optimizer.state[master][what]), (name, what)
        if master is not parameter:
            assert torch.equal(state[index]["master"], master), name
        assert int(state[index]["step"]) == int(optimizer.optimizer.state[master]["step"])


@cache
def expected_of(recipe: str, param_dtype: torch.dtype | None, scale: str) -> tuple[nn.Module, MasterAdamW, Course]:
    return in_memory(replace(RECIPES[recipe], param_dtype=param_dtype), SCALES[scale])


@pairwise(
    where=["in_dram", "on_nvme", "torchs_own", "torchs_own_on_nvme"],
    kind=SCALES.keys(), param_dtype=DTYPES, recipe=RECIPES.keys(),
)  # fmt: skip
def test_bits(where: str, kind: str, param_dtype: torch.dtype | None, recipe: str, quick_path: Path) -> None:
    full, scale = replace(RECIPES[recipe], param_dtype=param_dtype), SCALES[kind]
    model, optimizer, expected = expected_of(recipe, param_dtype, kind)
    nbytes = smallest_budget(CASE, full, "step", quick_path / "probe") if "on_nvme" in where else ROOMY_NBYTES
    with debug_store(quick_path / "run", nbytes, durable=False) as store:
        session = start(CASE, full, store)
        session.is_squeezed = "on_nvme" in where
        scaler = torch.amp.GradScaler("cpu", **scale) if "torchs_own" in where else tiered.GradScaler(**scale)
        course = Course()
        for step in range(NUM_STEPS):
            run_step(session, scaler, step, course)
        course.check(expected)
        assert_same(session, model, optimizer)
        assert (course.num_stand_ins > 0) == ("on_nvme" in where)
    if kind == "overflow":
        assert any(b < a for a, b in itertools.pairwise([2.0**127, *expected.scales])), "no step was skipped"


@pytest.mark.parametrize("param_dtype", DTYPES.values(), ids=DTYPES)
def test_a_skipped_step_leaves_everything_as_it_was(param_dtype: torch.dtype | None, tmp_path: Path) -> None:
    with debug_store(tmp_path) as store:
        session = start(CASE, Recipe(param_dtype=param_dtype), store)
        scaler = tiered.GradScaler(init_scale=1.0)
        run_step(session, scaler, 0, Course())
        before = session.model.state_dict(), session.optimizer.state_dict()["state"]
        scaler.update(2.0**127)
        run_step(session, scaler, 1, Course())
        assert scaler.get_scale() == 2.0**126
        after = session.model.state_dict(), session.optimizer.state_dict()["state"]
        assert all(torch.equal(after[0][name], before[0][name]) for name in before[0])
        assert all(torch.equal(after[1][i][w], before[1][i][w]) for i in before[1] for w in before[1][i])
        assert all(parameter.grad is None for parameter in session.model.parameters())
        store.commit({"step": 2})
        session.run_step(2)


def test_update_backward_is_refused(tmp_path: Path) -> None:
    with debug_store(tmp_path, durable=False) as store:
        session = start(CASE, Recipe(), store, "backward")
        scaler = tiered.GradScaler()
        scaler.scale(loss_of(session.model, 0)).backward()
        for act in (scaler.unscale_, scaler.step):
            with pytest.raises(UsageError, match='update="step"'):
                act(session.optimizer)


def test_clipping_scaled_gradients_is_refused(step_session: Session) -> None:
    scaler = tiered.GradScaler()
    scaler.scale(loss_of(step_session.model, 0)).backward()
    tiered.clip_grad_norm_(step_session.model, 1.0)
    with pytest.raises(UsageError, match="unscale_"):
        scaler.step(step_session.optimizer)


def test_the_order_of_calls_is_torchs(step_session: Session) -> None:
    scaler = tiered.GradScaler()
    with pytest.raises(AssertionError, match="_scale is None"):
        scaler.step(step_session.optimizer)
    scaler.scale(loss_of(step_session.model, 0)).backward()
    scaler.unscale_(step_session.optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(step_session.optimizer)
    scaler.step(step_session.optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.step(step_session.optimizer)
    scaler.update()


def test_a_disabled_one_stands_aside(step_session: Session) -> None:
    scaler = tiered.GradScaler(enabled=False)
    run_step(step_session, scaler, 0, Course())
    assert scaler.get_scale() == 1.0
    assert scaler.state_dict() == {}
    scaler.load_state_dict({})


def test_state_interchanges_with_torch() -> None:
    ours, theirs = tiered.GradScaler(init_scale=3.0, growth_interval=5), torch.amp.GradScaler("cpu")
    theirs.load_state_dict(ours.state_dict())
    assert theirs.state_dict() == ours.state_dict()
    ours.load_state_dict(torch.amp.GradScaler("cpu", init_scale=7.0).state_dict())
    assert ours.get_scale() == 7.0


def test_a_committed_scaler_goes_on(tmp_path: Path) -> None:
    """Close after three steps, resume in a new session: the course of an undisturbed one, skipped steps included."""
    scale, whole, parts = SCALES["overflow"], Course(), Course()
    model, optimizer, whole = in_memory(Recipe(), scale)
    for steps in (range(3), range(3, NUM_STEPS)):
        with debug_store(tmp_path) as store:
            session = start(CASE, Recipe(), store)
            scaler = tiered.GradScaler(**scale)
            store.register("scaler", scaler)
            assert store.resume().get("step", 0) == steps.start
            for step in steps:
                run_step(session, scaler, step, parts)
                store.commit({"step": step + 1})
            if steps.stop == NUM_STEPS:
                parts.check(whole)
                assert_same(session, model, optimizer)


@pytest.mark.parametrize("act", ["unscale_", "step"])
def test_a_rollback_forgets_the_step_under_way(act: str, tmp_path: Path) -> None:
    with debug_store(tmp_path) as store:
        session = start(CASE, Recipe(), store)
        scaler = tiered.GradScaler()
        store.register("scaler", scaler)
        run_step(session, scaler, 0, Course())
        store.commit({"step": 1})
        before = session.model.state_dict()
        scaler.scale(loss_of(session.model, 1)).backward()
        call: Callable[[torch.optim.Optimizer], Any] = getattr(scaler, act)
        call(session.optimizer)
        store.rollback()
        after = session.model.state_dict()
        assert all(torch.equal(after[name], before[name]) for name in before)
        run_step(session, scaler, 1, Course())


def test_plain_parameters(tmp_path: Path) -> None:
    """Parameters that were never sharded, of an optimizer whose state is in a store; one of them has no gradient."""
    results = []
    with debug_store(tmp_path, durable=False) as store:
        for made in (
            lambda parameters: (torch.optim.AdamW(parameters, fused=True), torch.amp.GradScaler("cpu")),
            lambda parameters: (tiered.AdamW(parameters, store=store), tiered.GradScaler()),
        ):
            torch.manual_seed(SEED)
            model, unused = nn.Linear(5, 3), nn.Parameter(torch.ones(2))
            optimizer, scaler = made([*model.parameters(), unused])
            for scale in (None, 2.0**127, 4.0):
                loss = model(torch.ones(2, 5)).square().sum() * 1024
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update(scale)
                optimizer.zero_grad()
            results.append((*model.parameters(), unused))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))

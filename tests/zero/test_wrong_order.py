"""The training loop in the wrong order: refused, or as in memory; never silently something else."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiered
from tests.models import CASES
from tests.reference import Recipe
from tests.zero.training import SEED, Session, assert_same, debug_store, reference, start
from tiered.errors import UsageError

CASE = CASES["gpt"]
NAME = "blocks.1.fc.weight"


@pytest.fixture
def backward_session(tmp_path: Path) -> Iterator[Session]:
    with debug_store(tmp_path) as store:
        session = start(CASE, Recipe(), store, "backward")
        session.run_step(0)
        store.commit({"step": 1})
        yield session


def loss_of(session: Session) -> Tensor:
    return CASE.loss(session.model, CASE.batch(1))


def change_and_step(name: str) -> Callable[[Session], Any]:
    def act(session: Session) -> None:
        session.optimizer.param_groups[0][name] = 0.5
        session.optimizer.step()

    return act


def scale_and_step(session: Session) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.step(session.optimizer)


TOO_LATE: dict[str, Callable[[Session], Any]] = {
    "clip": lambda session: tiered.clip_grad_norm_(session.model, 1.0),
    "torch's clip": lambda session: nn.utils.clip_grad_norm_(session.model.parameters(), 1.0),
    "rate": change_and_step("lr"),
    "decay": change_and_step("weight_decay"),
    "scaler": scale_and_step,
}


@pytest.mark.parametrize("act", TOO_LATE.values(), ids=TOO_LATE)
def test_update_backward_refuses(act: Callable[[Session], Any], backward_session: Session) -> None:
    loss_of(backward_session).backward()
    with pytest.raises(UsageError, match='update="step"'):
        act(backward_session)


def test_update_backward_refuses_a_second_backward(backward_session: Session) -> None:
    first, second = loss_of(backward_session), loss_of(backward_session)
    first.backward()
    with pytest.raises(UsageError, match='update="step"'):
        second.backward()


@pytest.mark.parametrize("update", ["step", "backward"])
def test_commit_between_backward_and_step_is_refused(update: str, tmp_path: Path) -> None:
    with debug_store(tmp_path) as store:
        session = start(CASE, Recipe(), store, update)
        session.run_step(0)
        loss_of(session).backward()
        with pytest.raises(UsageError, match="gradient"):
            store.commit({"step": 1})
        session.optimizer.step()
        session.optimizer.zero_grad()
        assert store.commit({"step": 2}) is not None or store.generation >= 1


def test_step_without_gradients_changes_nothing(session: Session) -> None:
    before = session.model.state_dict()
    session.optimizer.step()
    session.optimizer.zero_grad()
    after = session.model.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert not session.optimizer.state_dict()["state"] or all(
        int(state["step"]) == 0 for state in session.optimizer.state_dict()["state"].values()
    )


def test_a_second_step_without_a_backward_changes_nothing(session: Session) -> None:
    session.run_step(0)
    before = session.model.state_dict()
    session.optimizer.step()
    after = session.model.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_zero_grad_before_step_drops_the_gradients(tmp_path: Path) -> None:
    with debug_store(tmp_path, durable=False) as store:
        session = start(CASE, Recipe(), store)
        before = session.model.state_dict()
        loss_of(session).backward()
        session.optimizer.zero_grad()
        session.optimizer.step()
        after = session.model.state_dict()
        assert all(torch.equal(after[name], before[name]) for name in before)
        assert all(parameter.grad is None for parameter in session.model.parameters())


def test_unsharded_in_the_middle_of_a_step_is_refused_or_true(session: Session) -> None:
    before = session.model.state_dict()[NAME]
    loss = CASE.loss(session.model, CASE.batch(0))
    try:
        with tiered.unsharded(session.model.blocks[1]):
            assert torch.equal(session.model.get_parameter(NAME), before)
    except UsageError:
        pass
    loss.backward()


def test_writing_in_unsharded_between_forward_and_backward_is_never_silent(session: Session) -> None:
    """Autograd refuses a backward through a weight that was modified since; so must we."""
    loss = CASE.loss(session.model, CASE.batch(0))
    with pytest.raises((UsageError, RuntimeError)):
        with tiered.unsharded(session.model.blocks[1]), torch.no_grad():
            session.model.get_parameter(NAME).mul_(2)
        loss.backward()


def test_a_second_backward_through_one_graph(tmp_path: Path) -> None:
    """``retain_graph`` under update="step" is as in memory."""
    torch.manual_seed(SEED)
    plain = CASE.build()
    torch.manual_seed(SEED + 1)
    loss = CASE.loss(plain, CASE.batch(0))
    loss.backward(retain_graph=True)
    loss.backward()
    with debug_store(tmp_path, durable=False) as store:
        session = start(CASE, Recipe(), store)
        loss = CASE.loss(session.model, CASE.batch(0))
        loss.backward(retain_graph=True)
        loss.backward()
        for name, parameter in plain.named_parameters():
            assert torch.equal(session.model.get_parameter(name).grad, parameter.grad), name
        session.optimizer.zero_grad()


def test_autograd_grad_is_refused_or_true(tmp_path: Path) -> None:
    torch.manual_seed(SEED)
    plain = CASE.build()
    torch.manual_seed(SEED + 1)
    expected = torch.autograd.grad(CASE.loss(plain, CASE.batch(0)), [plain.get_parameter(NAME)])
    with debug_store(tmp_path, durable=False) as store:
        session = start(CASE, Recipe(), store)
        loss = CASE.loss(session.model, CASE.batch(0))
        try:
            found = torch.autograd.grad(loss, [session.model.get_parameter(NAME)])
        except UsageError:
            return
        assert torch.equal(found[0], expected[0])


class _Refusal:
    """What is asked for at the wrong time, between a backward that has updated and its step."""

    def forward(self, session: Session) -> None:
        loss_of(session)

    def backward(self, session: Session) -> None:
        self.second.backward()

    def zero_grad(self, session: Session) -> None:
        session.optimizer.zero_grad()

    def commit(self, session: Session) -> None:
        session.store.commit({"step": 1})

    def state_dict(self, session: Session) -> None:
        session.model.state_dict()

    def touch(self, session: Session) -> None:
        session.model.get_parameter(NAME).sum()

    second: Tensor


@pytest.mark.parametrize("name", ["forward", "backward", "zero_grad", "commit", "state_dict", "touch"])
@pytest.mark.parametrize("durable", [True, False])
def test_a_refusal_under_update_backward_costs_nothing(name: str, durable: bool, tmp_path: Path) -> None:
    """The step that is due can be concluded, and the run goes on with the bits of one that asked for nothing."""
    with debug_store(tmp_path, durable=durable) as store:
        session = start(CASE, Recipe(num_steps=3), store, "backward")
        session.run_step(0)
        refusal = _Refusal()
        with torch.random.fork_rng():
            refusal.second = loss_of(session)
        loss = CASE.loss(session.model, CASE.batch(1))
        loss.backward()
        session.trained.losses.append(loss.detach().clone())
        with torch.random.fork_rng(), pytest.raises(UsageError):
            getattr(refusal, name)(session)
        session.optimizer.step()
        session.optimizer.zero_grad()
        session.run_step(2)
        assert_same(session.collect(), reference(CASE, Recipe(num_steps=3)))


@pytest.mark.parametrize("durable", [True, False])
def test_an_evaluation_between_backward_and_step_sees_what_is_updated(durable: bool, tmp_path: Path) -> None:
    recipe = Recipe(num_steps=2)
    with debug_store(tmp_path, durable=durable) as store:
        session = start(CASE, recipe, store, "backward")
        for step in range(2):
            loss = CASE.loss(session.model, CASE.batch(step))
            loss.backward()
            session.trained.losses.append(loss.detach().clone())
            with torch.no_grad(), torch.random.fork_rng():
                before = CASE.loss(session.model.eval(), CASE.batch(5))
            session.optimizer.step()
            session.optimizer.zero_grad()
            with torch.no_grad(), torch.random.fork_rng():
                assert torch.equal(CASE.loss(session.model, CASE.batch(5)), before)
            session.model.train()
        assert_same(session.collect(), reference(CASE, recipe))

"""Ways that a refusal names lead on: each is taken after the refusal. docs/remedies.md has them all."""

import copy
import errno
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tiered
from tests.models import CASES
from tests.reference import Recipe
from tests.zero.training import Session, debug_store, start
from tiered.errors import CapacityError, UsageError
from tiered.zero import state_dict_copies
from tiered.zero.model_state import ModelState

CASE = CASES["gpt"]
NAME = "blocks.1.fc.weight"


IN_UNSHARDED: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "expected inside a forward or backward of the model, or between the two": (torch.sum, torch.sum),
    "writes a sharded parameter": (lambda p: p.mul_(2), lambda p: p.mul_(2)),
    r"refused torch\.func": (torch.func.vmap(torch.sum), torch.func.vmap(torch.sum)),
    r"refused set_\(\)": (lambda p: p.set_(torch.zeros(3)), lambda p: p.copy_(torch.zeros(p.shape))),
    "values were touched past tiered|Cannot access data pointer": (lambda p: torch.Tensor(p) + 0, lambda p: p + 0),
}
"""The words of a refusal: the call that is refused, and the one to make inside ``with tiered.unsharded(module):``."""


@pytest.mark.parametrize("words", IN_UNSHARDED)
def test_what_is_refused_between_steps_is_done_inside_unsharded(words: str, step_session: Session) -> None:
    refused, allowed = IN_UNSHARDED[words]
    model, plain = step_session.model, CASE.build()
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        with pytest.raises((UsageError, RuntimeError), match=words):  # RuntimeError: torch's, with or without our words
            refused(model.get_parameter(NAME))
        expected = allowed(plain.get_parameter(NAME))
        with tiered.unsharded(model.blocks[1]):
            assert torch.equal(allowed(model.get_parameter(NAME)), expected)
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in model.state_dict().items())


IN_MEMORY: dict[str, Callable[[Any], Any]] = {
    "refused deepcopy of a sharded parameter": lambda model: copy.deepcopy(model.get_parameter(NAME)),
    "pickling of a sharded parameter": lambda model: pickle.dumps(model.get_parameter(NAME)),
    "pickling or deepcopy of a sharded model": pickle.dumps,
    r"torch\.jit\.trace of": lambda model: torch.jit.trace(model.blocks[0].fc, torch.ones(1, 24), check_trace=False),
    r"inside torch\.func \(grad": lambda model: torch.func.functionalize(model.blocks[0].fc)(torch.ones(1, 24)),
    "over a forward of a sharded model": lambda model: torch.func.vmap(model.blocks[0].fc)(torch.ones(2, 24)),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.trace:DeprecationWarning")
@pytest.mark.parametrize("words", IN_MEMORY)
def test_what_a_sharded_model_refuses_a_model_built_afresh_with_its_values_does(
    words: str, step_session: Session
) -> None:
    with pytest.raises(UsageError, match=words):
        IN_MEMORY[words](step_session.model)
    plain = CASE.build()
    plain.load_state_dict(step_session.model.state_dict())
    IN_MEMORY[words](plain)


def test_a_constructed_parameter_is_used_inside_the_block_or_after_shard(tmp_path: Path) -> None:
    with debug_store(tmp_path, durable=False) as store:
        with tiered.construct(store):
            model = nn.Linear(4, 4)
            inside = model.weight.sum()
        with pytest.raises(UsageError, match=r"after `with tiered\.construct.*or tiered\.shard\(model, store\) first"):
            model.weight.sum()
        with pytest.raises(UsageError, match=r"expected tiered\.shard\(model\) first"):
            tiered.AdamW(model.parameters())
        model = tiered.shard(model, store)
        with tiered.unsharded(model):
            assert torch.equal(model.weight.sum(), inside)
        tiered.AdamW(model.parameters())


@pytest.mark.parametrize("act", ["clip", "by hand"])
def test_what_updates_in_backward_refuse_updates_in_step_do(act: str, tmp_path: Path) -> None:
    def run(update: str) -> None:
        with debug_store(tmp_path / update, durable=False) as store:
            session = start(CASE, Recipe(), store, update)
            CASE.loss(session.model, CASE.batch(0)).backward()
            if act == "clip":
                tiered.clip_grad_norm_(session.model, 1.0)
            else:
                session.model.get_parameter(NAME).grad = torch.ones(session.model.get_parameter(NAME).shape)
            session.optimizer.step()
            assert session.optimizer.state_dict()["state"][0]["step"] == 1

    with pytest.raises(UsageError, match=r'expected tiered\.AdamW\(\.\.\., update="step"\)'):
        run("backward")
    run("step")


def test_a_state_of_an_optimizer_without_room_is_kept_by_a_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with debug_store(tmp_path) as store:
        session = start(CASE, Recipe(), store)
        session.run_step(0)
        expected = session.optimizer.state_dict()["state"][0]["exp_avg"].clone()
        with monkeypatch.context() as patch:
            patch.setattr(state_dict_copies, "LEAST_IN_FILE_NBYTES", 0)
            patch.setattr(os, "posix_fallocate", full)
            patch.setattr(state_dict_copies, "free_memory", lambda: 10)
            with pytest.raises(CapacityError, match=r"store\.commit\(\) keeps the state, and store\.resume\(\)"):
                session.optimizer.state_dict()
        store.commit({"step": 1})
    with debug_store(tmp_path) as store:
        session = start(CASE, Recipe(), store)
        assert store.resume() == {"step": 1}
        assert torch.equal(session.optimizer.state_dict()["state"][0]["exp_avg"], expected)


def test_a_model_as_an_older_version_laid_it_out_is_named() -> None:
    """Its ``state_dict()`` goes into a new store as that of any other version does."""
    with pytest.raises(UsageError, match=r"older version of tiered.*model\.state_dict\(\) of it loaded into a new"):
        ModelState(nn.Linear(2, 2), []).compare({})


@pytest.mark.usefixtures("swap_all")
def test_a_forward_from_before_a_rollback_is_made_anew(tmp_path: Path) -> None:
    with debug_store(tmp_path) as store:
        session = start(CASE, Recipe(), store, activations="swap")
        store.commit({"step": 0})
        loss = CASE.loss(session.model, CASE.batch(0))
        store.rollback()
        with pytest.raises(UsageError, match=r"from before store\.rollback\(\) or resume\(\); expected a new forward"):
            loss.backward()
        session.run_step(0)

"""Where the whole model is in DRAM for good nothing is asked for, and little is done: no thread, no second lease."""

import copy
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import tiered
from tests.models import CASES
from tests.reference import Recipe
from tests.zero.training import assert_same, debug_store, reference, start
from tiered.errors import UsageError

CASE = CASES["gpt"]
RECIPE = Recipe(num_steps=6)


def num_updates(store: tiered.Store) -> Counter[str]:
    """Return how many updates each thread has run."""
    work = store.working_set.recorder.statistics().work
    return Counter({each.who: each.num for each in work if each.word == "update"})


@pytest.mark.parametrize("update", ["step", "backward"])
def test_updates_run_in_the_calling_thread_unless_a_mode_would_see_them(update: str, tmp_path: Path) -> None:
    with debug_store(tmp_path, durable=False) as store:
        session = start(CASE, RECIPE, store, update)
        engine = next(session.model.parameters()).segment.unit.engine
        for step in range(3):
            session.run_step(step)
        assert engine.schedule.is_settled
        before = num_updates(store)
        session.run_step(3)
        assert set(num_updates(store) - before) == {"caller"}
        before = num_updates(store)
        with FlopCounterMode(display=False):
            session.run_step(4)
        session.model.state_dict()  # waits for what is pending
        assert set(num_updates(store) - before) == {"tiered-update"}
        session.run_step(5)
        assert_same(session.collect(), reference(CASE, RECIPE))


def test_nothing_is_settled_where_not_all_is_held(tmp_path: Path) -> None:
    with debug_store(tmp_path, durable=False) as store:
        session = start(CASE, RECIPE, store, hold=0)
        for step in range(3):
            session.run_step(step)
        assert not next(session.model.parameters()).segment.unit.engine.schedule.is_settled
        assert set(num_updates(store)) == {"tiered-update"}


@pytest.mark.parametrize("update", ["step", "backward"])
def test_units_stay_open_from_forward_to_backward(update: str, tmp_path: Path) -> None:
    with debug_store(tmp_path, durable=False) as store:
        session = start(CASE, RECIPE, store, update)
        engine = next(session.model.parameters()).segment.unit.engine
        num_opened = []
        for step in range(6):
            before = engine.open_units.num_swaps
            session.run_step(step)
            num_opened.append(engine.open_units.num_swaps - before)
        assert engine.schedule.is_settled
        assert set(num_opened) == {len(engine.units)}
        with torch.no_grad():
            CASE.loss(session.model, CASE.batch(0))
        assert sum(unit.is_open for unit in engine.units) <= 1, "an evaluation has no backward: but for the root"
        assert_same(session.collect(), reference(CASE, RECIPE))


def test_a_write_in_a_forward_is_found_at_the_end_of_the_unit(tmp_path: Path) -> None:
    with debug_store(tmp_path) as store:
        model = tiered.shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), store, unit=nn.Linear)
        optimizer = tiered.AdamW(model.parameters())
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        assert model[0].weight.segment.unit.engine.schedule.is_settled  # type: ignore[union-attr]
        store.commit({})
        model[0].register_forward_pre_hook(lambda module, _: module.weight.detach().mul_(2))
        with pytest.raises(UsageError, match=r"parameter 0\.weight was written in place during a forward"):
            model(torch.ones(2, 4))
        store.rollback()


def test_the_parameters_of_two_models_meet_in_one_operation(tmp_path: Path) -> None:
    plain = [nn.Linear(4, 4), nn.Linear(4, 4)]
    with debug_store(tmp_path / "one") as one, debug_store(tmp_path / "two") as two:
        models = [tiered.shard(copy.deepcopy(model), store) for model, store in zip(plain, (one, two), strict=True)]
        for first, second in (plain, models):
            outputs = [first(torch.ones(2, 4)), second(torch.ones(2, 4))]
            penalty = torch.nn.functional.linear(first.weight, second.weight, second.bias).square().sum()
            (outputs[0].sum() + outputs[1].sum() + penalty).backward()
        for mine, other in zip(models, plain, strict=True):
            for parameter, expected in zip(mine.parameters(), other.parameters(), strict=True):
                assert parameter.grad is not None and expected.grad is not None
                assert torch.equal(parameter.grad, expected.grad)

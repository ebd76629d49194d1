"""Where the whole model is in DRAM for good nothing is asked for, and updates run in the thread that submits them."""

from collections import Counter
from pathlib import Path

import pytest
from torch.utils.flop_counter import FlopCounterMode

import tiered
from tests.models import CASES
from tests.reference import Recipe
from tests.zero.training import assert_same, debug_store, reference, start

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

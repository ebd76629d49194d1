"""`tiered train` survives SIGKILL at any instant: nothing durable is lost, and the end has the same bits."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.kills import Campaign, Verdict
from tests.rigs.warm_python import WarmPython

NUM_KILLS = 8  # bench/soak.py goes on with them
NUM_MAKING = 4


@pytest.fixture(scope="module")
def verdict(tmp_path_factory: pytest.TempPathFactory, warm_python: WarmPython) -> Iterator[Verdict]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", warm_python.executable)  # of which the nursery is forked
        campaign = Campaign(Path(tmp_path_factory.mktemp("kill")))
    try:
        yield campaign.run(NUM_KILLS, NUM_MAKING)
    finally:
        campaign.close()


def test_nothing_durable_is_lost_and_resumed_runs_end_with_the_same_bits(verdict: Verdict) -> None:
    assert not verdict.wrong


def test_kills_are_spread_as_they_should_be(verdict: Verdict) -> None:
    assert verdict.count("training") >= NUM_KILLS
    assert verdict.count("making") >= NUM_MAKING
    assert verdict.count("resuming") >= 2
    assert 3 * verdict.num_inside_commit >= NUM_KILLS
    assert len({kill.durable for kill in verdict.kills if kill.phase == "training"}) >= 3


def test_the_campaign_can_see_a_loss(verdict: Verdict) -> None:
    """A generation sealed and not yet durable is lost by a kill: reported as durable, it would count as lost."""
    assert any(kill.found < kill.sealed for kill in verdict.kills if kill.is_inside_commit)

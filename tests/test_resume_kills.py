"""A run that is killed ten times anywhere and resumed is the undisturbed run, bit for bit."""

import sys

import pytest

from bench.resumes import campaign_of, resume_many
from tests.rigs.warm_python import WarmPython


def test_a_run_killed_ten_times_is_the_undisturbed_run(
    warm_python: WarmPython, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", warm_python.executable)  # of which the nursery is forked
    with campaign_of(10, 0) as campaign:
        resumed = resume_many(campaign, seed=0, num_kills=10)
        assert not resumed.wrong
        assert resumed.num_kills == 10
        # And the comparison sees a difference where there is one: a run of other random numbers.
        wrong = resume_many(campaign, seed=0, num_kills=1, more=("--seed", "9")).wrong
        assert "other losses" in wrong and "other parameters" in wrong and "another committed state" in wrong

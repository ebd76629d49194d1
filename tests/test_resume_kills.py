"""A run that is killed ten times anywhere and resumed is the undisturbed run, bit for bit."""

from bench.resumes import campaign_of, resume_many


def test_a_run_killed_ten_times_is_the_undisturbed_run() -> None:
    with campaign_of(10, 0) as campaign:
        resumed = resume_many(campaign, seed=0, num_kills=10)
        assert not resumed.wrong
        assert resumed.num_kills == 10
        # And the comparison sees a difference where there is one: a run of other random numbers.
        wrong = resume_many(campaign, seed=0, num_kills=1, more=("--seed", "9")).wrong
        assert "other losses" in wrong and "other parameters" in wrong and "another committed state" in wrong

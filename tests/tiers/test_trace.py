"""The recorded order of use, with uses that another thread was promised."""

from tiered.tiers.schedule import NextUsePolicy, Schedule
from tiered.tiers.trace import Trace


def test_promised_uses_are_recorded_behind_the_next_use_of_this_thread() -> None:
    trace = Trace(["u", "v"])
    trace.record("u")
    trace.promise(["s0", "s1"], unrecorded=["u"])
    trace.record("v")
    for key in ("u", "s0", "s1"):  # whenever the other thread gets to them
        trace.kept(key)
    trace.end_step()
    assert list(trace.upcoming()) == ["u", "v", "s0", "s1"]


def test_promised_uses_at_the_end_of_a_step_belong_to_it() -> None:
    trace = Trace(["u"])
    trace.record("u")
    trace.promise(["s"])
    trace.end_step()
    assert list(trace.upcoming()) == ["u", "s"]


def test_promised_keys_are_the_last_to_be_evicted_until_they_are_used() -> None:
    trace = Trace(["u", "v", "s"])
    policy = NextUsePolicy(trace)
    trace.record("u")
    trace.promise(["s"])
    assert policy.victim({"s": 1, "u": 1}, None) == "u"
    trace.record("v")
    trace.kept("s")
    assert policy.victim({"s": 1, "u": 1}, None) == "s"


def test_promised_keys_are_asked_for_beside_the_expected_ones() -> None:
    asked: list[list[str]] = []

    def prefetch(keys: object) -> int:
        asked.append(list(keys))  # type: ignore[call-overload]
        return 0

    schedule = Schedule(Trace(["u", "v", "s", "w"]), prefetch, dict.fromkeys("usvw", 1), window_bytes=1)
    schedule.use("u")
    schedule.hand_over(["s"], unrecorded=["g"])
    schedule.use_promised("g")
    schedule.use_promised("s")
    schedule.use("v")
    assert asked == [["v"], ["g", "s", "v"], ["s", "v"], ["v"], ["w"]]

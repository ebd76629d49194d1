"""The recorded order of use, with uses that another thread was promised; what is asked for ahead, beside what."""

import itertools
import random
import tracemalloc

import pytest

from tiered.tiers.schedule import NextUsePolicy, Rooms, Schedule
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
    assert list(trace.upcoming()) == ["s", "u"]
    trace.kept("s")
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


def test_the_next_use_of_this_thread_comes_behind_the_first_of_what_it_has_just_promised_and_the_others_after() -> None:
    # A backward: the update of u runs while v does, and w waits for it.
    states = [f"s{number}" for number in range(6)]
    trace = Trace(["u", "v", *states, "w", "t"])
    trace.record("u")
    trace.promise(states)
    before = [*states[:4], "v", *states[4:], "w", "t"]
    assert list(trace.upcoming()) == [*before, "u"]
    assert [trace.distance(key) for key in before[:4]] == [0, 1, 2, 3]
    assert trace.distance("v") == 4
    trace.record("v")
    after = [*states, "w", "t", "u"]
    assert list(trace.upcoming()) == [*after, "v"]
    assert [trace.distance(key) for key in after] == list(range(9))
    trace.kept("s0")
    assert [trace.distance(key) for key in after[1:]] == list(range(8))


def test_a_forward_uses_what_was_updated_before_what_is_still_promised() -> None:
    # A step that has handed everything over: v waits for its update, u has had it.
    trace = Trace()
    trace.record("u")
    trace.record("v")
    trace.promise(["u", "s", "v", "t0", "t1", "t2", "t3"])
    trace.end_step()
    for key in ("u", "s"):
        trace.kept(key)
    assert list(trace.upcoming()) == ["v", "t0", "t1", "t2", "u", "t3", "s"]
    assert [trace.distance(key) for key in ("v", "t0", "t1", "t2", "u")] == [0, 1, 2, 3, 4]
    assert trace.distance("s") > trace.distance("t3") > 4


def test_uses_at_one_time_are_repeated_together() -> None:
    trace = Trace()
    assert trace.record("u", "room")
    assert not trace.record("u", "room")
    assert trace.record("u")
    trace.end_step()
    assert list(trace.upcoming()) == ["u", "room"]
    trace.record("u", "room")
    assert list(trace.upcoming()) == ["u", "room"]
    assert [trace.distance("u"), trace.distance("room")] == [0, 2]


def rooms_of(nbytes: dict[str, int], due: int) -> Rooms:
    """Return rooms of these sizes, ``due`` bytes before all else, none of which was leased yet."""
    rooms = Rooms(lambda name: name in rooms.filled)
    rooms.nbytes = nbytes | {"due": due}
    rooms.opening = "due"
    return rooms


def schedule_of(order: list[str], keys: str, rooms: Rooms, window_bytes: int) -> Schedule:
    """Return a schedule of keys of one byte each."""
    return Schedule(Trace(order), dict.fromkeys(keys, 1), window_bytes=window_bytes, rooms=rooms)


def test_promised_keys_are_asked_for_in_the_order_of_use() -> None:
    schedule = schedule_of(["u", "v", "s", "w"], "ugsvw", rooms_of({}, 0), window_bytes=3)
    asked = [
        schedule.use("u"),
        schedule.hand_over(["s"], unrecorded=["g"]),
        schedule.use_promised("g"),
        schedule.use_promised("s"),
        schedule.use("v"),
    ]
    assert [list(wanted) for wanted in asked] == [
        ["v", "s", "w"], ["g", "s", "v"], ["s", "v", "w"], ["v", "s", "w"], ["w", "u", "v"],
    ]  # fmt: skip


def test_hand_overs_that_belong_together_ask_once_at_their_end() -> None:
    schedule = schedule_of(["u", "v", "s", "t"], "uvst", rooms_of({}, 0), window_bytes=2)
    schedule.is_handing_over = True
    assert schedule.hand_over(["s"]) == {}
    assert schedule.hand_over(["t"]) == {}
    assert list(schedule.end_hand_overs()) == ["s", "t"]


def test_nothing_is_asked_for_where_all_is_there_for_good() -> None:
    schedule = schedule_of(["u", "v", "w"], "uvw", rooms_of({}, 0), window_bytes=2)
    schedule.settle()
    assert schedule.use("u") == schedule.hand_over(["w"]) == schedule.rewind() == {}
    schedule.learn("x", 1, window_bytes=2)
    assert list(schedule.use("u")) == ["w", "v"]
    schedule.settle()  # what was learnt is in nobody's hands for good
    assert list(schedule.use("v")) == ["w", "u"]


@pytest.mark.parametrize("has_room", [True, False])
def test_small_keys_that_all_have_room_are_asked_for_again_when_an_eighth_of_them_was_used(has_room: bool) -> None:
    order = [f"key {i}" for i in range(100)]
    asked: list[list[str]] = []
    schedule = Schedule(Trace(order), dict.fromkeys(order, 1), window_bytes=64)
    for key in order[:20]:
        if wanted := schedule.use(key):
            asked.append(list(wanted))
            schedule.granted(len(wanted) if has_room else 0)
    seen = [0, 9, 18] if has_room else list(range(20))  # after how many uses, the first not counted
    assert asked == [order[at + 1 : at + 65] for at in seen]
    assert list(schedule.advance()) == order[20:84]  # and whenever somebody says so


def test_a_key_is_asked_for_beside_what_is_leased_before_its_use() -> None:
    schedule = schedule_of(["u", "v", "room v", "s", "w"], "uvsw", rooms_of({"room v": 5}, 7), window_bytes=3)
    assert schedule.use("u") == {"v": 7, "s": 12, "w": 12}


def test_a_room_that_was_given_back_is_read_ahead_with_the_key_beside_it() -> None:
    rooms = rooms_of({"room u": 5, "room v": 5, "room w": 5}, 7)
    schedule = schedule_of(["u", "room u", "v", "room v", "w", "room w", "x"], "uvwx", rooms, window_bytes=2)
    rooms.filled |= {"room v", "room w"}
    assert schedule.advance() == {"u": 7, "v": 12, "room v": 12}


def test_a_room_that_is_leased_needs_no_more_and_is_no_key() -> None:
    rooms = rooms_of({"room u": 5, "room v": 5}, 0)
    schedule = schedule_of(["u", "room u", "v", "room v", "w"], "uvw", rooms, window_bytes=3)
    rooms.filled.add("room u")
    rooms.leased.add("room u")
    rooms.opening = "room u"
    assert schedule.advance() == {"u": 0, "v": 0, "w": 5}


def test_a_prefetch_evicts_nothing_that_is_used_within_twice_the_window() -> None:
    schedule = schedule_of(["u", "v", "w", "x", "y"], "uvwxy", rooms_of({}, 0), window_bytes=1)
    policy = NextUsePolicy(schedule.trace, schedule.is_near)
    schedule.use("u")
    assert policy.victim({"w": 1}, "v") is None
    assert policy.victim({"w": 1, "x": 1}, "v") == "x"
    assert policy.victim({"w": 1}, None) == "w"


def test_a_prefetch_evicts_nothing_that_was_handed_over() -> None:
    schedule = schedule_of(["u", "v", "w", "x", "y", "z"], "uvwxyzgst", rooms_of({}, 0), window_bytes=1)
    policy = NextUsePolicy(schedule.trace, schedule.is_near)
    schedule.use("u")
    schedule.hand_over([], unrecorded=["g", "s", "t", "z"])
    assert policy.victim({"z": 1}, "g") is None
    assert policy.victim({"z": 1, "y": 1}, "g") == "y"
    schedule.use_promised("z")
    assert policy.victim({"z": 1}, "g") == "z"


def test_what_is_used_later_is_waited_for_rather_than_a_near_key_evicted() -> None:
    trace = Trace(["u", "v", "w", "x"])
    policy = NextUsePolicy(trace, {"v", "w"}.__contains__)
    trace.record("u")
    assert policy.is_worth_waiting("v", ["w"])
    assert policy.is_worth_waiting("v", ["v", "never seen"])
    assert not policy.is_worth_waiting("w", ["v"])
    assert not policy.is_worth_waiting("w", ["w"])
    assert not policy.is_worth_waiting("x", ["never seen"])  # not near: it goes at once


def test_keys_that_were_handed_over_can_be_taken_back() -> None:
    schedule = schedule_of(["u", "v"], "uv", rooms_of({}, 0), window_bytes=1)
    schedule.hand_over([], unrecorded=["v"])
    schedule.take_back(["v"])
    assert list(schedule.trace.upcoming()) == ["u", "v"]


@pytest.mark.parametrize("seed", range(20))
def test_the_victim_is_the_first_of_those_that_are_expected_last(seed: int) -> None:
    choice = random.Random(seed)
    names = [f"key {i}" for i in range(12)]
    trace = Trace(choice.choices(names[:9], k=20))
    for _ in range(60):
        trace.record(choice.choice(names[:10]))
        if choice.random() < 0.3:
            trace.promise(choice.sample(names[:11], 3))
        if choice.random() < 0.3:
            trace.kept(choice.choice(names[:11]))
        if choice.random() < 0.05:
            trace.end_step()
        keys = choice.sample(names, 7)
        distances = [trace.distance(key) for key in keys]
        assert trace.farthest(keys) == (keys[distances.index(max(distances))], max(distances))


@pytest.mark.parametrize("seed", range(20))
def test_what_is_upcoming_is_each_key_once_in_the_order_of_its_next_use(seed: int) -> None:
    choice = random.Random(seed)
    expected = choice.choices([f"key {i}" for i in range(9)], k=30)
    trace, cursor, last = Trace(expected), 0, ""
    for _ in range(200):
        if choice.random() < 0.02:
            trace.rewind()
            cursor, last = 0, ""
        assert list(trace.upcoming()) == list(dict.fromkeys([*expected[cursor:], *expected[:cursor]]))
        key = choice.choice([*expected[cursor : cursor + 2], "another"])
        trace.record(key)
        if key != last and key in expected[cursor:]:
            cursor = expected.index(key, cursor) + 1
        last = key


def test_a_look_at_what_comes_next_takes_no_copy_of_all_there_is() -> None:
    names = [f"key {i}" for i in range(50_000)]
    trace = Trace(names)
    trace.promise(names)
    next(trace.upcoming())
    tracemalloc.start()
    try:
        assert list(itertools.islice(trace.upcoming(), 100)) == names[:100]
        assert tracemalloc.get_traced_memory()[1] < 100_000  # a list of them all has 400,000 bytes
    finally:
        tracemalloc.stop()
    assert list(trace.upcoming()) == names


def test_no_key_is_looked_at_behind_one_that_is_not_expected() -> None:
    keys = iter(["a", "other 0", "other 1", "b"])
    assert Trace(["a", "b"]).farthest(keys)[0] == "other 0"
    assert next(keys) == "other 1"


def test_uses_that_no_step_follows_are_forgotten_in_the_end() -> None:
    trace = Trace(["a", "b"])
    for _ in range(200_000):
        trace.record("a")
        trace.record("b")
    assert len(trace._recorded) <= (1 << 16) + 1
    trace.end_step()
    assert len(trace._expected) <= (1 << 16) + 1

"""Going back: rollback, resume, what is registered, and the guards that are asked first."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from tests.devices.simulated_disk import SimulatedDisk
from tests.store.rig import Counter, assert_holds, filled, numbers, simulated_store
from tiered.errors import (
    UsageError,
)
from tiered.store.store import Store
from tiered.units import KiB

PAGE = 4 * KiB


# Going back


def test_rollback_restores_changed_deleted_and_replaced_keys_without_writing(store: Store) -> None:
    values = filled(store)
    store.commit({"step": 1})
    with store.lease("ordinary", "rw") as view:
        view.zero_()
    store["streamed"] = torch.ones(3)
    del store["inline"]
    store["inline"] = numbers(2 * PAGE, 4)
    store["new"] = numbers(PAGE)
    store.working_set.swap_out(store)
    before = store.statistics().write_bytes
    store.rollback()
    assert_holds(store, values)
    assert store.statistics().write_bytes == before
    assert store.statistics().used_bytes == 13 * PAGE
    assert store.commit() == 2
    assert_holds(store, values)


def test_rollback_counts_the_held_keys_that_are_there_then(store: Store) -> None:
    """Bytes set aside would be too few, or none left for others, after a key that is gone or back."""
    working_set = store.working_set
    store["a"] = numbers(2 * PAGE)
    store.commit()
    working_set.hold(["a"])
    del store["a"]
    store["new"] = numbers(8 * PAGE)
    working_set.hold(["new"])
    store.rollback()
    assert working_set.held_bytes == 2 * PAGE
    working_set.set_aside(10 * PAGE, lambda: False)
    left = working_set.budget_bytes - 12 * PAGE
    assert working_set.admits(left) and not working_set.admits(left + PAGE)
    working_set.unreserve(working_set.reserve(left))


def test_rollback_loads_what_is_registered_and_needs_a_commit_for_that(store: Store) -> None:
    counter = Counter(3)
    store.register("counter", counter)
    filled(store)
    with pytest.raises(UsageError, match="nothing was committed"):
        store.rollback()
    assert len(store) == 3
    store.commit()
    counter.count = 4
    store.rollback()
    assert counter.count == 3


def test_rollback_refuses_what_was_registered_later_and_changes_nothing(store: Store) -> None:
    filled(store)
    store.commit()
    store.register("counter", Counter())
    store["inline"] = numbers(5)
    with pytest.raises(UsageError, match="missing 'counter'"):
        store.rollback()
    assert torch.equal(store["inline"], numbers(5))


def test_resume_loads_and_compares_what_is_registered(disk: SimulatedDisk, caplog: pytest.LogCaptureFixture) -> None:
    with simulated_store(disk) as store:
        assert store.resume() == {}
        store.register("scheduler", Counter(3))
        store.register("loader", Counter(4))
        assert store.resume() == {}
        store.commit({"step": 9})
    with simulated_store(disk) as store:
        assert store.registered_state("scheduler") == {"count": 3}
        assert store.registered_state("sampler") is None
        counter = Counter()
        store.register("scheduler", counter)
        store["a"] = numbers(PAGE)
        with caplog.at_level(logging.WARNING):
            assert store.resume() == {"step": 9}
        assert counter.count == 3
        assert "'loader'" in caplog.text
        assert "a" not in store  # changes before resume are rolled back
        store.register("sampler", Counter())
        with pytest.raises(UsageError, match=r"missing 'sampler'; committed but not registered: 'loader'"):
            store.resume()
    with simulated_store(disk) as store:
        store.register("scheduler", Counter())
        store.register("loader", Counter())
        assert store.resume() == {"step": 9}
        store.register("sampler", Counter(5))
        store.commit({"step": 10})
    with simulated_store(disk) as store:
        assert store.registered_state("sampler") == {"count": 5}


def test_what_nobody_registers_stays_in_every_commit_until_it_is_dropped(disk: SimulatedDisk) -> None:
    def committed(name: str) -> object:
        with simulated_store(disk) as store:
            return store.registered_state(name)

    state = {"count": 4, "rates": [0.1, -0.0, 1e300], "seen": torch.arange(3)}

    class Loader(Counter):
        def state_dict(self) -> dict[str, Any]:
            return state

    with simulated_store(disk) as store:
        store.register("scheduler", Counter(3))
        store.register("loader", Loader())
        store.commit({"step": 9})
        text = store._generations.root.state
    with simulated_store(disk) as store:  # another program's, which knows of neither
        store["a"] = numbers(PAGE)
    with simulated_store(disk) as store:
        assert store.generation == 2 and store._generations.root.state == text
        counter = Counter()
        store.register("scheduler", counter)
        assert store.resume() == {"step": 9} and counter.count == 3
        counter.count = 5
        store.commit()
        with pytest.raises(UsageError, match="scheduler"):
            store.drop_state("scheduler")
        with pytest.raises(KeyError):
            store.drop_state("sampler")
        store.drop_state("loader")
        store.rollback()
        store["a"] = numbers(PAGE, 1)
    loader: Any = committed("loader")
    assert committed("scheduler") == {"count": 5} and loader["rates"] == state["rates"]
    with simulated_store(disk) as store:
        store.drop_state("loader")
        store.commit()
    assert committed("scheduler") == {"count": 5} and committed("loader") is None


def test_registration_refuses_what_cannot_be_kept_and_taken_names(store: Store) -> None:
    class Odd(Counter):
        def state_dict(self) -> dict[str, object]:
            return {"base": {"lrs": [object()]}}

    with pytest.raises(TypeError, match=r"scheduler\.state_dict\(\)\['base'\]"):
        store.register("scheduler", Odd())
    with pytest.raises(TypeError, match="no method"):
        store.register("scheduler", object())  # type: ignore[arg-type]
    store.register("scheduler", Counter())
    with pytest.raises(UsageError, match="taken"):
        store.register("scheduler", Counter())
    assert store.registered("scheduler")
    assert not store.registered("loader")


# Guards


def test_guards_are_asked_first_and_without_locks(store: Store) -> None:
    words: list[str] = []

    def guard(word: str) -> None:
        words.append(word)
        len(store)
        if word == "commit":
            store["finished"] = numbers(10)

    store.add_guard(guard)
    store.commit()
    assert "finished" in store
    store.rollback()
    store.resume()
    store.close()
    assert words == ["commit", "rollback", "resume", "close"]


def test_a_guard_can_refuse_a_commit(store: Store) -> None:
    def refuse(word: str) -> None:
        if word == "commit":
            raise UsageError("gradients are pending")

    store.add_guard(refuse)
    with pytest.raises(UsageError, match="pending"):
        store.commit()
    assert store.generation == 0


def test_a_guard_that_raises_at_close_keeps_it_from_committing(disk: SimulatedDisk) -> None:
    store = simulated_store(disk)
    filled(store)

    def refuse(word: str) -> None:
        raise UsageError("the step is half done")

    store.add_guard(refuse)
    with pytest.raises(UsageError, match="half done"):
        store.close()
    store.close()
    with simulated_store(disk) as store:
        assert len(store) == 0


def test_every_guard_is_asked_at_close_in_every_kind_of_store(disk: SimulatedDisk) -> None:
    asked: list[int] = []

    def refuse(word: str) -> None:
        asked.append(0)
        raise UsageError("the step is half done")

    for durable in (True, False):
        store = simulated_store(disk if durable else None, durable=durable)
        store.add_guard(refuse)
        store.add_guard(lambda word: asked.append(1))
        with pytest.raises(UsageError, match="half done"):
            store.close()
    assert asked == [0, 1, 0, 1]


def test_a_guard_may_roll_back_at_close(disk: SimulatedDisk) -> None:
    with simulated_store(disk) as store:
        values = filled(store)
        store.commit()
        filled(store, seed=4)
        store.add_guard(lambda word: store.rollback() if word == "close" else None)
    with simulated_store(disk) as store:
        assert_holds(store, values)

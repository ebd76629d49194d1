"""The recorder: sums always, intervals in a ring while asked to, and what a store makes of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tiered
from tests.store.rig import WAIT_S, GatedStore, simulated_store, stored, write_key
from tiered.stats import MovedStatistics
from tiered.store.waiting.recorder import CALLER, Begun, Recorder, Wait
from tiered.units import KiB

PAGE = 4 * KiB


@pytest.fixture
def gated() -> Iterator[GatedStore]:
    made = GatedStore(budget_nbytes=16 * PAGE)
    yield made
    made.close()


def test_sums_are_kept_by_thread_and_word() -> None:
    recorder = Recorder()
    begun_s = time.monotonic() - 2

    def work() -> None:
        recorder.waited(Wait.READ, "b", Begun(begun_s))
        recorder.worked("update", "b", Begun(begun_s))

    thread = threading.Thread(target=work, name="tiered-update")
    thread.start()
    thread.join(WAIT_S)
    recorder.waited(Wait.COMMIT, "", Begun(begun_s))
    recorder.waited(Wait.COMMIT, "", Begun(begun_s))
    statistics = recorder.statistics()
    late_s = time.monotonic() - begun_s - 2  # however long this thread did not run
    assert 2 <= statistics.waits_of("tiered-update")["demand read"] <= 2 + late_s
    assert list(statistics.waits_of(CALLER)) == ["commit"]
    assert 4 <= statistics.waits_of(CALLER)["commit"] <= 4 + 2 * late_s
    assert [(work.who, work.word, work.num) for work in statistics.work] == [("tiered-update", "update", 1)]
    assert 2 <= statistics.seconds_of("update") <= 2 + late_s


def test_moved_bytes_are_counted_by_class_of_key() -> None:
    recorder = Recorder()
    recorder.classify("model/state/", "optimizer state")
    for key, nbytes, is_write in (("model/state/a", 100, False), ("model/state/b", 7, True), ("mine", 3, True)):
        recorder.end_move(key, nbytes, recorder.begin_move(), is_write=is_write)
    assert recorder.statistics().moved == (MovedStatistics("optimizer state", 100, 7), MovedStatistics("other", 0, 3))


def test_devices_are_busy_while_anything_is_on_its_way() -> None:
    recorder = Recorder()
    first = recorder.begin_move()
    second = recorder.begin_move()
    recorder.end_move("a", 1, first, is_write=False)
    busy = recorder.statistics().device_busy_seconds
    recorder.end_move("b", 1, second, is_write=True)
    done = recorder.statistics().device_busy_seconds
    assert 0 < busy <= done == recorder.statistics().device_busy_seconds


def test_spans_are_recorded_only_between_start_and_stop() -> None:
    recorder = Recorder()
    recorder.worked("forward", "before", recorder.begin())
    recorder.start(10)
    begun_s = time.monotonic()
    recorder.worked("forward", "blocks.0", Begun(begun_s))
    recorder.end_move("k", 5, recorder.begin_move(), is_write=True)
    intervals, num_dropped = recorder.stop()
    recorder.worked("forward", "after", recorder.begin())
    assert [(interval.word, interval.subject, interval.who, interval.nbytes) for interval in intervals] == [
        ("forward", "blocks.0", CALLER, 0),
        ("swap out", "k", "", 5),
    ]
    assert begun_s == intervals[0].start_s <= intervals[0].end_s
    assert num_dropped == 0


def test_the_ring_keeps_the_last_spans_and_counts_the_others() -> None:
    recorder = Recorder()
    recorder.start(3)
    for number in range(10):
        recorder.worked("update", str(number), recorder.begin())
    intervals, num_dropped = recorder.stop()
    assert [interval.subject for interval in intervals] == ["7", "8", "9"]
    assert num_dropped == 7
    with pytest.raises(ValueError, match="at least one"):
        recorder.start(0)


def test_a_wait_that_is_woken_and_goes_on_is_one_span() -> None:
    recorder = Recorder()
    recorder.start(10)
    begun_s = time.monotonic()
    for _ in range(5):
        recorder.waited(Wait.READ, "a", Begun(begun_s))  # begun before the last one ended, however slow this thread is
    recorder.waited(Wait.READ, "b", Begun(begun_s))
    recorder.waited(Wait.READ, "b", Begun(time.monotonic() + 1))  # a later one
    intervals, _ = recorder.stop()
    assert [(interval.word, interval.subject) for interval in intervals] == [
        ("wait: demand read", "a"),
        ("wait: demand read", "b"),
        ("wait: demand read", "b"),
    ]
    assert intervals[0].start_s == begun_s <= intervals[0].end_s


def test_a_lease_that_waits_for_bytes_waits_for_a_demand_read(gated: GatedStore) -> None:
    working_set = gated.store.working_set
    write_key(working_set, "a", 2 * PAGE, 1)
    stored(working_set, "a")
    assert gated.store.statistics().recorder.moved == (MovedStatistics("other", 0, 2 * PAGE),)
    before = gated.store.statistics().recorder.waits_of(CALLER)
    gated.device.hold = lambda operation: True
    thread = threading.Thread(target=lambda: working_set.lease("a", "r").release())
    thread.start()
    assert gated.device.has_held.wait(WAIT_S)
    gated.device.open()
    thread.join(WAIT_S)
    after = gated.store.statistics()
    assert after.recorder.waits_of(CALLER).get("demand read", 0) >= before.get("demand read", 0)
    assert after.recorder.moved == (MovedStatistics("other", 2 * PAGE, 2 * PAGE),)


def test_more_than_the_budget_waits_for_write_back_and_reads() -> None:
    with simulated_store(budget_nbytes=16 * PAGE) as store:
        working_set = store.working_set
        for i in range(40):
            write_key(working_set, f"k{i}", 2 * PAGE, i)
        for i in range(40):
            working_set.lease(f"k{i}", "r").release()
        statistics = store.statistics()
        moved = {moved.name: moved for moved in statistics.recorder.moved}
        assert moved["other"].write_bytes == statistics.write_bytes
        assert moved["other"].read_bytes == statistics.read_bytes
        assert statistics.recorder.device_busy_seconds > 0
        assert statistics.stall_seconds == sum(statistics.recorder.waits_of(CALLER).values())


def test_a_commit_is_work_of_its_own_thread_and_its_catalog_is_counted(tmp_path: Path) -> None:
    with tiered.Store(tmp_path / "store", dram="16MiB") as store:
        recorder = store.working_set.recorder
        recorder.start(100)
        store["a"] = torch.arange(100_000)
        store.commit()
        intervals, _ = recorder.stop()
        assert {(interval.word, interval.who) for interval in intervals} >= {
            ("commit", "tiered-commit"),
            ("flush", "tiered-commit"),
        }
        assert store.statistics().recorder.seconds_of("commit") > 0
        assert store.statistics().catalog_write_bytes >= 4096

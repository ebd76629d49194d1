"""The times of a device's streams: what each works and stands idle, without a thread that waits for it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import tiered
from tests.accelerator.training import ROOMY_NBYTES, case_on, smallest_device_memory
from tests.reference import Recipe
from tests.zero.training import start
from tiered.store.waiting.recorder import Recorder, Wait
from tiered.tiers.device_clock import COMPUTE, COPY_AHEAD, COPY_IN, COPY_OUT, COPY_TO_UPDATE, UPDATE, DeviceClock
from tiered.tools.train.summary import write_timeline

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def clock_of(recorder: Recorder) -> DeviceClock:
    clock = DeviceClock(torch.device("sim", 0), recorder)
    recorder.clock = clock
    return clock


def test_an_interval_lies_between_the_moments_of_the_host_that_enclose_it(sim: ModuleType) -> None:
    recorder = Recorder()
    clock = clock_of(recorder)
    stream = torch.Stream(device="sim")
    clock.name(stream, COPY_IN)
    recorder.start(8)
    before_s = time.monotonic()
    begun = clock.mark_on(stream, COPY_IN)
    clock.note_on(stream, "copy in", "a", begun, nbytes=7)
    after_s = time.monotonic()
    (interval,), _ = recorder.stop()
    assert (interval.word, interval.subject, interval.who, interval.nbytes) == ("copy in", "a", COPY_IN, 7)
    near_s = 0.05  # the two clocks are compared by a thread that may be interrupted
    assert before_s - near_s <= interval.start_s <= interval.end_s <= after_s + near_s


def test_what_has_not_ended_is_told_later(sim: ModuleType) -> None:
    recorder = Recorder()
    clock = clock_of(recorder)
    sim.set_query_delay(2)
    begun = clock.mark()
    assert begun is not None and begun.track == COMPUTE
    clock.note("forward", "root", begun)
    assert [len(recorder.statistics().work) for _ in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_events_are_used_again_though_nobody_asks_for_figures(sim: ModuleType) -> None:
    clock = clock_of(Recorder())
    for _ in range(1000):
        begun = clock.mark()
        assert begun is not None
        clock.note("forward", "root", begun)
    assert len(clock._free) + 2 * sum(map(len, clock._pending.values())) <= 256


def test_a_thread_of_ours_has_no_time_on_the_callers_stream(sim: ModuleType) -> None:
    clock = clock_of(Recorder())
    assert clock.mark(is_caller=False) is None


@pytest.mark.parametrize("update_on", ["cpu", "device"])
def test_a_step_is_told_stream_by_stream(update_on: str, sim: ModuleType, tmp_path: Path) -> None:
    options: dict[str, Any] = {"device": "sim", "update_on": update_on, "activations": "keep", "hold": 0}
    budget = smallest_device_memory("gpt", Recipe(), tmp_path / "refused", **options)
    with tiered.Store(tmp_path / "store", dram=ROOMY_NBYTES, device_memory=budget) as store:
        session = start(case_on("sim", "gpt"), Recipe(), store, **options)
        store.working_set.recorder.start(10_000)
        for step in range(3):
            session.run_step(step)
        store.commit({"step": 3})
        statistics = store.statistics().recorder
        intervals, num_dropped = store.working_set.recorder.stop()
    units = [unit.name for unit in next(session.model.parameters()).segment.unit.engine.units]  # type: ignore[attr-defined]
    told = {(interval.who, interval.word) for interval in intervals}
    assert {(COPY_IN, "copy in"), (COPY_OUT, "copy out"), (COMPUTE, "forward"), (COMPUTE, "backward")} <= told
    assert ((UPDATE, "update bucket") in told) == (update_on == "device")
    assert (COMPUTE, f"wait: {Wait.COPY}") in told
    of_units = (COMPUTE, "backward unit")
    backwards = {interval.subject for interval in intervals if (interval.who, interval.word) == of_units}
    assert backwards == set(units)
    device = statistics.device
    assert device is not None and device.name == "sim:0" and device.budget_bytes == budget
    assert 0 < device.peak_bytes <= budget
    directions = {COPY_IN, COPY_AHEAD, COPY_TO_UPDATE}, {COPY_OUT}
    told_bytes = [sum(each.nbytes for each in intervals if each.who in tracks) for tracks in directions]
    assert told_bytes == [device.copied_in_bytes, device.copied_out_bytes]
    assert Wait.COPY in statistics.waits_of(COMPUTE)
    write_timeline(tmp_path / "timeline.json", intervals, num_dropped)
    drawn = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    names = [event["args"]["name"] for event in drawn if event["name"] == "thread_name"]
    assert {name.split(" (")[0] for name in names if name.startswith("stream")} == {
        who for who, _ in told if who.startswith("stream")
    }

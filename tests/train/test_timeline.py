"""The timeline is what trace viewers accept: events with times, tracks with names, nothing that overlaps on one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tiered.store.waiting.recorder import CALLER, Interval
from tiered.tools.train.summary import trace_events, write_timeline

SPANS = [
    Interval("wait: demand read", "model/parameters/root", CALLER, 10.0, 10.5, 0),
    Interval("forward", "root", CALLER, 10.0, 14.0, 0),
    Interval("forward", "blocks.0", CALLER, 11.0, 12.0, 0),
    Interval("backward", "blocks.0", CALLER, 13.0, 15.0, 0),  # overlaps the root's
    Interval("commit", "generation 1", "tiered-commit", 12.0, 16.0, 0),
    Interval("swap in", "a", "", 10.0, 11.0, 100),
    Interval("swap in", "b", "", 10.5, 11.5, 50),
    Interval("swap in", "c", "", 11.0, 12.0, 7),
    Interval("swap out", "a", "", 11.0, 12.0, 100),
]


def by_track(events: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    return {name: [e for e in events if e["ph"] == "X" and e["tid"] == tid] for tid, name in names.items()}


def test_every_event_has_what_viewers_need() -> None:
    events = trace_events(SPANS)
    complete = [event for event in events if event["ph"] == "X"]
    assert len(complete) == len(SPANS)
    assert {event["ph"] for event in events} == {"M", "X"}
    for event in complete:
        assert set(event) >= {"name", "cat", "ts", "dur", "pid", "tid"}
        assert event["ts"] >= 0
        assert event["dur"] >= 0
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["tiered"]
    first = next(event for event in complete if event["name"] == "forward blocks.0")
    assert (first["ts"], first["dur"]) == (1e6, 1e6), "microseconds from the first event"


def test_a_track_for_each_thread_and_for_what_is_in_flight() -> None:
    tracks = by_track(trace_events(SPANS))
    assert {name: [event["name"] for event in track] for name, track in tracks.items()} == {
        "training thread": ["forward root", "wait: demand read model/parameters/root", "forward blocks.0"],
        "training thread (2)": ["backward blocks.0"],
        "tiered-commit": ["commit generation 1"],
        "swap in": ["swap in a", "swap in c"],
        "swap in (2)": ["swap in b"],
        "swap out": ["swap out a"],
    }


def test_events_of_a_track_are_apart_or_nested() -> None:
    for track in by_track(trace_events(SPANS)).values():
        for i, one in enumerate(track):
            for other in track[i + 1 :]:
                start, end = other["ts"], other["ts"] + other["dur"]
                assert start >= one["ts"] + one["dur"] or end <= one["ts"] + one["dur"]


def test_the_file_says_what_it_covers(tmp_path: Path) -> None:
    file = tmp_path / "timeline.json"
    assert "all 9 events of the run" in write_timeline(file, SPANS, 0)
    assert "the last 9 events; 12 earlier ones were dropped" in write_timeline(file, SPANS, 12)
    document = json.loads(file.read_text())
    assert document["otherData"]["covers"].startswith("the last 9 events")
    assert document["traceEvents"] == trace_events(SPANS)
    assert write_timeline(file, [], 0)

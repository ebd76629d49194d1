"""A timeline for ui.perfetto.dev or chrome://tracing: the work and the waits of each thread, and transfers in flight.

The format is Chrome's trace events as one JSON object: complete events ("X") on a track of each thread, counters ("C")
of the bytes in flight, names as metadata ("M"). Times are microseconds from the first event.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tiered.console.report_file import write_report
from tiered.store.waiting.recorder import CALLER, Interval

__all__ = ["CAPACITY", "trace_events", "write_timeline"]

CAPACITY = 200_000
"""Spans that a timeline keeps, about 12 MB: a step of a 24-layer model has about 1,000."""

_PROCESS = {"ph": "M", "pid": 1, "tid": 0, "name": "process_name", "args": {"name": "tiered"}}
_US = 1e6


def write_timeline(file: Path, intervals: Sequence[Interval], num_dropped: int) -> str:
    """Write ``intervals`` to ``file``, and return a description for people. Raises UsageError."""
    covers = f"the last {len(intervals):,} events; {num_dropped:,} earlier ones were dropped"
    covers = covers if num_dropped else f"all {len(intervals):,} events of the run"
    document = {"traceEvents": trace_events(intervals), "displayTimeUnit": "ms", "otherData": {"covers": covers}}
    write_report(file, json.dumps(document))
    return f"{file}: {covers}; open it at ui.perfetto.dev"


def trace_events(intervals: Sequence[Interval]) -> list[dict[str, Any]]:
    """Return the events for ``intervals``: first those of threads, then the swaps, then the bytes in flight."""
    zero_s = min((interval.start_s for interval in intervals), default=0.0)
    events: list[dict[str, Any]] = [_PROCESS]
    tracks: list[tuple[str, list[Interval]]] = []
    for who in sorted({interval.who for interval in intervals if interval.who}, key=lambda who: (who != CALLER, who)):
        name = "training thread" if who == CALLER else who
        tracks += _tracks(name, (interval for interval in intervals if interval.who == who))
    for word in ("swap in", "swap out"):
        tracks += _tracks(word, (interval for interval in intervals if not interval.who and interval.word == word))
    for tid, (name, track) in enumerate(tracks, start=1):
        events.append({"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": {"name": name}})
        events.append({"ph": "M", "pid": 1, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}})
        events += [_complete(interval, tid, zero_s) for interval in track]
    for word, name in (("swap in", "reads in flight"), ("swap out", "writes in flight")):
        events += _counter(
            name, (interval for interval in intervals if not interval.who and interval.word == word), zero_s
        )
    return events


def _complete(interval: Interval, tid: int, zero_s: float) -> dict[str, Any]:
    event: dict[str, Any] = {
        "ph": "X",
        "pid": 1,
        "tid": tid,
        "name": f"{interval.word} {interval.subject}".strip(),
        "cat": interval.word,
        "ts": (interval.start_s - zero_s) * _US,
        "dur": max(0.0, interval.end_s - interval.start_s) * _US,
    }
    if interval.nbytes:
        event["args"] = {"bytes": interval.nbytes}
    return event


def _tracks(name: str, intervals: Iterable[Interval]) -> list[tuple[str, list[Interval]]]:
    """Return tracks that viewers can draw: two intervals of a track are apart, or one contains the other."""
    tracks: list[tuple[list[Interval], list[float]]] = []  # and the ends of open intervals, innermost last
    for interval in sorted(intervals, key=lambda interval: (interval.start_s, -interval.end_s)):
        track, ends = next((track for track in tracks if _fits(interval, track[1])), ([], []))
        if not track:
            tracks.append((track, ends))
        track.append(interval)
        ends.append(interval.end_s)
    return [(name if number == 1 else f"{name} ({number})", track) for number, (track, _) in enumerate(tracks, start=1)]


def _fits(interval: Interval, ends: list[float]) -> bool:
    """Whether a track has room for the next interval: transfers stand alone, the work of a thread may nest."""
    while ends and ends[-1] <= interval.start_s:
        ends.pop()
    return not ends or (bool(interval.who) and interval.end_s <= ends[-1])


def _counter(name: str, intervals: Iterable[Interval], zero_s: float) -> Iterator[dict[str, Any]]:
    changes = [(time_s, nbytes) for interval in intervals for time_s, nbytes in _changes(interval)]
    in_flight = 0
    for time_s, nbytes in sorted(changes):
        in_flight += nbytes
        yield {
            "ph": "C", "pid": 1, "tid": 0, "name": name, "ts": (time_s - zero_s) * _US, "args": {"bytes": in_flight}
        }  # fmt: skip


def _changes(interval: Interval) -> tuple[tuple[float, int], tuple[float, int]]:
    return (interval.start_s, interval.nbytes), (interval.end_s, -interval.nbytes)

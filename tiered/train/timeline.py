"""A timeline for ui.perfetto.dev or chrome://tracing: what each thread did and waited for, and what was in flight.

The format is Chrome's trace events as one JSON object: complete events ("X") on a track of each thread, counters ("C")
of the bytes in flight, names as metadata ("M"). Times are microseconds from the first event.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tiered.console.report_file import write_report
from tiered.store.waiting.recorder import CALLER, Span

__all__ = ["CAPACITY", "trace_events", "write_timeline"]

CAPACITY = 200_000
"""Spans that a timeline keeps, about 12 MB: a step of a 24-layer model has about 1,000."""

_PROCESS = {"ph": "M", "pid": 1, "tid": 0, "name": "process_name", "args": {"name": "tiered"}}
_US = 1e6


def write_timeline(file: Path, spans: Sequence[Span], num_dropped: int) -> str:
    """Write ``spans`` to ``file``, and return what is in it, for people. Raises UsageError."""
    covers = f"the last {len(spans):,} events; {num_dropped:,} earlier ones were dropped"
    covers = covers if num_dropped else f"all {len(spans):,} events of the run"
    document = {"traceEvents": trace_events(spans), "displayTimeUnit": "ms", "otherData": {"covers": covers}}
    write_report(file, json.dumps(document))
    return f"{file}: {covers}; open it at ui.perfetto.dev"


def trace_events(spans: Sequence[Span]) -> list[dict[str, Any]]:
    """Return the events for ``spans``: threads first, then what was swapped in and out, then the bytes in flight."""
    zero_s = min((span.start_s for span in spans), default=0.0)
    events: list[dict[str, Any]] = [_PROCESS]
    tracks: list[tuple[str, list[Span]]] = []
    for who in sorted({span.who for span in spans if span.who}, key=lambda who: (who != CALLER, who)):
        name = "training thread" if who == CALLER else who
        tracks += _lanes(name, (span for span in spans if span.who == who))
    for word in ("swap in", "swap out"):
        tracks += _lanes(word, (span for span in spans if not span.who and span.word == word))
    for tid, (name, track) in enumerate(tracks, start=1):
        events.append({"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": {"name": name}})
        events.append({"ph": "M", "pid": 1, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}})
        events += [_complete(span, tid, zero_s) for span in track]
    for word, name in (("swap in", "reads in flight"), ("swap out", "writes in flight")):
        events += _counter(name, (span for span in spans if not span.who and span.word == word), zero_s)
    return events


def _complete(span: Span, tid: int, zero_s: float) -> dict[str, Any]:
    event: dict[str, Any] = {
        "ph": "X",
        "pid": 1,
        "tid": tid,
        "name": f"{span.word} {span.subject}".strip(),
        "cat": span.word,
        "ts": (span.start_s - zero_s) * _US,
        "dur": max(0.0, span.end_s - span.start_s) * _US,
    }
    if span.nbytes:
        event["args"] = {"bytes": span.nbytes}
    return event


def _lanes(name: str, spans: Iterable[Span]) -> list[tuple[str, list[Span]]]:
    """Return tracks on which two spans are apart or one inside the other: what viewers can draw."""
    tracks: list[tuple[list[Span], list[float]]] = []  # and the ends of the spans around the present, innermost last
    for span in sorted(spans, key=lambda span: (span.start_s, -span.end_s)):
        track, ends = next((lane for lane in tracks if _fits(span, lane[1])), ([], []))
        if not track:
            tracks.append((track, ends))
        track.append(span)
        ends.append(span.end_s)
    return [(name if number == 1 else f"{name} ({number})", track) for number, (track, _) in enumerate(tracks, start=1)]


def _fits(span: Span, ends: list[float]) -> bool:
    """Whether a track has room for the next span: what is in flight stands alone, what a thread does may nest."""
    while ends and ends[-1] <= span.start_s:
        ends.pop()
    return not ends or (bool(span.who) and span.end_s <= ends[-1])


def _counter(name: str, spans: Iterable[Span], zero_s: float) -> Iterator[dict[str, Any]]:
    changes = [(time_s, nbytes) for span in spans for time_s, nbytes in _changes(span)]
    in_flight = 0
    for time_s, nbytes in sorted(changes):
        in_flight += nbytes
        yield {
            "ph": "C", "pid": 1, "tid": 0, "name": name, "ts": (time_s - zero_s) * _US, "args": {"bytes": in_flight}
        }  # fmt: skip


def _changes(span: Span) -> tuple[tuple[float, int], tuple[float, int]]:
    return (span.start_s, span.nbytes), (span.end_s, -span.nbytes)

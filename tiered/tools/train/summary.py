"""The results of a run: the figures of each step, their bound, those of all steps for people, and a timeline.

The timeline is in Chrome's format of trace events, for ui.perfetto.dev or chrome://tracing, as one JSON object: events
that are complete ("X") on a track of each thread, and names as metadata ("M"). Its times are microseconds from the
first event.
"""

from __future__ import annotations

import json
import platform
import resource
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tiered
from tiered.bytes.device.profile import load_link_profile, load_profile
from tiered.ranks.ranks import Ranks
from tiered.stats import StoreStatistics
from tiered.store.waiting.recorder import CALLER, Interval
from tiered.tiers.device_clock import COMPUTE, UPDATE
from tiered.tools.bench.report import Bandwidth
from tiered.tools.console import write_report
from tiered.tools.doctor.description import by_drive
from tiered.tools.train.plan import Plan
from tiered.units import format_bytes

__all__ = [
    "CAPACITY", "Bound", "RunSummary", "StepRecord", "Stopwatch", "matrix_flop_per_s", "profiled_bandwidth",
    "profiled_link", "trace_events", "write_timeline",
]  # fmt: skip

_HIDDEN = 0.05  # of the step: less waiting than that is hidden I/O
_RANKS = "other ranks"  # the reason of waiting for them, and for what they send


# -- steps ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The figures of one optimizer step, measured by the training thread."""

    step: int  # the number of steps done, this one included
    loss: float  # nats per byte, mean over the micro-steps
    seconds: float
    num_tokens: int
    counts: Mapping[str, float]  # seconds and bytes of the step, by the names of ``_counts``

    def __str__(self) -> str:
        stall = min(1.0, sum(_named("wait", self.counts).values()) / self.seconds)
        into, out = (self.counts.get(name, 0.0) / self.seconds / 1e9 for name in ("read_bytes", "write_bytes"))
        return (
            f"loss {self.loss:.3f}  {self.num_tokens / self.seconds:,.0f} tokens/s  "
            f"in {into:.2f} out {out:.2f} GB/s  stall {stall:.0%}"
        )


class Stopwatch:
    """Measures one step after the other, from its making or the last ``lap`` on; used by the training thread alone."""

    def __init__(self, store: tiered.Store) -> None:
        self._store = store
        self._before, self._begun_s = self._read(), time.perf_counter()

    def lap(self, step: int, loss: float, num_tokens: int) -> StepRecord:
        """Return the record of the step that ends now."""
        now, end_s = self._read(), time.perf_counter()
        counts = {name: value - self._before.get(name, 0) for name, value in now.items()}
        record = StepRecord(step, loss, end_s - self._begun_s, num_tokens, counts)
        self._before, self._begun_s = now, end_s
        return record

    def _read(self) -> dict[str, float]:
        ranks, found = self._store.ranks, _counts(self._store.statistics())
        return found if ranks is None else found | {f"wait: {_RANKS}": ranks.comm_thread.statistics().wait_ranks_s}


def _counts(counters: StoreStatistics) -> dict[str, float]:
    """Return the seconds and bytes since the store was opened that a step is measured by.

    Of the training thread's waits by reason; on a compute device, of how long its stream stood idle for that. Updates
    count on the device's stream where it makes them, else those of threads.
    """
    recorder, device = counters.recorder, counters.recorder.device
    updates = [work for work in recorder.work if work.word == "update bucket"]
    on_device = [work for work in updates if work.who == UPDATE]
    found = {
        "read_bytes": counters.read_bytes,
        "write_bytes": counters.write_bytes + counters.catalog_write_bytes,
        "device_busy_s": recorder.device_busy_seconds,  # with something on its way to or from the drives
        "update_s": sum(work.seconds for work in on_device or updates),
        "copied_in_bytes": device.copied_in_bytes if device else 0,
        "copied_out_bytes": device.copied_out_bytes if device else 0,
        "copy_in_s": recorder.seconds_of("copy in"),
        "copy_out_s": recorder.seconds_of("copy out"),
    }
    found |= {f"wait: {why}": s for why, s in recorder.waits_of(COMPUTE if device else CALLER).items()}
    for moved in recorder.moved:
        found |= {f"read: {moved.name}": moved.read_bytes, f"write: {moved.name}": moved.write_bytes}
    return found | {"read: catalog": 0, "write: catalog": counters.catalog_write_bytes}


def _named(kind: str, counts: Mapping[str, float]) -> dict[str, float]:
    """Return the counts of a kind ("wait", "read" or "write") by reason or class of keys."""
    prefix = f"{kind}: "
    return {name.removeprefix(prefix): value for name, value in counts.items() if name.startswith(prefix)}


# -- the bound ---------------------------------------------------------------------------------------------------


def profiled_bandwidth(directories: Sequence[Path]) -> Bandwidth | None:
    """Return the bandwidth of ``directories`` together, by ``tiered bench``; None unless all have a profile. Blocks.

    Directories of one drive share its bandwidth: the first has it. Where no duplex factor was measured it is 0.
    """
    profiles = {}
    for directory in directories:
        profile = load_profile(directory)
        if profile is None:
            return None
        profiles[str(next(path for path in (directory, *directory.parents) if path.exists()))] = profile
    firsts = [profiles[which[0]] for which in by_drive(profiles).values()]
    return Bandwidth.of_drives(
        [Bandwidth(one.read_bytes_per_s, one.write_bytes_per_s, one.duplex or 0.0) for one in firsts]
    )


def profiled_link(directories: Sequence[Path], device_type: str) -> Bandwidth | None:
    """Return the bandwidth of copies to a compute device of ``device_type`` and back, by ``tiered bench --device``.

    All directories are of one machine, so the first of them that has a profile of such a device tells. Blocks.
    """
    for directory in directories:
        profile = load_link_profile(directory)
        if profile is not None and profile.device == device_type:
            return Bandwidth(profile.in_bytes_per_s, profile.out_bytes_per_s, profile.duplex)
    return None


def matrix_flop_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """Return the operations a second of a product of square matrices on ``device``; blocks for about 50 ms.

    It is the peak that training can be compared with: a card's data sheet is of another clock, and often of sparse
    matrices.
    """
    size, seconds = 128, 0.0
    while seconds < 5e-3 and size < 8192:  # long enough beside the launch of an operation
        size *= 2
        left, right = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
        out, times = torch.mm(left, right), []
        for _ in range(5):
            torch.accelerator.synchronize(device)
            begun_s = time.perf_counter()
            torch.mm(left, right, out=out)
            torch.accelerator.synchronize(device)
            times.append(time.perf_counter() - begun_s)
        seconds = min(times)
    return 2.0 * size**3 / seconds


class Bound:
    """One step's parts, in seconds: its own time, and the least that each resource needs for it."""

    def __init__(
        self,
        step_s: float,
        *,
        waits: Mapping[str, float],
        update_s: float,
        read_bytes: float,
        write_bytes: float,
        device_busy_s: float,
        bandwidth: Bandwidth | None,
        copy_s: float = 0.0,
        updates_on_device: bool = False,
    ) -> None:
        """``waits`` are the training thread's, by reason; ``update_s`` of the update's own thread or stream.

        Without ``bandwidth`` the devices' busy time counts: bytes / it was seen. With one, the smaller of both counts:
        work that was done in a time can be done in it. So no part exceeds the step.
        """
        self.step_s, self.waits, self.updates_on_device = step_s, waits, updates_on_device
        nvme_s, self.is_read = device_busy_s, read_bytes > write_bytes
        if bandwidth is not None:
            seconds = bandwidth.seconds(read_bytes, write_bytes)
            nvme_s = min(nvme_s, seconds) if device_busy_s else seconds
            self.is_read = read_bytes / bandwidth.read_bytes_per_s > write_bytes / bandwidth.write_bytes_per_s
        self.compute_s = max(0.0, step_s - sum(waits.values()))
        self.update_s, self.nvme_s, self.copy_s = (min(seconds, step_s) for seconds in (update_s, nvme_s, copy_s))

    @property
    def seconds(self) -> float:
        """max(compute, NVMe, copies, update)."""
        return max(self.compute_s, self.nvme_s, self.copy_s, self.update_s)

    @property
    def step_over_bound(self) -> float:
        """How many times longer than the bound the step took; 1 for a step that took no time."""
        return self.step_s / self.seconds if self.seconds else 1.0

    @property
    def stall(self) -> float:
        """The share of the step that the training thread waited."""
        return min(1.0, sum(self.waits.values()) / self.step_s) if self.step_s else 0.0

    @property
    def verdict(self) -> str:
        """The resource that limited the step, in one line."""
        if not self.step_s or not self.seconds:
            return "nothing was measured"
        if self.nvme_s >= max(self.compute_s, self.update_s, self.copy_s):
            second = max(self.compute_s, self.update_s, self.copy_s, self.nvme_s / 2)  # twice the bandwidth
            return (
                f"disk-{'read' if self.is_read else 'write'} bound: {self.nvme_s / self.step_s:.0%} of the step; "
                f"a second drive would save {1 - second / self.seconds:.0%}"
            )
        if self.copy_s > max(self.compute_s, self.update_s):
            return (
                f"PCIe bound: copies take {self.copy_s / self.step_s:.0%} of the step; "
                "a larger batch or --device-memory would help"
            )
        if self.update_s > self.compute_s:
            remedy = "a larger batch would hide it" if self.updates_on_device else "more CPU cores would help"
            return f"update bound: {self.update_s / self.step_s:.0%} of the step; {remedy}"
        if self.stall <= _HIDDEN:
            return f"compute bound: I/O is hidden (stall {self.stall:.0%})"
        reason = max(self.waits, key=lambda reason: self.waits[reason])
        return f"compute bound, and {self.stall:.0%} of the step waits, most of it for {_WHAT[reason]}"


_WHAT = {
    "demand read": "demand reads",
    "update": "updates",
    "write-back": "write-back: a larger DRAM budget would help",
    "commit": "commits",
    "copy in": "copies to the device: a larger --device-memory would help",
    _RANKS: "other ranks and what they send: a larger --batch would help",
}


# -- the run -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RankTimes:
    """The seconds of one rank's mean step, and those in which it waited for others and for what they send."""

    rank: int
    step_s: float
    wait_s: float

    @property
    def own_s(self) -> float:
        """The seconds that the rank would need by itself: the steps of all take as long as the slowest one's."""
        return max(0.0, self.step_s - self.wait_s)


class RunSummary:
    """The measured part of this process in a run, with the store's counters as they are when it is made.

    Medians and means leave out the first step, which warms all up. The bound is that of the mean step: over all steps,
    because writes of one step fall into the next.
    """

    def __init__(
        self,
        plan: Plan,
        records: Sequence[StepRecord],
        store: tiered.Store,
        *,
        peak_flop_per_s: float = 0.0,
        timeline: str = "",
    ) -> None:
        """``peak_flop_per_s`` is the compute device's, 0 for the CPU; ``timeline`` is a line about one, "" for none."""
        self._plan, self._records, self._counters = plan, tuple(records), store.statistics()
        self._device, self._timeline, self._peak_flop_per_s = self._counters.recorder.device, timeline, peak_flop_per_s
        self._state_nbytes = sum(record.nbytes for record in store.records())
        self._bandwidth = profiled_bandwidth(plan.directories)
        link = profiled_link(plan.directories, plan.device.type)
        warm = self._records[1:] or self._records
        names = dict.fromkeys(name for record in records for name in record.counts)
        self._columns = {name: [record.counts.get(name, 0.0) for record in warm] for name in names}
        self._means = mean = defaultdict(
            float, {name: statistics.fmean(values) for name, values in self._columns.items()}
        )
        self._step_s = statistics.fmean([record.seconds for record in warm] or [0.0])
        self._rank_times: tuple[RankTimes, ...] = ()
        self._copy_s = max(mean["copy_in_s"], mean["copy_out_s"])  # the time of the busier stream
        if link is not None:  # the least time by the measured rates
            self._copy_s = link.seconds(mean["copied_in_bytes"], mean["copied_out_bytes"])
        self._waits, work = _named("wait", mean), self._counters.recorder.work
        self._bound = Bound(
            self._step_s, waits=self._waits, update_s=mean["update_s"], read_bytes=mean["read_bytes"],
            write_bytes=mean["write_bytes"], device_busy_s=mean["device_busy_s"], bandwidth=self._bandwidth,
            copy_s=self._copy_s, updates_on_device=(UPDATE, "update bucket") in ((w.who, w.word) for w in work),
        )  # fmt: skip

    def compare(self, ranks: Ranks) -> None:
        """Learn how long the others' steps took, and how long they waited for each other; all ranks call it together.

        Blocks for them. Raises RankLostError, StepAbandonedError.
        """
        told = ranks.agreement.agree("the summary", json.dumps([self._step_s, self._waits.get(_RANKS, 0.0)]))
        self._rank_times = tuple(RankTimes(rank, *map(float, json.loads(each))) for rank, each in enumerate(told))

    @property
    def share_of_peak(self) -> float:
        """The arithmetic of a step over what the device is capable of in that time; 0 on the CPU."""
        at_peak_s = self._plan.step_flop / self._peak_flop_per_s if self._peak_flop_per_s else 0.0
        return at_peak_s / self._step_s if self._step_s else 0.0

    def _per_param(self, name: str) -> float:
        """Return the median over the steps of a count, per parameter that this rank keeps."""
        return statistics.median(self._columns.get(name) or [0.0]) / self._plan.num_own_params

    def lines(self, go_on: str | None) -> list[str]:
        """Return the summary for people; ``go_on`` is the command that trains further, if it is time to say that."""
        if not self._records:
            return []
        first, last, counters = self._records[0], self._records[-1], self._counters
        is_over_ranks = self._plan.config.world > 1
        here = " on this rank" * is_over_ranks
        lines = [
            f"loss    {first.loss:.3f} -> {last.loss:.3f} in {len(self._records)} steps, nats per byte",
            f"time    {_said(self._step_s)} s per step, {first.num_tokens / self._step_s:,.0f} tokens/s, "
            f"{self._bound.stall:.0%} of it waiting for I/O{' and other ranks' * is_over_ranks}",
            f"moved   {self._per_param('read_bytes'):.1f} bytes read and {self._per_param('write_bytes'):.1f} written "
            "per parameter and step",
            f"memory  peak RSS {format_bytes(_peak_rss_bytes())}, of it {format_bytes(counters.peak_bytes)} "
            f"of a DRAM budget of {format_bytes(self._plan.rank_dram)}{here}",
            f"wrote   {format_bytes(counters.write_bytes + counters.catalog_write_bytes)} in all{here}",
            *self._device_lines(),
            *self._bound_lines(),
            *self._rank_lines(),
        ]
        if self._plan.durable:
            where, nbytes = ", ".join(map(str, self._plan.places)), format_bytes(self._state_nbytes)
            lines.append(f"run     {where}: step {last.step}, generation {counters.generation}, {nbytes}{here}")
            lines += [f"go on   {go_on}"] if go_on else []
        else:
            lines.append("run     gone with this process, as --no-durable says")
        return [*lines, f"verdict {self._bound.verdict}"]

    def _device_lines(self) -> list[str]:
        if self._device is None:
            return []
        into, out = (self._per_param(name) for name in ("copied_in_bytes", "copied_out_bytes"))
        peak, budget, reserved = map(
            format_bytes, (self._device.peak_bytes, self._device.budget_bytes, self._device.reserved_bytes)
        )
        return [
            f"device  {self._device.name}: peak {peak} of a budget of {budget}, torch has reserved {reserved}; "
            f"{into:.1f} bytes in and {out:.1f} out per parameter and step",
            f"peak    {self.share_of_peak:.1%} of the {self._peak_flop_per_s / 1e12:.3g} TFLOP/s of a matrix product",
        ]

    def _bound_lines(self) -> list[str]:
        bound, waits = self._bound, sorted(self._waits.items(), key=lambda item: -item[1])
        told = [f"{_said(seconds)} s {reason}" for reason, seconds in waits if seconds >= 0.005]
        copies = "" if self._device is None else f"PCIe {_said(bound.copy_s)}, "
        unmeasured = "as seen in this run; measure the drive: tiered bench DIR"
        source = "measured by tiered bench" if self._bandwidth else unmeasured
        return [
            f"waited  {', '.join(told) or 'for nothing'} per step",
            f"bound   {_said(bound.seconds)} s (compute {_said(bound.compute_s)}, NVMe {_said(bound.nvme_s)}, {copies}"
            f"update {_said(bound.update_s)}), step/bound {bound.step_over_bound:.2f}; bandwidth {source}",
            *([f"drawn   {self._timeline}"] if self._timeline else []),
        ]

    def _rank_lines(self) -> list[str]:
        if not self._rank_times:
            return []
        slowest, least = (choose(self._rank_times, key=lambda each: each.own_s) for choose in (max, min))
        return [
            f"ranks   {len(self._rank_times)}; the slowest is rank {slowest.rank}, with {_said(slowest.own_s)} s of "
            f"its own per step and {_said(slowest.wait_s)} s of waiting for others; rank {least.rank} has "
            f"{_said(least.own_s)} and {_said(least.wait_s)}"
        ]

    def as_json(self) -> dict[str, object]:
        """Return the summary for programs; lists are over the steps of this process."""
        counters, params, writes = self._counters, self._plan.num_params, _named("write", self._means)
        found: dict[str, object] = {
            "params": params,
            "steps": [record.step for record in self._records],
            "losses": [record.loss for record in self._records],
            "step_seconds": [record.seconds for record in self._records],
            "read_bytes_per_param": self._per_param("read_bytes"),
            "write_bytes_per_param": self._per_param("write_bytes"),
            "peak_rss_bytes": _peak_rss_bytes(),
            "dram_budget_bytes": self._plan.rank_dram,
            "peak_dram_bytes": counters.peak_bytes,
            "state_bytes": self._state_nbytes,
            "bytes_written": counters.write_bytes + counters.catalog_write_bytes,
            "generation": counters.generation,
            "stall_seconds": counters.stall_seconds,
            "wait_seconds": self._waits,
            "moved_bytes_per_param": {
                name: {"read": read / self._plan.num_own_params, "write": writes[name] / self._plan.num_own_params}
                for name, read in _named("read", self._means).items()
            },
            "bound_seconds": self._bound.seconds,
            "step_over_bound": self._bound.step_over_bound,
            "verdict": self._bound.verdict,
        }
        if self._device is not None:
            found["device"] = {
                **asdict(self._device),
                "copied_in_bytes_per_param": self._per_param("copied_in_bytes"),
                "copied_out_bytes_per_param": self._per_param("copied_out_bytes"),
                "copy_bound_seconds": self._copy_s,
                "share_of_peak": self.share_of_peak,
                "matrix_flop_per_s": self._peak_flop_per_s,
            }
        if self._rank_times:
            found["ranks"] = [{"step_seconds": each.step_s, "wait_seconds": each.wait_s} for each in self._rank_times]
        found["versions"] = {
            "tiered": tiered.__version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        }
        return found


def _said(seconds: float) -> str:
    """Return seconds in three digits or more: enough for the quotient of two figures."""
    return f"{seconds:.2f}" if seconds >= 1 else f"{seconds:#.3g}"


def _peak_rss_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


# -- timeline ------------------------------------------------------------------------------------------------------

CAPACITY = 200_000
"""Spans that a timeline keeps, about 12 MB: a step of a 24-layer model has about 1,000."""

_US = 1e6


def write_timeline(file: Path, intervals: Sequence[Interval], num_dropped: int) -> str:
    """Write ``intervals`` to ``file``, and return a description for people. Raises UsageError."""
    covers = f"the last {len(intervals):,} events; {num_dropped:,} earlier ones were dropped"
    covers = covers if num_dropped else f"all {len(intervals):,} events of the run"
    document = {"traceEvents": trace_events(intervals), "displayTimeUnit": "ms", "otherData": {"covers": covers}}
    write_report(file, json.dumps(document))
    return f"{file}: {covers}; open it at ui.perfetto.dev"


def trace_events(intervals: Sequence[Interval]) -> list[dict[str, Any]]:
    """Return the events for ``intervals``: first those of threads, then the swaps."""
    zero_s = min((each.start_s for each in intervals), default=0.0)
    groups: dict[str, list[Interval]] = {}  # by thread, or the word of transfers, which no thread does
    for each in sorted(intervals, key=lambda each: (not each.who, each.who != CALLER, each.who or each.word)):
        groups.setdefault("training thread" if each.who == CALLER else each.who or each.word, []).append(each)
    events = [_event("M", 0, "process_name", args={"name": "tiered"})]
    tracks = [each for name, group in groups.items() for each in _tracks(name, group)]
    for tid, (name, track) in enumerate(tracks, start=1):
        events.append(_event("M", tid, "thread_name", args={"name": name}))
        events.append(_event("M", tid, "thread_sort_index", args={"sort_index": tid}))
        for each in track:
            ts, dur = (each.start_s - zero_s) * _US, max(0.0, each.end_s - each.start_s) * _US
            args = {"args": {"bytes": each.nbytes}} if each.nbytes else {}
            name = f"{each.word} {each.subject}".strip()
            events.append(_event("X", tid, name, cat=each.word, ts=ts, dur=dur, **args))
    return events


def _event(kind: str, tid: int, name: str, **more: object) -> dict[str, Any]:
    return {"ph": kind, "pid": 1, "tid": tid, "name": name, **more}


def _tracks(name: str, intervals: Sequence[Interval]) -> Iterator[tuple[str, list[Interval]]]:
    """Yield tracks that viewers can draw: two intervals of a track are apart, or one contains the other."""
    tracks: list[tuple[list[Interval], list[float]]] = []  # and the ends of open intervals, innermost last
    for interval in sorted(intervals, key=lambda interval: (interval.start_s, -interval.end_s)):
        track, ends = next((track for track in tracks if _fits(interval, track[1])), ([], []))
        if not track:
            tracks.append((track, ends))
        track.append(interval)
        ends.append(interval.end_s)
    for number, (track, _) in enumerate(tracks, start=1):
        yield name if number == 1 else f"{name} ({number})", track


def _fits(interval: Interval, ends: list[float]) -> bool:
    """Whether a track has room for the next interval: transfers stand alone, the work of a thread may nest."""
    while ends and ends[-1] <= interval.start_s:
        ends.pop()
    return not ends or (bool(interval.who) and interval.end_s <= ends[-1])

"""The results of a run: for people in a few lines, for programs in one JSON object."""

from __future__ import annotations

import platform
import resource
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch

import tiered
from tiered.stats import ComputeDeviceStatistics
from tiered.train.bound import Bandwidth, Bound, profiled_bandwidth, profiled_link
from tiered.train.plan import Plan
from tiered.train.progress import StepRecord
from tiered.train.stopwatch import updates_on_device
from tiered.units import format_bytes

__all__ = ["RunSummary"]


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The measured part of this process in a run. Medians and means leave out the first step, which warms all up."""

    plan: Plan
    records: tuple[StepRecord, ...]
    peak_dram_bytes: int
    state_bytes: int
    read_bytes: int
    bytes_written: int
    generation: int
    stall_seconds: float
    bandwidth: Bandwidth | None  # as measured before; None: only this run's own counts are known
    link: Bandwidth | None  # of copies to the compute device
    device: ComputeDeviceStatistics | None
    peak_flop_per_s: float  # of that device, 0 where it is the CPU
    updates_on_device: bool
    timeline: str  # a line about it, "" without one

    @classmethod
    def of(
        cls,
        plan: Plan,
        records: Sequence[StepRecord],
        store: tiered.Store,
        *,
        peak_flop_per_s: float = 0.0,
        timeline: str = "",
    ) -> RunSummary:
        """Return the summary of ``records`` and the store's counters now."""
        counters = store.statistics()
        return cls(
            plan,
            tuple(records),
            peak_dram_bytes=counters.peak_bytes,
            state_bytes=sum(record.nbytes for record in store.records()),
            read_bytes=counters.read_bytes,
            bytes_written=counters.write_bytes + counters.catalog_write_bytes,
            generation=store.generation,
            stall_seconds=counters.stall_seconds,
            bandwidth=profiled_bandwidth(plan.directories),
            link=profiled_link(plan.directories, plan.device.type),
            device=counters.recorder.device,
            peak_flop_per_s=peak_flop_per_s,
            updates_on_device=updates_on_device(counters),
            timeline=timeline,
        )

    @property
    def waits(self) -> dict[str, float]:
        """The means over the steps of how long the training thread waited, in seconds by reason."""
        reasons = dict.fromkeys(reason for record in self.records for reason in record.waits)
        return {reason: self._mean([record.waits.get(reason, 0.0) for record in self.records]) for reason in reasons}

    @property
    def moved(self) -> dict[str, tuple[float, float]]:
        """The means over the steps of the bytes read and written, per parameter, by class."""
        names = dict.fromkeys(name for record in self.records for name in record.moved)
        pairs = {name: [record.moved.get(name, (0, 0)) for record in self.records] for name in names}
        per = self.plan.num_params
        return {
            name: (self._mean([read for read, _ in both]) / per, self._mean([write for _, write in both]) / per)
            for name, both in pairs.items()
        }

    @property
    def step_s(self) -> float:
        """The seconds of the mean step, the only ones that the bound of the mean step may stand beside."""
        return self._mean([record.seconds for record in self.records])

    @property
    def bound(self) -> Bound:
        """The bound of the mean step: over all steps, because writes of one step fall into the next."""
        return Bound.of(
            self.step_s,
            waits=self.waits,
            update_s=self._mean([record.update_seconds for record in self.records]),
            read_bytes=self._mean([record.read_bytes for record in self.records]),
            write_bytes=self._mean([record.write_bytes for record in self.records]),
            device_busy_s=self._mean([record.device_busy_seconds for record in self.records]),
            bandwidth=self.bandwidth,
            copy_s=self.copy_s,
            updates_on_device=self.updates_on_device,
        )

    @property
    def copy_s(self) -> float:
        """The least time for the copies of the mean step: by the measured rates, or else the busier stream's time."""
        into, out = (self._mean([record.copy_seconds[way] for record in self.records]) for way in (0, 1))
        if self.link is None:
            return max(into, out)
        return self.link.seconds(*(self._mean([record.copied[way] for record in self.records]) for way in (0, 1)))

    @property
    def copied_per_param(self) -> tuple[float, float]:
        """The medians of the bytes copied to a compute device and back in a step, per parameter."""
        into, out = (self._median([record.copied[way] for record in self.records]) for way in (0, 1))
        return into / self.plan.num_params, out / self.plan.num_params

    @property
    def share_of_peak(self) -> float:
        """The arithmetic of a step over what the device is capable of in that time; 0 on the CPU."""
        at_peak_s = self.plan.step_flop / self.peak_flop_per_s if self.peak_flop_per_s else 0.0
        return at_peak_s / self.step_s if self.step_s else 0.0

    @property
    def read_bytes_per_param(self) -> float:
        """The median of the bytes read in a step, per parameter."""
        return self._median([record.read_bytes for record in self.records]) / self.plan.num_params

    @property
    def write_bytes_per_param(self) -> float:
        """The median of the bytes written in a step, per parameter."""
        return self._median([record.write_bytes for record in self.records]) / self.plan.num_params

    def _median(self, values: Sequence[float]) -> float:
        return statistics.median(values[1:] or values or [0.0])

    def _mean(self, values: Sequence[float]) -> float:
        return statistics.fmean(values[1:] or values or [0.0])

    def lines(self, go_on: str | None) -> list[str]:
        """Return the summary for people; ``go_on`` is the command that trains further, if it is time to say that."""
        if not self.records:
            return []
        first, last = self.records[0], self.records[-1]
        lines = [
            f"loss    {first.loss:.3f} -> {last.loss:.3f} in {len(self.records)} steps, nats per byte",
            f"time    {_said(self.step_s)} s per step, {first.num_tokens / self.step_s:,.0f} tokens/s, "
            f"{self.bound.stall:.0%} of it waiting for I/O",
            f"moved   {self.read_bytes_per_param:.1f} bytes read and {self.write_bytes_per_param:.1f} written "
            "per parameter and step",
            f"memory  peak RSS {format_bytes(_peak_rss_bytes())}, of it {format_bytes(self.peak_dram_bytes)} "
            f"of a DRAM budget of {format_bytes(self.plan.dials.dram)}",
            f"wrote   {format_bytes(self.bytes_written)} in all",
            *self._device_lines(),
        ]
        lines += self._bound_lines()
        verdict = f"verdict {self.bound.verdict}"
        if not self.plan.durable:
            return [*lines, "run     gone with this process, as --no-durable says", verdict]
        where = ", ".join(map(str, self.plan.directories))
        return [
            *lines,
            f"run     {where}: step {last.step}, generation {self.generation}, {format_bytes(self.state_bytes)}",
            *([f"go on   {go_on}"] if go_on else []),
            verdict,
        ]

    def _device_lines(self) -> list[str]:
        if self.device is None:
            return []
        into, out = self.copied_per_param
        return [
            f"device  {self.device.name}: peak {format_bytes(self.device.peak_bytes)} of a budget of "
            f"{format_bytes(self.device.budget_bytes)}, torch has reserved "
            f"{format_bytes(self.device.reserved_bytes)}; {into:.1f} bytes in and {out:.1f} out per parameter and step",
            f"peak    {self.share_of_peak:.1%} of the {self.peak_flop_per_s / 1e12:.3g} TFLOP/s of a matrix product",
        ]

    def _bound_lines(self) -> list[str]:
        bound, waits = self.bound, sorted(self.waits.items(), key=lambda item: -item[1])
        told = [f"{_said(seconds)} s {reason}" for reason, seconds in waits if seconds >= 0.005]
        copies = "" if self.device is None else f"PCIe {_said(bound.copy_s)}, "
        ratio = float(_said(bound.step_s)) / float(_said(bound.seconds)) if bound.seconds else bound.step_over_bound
        source = self.bandwidth.source if self.bandwidth else "as seen in this run; measure the drive: tiered bench DIR"
        return [
            f"waited  {', '.join(told) or 'for nothing'} per step",
            f"bound   {_said(bound.seconds)} s (compute {_said(bound.compute_s)}, NVMe {_said(bound.nvme_s)}, {copies}"
            f"update {_said(bound.update_s)}), step/bound {ratio:.2f}; bandwidth {source}",
            *([f"drawn   {self.timeline}"] if self.timeline else []),
        ]

    def as_json(self) -> dict[str, object]:
        """Return the summary for programs; lists are over the steps of this process."""
        return {
            "params": self.plan.num_params,
            "steps": [record.step for record in self.records],
            "losses": [record.loss for record in self.records],
            "step_seconds": [record.seconds for record in self.records],
            "read_bytes_per_param": self.read_bytes_per_param,
            "write_bytes_per_param": self.write_bytes_per_param,
            "peak_rss_bytes": _peak_rss_bytes(),
            "dram_budget_bytes": self.plan.dials.dram,
            "peak_dram_bytes": self.peak_dram_bytes,
            "state_bytes": self.state_bytes,
            "bytes_written": self.bytes_written,
            "generation": self.generation,
            "stall_seconds": self.stall_seconds,
            "wait_seconds": self.waits,
            "moved_bytes_per_param": {
                name: {"read": read, "write": write} for name, (read, write) in self.moved.items()
            },
            "bound_seconds": self.bound.seconds,
            "step_over_bound": self.bound.step_over_bound,
            "verdict": self.bound.verdict,
            **self._device_as_json(),
            "versions": {
                "tiered": tiered.__version__,
                "torch": torch.__version__,
                "numpy": np.__version__,
                "python": platform.python_version(),
            },
        }

    def _device_as_json(self) -> dict[str, object]:
        if self.device is None:
            return {}
        into, out = self.copied_per_param
        return {
            "device": {
                **asdict(self.device),
                "copied_in_bytes_per_param": into,
                "copied_out_bytes_per_param": out,
                "copy_bound_seconds": self.copy_s,
                "share_of_peak": self.share_of_peak,
                "matrix_flop_per_s": self.peak_flop_per_s,
            }
        }


def _said(seconds: float) -> str:
    """Return seconds in three digits or more: enough for the quotient of two figures."""
    return f"{seconds:.2f}" if seconds >= 1 else f"{seconds:#.3g}"


def _peak_rss_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB

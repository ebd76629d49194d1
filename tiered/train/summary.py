"""What came of a run: for people in a few lines, for programs in one JSON object."""

from __future__ import annotations

import platform
import resource
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

import tiered
from tiered.train.plan import Plan
from tiered.train.progress import StepRecord
from tiered.units import format_bytes

__all__ = ["Outcome"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The measured part of this process in a run. Medians leave out the first step, which warms everything up."""

    plan: Plan
    records: tuple[StepRecord, ...]
    peak_dram_bytes: int
    state_bytes: int
    read_bytes: int
    bytes_written: int
    generation: int
    stall_seconds: float

    @classmethod
    def of(cls, plan: Plan, records: Sequence[StepRecord], store: tiered.Store) -> Outcome:
        """Return what ``records`` and the store's counters say now."""
        counters = store.statistics()
        return cls(
            plan,
            tuple(records),
            peak_dram_bytes=counters.peak_bytes,
            state_bytes=sum(record.nbytes for record in store.records()),
            read_bytes=counters.read_bytes,
            bytes_written=counters.write_bytes,
            generation=store.generation,
            stall_seconds=counters.stall_seconds,
        )

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

    def lines(self, go_on: str | None) -> list[str]:
        """Return the summary for people; ``go_on`` is the command that trains further, if it is time to say that."""
        if not self.records:
            return []
        first, last = self.records[0], self.records[-1]
        seconds = self._median([record.seconds for record in self.records])
        stall = sum(record.stall_seconds for record in self.records) / sum(record.seconds for record in self.records)
        lines = [
            f"loss    {first.loss:.3f} -> {last.loss:.3f} in {len(self.records)} steps, nats per byte",
            f"time    {seconds:.2f} s per step, {first.num_tokens / seconds:,.0f} tokens/s, "
            f"{min(1.0, stall):.0%} of it waiting for I/O",
            f"moved   {self.read_bytes_per_param:.1f} bytes read and {self.write_bytes_per_param:.1f} written "
            "per parameter and step",
            f"memory  peak RSS {format_bytes(_peak_rss_bytes())}, of it {format_bytes(self.peak_dram_bytes)} "
            f"of a DRAM budget of {format_bytes(self.plan.dials.dram)}",
            f"wrote   {format_bytes(self.bytes_written)} in all",
        ]
        if not self.plan.durable:
            return [*lines, "run     gone with this process, as --no-durable says"]
        where = ", ".join(map(str, self.plan.directories))
        return [
            *lines,
            f"run     {where}: step {last.step}, generation {self.generation}, {format_bytes(self.state_bytes)}",
            *([f"go on   {go_on}"] if go_on else []),
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
            "state_bytes": self.state_bytes,
            "bytes_written": self.bytes_written,
            "generation": self.generation,
            "stall_seconds": self.stall_seconds,
            "versions": {
                "tiered": tiered.__version__,
                "torch": torch.__version__,
                "numpy": np.__version__,
                "python": platform.python_version(),
            },
        }


def _peak_rss_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB

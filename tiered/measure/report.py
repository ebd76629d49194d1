"""The results of a bench, as rows and as JSON. ``SCHEMA`` and ``VERSION`` fix the shape of the JSON.

Version 3: an object with schema, version, measured_at, machine, settings, results (one object per point, each with at
least op, block_bytes, depth, gb_per_s, ratio_to_fio), tensors, ratios_to_sum, compute_device (copies, link, swap),
verdict; and by directory engines, engine_reasons, fio, sustained, smart, demand, swap, best. A figure that was
not measured is null. GB are 10^9 bytes; latencies are in seconds; the order of results is that of measuring.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime

from tiered.bytes.device.profile import Profile
from tiered.doctor.description import MachineDescription
from tiered.doctor.drive import by_drive
from tiered.measure.copying import CopyRow, LinkRates
from tiered.measure.pairs import PointRow
from tiered.measure.settings import BenchSettings
from tiered.measure.sustained import Smart, SustainedRate
from tiered.measure.swapping import DemandLatency, SwapRates
from tiered.measure.tensors import TensorRow
from tiered.measure.three_tiers import TierRow
from tiered.measure.verdict import Best

__all__ = ["SCHEMA", "VERSION", "BenchReport", "ComputeDeviceReport", "DirectoryReport"]

SCHEMA = "tiered-bench"
VERSION = 3


@dataclass(slots=True)
class ComputeDeviceReport:
    """The results of one compute device so far."""

    device: str  # with its index
    device_type: str
    why_pageable: str | None  # None: the store's DRAM was page-locked
    copies: list[CopyRow]
    link: LinkRates
    swap: TierRow | None = None


@dataclass(slots=True)
class DirectoryReport:
    """The results in one directory so far."""

    directory: str
    engine: str = ""
    engine_reason: str = ""
    fio_engine: str | None = None
    rows: list[PointRow] = field(default_factory=list)
    other_rows: list[PointRow] = field(default_factory=list)  # of other engines
    tensors: list[TensorRow] = field(default_factory=list)
    sustained: list[SustainedRate] = field(default_factory=list)
    smart: list[Smart] = field(default_factory=list)
    demand: DemandLatency | None = None
    best: Best | None = None
    swap: SwapRates | None = None


@dataclass(slots=True)
class BenchReport:
    """A whole bench."""

    machine: MachineDescription
    settings: BenchSettings
    directories: list[DirectoryReport]
    together: list[TensorRow] = field(default_factory=list)  # a store over all directories
    compute_device: ComputeDeviceReport | None = None
    verdict: str = ""
    measured_at: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def profile_of(self, one: DirectoryReport) -> Profile:
        """Return the profile to keep in a directory. Its best settings and the rates of tensors must be known."""
        best, swap = one.best, one.swap
        assert best is not None and swap is not None, one.directory
        return Profile(
            engine=one.engine,
            read_bytes_per_s=swap.read_gb_per_s * 1e9,
            write_bytes_per_s=swap.write_gb_per_s * 1e9,
            block_nbytes=best.block_bytes,
            read_depth=best.read_depth,
            write_depth=best.write_depth,
            duplex=swap.duplex,
            measured_at=self.measured_at,
            kernel=self.machine.kernel,
        )

    @property
    def rows(self) -> list[PointRow]:
        """All points of all directories."""
        return [row for one in self.directories for row in one.rows + one.other_rows]

    @property
    def tensors(self) -> list[TensorRow]:
        """The rows of a store in each directory, and of one over all."""
        return [row for one in self.directories for row in one.tensors] + self.together

    @property
    def swapping(self) -> list[SwapRates]:
        """The rates for tensors of each drive, measured in the first of its directories, which share them."""
        firsts = [which[0] for which in by_drive(one.directory for one in self.directories).values()]
        return [one.swap for one in self.directories if one.swap is not None and one.directory in firsts]

    @property
    def ratios_to_sum(self) -> dict[str, float]:
        """The rates of a store over all directories, by op, over the sum of the rates of each drive alone."""
        return {row.op: row.ratio_to_raw for row in self.together}

    def as_json(self) -> dict[str, object]:
        """Return the report for ``json.dumps``."""
        by_directory: Sequence[DirectoryReport] = self.directories
        return {
            "schema": SCHEMA,
            "version": VERSION,
            "measured_at": self.measured_at,
            "machine": self.machine.as_json(),
            "settings": asdict(self.settings),
            "engines": {one.directory: one.engine for one in by_directory},
            "engine_reasons": {one.directory: one.engine_reason for one in by_directory},
            "fio": {one.directory: one.fio_engine for one in by_directory},
            "results": [asdict(row) for row in self.rows],
            "tensors": [asdict(row) for row in self.tensors],
            "sustained": {one.directory: [asdict(sample) for sample in one.sustained] for one in by_directory},
            "smart": {one.directory: [asdict(smart) for smart in one.smart] for one in by_directory},
            "demand": {
                one.directory: one.demand and {**asdict(one.demand), "p99_ratio": one.demand.p99_ratio}
                for one in by_directory
            },
            "swap": {one.directory: one.swap and asdict(one.swap) for one in by_directory},
            "best": {one.directory: one.best and asdict(one.best) for one in by_directory},
            "ratios_to_sum": self.ratios_to_sum,
            "compute_device": self.compute_device and asdict(self.compute_device),
            "verdict": self.verdict,
        }

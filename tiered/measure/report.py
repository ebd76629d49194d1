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

from tiered.doctor.block_device import by_drive
from tiered.doctor.description import MachineDescription
from tiered.measure.compute_device_report import ComputeDeviceReport
from tiered.measure.demand import DemandLatency
from tiered.measure.pairs import Pairs
from tiered.measure.rounds import Latency
from tiered.measure.settings import BenchSettings
from tiered.measure.sustained import Smart, SustainedRate
from tiered.measure.swapping import SwapRates
from tiered.measure.tensors import TensorRounds
from tiered.measure.verdict import Best
from tiered.units import format_short

__all__ = ["ROW_TITLE", "SCHEMA", "TENSOR_TITLE", "VERSION", "BenchReport", "DirectoryReport", "PointRow", "TensorRow"]

SCHEMA = "tiered-bench"
VERSION = 3

ROW_TITLE = (
    f"{'op':<6} {'block':>5} {'depth':>5} {'GB/s':>6} {'range':>11} {'fio':>6} {'ratio':>5} "
    f"{'p50 ms':>7} {'p99 ms':>7} {'CPU ms/GB':>9}"
)
TENSOR_TITLE = "op        tensor      GB/s          range    raw  ratio"


@dataclass(frozen=True, slots=True)
class PointRow:
    """One point: the medians over its rounds, ours and fio's."""

    op: str
    block_bytes: int
    depth: int
    engine: str
    directory: str
    rounds: int
    gb_per_s: float
    gb_per_s_min: float
    gb_per_s_max: float
    latency: Latency
    cpu_s_per_gb: float
    read_gb_per_s: float  # of mixed: each direction
    write_gb_per_s: float
    fio_gb_per_s: float | None
    ratio_to_fio: float | None  # the median over the pairs
    fio_cpu_s_per_gb: float | None
    cpu_ratio_to_fio: float | None
    fio_latency: Latency | None  # of the median round

    @classmethod
    def of(cls, pairs: Pairs, *, engine: str, directory: str) -> PointRow:
        """Return the row of ``pairs``."""
        rates = sorted(one.gb_per_s for one in pairs.ours)
        seconds = sum(one.seconds for one in pairs.ours)
        fio = sorted(pairs.fio, key=lambda one: one.gb_per_s)
        middle = fio[len(fio) // 2] if fio else None
        return cls(
            op=pairs.pattern.op,
            block_bytes=pairs.pattern.block_nbytes,
            depth=pairs.pattern.depth,
            engine=engine,
            directory=directory,
            rounds=len(rates),
            gb_per_s=pairs.gb_per_s,
            gb_per_s_min=rates[0],
            gb_per_s_max=rates[-1],
            latency=pairs.latency,
            cpu_s_per_gb=pairs.cpu_s_per_gb,
            read_gb_per_s=sum(one.read_nbytes for one in pairs.ours) / seconds / 1e9,
            write_gb_per_s=sum(one.write_nbytes for one in pairs.ours) / seconds / 1e9,
            fio_gb_per_s=pairs.fio_gb_per_s,
            ratio_to_fio=pairs.ratio_to_fio,
            fio_cpu_s_per_gb=pairs.fio_cpu_s_per_gb,
            cpu_ratio_to_fio=pairs.cpu_ratio_to_fio,
            fio_latency=middle.latency if middle else None,
        )

    def __str__(self) -> str:
        latency = self.latency
        spread = f"{self.gb_per_s_min:.2f}-{self.gb_per_s_max:.2f}"
        return (
            f"{self.op:<6} {format_short(self.block_bytes):>5} {self.depth:>5} {self.gb_per_s:>6.2f} {spread:>11} "
            f"{_said(self.fio_gb_per_s, 6, 2)} {_said(self.ratio_to_fio, 5, 2)} {latency.p50_s * 1e3:>7.2f} "
            f"{latency.p99_s * 1e3:>7.2f} {self.cpu_s_per_gb * 1e3:>9.1f}"
        )


@dataclass(frozen=True, slots=True)
class TensorRow:
    """Puts, gets or leases of tensors of one size."""

    op: str  # "put", "get" or "lease"
    tensor_bytes: int
    num_tensors: int
    directory: str  # several are joined by "+"
    rounds: int
    gb_per_s: float
    gb_per_s_min: float
    gb_per_s_max: float
    raw_gb_per_s: tuple[float, ...]  # of several directories: the sum of their drives' own rates
    ratio_to_raw: float

    @classmethod
    def of(cls, found: TensorRounds, *, directory: str) -> TensorRow:
        """Return the row of ``found``."""
        return cls(
            op=found.op,
            tensor_bytes=found.tensor_nbytes,
            num_tensors=found.num_tensors,
            directory=directory,
            rounds=len(found.gb_per_s),
            gb_per_s=found.median_gb_per_s,
            gb_per_s_min=min(found.gb_per_s),
            gb_per_s_max=max(found.gb_per_s),
            raw_gb_per_s=found.raw_gb_per_s,
            ratio_to_raw=found.ratio_to_raw,
        )

    def __str__(self) -> str:
        spread = f"{self.gb_per_s_min:.2f}-{self.gb_per_s_max:.2f}"
        raw = sorted(self.raw_gb_per_s)[len(self.raw_gb_per_s) // 2]
        return (
            f"{self.op:<8} {format_short(self.tensor_bytes):>7} {self.gb_per_s:>9.2f} {spread:>14} {raw:>6.2f} "
            f"{self.ratio_to_raw:>6.2f}"
        )


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


def _said(value: float | None, width: int, digits: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:>{width}.{digits}f}"

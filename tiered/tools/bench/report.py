"""The results of a bench: rows for people and for programs, the best settings, and the verdict in one line.

``SCHEMA`` and ``VERSION`` fix the shape of the JSON. Version 5: an object with schema, version, measured_at, machine,
settings, results (one object per row of the table, with op, block_bytes, depth, directory, gb_per_s, reference and
ratio), directories (engine, engine_reason, fio_engine, sustained, best and swap of each), compute_device and verdict. A
figure that was not measured is null. GB are 10^9 bytes; latencies are in seconds.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime

from tiered.bytes.device.profile import LinkProfile, Profile
from tiered.tools.bench.rounds import STEP_READ, STEP_WRITTEN, Latency
from tiered.tools.bench.settings import BenchSettings
from tiered.tools.doctor.description import MachineDescription, by_drive
from tiered.units import format_bytes, format_short

__all__ = [
    "SCHEMA",
    "TITLE",
    "VERSION",
    "Bandwidth",
    "BenchReport",
    "BenchRow",
    "Best",
    "ComputeDeviceReport",
    "DirectoryReport",
    "SustainedRate",
    "best_of",
    "compute_verdict_of",
    "duplex_of",
    "verdict_of",
]  # fmt: skip

SCHEMA = "tiered-bench"
VERSION = 5

TITLE = (
    f"{'op':<8} {'size':>5} {'depth':>5} {'GB/s':>6} {'range':>11} {'beside':>11} {'ratio':>5} "
    f"{'p50 ms':>6} {'p99 ms':>7} {'ms/GB':>6}"
)
"""The heading of the table; ms/GB is time of the CPU."""

_AS_GOOD_AS = 0.97  # of the best: fewer bytes in flight are worth 3 %, about the difference between rounds
_THE_SAME = 0.03
_STEP = STEP_READ * 1e9, STEP_WRITTEN * 1e9  # bytes read and written for 1e9 parameters


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """The bandwidth of drives together, or of copies to a compute device, which are reads here, and from it."""

    read_bytes_per_s: float
    write_bytes_per_s: float
    duplex: float = 0.0  # 0: reads and writes share the drive, 1: neither slows the other, below 0: both cost more

    def seconds(self, read_bytes: float, write_bytes: float) -> float:
        """Return the least time to move the bytes: max(R/B_r, W/B_w) + (1 - d) * min(R/B_r, W/B_w)."""
        read_s, write_s = read_bytes / self.read_bytes_per_s, write_bytes / self.write_bytes_per_s
        return max(read_s, write_s) + (1 - self.duplex) * min(read_s, write_s)

    @classmethod
    def of_drives(cls, drives: Sequence[Bandwidth]) -> Bandwidth:
        """Return the bandwidth of ``drives`` together: the sum of their rates, the least of their duplex factors."""
        return cls(
            sum(one.read_bytes_per_s for one in drives),
            sum(one.write_bytes_per_s for one in drives),
            min(one.duplex for one in drives),
        )

    def __str__(self) -> str:
        read, write = self.read_bytes_per_s / 1e9, self.write_bytes_per_s / 1e9
        return f"read {read:.2f} GB/s, write {write:.2f} GB/s, both at once {self.mixed_gb_per_s:.2f} GB/s in sum"

    @property
    def mixed_gb_per_s(self) -> float:
        """10^9 bytes a second in both directions together, while a step moves 14 bytes in and 12 out."""
        return sum(_STEP) / self.seconds(*_STEP) / 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRow:
    """Rounds of one kind, and those of a reference between them: 10^9 bytes a second.

    "read", "write" and "mixed" are blocks beside fio. "put" ends with a commit, "get" copies into one tensor of the
    caller's, "lease" looks at the arena's own bytes: tensors, beside raw blocks. "copy in", "copy out" and "in + out"
    are copies to and from a compute device beside torch's, "3 tiers" the copies of a swap beside min(PCIe, NVMe).
    """

    op: str
    block_bytes: int  # or of a tensor
    directory: str  # several are joined by "+"
    rounds: int
    gb_per_s: float  # the median
    gb_per_s_min: float
    gb_per_s_max: float
    reference: str
    reference_gb_per_s: float | None  # the median; None: without a reference
    ratio: float | None  # the median over the pairs of rounds
    depth: int | None = None
    latency: Latency | None = None  # of the median round
    cpu_s_per_gb: float | None = None
    reference_latency: Latency | None = None
    reference_cpu_s_per_gb: float | None = None

    @classmethod
    def of(
        cls,
        op: str,
        block_bytes: int,
        directory: str,
        ours: Sequence[float],
        reference: str,
        theirs: Sequence[float],
        **more: object,
    ) -> BenchRow:
        """Return the row of the rates of rounds, and of as many of the reference, or none of it."""
        ratios = [our / their for our, their in zip(ours, theirs, strict=True)] if theirs else []
        return cls(
            op=op,
            block_bytes=block_bytes,
            directory=directory,
            rounds=len(ours),
            gb_per_s=statistics.median(ours),
            gb_per_s_min=min(ours),
            gb_per_s_max=max(ours),
            reference=reference,
            reference_gb_per_s=statistics.median(theirs) if theirs else None,
            ratio=statistics.median(ratios) if ratios else None,
            **more,  # type: ignore[arg-type]  # fields of the caller's
        )

    def __str__(self) -> str:
        between = f"{self.gb_per_s_min:.2f}-{self.gb_per_s_max:.2f}"
        beside, ratio = f"{self.reference} -", "-"
        if self.reference_gb_per_s is not None:
            beside, ratio = f"{self.reference} {self.reference_gb_per_s:.2f}", f"{self.ratio:.2f}"
        line = (
            f"{self.op:<8} {format_short(self.block_bytes):>5} {self.depth or '':>5} {self.gb_per_s:>6.2f} "
            f"{between:>11} {beside:>11} {ratio:>5}"
        )
        if self.latency is None or self.cpu_s_per_gb is None:
            return line
        return (
            f"{line} {self.latency.p50_s * 1e3:>6.2f} {self.latency.p99_s * 1e3:>7.2f} {self.cpu_s_per_gb * 1e3:>6.1f}"
        )


@dataclass(frozen=True, slots=True)
class SustainedRate:
    """One window of a long run."""

    op: str
    at_s: float  # the window's end, from the start of its op
    gb_per_s: float
    temperature_c: float | None  # None: not readable


@dataclass(frozen=True, slots=True)
class Best:
    """The best settings for a drive, and their rates."""

    block_bytes: int
    read_depth: int
    write_depth: int
    read_gb_per_s: float
    write_gb_per_s: float
    read_ratio_to_fio: float | None
    write_ratio_to_fio: float | None


@dataclass(slots=True)
class ComputeDeviceReport:
    """The results of one compute device so far; its rows are in the table."""

    device: str  # with its index
    device_type: str
    why_pageable: str | None  # None: the store's DRAM was page-locked
    link: Bandwidth
    ratio_to_torch: float  # the median over the kinds of copies
    swap: BenchRow | None = None  # over all three tiers
    swap_bytes: dict[str, int] = field(default_factory=dict)  # of its rounds: copied in and out, read and written


@dataclass(slots=True)
class DirectoryReport:
    """The results in one directory so far; its rows are in the table."""

    directory: str
    engine: str = ""
    engine_reason: str = ""
    fio_engine: str | None = None
    sustained: list[SustainedRate] = field(default_factory=list)
    best: Best | None = None
    swap: Bandwidth | None = None  # at the best settings, through memory that no cache holds


@dataclass(slots=True)
class BenchReport:
    """A whole bench."""

    machine: MachineDescription
    settings: BenchSettings
    results: list[BenchRow] = field(default_factory=list)
    directories: list[DirectoryReport] = field(default_factory=list)
    compute_device: ComputeDeviceReport | None = None
    verdict: str = ""
    measured_at: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def profile_of(self, one: DirectoryReport) -> Profile:
        """Return the profile to keep in a directory. Its best settings and the rates of tensors must be known."""
        best, swap = one.best, one.swap
        assert best is not None and swap is not None, one.directory
        return Profile(
            engine=one.engine,
            read_bytes_per_s=swap.read_bytes_per_s,
            write_bytes_per_s=swap.write_bytes_per_s,
            block_nbytes=best.block_bytes,
            read_depth=best.read_depth,
            write_depth=best.write_depth,
            duplex=swap.duplex,
            measured_at=self.measured_at,
            kernel=self.machine.kernel,
        )

    def link_profile_of(self, found: ComputeDeviceReport) -> LinkProfile:
        """Return the profile of a compute device to keep beside those of the drives."""
        return LinkProfile(
            device=found.device_type,
            in_bytes_per_s=found.link.read_bytes_per_s,
            out_bytes_per_s=found.link.write_bytes_per_s,
            duplex=found.link.duplex,
            measured_at=self.measured_at,
            kernel=self.machine.kernel,
        )

    @property
    def joined(self) -> str:
        """The measured directories in one word."""
        return "+".join(one.directory for one in self.directories)

    @property
    def drives(self) -> list[Bandwidth]:
        """The rates for tensors of each drive, measured in the first of its directories, which share them."""
        firsts = [which[0] for which in by_drive(one.directory for one in self.directories).values()]
        return [one.swap for one in self.directories if one.swap is not None and one.directory in firsts]

    def as_json(self) -> dict[str, object]:
        """Return the report for ``json.dumps``."""
        return {"schema": SCHEMA, "version": VERSION, **asdict(self)}


def duplex_of(mixed_read: float, mixed_write: float, read: float, write: float) -> float:
    """Return how far reads and writes run beside each other: 0 they share the drive, 1 neither slows the other.

    Below 0, down to -1, both at once move less than one after the other.

    The rates are of both directions at once, and of each alone. In a second of both the drive did what takes r seconds
    of reads alone and w of writes alone; with no overlap r + w = 1, with all of it the longer one is 1: d solves
    1 = max(r, w) + (1 - d) * min(r, w).
    """
    r, w = mixed_read / read, mixed_write / write
    if min(r, w) <= 0:
        return 0.0
    return min(1.0, max(-1.0, 1 - (1 - max(r, w)) / min(r, w)))


def best_of(rows: Sequence[BenchRow]) -> Best:
    """Return the best settings: one block size, a depth for each direction, by the I/O time of a training step.

    Among those within 3 % of the best, the fewest bytes in flight. Needs a read and a write at one block size at least.
    """
    choices: list[tuple[float, int, BenchRow, BenchRow]] = []
    for block_bytes in sorted({row.block_bytes for row in rows}):
        reads, writes = (
            [row for row in rows if row.op == op and row.block_bytes == block_bytes] for op in ("read", "write")
        )
        if reads and writes:
            read, write = _shallowest(reads), _shallowest(writes)
            seconds = STEP_READ / read.gb_per_s + STEP_WRITTEN / write.gb_per_s
            choices.append((seconds, block_bytes * (_depth(read) + _depth(write)), read, write))
    fastest = min(seconds for seconds, *_ in choices)
    _, _, read, write = min((choice for choice in choices if choice[0] * _AS_GOOD_AS <= fastest), key=lambda c: c[1])
    return Best(
        block_bytes=read.block_bytes,
        read_depth=_depth(read),
        write_depth=_depth(write),
        read_gb_per_s=read.gb_per_s,
        write_gb_per_s=write.gb_per_s,
        read_ratio_to_fio=read.ratio,
        write_ratio_to_fio=write.ratio,
    )


def _shallowest(rows: Sequence[BenchRow]) -> BenchRow:
    fastest = max(row.gb_per_s for row in rows)
    return min((row for row in rows if row.gb_per_s >= _AS_GOOD_AS * fastest), key=_depth)


def _depth(row: BenchRow) -> int:
    assert row.depth is not None, row
    return row.depth


def verdict_of(
    bests: Sequence[Best], drives: Sequence[Bandwidth], together: Sequence[BenchRow] = (), *, has_fio: bool = False
) -> str:
    """Return one line for people about all ``drives``, whose rates are those for tensors.

    ``together`` has a put and a get of a store over several directories. ``has_fio`` says that fio is there, for bests
    without a ratio to it.
    """
    swap, read, write = Bandwidth.of_drives(drives), bests[0].read_gb_per_s, bests[0].write_gb_per_s
    tensors = (
        f" (tensors, which no cache holds, {swap.read_bytes_per_s / 1e9:.1f} and {swap.write_bytes_per_s / 1e9:.1f})"
    )
    if together:
        read, write = (next(row.gb_per_s for row in together if row.op == op) for op in ("get", "put"))
        swap, tensors = Bandwidth(read * 1e9, write * 1e9, swap.duplex), " (a store over all of them)"
    return (
        f"read {read:.1f} GB/s, write {write:.1f} GB/s with {_settings(bests)}{tensors}: "
        f"swapping 1 B parameters in and out of {'this drive' if len(drives) == 1 else f'these {len(drives)} drives'} "
        f"takes {swap.seconds(*_STEP):.1f} s a step "
        f"(14 bytes of each read and 12 written at {swap.mixed_gb_per_s:.1f} GB/s in sum: bf16 with exact AdamW, none "
        "of it held in DRAM); "
        f"{_beside_fio(bests, has_fio=has_fio)}"
    )


def compute_verdict_of(found: ComputeDeviceReport) -> str:
    """Return what the verdict says about a compute device whose copies and swap over three tiers were measured."""
    assert found.swap is not None and found.swap.ratio is not None, found.device
    return (
        f"copies to {found.device} run at {found.link.read_bytes_per_s / 1e9:.1f} GB/s and from it at "
        f"{found.link.write_bytes_per_s / 1e9:.1f}, torch reaches {_beside(found.ratio_to_torch)}; "
        f"all three tiers at once move {found.swap.gb_per_s:.1f} GB/s, "
        f"{found.swap.ratio * 100:.0f} % of min(PCIe, NVMe)"
    )


def _settings(bests: Sequence[Best]) -> str:
    best = bests[0]
    if len({(one.block_bytes, one.read_depth, one.write_depth) for one in bests}) > 1:
        return "each at its own best"
    depth = str(best.read_depth)
    if best.read_depth != best.write_depth:
        depth = f"{best.read_depth} reading, {best.write_depth} writing"
    return f"{format_bytes(best.block_bytes).replace('.0 ', ' ')} x {depth}"


def _beside_fio(bests: Sequence[Best], *, has_fio: bool) -> str:
    said = []
    for verb in ("read", "write"):
        ratios = [ratio for best in bests if (ratio := getattr(best, f"{verb}_ratio_to_fio")) is not None]
        if not ratios:
            return f"fio {'did not work' if has_fio else 'is not installed'}, so there is no reference"
        said.append(_beside(statistics.median(ratios)))
    return f"fio reaches {said[0]}" if said[0] == said[1] else f"fio reads {said[0]} and writes {said[1]}"


def _beside(ratio: float) -> str:
    """Return how much more a reference reaches, from the ratio of ours to it."""
    difference = 1 / ratio - 1
    if abs(difference) <= _THE_SAME:
        return "the same"
    return f"{abs(difference) * 100:.0f} % {'more' if difference > 0 else 'less'}"

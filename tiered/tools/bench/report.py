"""The results of a bench: rows for people and for programs, the best settings, and the verdict in one line.

``SCHEMA`` and ``VERSION`` fix the shape of the JSON. Version 4: an object with schema, version, measured_at, machine,
settings, results (one object per point, each with at least op, block_bytes, depth, gb_per_s, ratio_to_fio), tensors,
ratios_to_sum, compute_device (copies, link, swap), verdict; and by directory engines, engine_reasons, fio, sustained,
swap, best. A figure that was not measured is null. GB are 10^9 bytes; latencies are in seconds.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from tiered.bytes.device.profile import LinkProfile, Profile
from tiered.tools.bench.rounds import Latency
from tiered.tools.bench.settings import BenchSettings
from tiered.tools.doctor.description import MachineDescription, by_drive
from tiered.units import format_bytes, format_short

__all__ = [
    "POINT_TITLE", "SCHEMA", "VERSION", "BenchReport", "Best", "ComputeDeviceReport", "CopyRow", "DirectoryReport",
    "LinkRates", "PointRow", "SustainedRate", "SwapRates", "TensorRow", "TierRow", "best_of", "compute_verdict_of",
    "duplex_of", "median_ratio", "move_seconds", "row_title", "spread", "step_seconds", "verdict_of",
]  # fmt: skip

SCHEMA = "tiered-bench"
VERSION = 4

POINT_TITLE = (
    f"{'op':<6} {'block':>5} {'depth':>5} {'GB/s':>6} {'range':>11} {'fio':>6} {'ratio':>5} "
    f"{'p50 ms':>7} {'p99 ms':>7} {'CPU ms/GB':>9}"
)

_BY_DIRECTORY = {
    "engines": "engine", "engine_reasons": "engine_reason", "fio": "fio_engine", "sustained": "sustained",
    "swap": "swap", "best": "best",
}  # fmt: skip
"""The keys of the JSON whose values are by directory: the fields of DirectoryReport."""

_AS_GOOD_AS = 0.97  # of the best: fewer bytes in flight are worth 3 %, about the difference between rounds
_THE_SAME = 0.03


def row_title(what: str, reference: str) -> str:
    """Return the heading of rows about ``what`` is moved, beside ``reference``."""
    return f"{'op':<8} {what:>7} {'GB/s':>9} {'range':>14} {reference:>6} {'ratio':>6}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rates:
    """The rates of as many rounds as there were: their median, the least and the most."""

    rounds: int
    gb_per_s: float
    gb_per_s_min: float
    gb_per_s_max: float

    def line(self, op: str, nbytes: int, reference: float, ratio: float) -> str:
        """Return the row for people, below a ``row_title``."""
        between = f"{self.gb_per_s_min:.2f}-{self.gb_per_s_max:.2f}"
        return f"{op:<8} {format_short(nbytes):>7} {self.gb_per_s:>9.2f} {between:>14} {reference:>6.2f} {ratio:>6.2f}"


def spread(rates: Sequence[float]) -> dict[str, Any]:
    """Return the fields of a row that come from the ``rates`` of its rounds."""
    return {
        "rounds": len(rates),
        "gb_per_s": statistics.median(rates),
        "gb_per_s_min": min(rates),
        "gb_per_s_max": max(rates),
    }


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the median over pairs of rounds."""
    return statistics.median(our / their for our, their in zip(ours, theirs, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class PointRow(_Rates):
    """One point: the medians over its rounds, ours and fio's. None: without fio."""

    op: str
    block_bytes: int
    depth: int
    engine: str
    directory: str
    latency: Latency
    cpu_s_per_gb: float
    read_gb_per_s: float  # of mixed: each direction
    write_gb_per_s: float
    fio_gb_per_s: float | None = None
    ratio_to_fio: float | None = None  # the median over the pairs
    fio_cpu_s_per_gb: float | None = None
    cpu_ratio_to_fio: float | None = None
    fio_latency: Latency | None = None  # of the median round

    def __str__(self) -> str:
        between = f"{self.gb_per_s_min:.2f}-{self.gb_per_s_max:.2f}"
        fio, ratio = ("-" if each is None else f"{each:.2f}" for each in (self.fio_gb_per_s, self.ratio_to_fio))
        return (
            f"{self.op:<6} {format_short(self.block_bytes):>5} {self.depth:>5} {self.gb_per_s:>6.2f} {between:>11} "
            f"{fio:>6} {ratio:>5} {self.latency.p50_s * 1e3:>7.2f} {self.latency.p99_s * 1e3:>7.2f} "
            f"{self.cpu_s_per_gb * 1e3:>9.1f}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRow(_Rates):
    """Puts, gets or leases of tensors of one size, and the raw rounds between them.

    "put" ends with a commit, "get" copies into one tensor of the caller's, "lease" looks at the arena's own bytes.
    """

    op: str
    tensor_bytes: int
    num_tensors: int
    directory: str  # several are joined by "+"
    raw_gb_per_s: tuple[float, ...]  # of several directories: the sum of their own rates
    ratio_to_raw: float  # the median over the pairs

    def __str__(self) -> str:
        return self.line(self.op, self.tensor_bytes, statistics.median_high(self.raw_gb_per_s), self.ratio_to_raw)


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyRow(_Rates):
    """Copies to and from a compute device: the medians over the rounds, the store's and torch's, as many of each."""

    op: str
    block_bytes: int
    in_bytes: int  # to the device in a round
    out_bytes: int  # from it; rates are of both directions together
    torch_gb_per_s: tuple[float, ...]  # of each round
    ratio_to_torch: float  # the median over the pairs

    def __str__(self) -> str:
        return self.line(self.op, self.block_bytes, statistics.median_high(self.torch_gb_per_s), self.ratio_to_torch)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierRow(_Rates):
    """Swapping over three tiers, in both directions at once, and the bytes of all rounds at each border.

    Rates are of the bytes copied in and out together.
    """

    directory: str  # several are joined by "+"
    tensor_bytes: int
    num_tensors: int  # each way in a round
    dram_bytes: int
    in_bytes: int  # to the compute device
    out_bytes: int  # from it
    read_bytes: int  # from NVMe; less than went on from there, where DRAM had some still
    write_bytes: int  # to NVMe
    bound_gb_per_s: float  # min(PCIe, NVMe), of the rates measured before
    ratio_to_bound: float

    def __str__(self) -> str:
        return self.line("3 tiers", self.tensor_bytes, self.bound_gb_per_s, self.ratio_to_bound)


@dataclass(frozen=True, slots=True)
class SwapRates:
    """Medians over the rounds, 10^9 bytes a second, at the best settings through memory that no cache holds."""

    memory_bytes: int  # that the blocks went through
    read_gb_per_s: float
    write_gb_per_s: float
    duplex: float  # 0: reads and writes share the drive, 1: neither slows the other

    def __str__(self) -> str:
        return (
            f"through {format_bytes(self.memory_bytes)} of memory, as tensors go: read {self.read_gb_per_s:.2f} GB/s, "
            f"write {self.write_gb_per_s:.2f} GB/s, duplex {self.duplex:.2f}"
        )


@dataclass(frozen=True, slots=True)
class SustainedRate:
    """One window of a long run."""

    op: str
    at_s: float  # the window's end, from the start of its op
    gb_per_s: float
    temperature_c: float | None  # None: not readable


@dataclass(frozen=True, slots=True)
class LinkRates:
    """The medians of the store's copies each way alone, and how far both run beside each other."""

    in_gb_per_s: float
    out_gb_per_s: float
    duplex: float  # 0: both directions share the link, 1: neither slows the other

    @classmethod
    def of(cls, copied_in: CopyRow, copied_out: CopyRow, both: CopyRow) -> LinkRates:
        """Return the rates of the three kinds of copies."""
        read, write = copied_in.gb_per_s, copied_out.gb_per_s
        seconds = (both.in_bytes + both.out_bytes) / both.gb_per_s
        return cls(read, write, duplex_of(both.in_bytes / seconds, both.out_bytes / seconds, read, write))

    def __str__(self) -> str:
        return f"copies in {self.in_gb_per_s:.2f} GB/s, out {self.out_gb_per_s:.2f} GB/s, duplex {self.duplex:.2f}"


@dataclass(frozen=True, slots=True)
class Best:
    """The best settings for a drive, and their rates."""

    block_bytes: int
    read_depth: int
    write_depth: int
    read_gb_per_s: float
    write_gb_per_s: float
    duplex: float | None  # 0: reads and writes share the drive, 1: neither slows the other; None: not measured
    read_ratio_to_fio: float | None
    write_ratio_to_fio: float | None

    @property
    def seconds(self) -> float:
        """The I/O time of a training step, reads and writes one after the other."""
        return step_seconds(self.read_gb_per_s, self.write_gb_per_s)


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
    tensors: list[TensorRow] = field(default_factory=list)
    sustained: list[SustainedRate] = field(default_factory=list)
    best: Best | None = None
    swap: SwapRates | None = None


@dataclass(slots=True)
class BenchReport:
    """A whole bench."""

    machine: MachineDescription
    settings: BenchSettings
    directories: list[DirectoryReport] = field(default_factory=list)
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

    def link_profile_of(self, found: ComputeDeviceReport) -> LinkProfile:
        """Return the profile of a compute device to keep beside those of the drives."""
        return LinkProfile(
            device=found.device_type,
            in_bytes_per_s=found.link.in_gb_per_s * 1e9,
            out_bytes_per_s=found.link.out_gb_per_s * 1e9,
            duplex=found.link.duplex,
            measured_at=self.measured_at,
            kernel=self.machine.kernel,
        )

    @property
    def joined(self) -> str:
        """The measured directories in one word."""
        return "+".join(one.directory for one in self.directories)

    @property
    def swapping(self) -> list[SwapRates]:
        """The rates for tensors of each drive, measured in the first of its directories, which share them."""
        firsts = [which[0] for which in by_drive(one.directory for one in self.directories).values()]
        return [one.swap for one in self.directories if one.swap is not None and one.directory in firsts]

    def as_json(self) -> dict[str, object]:
        """Return the report for ``json.dumps``."""
        found = [asdict(one) for one in self.directories]
        return {
            "schema": SCHEMA,
            "version": VERSION,
            "measured_at": self.measured_at,
            "machine": asdict(self.machine),
            "settings": asdict(self.settings),
            "results": [row for one in found for row in one["rows"]],
            "tensors": [row for one in found for row in one["tensors"]] + [asdict(row) for row in self.together],
            **{key: {one["directory"]: one[name] for one in found} for key, name in _BY_DIRECTORY.items()},
            "ratios_to_sum": {row.op: row.ratio_to_raw for row in self.together},
            "compute_device": self.compute_device and asdict(self.compute_device),
            "verdict": self.verdict,
        }


def duplex_of(mixed_read: float, mixed_write: float, read: float, write: float) -> float:
    """Return how far reads and writes run beside each other: 0 they share the drive, 1 neither slows the other.

    The rates are of both directions at once, and of each alone. In a second of both the drive did what takes r seconds
    of reads alone and w of writes alone; with no overlap r + w = 1, with all of it the longer one is 1: d solves
    1 = max(r, w) + (1 - d) * min(r, w).
    """
    r, w = mixed_read / read, mixed_write / write
    if min(r, w) <= 0:
        return 0.0
    return min(1.0, max(0.0, 1 - (1 - max(r, w)) / min(r, w)))


def move_seconds(
    read_nbytes: float, write_nbytes: float, read_gb_per_s: float, write_gb_per_s: float, *, duplex: float
) -> float:
    """Return the time to move bytes both ways: max(r, w) + (1 - duplex) * min(r, w), with r and w of each way alone."""
    r, w = read_nbytes / (read_gb_per_s * 1e9), write_nbytes / (write_gb_per_s * 1e9)
    return max(r, w) + (1 - duplex) * min(r, w)


def best_of(figures: Sequence[PointRow]) -> Best:
    """Return the best settings: one block size, a depth for each direction, by the I/O time of a training step.

    Among those within 3 % of the best, the fewest bytes in flight. Needs a read and a write at one block size at least.
    """
    choices: list[tuple[float, int, PointRow, PointRow]] = []
    for block_bytes in sorted({figure.block_bytes for figure in figures}):
        same = [figure for figure in figures if figure.block_bytes == block_bytes]
        reads, writes = ([figure for figure in same if figure.op == op] for op in ("read", "write"))
        if reads and writes:
            read, write = _shallowest(reads), _shallowest(writes)
            seconds = step_seconds(read.gb_per_s, write.gb_per_s)
            choices.append((seconds, block_bytes * (read.depth + write.depth), read, write))
    fastest = min(seconds for seconds, *_ in choices)
    _, _, read, write = min((choice for choice in choices if choice[0] * _AS_GOOD_AS <= fastest), key=lambda c: c[1])
    mixed = [figure for figure in figures if figure.op == "mixed"]
    mixed = [one for one in mixed if one.block_bytes == read.block_bytes] or mixed
    duplexes = [duplex_of(one.read_gb_per_s, one.write_gb_per_s, read.gb_per_s, write.gb_per_s) for one in mixed]
    return Best(
        block_bytes=read.block_bytes,
        read_depth=read.depth,
        write_depth=write.depth,
        read_gb_per_s=read.gb_per_s,
        write_gb_per_s=write.gb_per_s,
        duplex=max(duplexes, default=None),
        read_ratio_to_fio=read.ratio_to_fio,
        write_ratio_to_fio=write.ratio_to_fio,
    )


def step_seconds(read_gb_per_s: float, write_gb_per_s: float, *, duplex: float = 0.0) -> float:
    """Return the I/O time of a training step of 1e9 parameters: 14 bytes of each are read, 12 written.

    Reads and writes overlap by ``duplex``. The bytes are those of state="exact" with nothing held: README.
    """
    return move_seconds(14e9, 12e9, read_gb_per_s, write_gb_per_s, duplex=duplex)


def verdict_of(
    bests: Sequence[Best],
    together: Sequence[TensorRow] = (),
    *,
    swapping: Sequence[SwapRates] = (),
    has_fio: bool = False,
) -> str:
    """Return one line for people about all drives; ``together`` has a put and a get of a store over all, if measured.

    ``swapping`` has each drive's rates for tensors, as a step moves them; else it counts with the best rates.
    ``has_fio`` says that fio is there, for bests without a ratio to it.
    """
    read = max((one.gb_per_s for one in together if one.op == "get"), default=bests[0].read_gb_per_s)
    write = max((one.gb_per_s for one in together if one.op == "put"), default=bests[0].write_gb_per_s)
    known = [best.duplex for best in bests if best.duplex is not None]
    seconds = step_seconds(read, write, duplex=min(known, default=0.0))
    tensors = ""
    if len(swapping) == 1 and not together:
        one = swapping[0]
        seconds = step_seconds(one.read_gb_per_s, one.write_gb_per_s, duplex=one.duplex)
        tensors = f" (tensors, which no cache holds, {one.read_gb_per_s:.1f} and {one.write_gb_per_s:.1f})"
    if together:
        tensors = " (a store over all of them)"
    drives = "this drive" if len(swapping or bests) == 1 else f"these {len(swapping or bests)} drives"
    return (
        f"read {read:.1f} GB/s, write {write:.1f} GB/s with {_settings(bests)}{tensors}: "
        f"swapping 1 B parameters in and out of {drives} takes {seconds:.1f} s a step "
        "(14 bytes of each read, 12 written: bf16 with exact AdamW, none of it held in DRAM); "
        f"{_beside_fio(bests, has_fio=has_fio)}"
    )


def compute_verdict_of(found: ComputeDeviceReport) -> str:
    """Return what the verdict says about a compute device whose copies and swap over three tiers were measured."""
    assert found.swap is not None, found.device
    return (
        f"copies to {found.device} run at {found.link.in_gb_per_s:.1f} GB/s and from it at "
        f"{found.link.out_gb_per_s:.1f}, torch reaches {_beside([row.ratio_to_torch for row in found.copies])}; "
        f"all three tiers at once move {found.swap.gb_per_s:.1f} GB/s, "
        f"{found.swap.ratio_to_bound * 100:.0f} % of min(PCIe, NVMe)"
    )


def _shallowest(figures: Sequence[PointRow]) -> PointRow:
    fastest = max(figure.gb_per_s for figure in figures)
    good = [figure for figure in figures if figure.gb_per_s >= _AS_GOOD_AS * fastest]
    return min(good, key=lambda figure: figure.depth)


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
        said.append(_beside(ratios))
    if said[0] == said[1]:
        return f"fio reaches {said[0]}"
    return f"fio reads {said[0]} and writes {said[1]}"


def _beside(ratios: Sequence[float]) -> str:
    """Return how much more a reference reaches, from ratios of ours to it."""
    difference = 1 / statistics.median(ratios) - 1
    if abs(difference) <= _THE_SAME:
        return "the same"
    return f"{abs(difference) * 100:.0f} % {'more' if difference > 0 else 'less'}"

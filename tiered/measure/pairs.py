"""Ours and fio in alternating pairs: the drive drifts, and both sides of a pair meet it in the same mood."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from tiered.measure.fio import Fio, FioRound
from tiered.measure.pattern import Pattern
from tiered.measure.rounds import Latency, Round, median_ratio, spread
from tiered.measure.scratch_file import ScratchFile
from tiered.units import format_short

__all__ = ["ROW_TITLE", "Pairs", "PointRow", "measure_pairs"]

ROW_TITLE = (
    f"{'op':<6} {'block':>5} {'depth':>5} {'GB/s':>6} {'range':>11} {'fio':>6} {'ratio':>5} "
    f"{'p50 ms':>7} {'p99 ms':>7} {'CPU ms/GB':>9}"
)


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

    def __str__(self) -> str:
        latency = self.latency
        between = f"{self.gb_per_s_min:.2f}-{self.gb_per_s_max:.2f}"
        return (
            f"{self.op:<6} {format_short(self.block_bytes):>5} {self.depth:>5} {self.gb_per_s:>6.2f} {between:>11} "
            f"{_said(self.fio_gb_per_s, 6, 2)} {_said(self.ratio_to_fio, 5, 2)} {latency.p50_s * 1e3:>7.2f} "
            f"{latency.p99_s * 1e3:>7.2f} {self.cpu_s_per_gb * 1e3:>9.1f}"
        )


@dataclass(frozen=True, slots=True)
class Pairs:
    """The rounds of one pattern; ``fio`` is empty where there is none, else as long as ``ours``."""

    pattern: Pattern
    ours: tuple[Round, ...]
    fio: tuple[FioRound, ...]

    def row(self, *, engine: str, directory: str) -> PointRow:
        """Return the medians; latencies are over all blocks of ours."""
        seconds = sum(one.seconds for one in self.ours)
        rates, fio_rates = ([one.gb_per_s for one in side] for side in (self.ours, self.fio))
        costs, fio_costs = ([one.cpu_s_per_gb for one in side] for side in (self.ours, self.fio))
        fio = sorted(self.fio, key=lambda one: one.gb_per_s)
        return PointRow(
            self.pattern.op,
            self.pattern.block_nbytes,
            self.pattern.depth,
            engine,
            directory,
            *spread(rates),
            latency=Latency.of(np.concatenate([one.latencies_s for one in self.ours])),
            cpu_s_per_gb=statistics.median(costs),
            read_gb_per_s=sum(one.read_nbytes for one in self.ours) / seconds / 1e9,
            write_gb_per_s=sum(one.write_nbytes for one in self.ours) / seconds / 1e9,
            fio_gb_per_s=statistics.median(fio_rates) if fio else None,
            ratio_to_fio=median_ratio(rates, fio_rates) if fio else None,
            fio_cpu_s_per_gb=statistics.median(fio_costs) if fio else None,
            cpu_ratio_to_fio=median_ratio(costs, fio_costs) if fio and all(fio_costs) else None,  # 0: too little
            fio_latency=fio[len(fio) // 2].latency if fio else None,
        )


def measure_pairs(
    scratch: ScratchFile,
    pattern: Pattern,
    *,
    rounds: int,
    fio: Fio | None = None,
    warm_up_s: float = 0.1,
    check: Callable[[], object] = lambda: None,
) -> Pairs:
    """Run ``rounds`` rounds after a warm-up, and as many of ``fio`` between them; blocks.

    The first of a pair alternates. ``check`` is called before each pair and may raise.
    """
    scratch.run(replace(pattern, seconds=warm_up_s))
    if fio is not None:
        fio.calibrate(pattern, scratch.path)
    sides = ["ours", *["fio"] * (fio is not None)]
    ours: list[Round] = []
    theirs: list[FioRound] = []
    for turn in range(rounds):
        check()
        for side in sides[turn % len(sides) :] + sides[: turn % len(sides)]:
            if side == "ours":
                ours.append(scratch.run(pattern))
            elif fio is not None:
                theirs.append(fio.run(pattern, scratch.path))
    return Pairs(pattern, tuple(ours), tuple(theirs))


def _said(value: float | None, width: int, digits: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:>{width}.{digits}f}"

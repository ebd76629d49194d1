"""Ours and fio in alternating pairs: the drive drifts, and both sides of a pair meet it in the same mood."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from tiered.measure.fio import Fio, FioRound
from tiered.measure.pattern import Pattern
from tiered.measure.rounds import Latency, Moved, Round
from tiered.measure.scratch_file import ScratchFile

__all__ = ["Pairs", "measure_pairs"]


@dataclass(frozen=True, slots=True)
class Pairs:
    """The rounds of one pattern; ``fio`` is empty where there is none, else as long as ``ours``."""

    pattern: Pattern
    ours: tuple[Round, ...]
    fio: tuple[FioRound, ...]

    @property
    def gb_per_s(self) -> float:
        """The median of ours."""
        return statistics.median(one.gb_per_s for one in self.ours)

    @property
    def cpu_s_per_gb(self) -> float:
        """The median of ours."""
        return statistics.median(one.cpu_s_per_gb for one in self.ours)

    @property
    def latency(self) -> Latency:
        """Percentiles over all blocks of ours."""
        return Latency.of(np.concatenate([one.latencies_s for one in self.ours]))

    @property
    def fio_gb_per_s(self) -> float | None:
        """The median of fio's."""
        return statistics.median(one.gb_per_s for one in self.fio) if self.fio else None

    @property
    def fio_cpu_s_per_gb(self) -> float | None:
        """The median of fio's."""
        return statistics.median(one.cpu_s_per_gb for one in self.fio) if self.fio else None

    @property
    def ratio_to_fio(self) -> float | None:
        """The median over the pairs of ours / fio."""
        return self._ratio(lambda one: one.gb_per_s)

    @property
    def cpu_ratio_to_fio(self) -> float | None:
        """The median over the pairs of ours / fio in CPU-seconds per GB; None as well where fio's is too little."""
        return self._ratio(lambda one: one.cpu_s_per_gb)

    def _ratio(self, of: Callable[[Moved], float]) -> float | None:
        if not self.fio or not all(of(one) for one in self.fio):
            return None
        return statistics.median(of(ours) / of(fio) for ours, fio in zip(self.ours, self.fio, strict=True))


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

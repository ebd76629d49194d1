"""Ours and fio in alternating pairs: the drive drifts, and both sides of a pair meet it in the same mood.

``python -m tiered.measure.pairs DIR --op read --block 4MiB --depth 8`` prints the pairs of one pattern as JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from tiered.measure.fio import Fio, FioRound
from tiered.measure.pattern import OPS, Pattern
from tiered.measure.rounds import Latency, Moved, Round
from tiered.measure.scratch_file import ScratchFile
from tiered.units import MiB, parse_bytes

__all__ = ["Pairs", "main", "measure_pairs"]


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


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the pairs of one pattern as one JSON object."""
    parser = argparse.ArgumentParser(description="Rounds of one pattern on one directory, ours and fio's in turn.")
    parser.add_argument("directory")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--op", choices=OPS, default="read")
    parser.add_argument("--block", type=parse_bytes, default=4 * MiB)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--file", type=parse_bytes, default=1024 * MiB, help="size of the file that is overwritten")
    parser.add_argument("--no-fio", action="store_true")
    given = parser.parse_args(arguments)
    pattern = Pattern(given.op, given.block, given.depth, given.file, given.seconds)
    with ScratchFile(
        given.directory,
        engine=given.engine,
        memory_nbytes=given.block * given.depth,
        file_nbytes=given.file,
        depth=given.depth,
    ) as scratch:
        scratch.write_file()
        fio = None if given.no_fio else scratch.find_fio()
        pairs = measure_pairs(scratch, pattern, rounds=given.rounds, fio=fio)
    print(
        json.dumps(
            {
                "engine": scratch.engine,
                "op": given.op,
                "block_bytes": given.block,
                "depth": given.depth,
                "gb_per_s": round(pairs.gb_per_s, 3),
                "fio_gb_per_s": pairs.fio_gb_per_s and round(pairs.fio_gb_per_s, 3),
                "ratio_to_fio": pairs.ratio_to_fio and round(pairs.ratio_to_fio, 3),
                "cpu_s_per_gb": round(pairs.cpu_s_per_gb, 4),
                "cpu_ratio_to_fio": pairs.cpu_ratio_to_fio and round(pairs.cpu_ratio_to_fio, 3),
                "latency": asdict(pairs.latency),
                "pairs": [
                    [round(one.gb_per_s, 3) for one in pair] for pair in zip(pairs.ours, pairs.fio or (), strict=False)
                ]
                or [[round(one.gb_per_s, 3)] for one in pairs.ours],
            }
        )
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""The latency of one demand read: alone, and with as many writes in flight as a drive takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from tiered.measure.pattern import DEMAND_OPS, Pattern
from tiered.measure.rounds import Latency, Round
from tiered.measure.scratch_file import ScratchFile
from tiered.units import format_bytes

__all__ = ["DemandLatency", "measure_demand"]


@dataclass(frozen=True, slots=True)
class DemandLatency:
    """Demand reads of one block, in turn alone and beside writes."""

    block_bytes: int
    write_depth: int
    alone: Latency
    beside_writes: Latency
    write_gb_per_s: float  # while demand reads went on

    @property
    def p99_ratio(self) -> float:
        """How many times longer the 99th of a hundred reads takes beside writes."""
        return self.beside_writes.p99_s / self.alone.p99_s

    def __str__(self) -> str:
        return (
            f"a demand read of {format_bytes(self.block_bytes)}: p99 {self.alone.p99_s * 1e3:.2f} ms alone, "
            f"{self.beside_writes.p99_s * 1e3:.2f} ms beside {self.write_depth} writes in flight "
            f"({self.p99_ratio:.1f} times, writes at {self.write_gb_per_s:.2f} GB/s)"
        )


def measure_demand(
    scratch: ScratchFile, pattern: Pattern, *, rounds: int, check: Callable[[], object]
) -> DemandLatency:
    """Run ``rounds`` rounds of each kind in turn, with the block, depth and length of ``pattern``; blocks.

    As many bytes as the pattern moves are written in a round, and no more. ``check`` is called between rounds and may
    raise.
    """
    found: dict[str, list[Round]] = {op: [] for op in DEMAND_OPS}
    for _ in range(rounds):
        for op in DEMAND_OPS:
            check()
            most = pattern.max_nbytes and 2 * pattern.max_nbytes  # of both directions, half each
            one = replace(pattern, op=op, max_nbytes=most)
            found[op].append(scratch.run(one))
    alone, beside = (found[op] for op in DEMAND_OPS)
    return DemandLatency(
        block_bytes=pattern.block_nbytes,
        write_depth=pattern.depth,
        alone=_latency(alone),
        beside_writes=_latency(beside),
        write_gb_per_s=sum(one.write_nbytes for one in beside) / sum(one.seconds for one in beside) / 1e9,
    )


def _latency(rounds: list[Round]) -> Latency:
    return Latency.of(np.concatenate([one.read_latencies_s for one in rounds]))

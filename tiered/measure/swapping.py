"""The rates and the latency of a drive for swapping: the best settings over memory larger than the processor's caches.

Blocks that are moved through the same few MiB of memory again and again, as fio moves them, find those in the caches;
the bytes of tensors do not. These are the rates that a training step can be bound by. A demand read is measured alone,
and with as many writes in flight as the drive takes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from tiered.measure.pattern import DEMAND_OPS, OPS, Pattern
from tiered.measure.rounds import Latency, Round, duplex_of
from tiered.measure.scratch_file import ScratchFile
from tiered.units import format_bytes

__all__ = ["DemandLatency", "SwapRates", "measure_demand", "measure_swapping"]


@dataclass(frozen=True, slots=True)
class SwapRates:
    """Medians over the rounds, 10^9 bytes a second."""

    memory_bytes: int  # that the blocks went through
    read_gb_per_s: float
    write_gb_per_s: float
    duplex: float  # 0: reads and writes share the drive, 1: neither slows the other

    def __str__(self) -> str:
        return (
            f"through {format_bytes(self.memory_bytes)} of memory, as tensors go: read {self.read_gb_per_s:.2f} GB/s, "
            f"write {self.write_gb_per_s:.2f} GB/s, duplex {self.duplex:.2f}"
        )


def measure_swapping(
    scratch: ScratchFile, patterns: Mapping[str, Pattern], *, rounds: int, check: Callable[[], object]
) -> SwapRates:
    """Run ``rounds`` rounds of reads, of writes and of both in turn, each with its one of ``patterns``; blocks.

    ``check`` is called between rounds and may raise.
    """
    found: dict[str, list[Round]] = {op: [] for op in OPS}
    for _ in range(rounds):
        for op in OPS:
            check()
            found[op].append(scratch.run(patterns[op], is_spread=True))
    read, write = (statistics.median(one.gb_per_s for one in found[op]) for op in ("read", "write"))
    seconds = 1e9 * sum(one.seconds for one in found["mixed"])
    both = (sum(one.read_nbytes for one in found["mixed"]), sum(one.write_nbytes for one in found["mixed"]))
    return SwapRates(len(scratch.memory), read, write, duplex_of(both[0] / seconds, both[1] / seconds, read, write))


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
        alone=Latency.of(np.concatenate([one.read_latencies_s for one in alone])),
        beside_writes=Latency.of(np.concatenate([one.read_latencies_s for one in beside])),
        write_gb_per_s=sum(one.write_nbytes for one in beside) / sum(one.seconds for one in beside) / 1e9,
    )

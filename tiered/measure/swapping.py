"""The rates of a drive for swapping: the best settings over memory that is larger than the processor's caches.

Blocks that are moved through the same few MiB of memory again and again, as fio moves them, find those in the caches;
the bytes of tensors do not. These are the rates that a training step can be bound by.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tiered.measure.pattern import OPS, Pattern
from tiered.measure.rounds import Round, duplex_of
from tiered.measure.scratch_file import ScratchFile
from tiered.units import format_bytes

__all__ = ["SwapRates", "measure_swapping"]


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

"""Frozen snapshots of what the long-lived objects have done: counts and bytes, units in the names.

Counters run from the opening of their owner and never go back; the others say how things are at the call.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["StoreStatistics", "SwapStatistics", "WorkingSetStatistics"]


@dataclass(frozen=True, slots=True)
class SwapStatistics:
    """Tensors moved between NVMe and DRAM, complete transfers only; inline ones move no bytes."""

    demand_bytes: int  # swapped in because somebody waited
    num_demands: int
    prefetch_bytes: int  # swapped in ahead of need
    num_prefetches: int
    swap_out_bytes: int
    num_swap_outs: int
    streamed_in_bytes: int  # read through bounce buffers, never resident
    streamed_out_bytes: int  # written through bounce buffers, never resident


@dataclass(frozen=True, slots=True)
class WorkingSetStatistics:
    """What is in DRAM under the budget now, and what it cost so far."""

    budget_bytes: int
    arena_bytes: int  # all that is leased from the arena: tensors, tile scratch, bounce buffers
    peak_bytes: int  # the most of it at one time
    resident_bytes: int  # of keys, in flight included
    evictable_bytes: int  # clean, not leased, not held
    dirty_bytes: int  # only in DRAM, ready to be written
    writing_bytes: int  # on their way out
    orphan_bytes: int  # replaced or deleted under living tensors
    num_evictions: int
    num_leases: int
    demand_wait_s: float  # time callers spent waiting for bytes to be swapped in
    memory_wait_s: float  # time callers spent waiting for room in the budget
    swaps: SwapStatistics


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """One snapshot of a whole store."""

    generation: int  # the last committed one
    num_keys: int
    num_commits: int  # by this process
    used_bytes: int  # on the devices, committed and open
    free_bytes: int  # in the files, without growing them
    quarantined_bytes: int  # lost to this process after failed writes
    file_bytes: int
    read_bytes: int  # by the devices
    write_bytes: int
    num_flushes: int
    working_set: WorkingSetStatistics

    @property
    def peak_bytes(self) -> int:
        """Most DRAM of the budget that was ever in use."""
        return self.working_set.peak_bytes

    @property
    def stall_seconds(self) -> float:
        """Time callers spent waiting for bytes or for room."""
        return self.working_set.demand_wait_s + self.working_set.memory_wait_s

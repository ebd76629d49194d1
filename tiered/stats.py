"""Frozen snapshots of the counters of long-lived objects: counts and bytes, units in the names.

Counters run from the opening of their owner and never go back; the others say how things are at the call.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "ComputeDeviceStatistics",
    "MovedStatistics",
    "RecorderStatistics",
    "StoreStatistics",
    "SwapStatistics",
    "WaitStatistics",
    "WorkStatistics",
    "WorkingSetStatistics",
]


@dataclass(frozen=True, slots=True)
class WaitStatistics:
    """Time that threads spent waiting for one thing."""

    who: str  # "caller" for every thread that is not one of tiered's own
    reason: str  # "demand read", "update", "write-back" or "commit"
    seconds: float


@dataclass(frozen=True, slots=True)
class WorkStatistics:
    """Time that threads spent on one thing: "forward", "backward", "update" (a unit), "update bucket", "commit" ..."""

    who: str
    word: str
    num: int
    seconds: float


@dataclass(frozen=True, slots=True)
class MovedStatistics:
    """Bytes of one class of keys that were swapped in and out, as the devices count them."""

    name: str  # "parameters", "optimizer state", "gradients", ...; "other" for keys of no class
    read_bytes: int
    write_bytes: int


@dataclass(frozen=True, slots=True)
class ComputeDeviceStatistics:
    """The compute device of a model, as far as it has memory of its own."""

    name: str  # such as "cuda:0"
    budget_bytes: int
    allocated_bytes: int  # of tiered's buffers, those that are kept for later included
    peak_bytes: int  # the most of it at one time
    copied_in_bytes: int
    copied_out_bytes: int


@dataclass(frozen=True, slots=True)
class RecorderStatistics:
    """The times that threads waited and worked, and the bytes moved."""

    waits: tuple[WaitStatistics, ...]
    work: tuple[WorkStatistics, ...]
    moved: tuple[MovedStatistics, ...]
    device_busy_seconds: float  # time with at least one tensor on its way to or from the devices
    device: ComputeDeviceStatistics | None = None  # None: the model computes on the CPU, or there is none

    def waits_of(self, who: str) -> dict[str, float]:
        """Return how long the threads or the stream ``who`` waited, in seconds by reason."""
        return {wait.reason: wait.seconds for wait in self.waits if wait.who == who}

    def seconds_of(self, word: str) -> float:
        """Return how long all threads and streams together did ``word``."""
        return sum(work.seconds for work in self.work if work.word == word)


@dataclass(frozen=True, slots=True)
class SwapStatistics:
    """Tensors moved between NVMe and DRAM, complete transfers only; inline ones move no bytes."""

    demand_bytes: int  # swapped in for a waiting caller
    num_demands: int
    prefetch_bytes: int  # swapped in ahead of need
    num_prefetches: int
    swap_out_bytes: int
    num_swap_outs: int
    streamed_in_bytes: int  # read through bounce buffers, never resident
    streamed_out_bytes: int  # written through bounce buffers, never resident


@dataclass(frozen=True, slots=True)
class WorkingSetStatistics:
    """The bytes in DRAM under the budget now, and the counters of moving them."""

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
    catalog_write_bytes: int  # beside those of the devices; 0 where the system does not tell
    lifetime_write_bytes: int | None  # both, since the ledgers of the directories began; None where there are none
    num_flushes: int
    working_set: WorkingSetStatistics
    recorder: RecorderStatistics

    @property
    def peak_bytes(self) -> int:
        """Most DRAM of the budget that was ever in use."""
        return self.working_set.peak_bytes

    @property
    def stall_seconds(self) -> float:
        """Time callers spent waiting: for bytes, for room, for an update or a commit."""
        return sum(wait.seconds for wait in self.recorder.waits if wait.who == "caller")

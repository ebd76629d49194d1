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
    """Time that threads spent on one thing: "forward", "update" (a unit), "commit" ...: docs/tuning.md has all."""

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
    reserved_bytes: int  # that torch's allocator has of the device, the caller's tensors and what is free among it
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
    read_bytes: int  # by the devices, external files included
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

    def summary(self, prefix: str = "tiered/") -> dict[str, float]:
        """Return the figures in one flat dict of numbers, for wandb, tensorboard and other loggers.

        The last word of a name is its unit: ``_bytes``, ``_s`` (seconds); names that begin with ``num_``, and
        ``generation``, count. Most figures are totals since the store was opened, so that the difference of two calls
        is what happened between them; those of the second group say how things are now.

        - totals: num_commits, num_flushes, num_evictions, num_leases, num_demands, num_prefetches; by the devices
          read_bytes, write_bytes, and of both parameters_read_bytes, optimizer_state_write_bytes and so on for each
          class of keys; catalog_write_bytes; swapped demand_bytes, prefetch_bytes, swap_out_bytes, and through bounce
          buffers streamed_in_bytes, streamed_out_bytes; device_busy_s with something on its way; stall_s that callers
          waited, and by reason wait_demand_read_s, wait_commit_s, ...; work_forward_s, work_backward_s, work_update_s
          and so on; docs/tuning.md says what each of them is
        - now: generation, num_keys; DRAM: dram_budget_bytes, dram_bytes in use, dram_peak_bytes, resident_bytes of
          keys, dirty_bytes not written yet; files: file_bytes, used_bytes, free_bytes, quarantined_bytes after failed
          writes; lifetime_write_bytes of the directories, left out where no ledger tells
        - with a compute device that has memory of its own: device_budget_bytes, device_bytes, device_peak_bytes,
          device_reserved_bytes of torch's allocator, and the totals copied_in_bytes, copied_out_bytes
        """
        working_set, swaps, recorder = self.working_set, self.working_set.swaps, self.recorder
        found: dict[str, float] = {
            "num_commits": self.num_commits, "num_flushes": self.num_flushes, "read_bytes": self.read_bytes,
            "write_bytes": self.write_bytes, "catalog_write_bytes": self.catalog_write_bytes,
            "num_evictions": working_set.num_evictions, "num_leases": working_set.num_leases,
            "num_demands": swaps.num_demands, "num_prefetches": swaps.num_prefetches,
            "demand_bytes": swaps.demand_bytes, "prefetch_bytes": swaps.prefetch_bytes,
            "swap_out_bytes": swaps.swap_out_bytes, "streamed_in_bytes": swaps.streamed_in_bytes,
            "streamed_out_bytes": swaps.streamed_out_bytes, "device_busy_s": recorder.device_busy_seconds,
            "stall_s": self.stall_seconds, "generation": self.generation, "num_keys": self.num_keys,
            "dram_budget_bytes": working_set.budget_bytes, "dram_bytes": working_set.arena_bytes,
            "dram_peak_bytes": working_set.peak_bytes, "resident_bytes": working_set.resident_bytes,
            "dirty_bytes": working_set.dirty_bytes, "file_bytes": self.file_bytes, "used_bytes": self.used_bytes,
            "free_bytes": self.free_bytes, "quarantined_bytes": self.quarantined_bytes,
        }  # fmt: skip
        if self.lifetime_write_bytes is not None:
            found["lifetime_write_bytes"] = self.lifetime_write_bytes
        for moved in recorder.moved:
            found |= {f"{moved.name}_read_bytes": moved.read_bytes, f"{moved.name}_write_bytes": moved.write_bytes}
        for reason, seconds in recorder.waits_of("caller").items():
            found[f"wait_{reason}_s"] = seconds
        for word in dict.fromkeys(work.word for work in recorder.work):
            found[f"work_{word}_s"] = recorder.seconds_of(word)
        if (device := recorder.device) is not None:
            found |= {
                "device_budget_bytes": device.budget_bytes, "device_bytes": device.allocated_bytes,
                "device_peak_bytes": device.peak_bytes, "device_reserved_bytes": device.reserved_bytes,
                "copied_in_bytes": device.copied_in_bytes, "copied_out_bytes": device.copied_out_bytes,
            }  # fmt: skip
        return {f"{prefix}{name.replace(' ', '_').replace('-', '_')}": value for name, value in found.items()}

"""The bound of a step, and the one line that names the resource which limited a run.

Arithmetic over measured seconds, bytes and bandwidths; the profiles of drives and links, and the arithmetic that a
device is capable of, are read or measured here too.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tiered.bytes.device.profile import load_link_profile, load_profile
from tiered.tools.doctor.description import by_drive

__all__ = ["Bandwidth", "Bound", "matrix_flop_per_s", "profiled_bandwidth", "profiled_link"]

_HIDDEN = 0.05  # of the step: less waiting than that is hidden I/O


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """The bandwidth of all drives together, or of copies to a compute device, which are reads here, and from it."""

    read_bytes_per_s: float
    write_bytes_per_s: float
    duplex: float = 0.0  # 0: reads and writes share the drive, 1: neither slows the other
    source: str = "seen in this run"

    def seconds(self, read_bytes: float, write_bytes: float) -> float:
        """Return the least time to move the bytes: max(R/B_r, W/B_w) + (1 - d) * min(R/B_r, W/B_w)."""
        read_s, write_s = read_bytes / self.read_bytes_per_s, write_bytes / self.write_bytes_per_s
        return max(read_s, write_s) + (1 - self.duplex) * min(read_s, write_s)


def profiled_bandwidth(directories: Sequence[Path]) -> Bandwidth | None:
    """Return the bandwidth of ``directories`` together, by ``tiered bench``; None unless all have a profile. Blocks.

    Directories of one drive share its bandwidth: the first has it. Where no duplex factor was measured it is 0.
    """
    profiles = {}
    for directory in directories:
        profile = load_profile(directory)
        if profile is None:
            return None
        profiles[str(next(path for path in (directory, *directory.parents) if path.exists()))] = profile
    found = [profiles[which[0]] for which in by_drive(profiles).values()]
    return Bandwidth(
        sum(profile.read_bytes_per_s for profile in found),
        sum(profile.write_bytes_per_s for profile in found),
        min(profile.duplex or 0.0 for profile in found),
        "measured by tiered bench",
    )


def profiled_link(directories: Sequence[Path], device_type: str) -> Bandwidth | None:
    """Return the bandwidth of copies to a compute device of ``device_type`` and back, by ``tiered bench --device``.

    All directories are of one machine, so the first of them that has a profile of such a device tells. Blocks.
    """
    for directory in directories:
        profile = load_link_profile(directory)
        if profile is not None and profile.device == device_type:
            return Bandwidth(
                profile.in_bytes_per_s, profile.out_bytes_per_s, profile.duplex, "measured by tiered bench --device"
            )
    return None


def matrix_flop_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """Return the operations a second of a product of square matrices on ``device``; blocks for about 50 ms.

    It is the peak that training can be compared with: a card's data sheet is of another clock, and often of sparse
    matrices.
    """
    size, seconds = 128, 0.0
    while seconds < 5e-3 and size < 8192:  # long enough beside the launch of an operation
        size *= 2
        left, right = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
        out, times = torch.mm(left, right), []
        for _ in range(5):
            torch.accelerator.synchronize(device)
            begun_s = time.perf_counter()
            torch.mm(left, right, out=out)
            torch.accelerator.synchronize(device)
            times.append(time.perf_counter() - begun_s)
        seconds = min(times)
    return 2.0 * size**3 / seconds


class Bound:
    """One step's parts, in seconds: its own time, and the least that each resource needs for it."""

    def __init__(
        self,
        step_s: float,
        *,
        waits: Mapping[str, float],
        update_s: float,
        read_bytes: float,
        write_bytes: float,
        device_busy_s: float,
        bandwidth: Bandwidth | None,
        copy_s: float = 0.0,
        updates_on_device: bool = False,
    ) -> None:
        """``waits`` are the training thread's, by reason; ``update_s`` of the update's own thread or stream.

        Without ``bandwidth`` the devices' busy time counts: bytes / it was seen. With one, the smaller of both counts:
        work that was done in a time can be done in it. So no part exceeds the step.
        """
        self.step_s, self.waits, self.updates_on_device = step_s, waits, updates_on_device
        nvme_s, self.is_read = device_busy_s, read_bytes > write_bytes
        if bandwidth is not None:
            seconds = bandwidth.seconds(read_bytes, write_bytes)
            nvme_s = min(nvme_s, seconds) if device_busy_s else seconds
            self.is_read = read_bytes / bandwidth.read_bytes_per_s > write_bytes / bandwidth.write_bytes_per_s
        self.compute_s = max(0.0, step_s - sum(waits.values()))
        self.update_s, self.nvme_s, self.copy_s = (min(seconds, step_s) for seconds in (update_s, nvme_s, copy_s))

    @property
    def seconds(self) -> float:
        """max(compute, NVMe, copies, update)."""
        return max(self.compute_s, self.nvme_s, self.copy_s, self.update_s)

    @property
    def step_over_bound(self) -> float:
        """How many times longer than the bound the step took; 1 for a step that took no time."""
        return self.step_s / self.seconds if self.seconds else 1.0

    @property
    def stall(self) -> float:
        """The share of the step that the training thread waited."""
        return min(1.0, sum(self.waits.values()) / self.step_s) if self.step_s else 0.0

    @property
    def verdict(self) -> str:
        """The resource that limited the step, in one line."""
        if not self.step_s or not self.seconds:
            return "nothing was measured"
        if self.nvme_s >= max(self.compute_s, self.update_s, self.copy_s):
            second = max(self.compute_s, self.update_s, self.copy_s, self.nvme_s / 2)  # twice the bandwidth
            return (
                f"disk-{'read' if self.is_read else 'write'} bound: {self.nvme_s / self.step_s:.0%} of the step; "
                f"a second drive would save {1 - second / self.seconds:.0%}"
            )
        if self.copy_s > max(self.compute_s, self.update_s):
            return (
                f"PCIe bound: copies take {self.copy_s / self.step_s:.0%} of the step; "
                "a larger batch or --device-memory would help"
            )
        if self.update_s > self.compute_s:
            remedy = "a larger batch would hide it" if self.updates_on_device else "more CPU cores would help"
            return f"update bound: {self.update_s / self.step_s:.0%} of the step; {remedy}"
        if self.stall <= _HIDDEN:
            return f"compute bound: I/O is hidden (stall {self.stall:.0%})"
        reason = max(self.waits, key=lambda reason: self.waits[reason])
        return f"compute bound, and {self.stall:.0%} of the step waits, most of it for {_WHAT[reason]}"


_WHAT = {
    "demand read": "demand reads",
    "update": "updates",
    "write-back": "write-back: a larger DRAM budget would help",
    "commit": "commits",
    "copy in": "copies to the device: a larger --device-memory would help",
}

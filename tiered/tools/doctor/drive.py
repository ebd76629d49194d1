"""The drive under a directory, as /sys knows it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from tiered.bytes import kernel_file
from tiered.bytes.device.mount import Mount, find_mount
from tiered.bytes.kernel_file import said

__all__ = ["BlockDevice", "by_drive", "find_block_device"]


@dataclass(frozen=True, slots=True)
class BlockDevice:
    """A whole disk, or one that dm, md or loop make of others. None: not readable."""

    name: str  # nvme0n1, vda, dm-0, ...
    model: str | None
    nbytes: int | None
    is_rotational: bool | None
    scheduler: str | None
    write_cache: str | None  # "write back": only a flush makes durable
    nr_requests: int | None
    max_sectors_kb: int | None
    logical_block_nbytes: int | None
    physical_block_nbytes: int | None
    optimal_io_nbytes: int | None
    numa_node: int | None
    temperature_c: float | None
    parts: tuple[BlockDevice, ...]  # the members of a RAID, the disk under an encrypted one

    @property
    def disks(self) -> tuple[str, ...]:
        """The names of the physical disks at the bottom."""
        return tuple(dict.fromkeys(name for part in self.parts for name in part.disks)) or (self.name,)

    def line(self) -> str:
        """Return the one line that people read."""
        rotational = {True: "rotational", False: "not rotational", None: "rotational or not: not readable"}
        parts = f", made of {', '.join(self.disks)}" if self.parts else ""
        temperature = "not readable" if self.temperature_c is None else f"{self.temperature_c:.0f} C"
        return (
            f"{self.name}: model {said(self.model)}, {rotational[self.is_rotational]}, "
            f"scheduler {said(self.scheduler)}, nr_requests {said(self.nr_requests)}, "
            f"max_sectors_kb {said(self.max_sectors_kb)}, blocks of {said(self.logical_block_nbytes)} logical and "
            f"{said(self.physical_block_nbytes)} physical bytes, write cache {said(self.write_cache)}, "
            f"NUMA node {said(self.numa_node)}, temperature {temperature}{parts}"
        )


def find_block_device(mount: Mount, sys: Path = Path("/sys")) -> BlockDevice | None:
    """Return the block device that ``mount`` lies on; None for file systems that have none, or do not say."""
    for major, minor in _numbers(mount):
        try:
            place = (sys / "dev" / "block" / f"{major}:{minor}").resolve(strict=True)
        except OSError:
            continue
        return _describe(place, depth=0)
    return None


def by_drive(directories: Iterable[str]) -> dict[str, list[str]]:
    """Return the directories of each drive, by the names of its disks; of "" those whose drive is not known.

    Directories that share a disk are of one drive: its bandwidth is theirs together.
    """
    found: dict[tuple[str, ...], list[str]] = {}
    for directory in directories:
        disks = _disks(directory)
        shared = [others for others in found if others == disks or set(others) & set(disks)]
        members = [member for others in shared for member in found.pop(others)]
        found[tuple(dict.fromkeys(chain(*shared, disks)))] = [*members, directory]
    return {", ".join(disks): members for disks, members in found.items()}


def _disks(directory: str) -> tuple[str, ...]:
    """Return the disks under ``directory``; the file system where it has none, nothing where that is not known."""
    mount = find_mount(directory)
    if mount is None:
        return ()
    drive = find_block_device(mount)
    return drive.disks if drive else (f"{mount.file_system} {mount.source} ({mount.device[0]}:{mount.device[1]})",)


def _numbers(mount: Mount) -> Iterator[tuple[int, int]]:
    yield mount.device
    try:  # btrfs and others show an anonymous number; their source is the device file
        status = os.stat(mount.source)
    except (OSError, ValueError):
        return
    if stat.S_ISBLK(status.st_mode):
        yield os.major(status.st_rdev), os.minor(status.st_rdev)


def _describe(place: Path, depth: int) -> BlockDevice:
    disk = place.parent if (place / "partition").exists() else place
    queue = disk / "queue"
    sectors = kernel_file.number(disk / "size")
    rotational = kernel_file.number(queue / "rotational")
    return BlockDevice(
        name=disk.name,
        model=_model(disk),
        nbytes=None if sectors is None else sectors * 512,
        is_rotational=None if rotational is None else bool(rotational),
        scheduler=kernel_file.choice(queue / "scheduler"),
        write_cache=kernel_file.text(queue / "write_cache"),
        nr_requests=kernel_file.number(queue / "nr_requests"),
        max_sectors_kb=kernel_file.number(queue / "max_sectors_kb"),
        logical_block_nbytes=kernel_file.number(queue / "logical_block_size"),
        physical_block_nbytes=kernel_file.number(queue / "physical_block_size"),
        optimal_io_nbytes=kernel_file.number(queue / "optimal_io_size"),
        numa_node=_numa_node(disk),
        temperature_c=_temperature(disk),
        parts=_parts(disk, depth),
    )


def _parts(disk: Path, depth: int) -> tuple[BlockDevice, ...]:
    try:
        slaves = sorted((disk / "slaves").iterdir()) if depth < 8 else []
        return tuple(_describe(slave.resolve(strict=True), depth + 1) for slave in slaves)
    except OSError:
        return ()


def _model(disk: Path) -> str | None:
    backing = kernel_file.text(disk / "loop" / "backing_file")
    if backing:
        return f"loop over {backing}"
    candidates = ("device/model", "device/device/model", "dm/name", "md/level")
    return next((found for name in candidates if (found := kernel_file.text(disk / name))), None)


def _temperature(disk: Path) -> float | None:
    """Return the drive's own sensor in degrees Celsius; NVMe has one, SATA with the module drivetemp."""
    patterns = ("hwmon*/temp1_input", "hwmon/hwmon*/temp1_input", "device/hwmon/hwmon*/temp1_input")
    try:
        files = [file for pattern in patterns for file in sorted((disk / "device").glob(pattern))]
    except OSError:
        return None
    return next((milli / 1000 for file in files if (milli := kernel_file.number(file)) is not None), None)


def _numa_node(disk: Path) -> int | None:
    """Return the node of the controller; the kernel says -1 where there is none."""
    numbers = (kernel_file.number(disk / name) for name in ("device/numa_node", "device/device/numa_node"))
    return next((found for found in numbers if found is not None and found >= 0), None)

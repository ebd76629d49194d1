"""The description of a machine, its directories and the drives under them. It judges nothing and never fails."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import stat
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import psutil
import torch

import tiered
from tiered.bytes import kernel_file
from tiered.bytes.device.direct_io import probe_direct
from tiered.bytes.device.mount import Mount, find_mount
from tiered.bytes.free_memory import memory_limit
from tiered.bytes.kernel_file import said
from tiered.bytes.private_file import opened
from tiered.units import format_bytes

__all__ = [
    "BlockDevice", "DirectoryDescription", "MachineDescription", "by_drive", "directory_description",
    "find_block_device", "machine_description",
]  # fmt: skip

Limit = int | str | None
"""Bytes or a count; "unlimited"; None where it is not readable."""


@dataclass(frozen=True, slots=True)
class BlockDevice:
    """A whole disk, or one that dm, md or loop make of others. None: not readable."""

    name: str  # nvme0n1, vda, dm-0, ...
    model: str | None
    is_rotational: bool | None
    scheduler: str | None
    write_cache: str | None  # "write back": only a flush makes durable
    nr_requests: int | None
    max_sectors_kb: int | None
    logical_block_nbytes: int | None
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
            f"max_sectors_kb {said(self.max_sectors_kb)}, blocks of {said(self.logical_block_nbytes)} bytes, "
            f"write cache {said(self.write_cache)}, temperature {temperature}{parts}"
        )


@dataclass(frozen=True, slots=True)
class DirectoryDescription:
    """One directory and the drive under it. None: not readable."""

    path: str  # absolute, links resolved
    mount: Mount | None
    kind: str | None  # local, memory, overlay, network or fuse
    block_device: BlockDevice | None
    free_nbytes: int | None  # for us, without the bytes kept for root
    total_nbytes: int | None
    direct_alignment: int | None  # bytes; None where there is no direct I/O
    direct_refusal: str | None  # why not

    def lines(self) -> list[str]:
        """Return the description for people."""
        mount = self.mount
        where = "its mount is not readable"
        if mount:
            where = f"{mount.file_system} ({self.kind}) on {mount.mount_point}, {mount.source}, {mount.options}"
        free = f"{_bytes(self.free_nbytes)} of {_bytes(self.total_nbytes)} free"
        direct = (
            f"direct I/O aligned to {self.direct_alignment:,} bytes"
            if self.direct_alignment
            else f"no direct I/O: {self.direct_refusal}"
        )
        drive = self.block_device.line() if self.block_device else "no block device is known"
        return [f"{self.path}: {where}", f"  {free}, {direct}", f"  {drive}"]


@dataclass(frozen=True, slots=True)
class MachineDescription:
    """One machine, this process's limits on it, and the directories asked for. None: not readable."""

    kernel: str
    architecture: str
    cpu_model: str | None
    num_cores: int  # that this process may use
    ram_nbytes: int
    available_nbytes: int
    memory_limit_nbytes: Limit  # of the control group
    transparent_huge_pages: str | None  # always, madvise or never
    memlock_nbytes: Limit  # soft limit
    num_open_files: Limit  # soft limit
    tiered_version: str
    torch_version: str
    cuda_version: str | None  # that torch was built for; None: built without
    python_version: str
    directories: tuple[DirectoryDescription, ...]

    def lines(self) -> list[str]:
        """Return the description for people."""
        cuda = f"CUDA {self.cuda_version}" if self.cuda_version else "without CUDA"
        return [
            f"machine   Linux {self.kernel} {self.architecture}, {self.cpu_model or 'CPU not readable'}, "
            f"{self.num_cores} cores",
            f"memory    {_bytes(self.ram_nbytes)}, {_bytes(self.available_nbytes)} available, "
            f"control group limit {_bytes(self.memory_limit_nbytes)}, "
            f"transparent huge pages {said(self.transparent_huge_pages)}",
            f"limits    memlock {_bytes(self.memlock_nbytes)}, open files {self.num_open_files}",
            f"versions  tiered {self.tiered_version}, torch {self.torch_version} ({cuda}), "
            f"Python {self.python_version}",
            *(line for directory in self.directories for line in directory.lines()),
        ]


def machine_description(directories: Sequence[str | os.PathLike[str]] = ()) -> MachineDescription:
    """Return the description of this machine and of ``directories``.

    Writes and reads one block of an unnamed file in each directory, to see whether direct I/O works. Never raises,
    whatever it finds; blocks as long as the drives do.
    """
    memory = psutil.virtual_memory()
    found = re.search(r"^model name\s*:\s*(.+)$", kernel_file.text(Path("/proc/cpuinfo")) or "", re.MULTILINE)
    return MachineDescription(
        kernel=platform.release(),
        architecture=platform.machine(),
        cpu_model=found[1] if found else None,
        num_cores=len(os.sched_getaffinity(0)),
        ram_nbytes=memory.total,
        available_nbytes=memory.available,
        memory_limit_nbytes=memory_limit(),
        transparent_huge_pages=kernel_file.choice(Path("/sys/kernel/mm/transparent_hugepage/enabled")),
        memlock_nbytes=_limit(resource.RLIMIT_MEMLOCK),
        num_open_files=_limit(resource.RLIMIT_NOFILE),
        tiered_version=tiered.__version__,
        torch_version=str(torch.__version__),
        cuda_version=torch.version.cuda,
        python_version=sys.version.split()[0],
        directories=tuple(directory_description(directory) for directory in directories),
    )


def directory_description(directory: str | os.PathLike[str]) -> DirectoryDescription:
    """Return the description of ``directory``; as ``machine_description`` does it."""
    try:
        path = os.path.realpath(directory)
    except ValueError:  # a null character; no other call below takes it either
        path = os.fspath(directory)
    mount, (alignment, refusal) = find_mount(path), _try_direct(path)
    try:
        space = shutil.disk_usage(path)
    except (OSError, ValueError):
        space = None
    return DirectoryDescription(
        path=path,
        mount=mount,
        kind=mount.kind if mount else None,
        block_device=find_block_device(mount) if mount else None,
        free_nbytes=space and space.free,
        total_nbytes=space and space.total,
        direct_alignment=alignment,
        direct_refusal=refusal,
    )


def _try_direct(path: str) -> tuple[int | None, str | None]:
    """Return the alignment of direct I/O in ``path``, or why there is none."""
    try:
        with opened(path, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
            probe = probe_direct(
                descriptor, lambda fd, m, at: os.preadv(fd, [m], at), lambda fd, m, at: os.pwritev(fd, [m], at)
            )
    except (OSError, ValueError) as error:
        return None, f"could not be tried: {getattr(error, 'strerror', error)}"
    return (probe.alignment, None) if probe.refusal is None else (None, probe.refusal)


def _limit(which: int) -> Limit:
    soft, _ = resource.getrlimit(which)
    return "unlimited" if soft == resource.RLIM_INFINITY else soft


def _bytes(nbytes: Limit) -> str:
    return format_bytes(nbytes) if isinstance(nbytes, int) else said(nbytes)


# -- drives ----------------------------------------------------------------------------------------------------------


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
    rotational = kernel_file.number(queue / "rotational")
    return BlockDevice(
        name=disk.name,
        model=_model(disk),
        is_rotational=None if rotational is None else bool(rotational),
        scheduler=kernel_file.choice(queue / "scheduler"),
        write_cache=kernel_file.text(queue / "write_cache"),
        nr_requests=kernel_file.number(queue / "nr_requests"),
        max_sectors_kb=kernel_file.number(queue / "max_sectors_kb"),
        logical_block_nbytes=kernel_file.number(queue / "logical_block_size"),
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

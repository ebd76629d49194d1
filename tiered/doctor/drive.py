"""The mount and the drive under a directory, as /proc and /sys know them."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tiered.doctor import kernel_file
from tiered.doctor.kernel_file import said

__all__ = ["BlockDevice", "Kind", "Mount", "find_block_device", "find_mount", "mounts"]

Kind = Literal["local", "memory", "overlay", "network", "fuse"]

_MEMORY = {"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"}
_OVERLAY = {"overlay", "overlayfs", "aufs", "unionfs", "fuse.fuse-overlayfs"}
_NETWORK = {
    "9p", "afs", "beegfs", "ceph", "cifs", "drvfs", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "orangefs", "smb3",
    "smbfs", "virtiofs", "vboxsf", "wekafs",
    "fuse.blobfuse2", "fuse.ceph", "fuse.gcsfuse", "fuse.glusterfs", "fuse.goofys", "fuse.juicefs", "fuse.mount-s3",
    "fuse.rclone", "fuse.s3fs", "fuse.sshfs",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of /proc/self/mountinfo."""

    mount_point: str
    root: str  # the part of the file system that is mounted there
    file_system: str  # ext4, xfs, tmpfs, ...
    source: str  # /dev/nvme0n1p1, server:/export, ...
    options: str  # of the mount, then of the file system
    device: tuple[int, int]  # major, minor; an anonymous one (0, n) is no block device

    @property
    def kind(self) -> Kind:
        """The kind of place that keeps the bytes, by the name of the file system."""
        if self.file_system in _MEMORY:
            return "memory"
        if self.file_system in _OVERLAY:
            return "overlay"
        if self.file_system in _NETWORK:
            return "network"
        return "fuse" if self.file_system.startswith("fuse") else "local"


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


def find_mount(directory: str | os.PathLike[str], proc: Path = Path("/proc/self")) -> Mount | None:
    """Return the mount that ``directory`` lies on; None where that cannot be found out."""
    try:
        fd = os.open(directory, os.O_PATH | os.O_CLOEXEC)
    except (OSError, ValueError):
        return None
    try:
        information = kernel_file.text(Path("/proc/self/fdinfo") / str(fd)) or ""
    finally:
        os.close(fd)
    found = re.search(r"^mnt_id:\s*(\d+)", information, re.MULTILINE)
    return mounts(proc).get(int(found[1])) if found else None


def mounts(proc: Path = Path("/proc/self")) -> dict[int, Mount]:
    """Return all mounts of this process by their number; lines that cannot be understood are left out."""
    found = {}
    for line in (kernel_file.text(proc / "mountinfo") or "").splitlines():
        try:
            fields, _, rest = line.partition(" - ")
            number, _, device, root, mount_point, options = fields.split(" ")[:6]
            file_system, source, super_options = rest.split(" ")[:3]
            major, _, minor = device.partition(":")
            all_options = dict.fromkeys([*options.split(","), *super_options.split(",")])
            found[int(number)] = Mount(
                _plain(mount_point), _plain(root), file_system, _plain(source), ",".join(all_options),
                (int(major), int(minor)),
            )  # fmt: skip
        except ValueError:
            continue
    return found


def _plain(escaped: str) -> str:
    r"""Return the path in which the kernel writes a space as \040."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), escaped)


def find_block_device(mount: Mount, sys: Path = Path("/sys")) -> BlockDevice | None:
    """Return the block device that ``mount`` lies on; None for file systems that have none, or do not say."""
    for major, minor in _numbers(mount):
        try:
            place = (sys / "dev" / "block" / f"{major}:{minor}").resolve(strict=True)
        except OSError:
            continue
        return _describe(place, depth=0)
    return None


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

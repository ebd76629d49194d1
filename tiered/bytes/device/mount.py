"""Which mount a directory lies on: file system, options, and whether that is a drive at all."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tiered.bytes import kernel_file
from tiered.bytes.private_file import opened

__all__ = ["RAM_COST", "RAM_MEND", "Kind", "Mount", "find_mount", "mounts"]

RAM_COST = "tensors that leave the DRAM budget stay in DRAM: nothing is gained, and a power cut takes the store"
RAM_MEND = "use a directory on a drive"
"""The cost of a directory of the kind "memory", and the way on."""

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

    def __str__(self) -> str:
        keeps = " keeps files in RAM" if self.kind == "memory" else ""
        return f"{self.file_system} on {self.mount_point} ({self.source}){keeps}"


def find_mount(directory: str | os.PathLike[str], proc: Path = Path("/proc/self")) -> Mount | None:
    """Return the mount that ``directory`` lies on; None where that cannot be found out."""
    try:
        with opened(directory, os.O_PATH) as fd:
            information = kernel_file.text(Path("/proc/self/fdinfo") / str(fd)) or ""
    except (OSError, ValueError):
        return None
    found = re.search(r"^mnt_id:\s*(\d+)", information, re.MULTILINE)
    return mounts(proc).get(int(found[1])) if found else None


def mounts(proc: Path = Path("/proc/self")) -> dict[int, Mount]:
    """Return all mounts of this process by their number; lines that cannot be understood are left out."""
    found = {}
    for line in kernel_file.lines(proc / "mountinfo"):
        try:
            fields, _, rest = line.partition(" - ")
            number, _, device, root, mount_point, options = fields.split(" ")[:6]
            file_system, source, super_options = rest.split(" ")[:3]
            major, _, minor = device.partition(":")
            found[int(number)] = Mount(
                mount_point=_plain(mount_point),
                root=_plain(root),
                file_system=file_system,
                source=_plain(source),
                options=",".join(dict.fromkeys(f"{options},{super_options}".split(","))),
                device=(int(major), int(minor)),
            )
        except ValueError:
            continue
    return found


def _plain(escaped: str) -> str:
    r"""Return the path in which the kernel writes a space as \040."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), escaped)

"""The description of a machine, which says where a measurement was taken. It judges nothing and never fails."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import tiered
from tiered.bytes import kernel_file
from tiered.bytes.device.direct import DirectProbe, probe_direct
from tiered.bytes.device.mount import Mount, find_mount
from tiered.bytes.free_memory import memory_limit
from tiered.bytes.kernel_file import said
from tiered.tools.doctor.drive import BlockDevice, find_block_device
from tiered.units import KiB, format_bytes

__all__ = ["DirectoryDescription", "MachineDescription", "directory_description", "machine_description"]

Limit = int | str | None
"""Bytes or a count; "unlimited"; None where it is not readable."""

_THP = Path("/sys/kernel/mm/transparent_hugepage")


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
    num_numa_nodes: int | None
    ram_nbytes: int | None
    available_nbytes: int | None
    memory_limit_nbytes: Limit  # of the control group
    transparent_huge_pages: str | None  # always, madvise or never
    transparent_huge_pages_defrag: str | None
    num_hugetlb_pages: int | None
    hugetlb_page_nbytes: int | None
    memlock_nbytes: Limit  # soft limit
    memlock_hard_nbytes: Limit
    num_open_files: Limit
    num_open_files_hard: Limit
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
            f"{self.num_cores} cores, NUMA nodes: {said(self.num_numa_nodes)}",
            f"memory    {_bytes(self.ram_nbytes)}, {_bytes(self.available_nbytes)} available, "
            f"control group limit {_bytes(self.memory_limit_nbytes)}",
            f"pages     transparent huge pages {said(self.transparent_huge_pages)} "
            f"(defrag {said(self.transparent_huge_pages_defrag)}), hugetlb: {said(self.num_hugetlb_pages)} "
            f"of {_bytes(self.hugetlb_page_nbytes)}",
            f"limits    memlock {_bytes(self.memlock_nbytes)} (hard {_bytes(self.memlock_hard_nbytes)}), "
            f"open files {self.num_open_files} (hard {self.num_open_files_hard})",
            f"versions  tiered {self.tiered_version}, torch {self.torch_version} ({cuda}), "
            f"Python {self.python_version}",
            *(line for directory in self.directories for line in directory.lines()),
        ]

    def as_json(self) -> dict[str, object]:
        """Return the description for programs, for ``json.dumps``; null where something is not readable."""
        return asdict(self)


def machine_description(directories: Sequence[str | os.PathLike[str]] = ()) -> MachineDescription:
    """Return the description of this machine and of ``directories``.

    Writes and reads one block of an unnamed file in each directory, to see whether direct I/O works. Never raises,
    whatever it finds; blocks as long as the drives do.
    """
    memory = _memory_information(Path("/proc/meminfo"))
    huge_pages = memory.get("HugePages_Total")
    memlock, files = _limits(resource.RLIMIT_MEMLOCK), _limits(resource.RLIMIT_NOFILE)
    return MachineDescription(
        kernel=platform.release(),
        architecture=platform.machine(),
        cpu_model=_cpu_model(Path("/proc/cpuinfo")),
        num_cores=len(os.sched_getaffinity(0)),
        num_numa_nodes=len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or None,
        ram_nbytes=memory.get("MemTotal"),
        available_nbytes=memory.get("MemAvailable"),
        memory_limit_nbytes=memory_limit(),
        transparent_huge_pages=kernel_file.choice(_THP / "enabled"),
        transparent_huge_pages_defrag=kernel_file.choice(_THP / "defrag"),
        num_hugetlb_pages=huge_pages,
        hugetlb_page_nbytes=memory.get("Hugepagesize"),
        memlock_nbytes=memlock[0],
        memlock_hard_nbytes=memlock[1],
        num_open_files=files[0],
        num_open_files_hard=files[1],
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
    mount = find_mount(path)
    probe, reason = _probe(path)
    try:
        space = shutil.disk_usage(path)
    except (OSError, ValueError):
        space = None
    return DirectoryDescription(
        path=path,
        mount=mount,
        kind=mount.kind if mount else None,
        block_device=find_block_device(mount) if mount else None,
        free_nbytes=space.free if space else None,
        total_nbytes=space.total if space else None,
        direct_alignment=probe.alignment if probe and probe.refusal is None else None,
        direct_refusal=probe.refusal if probe else reason,
    )


def _probe(path: str) -> tuple[DirectProbe | None, str | None]:
    """Return the result of trying direct I/O in ``path``, or why it could not be tried."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return probe_direct(
                descriptor, lambda fd, m, at: os.preadv(fd, [m], at), lambda fd, m, at: os.pwritev(fd, [m], at)
            ), None
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        return None, f"could not be tried: {getattr(error, 'strerror', error)}"


def _memory_information(path: Path) -> dict[str, int]:
    """Return the numbers of /proc/meminfo, in bytes where they are bytes."""
    found = re.findall(r"^(\w+):\s+(\d+)( kB)?$", kernel_file.text(path) or "", re.MULTILINE)
    return {name: int(count) * (KiB if unit else 1) for name, count, unit in found}


def _cpu_model(path: Path) -> str | None:
    """Return the model; an ARM core has numbers in its place."""
    content = kernel_file.text(path) or ""
    found = re.search(r"^model name\s*:\s*(.+)$", content, re.MULTILINE)
    if found:
        return found[1].strip()
    numbers = re.findall(r"^CPU (implementer|part)\s*:\s*(\S+)$", content, re.MULTILINE)[:2]
    return ", ".join(f"{name} {value}" for name, value in numbers) or None


def _limits(which: int) -> tuple[Limit, Limit]:
    soft, hard = resource.getrlimit(which)
    infinite = resource.RLIM_INFINITY
    return ("unlimited" if soft == infinite else soft), ("unlimited" if hard == infinite else hard)


def _bytes(nbytes: Limit) -> str:
    return format_bytes(nbytes) if isinstance(nbytes, int) else said(nbytes)

"""The checks of this machine and of a directory, a function each, and what a finding is.

A check blocks as long as the drive or the kernel does, and may raise any exception. It makes unnamed files only.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import enum
import errno
import functools
import importlib.metadata
import os
import platform
import re
import resource
import shlex
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed

from tiered.bytes import kernel_file
from tiered.bytes.arena import Arena
from tiered.bytes.device.direct_io import open_unnamed
from tiered.bytes.device.engines import choose_engine
from tiered.bytes.device.mount import RAM_COST, RAM_MEND, find_mount
from tiered.bytes.device.profile import find_profile
from tiered.bytes.device.ring import Ring
from tiered.bytes.pinned_arena import NoRegistrar, PinnedArena, registrar_for
from tiered.bytes.private_file import opened
from tiered.errors import DeviceError
from tiered.tools.doctor.description import by_drive, directory_description, find_block_device
from tiered.units import KiB, MiB, format_bytes, format_count
from tiered.zero.formats.compact_codes import COMPACT_COST, INSTALL_COMPACT
from tiered.zero.formats.compact_kernels import compile_nothing

__all__ = [
    "MACHINE", "Checks", "Finding", "Outcome", "broken", "check_drives", "check_nodes", "directory_checks",
    "machine_checks", "ok", "slower",
]  # fmt: skip

MACHINE = "machine"
"""The subject of findings that concern no directory."""

_IO_URING_SETTING = Path("/proc/sys/kernel/io_uring_disabled")
_THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_NVIDIA = Path("/proc/driver/nvidia/version")
_STATUS = Path("/proc/self/status")
_TRIAL_NBYTES, _PINNED_TRIAL_NBYTES = 64 * MiB, 4 * MiB
_NUM_ENTRIES = 256  # as many as the engine asks for
_NUM_RINGS = 4  # of a store in as many directories; from about Linux 6.14 on each counts as locked memory
_FEWEST_FILES = 128
_RAISE_MEMLOCK = (
    "ulimit -l unlimited; where that is refused, as root: '* - memlock unlimited' in /etc/security/limits.conf, "
    "LimitMEMLOCK=infinity in a service, --ulimit memlock=-1 for a container"
)
_RAISE_OPEN_FILES = (
    "ulimit -n 65536; where that is refused, as root: '* hard nofile 65536' in /etc/security/limits.conf, "
    "LimitNOFILE=65536 in a service"
)
_GROUP_DEADLINE_S = 5.0
_PARAM_NBYTES = 31  # the most space that training takes per parameter; see tiered/tools/train/plan.py
_LEAST_FREE_NBYTES = 64 * MiB  # below it no store of any use grows
_BLOCK_NBYTES = 4 * KiB
_NUM_FLUSHES = 5
# Flash takes longer than the first to keep a block, so a volatile cache that answers sooner was not written out; a good
# drive does not take as long as the second.
_FAST_FLUSH_S, _SLOW_FLUSH_S = 100e-6, 50e-3


class Outcome(enum.StrEnum):
    """How well it works, the worst first."""

    BROKEN = "broken"  # wrong, unsafe or impossible as it is
    SLOWER = "slower"  # works, and costs time
    OK = "ok"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report, and one object of its JSON; the caller of a check fills in its subject and name."""

    subject: str  # MACHINE or the directory
    check: str
    outcome: Outcome
    found: str  # the attempt and its result
    cost: str = ""  # of the lack; "" where nothing is lacking
    mend: str = ""  # the command, or the next step


Checks = tuple[str, dict[str, Callable[[], Finding]]]
"""A subject, and the checks of it by name in their order; where the first is broken, the others make no sense."""


def ok(found: str, *, mend: str = "") -> Finding:
    """Return the finding that nothing is lacking; ``mend`` is a step that may still be worth it."""
    return Finding("", "", Outcome.OK, found, mend=mend)


def slower(found: str, *, cost: str, mend: str) -> Finding:
    """Return the finding that something is lacking and ``tiered`` does without."""
    return Finding("", "", Outcome.SLOWER, found, cost, mend)


def broken(found: str, *, cost: str, mend: str) -> Finding:
    """Return the finding that something does not work."""
    return Finding("", "", Outcome.BROKEN, found, cost, mend)


# -- a directory ---------------------------------------------------------------------------------------------------


def directory_checks(directory: str) -> Checks:
    """Return the checks of ``directory``, in an order: where it cannot be written to, the others make no sense."""
    named: dict[str, Callable[[str], Finding]] = {
        "writing": check_writing,
        "file system": check_file_system,
        "free space": check_free_space,
        "direct I/O": check_direct,
        "engine": check_engine,
        "flush": check_flush,
        "profile": check_profile,
    }
    return directory, {name: functools.partial(run, directory) for name, run in named.items()}


def check_writing(directory: str) -> Finding:
    """Make an unnamed file and write one block to it."""
    try:
        with _unnamed(directory) as fd:
            os.pwrite(fd, bytes(_BLOCK_NBYTES), 0)
            os.fdatasync(fd)
    except OSError as error:
        quoted, mount = shlex.quote(directory), find_mount(directory)
        mend = {
            errno.ENOENT: f"mkdir -p -m 700 {quoted}",
            errno.ENOTDIR: "name a directory",
            errno.EACCES: f"as root: chown {os.geteuid()} {quoted}",
            errno.EPERM: f"as root: chown {os.geteuid()} {quoted}",
            errno.EROFS: f"as root: mount -o remount,rw {mount.mount_point if mount else directory}; dmesg says why it "
            "is read-only",
            errno.ENOSPC: "remove files there, or use another directory",
            errno.EDQUOT: "raise the quota, or remove files",
            errno.EMFILE: _RAISE_OPEN_FILES,
        }.get(error.errno or 0, "see the kernel log (dmesg) for this drive")
        found = f"a block could not be written: {error.strerror or error}"
        return broken(found, cost="no store can be kept here", mend=mend)
    return ok("a block was written to an unnamed file and flushed")


@contextmanager
def _unnamed(directory: str) -> Iterator[int]:
    """Open an unnamed file in ``directory``; it goes with the block."""
    with opened(directory, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
        fd = open_unnamed(descriptor, 0)
    try:
        yield fd
    finally:
        os.close(fd)


def check_file_system(directory: str) -> Finding:
    """Look up the kind of place that keeps the bytes, by the name of the file system."""
    mount = find_mount(directory)
    if mount is None:
        return ok("not readable from /proc/self/mountinfo")
    if mount.kind == "memory":
        return broken(str(mount), cost=RAM_COST, mend=RAM_MEND)
    if mount.kind == "network":
        cost = "commits are not supported: a server may lose what was flushed, and locks may not hold"
        return broken(f"{mount} is on another machine", cost=cost, mend="use a directory on a drive of this machine")
    if mount.kind == "overlay":
        cost = "not measured here; files of a container's layer are copied when first written, and go with it"
        mend = "put a directory of the host there: docker run -v /nvme/run:/run/store"
        return slower(f"{mount} is a container's layer", cost=cost, mend=mend)
    if mount.kind == "fuse":
        cost = "not measured here; every operation passes through one more process"
        return slower(f"{mount} is served by a program", cost=cost, mend="use a directory on a drive")
    return ok(str(mount))


def check_free_space(directory: str) -> Finding:
    """Count the bytes that are free for us, and the parameters that they hold."""
    free_nbytes = shutil.disk_usage(directory).free
    params = format_count(free_nbytes // _PARAM_NBYTES)
    found = f"{format_bytes(free_nbytes)}: trains at least {params} parameters at up to {_PARAM_NBYTES} bytes each"
    if free_nbytes < _LEAST_FREE_NBYTES:
        return broken(found, cost="a store cannot grow", mend="remove files there, or use another directory")
    return ok(found)


def check_direct(directory: str) -> Finding:
    """Write and read one aligned block with O_DIRECT."""
    described = directory_description(directory)
    if described.direct_refusal is None:
        return ok(f"a block was written and read past the page cache, aligned to {described.direct_alignment:,}")
    cost = "buffered reads run at 0.6 instead of 3.5 GB/s, and take page cache"
    return slower(described.direct_refusal, cost=cost, mend="use a directory on ext4 or XFS")


def check_engine(directory: str) -> Finding:
    """Ask which engine a store would take here."""
    profile, _ = find_profile(directory)
    engine, reason = choose_engine(directory, profile)
    if engine == "uring" or (profile is not None and profile.engine == engine):
        return ok(f"{engine}: {reason}")
    cost = "beside a busy Python thread 7 instead of 96 % of the drive"
    return slower(f"{engine}: {reason}", cost=cost, mend="mend io_uring; see there")


def check_flush(directory: str) -> Finding:
    """Time fdatasync of an overwritten block, the wait of each commit, several times."""
    mount, took = find_mount(directory), list[float]()
    with _unnamed(directory) as fd:
        os.pwrite(fd, os.urandom(_BLOCK_NBYTES), 0)
        os.fsync(fd)  # order: from here on, only data is flushed
        for _ in range(_NUM_FLUSHES):
            os.pwrite(fd, os.urandom(_BLOCK_NBYTES), 0)
            start = time.perf_counter()
            os.fdatasync(fd)
            took.append(time.perf_counter() - start)
    median_s = statistics.median(took)
    found = f"fdatasync of {format_bytes(_BLOCK_NBYTES)} takes {1e3 * median_s:.3g} ms"
    if mount is not None and mount.kind == "memory":
        return ok(f"{found}: there is no drive to wait for")
    drive = find_block_device(mount) if mount else None
    cache = drive.write_cache if drive else None
    if median_s < _FAST_FLUSH_S and cache == "write back":
        found += ": suspiciously fast for a drive that says it has a volatile cache"
        mend = "none from here; unless it is safe against power cuts, so are commits not: ask who runs the virtual disk"
        return ok(found, mend=mend)
    if median_s > _SLOW_FLUSH_S:
        cost = "each commit waits for several of them"
        return slower(found, cost=cost, mend="look for other work on the drive: iostat -x 1")
    return ok(f"{found} (write cache: {cache or 'not readable'})")


def check_profile(directory: str) -> Finding:
    """Look for the measurement of ``tiered bench``, which another kernel makes an old one."""
    mend = f"tiered bench {shlex.quote(directory)}"
    profile, complaints = find_profile(directory)
    if complaints:
        cost = "a store opens with settings that were not measured here"
        return slower("; ".join(complaints), cost=cost, mend=f"remove it, then: {mend}")
    if profile is None:
        return ok("the drive was not measured yet", mend=mend)
    found = (
        f"measured {profile.measured_at.partition('T')[0]} on Linux {profile.kernel}: "
        f"reads {profile.read_bytes_per_s / 1e9:.2f} GB/s, writes {profile.write_bytes_per_s / 1e9:.2f} GB/s with "
        f"{profile.engine}, blocks of {format_bytes(profile.block_nbytes)}"
    )
    return ok(found, mend="" if profile.kernel == platform.release() else mend)


def check_drives(directories: Sequence[str]) -> Finding:
    """Look whether the directories lie on different drives."""
    drives = by_drive(directories)
    shared = [f"{', '.join(which)} lie on one drive, {drive}" for drive, which in drives.items() if drive and which[1:]]
    if not shared:
        known = [drive for drive in drives if drive]
        return ok(f"{len(directories)} directories on {len(known)} drives: {', '.join(known) or 'not known'}")
    cost = "striping over them gains nothing: they share its bandwidth"
    return slower("; ".join(shared), cost=cost, mend="give one directory of each drive")


def check_nodes(directories: Sequence[str], sys: Path = Path("/sys"), status: Path = _STATUS) -> Finding:
    """Look on which NUMA nodes the drives and the compute device are, and whether this process's memory may be there.

    The arena takes pages of the node of the thread that touches them first. ``sys`` and ``status`` are the kernel's.
    """
    online = nodes_in((sys / "devices" / "system" / "node" / "online").read_text())
    if len(online) < 2:
        return ok("the machine has one NUMA node")
    disks = {disk for drive in by_drive(directories) for disk in drive.split(", ") if disk}
    places = {disk: sys / "class" / "block" / disk for disk in sorted(disks)}
    if torch.cuda.is_available():
        each: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
        bus = f"{each.pci_domain_id:04x}:{each.pci_bus_id:02x}:{each.pci_device_id:02x}.0"
        places[each.name] = sys / "bus" / "pci" / "devices" / bus
    nodes = {name: node for name, place in places.items() if (node := _node_of(place)) is not None}
    (text,) = re.findall(r"Mems_allowed_list:\s*(\S+)", status.read_text())
    allowed = sorted(set(nodes_in(text)) & set(online))
    there = "; ".join(f"{name} on node {node}" for name, node in nodes.items()) or "where the drives are is not known"
    found = f"{len(online)} NUMA nodes: {there}; this process's memory on node{'s' * (len(allowed) > 1)}"
    found = f"{found} {', '.join(map(str, allowed))}"
    if len(set(nodes.values())) > 1:
        cost = "bytes between a drive, DRAM and the device cross from node to node"
        return slower(found, cost=cost, mend="for each rank a drive and a device of one node: {local_rank} in its path")
    if nodes and allowed != [*set(nodes.values())]:
        (node,) = set(nodes.values())
        cost = "pages of the arena may lie on another node than the drives"
        mend = f"numactl --cpunodebind={node} --membind={node} COMMAND; under torchrun --numa-binding=node"
        return slower(found, cost=cost, mend=mend)
    return ok(found)


def nodes_in(text: str) -> list[int]:
    """Return the numbers of a list of the kernel's, such as "0-1,4"."""
    bounds = [each.split("-") for each in text.strip().split(",") if each]
    return [number for each in bounds for number in range(int(each[0]), int(each[-1]) + 1)]


def _node_of(place: Path) -> int | None:
    """Return the NUMA node of the device at ``place`` in sysfs, or of the one that it hangs on; None for no node."""
    try:
        device = place.resolve(strict=True)
    except OSError:
        return None
    for each in (device, *device.parents):
        if (file := each / "numa_node").is_file() and (node := int(file.read_text())) >= 0:
            return node
    return None


# -- the machine ---------------------------------------------------------------------------------------------------


def machine_checks() -> list[Checks]:
    """Return the checks of the machine in groups: a check that hangs holds up its group alone."""
    return [
        (
            MACHINE,
            {
                "io_uring": check_io_uring,
                "huge pages": check_huge_pages,
                "open files": check_open_files,
            },
        ),
        (MACHINE, {"compute device": check_compute_device, "pinned memory": check_pinned_memory}),
        (MACHINE, {"process groups": check_process_groups}),
        (MACHINE, {"compact kernels": check_compact_kernels}),
    ]


def check_io_uring() -> Finding:
    """Set up as many rings as several directories need; they may count as locked memory."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = f"the limit on locked memory is {'unlimited' if soft == resource.RLIM_INFINITY else format_bytes(soft)}"
    cost = "engine threads instead: as fast while Python is idle, 7 instead of 96 % of the drive beside a busy thread"
    with contextlib.ExitStack() as rings:
        for number in range(_NUM_RINGS):
            try:
                ring = rings.enter_context(closing(Ring(_NUM_ENTRIES)))
            except DeviceError as error:
                return slower(str(error), cost=cost, mend="run a newer kernel on x86-64 or aarch64")
            except OSError as error:
                reason, mend = _refusal(error.errno)
                found = f"the kernel refused ring {number + 1} of {_NUM_RINGS}: {error.strerror}; {reason}; {limit}"
                if error.errno == errno.ENOMEM:
                    cost = "a directory whose ring does not fit gets a smaller one, then threads"
                return slower(found, cost=cost, mend=mend)
    return ok(f"{_NUM_RINGS} rings were set up on Linux {platform.release()}, mode {ring.mode}; {limit}")


def _refusal(number: int | None) -> tuple[str, str]:
    """Return why io_uring_setup failed with errno ``number``, and how to mend it."""
    has_filter = re.search(r"^Seccomp:\s*2$", kernel_file.text(_STATUS) or "", re.MULTILINE)
    setting = kernel_file.number(_IO_URING_SETTING)
    if number == errno.EPERM and setting:
        return f"{_IO_URING_SETTING} says {setting}", "as root: sysctl kernel.io_uring_disabled=0"
    if has_filter and number in {errno.EPERM, errno.EACCES, errno.ENOSYS}:
        return (
            "a seccomp filter is in force, as containers have it",
            "start the container with --security-opt seccomp=unconfined, or a profile that allows io_uring_setup, "
            "io_uring_enter and io_uring_register",
        )
    if number == errno.ENOSYS:
        return f"Linux {platform.release()} has none", "run Linux 5.11 or newer, built with CONFIG_IO_URING"
    if number == errno.ENOMEM:
        return "its memory is over the limit on locked memory", _RAISE_MEMLOCK
    if number == errno.EMFILE:
        return "too many files are open", _RAISE_OPEN_FILES
    return "no reason is known for that", "look whether a security module (SELinux, AppArmor) forbids it"


def check_huge_pages() -> Finding:
    """Touch memory of an arena and look at the pages that the kernel gave it."""
    arena = Arena(_TRIAL_NBYTES)
    buffer = arena.allocate_nowait(_TRIAL_NBYTES)
    assert buffer is not None  # the arena is new and as large
    try:
        before = _huge_nbytes()
        ctypes.memset(buffer.address, 1, buffer.nbytes)
        huge_nbytes = max(0, _huge_nbytes() - before)
    finally:
        arena.release(buffer)
        arena.close()
    found = f"{format_bytes(huge_nbytes)} of {format_bytes(_TRIAL_NBYTES)} of an arena lie on huge pages"
    if huge_nbytes >= 0.9 * _TRIAL_NBYTES:
        return ok(found)
    setting = kernel_file.choice(_THP)
    if setting in (None, "never"):
        found += f"; {_THP} {'says never' if setting else 'is missing'}"
        mend = f"as root: echo madvise > {_THP}" if setting else "run a kernel with CONFIG_TRANSPARENT_HUGEPAGE"
    else:
        found += "; memory is short or fragmented, or prctl switched them off for this process"
        mend = "as root: echo 1 > /proc/sys/vm/compact_memory"
    cost = "4 MiB blocks, 8 in flight: reads 1.1 instead of 3.5 GB/s, writes 2.9 instead of 6.5"
    return slower(found, cost=cost, mend=mend)


def _huge_nbytes() -> int:
    """Return the bytes of this process on huge pages."""
    found = re.search(
        r"^AnonHugePages:\s+(\d+) kB", kernel_file.text(Path("/proc/self/smaps_rollup")) or "", re.MULTILINE
    )
    return int(found[1]) * KiB if found else 0


def check_open_files() -> Finding:
    """Compare the limit on open files with the number of open ones."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_open = psutil.Process().num_fds()
    found = f"the limit is {'unlimited' if soft == resource.RLIM_INFINITY else f'{soft:,}'}, {num_open} are open"
    if soft == resource.RLIM_INFINITY or soft - num_open >= _FEWEST_FILES:
        return ok(found)
    cost = "a store has a few open in each directory, training its data and sockets: it stops with EMFILE"
    return broken(found, cost=cost, mend=_RAISE_OPEN_FILES)


def check_compact_kernels() -> Finding:
    """Compile a kernel; an optimizer tries in full whether the real ones give torch's bits."""
    try:
        compile_nothing()
    except ModuleNotFoundError:
        return slower("numba is not there to compile them", cost=COMPACT_COST, mend=INSTALL_COMPACT)
    except Exception as error:  # numba's, llvmlite's, the loader's
        reason = (str(error).strip() or repr(error)).partition("\n")[0][:200]
        mend = "pip install --upgrade numba"
        return slower(f"numba does not compile them: {reason}", cost=COMPACT_COST, mend=mend)
    return ok(f"numba {importlib.metadata.version('numba')} compiles them")


def check_compute_device() -> Finding:
    """Add two numbers on the first CUDA device; each further one would take another second to set up."""
    if torch.cuda.is_available():
        total = float(torch.ones(2, dtype=torch.float32, device="cuda").sum())  # a float waits for the device
        assert total == 2, total
        gpus = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
        devices = ", ".join(f"{each.name} with {format_bytes(each.total_memory)}" for each in gpus)
        found = f"CUDA {torch.version.cuda}: {devices}"
        if any(getattr(each, "is_integrated", False) for each in gpus):
            cost = "bytes that are copied there are in memory twice, and dram= and device_memory= come out of one"
            mend = "give both budgets together less than what is free"
            return slower(f"{found}, which computes in the machine's own memory", cost=cost, mend=mend)
        return ok(found)
    if not _NVIDIA.exists():
        return ok("not there: training runs on the CPU")
    built, cost = f"torch {torch.__version__} is built", "training runs on the CPU"
    if torch.version.cuda is None:
        mend = "install a build for CUDA: https://pytorch.org/get-started/locally"
        return slower(f"an NVIDIA GPU is there, and {built} without CUDA", cost=cost, mend=mend)
    mend = "see nvidia-smi: is the driver older than that CUDA, or the GPU hidden (CUDA_VISIBLE_DEVICES)?"
    found = f"an NVIDIA GPU is there, and CUDA {torch.version.cuda}, for which {built}, does not start"
    return broken(found, cost=cost, mend=mend)


def check_pinned_memory() -> Finding:
    """Page-lock a small arena for the accelerator, as the store does with its DRAM budget."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return ok("not there: no accelerator, and nothing else needs it")
    device_type = accelerator.type
    with closing(PinnedArena(_PINNED_TRIAL_NBYTES, registrar_for(device_type) or NoRegistrar(device_type))) as arena:
        arena.lock_pages(accelerator)
        reason = arena.why_pageable
    if reason is None:
        return ok(f"{format_bytes(_PINNED_TRIAL_NBYTES)} of an arena were page-locked for {device_type}")
    cost = "copies in and out are slower and do not overlap with computing"
    mend = "raise the limit on locked memory (ulimit -l unlimited), or in a container: --ulimit memlock=-1"
    return broken(f"an arena is not page-locked for {device_type}: {reason}", cost=cost, mend=mend)


def check_process_groups() -> Finding:
    """Make a process group of one rank over gloo and reduce over it."""
    cost = "no training on several ranks; one rank needs none"
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        return broken("this torch is built without gloo", cost=cost, mend="pip install --force-reinstall torch")
    try:
        torch.distributed.init_process_group(
            "gloo",
            store=torch.distributed.HashStore(),  # type: ignore[attr-defined]  # where there is gloo
            rank=0,
            world_size=1,
            timeout=datetime.timedelta(seconds=_GROUP_DEADLINE_S),
        )
        torch.distributed.all_reduce(torch.ones(4, dtype=torch.float32, device="cpu"))
        torch.distributed.destroy_process_group()
    except RuntimeError as error:  # torch.distributed raises it, as DistError and its kin
        mend = "name a network interface that works: export GLOO_SOCKET_IFNAME=lo"
        return broken(f"gloo failed: {str(error).partition(chr(10))[0][:200]}", cost=cost, mend=mend)
    nccl = "is there too" if torch.distributed.is_nccl_available() else "is not there (ranks on GPUs would want it)"
    return ok(f"one rank was reduced over gloo; NCCL {nccl}")

"""Checks of this machine and this process, for any directory; a function each."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import errno
import importlib.metadata
import os
import platform
import re
import resource
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed

from tiered.bytes import kernel_file
from tiered.bytes.arena import Arena
from tiered.bytes.device.ring import Ring
from tiered.bytes.pinned_arena import PinnedArena
from tiered.bytes.registrar import NoRegistrar, registrar_for
from tiered.errors import DeviceError
from tiered.tools.doctor.finding import MACHINE, Check, Finding, broken, ok, slower
from tiered.units import KiB, MiB, format_bytes
from tiered.zero.formats.compact_kernels import compile_nothing
from tiered.zero.formats.kernel_trial import COMPACT_COST, INSTALL_COMPACT

__all__ = ["machine_checks"]

_IO_URING_SETTING = Path("/proc/sys/kernel/io_uring_disabled")
_THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_NVIDIA = Path("/proc/driver/nvidia/version")
_TRIAL_NBYTES, _PINNED_TRIAL_NBYTES = 64 * MiB, 4 * MiB
_NUM_ENTRIES, _FEWEST_ENTRIES = 256, 16  # as many as the engine asks for, and contents itself with
_NUM_RINGS = 4  # of a store in as many directories; from about Linux 6.14 on each counts as locked memory
_FEWEST_FILES = 128
_RAISE_MEMLOCK = (
    "ulimit -l unlimited; where that is refused, as root: '* - memlock unlimited' in /etc/security/limits.conf, "
    "LimitMEMLOCK=infinity in a service, --ulimit memlock=-1 for a container"
)
_SQLITE = (3, 33)  # the first with sqlite_schema
_GROUP_DEADLINE_S = 5.0


def machine_checks() -> list[list[Check]]:
    """Return the checks of the machine in groups: a check that hangs holds up its group alone."""
    groups = (
        {
            "io_uring": check_io_uring,
            "huge pages": check_huge_pages,
            "locked memory": check_memlock,
            "open files": check_open_files,
            "SQLite": check_sqlite,
        },
        {
            "compute device": check_compute_device,
            "driver": check_driver,
            "pinned memory": check_pinned_memory,
            "unified memory": check_unified_memory,
        },
        {"process groups": check_process_groups},
        {"compact kernels": check_compact_kernels},
    )
    return [
        [Check(MACHINE, name, run, is_essential=name == "compute device") for name, run in group.items()]
        for group in groups
    ]


def check_io_uring() -> Finding:
    """Set up a ring as the engine does: a small one where the limit on locked memory does not allow a large one."""
    name = "io_uring"
    cost = "engine threads instead: as fast while Python is idle, 7 instead of 96 % of the drive beside a busy thread"
    try:
        mode = _mode_of_ring(_NUM_ENTRIES) or _mode_of_ring(_FEWEST_ENTRIES)
    except DeviceError as error:
        return slower(MACHINE, name, str(error), cost=cost, mend="run a newer kernel on x86-64 or aarch64")
    except OSError as error:
        reason, mend = _refusal(error.errno)
        return slower(MACHINE, name, f"the kernel refused a ring: {error.strerror}; {reason}", cost=cost, mend=mend)
    if mode is None:
        reason, mend = _refusal(errno.ENOMEM)
        return slower(MACHINE, name, f"the kernel refused a ring: {reason}", cost=cost, mend=mend)
    return ok(MACHINE, name, f"a ring was set up on Linux {platform.release()}, mode {mode}")


def _mode_of_ring(num_entries: int) -> str | None:
    """Return the mode of a ring of ``num_entries``; None where there is too little memory for it. Raises OSError."""
    try:
        with closing(Ring(num_entries)) as ring:
            return ring.mode
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        return None


def _refusal(number: int | None) -> tuple[str, str]:
    """Return why io_uring_setup failed with errno ``number``, and how to mend it."""
    has_filter = re.search(r"^Seccomp:\s*2$", kernel_file.text(Path("/proc/self/status")) or "", re.MULTILINE)
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
        return "too many files are open", "raise the limit: ulimit -n 65536"
    return "no reason is known for that", "look whether a security module (SELinux, AppArmor) forbids it"


def check_huge_pages() -> Finding:
    """Touch memory of an arena and look at the pages that the kernel gave it."""
    name = "huge pages"
    arena = Arena(_TRIAL_NBYTES)
    buffer = arena.allocate_nowait(_TRIAL_NBYTES)
    assert buffer is not None  # the arena is new and as large
    try:
        ctypes.memset(buffer.address, 1, buffer.nbytes)
        huge_nbytes = _huge_nbytes(buffer.address, kernel_file.text(Path("/proc/self/smaps"), 64 * MiB) or "")
    finally:
        arena.release(buffer)
        arena.close()
    found = f"{format_bytes(huge_nbytes)} of {format_bytes(_TRIAL_NBYTES)} of an arena lie on huge pages"
    if huge_nbytes >= 0.9 * _TRIAL_NBYTES:
        return ok(MACHINE, name, found)
    setting = kernel_file.choice(_THP)
    if setting in (None, "never"):
        found += f"; {_THP} {'says never' if setting else 'is missing'}"
        mend = f"as root: echo madvise > {_THP}" if setting else "run a kernel with CONFIG_TRANSPARENT_HUGEPAGE"
    elif "THP_enabled:\t0" in (kernel_file.text(Path("/proc/self/status")) or ""):
        found += "; they are switched off for this process (prctl PR_SET_THP_DISABLE)"
        mend = "start it from a program that does not do that"
    else:
        found += "; memory is short or fragmented"
        mend = "as root: echo 1 > /proc/sys/vm/compact_memory"
    cost = "4 MiB blocks, 8 in flight: reads 1.1 instead of 3.5 GB/s, writes 2.9 instead of 6.5"
    return slower(MACHINE, name, found, cost=cost, mend=mend)


def _huge_nbytes(address: int, smaps: str) -> int:
    """Return the bytes on huge pages in the mapping of ``address``."""
    is_ours = False
    for line in smaps.splitlines():
        start = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if start:
            is_ours = int(start[1], 16) <= address < int(start[2], 16)
        elif is_ours and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) * KiB
    return 0


def check_memlock() -> Finding:
    """Set up as many rings as several directories need: they may count as locked memory."""
    name = "locked memory"
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    found = f"the limit is {'unlimited' if soft == resource.RLIM_INFINITY else format_bytes(soft)}"
    with contextlib.ExitStack() as rings:
        made: list[Ring] = []
        try:
            while len(made) < _NUM_RINGS:
                made.append(rings.enter_context(closing(Ring(_NUM_ENTRIES))))
        except (OSError, DeviceError) as error:
            if getattr(error, "errno", None) != errno.ENOMEM:
                return ok(MACHINE, name, f"{found}; without io_uring nothing asks for it")
    if len(made) == _NUM_RINGS:
        return ok(MACHINE, name, found)
    return slower(
        MACHINE,
        name,
        f"{found}; {len(made)} of {_NUM_RINGS} rings could be set up at once",
        cost="a directory whose ring does not fit gets a smaller one, then threads; see io_uring",
        mend=_RAISE_MEMLOCK,
    )


def check_open_files() -> Finding:
    """Compare the limit on open files with the number of open ones."""
    name = "open files"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_open = psutil.Process().num_fds()
    limit = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft:,}"
    found = f"the limit is {limit}, {num_open} are open"
    if soft == resource.RLIM_INFINITY or soft - num_open >= _FEWEST_FILES:
        return ok(MACHINE, name, found)
    wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    mend = f"ulimit -n {wanted}"
    if wanted - num_open < _FEWEST_FILES:
        mend = "as root: add 'LimitNOFILE=65536' to the service, or '* hard nofile 65536' to /etc/security/limits.conf"
    cost = "a store has a few open in each directory, training its data and sockets: it stops with EMFILE"
    return broken(MACHINE, name, found, cost=cost, mend=mend)


def check_sqlite() -> Finding:
    """Try the SQLite that Python was built with as the catalog uses it."""
    name, version = "SQLite", sqlite3.sqlite_version
    if sqlite3.sqlite_version_info < _SQLITE:
        needed = ".".join(map(str, _SQLITE))
        mend = f"use a Python that has SQLite {needed} or newer"
        return broken(MACHINE, name, f"{version} is older than {needed}", cost="no store can be opened", mend=mend)
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.execute("SELECT name FROM sqlite_schema").fetchall()
    return ok(MACHINE, name, f"version {version}")


def check_compact_kernels() -> Finding:
    """Compile a kernel; an optimizer tries in full whether the real ones give torch's bits."""
    name = "compact kernels"
    try:
        compile_nothing()
    except ModuleNotFoundError:
        return slower(MACHINE, name, "numba is not there to compile them", cost=COMPACT_COST, mend=INSTALL_COMPACT)
    except Exception as error:  # numba's, llvmlite's, the loader's
        reason = (str(error).strip() or repr(error)).partition("\n")[0][:200]
        found = f"numba does not compile them: {reason}"
        return slower(MACHINE, name, found, cost=COMPACT_COST, mend="pip install --upgrade numba")
    return ok(MACHINE, name, f"numba {importlib.metadata.version('numba')} compiles them")


def check_compute_device() -> Finding:
    """Add two numbers on the first CUDA device; each further one would take another second to set up."""
    name = "compute device"
    if torch.cuda.is_available():
        total = float(torch.ones(2, dtype=torch.float32, device="cuda").sum())  # a float waits for the device
        assert total == 2, total
        devices = ", ".join(f"{each.name} with {format_bytes(each.total_memory)}" for each in _gpus())
        return ok(MACHINE, name, f"CUDA {torch.version.cuda}: {devices}")
    if not _NVIDIA.exists():
        return ok(MACHINE, name, "not there: training runs on the CPU")
    built, cost = f"torch {torch.__version__} is built", "training runs on the CPU"
    if torch.version.cuda is None:
        mend = "install a build for CUDA: https://pytorch.org/get-started/locally"
        return slower(MACHINE, name, f"an NVIDIA GPU is there, and {built} without CUDA", cost=cost, mend=mend)
    mend = "see nvidia-smi: is the driver older than that CUDA, or the GPU hidden (CUDA_VISIBLE_DEVICES)?"
    found = f"an NVIDIA GPU is there, and CUDA {torch.version.cuda}, for which {built}, does not start"
    return broken(MACHINE, name, found, cost=cost, mend=mend)


def _gpus() -> list[Any]:
    return [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]


def check_driver() -> Finding:
    """Read the version of NVIDIA's driver, the one driver that says it in a file."""
    name = "driver"
    if not _NVIDIA.exists():
        return ok(MACHINE, name, "not there: no NVIDIA GPU")
    text = " ".join(_NVIDIA.read_text(errors="replace").partition("\n")[0].split())
    version = re.search(r"\b\d+\.\d+(\.\d+)?\b", text)
    return ok(MACHINE, name, f"NVIDIA {version[0]}" if version else f"NVIDIA, of an unknown version: {text[:80]!r}")


def check_unified_memory() -> Finding:
    """Look whether a GPU computes in the machine's own memory: then bytes that are copied there are in it twice."""
    name = "unified memory"
    if not torch.cuda.is_available():
        return ok(MACHINE, name, "not there: no CUDA device")
    integrated = [each.name for each in _gpus() if getattr(each, "is_integrated", False)]
    if not integrated:
        return ok(MACHINE, name, "not there: each GPU has memory of its own")
    found = f"{', '.join(integrated)} computes in the machine's own memory"
    cost = "what is copied to the GPU is in that memory twice, and dram= and device_memory= come out of one"
    mend = "give both budgets together less than what is free"
    return slower(MACHINE, name, found, cost=cost, mend=mend)


def check_pinned_memory() -> Finding:
    """Page-lock a small arena for the accelerator, as the store does with its DRAM budget."""
    name = "pinned memory"
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return ok(MACHINE, name, "not there: no accelerator, and nothing else needs it")
    device_type = accelerator.type
    with closing(PinnedArena(_PINNED_TRIAL_NBYTES, registrar_for(device_type) or NoRegistrar(device_type))) as arena:
        arena.lock_pages(accelerator)
        reason = arena.why_pageable
    if reason is None:
        return ok(MACHINE, name, f"{format_bytes(_PINNED_TRIAL_NBYTES)} of an arena were page-locked for {device_type}")
    cost = "copies in and out are slower and do not overlap with computing"
    mend = "raise the limit on locked memory (ulimit -l unlimited), or in a container: --ulimit memlock=-1"
    return broken(MACHINE, name, f"an arena is not page-locked for {device_type}: {reason}", cost=cost, mend=mend)


def check_process_groups() -> Finding:
    """Make a process group of one rank over gloo and reduce over it."""
    name = "process groups"
    cost = "no training on several ranks; one rank needs none"
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        return broken(
            MACHINE, name, "this torch is built without gloo", cost=cost, mend="pip install --force-reinstall torch"
        )
    fd = os.memfd_create("tiered-doctor", os.MFD_CLOEXEC)  # the store's file: nothing is left of it
    try:
        torch.distributed.init_process_group(
            "gloo",
            store=torch.distributed.FileStore(f"/proc/self/fd/{fd}", 1),  # type: ignore[attr-defined]  # where there is gloo
            rank=0,
            world_size=1,
            timeout=datetime.timedelta(seconds=_GROUP_DEADLINE_S),
        )
        numbers = torch.ones(4, dtype=torch.float32, device="cpu")
        torch.distributed.all_reduce(numbers)
        torch.distributed.destroy_process_group()
    except RuntimeError as error:  # torch.distributed raises it, as DistError and its kin
        reason = str(error).partition("\n")[0][:200]
        mend = "name a network interface that works: export GLOO_SOCKET_IFNAME=lo"
        return broken(MACHINE, name, f"gloo failed: {reason}", cost=cost, mend=mend)
    finally:
        os.close(fd)
    nccl = "is there too" if torch.distributed.is_nccl_available() else "is not there (ranks on GPUs would want it)"
    return ok(MACHINE, name, f"one rank was reduced over gloo; NCCL {nccl}")

"""Checks of torch and numba: compute device, page-locked memory, process groups, kernels; a function each."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import re
from contextlib import closing
from pathlib import Path

import torch
import torch.distributed

from tiered.bytes.pinned_arena import PinnedArena
from tiered.bytes.registrar import NoRegistrar, registrar_for
from tiered.doctor.finding import MACHINE, Check, Finding, broken, ok, slower
from tiered.units import MiB, format_bytes
from tiered.zero.formats.kernel_trial import COMPACT_COST, INSTALL_COMPACT
from tiered.zero.kernels.compiler import compile_nothing

__all__ = ["compute_checks", "group_checks", "kernel_checks"]

_NVIDIA = Path("/proc/driver/nvidia/version")
_TRIAL_NBYTES = 4 * MiB
_GROUP_DEADLINE_S = 5.0


def compute_checks() -> list[Check]:
    """Return the checks of the compute device. CUDA is set up: run them in a process of their own."""
    return [
        Check(MACHINE, "compute device", check_compute_device, is_essential=True),
        Check(MACHINE, "driver", check_driver),
        Check(MACHINE, "pinned memory", check_pinned_memory),
        Check(MACHINE, "unified memory", check_unified_memory),
    ]


def group_checks() -> list[Check]:
    """Return the check of process groups, which makes one: run it in a process of its own."""
    return [Check(MACHINE, "process groups", check_process_groups)]


def kernel_checks() -> list[Check]:
    """Return the check of compact state's kernels, which compiles: run it in a process of its own."""
    return [Check(MACHINE, "compact kernels", check_compact_kernels)]


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
        properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        devices = ", ".join(f"{each.name} with {format_bytes(each.total_memory)}" for each in properties)
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
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    integrated = [each.name for each in properties if getattr(each, "is_integrated", False)]
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
    with closing(PinnedArena(_TRIAL_NBYTES, registrar_for(device_type) or NoRegistrar(device_type))) as arena:
        reason = arena.why_pageable
    if reason is None:
        return ok(MACHINE, name, f"{format_bytes(_TRIAL_NBYTES)} of an arena were page-locked for {device_type}")
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

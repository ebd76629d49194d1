"""Cases of groups and comms in rank processes."""

from __future__ import annotations

import os
import threading
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.ranks.processes import Here, case
from tests.ranks.scripted import OnlyIn
from tiered.errors import CapacityError, RankLostError, UsageError
from tiered.ranks import group as group_module
from tiered.ranks.agreement import Agreement
from tiered.ranks.comm import GlooComm
from tiered.ranks.comm_thread import CommThread
from tiered.ranks.group import Group
from tiered.ranks.watch import Watch

_status = Path("/proc/self/status")


def _mib(field: str) -> float:
    return int(next(line for line in _status.read_text().splitlines() if line.startswith(field)).split()[1]) / 1024


def _pattern(nbytes: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def move_all(here: Here, comm: Any, nbytes: int) -> dict[str, bool]:
    """Gather and exchange patterns by ``comm``; return what is right."""
    rank, world = here.rank, here.world
    pieces = [_pattern(nbytes // world, each) for each in range(world)]
    whole = torch.zeros(nbytes, dtype=torch.uint8)
    whole.view(world, -1)[rank] = pieces[rank]
    here.thread.comm = comm
    here.thread.gather("u0", whole).wait()
    sends = [_pattern(nbytes, 100 + each) for each in range(world)]
    received = torch.zeros(nbytes, dtype=torch.uint8)
    here.thread.exchange("u0", sends[rank], received=received).wait()
    return {
        "gather": torch.equal(whole, torch.cat(pieces)),
        "exchange": torch.equal(received, torch.cat([send.view(world, -1)[rank] for send in sends])),
    }


@case
def move_patterns(send: Any, *, world: int, nbytes: int) -> dict[str, bool] | None:
    members = dist.new_group(list(range(world)))
    if dist.get_rank() >= world:
        return None
    here = Here.open(members, 60.0, send)
    found = move_all(here, OnlyIn(GlooComm(here.group)), nbytes)
    here.thread.close()
    return found


def tensors_of_torch(group: Group, whole: torch.Tensor) -> None:
    """Gather as torch's own all-gather does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # its name is on its way out
        dist.all_gather_into_tensor(whole, whole.view(group.world, -1)[group.rank])


@case
def allocate(send: Any, *, nbytes: int, num_pairs: int) -> dict[str, Any]:
    """Return the peak of memory of each form beyond its buffers, in MiB, and seconds of both gathers in pairs."""
    here = Here.open(None, 60.0, send)
    comm = GlooComm(here.group)
    whole, other = torch.ones(nbytes, dtype=torch.uint8), torch.ones(nbytes, dtype=torch.uint8)
    forms = {
        "gather": lambda: comm.gather(whole).wait(60.0),
        "exchange": lambda: comm.exchange(other, whole).wait(60.0),
        "torch's gather": lambda: tensors_of_torch(here.group, whole),
    }
    extra: dict[str, float] = {}
    for name, form in forms.items():
        dist.barrier()
        Path("/proc/self/clear_refs").write_text("5")
        before = _mib("VmRSS")
        form()
        extra[name] = _mib("VmHWM") - before
    times: dict[str, list[float]] = {"gather": [], "torch's gather": []}
    for _ in range(num_pairs):
        for name in times:
            dist.barrier()
            begun = time.perf_counter()
            forms[name]()
            times[name].append(time.perf_counter() - begun)
    here.thread.close()
    return {"extra": extra, "times": times}


@case
def join_parts(send: Any) -> dict[str, Any]:
    """Groups of the default group, of parts and of meshes, where some ranks know groups that others do not."""
    rank = dist.get_rank()
    half = dist.new_group([rank // 2 * 2, rank // 2 * 2 + 1], use_local_synchronization=True)
    plane = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    made: dict[str, Any] = {"default": None, "part": half, "mesh": init_device_mesh("cpu", (4,)), "row": plane["tp"]}
    if rank < 2:
        dist.new_group([0, 1], use_local_synchronization=True)  # torch's new_group of all four would hang from here on
    found: dict[str, Any] = {}
    for name, process_group in made.items():
        group = Group.of(process_group, deadline_s=30.0)
        assert isinstance(group, Group)
        watch = Watch(group)
        thread = CommThread(GlooComm(group), watch, deadline_s=30.0)
        told = Agreement(thread).agree("ranks", str(rank))
        found[name] = [group.rank, group.world, group.local_rank, group.local_world, list(told)]
        thread.close()
    try:
        Group.of(plane)
    except UsageError as error:
        found["plane"] = str(error)
    return found


@case
def live_beside_a_group_without_the_cpu(send: Any, *, store: str) -> dict[str, Any]:
    """The default group serves the device "meta" alone, as NCCL's serves cuda: a collective of the CPU is refused."""
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.Backend.register_backend("no_cpu", dist.ProcessGroupGloo, devices=["meta"])
    dist.init_process_group(
        "no_cpu", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=30)
    )
    try:
        dist.all_reduce(torch.zeros(1))
        refused = ""
    except RuntimeError as error:
        refused = str(error)
    here = Here.open(None, 30.0, send)
    told = here.agreement.agree("open", str(rank))
    moved = move_all(here, GlooComm(here.group), 12 << 10)
    here.thread.close()
    return {"refused": refused, "told": list(told), "moved": moved}


@case
def agree_on_failures(send: Any, *, failing: list[int]) -> list[str]:
    here = Here.open(None, 60.0, send)
    found = []
    for error in (ValueError("no such width"), MemoryError("none"), OSError("a drive"), UsageError("é" * 600)):
        try:
            with here.agreement.phase("shard"):
                if here.rank in failing:
                    raise error
        except Exception as raised:
            found.append(f"{type(raised).__name__}: {raised}")
    try:
        with here.agreement.phase("open"), here.agreement.phase("dram="):
            raise CapacityError("too little")
    except CapacityError as raised:
        found.append(str(raised))
    assert here.agreement.agree("end", "") == ("",) * here.world
    here.thread.close()
    return found


@case
def go_on_after_a_departure(send: Any) -> list[str]:
    """An error of other ranks may be caught; the ranks go on with a new Group."""
    here = Here.open(None, 30.0, send)
    try:
        here.agreement.agree("phase of rank 1" if here.rank == 1 else "phase")
        raise AssertionError("no error")
    except UsageError as error:
        found = [str(error)]
    here.thread.close()
    here = Here.open(None, 30.0, send)
    found.append(" ".join(here.agreement.agree("again", str(here.rank))))
    here.thread.close()
    return found


@case
def stay_quiet(send: Any, *, connect_s: float) -> tuple[str, ...]:
    """Tell nothing for longer than the ranks had to connect; the watch goes on."""
    with patch.object(group_module, "_CONNECT_S", connect_s):
        here = Here.open(None, 30.0, send)
    threading.Event().wait(1.5 * connect_s)  # nothing comes: that is the case
    here.watch.check_present()
    told = here.agreement.agree("still here", str(here.rank))
    here.thread.close()
    return told


@case
def come_alone(send: Any) -> str:
    """Rank 1 never opens its group."""
    if dist.get_rank() == 0:
        try:
            Group.of(None, deadline_s=0.1)
        except RankLostError as error:
            return f"{error.rank}: {error}"
    return ""


@case
def connect_beside_a_death(send: Any, *, what: str, deadline_s: float) -> dict[str, Any]:
    """Open a group whose last rank dies before it connects the group ``what``."""
    real = Group._new

    def new(group: Group, name: str, timeout: timedelta) -> Any:
        if name == what and group.rank == group.world - 1:
            os._exit(9)
        return real(group, name, timeout)

    with patch.object(Group, "_new", new):
        begun = time.monotonic()
        try:
            Group.of(None, deadline_s=deadline_s)
        except RankLostError as error:
            return {"text": str(error), "after_s": time.monotonic() - begun}
    raise AssertionError("it came to be")

"""Group: the ranks that train one model together, and the torch groups of their own that they speak over.

No collective of a model is here: comm.py has these, and comm_thread.py issues them.
"""

from __future__ import annotations

import hashlib
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tiered.bytes.interrupt import outside
from tiered.errors import UsageError

__all__ = ["FIRST_STEP_FACTOR", "Group", "NullGroup"]

FIRST_STEP_FACTOR = 3.0  # of the deadline, in the first step, which also records the schedule and faults pages in
_LATER_S = 60.0  # by which the groups' own deadline comes after ours, which says more
_WATCH_DEADLINE = timedelta(days=365)  # a receive that runs out closes its connection, and a watch receives for ever
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_ID_NBYTES = 16


class NullGroup:
    """The group of one rank: it has no torch groups, and no other rank to wait for."""

    __slots__ = ()

    rank = 0
    world = 1
    local_rank = 0
    local_world = 1

    def close(self) -> None:
        """Do nothing."""

    def __repr__(self) -> str:
        return "NullGroup()"


class Group:
    """Several ranks and four torch groups of their own: data, control, commit, watch.

    Nothing is ever issued on the caller's group. Each of the four serves one thread alone, since two threads that
    issue on one group mix their bytes without an error. Control, commit and watch are gloo groups, also beside a
    caller's group that has no device for the CPU; data is the caller's kind where that serves the compute device.

    ``rank`` and ``world`` count within the group, ``local_rank`` and ``local_world`` among the ranks of the group that
    run under the same boot of a machine. ``ranks`` are the numbers in the default group, ``deadline_s`` is in seconds.
    """

    __slots__ = (
        "commit", "control", "data", "deadline_s", "is_data_on_device", "local_rank", "local_world", "rank", "ranks",
        "watch", "world",
    )  # fmt: skip

    def __init__(self, ranks: list[int], deadline_s: float, device_kind: str | None) -> None:
        """Make the groups, with all ranks of ``ranks``; ``device_kind`` is torch's word for the data group's, or None.

        ``Group.of`` is the call for it.
        """
        self.ranks = ranks
        self.world = len(ranks)
        self.rank = ranks.index(dist.get_rank())
        self.deadline_s = deadline_s
        self.is_data_on_device = device_kind is not None
        timeout = timedelta(seconds=FIRST_STEP_FACTOR * deadline_s + _LATER_S)
        self.control = self._new(timeout, "gloo")
        self.data = self._new(timeout, device_kind or "gloo")
        self.commit = self._new(timeout, "gloo")
        self.watch = self._new(_WATCH_DEADLINE, "gloo")
        ids = self._boot_ids()
        here = [rank for rank, each in enumerate(ids) if each == ids[self.rank]]
        self.local_rank, self.local_world = here.index(self.rank), len(here)

    @classmethod
    def of(
        cls, process_group: object = None, *, deadline_s: float = 600.0, device: torch.device | None = None
    ) -> Group | NullGroup:
        """Return the group of the ranks of ``process_group``; NullGroup where that is one rank. Blocks for all of them.

        ``process_group`` is None (the default group if ``torch.distributed`` is initialised, else one rank), False
        (one rank), a group, or a DeviceMesh of one dimension. ``device`` is where the model computes (None: the CPU),
        ``deadline_s`` the seconds that a wait for another rank may last. All ranks call this in the same order as
        their other calls that make groups. Raises UsageError for a mesh of more dimensions, for a group without this
        rank, and where nothing is initialised; TypeError; RuntimeError of torch where a rank does not come in time.
        """
        if isinstance(process_group, DeviceMesh):
            process_group = _group_of_mesh(process_group)
        if process_group is False or (process_group is None and not _is_initialized()):
            return NullGroup()
        if not _is_initialized():
            raise UsageError("a process group, but torch.distributed is not initialised; expected init_process_group()")
        caller: Any = dist.group.WORLD if process_group is None else process_group
        if caller is dist.GroupMember.NON_GROUP_MEMBER:
            raise UsageError(f"rank {dist.get_rank()} is not in the process group that it was given")
        if not isinstance(caller, dist.ProcessGroup):
            raise TypeError(f"expected None, False, a process group or a DeviceMesh, got {process_group!r}")
        ranks = sorted(dist.get_process_group_ranks(caller))
        if len(ranks) == 1:
            return NullGroup()
        return cls(ranks, deadline_s, _device_kind(caller, device))

    def close(self) -> None:
        """Do nothing: the torch groups live until the caller's ``destroy_process_group()`` or the process's end.

        They cannot end one by one: torch names a group by its ranks, and finds the old addresses under a used name.
        """

    def _new(self, timeout: timedelta, kind: str) -> dist.ProcessGroup:
        # Only the members take part: a part of the ranks may open a store that the others know nothing of.
        made = outside(dist.new_group, self.ranks, timeout=timeout, backend=kind, use_local_synchronization=True)
        assert isinstance(made, dist.ProcessGroup)
        return made

    def _boot_ids(self) -> list[bytes]:
        """Return a digest of each rank's boot id: ranks under one kernel, in containers too, have the same."""
        text = _BOOT_ID.read_text() if _BOOT_ID.exists() else f"rank {self.rank}"
        mine = torch.tensor(list(hashlib.blake2b(text.encode(), digest_size=_ID_NBYTES).digest()), dtype=torch.uint8)
        every = [torch.empty(_ID_NBYTES, dtype=torch.uint8) for _ in self.ranks]
        outside(dist.all_gather, every, mine, group=self.control)
        return [bytes(each.tolist()) for each in every]

    def __repr__(self) -> str:
        where = f"{self.local_rank} of {self.local_world} of this machine"
        return f"Group(rank {self.rank} of {self.world}, {where}, deadline {self.deadline_s:g} s)"


def _is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def _group_of_mesh(mesh: DeviceMesh) -> dist.ProcessGroup:
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
        raise UsageError(
            f"a DeviceMesh of {mesh.ndim} dimensions {names}: tiered shards over one; expected a mesh of one"
            " dimension, such as mesh[name]"
        )
    return mesh.get_group()


def _device_kind(caller: dist.ProcessGroup, device: torch.device | None) -> str | None:
    """Return torch's word for what serves ``device`` in the caller's group; None where gloo does, or nothing."""
    if device is None or device.type == "cpu":
        return None
    pairs = (each.partition(":") for each in dist.get_backend_config(caller).split(","))
    kind = {where: kind for where, _, kind in pairs}.get(device.type)
    return None if kind in (None, "gloo") else kind

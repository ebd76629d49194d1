"""Group: the ranks that train one model together, and the torch groups of their own that they speak over.

No collective of a model is here: comm.py has these, and comm_thread.py issues them.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tiered.bytes.interrupt import INTERRUPTS, outside
from tiered.errors import RankLostError, UsageError

__all__ = ["FIRST_STEP_FACTOR", "WATCH_DEADLINE", "Group", "NullGroup", "machine_of"]

FIRST_STEP_FACTOR = 3.0  # of the deadline, in the first step, which also records the schedule and faults pages in
_LATER_S = 60.0  # by which the groups' own deadline comes after ours, which says more
WATCH_DEADLINE = timedelta(days=365)  # a receive that runs out closes its connection, and a watch receives for ever
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_ID_NBYTES = 16
_POLL_S = 0.01
_NO_TAG = 99  # of a message that nobody sends
_CONNECT_S = 60.0  # at most, for ranks that have just met to connect: gloo hears no interrupt meanwhile
_torch: Any = dist  # for names that its stubs do not have


class NullGroup:
    """The group of one rank: it has no torch groups, and no other rank to wait for."""

    __slots__ = ()

    rank = 0
    world = 1
    local_rank = 0
    local_world = 1

    def __repr__(self) -> str:
        return "NullGroup()"


class Group:
    """Several ranks and four torch groups of their own: data, control, commit, watch.

    Nothing is ever issued on the caller's group; only its store is used, to find each other. Each of the four serves
    one thread alone, since two threads that issue on one group mix their bytes without an error. The four are gloo
    groups, also beside a caller's group that has no device for the CPU, and no groups that torch knows by
    name: ``destroy_process_group()`` of the caller leaves them alone, and they end with the last object that refers to
    this. ``on_device`` makes a fifth, of the caller's kind, for a compute device that this serves.

    ``rank`` and ``world`` are those of the caller's group, ``local_rank`` and ``local_world`` count the ranks that run
    under the same boot of a machine. ``deadline_s`` is in seconds.
    """

    __slots__ = (
        "_caller", "_name", "_num_renewed", "_store", "commit", "control", "data", "deadline_s", "local_rank",
        "local_world",
        "rank", "watch", "world",
    )  # fmt: skip

    def __init__(self, caller: dist.ProcessGroup, deadline_s: float) -> None:
        """Make the groups, with all ranks of ``caller``; ``Group.of`` is the call for it."""
        self._caller = caller
        self.rank, self.world = caller.rank(), caller.size()
        self.deadline_s = deadline_s
        self._store = _store_of(caller)
        life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun may keep the store of the life before
        self._name = f"tiered/{caller.group_name}/{life}/{next(_num_made[caller.group_name])}"
        self._num_renewed = 0
        self._meet(self._name, 0, lambda: None)
        self.control = self._new("control", self._timeout)
        self.commit = self._new("commit", self._timeout)
        self.watch = self._new("watch", WATCH_DEADLINE)
        self.data = self._new("data", self._timeout)
        ids = self._boot_ids()
        here = [rank for rank, each in enumerate(ids) if each == ids[self.rank]]
        self.local_rank, self.local_world = here.index(self.rank), len(here)

    @classmethod
    def of(cls, process_group: object = None, *, deadline_s: float = 600.0) -> Group | NullGroup:
        """Return the group of the ranks of ``process_group``; NullGroup where that is one rank. Blocks for all of them.

        ``process_group`` is None (the default group if ``torch.distributed`` is initialised, else one rank), False
        (one rank), a group, or a DeviceMesh of one dimension. ``deadline_s``: the seconds that a wait for another rank
        may last. All ranks call this in the same order as their other calls that make groups. Raises UsageError for a
        mesh of more dimensions, for a group without this rank, and where nothing is initialised; TypeError;
        RankLostError where a rank does not come within three times the deadline.
        """
        caller = _caller_of(process_group)
        if caller is None or caller.size() == 1:
            return NullGroup()
        return cls(caller, deadline_s)

    @property
    def _timeout(self) -> timedelta:
        return timedelta(seconds=FIRST_STEP_FACTOR * self.deadline_s + _LATER_S)

    def num_known(self) -> int:
        """Return how many of torch's groups this process knows."""
        return len(_torch.distributed_c10d._world.pg_names)

    def on_device(self, device: torch.device, num_known: int) -> Any:
        """Return a group of torch's for ``device``, of the caller's kind; None where that has none but gloo.

        ``num_known``: the most groups that one of the ranks knows. All ranks call this together; it blocks for them.
        """
        kind = _device_kind(self._caller, device)
        if kind is None:
            return None
        ranks = dist.get_process_group_ranks(self._caller)
        if len(ranks) == dist.get_world_size():
            return outside(dist.new_group, ranks, timeout=self._timeout, backend=kind)
        # torch names a group of a part of the ranks by the number of groups that a process knows, and waits for ever
        # where that differs from rank to rank.
        known = _torch.distributed_c10d._world.pg_names
        others = {object(): "" for _ in range(num_known - len(known))}
        known.update(others)
        try:
            return outside(dist.new_group, ranks, timeout=self._timeout, backend=kind, use_local_synchronization=True)
        finally:
            for each in others:
                del known[each]

    def renew(self, number: int, check: Callable[[], object]) -> int:
        """Make control and data anew, with all ranks, and return the largest of their ``number``; blocks.

        Some rank may have left a collective in the middle: what is under way on the old groups ends with an error, on
        all ranks, and no byte of it is written any more. ``check()`` is called while others are waited for.
        For gloo alone. Raises what ``check`` does, RankLostError where a rank does not come.
        """
        name = f"{self._name}/again {self._num_renewed}"
        largest = self._meet(name, number, check)
        self._num_renewed += 1
        for old in (self.control, self.data):
            self.disconnect(old)
        self.control = self._new(f"again {self._num_renewed}/control", self._timeout)
        self.data = self._new(f"again {self._num_renewed}/data", self._timeout)
        return largest

    def end(self) -> None:
        """Let go of the groups, which have nothing under way: their threads end now, whoever refers to this."""
        self.data = self.control = self.commit = self.watch = None

    def disconnect(self, group: Any) -> None:
        """End what is under way on ``group``, one of gloo's, with an error here and on the other ranks."""
        for peer in range(self.world):
            if peer != self.rank:
                nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
                with contextlib.suppress(RuntimeError):  # a receive that runs out closes its connection
                    group.recv([nothing], peer, _NO_TAG).wait(timedelta(milliseconds=1))

    def _meet(self, name: str, number: int, check: Callable[[], object]) -> int:
        """Wait until all ranks have come here: gloo, which waits for them too, names none and hears no interrupt.

        Return the largest ``number`` of the ranks.
        """
        limit_s = FIRST_STEP_FACTOR * self.deadline_s
        end = time.monotonic() + limit_s
        self._ask_store(lambda: self._store.set(f"{name}/{self.rank}", str(number)))
        for rank in range(self.world):
            while not self._ask_store(partial(self._store.check, [f"{name}/{rank}"])):
                INTERRUPTS.look()
                check()
                if time.monotonic() > end:
                    raise RankLostError(
                        f"rank {rank} did not come to open its group within {limit_s:g} s; expected all {self.world}"
                        f" ranks (this one is {self.rank}) to open their stores in the same order",
                        rank=rank,
                    )
                time.sleep(_POLL_S)
        told = self._ask_store(lambda: [self._store.get(f"{name}/{rank}") for rank in range(self.world)])
        return max(map(int, told))

    def _ask_store(self, question: Callable[[], Any]) -> Any:
        """Return the answer of the caller's store. Raises RankLostError where the process that has it is gone."""
        try:
            return question()
        except RuntimeError as error:
            raise RankLostError(
                f"rank {self.rank} of {self.world} cannot ask the store of the process group: {error}; expected the"
                " process that has it, most often rank 0, to run on; start all ranks again",
                rank=-1,
            ) from error

    def _new(self, what: str, timeout: timedelta) -> Any:  # torch's stubs of its groups lack most of their methods
        # This name is the same wherever the caller's group is; see on_device for torch's.
        store = _torch.PrefixStore(f"{self._name}/{what}", self._store)
        limit = timedelta(seconds=min(_CONNECT_S, FIRST_STEP_FACTOR * self.deadline_s))
        try:
            group = outside(_torch.ProcessGroupGloo, store, self.rank, self.world, limit)
        except RuntimeError as error:
            raise RankLostError(
                f"rank {self.rank} of {self.world} could not connect the {what} group within {limit.total_seconds():g}"
                f" s, after all ranks had met: {error}; expected all ranks to run on; start them again",
                rank=-1,
            ) from error
        group._set_default_timeout(timeout)
        return group

    def _boot_ids(self) -> list[bytes]:
        """Return a digest of each rank's boot id: ranks under one kernel, in containers too, have the same."""
        digest = hashlib.blake2b(machine_of(self.rank).encode(), digest_size=_ID_NBYTES).digest()
        mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
        every = torch.empty(self.world, _ID_NBYTES, dtype=torch.uint8, device="cpu")
        outside(self.control.allgather([list(every)], [mine]).wait)
        return [bytes(each.tolist()) for each in every]

    def __repr__(self) -> str:
        where = f"{self.local_rank} of {self.local_world} of this machine"
        return f"Group(rank {self.rank} of {self.world}, {where}, deadline {self.deadline_s:g} s)"


def machine_of(rank: int) -> str:
    """Return the boot id of this process's machine, which containers of one kernel share; else a word for ``rank``."""
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else f"rank {rank}"


_num_made: dict[str, Iterator[int]] = defaultdict(itertools.count)  # by the caller's group: a name is used once


def _caller_of(process_group: object) -> dist.ProcessGroup | None:
    """Return the group that the caller means; None for this process alone."""
    if isinstance(process_group, DeviceMesh):
        process_group = _group_of_mesh(process_group)
    if process_group is False or (process_group is None and not _is_initialized()):
        return None
    if not _is_initialized():
        raise UsageError("a process group, but torch.distributed is not initialised; expected init_process_group()")
    caller: Any = dist.group.WORLD if process_group is None else process_group
    if caller is dist.GroupMember.NON_GROUP_MEMBER:
        raise UsageError(f"rank {dist.get_rank()} is not in the process group that it was given")
    if not isinstance(caller, dist.ProcessGroup):
        raise TypeError(f"expected None, False, a process group or a DeviceMesh, got {process_group!r}")
    return caller


def _store_of(caller: Any) -> Any:
    """Return the store in which the ranks of ``caller`` find each other."""
    if hasattr(caller, "get_group_store"):  # torch 2.11 has no such method
        return caller.get_group_store()
    return _torch.PrefixStore(caller.group_name, _torch.distributed_c10d._get_default_store())


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


def _device_kind(caller: dist.ProcessGroup, device: torch.device) -> str | None:
    """Return torch's word for what serves ``device`` in the caller's group; None where gloo does, or nothing."""
    pairs = (each.partition(":") for each in dist.get_backend_config(caller).split(","))
    kind = {where: kind for where, _, kind in pairs}.get(device.type)
    return None if kind in (None, "gloo") else kind

"""A torch group with collectives of the simulated device, by NCCL's stream rule: the bytes are there for a stream alone
that waits for them. They move on a stream and a thread of the group's own, through gloo."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["serve"]

_torch: Any = dist


class _Work(dist._Work):  # type: ignore[name-defined,misc]
    def __init__(self, move: Callable[[torch.Event], torch.Event]) -> None:
        super().__init__()
        self._done: torch.Event | None = None
        self._error: BaseException | None = None
        begun = torch.accelerator.current_stream().record_event()  # order: as NCCL, after the caller's stream

        def run() -> None:
            try:
                self._done = move(begun)
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._done is not None
        torch.accelerator.current_stream().wait_event(self._done)
        return True


class _Group(dist.ProcessGroup):
    """Copies of the device's bytes move through gloo between the two events of a collective."""

    def __init__(self, store: Any, rank: int, world: int, timeout: timedelta) -> None:
        super().__init__(rank, world)
        self._gloo = _torch.ProcessGroupGloo(_torch.PrefixStore("gloo", store), rank, world, timeout)
        self._world = world

    @functools.cached_property
    def _stream(self) -> torch.Stream:
        return torch.Stream(device="sim")  # a thread of its own in the simulated device, to the end of the process

    def getBackendName(self) -> str:  # torch's name
        return "collectives of a device"

    def all_gather_single(self, whole: torch.Tensor, mine: torch.Tensor, options: Any = None) -> _Work:
        def gather(there: torch.Tensor) -> torch.Tensor:
            every = torch.empty(whole.numel(), dtype=torch.uint8)
            pieces = list(every.view(self._world, -1))
            self._gloo.allgather([pieces], [there]).wait()
            return every

        return self._move(gather, mine, whole)

    def all_to_all_single(self, received: torch.Tensor, send: torch.Tensor, *splits: Any) -> _Work:
        def exchange(there: torch.Tensor) -> torch.Tensor:
            every = torch.empty(received.numel(), dtype=torch.uint8)
            self._gloo.alltoall_base(every, there, [], []).wait()
            return every

        return self._move(exchange, send, received)

    _allgather_base, alltoall_base = all_gather_single, all_to_all_single  # their names in torch 2.11

    def _move(
        self, collective: Callable[[torch.Tensor], torch.Tensor], send: torch.Tensor, into: torch.Tensor
    ) -> _Work:
        stream = self._stream

        def move(begun: torch.Event) -> torch.Event:
            stream.wait_event(begun)
            with stream:
                into.copy_(collective(send.cpu()))
            return stream.record_event()

        return _Work(move)


def serve(group: Any, device: str, kind: str) -> None:
    """Have ``group`` of gloo say that ``kind`` serves ``device``, as NCCL does cuda; torch knows the kind from then on.

    A group whose kind is written in Python would be no other kind's, too.
    """
    if kind not in dist.Backend.backend_list:
        dist.Backend.register_backend(kind, _Group, devices=[device])
    if group is not dist.GroupMember.NON_GROUP_MEMBER:
        _torch.distributed_c10d._world.pg_backend_config[group] = f"cpu:gloo,{device}:{kind}"

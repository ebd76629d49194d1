"""Comm: the collectives that a unit's bytes go through, each begun and then waited for in slices.

GlooComm is for the CPU, DeviceComm for an accelerator that torch has collectives for; a single rank has NullComm. The
ranks have agreed before each of them: comm_thread.py.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from tiered.ranks.group import Group

__all__ = ["Comm", "DeviceComm", "GlooComm", "Moving", "NullComm", "Telling", "check_bytes", "tell_on"]

_LEAST_WAIT_S = 0.001  # torch takes 0 for "no limit"
_POLL_S = 0.0005  # between two looks at an event, which has no wait with a limit


class Moving(Protocol):
    """A collective that has begun."""

    @property
    def buffers(self) -> Sequence[torch.Tensor]:
        """The tensors that the collective reads and writes until ``wait`` has returned True."""
        ...

    @property
    def event(self) -> object:
        """The event of the compute device behind the bytes there; None in DRAM."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Wait for at most ``timeout_s`` seconds; return whether all bytes have arrived. RuntimeError if it failed."""
        ...


class Telling(Moving, Protocol):
    """A few bytes of each rank on their way to all others."""

    @property
    def messages(self) -> list[bytes]:
        """The message of each rank, in their order, once ``wait`` has returned True."""
        ...


class Comm(Protocol):
    """The collectives of several ranks. One thread at a time calls them, and all ranks call the same ones in order.

    Tensors are one-dimensional, uint8 and contiguous; the number of bytes divides by the number of ranks. The caller
    owns them, and leaves them alone from the call until ``wait`` of what it returned has returned True: for ever where
    it never does. ``after`` is what ``fence()`` returned in the thread that made the bytes.
    """

    rank: int
    world: int

    def fence(self) -> object:
        """Return a mark in the calling thread's stream of the compute device: all that it has enqueued so far."""
        ...

    def gather(self, whole: torch.Tensor, after: object = None) -> Moving:
        """Send the own piece, which lies at its place in ``whole``, (nbytes,) uint8, to all; receive the others."""
        ...

    def exchange(self, send: torch.Tensor, received: torch.Tensor, *, after: object = None) -> Moving:
        """Send piece r of ``send``, (nbytes,) uint8, to rank r; piece r of ``received``, the same, is rank r's."""
        ...

    def tell(self, message: bytes) -> Telling:
        """Send ``message``, as long on all ranks, to all."""
        ...


def check_bytes(world: int, *tensors: torch.Tensor) -> None:
    """Raise ValueError for a tensor that no collective of ours takes."""
    for tensor in tensors:
        if tensor.dtype is not torch.uint8 or tensor.dim() != 1 or not tensor.is_contiguous():
            raise ValueError(
                f"expected a contiguous tensor of (nbytes,) uint8, got {tuple(tensor.shape)} {tensor.dtype}"
            )
        if tensor.numel() % world:
            raise ValueError(f"{tensor.numel()} bytes cannot be cut into the pieces of {world} ranks")
    places = [(tensor.data_ptr(), tensor.data_ptr() + tensor.numel()) for tensor in tensors if tensor.numel()]
    if any(start < end and first < last for (start, last), (first, end) in itertools.combinations(places, 2)):
        raise ValueError("the tensors of a collective overlap in memory; expected memory of its own for each")
    if len({tensor.numel() for tensor in tensors}) > 1:
        raise ValueError(f"expected tensors of one size, got {[tensor.numel() for tensor in tensors]} bytes")


class NullComm:
    """The collectives of one rank: its shard is the whole, so nothing is copied and it waits for no other rank."""

    __slots__ = ()

    rank = 0
    world = 1

    def __repr__(self) -> str:
        return "NullComm()"

    def gather(self, tier: Any, keys: Sequence[str], mode: str) -> Any:
        """Return what ``tier`` has of ``keys``: the shards are the whole."""
        return tier.gather(keys, mode)

    def all_gather(self, shards: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the whole tensors whose pieces ``shards`` are, (nbytes,) uint8 each: the shards themselves."""
        return shards


# -- gloo --------------------------------------------------------------------------------------------------------------


class _GlooWorks:
    """Works of gloo that together are one collective."""

    __slots__ = ("_works", "buffers")

    event = None

    def __init__(self, works: Sequence[Any], buffers: Sequence[torch.Tensor]) -> None:
        self._works = works
        self.buffers = buffers

    def wait(self, timeout_s: float) -> bool:
        end = time.monotonic() + timeout_s
        return all(_is_done(work, end - time.monotonic()) for work in self._works)

    def wait_for_any_end(self, timeout_s: float) -> bool:
        """Wait for at most ``timeout_s`` seconds; return whether all works are over, in an error or not."""
        end = time.monotonic() + timeout_s
        for work in self._works:
            while not work.is_completed() and time.monotonic() < end:
                time.sleep(_POLL_S)
        return all(work.is_completed() for work in self._works)


def _is_done(work: Any, timeout_s: float) -> bool:
    try:
        work.wait(timedelta(seconds=max(timeout_s, _LEAST_WAIT_S)))
    except RuntimeError:
        if not work.is_completed():  # only the slice ran out
            return False
        work.wait()  # returns, if the end came in between; else it raises again
    return True


class _GlooTelling(_GlooWorks):
    __slots__ = ("_every",)

    def __init__(self, work: Any, mine: torch.Tensor, every: torch.Tensor) -> None:
        super().__init__((work,), (mine, every))
        self._every = every  # (world, nbytes) uint8

    @property
    def messages(self) -> list[bytes]:
        return [bytes(each.tolist()) for each in self._every]


def tell_on(group: Any, message: bytes, world: int) -> Telling:
    """Send ``message``, as long on all ``world`` ranks, to all, on ``group``, one of gloo's that one thread uses."""
    mine = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    every = torch.empty(world, len(message), dtype=torch.uint8, device="cpu")
    return _GlooTelling(group.allgather([list(every)], [mine]), mine, every)


class GlooComm:
    """Collectives between CPUs.

    A gather is a broadcast of each rank's piece into its place: gloo's own all-gather allocates another whole span, and
    takes 3 to 4 times as long (bench/ranks.py). A collective allocates nothing beyond its buffers.
    """

    __slots__ = ("_group", "rank", "world")

    def __init__(self, group: Group) -> None:
        self._group = group
        self.rank, self.world = group.rank, group.world

    def fence(self) -> object:
        """Return None: what the CPU has done is done."""
        return None

    def gather(self, whole: torch.Tensor, after: object = None) -> Moving:
        """Send the own piece of ``whole`` to all, and receive the others."""
        pieces = whole.view(self.world, -1)  # (world, nbytes / world) uint8
        return _GlooWorks([self._group.data.broadcast(piece, rank) for rank, piece in enumerate(pieces)], (whole,))

    def exchange(self, send: torch.Tensor, received: torch.Tensor, *, after: object = None) -> Moving:
        """Send piece r of ``send`` to rank r; piece r of ``received`` is rank r's."""
        return _GlooWorks((self._group.data.alltoall_base(received, send, [], []),), (send, received))

    def tell(self, message: bytes) -> Telling:
        """Send ``message``, as long on all ranks, to all."""
        return tell_on(self._group.control, message, self.world)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._group!r})"


# -- accelerators ------------------------------------------------------------------------------------------------------


class _Arrival:
    """A collective of an accelerator, and the event in a stream that has waited for it."""

    __slots__ = ("_work", "buffers", "event")

    def __init__(self, event: Any, work: Any, buffers: Sequence[torch.Tensor]) -> None:
        self.event, self._work, self.buffers = event, work, buffers

    def wait(self, timeout_s: float) -> bool:
        end = time.monotonic() + timeout_s
        while not self.event.query():
            if time.monotonic() >= end:
                return False
            time.sleep(_POLL_S)
        return True

    def wait_for_any_end(self, timeout_s: float) -> bool:
        """Wait for at most ``timeout_s`` seconds; return whether it is over: no connection of ours ends it early."""
        return self.wait(timeout_s)


class DeviceComm(GlooComm):
    """Collectives between accelerators, by NCCL or what else torch has for them; ``tell`` goes by gloo.

    ``work.wait()`` of such a collective makes the current stream wait, not the thread. So collectives are issued in a
    stream of their own, which waits for the fence of the bytes first, then for the collective, and then records an
    event. When that event has come, all bytes are there for every stream and for the CPU.
    """

    __slots__ = ("_collectives", "_data", "_module", "_stream")

    def __init__(
        self, group: Group, data: Any, device: torch.device, *, module: Any = None, collectives: Any = dist
    ) -> None:
        """``data``: torch's group that serves ``device``, of the ranks of ``group``.

        ``module`` has the device's streams (default: torch's own of ``device``), ``collectives`` torch's names.
        """
        super().__init__(group)
        self._data = data
        self._module = torch.get_device_module(device) if module is None else module
        self._collectives = collectives
        self._stream = self._module.Stream(device)

    def fence(self) -> object:
        """Return an event behind all that the calling thread's current stream has enqueued."""
        event = self._module.Event()
        event.record(self._module.current_stream())
        return event

    def gather(self, whole: torch.Tensor, after: object = None) -> Moving:
        """Send the own piece of ``whole``, on the device, to all, and receive the others in place."""
        mine = whole.view(self.world, -1)[self.rank]
        names = self._collectives  # torch 2.11 has the second name only
        gathering = getattr(names, "all_gather_single", None) or names.all_gather_into_tensor
        return self._issue(lambda: gathering(whole, mine, group=self._data, async_op=True), after, (whole,))

    def exchange(self, send: torch.Tensor, received: torch.Tensor, *, after: object = None) -> Moving:
        """Send piece r of ``send``, on the device, to rank r; piece r of ``received`` is rank r's."""
        exchanging = self._collectives.all_to_all_single
        begin = lambda: exchanging(received, send, group=self._data, async_op=True)  # noqa: E731
        return self._issue(begin, after, (send, received))

    def _issue(self, begin: Callable[[], Any], after: object, buffers: Sequence[torch.Tensor]) -> Moving:
        with self._module.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)  # order: no byte is read before it is made
            work = begin()
            work.wait()  # order: the stream waits for the bytes before it records the event
            event = self._module.Event()
            event.record(self._stream)
        return _Arrival(event, work, buffers)

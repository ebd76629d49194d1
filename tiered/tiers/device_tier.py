"""DeviceTier: one unit's spans where computing happens, between the working set and the parameters.

Where computing happens on the CPU, HostTier, the buffer is the working set's lease: no byte is copied. accelerator.py
has the tier of a device with memory of its own. The engine decides what moves when.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch

from tiered.store.residency.working_set import Lease

__all__ = [
    "BufferState",
    "Collectives",
    "ComputeTier",
    "Gathered",
    "GradientBuffer",
    "ParameterPlace",
    "ShardState",
    "UnitBuffer",
    "bytes_of",
]


class ShardState(enum.Enum):
    """The place of a unit's shard, and its cost in DRAM."""

    STORED = "stored"  # NVMe has it, DRAM perhaps: the working set may drop it; costs nothing
    RESIDENT = "resident"  # leased: costs the shard's bytes


class BufferState(enum.Enum):
    """The part of a unit that is where computing happens, and its cost there."""

    NONE = "none"  # no bytes
    GATHERED = "gathered"  # the whole unit: saved references may be read; on one CPU rank it costs nothing more
    SHOWN = "shown"  # the parameters are views of it; costs nothing more


class ParameterPlace(NamedTuple):
    """One parameter in its span: ``offset`` and ``strides`` count elements of the span's dtype."""

    span: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Gathered(Protocol):
    """A unit's spans where computing happens, until ``release``. One thread at a time.

    ``tensors``: (nbytes,) uint8 each, one per span. ``leases``: those of the spans' bytes in DRAM that lie there as
    long as the spans are gathered, or none.
    """

    tensors: list[torch.Tensor]
    leases: tuple[Lease, ...]

    def use(self) -> None:
        """An operation on the caller's stream is about to use the spans: it comes after the copies of them."""

    def is_there(self, span: int) -> bool:
        """Return whether ``tensors[span]`` is memory of the span still, because a tensor that lies in it lives."""

    def write_back(self) -> None:
        """Have the bytes of ``leases`` be those of ``tensors``; blocks."""

    def release(self, unchanged: Collection[int]) -> None:
        """Give everything back. ``unchanged``: the spans leased for writing whose bytes are as they were."""


class GradientBuffer(Protocol):
    """The gradients of one unit where computing happens, until one of the last three calls. One thread at a time.

    ``tensor``: (nbytes,) uint8. ``lease``: that of the same bytes in DRAM, None where they are elsewhere.
    """

    @property
    def tensor(self) -> torch.Tensor: ...

    @property
    def lease(self) -> Lease | None: ...

    def use(self) -> None:
        """An operation on the caller's stream is about to use the bytes."""

    def release(self) -> None:
        """Give back what was only read."""

    def store(self) -> None:
        """Give the bytes to the working set, which has them until they are read again. Blocks where DRAM is short."""

    def discard(self) -> bool:
        """Delete the bytes and their key; return False where a caller sees them: the key is to be deleted later."""


class ComputeTier(Protocol):
    """Memory in which a unit's parameters and gradients are used."""

    device: torch.device
    keeps_gradients: bool  # whether they stay where computing happens, until DRAM is short

    def attach(self, distance: Callable[[str], int], give_back: Callable[[], bool]) -> None:
        """``distance(key)``: after how many uses it comes next; ``give_back()``: some buffer, if the caller can."""

    def free_nbytes(self) -> int:
        """Return the bytes that are free where computing happens, beside tiered's budget. Does not block."""

    def put(self, storage: torch.UntypedStorage, key: str, shift: int) -> None:
        """Put the bytes of ``storage`` into ``key``, which was created, from byte ``shift`` on; blocks."""

    def get(self, key: str) -> torch.Tensor:
        """Return the bytes of ``key`` where computing happens, (nbytes,) uint8 for reading. Blocks. CapacityError."""

    def settle_one(self) -> bool:
        """For a caller that waits for DRAM: wait for the end of a copy; return whether one was in flight."""

    def scratch(self, nbytes: int) -> AbstractContextManager[torch.Tensor]:
        """Lend (nbytes,) uint8 of undefined bytes where computing happens; no tensor on them may live on. Blocks."""

    def gather(self, keys: Sequence[str], version: Hashable, mode: str) -> Gathered:
        """Bring the bytes of ``keys`` to where computing happens, leased for ``mode``; blocks on a swap in.

        ``version``: the same bytes have the same one. Raises the errors of ``WorkingSet.lease``, and CapacityError.
        """

    def new_gradients(self, key: str, nbytes: int) -> GradientBuffer:
        """Return a buffer whose bytes are undefined, to be those of ``key``, which was created; blocks."""

    def gradients(self, key: str, mode: str) -> GradientBuffer:
        """Return the bytes of ``key`` where computing happens, for reading ("r") or to be changed ("rw"); blocks."""

    def on_host(self, value: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Have the few bytes of ``value`` brought to DRAM; the call of the result, in any thread, waits for them."""

    def lease(self, key: str, mode: str) -> Lease:
        """Lease the bytes of ``key`` in DRAM, once no copy of them is in flight that forbids it; blocks."""

    def settle(self, key: str) -> None:
        """Wait until no copy uses the bytes of ``key`` in DRAM."""

    def delete(self, key: str) -> None:
        """Delete ``key`` once no copy uses its bytes; blocks."""

    def outdate(self, keys: Sequence[str]) -> None:
        """The bytes of ``keys`` have changed in DRAM: copies of them elsewhere are of no use."""

    def forget(self) -> None:
        """All bytes may have changed in DRAM: wait for the copies in flight, and give all memory back."""


class Collectives(Protocol):
    """The operations of all ranks together on a unit's buffer."""

    def all_gather(self, shards: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the whole spans: (nbytes,) uint8 each."""


class UnitBuffer:
    """One unit's spans where computing happens. Two facts say where its bytes are: ``shard`` and ``state``.

    Four moves change them: swap in and copy in and all-gather (``gather``), and ``show``; ``release`` undoes all. The
    invariant: *the buffer has tensors exactly while it is gathered*. One thread at a time.
    """

    __slots__ = ("_comm", "_dtypes", "_pieces", "_serial", "_tier", "gathered", "keys", "mode", "shard", "state",
                 "tensors")  # fmt: skip

    def __init__(
        self,
        spans: Sequence[tuple[str, torch.dtype]],
        pieces: Sequence[ParameterPlace],
        *,
        tier: ComputeTier,
        comm: Collectives,
    ) -> None:
        """``spans``: the key and the dtype of each; ``pieces``: where each parameter lies, in the parameters' order."""
        self.keys = tuple(key for key, _ in spans)
        self.gathered: Gathered | None = None
        self.tensors: list[torch.Tensor] = []  # whole spans, (nbytes,) uint8 each
        self.mode = ""  # of the leases
        self.shard = ShardState.STORED
        self.state = BufferState.NONE
        self._dtypes = tuple(dtype for _, dtype in spans)
        self._pieces = tuple(pieces)
        self._serial = next(_serials)  # keys of another layout have other bytes
        self._tier = tier
        self._comm = comm

    def __repr__(self) -> str:
        return f"UnitBuffer({self.keys[0]!r}, shard {self.shard.value}, buffer {self.state.value})"

    @property
    def leases(self) -> tuple[Lease, ...]:
        """The leases of the shard that last as long as the buffer is gathered."""
        return () if self.gathered is None else self.gathered.leases

    def version(self, version: int) -> Hashable:
        """Return the name of the bytes that the unit has in its ``version``, as its tier is to know them."""
        return version, self._serial

    def gather(self, mode: str, version: int) -> None:
        """Swap the shard in, leased for ``mode``, copy it to where computing happens, and gather the whole unit.

        Blocks. Raises the errors of ``ComputeTier.gather``, with nothing leased.
        """
        gathered = self._tier.gather(self.keys, self.version(version), mode)
        try:
            self.tensors = self._comm.all_gather(gathered.tensors)
        except BaseException:
            gathered.release(range(len(self.keys)))
            raise
        self.gathered = gathered
        self.mode = mode
        self.shard, self.state = ShardState.RESIDENT, BufferState.GATHERED

    def show(self, parameters: Sequence[torch.Tensor]) -> None:
        """Make ``parameters`` views of the buffer. They must be plain tensors to torch's dispatch."""
        typed = [tensor.view(dtype) for tensor, dtype in zip(self.tensors, self._dtypes, strict=True)]
        for parameter, (span, offset, shape, strides) in zip(parameters, self._pieces, strict=True):
            parameter.data = typed[span].as_strided(shape, strides, offset)
        self.state = BufferState.SHOWN

    def use(self) -> None:
        """An operation on the caller's stream is about to use the buffer."""
        if self.gathered is not None:
            self.gathered.use()

    def write_back(self) -> None:
        """Have the bytes in DRAM be those of the buffer, leased for writing; blocks."""
        if self.gathered is not None:
            self.gathered.write_back()

    def release(self, unchanged: Collection[int] = ()) -> None:
        """Give the leases back; bytes that a tensor still shows stay counted until it dies.

        The parameters must be views of the buffer no more. ``unchanged``: the numbers of spans that were leased for
        writing and have the bytes that they had. Idempotent.
        """
        gathered = self.gathered
        self.forget()
        if gathered is not None:
            gathered.release(unchanged)

    def outdate(self) -> None:
        """The bytes in DRAM have changed."""
        self._tier.outdate(self.keys)

    def forget(self) -> None:
        """Drop the buffer without giving anything back: in a forked child, after close."""
        self.gathered, self.tensors, self.mode = None, [], ""
        self.shard, self.state = ShardState.STORED, BufferState.NONE


_serials = itertools.count()


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return the bytes of ``storage``: (nbytes,) uint8, the storage's own memory."""
    content = torch.empty(0, dtype=torch.uint8, device=storage.device)
    content.set_(storage, 0, (storage.nbytes(),))  # type: ignore[call-overload]  # a storage is a source too
    return content

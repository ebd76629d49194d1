"""DeviceTier: one unit's spans where computing happens, between the working set and the parameters.

Where computing happens on the CPU, HostTier, the buffer is the working set's lease: no byte is copied. The engine
decides what moves when.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

import torch

from tiered.store.residency.working_set import Lease, WorkingSet

__all__ = ["BufferState", "Collectives", "ComputeTier", "HostTier", "ParameterPlace", "ShardState", "UnitBuffer"]


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


class ComputeTier(Protocol):
    """Memory in which a unit's parameters are used."""

    def copy_in(self, leases: Sequence[Lease]) -> list[torch.Tensor]:
        """Return this rank's shards where computing happens: (nbytes,) uint8 each, valid while ``leases`` are."""


class Collectives(Protocol):
    """The operations of all ranks together on a unit's buffer."""

    def all_gather(self, shards: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the whole spans: (nbytes,) uint8 each."""


class HostTier:
    """Computing on the CPU: bytes in DRAM are where they are used, so a copy in is the lease's own tensor."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "HostTier()"

    def copy_in(self, leases: Sequence[Lease]) -> list[torch.Tensor]:
        """Return the tensors of ``leases``; the arena owns the bytes."""
        return [lease.tensor for lease in leases]


class UnitBuffer:
    """One unit's spans where computing happens. Two facts say where its bytes are: ``shard`` and ``state``.

    Four moves change them: swap in and copy in and all-gather (``gather``), and ``show``; ``release`` undoes all. The
    invariant: *the buffer has tensors exactly while the shard is leased*. One thread at a time.
    """

    __slots__ = ("_comm", "_dtypes", "_pieces", "_tier", "_working_set", "keys", "leases", "mode", "shard", "state",
                 "tensors")  # fmt: skip

    def __init__(
        self,
        working_set: WorkingSet,
        spans: Sequence[tuple[str, torch.dtype]],
        pieces: Sequence[ParameterPlace],
        *,
        tier: ComputeTier,
        comm: Collectives,
    ) -> None:
        """``spans``: the key and the dtype of each; ``pieces``: where each parameter lies, in the parameters' order."""
        self.keys = tuple(key for key, _ in spans)
        self.leases: tuple[Lease, ...] = ()
        self.tensors: list[torch.Tensor] = []  # whole spans, (nbytes,) uint8 each
        self.mode = ""  # of the leases
        self.shard = ShardState.STORED
        self.state = BufferState.NONE
        self._working_set = working_set
        self._dtypes = tuple(dtype for _, dtype in spans)
        self._pieces = tuple(pieces)
        self._tier = tier
        self._comm = comm

    def __repr__(self) -> str:
        return f"UnitBuffer({self.keys[0]!r}, shard {self.shard.value}, buffer {self.state.value})"

    def gather(self, mode: str) -> None:
        """Swap the shard in, leased for ``mode``, copy it to where computing happens, and gather the whole unit.

        Blocks. Raises the errors of ``WorkingSet.lease``, with nothing leased.
        """
        leases: list[Lease] = []
        try:
            for key in self.keys:
                leases.append(self._working_set.lease(key, mode))
            self.tensors = self._comm.all_gather(self._tier.copy_in(leases))
        except BaseException:
            self.tensors = []
            for lease in leases:
                lease.release()
            raise
        self.leases = tuple(leases)
        self.mode = mode
        self.shard, self.state = ShardState.RESIDENT, BufferState.GATHERED

    def show(self, parameters: Sequence[torch.Tensor]) -> None:
        """Make ``parameters`` views of the buffer. They must be plain tensors to torch's dispatch."""
        typed = [tensor.view(dtype) for tensor, dtype in zip(self.tensors, self._dtypes, strict=True)]
        for parameter, (span, offset, shape, strides) in zip(parameters, self._pieces, strict=True):
            parameter.data = typed[span].as_strided(shape, strides, offset)
        self.state = BufferState.SHOWN

    def release(self, unchanged: Collection[int] = ()) -> None:
        """Give the leases back; bytes that a tensor still shows stay counted until it dies.

        The parameters must be views of the buffer no more. ``unchanged``: the numbers of spans that were leased for
        writing and have the bytes that they had. Idempotent.
        """
        leases, self.leases = self.leases, ()
        self.forget()
        for number, lease in enumerate(leases):
            lease.release(is_unchanged=number in unchanged)

    def forget(self) -> None:
        """Drop the buffer without giving anything back: in a forked child, after close."""
        self.leases, self.tensors, self.mode = (), [], ""
        self.shard, self.state = ShardState.STORED, BufferState.NONE

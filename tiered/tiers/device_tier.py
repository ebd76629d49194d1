"""DeviceTier: one unit's spans where computing happens, between the working set and the parameters.

Where computing happens on the CPU, HostTier, the buffer is the working set's lease: no byte is copied. accelerator.py
has the tier of a device with memory of its own. The engine decides what moves when.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch

from tiered.bytes.free_memory import free_memory
from tiered.store.residency.residency import Lease, Residency
from tiered.tiers.compute_tier import Collectives, ComputeTier, Gathered, GradientBuffer, bytes_of

__all__ = ["BufferState", "HostPlace", "HostTier", "ParameterPlace", "ShardState", "UnitBuffer"]


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


class HostGathered:
    """Spans that are used where they lie in DRAM: the leases' own tensors."""

    __slots__ = ("leases", "tensors")

    def __init__(self, leases: Sequence[Lease]) -> None:
        self.leases = tuple(leases)
        self.tensors = [lease.tensor for lease in leases]

    def use(self) -> None:
        """Nothing to wait for."""

    def is_there(self, span: int) -> bool:
        """Return whether a tensor on the lease's bytes lives."""
        return not self.leases[span].release()

    def write_back(self) -> None:
        """The bytes are the leases' own."""

    def release(self, unchanged: Collection[int]) -> None:
        """Give the leases back; bytes that a tensor still shows stay counted until it dies."""
        self.tensors = []
        for number, lease in enumerate(self.leases):
            lease.release(is_unchanged=number in unchanged)


_NO_BYTES = torch.empty(0, dtype=torch.uint8, device="cpu")


class HostGradients:
    """Gradients that are used where they lie in DRAM, leased."""

    __slots__ = ("_working_set", "lease", "tensor")

    def __init__(self, working_set: Residency, lease: Lease) -> None:
        self.lease = lease
        self.tensor = lease.tensor
        self._working_set = working_set

    def use(self) -> None:
        """Nothing to wait for."""

    def hand_over(self) -> None:
        """Nothing to wait for."""

    def release(self) -> None:
        """Give the lease back."""
        self.tensor = _NO_BYTES  # lifetime: the lease ends with its last tensor
        self.lease.release()

    def store(self) -> None:
        """Give the lease back, and begin to write the bytes."""
        self.release()
        self._working_set.swap_out([self.lease.key])

    def discard(self) -> None:
        """Drop the bytes."""
        self.tensor = _NO_BYTES
        self._working_set.drop_bytes(self.lease.key, self.lease)


class HostTier:
    """Computing on the CPU: bytes in DRAM are where they are used, so nothing is copied."""

    __slots__ = ("_working_set", "device")

    computes_in_dram = True
    keeps_gradients = True

    def __init__(self, working_set: Residency) -> None:
        self.device = torch.device("cpu")
        self._working_set = working_set

    def __repr__(self) -> str:
        return "HostTier()"

    def gather(self, keys: Sequence[str], mode: str) -> HostGathered:
        """Lease ``keys``; the arena owns the bytes."""
        leases: list[Lease] = []
        try:
            for key in keys:
                leases.append(self._working_set.lease(key, mode))
        except BaseException:
            for lease in leases:
                lease.release()
            raise
        return HostGathered(leases)

    def attach(self, distance: Callable[[str], int], give_back: Callable[[], bool]) -> None:
        """The working set asks both by itself."""

    def note_dials(self, error: BaseException, what: str) -> str:
        """There is no compute device."""
        return ""

    def free_nbytes(self) -> int:
        """Return the bytes that this process may take, less those of the budget that it has not touched yet."""
        working_set = self._working_set
        return free_memory() - (working_set.budget_bytes - working_set.arena.leased_nbytes)

    def refuse_capture(self, what: str) -> None:
        """There is no stream."""

    def left_bytes(self) -> int:
        """Return what the shares of the budget have left."""
        return self._working_set.left_bytes

    def was_changed(self, key: str) -> bool:
        """Return False: ``put`` ends when all is there."""
        return False

    def put(self, tensor: torch.Tensor, key: str, shift: int) -> None:
        """Copy the storage of ``tensor`` to ``key``; blocks while room is made."""
        lease = self._working_set.lease(key, "w")
        with torch.no_grad():
            lease.tensor[shift:].copy_(bytes_of(tensor.untyped_storage()))
        lease.release()

    def get(self, key: str) -> torch.Tensor:
        """Lease ``key``; the bytes are the arena's own, the caller's until the last tensor on them has died."""
        lease = self._working_set.lease(key, "r")
        flat = lease.tensor
        lease.release()
        return flat

    def settle_one(self) -> bool:
        """There are no copies."""
        return False

    @contextmanager
    def scratch(self, nbytes: int) -> Iterator[torch.Tensor]:
        """Lend (nbytes,) uint8 of the budget. Blocks where memory is short."""
        buffer = self._working_set.reserve(nbytes)
        try:
            yield torch.frombuffer(buffer.memory, dtype=torch.uint8, count=nbytes)
        finally:
            self._working_set.unreserve(buffer)

    def new_gradients(self, key: str, nbytes: int) -> HostGradients:
        """Lease the bytes of ``key``; blocks while room is made."""
        return HostGradients(self._working_set, self._working_set.lease_anew(key))

    def gradients(self, key: str, mode: str) -> HostGradients:
        """Lease the bytes of ``key``; blocks on a swap in."""
        return HostGradients(self._working_set, self._working_set.lease(key, mode))

    def on_host(self, value: torch.Tensor) -> Callable[[], torch.Tensor]:
        """The value is there."""
        return lambda: value

    def lease(self, key: str, mode: str) -> Lease:
        """Lease the bytes of ``key``; blocks on a swap in."""
        return self._working_set.lease(key, mode)

    def lease_for_update(self, keys: Sequence[str]) -> list[Lease]:
        """Lease the bytes of ``keys``; blocks on a swap in."""
        return self._working_set.lease_for_update(keys)

    def settle(self, key: str) -> None:
        """There are no copies."""

    def delete(self, key: str) -> None:
        """Delete ``key``."""
        self._working_set.delete([key])

    def drop_bytes(self, key: str) -> None:
        """Drop the bytes of ``key``."""
        self._working_set.drop_bytes(key)

    def forget(self) -> None:
        """There are no copies."""


class HostPlace:
    """Updates on the CPU: the bytes are the leases' own."""

    computes_in_dram = True

    def __init__(self, tier: ComputeTier, working_set: Residency) -> None:
        self.device = torch.device("cpu")
        self._tier = tier
        self._working_set = working_set

    def computing(self) -> AbstractContextManager[object]:
        """Return a block that changes nothing."""
        return nullcontext()

    def bring(self, lease: Lease) -> torch.Tensor:
        """Return the lease's own tensor."""
        return lease.tensor

    def put_back(self, leases: Iterable[Lease]) -> None:
        """Give the leases back; a view found by gc.get_objects() is not written."""
        self._working_set.end_update(leases)

    def give_back(self, lease: Lease) -> None:
        """Give the lease back."""
        lease.release()

    def take_over(self, gradients: GradientBuffer) -> torch.Tensor:
        """Return the bytes, which are in DRAM."""
        return gradients.tensor

    def number(self, value: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Bring ``value`` to DRAM."""
        return self._tier.on_host(value)

    def settle(self, keys: Sequence[str]) -> None:
        """Wait for copies of ``keys`` that others have submitted."""
        if not self._tier.computes_in_dram:
            for key in keys:
                self._tier.settle(key)

    def close(self) -> None:
        """Nothing is kept."""


class UnitBuffer:
    """One unit's spans where computing happens. Two facts say where its bytes are: ``shard`` and ``state``.

    Four moves change them: swap in and copy in and all-gather (``gather``), and ``show``; ``release`` undoes all. The
    invariant: *the buffer has tensors exactly while it is gathered*. One thread at a time.
    """

    __slots__ = ("_comm", "_dtypes", "_pieces", "_tier", "gathered", "keys", "mode", "shard", "state",
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
        self._tier = tier
        self._comm = comm

    def __repr__(self) -> str:
        return f"UnitBuffer({self.keys[0]!r}, shard {self.shard.value}, buffer {self.state.value})"

    @property
    def leases(self) -> tuple[Lease, ...]:
        """The leases of the shard that last as long as the buffer is gathered."""
        return () if self.gathered is None else self.gathered.leases

    def gather(self, mode: str) -> None:
        """Swap the shard in, leased for ``mode``, copy it to where computing happens, and gather the whole unit.

        Blocks. Raises the errors of ``ComputeTier.gather``, with nothing leased.
        """
        gathered = self._tier.gather(self.keys, mode)
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

    def forget(self) -> None:
        """Drop the buffer without giving anything back: in a forked child, after close."""
        self.gathered, self.tensors, self.mode = None, [], ""
        self.shard, self.state = ShardState.STORED, BufferState.NONE

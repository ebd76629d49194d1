"""ComputeTier: the memory in which a model computes, and a unit's buffer there.

Where computing happens on the CPU, as here, the buffer is the working set's lease: no byte is copied. accelerator.py
has the subclasses for a device with memory of its own. The engine decides what moves when.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple, Protocol

import torch

from tiered.bytes.free_memory import free_memory
from tiered.store.residency.residency import Lease, Residency

__all__ = [
    "BufferState", "Collectives", "ComputeTier", "Gathered", "GradientBuffer", "ParameterPlace", "UnitBuffer",
    "UpdatePlace", "bytes_of",
]  # fmt: skip

_NO_BYTES = torch.empty(0, dtype=torch.uint8, device="cpu")


class Gathered:
    """A unit's spans where computing happens, until ``release``. One thread at a time.

    ``whole``: (nbytes,) uint8 each, one per span; ``shard``: the piece of each that is this rank's, (shard_nbytes,)
    uint8, a view of it. ``leases``: those of the shards' bytes in DRAM that lie there as long as the spans are
    gathered, or none. On one rank that computes on the CPU all three are the same bytes.
    """

    __slots__ = ("leases", "shard", "whole")

    def __init__(self, leases: Sequence[Lease]) -> None:
        self.leases = tuple(leases)
        self.whole = self.shard = [lease.tensor for lease in leases]

    def use(self) -> None:
        """An operation on the caller's stream is about to use the spans: it comes after the copies of them."""

    def is_there(self, span: int) -> bool:
        """Return whether ``whole[span]`` is memory of the span still, because a tensor that lies in it lives."""
        return not self.leases[span].release()

    def write_back(self) -> None:
        """Have the bytes of ``leases`` be those of ``shard``; blocks."""
        if self.shard is not self.whole:
            for lease, piece in zip(self.leases, self.shard, strict=True):
                lease.tensor.copy_(piece)

    def release(self, unchanged: Collection[int]) -> None:
        """Give everything back; bytes that a tensor still shows stay counted until it dies.

        ``unchanged``: the spans leased for writing whose bytes are as they were.
        """
        self.whole = self.shard = []
        for number, lease in enumerate(self.leases):
            lease.release(is_unchanged=number in unchanged)


class GradientBuffer:
    """The gradients of one unit where computing happens, until one of the last three calls. One thread at a time.

    ``tensor``: (nbytes,) uint8. ``lease``: that of the same bytes in DRAM, None where they are elsewhere.
    """

    __slots__ = ("_working_set", "lease", "tensor")

    lease: Lease | None

    @property
    def buffers(self) -> Sequence[object]:
        """The buffers in which the bytes lie, in DRAM or on the compute device."""
        return () if self.lease is None else (self.lease.buffer,)

    def __init__(self, working_set: Residency, lease: Lease) -> None:
        self.lease = lease
        self.tensor = lease.tensor
        self._working_set = working_set

    def use(self) -> None:
        """An operation on the caller's stream is about to use the bytes."""

    def hand_over(self) -> None:
        """All operations of the caller's that use the bytes were submitted; another thread's come next."""

    def copy_to(self, target: torch.Tensor) -> None:
        """Copy the bytes to ``target``, (nbytes,) uint8 in DRAM; blocks."""
        target.copy_(self.tensor)

    def release(self) -> None:
        """Give back what was only read."""
        assert self.lease is not None
        self.tensor = _NO_BYTES  # lifetime: the lease ends with its last tensor
        self.lease.release()

    def store(self) -> None:
        """Give the bytes to the working set, which has them until they are read again. Blocks where DRAM is short."""
        assert self.lease is not None
        self.release()
        self._working_set.swap_out([self.lease.key])

    def discard(self) -> None:
        """Drop the bytes; the key stays. Those that a caller still sees live as long as the caller's view."""
        assert self.lease is not None
        self.tensor = _NO_BYTES
        self._working_set.drop_bytes(self.lease.key, self.lease)


class ComputeTier:
    """Memory in which a unit's parameters and gradients are used: on the CPU, DRAM."""

    __slots__ = ("_working_set", "device")

    computes_in_dram = True
    keeps_gradients = True  # whether they stay where computing happens, until memory is short there

    def __init__(self, working_set: Residency) -> None:
        self.device = torch.device("cpu")
        self._working_set = working_set

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.device})"

    def attach(self, distance: Callable[[str], int], give_back: Callable[[], bool]) -> None:
        """``distance(key)``: after how many uses it comes next; ``give_back()``: some buffer, if the caller can.

        The working set, which has the memory of the CPU, asks both by itself.
        """

    def note_dials(self, error: BaseException, what: str) -> str:
        """Have an error of the compute device's memory, met in ``what``, name the user's dials; return these words."""
        return ""

    def free_nbytes(self) -> int:
        """Return the bytes that are free where computing happens, beside tiered's budget. Does not block."""
        working_set = self._working_set
        return free_memory() - (working_set.budget_bytes - working_set.arena.leased_nbytes)

    def refuse_capture(self, what: str) -> None:
        """Raise UsageError where the caller's stream is being captured into a graph."""

    def note_copy_out(self, nbytes: int) -> None:
        """Count bytes that an operation of the caller's has brought to DRAM."""

    def left_bytes(self) -> int:
        """Return the bytes of the budget where computing happens that are not in use."""
        return self._working_set.left_bytes

    def put(self, tensor: torch.Tensor, key: str, shift: int) -> None:
        """Put the storage of ``tensor`` into ``key``, which was created, from byte ``shift`` on; blocks."""
        lease = self._working_set.lease(key, "w")
        with torch.no_grad():
            lease.tensor[shift:].copy_(bytes_of(tensor.untyped_storage()))
        lease.release()

    def was_changed(self, key: str) -> bool:
        """Return whether what was put into ``key`` was written while it was copied, so that it is of no use. Blocks."""
        return False

    def get(self, key: str) -> torch.Tensor:
        """Return the bytes of ``key`` where computing happens, (nbytes,) uint8 for reading. Blocks. CapacityError.

        On the CPU they are the arena's own, the caller's until the last tensor on them has died.
        """
        lease = self._working_set.lease(key, "r")
        flat = lease.tensor
        lease.release()
        return flat

    def settle_one(self) -> bool:
        """For a caller that waits for DRAM: wait for the end of a copy; return whether one was in flight."""
        return False

    @contextmanager
    def scratch(self, nbytes: int) -> Iterator[torch.Tensor]:
        """Lend (nbytes,) uint8 of undefined bytes where computing happens; no tensor on them may live on. Blocks."""
        buffer = self._working_set.reserve(nbytes)
        try:
            yield torch.frombuffer(buffer.memory, dtype=torch.uint8, count=nbytes)
        finally:
            self._working_set.unreserve(buffer)

    def gather(self, keys: Sequence[str], mode: str) -> Gathered:
        """Bring the bytes of ``keys`` to where computing happens, leased for ``mode``; blocks on a swap in.

        Raises the errors of ``Residency.lease``, and CapacityError.
        """
        leases: list[Lease] = []
        try:
            for key in keys:
                leases.append(self._working_set.lease(key, mode))
        except BaseException:
            for lease in leases:
                lease.release()
            raise
        return Gathered(leases)

    def new_gradients(self, key: str, nbytes: int) -> GradientBuffer:
        """Return a buffer whose bytes are undefined, to be those of ``key``, a scratch key that has none; blocks."""
        return GradientBuffer(self._working_set, self._working_set.lease_anew(key))

    def gradients(self, key: str, mode: str) -> GradientBuffer:
        """Return the bytes of ``key`` where computing happens, for reading ("r") or to be changed ("rw"); blocks."""
        return GradientBuffer(self._working_set, self._working_set.lease(key, mode))

    def on_host(self, value: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Have the few bytes of ``value`` brought to DRAM; the call of the result, in any thread, waits for them."""
        return lambda: value

    def lease(self, key: str, mode: str) -> Lease:
        """Lease the bytes of ``key`` in DRAM, once no copy of them is in flight that forbids it; blocks."""
        return self._working_set.lease(key, mode)

    def lease_for_update(self, keys: Sequence[str]) -> list[Lease]:
        """Lease the bytes of ``keys`` in DRAM for an update (see ``Residency``), once no copy uses them; blocks."""
        return self._working_set.lease_for_update(keys)

    def settle(self, key: str) -> None:
        """Wait until no copy uses the bytes of ``key`` in DRAM."""

    def delete(self, key: str) -> None:
        """Delete ``key`` once no copy uses its bytes; blocks."""
        self.settle(key)
        self._working_set.delete([key])

    def drop_bytes(self, key: str) -> None:
        """Drop the bytes of scratch ``key`` once no copy uses them; the key stays. Blocks."""
        self.settle(key)
        self._working_set.drop_bytes(key)

    def forget(self) -> None:
        """Wait for the copies in flight, and give all memory back."""


class UpdatePlace:
    """The memory and the stream that updates compute in; one thread at a time. On the CPU the leases' own bytes."""

    computes_in_dram = True

    def __init__(self, tier: ComputeTier, working_set: Residency) -> None:
        self.device = torch.device("cpu")
        self._tier = tier
        self._working_set = working_set

    def computing(self) -> AbstractContextManager[object]:
        """Return a block whose operations are the update's."""
        return nullcontext()

    def bring(self, lease: Lease) -> torch.Tensor:
        """Return the leased bytes where the update computes, (nbytes,) uint8; until one of the next two."""
        return lease.tensor

    def put_back(self, leases: Iterable[Lease]) -> None:
        """Give leases for an update back whose bytes were written; does not wait for a copy.

        On the CPU a view found by gc.get_objects() is not written.
        """
        self._working_set.end_update(leases)

    def give_back(self, lease: Lease) -> None:
        """Give a lease back whose bytes were read; does not wait for a copy."""
        lease.release()

    def take_over(self, gradients: GradientBuffer) -> torch.Tensor:
        """Return the bytes of ``gradients``, which were handed over where the update computes; does not block."""
        return gradients.tensor

    def number(self, value: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Have ``value``, a few bytes of the caller's stream, there for the update, which calls the result."""
        return self._tier.on_host(value)

    def settle(self, keys: Sequence[str]) -> None:
        """Wait until the bytes of ``keys`` are those in DRAM and no copy uses them."""
        if not self._tier.computes_in_dram:
            for key in keys:
                self._tier.settle(key)

    def close(self) -> None:
        """No update will come any more: give all memory back. Idempotent."""


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


class Collectives(Protocol):
    """The operations of all ranks together on a unit's bytes. ``rank`` is this process's, from 0 to ``world``."""

    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int: ...

    def gather(self, tier: ComputeTier, keys: Sequence[str], mode: str) -> Gathered:
        """Bring the whole spans of whose shards ``keys`` are to where computing happens: as ``ComputeTier.gather``."""

    def all_gather(self, shards: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the whole tensors whose pieces ``shards``, (nbytes,) uint8 each, are this rank's. Blocks."""


class UnitBuffer:
    """One unit's spans where computing happens; ``state`` says where the bytes are.

    Four moves change it: swap in and copy in and all-gather (``gather``), and ``show``; ``release`` undoes all. The
    invariant: *the buffer has tensors, and leases, exactly while it is gathered*. One thread at a time.
    """

    __slots__ = ("_comm", "_dtypes", "_pieces", "_tier", "gathered", "keys", "mode", "state",
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
        self.state = BufferState.NONE
        self._dtypes = tuple(dtype for _, dtype in spans)
        self._pieces = tuple(pieces)
        self._tier = tier
        self._comm = comm

    def __repr__(self) -> str:
        return f"UnitBuffer({self.keys[0]!r}, {self.state.value})"

    @property
    def leases(self) -> tuple[Lease, ...]:
        """The leases of the shard that last as long as the buffer is gathered."""
        return () if self.gathered is None else self.gathered.leases

    def gather(self, mode: str) -> None:
        """Swap the shard in, leased for ``mode``, copy it to where computing happens, and gather the whole unit.

        Blocks. Raises the errors of ``ComputeTier.gather``, with nothing leased.
        """
        self.gathered = gathered = self._comm.gather(self._tier, self.keys, mode)
        self.tensors = gathered.whole
        self.mode = mode
        self.state = BufferState.GATHERED

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
        self.state = BufferState.NONE


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return the bytes of ``storage``: (nbytes,) uint8, the storage's own memory."""
    content = torch.empty(0, dtype=torch.uint8, device=storage.device)
    content.set_(storage, 0, (storage.nbytes(),))  # type: ignore[call-overload]  # a storage is a source too
    return content

"""ComputeTier: the memory in which a model computes, as the rooms above see it, whatever device that is."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from tiered.store.residency.residency import Lease

__all__ = ["Collectives", "ComputeTier", "Gathered", "GradientBuffer", "UpdatePlace", "bytes_of"]


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

    def hand_over(self) -> None:
        """All operations of the caller's that use the bytes were submitted; another thread's come next."""

    def release(self) -> None:
        """Give back what was only read."""

    def store(self) -> None:
        """Give the bytes to the working set, which has them until they are read again. Blocks where DRAM is short."""

    def discard(self) -> None:
        """Drop the bytes; the key stays. Those that a caller still sees live as long as the caller's view."""


class ComputeTier(Protocol):
    """Memory in which a unit's parameters and gradients are used."""

    device: torch.device
    computes_in_dram: bool
    keeps_gradients: bool  # whether they stay where computing happens, until memory is short there

    def attach(self, distance: Callable[[str], int], give_back: Callable[[], bool]) -> None:
        """``distance(key)``: after how many uses it comes next; ``give_back()``: some buffer, if the caller can."""

    def note_dials(self, error: BaseException, what: str) -> str:
        """Have an error of the compute device's memory, met in ``what``, name the user's dials; return these words."""

    def free_nbytes(self) -> int:
        """Return the bytes that are free where computing happens, beside tiered's budget. Does not block."""

    def refuse_capture(self, what: str) -> None:
        """Raise UsageError where the caller's stream is being captured into a graph."""

    def left_bytes(self) -> int:
        """Return the bytes of the budget where computing happens that are not in use."""

    def put(self, tensor: torch.Tensor, key: str, shift: int) -> None:
        """Put the storage of ``tensor`` into ``key``, which was created, from byte ``shift`` on; blocks."""

    def was_changed(self, key: str) -> bool:
        """Return whether what was put into ``key`` was written while it was copied, so that it is of no use. Blocks."""

    def get(self, key: str) -> torch.Tensor:
        """Return the bytes of ``key`` where computing happens, (nbytes,) uint8 for reading. Blocks. CapacityError."""

    def settle_one(self) -> bool:
        """For a caller that waits for DRAM: wait for the end of a copy; return whether one was in flight."""

    def scratch(self, nbytes: int) -> AbstractContextManager[torch.Tensor]:
        """Lend (nbytes,) uint8 of undefined bytes where computing happens; no tensor on them may live on. Blocks."""

    def gather(self, keys: Sequence[str], mode: str) -> Gathered:
        """Bring the bytes of ``keys`` to where computing happens, leased for ``mode``; blocks on a swap in.

        Raises the errors of ``Residency.lease``, and CapacityError.
        """

    def new_gradients(self, key: str, nbytes: int) -> GradientBuffer:
        """Return a buffer whose bytes are undefined, to be those of ``key``, a scratch key that has none; blocks."""

    def gradients(self, key: str, mode: str) -> GradientBuffer:
        """Return the bytes of ``key`` where computing happens, for reading ("r") or to be changed ("rw"); blocks."""

    def on_host(self, value: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Have the few bytes of ``value`` brought to DRAM; the call of the result, in any thread, waits for them."""

    def lease(self, key: str, mode: str) -> Lease:
        """Lease the bytes of ``key`` in DRAM, once no copy of them is in flight that forbids it; blocks."""

    def lease_for_update(self, keys: Sequence[str]) -> list[Lease]:
        """Lease the bytes of ``keys`` in DRAM for an update (see ``Residency``), once no copy uses them; blocks."""

    def settle(self, key: str) -> None:
        """Wait until no copy uses the bytes of ``key`` in DRAM."""

    def delete(self, key: str) -> None:
        """Delete ``key`` once no copy uses its bytes; blocks."""

    def drop_bytes(self, key: str) -> None:
        """Drop the bytes of scratch ``key`` once no copy uses them; the key stays. Blocks."""

    def forget(self) -> None:
        """Wait for the copies in flight, and give all memory back."""


class Collectives(Protocol):
    """The operations of all ranks together on a unit's buffer."""

    def all_gather(self, shards: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the whole spans: (nbytes,) uint8 each."""


class UpdatePlace(Protocol):
    """The memory and the stream that updates compute in; one thread at a time."""

    device: torch.device
    computes_in_dram: bool

    def computing(self) -> AbstractContextManager[object]:
        """Return a block whose operations are the update's."""

    def bring(self, lease: Lease) -> torch.Tensor:
        """Return the leased bytes where the update computes, (nbytes,) uint8; until one of the next two."""

    def put_back(self, leases: Iterable[Lease]) -> None:
        """Give leases for an update back whose bytes were written; does not wait for a copy."""

    def give_back(self, lease: Lease) -> None:
        """Give a lease back whose bytes were read; does not wait for a copy."""

    def take_over(self, gradients: GradientBuffer) -> torch.Tensor:
        """Return the bytes of ``gradients``, which were handed over where the update computes; does not block."""

    def number(self, value: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Have ``value``, a few bytes of the caller's stream, there for the update, which calls the result."""

    def settle(self, keys: Sequence[str]) -> None:
        """Wait until the bytes of ``keys`` are those in DRAM and no copy uses them."""

    def close(self) -> None:
        """No update will come any more: give all memory back. Idempotent."""


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return the bytes of ``storage``: (nbytes,) uint8, the storage's own memory."""
    content = torch.empty(0, dtype=torch.uint8, device=storage.device)
    content.set_(storage, 0, (storage.nbytes(),))  # type: ignore[call-overload]  # a storage is a source too
    return content

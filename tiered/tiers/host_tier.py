"""HostTier: computing on the CPU. Bytes in DRAM are used where they lie, under their leases; nothing is copied."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence

import torch

from tiered.bytes.free_memory import free_memory
from tiered.bytes.interrupt import uninterrupted_block
from tiered.store.residency.working_set import Lease, WorkingSet
from tiered.tiers.device_tier import bytes_of

__all__ = ["HostTier"]


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


class HostGradients:
    """Gradients that are used where they lie in DRAM, leased."""

    __slots__ = ("_working_set", "lease")

    def __init__(self, working_set: WorkingSet, lease: Lease) -> None:
        self.lease = lease
        self._working_set = working_set

    @property
    def tensor(self) -> torch.Tensor:
        """The lease's own tensor."""
        return self.lease.tensor

    def use(self) -> None:
        """Nothing to wait for."""

    def release(self) -> None:
        """Give the lease back."""
        self.lease.release()

    def store(self) -> None:
        """Give the lease back, and begin to write the bytes."""
        self.lease.release()
        self._working_set.swap_out([self.lease.key])

    def discard(self) -> bool:
        """Delete the key; return False where a caller sees its bytes."""
        return self._working_set.discard(self.lease)


class HostTier:
    """Computing on the CPU: bytes in DRAM are where they are used, so nothing is copied."""

    __slots__ = ("_working_set", "device")

    keeps_gradients = True

    def __init__(self, working_set: WorkingSet) -> None:
        self.device = torch.device("cpu")
        self._working_set = working_set

    def __repr__(self) -> str:
        return "HostTier()"

    def gather(self, keys: Sequence[str], version: Hashable, mode: str) -> HostGathered:
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

    def free_nbytes(self) -> int:
        """Return the bytes that this process may take, less those of the budget that it has not touched yet."""
        working_set = self._working_set
        return free_memory() - (working_set.budget_bytes - working_set.residents.arena.leased_nbytes)

    def put(self, storage: torch.UntypedStorage, key: str, shift: int) -> None:
        """Copy the bytes of ``storage`` to ``key``; blocks while room is made."""
        lease = self._working_set.lease(key, "w")
        with torch.no_grad():
            lease.tensor[shift:].copy_(bytes_of(storage))
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

    @uninterrupted_block
    def scratch(self, nbytes: int) -> Iterator[torch.Tensor]:
        """Lend (nbytes,) uint8 of the budget. Blocks where memory is short."""
        buffer = self._working_set.reserve(nbytes)
        try:
            yield torch.frombuffer(buffer.memory, dtype=torch.uint8, count=nbytes)
        finally:
            self._working_set.unreserve(buffer)

    def new_gradients(self, key: str, nbytes: int) -> HostGradients:
        """Lease the bytes of ``key``; blocks while room is made."""
        return HostGradients(self._working_set, self._working_set.lease(key, "w"))

    def gradients(self, key: str, mode: str) -> HostGradients:
        """Lease the bytes of ``key``; blocks on a swap in."""
        return HostGradients(self._working_set, self._working_set.lease(key, mode))

    def on_host(self, value: torch.Tensor) -> Callable[[], torch.Tensor]:
        """The value is there."""
        return lambda: value

    def lease(self, key: str, mode: str) -> Lease:
        """Lease the bytes of ``key``; blocks on a swap in."""
        return self._working_set.lease(key, mode)

    def settle(self, key: str) -> None:
        """There are no copies."""

    def delete(self, key: str) -> None:
        """Delete ``key``."""
        self._working_set.delete([key])

    def outdate(self, keys: Sequence[str]) -> None:
        """There are no copies."""

    def forget(self) -> None:
        """There are no copies."""

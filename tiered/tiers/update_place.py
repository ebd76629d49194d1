"""UpdatePlace: where an update computes, beside the bytes in DRAM or on the compute device.

The update's bytes are leased in DRAM either way. An update on the device has them copied there and back, bucket by
bucket, in memory that is set aside for it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from tiered.store.residency.working_set import Lease
from tiered.tiers.accelerator import AcceleratorTier
from tiered.tiers.device_memory import DeviceBuffer, DeviceMemory, on_stream

__all__ = ["DevicePlace", "HostPlace", "UpdatePlace"]


class UpdatePlace(Protocol):
    """The memory and the stream that updates compute in; one thread at a time."""

    device: torch.device

    def computing(self) -> AbstractContextManager[object]:
        """Return a block whose operations are the update's."""

    def bring(self, lease: Lease) -> torch.Tensor:
        """Return the leased bytes where the update computes, (nbytes,) uint8; until one of the next two."""

    def put_back(self, lease: Lease) -> None:
        """Give a lease back whose bytes were written; does not wait for a copy."""

    def give_back(self, lease: Lease) -> None:
        """Give a lease back whose bytes were read; does not wait for a copy."""

    def number(self, value: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Have ``value``, a few bytes of the caller's stream, there for the update, which calls the result."""

    def settle(self, key: str) -> None:
        """Wait until the bytes of ``key`` are those in DRAM and no copy uses them."""


class _Numbers(Protocol):
    """A tier, as it brings numbers to DRAM and waits for copies."""

    def on_host(self, value: torch.Tensor) -> Callable[[], torch.Tensor]: ...

    def settle(self, key: str) -> None: ...


class HostPlace:
    """Updates on the CPU: the bytes are the leases' own."""

    def __init__(self, tier: _Numbers) -> None:
        self.device = torch.device("cpu")
        self._tier = tier

    def computing(self) -> AbstractContextManager[object]:
        """Return a block that changes nothing."""
        return nullcontext()

    def bring(self, lease: Lease) -> torch.Tensor:
        """Return the lease's own tensor."""
        return lease.tensor

    def put_back(self, lease: Lease) -> None:
        """Give the lease back; a view found by gc.get_objects() is not written."""
        lease.release(is_written=True)

    def give_back(self, lease: Lease) -> None:
        """Give the lease back."""
        lease.release()

    def number(self, value: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Bring ``value`` to DRAM."""
        return self._tier.on_host(value)

    def settle(self, key: str) -> None:
        """Wait for copies that others have submitted."""
        self._tier.settle(key)


class DevicePlace:
    """Updates on the compute device, on a stream of their own, in ``memory`` of their own."""

    def __init__(self, tier: AcceleratorTier, budget_bytes: int) -> None:
        """``budget_bytes``: of the device's memory, for one unit, its gradients, 3 buckets and the tile scratch."""
        self.device = tier.device
        self.stream = torch.Stream(device=tier.device)
        self.memory = DeviceMemory(tier.device, budget_bytes, tier.copies.stream_in, lambda _: 0)
        self._tier = tier
        self._brought: dict[Lease, DeviceBuffer] = {}

    def computing(self) -> AbstractContextManager[object]:
        """Return a block whose operations run on this place's stream."""
        return on_stream(self.stream)

    def bring(self, lease: Lease) -> torch.Tensor:
        """Copy the leased bytes in; the stream waits for them. Raises CapacityError."""
        buffer = self.memory.take(lease.tensor.nbytes)
        if buffer is None:
            raise self.memory.explain(lease.tensor.nbytes)
        self._tier.copies.fill(buffer, lease)
        buffer.use(self.stream)
        self._brought[lease] = buffer
        return buffer.tensor

    def put_back(self, lease: Lease) -> None:
        """Copy the bytes back; the lease ends with the copy."""
        buffer = self._brought.pop(lease, None)
        if buffer is None:  # it was never brought
            lease.release(is_unchanged=True)
            return
        self._tier.copies.empty(buffer, lease)
        self.memory.give(buffer)

    def give_back(self, lease: Lease) -> None:
        """The lease ends with the copy that reads its bytes."""
        buffer = self._brought.pop(lease, None)
        if buffer is None:
            lease.release()
            return
        self._tier.copies.let_go(buffer, lease)
        self.memory.give(buffer)

    def number(self, value: torch.Tensor) -> Callable[[], torch.Tensor]:
        """The value is on the device: the update's stream waits for the one that made it."""
        made = self._tier.copies.current_stream().record_event()

        def wait() -> torch.Tensor:
            self.stream.wait_event(made)
            value.record_stream(self.stream)  # Lifetime: the caller may drop it first
            return value

        return wait

    def settle(self, key: str) -> None:
        """Wait for the copies of ``key``."""
        self._tier.settle(key)

"""DevicePlace: updates on the compute device. Their bytes are leased in DRAM, and copied there and back.

That is done bucket by bucket, in memory that is set aside for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager

import torch

from tiered.store.residency.working_set import Lease
from tiered.tiers.accelerator import AcceleratorTier, DeviceGradients
from tiered.tiers.compute_tier import GradientBuffer
from tiered.tiers.device_clock import COPY_TO_UPDATE, UPDATE
from tiered.tiers.device_memory import DeviceBuffer, DeviceMemory, on_stream

__all__ = ["DevicePlace"]


class _Computing(on_stream):
    """A block on the update's stream; an error of the device's memory names the dials."""

    __slots__ = ("_tier",)

    def __init__(self, stream: torch.Stream, tier: AcceleratorTier) -> None:
        super().__init__(stream)
        self._tier = tier

    def __exit__(self, *raised: object) -> None:
        super().__exit__()
        if isinstance(raised[1], BaseException):
            self._tier.note_dials(raised[1], "an update")


class DevicePlace:
    """Updates on the compute device, on a stream of their own, in ``memory`` of their own."""

    computes_in_dram = False

    def __init__(self, tier: AcceleratorTier, budget_bytes: int) -> None:
        """``budget_bytes``: of the device's memory, for one unit, its gradients, 3 buckets and the tile scratch."""
        self.device = tier.device
        self.stream = torch.Stream(device=tier.device)
        self._stream_in = torch.Stream(device=tier.device)
        self.memory = DeviceMemory(tier.device, budget_bytes, tier.memory.stream, lambda _: 0)
        self._tier = tier
        tier.copies.clock.name(self.stream, UPDATE)
        tier.copies.clock.name(self._stream_in, COPY_TO_UPDATE)
        self._brought: dict[Lease, DeviceBuffer] = {}
        self._kept: list[DeviceBuffer] = []

    def computing(self) -> AbstractContextManager[object]:
        """Return a block whose operations run on this place's stream."""
        return _Computing(self.stream, self._tier)

    def bring(self, lease: Lease) -> torch.Tensor:
        """Copy the leased bytes in; the stream waits for them. Raises CapacityError."""
        buffer = self.memory.take(lease.tensor.nbytes)
        if buffer is None:
            raise self.memory.explain(lease.tensor.nbytes)
        try:
            self._tier.copies.fill(buffer, lease, self._stream_in)
        except BaseException:
            self.memory.give(buffer)
            raise
        buffer.use(self.stream)
        self._brought[lease] = buffer
        return buffer.tensor

    def put_back(self, leases: Iterable[Lease]) -> None:
        """Copy the bytes back; each lease ends with its copy."""
        for lease in leases:
            self._put_back(lease)

    def _put_back(self, lease: Lease) -> None:
        buffer = self._brought.pop(lease, None)
        if buffer is None:  # it was never brought
            lease.release(is_unchanged=True)
            return
        try:
            self._tier.copies.empty(buffer, lease)
        finally:
            self.memory.give(buffer)

    def give_back(self, lease: Lease) -> None:
        """The lease ends with the copy that reads its bytes."""
        buffer = self._brought.pop(lease, None)
        if buffer is None:
            lease.release()
            return
        self._tier.copies.let_go(buffer, lease)
        self.memory.give(buffer)

    def take_over(self, gradients: GradientBuffer) -> torch.Tensor:
        """Have the stream wait for the bytes, which are on the device; return them."""
        assert isinstance(gradients, DeviceGradients)
        gradients.use_on(self.stream)
        return gradients.tensor

    def number(self, value: torch.Tensor) -> Callable[[], torch.Tensor]:
        """The value is on the device: the update's stream waits for the one that made it."""
        made = self._tier.copies.current_stream().record_event()

        def wait() -> torch.Tensor:
            self.stream.wait_event(made)
            value.record_stream(self.stream)  # Lifetime: the caller may drop it first
            return value

        return wait

    def settle(self, keys: Sequence[str]) -> None:
        """Wait for the copies of ``keys``."""
        for key in keys:
            self._tier.settle(key)

    def keep(self, nbytes: int) -> torch.Tensor:
        """Return (nbytes,) uint8 for this place's stream, until ``close``. Raises CapacityError."""
        buffer = self.memory.take(nbytes)
        if buffer is None:
            raise self.memory.explain(nbytes)
        buffer.use(self.stream)
        self._kept.append(buffer)
        return buffer.tensor

    def close(self) -> None:
        """Give all memory back, once no tensor lies in it. Idempotent."""
        while self._kept:
            self.memory.give(self._kept.pop())
        self.memory.close()

"""GatherSlots and DeviceSlots: the memory in which ranks put whole units and gradients together.

In DRAM, or on a compute device. Both lend buffers of their budget, and know how bytes come into a part of one and out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from tiered.bytes.arena import Buffer
from tiered.store.residency.residency import Lease, Residency
from tiered.tiers.accelerator import AcceleratorTier
from tiered.tiers.copies import HostBytes
from tiered.tiers.device_memory import DeviceBuffer

__all__ = ["DeviceSlots", "GatherSlots", "SlotMemory"]


class SlotMemory(Protocol):
    """Buffers for collectives. One thread at a time."""

    def take(self, nbytes: int) -> tuple[Any, torch.Tensor]:
        """Return a buffer and a tensor over it, (nbytes,) uint8 of undefined bytes; blocks. CapacityError."""
        ...

    def give(self, buffer: Any) -> None:
        """Take ``buffer`` back, whose tensor the caller has dropped, all uses of it submitted."""
        ...

    def fill(self, buffer: Any, part: torch.Tensor, lease: Lease, *, keeps: bool) -> None:
        """Copy the leased bytes to ``part``, a view of the buffer; the lease ends with it, but with ``keeps``."""
        ...

    def write(self, buffer: Any, part: torch.Tensor, lease: Lease) -> None:
        """Copy ``part`` to the leased bytes; blocks."""
        ...

    def use(self, buffer: Any) -> None:
        """An operation on the caller's stream is about to use the buffer."""
        ...

    def mark(self, *buffers: Any) -> object:
        """Return an event behind all that was done with the buffers so far; None where that has been."""
        ...

    def moved(self, event: Any, *buffers: Any) -> None:
        """A collective has read or written the buffers, behind ``event``: all that is done with them comes after it."""
        ...


class GatherSlots:
    """Reserved buffers of the DRAM budget in which whole units lie, kept from one gather to the next.

    So a gather finds its memory whatever is read ahead. A buffer whose bytes a tensor still shows is not used before
    that has died, and another is reserved meanwhile. Free buffers beyond ``kept_nbytes`` are given back.
    """

    def __init__(self, working_set: Residency) -> None:
        self.kept_nbytes = 0
        self._working_set = working_set
        self._used_nbytes = 0
        self._free: list[Buffer] = []
        self._shown: list[Buffer] = []  # by tensors of the caller's

    @property
    def free_nbytes(self) -> int:
        """Bytes of the free buffers."""
        return sum(buffer.nbytes for buffer in self._free)

    def take(self, nbytes: int) -> tuple[Buffer, torch.Tensor]:
        self._look()
        fitting = [buffer for buffer in self._free if buffer.nbytes >= nbytes]
        if fitting:
            buffer = min(fitting, key=lambda each: each.nbytes)
            self._free.remove(buffer)
        else:
            self._shrink(nbytes)
            buffer = self._working_set.reserve(nbytes, is_lasting=True)
        self._used_nbytes += buffer.nbytes
        return buffer, buffer.alias(nbytes, bool)[0]

    def give(self, buffer: Buffer) -> None:
        self._shown.append(buffer)
        self._look()

    def fill(self, buffer: Buffer, part: torch.Tensor, lease: Lease, *, keeps: bool) -> None:
        part.copy_(lease.tensor)
        if not keeps:
            lease.release()

    def write(self, buffer: Buffer, part: torch.Tensor, lease: Lease) -> None:
        lease.tensor.copy_(part)

    def use(self, buffer: Buffer) -> None:
        pass

    def mark(self, *buffers: Buffer) -> object:
        return None

    def moved(self, event: Any, *buffers: Buffer) -> None:
        pass

    def end(self) -> None:
        """Give all free buffers back to the budget."""
        self.kept_nbytes = 0
        self._look()

    def _look(self) -> None:
        """Sort the buffers that were given back: those that are shown wait."""
        free = [buffer for buffer in self._shown if not buffer.is_aliased]
        self._shown = [buffer for buffer in self._shown if buffer not in free]
        self._free += free
        self._used_nbytes -= sum(buffer.nbytes for buffer in free)
        self._shrink(0)

    def _shrink(self, nbytes: int) -> None:
        """Give free buffers back until ``nbytes`` more are no more than are kept."""
        while self._free and self._used_nbytes + self.free_nbytes + nbytes > self.kept_nbytes:
            self._working_set.unreserve(self._free.pop())


class DeviceSlots:
    """Buffers of a compute device's budget, which keeps free ones by itself.

    Invariant: a collective begins after the event of ``mark``, and ``moved`` follows before the buffers are used.
    """

    def __init__(self, tier: AcceleratorTier) -> None:
        self._tier, self._copies = tier, tier.copies
        self._stream = torch.Stream(device=tier.device)  # its events alone: it does no work

    def take(self, nbytes: int) -> tuple[DeviceBuffer, torch.Tensor]:
        buffer = self._tier.take(nbytes)
        return buffer, buffer.tensor

    def give(self, buffer: DeviceBuffer) -> None:
        self._tier.memory.give(buffer)

    def fill(self, buffer: DeviceBuffer, part: torch.Tensor, lease: Lease, *, keeps: bool) -> None:
        self._copies.fill(buffer, lease, part=part)
        if not keeps:
            self._copies.let_go(buffer, lease)

    def bring(self, whole: Sequence[torch.Tensor], name: str) -> list[tuple[DeviceBuffer, torch.Tensor]]:
        """Copy ``whole``, (nbytes,) uint8 each in DRAM, to buffers of their own; blocks until they are there."""
        there: list[tuple[DeviceBuffer, torch.Tensor]] = []
        try:
            for each in whole:
                there.append(self.take(each.numel()))
                self._copies.fill(there[-1][0], HostBytes(name, each))
            for buffer, _ in there:
                self._copies.wait_for(buffer, name)
        except BaseException:
            buffers = [buffer for buffer, _ in there]
            there.clear()  # lifetime: their tensors
            for buffer in buffers:
                self.give(buffer)
            raise
        return there

    def write(self, buffer: DeviceBuffer, part: torch.Tensor, lease: Lease) -> None:
        self._copies.write(buffer, lease, part=part)

    def use(self, buffer: DeviceBuffer) -> None:
        self._copies.let_use(buffer, self._copies.current_stream())

    def mark(self, *buffers: DeviceBuffer) -> object:
        for buffer in buffers:
            buffer.use(self._stream)
            buffer.let_wait(self._stream)
        return self._stream.record_event()

    def moved(self, event: Any, *buffers: DeviceBuffer) -> None:
        self._stream.wait_event(event)  # which has used them
        for buffer in buffers:
            buffer.filled(event)

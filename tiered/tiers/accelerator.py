"""AcceleratorTier: the parameters and gradients of one model on a compute device that has memory of its own.

They are in buffers of the device's budget. The training thread submits copies and never waits for one; the caller's
streams wait for them, on the device. DevicePlace is for updates there: their bytes are leased in DRAM, and copied there
and back bucket by bucket, in memory that is set aside for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from tiered.errors import UsageError
from tiered.stats import ComputeDeviceStatistics
from tiered.store.residency.residency import Lease, Residency
from tiered.tiers.compute_tier import ComputeTier, Gathered, GradientBuffer, UpdatePlace
from tiered.tiers.copies import Copies, HostBytes
from tiered.tiers.device_clock import COPY_TO_UPDATE, UPDATE
from tiered.tiers.device_memory import (
    NEVER,
    Content,
    DeviceBuffer,
    DeviceMemory,
    free_device_memory,
    note_dials,
    on_stream,
)
from tiered.units import format_bytes

__all__ = ["AcceleratorTier", "DeviceGradients", "DevicePlace"]


class DeviceGathered(Gathered):
    """Spans that were copied to the compute device; with a lease for writing they can be copied back."""

    __slots__ = ("_buffers", "_contents", "_copies", "_memory")

    def __init__(
        self, tier: AcceleratorTier, taken: Sequence[tuple[DeviceBuffer, Content | None]], leases: Sequence[Lease]
    ) -> None:
        self.leases = tuple(leases)
        self.whole = self.shard = [buffer.tensor for buffer, _ in taken]
        self._copies, self._memory = tier.copies, tier.memory
        self._buffers = tuple(buffer for buffer, _ in taken)
        self._contents = tuple(content for _, content in taken)

    def use(self) -> None:
        stream = self._copies.current_stream()
        for buffer in self._buffers:
            self._copies.let_use(buffer, stream)

    def is_there(self, span: int) -> bool:
        return self._buffers[span].is_aliased

    def write_back(self) -> None:
        for buffer, lease in zip(self._buffers, self.leases, strict=True):
            self._copies.write(buffer, lease)

    def release(self, unchanged: Collection[int]) -> None:
        """Give the buffers and leases back; all uses must have been submitted. Blocks until the leases' copies end."""
        for buffer, lease in zip(self._buffers, self.leases, strict=False):  # none where the copies own the leases
            self._copies.wait_for(buffer, lease.key)
        self.whole = self.shard = []
        for buffer, content in zip(self._buffers, self._contents, strict=True):
            self._memory.give(buffer, content)
        for number, lease in enumerate(self.leases):
            lease.release(is_unchanged=number in unchanged)


class DeviceGradients(GradientBuffer):
    """Gradients of one unit on the compute device; those of ``key`` in DRAM are older, if there are any."""

    __slots__ = ("_buffer", "_key", "_tier")

    def __init__(self, tier: AcceleratorTier, buffer: DeviceBuffer, key: str) -> None:
        self.lease = None
        self.tensor = buffer.tensor
        self._tier = tier
        self._buffer = buffer
        self._key = key

    @property
    def buffers(self) -> Sequence[object]:
        return (self._buffer,)

    def use(self) -> None:
        self._tier.copies.let_use(self._buffer, self._tier.copies.current_stream())

    def hand_over(self) -> None:
        """Note the end of all uses so far: an update's stream comes after that, and after no later one."""
        self._buffer.hand_over()

    def use_on(self, stream: torch.Stream) -> None:
        """``stream`` waits until the bytes are there."""
        self._buffer.use(stream)

    def release(self) -> None:
        self.tensor = torch.empty(0, dtype=torch.uint8, device="cpu")  # Lifetime: the buffer makes others of its memory
        self._tier.memory.give(self._buffer)

    def store(self) -> None:
        self._tier.copies.empty(self._buffer, self._tier.lease(self._key, "w"))
        self.release()

    def copy_to(self, target: torch.Tensor) -> None:
        """Copy the bytes to ``target``, (nbytes,) uint8 in DRAM; blocks."""
        self._tier.copies.write(self._buffer, HostBytes(self._key, target))

    def discard(self) -> None:
        self.release()
        self._tier.drop_bytes(self._key)


class AcceleratorTier(ComputeTier):
    """The compute device of one model; ``memory`` is its budget there. Thread-safe, but for units and gradients.

    Invariant: a stream of the caller's uses a buffer after ``use`` alone, which has it wait for the buffer's bytes.
    """

    computes_in_dram = False

    def __init__(self, working_set: Residency, device: torch.device, budget_bytes: int) -> None:
        """``device``: with its index; ``budget_bytes``: most that buffers take of its memory."""
        super().__init__(working_set)
        self.device = device
        self.copies = Copies(working_set, device, deadline_s=working_set.deadline_s)
        self.memory = DeviceMemory(device, budget_bytes, torch.Stream(device=device), self._distance_of)
        self.memories = [self.memory]  # and that of updates, if they compute here
        self.keeps_gradients = False
        self._distance: Callable[[str], int] = lambda key: 0
        self._give_back: Callable[[], bool] = lambda: False

    def __repr__(self) -> str:
        return f"AcceleratorTier({self.device}, {self.memory!r}, {self.copies!r})"

    def statistics(self) -> ComputeDeviceStatistics:
        """Return the counters of the budget and of the copies."""
        return ComputeDeviceStatistics(
            name=str(self.device),
            budget_bytes=sum(memory.budget_bytes for memory in self.memories),
            allocated_bytes=sum(memory.allocated_bytes for memory in self.memories),
            peak_bytes=sum(memory.peak_bytes for memory in self.memories),
            reserved_bytes=torch.accelerator.memory_reserved(self.device),
            copied_in_bytes=self.copies.in_bytes,
            copied_out_bytes=self.copies.out_bytes,
        )

    def attach(self, distance: Callable[[str], int], give_back: Callable[[], bool]) -> None:
        self._distance, self._give_back = distance, give_back

    def _distance_of(self, content: Content) -> int:
        return self._distance(content.key) if content == self._content(content.key) else NEVER

    def _content(self, key: str) -> Content:
        return Content(key, self._working_set.version(key))

    # -- parameters ----------------------------------------------------------------------------------------------

    def gather(self, keys: Sequence[str], mode: str) -> DeviceGathered:
        """Copy the bytes of ``keys`` in, but those that are there already, as DRAM has them. Blocks on a swap in."""
        taken: list[tuple[DeviceBuffer, Content | None]] = []
        leases: list[Lease] = []
        try:
            for key in keys:
                content = self._content(key) if mode == "r" else None
                buffer = None if content is None else self.memory.find(content)
                if buffer is None:
                    lease = self.lease(key, mode)
                    content = self._content(key) if mode == "r" else None  # order: another thread may have written
                    buffer = self._copy_in(lease, is_owned=mode == "r")
                    leases += [lease] if mode != "r" else []
                taken.append((buffer, content))
        except BaseException:
            DeviceGathered(self, taken, leases).release(range(len(leases)))
            raise
        return DeviceGathered(self, taken, leases)

    def gather_ahead(self, key: str) -> bool:
        """Begin to copy the bytes of ``key`` in where they are in DRAM and there is room; return whether they come."""
        if self.memory.has(self._content(key)):
            return True
        self.copies.sweep()
        if not self.copies.is_in_dram(key):
            return False
        lease = self.lease(key, "r")
        content = self._content(key)
        buffer = None
        try:
            buffer = self.memory.take(lease.tensor.nbytes, sooner=content)
        except torch.OutOfMemoryError:  # whoever needs the bytes will say so
            pass
        finally:
            if buffer is None:
                lease.release()
        if buffer is None:
            return False
        self._fill(buffer, lease, self.copies.stream_ahead)
        self.copies.let_go(buffer, lease)
        self.memory.give(buffer, content)
        return True

    def _copy_in(self, lease: Lease, *, is_owned: bool) -> DeviceBuffer:
        """Copy the bytes of ``lease`` into a new buffer; with ``is_owned`` it ends with the copy. Failing ends it."""
        try:
            buffer = self.take(lease.tensor.nbytes)
        except BaseException:
            lease.release()
            raise
        self._fill(buffer, lease)
        if is_owned:
            self.copies.let_go(buffer, lease)
        return buffer

    def _fill(self, buffer: DeviceBuffer, lease: Lease, ahead: torch.Stream | None = None) -> None:
        """Copy the bytes of ``lease`` into ``buffer``; where that fails, both are given back."""
        try:
            self.copies.fill(buffer, lease, ahead)
        except BaseException:
            self.memory.give(buffer)
            lease.release()
            raise

    def take(self, nbytes: int) -> DeviceBuffer:
        """Take a buffer of ``nbytes``, with others given back for it if need be. CapacityError."""
        self.copies.sweep()
        try:
            while (buffer := self.memory.take(nbytes)) is None:
                if not self._give_back():
                    raise self.memory.explain(nbytes)
        except torch.OutOfMemoryError as error:
            self.note_dials(error, f"tiered's buffer of {format_bytes(nbytes)}")
            raise
        return buffer

    # -- gradients, numbers, activations -------------------------------------------------------------------------

    def new_gradients(self, key: str, nbytes: int) -> DeviceGradients:
        return DeviceGradients(self, self.take(nbytes), key)

    def gradients(self, key: str, mode: str) -> DeviceGradients:
        return DeviceGradients(self, self._copy_in(self.lease(key, "r"), is_owned=True), key)

    @contextmanager
    def scratch(self, nbytes: int) -> Iterator[torch.Tensor]:
        buffer = self.take(nbytes)
        try:
            buffer.use(self.copies.current_stream())
            yield buffer.tensor
        finally:
            self.memory.give(buffer)

    def on_host(self, value: torch.Tensor) -> Callable[[], torch.Tensor]:
        return self.copies.on_host(value)

    def free_nbytes(self) -> int:
        return free_device_memory(self.device) - (self.memory.budget_bytes - self.memory.allocated_bytes)

    def refuse_capture(self, what: str) -> None:
        if is_capturing(self.device):
            raise UsageError(
                f"{what} of a sharded model while its stream is captured, as torch.cuda.graph and torch.compile(mode="
                "'reduce-overhead') do: a graph has fixed places in memory, and parameters come and go; expected no"
                " capture around a sharded model, and mode='default' of torch.compile"
            )

    def note_copy_out(self, nbytes: int) -> None:
        self.copies.out_bytes += nbytes

    def left_bytes(self) -> int:
        return self.memory.left_bytes()

    def note_dials(self, error: BaseException, what: str) -> str:
        return note_dials(error, what, self.memories)

    def put(self, tensor: torch.Tensor, key: str, shift: int) -> None:
        self.copies.put(tensor, self.lease(key, "w"), shift, may_change=_may_change_unseen(tensor))

    def was_changed(self, key: str) -> bool:
        return self.copies.was_changed(key)

    def get(self, key: str) -> torch.Tensor:
        """Copy the bytes of ``key`` to new memory of torch's allocator, outside of the budget; blocks on a swap in."""
        lease = self.lease(key, "r")
        nbytes = lease.tensor.nbytes
        try:
            return self.copies.get(lease)
        except torch.OutOfMemoryError as error:
            self.note_dials(error, f"{format_bytes(nbytes)} of swapped activations")
            raise

    # -- DRAM ----------------------------------------------------------------------------------------------------

    def lease(self, key: str, mode: str) -> Lease:
        return self.copies.lease(key, mode)

    def lease_for_update(self, keys: Sequence[str]) -> list[Lease]:
        for key in keys:
            self.copies.settle(key)
        return self._working_set.lease_for_update(keys)

    def settle(self, key: str) -> None:
        self.copies.settle(key)

    def settle_one(self) -> bool:
        return self.copies.settle_one()

    def forget(self) -> None:
        self.copies.settle_all()
        self.memory.close()


def is_capturing(device: torch.device) -> bool:
    """Return whether the current stream of ``device`` is being captured; CUDA's alone tell."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _may_change_unseen(tensor: torch.Tensor) -> bool:
    """Return whether an operation may write the storage of ``tensor`` and leave its version as it was.

    Batch norm does so with its running statistics: floating numbers that need no gradient.
    """
    is_whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return not is_whole or (tensor.is_floating_point() and not tensor.requires_grad)


# -- update place ------------------------------------------------------------------------------------------------------


class DevicePlace(UpdatePlace):
    """Updates on the compute device, on a stream of their own, in ``memory`` of their own."""

    computes_in_dram = False
    _tier: AcceleratorTier

    def __init__(self, tier: AcceleratorTier, budget_bytes: int) -> None:
        """``budget_bytes``: of the device's memory, for one unit, its gradients, 3 buckets and the tile scratch."""
        super().__init__(tier, tier._working_set)
        self.device = tier.device
        self.stream = torch.Stream(device=tier.device)
        self._stream_in = torch.Stream(device=tier.device)
        self.memory = DeviceMemory(tier.device, budget_bytes, tier.memory.stream, lambda _: 0)
        tier.copies.clock.name(self.stream, UPDATE)
        tier.copies.clock.name(self._stream_in, COPY_TO_UPDATE)
        self._brought: dict[Lease, DeviceBuffer] = {}
        self._kept: list[DeviceBuffer] = []

    @contextmanager
    def computing(self) -> Iterator[None]:
        with on_stream(self.stream):
            try:
                yield
            except torch.OutOfMemoryError as error:
                self._tier.note_dials(error, "an update")
                raise

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
        """Copy the bytes back; each lease ends with its copy, also where another's copy fails."""
        with ExitStack() as each:
            for lease in leases:
                each.callback(self._put_back, lease)

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

    def keep(self, nbytes: int) -> torch.Tensor:
        """Return (nbytes,) uint8 for this place's stream, until ``close``. Raises CapacityError."""
        buffer = self.memory.take(nbytes)
        if buffer is None:
            raise self.memory.explain(nbytes)
        buffer.use(self.stream)
        self._kept.append(buffer)
        return buffer.tensor

    def close(self) -> None:
        """Give all memory back, once no tensor lies in it."""
        while self._kept:
            self.memory.give(self._kept.pop())
        self.memory.close()

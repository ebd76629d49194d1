"""AcceleratorTier: bytes between DRAM and a compute device of its own memory, on two streams beside the caller's.

Only bytes are copied here: casts, norms and sums are the caller's, on the compute device. The training thread submits
copies and never waits for one; who needs the bytes in DRAM waits for the copy of that key alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import NamedTuple

import torch

from tiered.bytes.interrupt import uninterrupted_block
from tiered.errors import DeadlineError
from tiered.store.records.entry import EntryState
from tiered.store.residency.working_set import Lease, WorkingSet
from tiered.tiers.device_memory import Content, DeviceBuffer, DeviceMemory
from tiered.tiers.device_tier import bytes_of

__all__ = ["AcceleratorTier"]

_SHORTEST_S, _LONGEST_S = 20e-6, 1e-3  # between two looks at an event


class _Copy(NamedTuple):
    """A copy in flight: the lease of its bytes in DRAM is the copy's until ``event``."""

    event: torch.Event
    lease: Lease
    is_out: bool
    source: torch.Tensor | None  # that must live as long, None where a buffer's own events see to that


class DeviceGathered:
    """Spans that were copied to the compute device; with a lease for writing they are copied back at the end."""

    def __init__(
        self,
        tier: AcceleratorTier,
        buffers: Sequence[DeviceBuffer],
        contents: Sequence[Content | None],
        leases: Sequence[Lease],
    ) -> None:
        self.tensors = [buffer.tensor for buffer in buffers]
        self.leases = tuple(leases)
        self._tier = tier
        self._buffers = tuple(buffers)
        self._contents = tuple(contents)

    def use(self) -> None:
        """The caller's stream waits for the copies, where it has not yet."""
        stream = self._tier.current_stream()
        for buffer in self._buffers:
            buffer.use(stream)

    def is_there(self, span: int) -> bool:
        """Return whether a tensor that lies in the buffer lives."""
        return self._buffers[span].is_aliased

    def write_back(self) -> None:
        """Copy the buffers to the leased bytes; blocks until they are there."""
        for buffer, lease in zip(self._buffers, self.leases, strict=True):
            self._tier.write(buffer, lease)

    def release(self, unchanged: Collection[int]) -> None:
        """Give the buffers and leases back; all uses must have been submitted."""
        self.tensors = []
        self._tier.rest(self._buffers, self._contents)
        for number, lease in enumerate(self.leases):
            lease.release(is_unchanged=number in unchanged)


class DeviceGradients:
    """Gradients of one unit on the compute device; those of ``key`` in DRAM are older, if there are any."""

    lease = None

    def __init__(self, tier: AcceleratorTier, buffer: DeviceBuffer, key: str) -> None:
        self._tier = tier
        self._buffer = buffer
        self._key = key

    @property
    def tensor(self) -> torch.Tensor:
        """(nbytes,) uint8 on the device."""
        return self._buffer.tensor

    def use(self) -> None:
        """The caller's stream waits until the bytes are there and earlier uses have ended."""
        self._buffer.use(self._tier.current_stream())

    def release(self) -> None:
        """Give the buffer back, for what was only read."""
        self._tier.rest([self._buffer], [None])

    def store(self) -> None:
        """Copy the bytes to DRAM and give the buffer back; blocks where DRAM is short."""
        self._tier.store(self._buffer, self._key)

    def discard(self) -> bool:
        """Give the buffer back and delete the key."""
        self.release()
        self._tier.delete(self._key)
        return True


class AcceleratorTier:
    """The compute device of one model.

    Invariants: *bytes in DRAM that a copy reads or writes are leased until its event has come*; a stream of the
    caller's waits for the copy of the bytes that it is about to use, a copy out for the streams that made its bytes,
    and a copy into a buffer for all that used the buffer before. Thread-safe.
    """

    keeps_gradients = False

    def __init__(self, working_set: WorkingSet, device: torch.device, budget_bytes: int, *, deadline_s: float) -> None:
        """``device``: with its index; ``budget_bytes``: most that buffers take of its memory."""
        self.device = device
        self.copied_in_bytes = 0
        self.copied_out_bytes = 0
        self._distance: Callable[[str], int] = lambda key: 0
        self._give_back: Callable[[], bool] = lambda: False
        self._working_set = working_set
        self._deadline_s = deadline_s
        self._in = torch.Stream(device=device)
        self._out = torch.Stream(device=device)
        self.memory = DeviceMemory(device, budget_bytes, self._in, self._distance_of)
        self._lock = threading.Lock()
        self._in_flight: dict[str, list[_Copy]] = {}  # by key, oldest first

    def __repr__(self) -> str:
        return f"AcceleratorTier({self.device}, {self.memory!r}, {len(self._in_flight)} keys in flight)"

    def attach(self, distance: Callable[[str], int], give_back: Callable[[], bool]) -> None:
        """``distance(key)``: after how many uses it comes next; ``give_back()``: some buffer, if the caller can."""
        self._distance, self._give_back = distance, give_back

    def _distance_of(self, content: Content) -> int:
        return self._distance(content.key)

    def current_stream(self) -> torch.Stream:
        """Return the caller's stream. Never called inside of this tier's own streams."""
        return torch.accelerator.current_stream(self.device)

    # -- parameters ----------------------------------------------------------------------------------------------

    def gather(self, keys: Sequence[str], version: Hashable, mode: str) -> DeviceGathered:
        """Copy the bytes of ``keys`` in, but those that are there already in this ``version``. Blocks on a swap in."""
        contents = [Content(key, version) if mode == "r" else None for key in keys]
        buffers: list[DeviceBuffer] = []
        leases: list[Lease] = []
        try:
            for key, content in zip(keys, contents, strict=True):
                buffer = None if content is None else self.memory.find(content)
                if buffer is None:
                    lease = self.lease(key, mode)
                    leases += [lease] if mode != "r" else []
                    buffer = self._copy_in(lease, is_owned=mode == "r")
                buffers.append(buffer)
        except BaseException:
            self.rest(buffers, [None for _ in buffers])
            for lease in leases:
                self.settle(lease.key)
                lease.release(is_unchanged=True)
            raise
        return DeviceGathered(self, buffers, contents, leases)

    def gather_ahead(self, key: str, version: Hashable) -> bool:
        """Begin to copy the bytes of ``key`` in where they are in DRAM and there is room; return whether they come."""
        content = Content(key, version)
        if self.memory.has(content):
            return True
        nbytes = self._in_dram(key)
        buffer = self.memory.take(nbytes, sooner=content) if nbytes else None
        if buffer is None:
            return False
        lease = self.lease(key, "r")
        self._fill(buffer, lease, is_owned=True)
        self.memory.give(buffer, content)
        return True

    def write(self, buffer: DeviceBuffer, lease: Lease) -> None:
        """Copy ``buffer`` to the bytes of ``lease``, which stays the caller's; blocks until they are there."""
        self._wait(self._copy_out(buffer, lease.tensor), f"copy out of {lease.key!r}")

    def outdate(self, keys: Sequence[str]) -> None:
        """The bytes of ``keys`` have changed in DRAM."""
        for key in keys:
            self.memory.forget(key)

    def rest(self, buffers: Sequence[DeviceBuffer], contents: Sequence[Content | None]) -> None:
        """Give ``buffers`` back, all uses submitted; ``contents``: what is in each, None where it is of no use."""
        for buffer, content in zip(buffers, contents, strict=True):
            buffer.rest()
            self.memory.give(buffer, content)

    # -- gradients -----------------------------------------------------------------------------------------------

    def new_gradients(self, key: str, nbytes: int) -> DeviceGradients:
        """Return a buffer whose bytes are undefined. Raises CapacityError."""
        return DeviceGradients(self, self._take(nbytes), key)

    def gradients(self, key: str, mode: str) -> DeviceGradients:
        """Copy the bytes of ``key`` into a buffer; blocks on a swap in. Raises CapacityError."""
        return DeviceGradients(self, self._copy_in(self.lease(key, "r"), is_owned=True), key)

    def store(self, buffer: DeviceBuffer, key: str) -> None:
        """Have the bytes of ``buffer``, which is given back, be those of ``key`` in DRAM; blocks where it is short."""
        lease = self.lease(key, "w")
        event = self._copy_out(buffer, lease.tensor)
        self._note(event, lease, is_out=True)
        self.rest([buffer], [None])

    def delete(self, key: str) -> None:
        """Delete ``key`` once no copy uses its bytes; blocks."""
        self.settle(key)
        self._working_set.delete([key])

    @uninterrupted_block
    def scratch(self, nbytes: int) -> Iterator[torch.Tensor]:
        """Lend (nbytes,) uint8 of the device's budget. Raises CapacityError."""
        buffer = self._take(nbytes)
        try:
            buffer.use(self.current_stream())
            yield buffer.tensor
        finally:
            self.rest([buffer], [None])

    def on_host(self, value: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Copy ``value`` to page-locked memory of its own."""
        made = self.current_stream().record_event()
        self._out.wait_event(made)
        copy = torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=True)
        with self._out:
            copy.copy_(value, non_blocking=True)
        event = self._out.record_event()

        def wait() -> torch.Tensor:
            self._wait(event, f"copy of a number, {value.shape}")  # Lifetime: the value lives until then
            return copy

        return wait

    # -- activations ---------------------------------------------------------------------------------------------

    def free_nbytes(self) -> int:
        """Return the free bytes of the device, less those of the budget that were not taken yet."""
        free, _ = torch.accelerator.get_memory_info(self.device)
        return int(free) - (self.memory.budget_bytes - self.memory.allocated_bytes)

    def put(self, storage: torch.UntypedStorage, key: str, shift: int) -> None:
        """Copy the bytes of ``storage``, which stay alive until then, to ``key``; blocks where DRAM is short."""
        self.sweep()
        lease = self.lease(key, "w")
        source = bytes_of(storage)
        self._out.wait_event(self.current_stream().record_event())
        with self._out, torch.no_grad():
            lease.tensor[shift:].copy_(source, non_blocking=True)
        self.copied_out_bytes += source.nbytes
        self._note(self._out.record_event(), lease, is_out=True, source=source)

    def get(self, key: str) -> torch.Tensor:
        """Copy the bytes of ``key`` to new memory of torch's allocator, outside of the budget; blocks on a swap in."""
        self.sweep()
        lease = self.lease(key, "r")
        stream = self.current_stream()
        flat = torch.empty(lease.tensor.nbytes, dtype=torch.uint8, device=self.device)
        self._in.wait_event(stream.record_event())  # order: the memory was another tensor's on that stream
        with self._in:
            flat.copy_(lease.tensor, non_blocking=True)
        event = self._in.record_event()
        stream.wait_event(event)
        self.copied_in_bytes += flat.nbytes
        self._note(event, lease, is_out=False)
        return flat

    # -- DRAM ----------------------------------------------------------------------------------------------------

    def lease(self, key: str, mode: str) -> Lease:
        """Lease the bytes of ``key`` in DRAM once no copy uses them; blocks."""
        self.settle(key, reads=mode != "r")
        return self._working_set.lease(key, mode)

    def settle(self, key: str, *, reads: bool = True) -> None:
        """Wait for the copies of the bytes of ``key``, those that only read them with ``reads``. DeadlineError."""
        for copy in list(self._in_flight.get(key, ())):
            if reads or copy.is_out:
                self._wait(copy.event, f"copy {'out' if copy.is_out else 'in'} of {key!r}")
        if key in self._in_flight:
            self.sweep()

    def settle_all(self) -> None:
        """Wait for all copies in flight. DeadlineError."""
        for key in list(self._in_flight):
            self.settle(key)

    def settle_one(self) -> bool:
        """For a caller that waits for DRAM: wait for the copy submitted first; return whether there was one."""
        key = next(iter(self._in_flight), None)
        if key is None:
            return False
        self.settle(key)
        return True

    def sweep(self) -> None:
        """Give the leases back whose copies have ended."""
        ended: list[_Copy] = []
        with self._lock:
            for key, copies in list(self._in_flight.items()):
                while copies and copies[0].event.query():
                    ended.append(copies.pop(0))
                if not copies:
                    del self._in_flight[key]
        for copy in ended:
            copy.lease.release(is_written=copy.is_out)
            if copy.is_out:
                self._working_set.swap_out([copy.lease.key])

    def forget(self) -> None:
        """All bytes may have changed in DRAM: wait for the copies in flight, and give all memory back."""
        self.settle_all()
        self.memory.forget()
        self.memory.close()

    # -- copies --------------------------------------------------------------------------------------------------

    def _in_dram(self, key: str) -> int:
        """Return the bytes of ``key`` where a lease of it need not wait, else 0."""
        with self._working_set.condition:
            entry = self._working_set.records.entries.get(key)
            is_there = entry is not None and entry.residence is not None and not entry.residence.open_writers
            if entry is None or not is_there or entry.state is EntryState.ARRIVING:
                return 0
            return entry.nbytes

    def _copy_in(self, lease: Lease, *, is_owned: bool) -> DeviceBuffer:
        """Copy the bytes of ``lease`` into a new buffer; with ``is_owned`` the lease is given back after that."""
        try:
            buffer = self._take(lease.tensor.nbytes)
        except BaseException:
            lease.release(is_unchanged=True)
            raise
        self._fill(buffer, lease, is_owned=is_owned)
        return buffer

    def _take(self, nbytes: int) -> DeviceBuffer:
        """Take a buffer of ``nbytes``, with others given back for it if need be. CapacityError."""
        self.sweep()
        while (buffer := self.memory.take(nbytes)) is None:
            if not self._give_back():
                raise self.memory.explain(nbytes)
        return buffer

    def _fill(self, buffer: DeviceBuffer, lease: Lease, *, is_owned: bool) -> None:
        buffer.begin_filling(self._in)
        with self._in:
            buffer.tensor.copy_(lease.tensor, non_blocking=True)
        event = self._in.record_event()
        buffer.filled(event)
        self.copied_in_bytes += buffer.nbytes
        if is_owned:
            self._note(event, lease, is_out=False)

    def _copy_out(self, buffer: DeviceBuffer, target: torch.Tensor) -> torch.Event:
        buffer.use(self._out)
        buffer.let_wait(self._out)
        with self._out:
            target.copy_(buffer.tensor, non_blocking=True)
        self.copied_out_bytes += buffer.nbytes
        return self._out.record_event()

    def _note(self, event: torch.Event, lease: Lease, *, is_out: bool, source: torch.Tensor | None = None) -> None:
        with self._lock:
            self._in_flight.setdefault(lease.key, []).append(_Copy(event, lease, is_out, source))

    def _wait(self, event: torch.Event, what: str) -> None:
        """Wait until ``event`` has come; in the calling thread, without torch's own wait, which has no deadline."""
        until_s, pause_s = time.monotonic() + self._deadline_s, _SHORTEST_S
        while not event.query():
            if time.monotonic() > until_s:
                raise DeadlineError(
                    f"{what} on {self.device} has not ended within {self._deadline_s:g} s; the device may hang: see its"
                    " driver's log"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_S)

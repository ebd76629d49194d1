"""DeviceMemory: tiered's buffers in compute-device memory, within one budget, kept and used again.

A buffer that nobody uses keeps its contents until its bytes are needed for something that is used sooner. So bytes that
were copied in are copied in again only where there was no room for them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from tiered.errors import CapacityError
from tiered.units import format_bytes

__all__ = ["NEVER", "Content", "DeviceBuffer", "DeviceMemory", "free_device_memory", "note_dials", "on_stream"]

NEVER = 1 << 62
"""The distance of bytes that are of no use any more."""


class on_stream:
    """A block whose operations run on ``stream``; any number of threads may be in such blocks of one stream.

    torch's own, ``with stream:``, keeps the stream that was current before in the stream object itself.
    """

    __slots__ = ("_before", "_device_before", "_stream")

    def __init__(self, stream: torch.Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        self._device_before = torch.accelerator.current_device_index()
        self._before = torch.accelerator.current_stream(self._stream.device)
        torch.accelerator.set_stream(self._stream)  # it makes the stream's device the current one as well

    def __exit__(self, *_: object) -> None:
        torch.accelerator.set_stream(self._before)
        if self._device_before != self._stream.device.index:
            torch.accelerator.set_device_index(self._device_before)


class Content(NamedTuple):
    """The bytes of a key in one of its versions."""

    key: str
    version: int  # see ``Residency.version``


class DeviceBuffer:
    """``nbytes`` of ``capacity`` bytes of compute-device memory, and the events that order its uses.

    Invariants: *a stream reads or writes it only once it has waited for the event that filled it, and whoever fills it
    waits for every stream that used it before*. ``content`` names the bytes in it; None: they are of no use.
    """

    __slots__ = ("_after", "_num_references", "_storage", "_streams", "_whole", "capacity", "content", "nbytes",
                 "ready", "tensor")  # fmt: skip

    def __init__(self, tensor: torch.Tensor) -> None:
        """``tensor``: (capacity,) uint8, new memory that belongs to the buffer."""
        self._whole = tensor
        self.capacity = tensor.nbytes
        self.resize(tensor.nbytes)
        self.content: Content | None = None
        self._storage = tensor.untyped_storage()
        self._num_references = _references_to(self._storage)
        self.ready: torch.Event | None = None
        self._streams: dict[int, torch.Stream] = {}  # that have waited for it, and may be using it
        self._after: dict[int, torch.Event] = {}  # the end of earlier uses, by stream

    def __repr__(self) -> str:
        return f"DeviceBuffer({format_bytes(self.nbytes)}, {self.content!r}, aliased={self.is_aliased})"

    def resize(self, nbytes: int) -> None:
        """Have ``tensor``, (nbytes,) uint8, be the first of the memory; no other tensor lies in it."""
        self.tensor = self._whole[:nbytes]
        self.nbytes = nbytes

    @property
    def is_aliased(self) -> bool:
        """Whether another tensor than ``tensor`` lies in this memory."""
        return _references_to(self._storage) > self._num_references

    def is_used_on(self, stream: torch.Stream) -> bool:
        """Return whether ``stream`` has waited for the bytes already."""
        return stream.stream_id in self._streams

    def use(self, stream: torch.Stream) -> None:
        """``stream`` is about to read or write the bytes: it waits until they are there."""
        number = stream.stream_id
        if number in self._streams:
            return
        if self.ready is not None:
            stream.wait_event(self.ready)
        for event in self._after.values():  # by what was filled on no stream of its own: gradients
            stream.wait_event(event)
        self._streams[number] = stream

    def begin_filling(self, stream: torch.Stream) -> None:
        """``stream`` is about to fill it: it waits for what filled it before, and the end of all uses since."""
        if self.ready is not None and not self._after:  # else those have waited for it
            stream.wait_event(self.ready)
        for event in self._after.values():
            stream.wait_event(event)

    def filled(self, ready: torch.Event) -> None:
        """The bytes are there after ``ready``."""
        self.ready = ready
        self._after.clear()

    def let_wait(self, stream: torch.Stream) -> None:
        """``stream`` is about to read what other streams have written, all of it submitted by now."""
        for number, other in self._streams.items():
            if number != stream.stream_id:
                stream.wait_event(other.record_event())

    def free(self) -> None:
        """Let go of the memory; the buffer is of no use any more."""
        self._whole = self.tensor = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._storage = self.tensor.untyped_storage()

    def used_on(self) -> tuple[torch.Stream, ...]:
        """Return the streams that have used it since it was filled, or had rest."""
        return tuple(self._streams.values())

    def hand_over(self) -> None:
        """All uses so far were submitted: whoever uses it next waits for their ends as they are now."""
        for number, stream in self._streams.items():
            self._after[number] = stream.record_event(self._after.get(number))
        if not self.is_aliased:  # else a stream may use it again, through a tensor of the caller's
            self._streams.clear()

    def rest(self, more: Sequence[torch.Stream] = ()) -> None:
        """All uses were submitted: note the ends of those on the streams that used it, and on ``more``."""
        self._streams.update((stream.stream_id, stream) for stream in more)
        for number, stream in self._streams.items():
            self._after[number] = stream.record_event(self._after.get(number))
        self._streams.clear()


class DeviceMemory:
    """At most ``budget_bytes`` of buffers. Thread-safe.

    Buffers have few sizes, ``capacities``, and serve for that and for half of it: torch's allocator makes buffers out
    of one piece, in which the gaps between buffers of any size would be too short for the next. A buffer that was given
    back under a living tensor waits until that has died, and goes back to torch's allocator then: only that knows on
    which streams the caller has used the tensor, by ``record_stream``.
    """

    def __init__(
        self, device: torch.device, budget_bytes: int, stream: torch.Stream, distance: Callable[[Content], int]
    ) -> None:
        """``stream`` has no work: torch keeps a pool for each. ``distance(content)``: uses until that, or NEVER."""
        self.device = device
        self.budget_bytes = budget_bytes
        self.peak_bytes = 0
        self.allocated_bytes = 0
        self.capacities: list[int] = []  # of new buffers, in bytes, ascending; a larger buffer has its own
        self._unused_bytes = 0  # the ends of the buffers in use
        self.stream = stream
        self._distance = distance
        self._lock = threading.Lock()
        self._idle: dict[DeviceBuffer, None] = {}
        # Given back; those under living tensors with the streams that used them, whose later work may use them yet.
        self._lingering: dict[DeviceBuffer, tuple[torch.Stream, ...] | None] = {}
        self._by_content: dict[Content, DeviceBuffer] = {}

    def __repr__(self) -> str:
        return f"DeviceMemory({format_bytes(self.allocated_bytes)} of {format_bytes(self.budget_bytes)})"

    def find(self, content: Content) -> DeviceBuffer | None:
        """Take the idle buffer that has ``content``, if one has."""
        with self._lock:
            buffer = self._by_content.pop(content, None)
            if buffer is not None:
                del self._idle[buffer]
                self._unused_bytes += buffer.capacity - buffer.nbytes
            return buffer

    def has(self, content: Content) -> bool:
        """Return whether an idle buffer has ``content``."""
        with self._lock:
            return content in self._by_content

    def take(self, nbytes: int, *, sooner: Content | None = None) -> DeviceBuffer | None:
        """Take a buffer of ``nbytes``, whose contents are undefined; None where no room can be made.

        ``sooner``: the content that it is for, ahead of need: others make way only if they are used later.
        """
        with self._lock:
            self._sweep()
            limit = -1 if sooner is None else self._distance(sooner)
            others = sorted(self._idle, key=self._use_of)  # those used last at the end
            capacity = self.capacity_of(nbytes)
            fits = [buffer for buffer in others if nbytes <= buffer.capacity <= 2 * capacity]
            best = max(fits, key=lambda buffer: (self._use_of(buffer), -buffer.capacity), default=None)
            if best is not None and self._use_of(best) == NEVER:
                return self._take(best, nbytes)
            if self.allocated_bytes + capacity <= self.budget_bytes:
                return self._allocate(nbytes, capacity)
            if best is not None and self._use_of(best) > limit:
                return self._take(best, nbytes)
            while others and self._use_of(others[-1]) > limit and self.allocated_bytes + capacity > self.budget_bytes:
                self._drop(others.pop())
            left = self.budget_bytes - self.allocated_bytes
            if sooner is None and capacity > left:  # or the smallest budget would not do for all sizes
                capacity, left = nbytes, left + self._unused_bytes
            return self._allocate(nbytes, capacity) if capacity <= left else None

    def give(self, buffer: DeviceBuffer, content: Content | None = None) -> None:
        """Give ``buffer`` back, all uses of it submitted, with ``content``; a later ``find`` may have it again."""
        with self._lock:
            streams = buffer.used_on()
            self._unused_bytes -= buffer.capacity - buffer.nbytes
            buffer.rest()
            buffer.content = content
            self._lingering[buffer] = streams if buffer.is_aliased else None
            self._sweep()

    def capacity_of(self, nbytes: int) -> int:
        """Return the size of the buffer that ``nbytes`` are put into."""
        return next((capacity for capacity in self.capacities if capacity >= nbytes), nbytes)

    def left_bytes(self) -> int:
        """Return the bytes of the budget that no buffer in use has."""
        with self._lock:
            self._sweep()
            idle = sum(buffer.capacity for buffer in self._idle)
            return self.budget_bytes - self.allocated_bytes + idle

    def forget(self) -> None:
        """Idle bytes are of no use any more."""
        with self._lock:
            while self._by_content:
                self._by_content.popitem()[1].content = None

    def reserve(self, nbytes: int) -> None:
        """Have torch's allocator take ``nbytes`` from the device in one piece, and make the buffers out of that.

        Each buffer would else be rounded up to pieces of its own, of 2 to 20 MiB: up to a third more in all.
        """
        with contextlib.suppress(torch.OutOfMemoryError), on_stream(self.stream):  # whoever needs it will say so
            torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def give_up(self, nbytes: int) -> None:
        """Take ``nbytes`` off the budget for good; idle buffers without room in the rest go, those used last first."""
        with self._lock:
            self._sweep()
            self.budget_bytes -= nbytes
            others = sorted(self._idle, key=self._use_of)
            while others and self.allocated_bytes > self.budget_bytes:
                self._drop(others.pop())

    def close(self) -> None:
        """Give the idle memory back to torch's allocator."""
        with self._lock:
            for buffer in list(self._idle):
                self._drop(buffer)

    # Below: under the lock

    def _use_of(self, buffer: DeviceBuffer) -> int:
        return NEVER if buffer.content is None else self._distance(buffer.content)

    def _take(self, buffer: DeviceBuffer, nbytes: int) -> DeviceBuffer:
        del self._idle[buffer]
        if buffer.content is not None:
            del self._by_content[buffer.content]
            buffer.content = None
        buffer.resize(nbytes)
        self._unused_bytes += buffer.capacity - nbytes
        return buffer

    def _allocate(self, nbytes: int, capacity: int) -> DeviceBuffer:
        with on_stream(self.stream):  # order: the next user of this memory, once dropped, comes after this stream
            buffer = DeviceBuffer(torch.empty(capacity, dtype=torch.uint8, device=self.device))
        buffer.filled(self.stream.record_event())  # order: on this stream it comes after the memory's last user
        self.allocated_bytes += capacity
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
        buffer.resize(nbytes)
        self._unused_bytes += capacity - nbytes
        return buffer

    def _drop(self, buffer: DeviceBuffer) -> None:
        self._free(self._take(buffer, buffer.capacity))

    def _free(self, buffer: DeviceBuffer) -> None:
        buffer.begin_filling(self.stream)
        self.allocated_bytes -= buffer.capacity
        buffer.free()

    def _sweep(self) -> None:
        for buffer in [buffer for buffer in self._lingering if not buffer.is_aliased]:
            streams = self._lingering.pop(buffer)
            if streams is not None:
                buffer.rest(streams)
                self._free(buffer)
                continue
            other = self._by_content.pop(buffer.content, None) if buffer.content is not None else None
            if other is not None:
                other.content = None
            self._idle[buffer] = None
            if buffer.content is not None:
                self._by_content[buffer.content] = buffer

    def explain(self, nbytes: int) -> CapacityError:
        """Return the error of a caller that found no room for ``nbytes``."""
        with self._lock:
            kept = sum(buffer.capacity for buffer in self._lingering)
            return CapacityError(
                f"no room for {format_bytes(nbytes)} on {self.device}: of the budget of"
                f" {format_bytes(self.budget_bytes)}, {format_bytes(self.allocated_bytes - kept)} are in use and"
                f" {format_bytes(kept)} kept alive by tensors of a forward that has ended; clone() what is kept, or"
                " give the store a larger device_memory="
            )


def free_device_memory(device: torch.device) -> int:
    """Return the bytes that torch can still give on ``device``: the driver's, and those that its allocator keeps."""
    free, _ = torch.accelerator.get_memory_info(device)
    kept = torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
    return int(free) + int(kept)


def note_dials(error: BaseException, what: str, memories: Sequence[DeviceMemory]) -> str:
    """Have a torch.OutOfMemoryError, met in ``what``, name the budget of ``memories`` and the user's dials.

    These words, which are returned, are a note of the error. An error that has them keeps them. "" for other errors.
    """
    if not isinstance(error, torch.OutOfMemoryError):
        return ""
    known = next((note for note in getattr(error, "__notes__", ()) if note.startswith(_NOTE)), "")
    if not known:
        known = f"{_NOTE} {what}. {_describe(memories)} {_DIALS}"
        error.add_note(known)
    return str(known)


def _describe(memories: Sequence[DeviceMemory]) -> str:
    device = memories[0].device
    budget, used, peak = (
        format_bytes(sum(getattr(memory, name) for memory in memories))
        for name in ("budget_bytes", "allocated_bytes", "peak_bytes")
    )
    free, total = (format_bytes(nbytes) for nbytes in torch.accelerator.get_memory_info(device))
    return (
        f"Of the budget device_memory= of {budget} on {device}, tiered has {used} (at most so far {peak}). The device"
        f" has {free} free of {total}; torch's allocator keeps"
        f" {format_bytes(torch.accelerator.memory_reserved(device))} and uses"
        f" {format_bytes(torch.accelerator.memory_allocated(device))} of it."
    )


_NOTE = "tiered: compute-device memory ran out in"
_DIALS = (
    'Expected one of: a smaller batch; tiered.shard(..., activations="recompute") or "swap"; a smaller device_memory=,'
    ' which leaves the activations more; update_on="cpu"'
)
_references_to_cdata: Callable[[int], int] = torch._C._storage_Use_Count


def _references_to(storage: torch.UntypedStorage) -> int:
    return _references_to_cdata(storage._cdata)

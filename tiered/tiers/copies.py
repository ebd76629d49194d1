"""Copies: bytes on their way between DRAM and a compute device, on streams beside the caller's.

Only bytes are copied: casts, norms and sums are the caller's, on the compute device. A copy is waited for
by the caller that needs its bytes in DRAM, and by no other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from tiered.bytes.host_tensor import copy_across
from tiered.errors import DeadlineError
from tiered.store.residency.residency import Lease, Residency
from tiered.store.waiting.recorder import Wait
from tiered.tiers.compute_tier import bytes_of
from tiered.tiers.device_clock import COMPUTE, COPY_AHEAD, COPY_IN, COPY_OUT, DeviceClock
from tiered.tiers.device_memory import DeviceBuffer, on_stream
from tiered.units import MiB

__all__ = ["Copies", "HostBytes"]

MOST_LEAVING_NBYTES = 512 * MiB
"""Of the caller's tensors in copies out at one time, 20 ms of PCIe: till then they keep their device memory."""

AHEAD_NBYTES = 16 * MiB
"""Of one piece of a copy ahead of need, 0.6 ms of PCIe: a device takes the copies of its streams in turns."""

_WHOLE = 1 << 62
_SHORTEST_S, _LONGEST_S = 20e-6, 100e-6  # between two looks at an event; a late one delays an update of a unit


class _Copy(NamedTuple):
    """A copy in flight: the lease of its bytes in DRAM is the copy's until ``event``."""

    event: torch.Event
    lease: Lease
    is_out: bool
    source: torch.Tensor | None = None  # that must live as long; None where a buffer's own events see to that
    version: int = 0  # of ``source`` as it was submitted
    nbytes: int = 0  # of ``source``'s storage; the lease may have ended, in another thread


class Bytes(Protocol):
    """Bytes in DRAM, (nbytes,) uint8, and the name of their key."""

    @property
    def key(self) -> str: ...

    @property
    def tensor(self) -> torch.Tensor: ...


class HostBytes(NamedTuple):
    """Bytes in page-locked DRAM that are the caller's, and no key's."""

    key: str
    tensor: torch.Tensor


class Copies:
    """The copies of one model to ``device`` and back. Thread-safe.

    Invariants: *bytes in DRAM that a copy reads or writes are leased until its event has come*; a copy out comes after
    all operations that made its bytes, a copy into a buffer after all that used the buffer before. A copy in that is
    needed now comes after no copy ahead of need: those are on streams of their own.
    """

    def __init__(self, working_set: Residency, device: torch.device, *, deadline_s: float) -> None:
        working_set.arena.lock_pages(device)
        self.device = device
        self.in_bytes = 0  # copied in so far
        self.out_bytes = 0
        self.stream_in = torch.Stream(device=device)
        self.stream_ahead = torch.Stream(device=device)
        self.stream_out = torch.Stream(device=device)
        self.clock = DeviceClock(device, working_set.recorder)
        self.clock.name(self.stream_in, COPY_IN)
        self.clock.name(self.stream_ahead, COPY_AHEAD)
        self.clock.name(self.stream_out, COPY_OUT)
        self._working_set = working_set
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._sweeping = threading.RLock()  # until the leases of copies that have ended are given back
        self._in_flight: dict[str, list[_Copy]] = {}  # by key, oldest first
        self._leaving: list[_Copy] = []  # of the caller's tensors, oldest first
        self._changed: set[str] = set()  # keys whose source was written while it was copied

    def __repr__(self) -> str:
        return f"Copies({self.device}, {len(self._in_flight)} keys in flight)"

    def current_stream(self) -> torch.Stream:
        """Return the caller's stream. Never called inside of these streams."""
        return torch.accelerator.current_stream(self.device)

    def let_use(self, buffer: DeviceBuffer, stream: torch.Stream) -> None:
        """Have ``stream``, the caller's, wait until the bytes of ``buffer`` are there."""
        if not buffer.is_used_on(stream):
            begun = self.clock.mark_on(stream, COMPUTE)
            buffer.use(stream)
            self.clock.note_on(stream, f"wait: {Wait.COPY}", "", begun)

    # -- buffers -------------------------------------------------------------------------------------------------

    def fill(
        self,
        buffer: DeviceBuffer,
        lease: Bytes,
        ahead: torch.Stream | None = None,
        *,
        part: torch.Tensor | None = None,
    ) -> None:
        """Copy the bytes of ``lease`` into ``buffer``; the lease must last until ``let_go``, or ``empty``.

        ``ahead``: the stream of copies that the caller's streams do not need yet. ``part``: the part of the buffer that
        they are. Where the copy fails, both are the caller's still, and no piece of it is under way.
        """
        target = buffer.tensor if part is None else part
        stream = ahead or self.stream_in
        buffer.begin_filling(stream)
        try:
            with on_stream(stream):
                self._copy(target, lease.tensor, lease.key, most_nbytes=AHEAD_NBYTES if ahead else _WHOLE)
        except BaseException:
            self._wait(stream.record_event(), f"part of a copy in of {lease.key!r}")
            raise
        buffer.filled(stream.record_event())
        self.in_bytes += target.nbytes

    def let_go(self, buffer: DeviceBuffer, lease: Lease) -> None:
        """Give ``lease`` back once the copy of its bytes that fills ``buffer`` has ended."""
        assert buffer.ready is not None
        self._note(_Copy(buffer.ready, lease, False))

    def wait_for(self, buffer: DeviceBuffer, name: str) -> None:
        """Wait for the copy of the bytes called ``name``, which the caller has, into ``buffer``. DeadlineError."""
        assert buffer.ready is not None
        self._wait(buffer.ready, f"copy in of {name!r}")

    def empty(self, buffer: DeviceBuffer, lease: Lease) -> None:
        """Copy ``buffer`` to the bytes of ``lease``, which is given back when they are there, or where that fails."""
        try:
            event = self._copy_out(buffer, lease)
        except BaseException:
            lease.release()
            raise
        self._note(_Copy(event, lease, True))

    def write(self, buffer: DeviceBuffer, lease: Bytes, part: torch.Tensor | None = None) -> None:
        """Copy ``buffer``, or a ``part`` of it, to the bytes of ``lease``, the caller's; blocks."""
        self._wait(self._copy_out(buffer, lease, part), f"copy out of {lease.key!r}")

    def _copy_out(self, buffer: DeviceBuffer, lease: Bytes, part: torch.Tensor | None = None) -> torch.Event:
        source = buffer.tensor if part is None else part
        buffer.use(self.stream_out)
        buffer.let_wait(self.stream_out)
        with on_stream(self.stream_out):
            self._copy(lease.tensor, source, lease.key)
        self.out_bytes += source.nbytes
        return self.stream_out.record_event()

    def _copy(self, target: torch.Tensor, source: torch.Tensor, key: str, *, most_nbytes: int = _WHOLE) -> None:
        """Copy bytes of ``key``, (nbytes,) uint8 each and one of them in DRAM, on the stream that is current.

        In pieces of ``most_nbytes`` at most.
        """
        begun = self.clock.mark()
        assert begun is not None
        for at in range(0, target.nbytes, most_nbytes):
            copy_across(target[at : at + most_nbytes], source[at : at + most_nbytes], non_blocking=True)
        self.clock.note("copy out" if target.is_cpu else "copy in", key, begun, nbytes=target.nbytes)

    # -- tensors of the caller's ---------------------------------------------------------------------------------

    def put(self, tensor: torch.Tensor, lease: Lease, shift: int, *, may_change: bool) -> None:
        """Copy the storage of ``tensor`` to the bytes of ``lease`` from ``shift`` on; both live until that has ended.

        ``may_change``: operations that torch counts no version for may write it, so the caller's stream waits for the
        copy. Where others do while it runs, ``was_changed(key)`` says so. Blocks where too much is on its way: a thread
        that runs ahead of the device would allocate what the copies are about to free.
        """
        source, stream = bytes_of(tensor.untyped_storage()), self.current_stream()
        self.stream_out.wait_event(stream.record_event())
        try:
            self._let_leave(source.nbytes)
            with on_stream(self.stream_out), torch.no_grad():
                self._copy(lease.tensor[shift:], source, lease.key)
        except BaseException:
            lease.release()
            raise
        self.out_bytes += source.nbytes
        event = self.stream_out.record_event()
        if may_change:
            stream.wait_event(event)  # order: what follows may write in place, as batch norm does its buffers
        self._changed.discard(lease.key)
        kept = source if may_change else tensor.detach()  # whose version tells of a write; a later one does no harm
        copy = _Copy(event, lease, True, kept, kept._version, source.nbytes)
        with self._lock:
            self._leaving.append(copy)
        self._note(copy)

    def _let_leave(self, nbytes: int) -> None:
        """Wait until no more than the limit is on its way out with ``nbytes`` more. DeadlineError."""
        while True:
            with self._lock:
                leaving = list(self._leaving)
            if not leaving or nbytes + sum(copy.nbytes for copy in leaving) <= MOST_LEAVING_NBYTES:
                return
            self._wait(leaving[0].event, f"copy out of {leaving[0].lease.key!r}")
            self.sweep()

    def was_changed(self, key: str) -> bool:
        """Return whether what was put into ``key`` may have been written while it was copied, and is of no use."""
        self.settle(key, reads=False)
        return key in self._changed

    def get(self, lease: Lease) -> torch.Tensor:
        """Return the bytes of ``lease`` in new memory of torch's allocator; it ends with it, or if it fails."""
        stream = self.current_stream()
        try:
            flat = torch.empty(lease.tensor.nbytes, dtype=torch.uint8, device=self.device)
            self.stream_in.wait_event(stream.record_event())  # order: the memory was another tensor's on that stream
            with on_stream(self.stream_in):
                self._copy(flat, lease.tensor, lease.key)
        except BaseException:
            lease.release()
            raise
        event = self.stream_in.record_event()
        stream.wait_event(event)
        self.in_bytes += flat.nbytes
        self._note(_Copy(event, lease, False))
        return flat

    def on_host(self, value: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Copy ``value``, a few bytes, to page-locked memory of its own; the call of the result waits for them."""
        self.stream_out.wait_event(self.current_stream().record_event())
        copy = torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=True)
        with on_stream(self.stream_out):
            copy.copy_(value, non_blocking=True)
        value.record_stream(self.stream_out)  # Lifetime: the caller may drop it first
        event = self.stream_out.record_event()

        def wait() -> torch.Tensor:
            self._wait(event, "copy of a number")
            return copy

        return wait

    # -- DRAM ----------------------------------------------------------------------------------------------------

    def is_in_dram(self, key: str) -> bool:
        """Return whether ``key`` can be leased for reading without a wait."""
        return self._working_set.is_resident(key)

    def lease(self, key: str, mode: str) -> Lease:
        """Lease the bytes of ``key`` once no copy uses them, or for reading none writes them; blocks."""
        self.settle(key, reads=mode != "r")
        return self._working_set.lease(key, mode)

    def settle(self, key: str, *, reads: bool = True) -> None:
        """Wait for the copies of the bytes of ``key``, those that only read them with ``reads``. DeadlineError."""
        with self._lock:
            copies = list(self._in_flight.get(key, ()))
        for copy in copies:
            if reads or copy.is_out:
                self._wait(copy.event, f"copy {'out' if copy.is_out else 'in'} of {key!r}")
        self.sweep()

    def settle_all(self) -> None:
        """Wait for all copies in flight. DeadlineError. Those of a device that has failed never go on: they end."""
        try:
            for key in list(self._in_flight):
                self.settle(key)
        except torch.AcceleratorError:
            with self._sweeping:
                with self._lock:
                    copies = [copy for each in self._in_flight.values() for copy in each]
                    self._in_flight.clear()
                    self._leaving.clear()
                for copy in copies:
                    copy.lease.release()
            raise

    def settle_one(self) -> bool:
        """For a caller that waits for DRAM: wait for the copy submitted first; return whether there was one."""
        key = next(iter(list(self._in_flight)), None)
        if key is None:
            return False
        self.settle(key)
        return True

    def sweep(self) -> None:
        """Give the leases back whose copies have ended."""
        with self._sweeping:  # order: who finds no copy of a key in flight finds its lease given back
            if not self._in_flight:
                return
            ended: list[_Copy] = []
            with self._lock:
                for key, copies in list(self._in_flight.items()):
                    while copies and copies[0].event.query():
                        ended.append(copies.pop(0))
                    if not copies:
                        del self._in_flight[key]
                gone = set(map(id, ended))
                self._leaving = [copy for copy in self._leaving if id(copy) not in gone]
            for copy in ended:
                if copy.source is not None and copy.source._version != copy.version:
                    self._changed.add(copy.lease.key)
                copy.lease.release(is_written=copy.is_out)
            self._working_set.swap_out([copy.lease.key for copy in ended if copy.is_out])

    def _note(self, copy: _Copy) -> None:
        with self._lock:
            self._in_flight.setdefault(copy.lease.key, []).append(copy)

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

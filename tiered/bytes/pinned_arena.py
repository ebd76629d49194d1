"""An arena whose pages stay with the process and are page-locked for an accelerator, and what locks them there.

The registrars are the only code outside the kernels that knows a vendor's runtime.
"""

from __future__ import annotations

import bisect
import logging
import threading
from collections.abc import Iterable
from typing import Any, Protocol

import torch

from tiered.bytes.arena import PAGE_NBYTES, AddressRanges, Arena
from tiered.bytes.free_memory import free_memory
from tiered.errors import CapacityError, DeviceError, UsageError
from tiered.units import GiB, MiB, format_bytes, round_up

__all__ = [
    "CudaRegistrar",
    "NoRegistrar",
    "PinnedArena",
    "Registrar",
    "Slots",
    "add_registrar",
    "pinned_arena_at",
    "registrar_for",
]


_UNLOADING = 4  # cudaErrorCudartUnloading: the process ends, and its registrations with it


class Registrar(Protocol):
    """Page-locks memory, so that a device copies to and from it beside the host's work."""

    def register(self, address: int, nbytes: int, index: int) -> None:
        """Page-lock ``nbytes`` at ``address`` by device ``index``; blocks while they are faulted in. Raises why not."""

    def unregister(self, address: int, index: int) -> None:
        """End the registration at ``address``, before its memory is unmapped. Raises an error that says why not."""


class NoRegistrar:
    """Refuses: nothing is known that page-locks memory for devices of ``device_type``."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type

    def register(self, address: int, nbytes: int, index: int) -> None:
        raise UsageError(
            f"no registrar is known for devices of type {self._device_type!r} (tiered.bytes.pinned_arena.add_registrar"
            " adds one)"
        )

    def unregister(self, address: int, index: int) -> None:
        raise AssertionError("nothing was registered")


class CudaRegistrar:
    """CUDA, and ROCm under the same names, by way of torch's binding of the runtime. Sets up the device it is given.

    Not tried without a card: whether an error of the runtime is cleared for good, and how long registration takes.
    """

    def register(self, address: int, nbytes: int, index: int) -> None:
        with torch.accelerator.device_index(index):  # the runtime sets up whichever device is current
            cudart = _cudart()
            # Flags 0: with unified addresses memory is registered for all devices of the process.
            result = int(cudart.cudaHostRegister(address, nbytes, 0))
            if result:
                _forget_error(cudart)
                raise DeviceError(f"cudaHostRegister of {nbytes:,} bytes failed: {_reason(cudart, result)}")

    def unregister(self, address: int, index: int) -> None:
        with torch.accelerator.device_index(index):
            cudart = _cudart()
            result = int(cudart.cudaHostUnregister(address))
            if result and result != _UNLOADING:
                _forget_error(cudart)
                raise DeviceError(f"cudaHostUnregister failed: {_reason(cudart, result)}")


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch has no types for it


def _reason(cudart: Any, result: int) -> str:
    return f"CUDA error {result}, {cudart.cudaGetErrorString(cudart.cudaError(result))}"


def _forget_error(cudart: Any) -> None:
    """Clear the runtime's last error, which the next launch of a kernel would report as its own."""
    if hasattr(cudart, "cudaGetLastError"):  # not in torch 2.11 to 2.13
        cudart.cudaGetLastError()
        return
    try:
        torch.zeros(1, dtype=torch.uint8, device="cuda")  # torch takes the error from the runtime as it launches this
    except RuntimeError:
        pass


_registrars: dict[str, Registrar] = {"cuda": CudaRegistrar()}


def add_registrar(device_type: str, registrar: Registrar) -> None:
    """Have ``registrar`` page-lock the memory of stores opened from now on for devices of ``device_type``."""
    _registrars[device_type] = registrar


def registrar_for(device_type: str) -> Registrar | None:
    """Return the registrar for devices of ``device_type``; None where none is known."""
    return _registrars.get(device_type)


# -- slots -------------------------------------------------------------------------------------------------------------


class Slots:
    """Free addresses [start, end) in which large places grow from the low end and small ones from the high end.

    A place that is given back is a *slot*. The next request of just its size takes it again, so equal sizes reuse each
    other's places. Other sizes take what was never leased, the *middle*, and after that the best fit among all free
    addresses: neighbouring slots then count as one range. The invariant: slots and middle are free and overlap nowhere.
    """

    def __init__(self, start: int, end: int, *, large_nbytes: int) -> None:
        self.free = AddressRanges()
        self._whole = (start, end)
        self._large_nbytes = large_nbytes
        self._starts: list[int] = []  # of the slots, sorted
        self._sizes: dict[int, int] = {}  # start -> bytes
        self._by_size: dict[int, list[int]] = {}  # bytes -> sorted starts
        self._middle = self._whole
        if start < end:
            self.free.insert(start, end, is_warm=True)

    def take(self, nbytes: int) -> int | None:
        """Take a place of ``nbytes`` > 0 and return its start; None where no free range is as long."""
        is_large = nbytes >= self._large_nbytes
        low, high = self._middle
        if nbytes in self._by_size:
            place = self._by_size[nbytes][0 if is_large else -1]
        elif high - low >= nbytes:
            place = low if is_large else high - nbytes
        else:
            found = self.free.best_fit(nbytes, is_high=not is_large)
            if found is None:
                return None
            place = found[0] if is_large else found[1] - nbytes
        self.free.take(place, place + nbytes)
        self._break_slots(place, place + nbytes)
        self._shrink_middle(place, place + nbytes)
        return place

    def give_back(self, start: int, end: int) -> None:
        """Make a place that ``take`` returned a slot."""
        self.free.insert(start, end, is_warm=True)
        if self.free.warm_nbytes == self._whole[1] - self._whole[0]:  # all is free: the next load may be another
            self._starts, self._sizes, self._by_size, self._middle = [], {}, {}, self._whole
            return
        bisect.insort(self._starts, start)
        self._sizes[start] = end - start
        bisect.insort(self._by_size.setdefault(end - start, []), start)

    def in_the_way(self, nbytes: int, evictable: Iterable[tuple[int, int]]) -> list[int] | None:
        """Return which of ``evictable``, (address, bytes) of taken places, to give back for a place of ``nbytes``.

        Those of fewest bytes in all; of equals those whose last one comes first in ``evictable``. None: not even all
        of them leave such a place.
        """
        ranges = [(start, end, -1) for start, end in self.free.largest_warm()]
        ranges += [(start, start + size, rank) for rank, (start, size) in enumerate(evictable) if size]
        ranges.sort()
        best: tuple[int, int, list[int]] | None = None  # (bytes, last rank, addresses)
        first = cost = 0  # of the window of neighbours that ends with the current range
        for last, (start, end, rank) in enumerate(ranges):
            if last and ranges[last - 1][1] != start:
                first, cost = last, 0
            cost += end - start if rank >= 0 else 0
            while first <= last and end - ranges[first][0] >= nbytes:
                if best is None or cost <= best[0]:
                    window = [each for each in ranges[first : last + 1] if each[2] >= 0]
                    found = (cost, max((each[2] for each in window), default=-1), [each[0] for each in window])
                    best = found if best is None else min(best, found)
                cost -= ranges[first][1] - ranges[first][0] if ranges[first][2] >= 0 else 0
                first += 1
        return None if best is None else best[2]

    def _break_slots(self, start: int, end: int) -> None:
        """Forget the slots that overlap [start, end)."""
        index = max(0, bisect.bisect_right(self._starts, start) - 1)
        while index < len(self._starts) and self._starts[index] < end:
            slot = self._starts[index]
            if slot + self._sizes[slot] <= start:
                index += 1
                continue
            del self._starts[index]
            of_size = self._by_size[size := self._sizes.pop(slot)]
            del of_size[bisect.bisect_left(of_size, slot)]
            if not of_size:
                del self._by_size[size]

    def _shrink_middle(self, start: int, end: int) -> None:
        low, high = self._middle
        if start < high and low < end:
            self._middle = (min(end, high), high) if start <= low else (low, start)


# -- pinned arena ------------------------------------------------------------------------------------------------------


# One registration of 512 GiB and more fails on some drivers. A device refuses each copy over the border between two,
# those too that users make of leased tensors, so borders are as few as can be.
PIECE_NBYTES = 256 * GiB
_LARGE_NBYTES = 16 * MiB  # a bucket of the update has at most 12 MiB; most units and gradients are larger

_log = logging.getLogger("tiered")


class PinnedArena(Arena):
    """An arena of one mapping as large as its budget, whose pages stay with the process.

    A free range may be too short for a buffer though the bytes suffice: ``allocate_nowait`` returns None then,
    ``could_place`` says whether releases would help and ``in_the_way`` which. Buffers of at least ``large_nbytes`` lie
    at the low end of the mapping, smaller ones at the high end, and equal sizes reuse each other's places.

    The memory is pageable until ``lock_pages``. The invariant: *all pieces are registered, or none is*. Where the
    registrar refuses, the arena works as pageable memory for good: ``is_pinned`` is False then, and ``why_pageable``
    has the reason, which is logged once.
    """

    keeps_pages = True  # from the start: a page that were given back would be another one to the device

    def __init__(
        self,
        nbytes: int,
        registrar: Registrar,
        *,
        piece_nbytes: int = 0,
        large_nbytes: int = _LARGE_NBYTES,
    ) -> None:
        """Map ``nbytes``, for ``registrar`` to page-lock in pieces of ``piece_nbytes``, by default PIECE_NBYTES.

        Raises ValueError; CapacityError where the kernel refuses the mapping.
        """
        super().__init__(nbytes)
        self._mappings[0].keep()  # lifetime: registered memory must not be unmapped
        start = self._mappings[0].start
        self._start, self._end = start, start + nbytes // PAGE_NBYTES * PAGE_NBYTES
        self._slots = Slots(start, self._end, large_nbytes=large_nbytes)
        self._free = self._slots.free
        self._registrar = registrar
        self._piece_nbytes = round_up(piece_nbytes or PIECE_NBYTES, PAGE_NBYTES)
        self._pieces: list[int] = []  # addresses, registered
        self._index = 0  # of the device by which they are
        self._locking = threading.RLock()  # a collection may close the arena while this thread locks its pages
        self._is_decided = False
        self.why_pageable = "nothing was copied to or from an accelerator yet"
        _arenas[start] = self

    def lock_pages(self, device: torch.device) -> None:
        """Have the memory registered by way of ``device``, once; buffers may be in use. Blocks, about 0.1 s a GiB.

        Threads that come meanwhile wait for the end. A registrar that refuses is logged, and no error.
        """
        if self._is_decided:
            return
        with self._locking:
            if not (self._is_decided or self._is_closed):
                self._register(torch.accelerator.current_device_index() if device.index is None else device.index)

    def nbytes_to_border(self, address: int) -> int:
        """Return how many bytes from ``address`` on one copy of a device may move."""
        return self._piece_nbytes - (address - self._start) % self._piece_nbytes if self.is_pinned else self.nbytes

    def could_place(self, nbytes: int, evictable_nbytes: int, evictable: Iterable[tuple[int, int]]) -> bool:
        if not super().could_place(nbytes, evictable_nbytes, evictable):
            return False
        return self.in_the_way(nbytes, evictable) is not None

    def in_the_way(self, nbytes: int, evictable: Iterable[tuple[int, int]]) -> list[int] | None:
        with self._lock:
            return self._slots.in_the_way(round_up(nbytes, PAGE_NBYTES), evictable) if nbytes else []

    # Below: under the lock

    def _first_sizes(self) -> list[int]:
        return [self.nbytes]

    def _place(self, size: int) -> int | None:
        return self._slots.take(size)

    def _take_back(self, start: int, end: int) -> None:
        self._slots.give_back(start, end)

    def _register(self, index: int) -> None:
        """Register all pieces, or none and say so. The registrar faults the pages in."""
        self._index = index
        try:
            free_nbytes = free_memory()
            if 0 < free_nbytes < self.nbytes - self._peak_nbytes:  # the kernel would kill the process; 0: unknown
                raise CapacityError(f"only {format_bytes(free_nbytes)} of memory are free")
            for address in range(self._start, self._end, self._piece_nbytes):
                self._registrar.register(address, min(self._piece_nbytes, self._end - address), index)
                self._pieces.append(address)
            self.why_pageable, self.is_pinned = None, True
        except BaseException as error:  # whatever the accelerator's runtime raises
            self._unregister()
            if not isinstance(error, Exception):  # an interrupt: the next copy tries again
                raise
            self.why_pageable = str(error) or repr(error)
            _log.warning(
                "the DRAM budget of %s is not page-locked: %s; copies to and from the accelerator are slower, and do"
                " not run beside computing",
                format_bytes(self.nbytes),
                self.why_pageable,
            )
        self._is_decided = True

    def _unregister(self) -> bool:
        """Unregister all pieces, the last first; return False where one refused, whose memory must stay mapped."""
        num_refused = 0
        while self._pieces:
            address = self._pieces[-1]
            try:
                self._registrar.unregister(address, self._index)
            except Exception as error:
                num_refused += 1
                _log.warning("page-locked memory stays with the process: %s", str(error) or repr(error))
            self._pieces.pop()  # order: an interrupt before this lets a second try end in that warning
        return not num_refused

    def _unmap(self) -> None:
        with self._locking:
            if not self._unregister():
                self._mappings.clear()  # lifetime: the addresses of registered memory must never be mapped again
        _arenas.pop(self._start, None)
        super()._unmap()


_arenas: dict[int, PinnedArena] = {}
"""Those of this process, and of those that it is a fork of, by the address of their memory, until it is unmapped."""


def pinned_arena_at(address: int) -> PinnedArena | None:
    """Return the arena of this process that has ``address`` in its memory; None where none has."""
    for arena in list(_arenas.values()):
        if arena._start <= address < arena._end and arena._process.is_here:
            return arena
    return None

"""An arena whose memory is page-locked for an accelerator: mapped once, registered once, kept until the end."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from tiered.bytes.arena import PAGE_NBYTES, Arena
from tiered.bytes.free_memory import free_memory
from tiered.bytes.registrar import Registrar
from tiered.bytes.slots import Slots
from tiered.errors import CapacityError
from tiered.units import GiB, MiB, format_bytes, round_up

__all__ = ["PinnedArena"]

_PIECE_NBYTES = 1 * GiB  # a single registration of 512 GiB and more fails on some drivers
_LARGE_NBYTES = 16 * MiB  # a bucket of the update has at most 12 MiB; most units and gradients are larger

_log = logging.getLogger("tiered")


class PinnedArena(Arena):
    """An arena of one mapping as large as its budget, whose pages stay with the process.

    A free range may be too short for a buffer though the bytes suffice: ``allocate_nowait`` returns None then,
    ``could_place`` says whether releases would help and ``in_the_way`` which. Buffers of at least ``large_nbytes`` lie
    at the low end of the mapping, smaller ones at the high end, and equal sizes reuse each other's places.

    The invariant: *all pieces are registered, or none is*. Where the registrar refuses, the arena works as pageable
    memory: ``is_pinned`` is False then, and ``why_pageable`` has the reason, which is logged once.
    """

    keeps_pages = True

    def __init__(
        self,
        nbytes: int,
        registrar: Registrar,
        *,
        piece_nbytes: int = _PIECE_NBYTES,
        large_nbytes: int = _LARGE_NBYTES,
    ) -> None:
        """Map ``nbytes`` and register them piece by piece, which takes about 0.1 s a GiB; blocks.

        Raises ValueError; CapacityError where the kernel refuses the mapping.
        """
        super().__init__(nbytes)
        self._mappings[0].keep()  # lifetime: registered memory must not be unmapped
        start = self._mappings[0].start
        self._start, self._end = start, start + nbytes // PAGE_NBYTES * PAGE_NBYTES
        self._slots = Slots(start, self._end, large_nbytes=large_nbytes)
        self._free = self._slots.free
        self._registrar = registrar
        self._piece_nbytes = round_up(piece_nbytes, PAGE_NBYTES)
        self._pieces: list[int] = []  # addresses, registered
        self.why_pageable: str | None = None
        try:
            self._register()
        except BaseException:
            self.close()
            raise
        self.is_pinned = self.why_pageable is None

    def cuts(self, address: int, nbytes: int) -> list[tuple[int, int]]:
        offset, found = 0, list[tuple[int, int]]()
        while offset < nbytes:
            left = self._piece_nbytes - (address + offset - self._start) % self._piece_nbytes
            size = min(left, nbytes - offset) if self.is_pinned else nbytes
            found.append((offset, size))
            offset += size
        return found

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

    def _register(self) -> None:
        """Register all pieces, or none and say so. The registrar faults the pages in."""
        try:
            free_nbytes = free_memory()
            if 0 < free_nbytes < self._end - self._start:  # the kernel would kill the process; 0: unknown
                raise CapacityError(f"only {format_bytes(free_nbytes)} of memory are free")
            for address in range(self._start, self._end, self._piece_nbytes):
                self._registrar.register(address, min(self._piece_nbytes, self._end - address))
                self._pieces.append(address)
        except Exception as error:  # whatever the accelerator's runtime raises
            self._unregister()
            self.why_pageable = str(error) or repr(error)
            _log.warning(
                "the DRAM budget of %s is not page-locked: %s; copies to and from the accelerator are slower, and do"
                " not run beside computing",
                format_bytes(self.nbytes),
                self.why_pageable,
            )

    def _unregister(self) -> bool:
        """Unregister all pieces, the last first; return False where one refused, whose memory must stay mapped."""
        num_refused = 0
        while self._pieces:
            address = self._pieces[-1]
            try:
                self._registrar.unregister(address)
            except Exception as error:
                num_refused += 1
                _log.warning("page-locked memory stays with the process: %s", str(error) or repr(error))
            self._pieces.pop()  # order: an interrupt before this lets a second try end in that warning
        return not num_refused

    def _unmap(self) -> None:
        if not self._unregister():
            self._mappings.clear()  # lifetime: the addresses of registered memory must never be mapped again
        super()._unmap()

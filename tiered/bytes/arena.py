"""One huge-page, page-aligned host allocation, leased in buffers under one byte budget.

All DRAM in which tiered keeps tensor bytes comes from here. The working set decides who leases how much and which
bytes make way: an arena never waits and never chooses a victim. Its free addresses are pure arithmetic.
"""

from __future__ import annotations

import bisect
import ctypes
import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import torch

from tiered.bytes import kernel_file
from tiered.bytes.exit_and_fork import Process, this_process
from tiered.errors import CapacityError, ClosedError
from tiered.units import KiB, MiB, format_bytes, round_up

__all__ = [
    "DONTFORK",
    "DONTNEED",
    "HUGE_PAGE_NBYTES",
    "MAP_FAILED",
    "PAGE_NBYTES",
    "AddressRanges",
    "Arena",
    "Buffer",
    "MemoryMapping",
    "Watched",
    "advise",
    "array_type",
    "libc",
    "map_file",
]


HUGE_PAGE_NBYTES = 2 * MiB

# <sys/mman.h> and <asm-generic/mman-common.h> on Linux
DONTNEED, DONTFORK = 4, 10
_HUGEPAGE, _DONTDUMP = 14, 16
_PROT_READ_WRITE = 0x3
_MAP_PRIVATE_ANONYMOUS_NORESERVE = 0x02 | 0x20 | 0x4000
_MAP_SHARED = 0x01
MAP_FAILED = ctypes.c_void_p(-1).value


class MemoryMapping:
    """A private anonymous mapping with huge pages, which children of a fork do not inherit.

    It ends by ``unmap``, or with the last view of ``memory`` and the last object that refers to its ``obj``.
    """

    __slots__ = ("_end", "memory", "start")

    def __init__(self, address: int, nbytes: int, start: int, usable_nbytes: int) -> None:
        self.start = start  # multiple of a huge page
        array = array_type(usable_nbytes).from_address(start)
        self.memory = memoryview(array).cast("B")
        self._end = weakref.finalize(array, _unmap, address, nbytes, this_process())
        self._end.atexit = False  # the process's end is theirs, too

    @classmethod
    def create(cls, nbytes: int) -> MemoryMapping | None:
        """Map ``nbytes`` at a multiple of a huge page, or return None when the kernel refuses."""
        # Rounding up to a huge page leaves at least a small page of the extra one behind the usable range: a gap that
        # keeps the ranges of two mappings from ever being neighbours.
        total = nbytes + HUGE_PAGE_NBYTES
        address = libc().mmap(None, total, _PROT_READ_WRITE, _MAP_PRIVATE_ANONYMOUS_NORESERVE, -1, 0)
        if address == MAP_FAILED:
            return None
        # Order: all advice before the first touch. DONTFORK also keeps a fork from moving pages under running I/O.
        advise(address, total, _HUGEPAGE)
        advise(address, total, DONTFORK)
        advise(address, total, _DONTDUMP)
        return cls(address, total, round_up(address, HUGE_PAGE_NBYTES), nbytes)

    def unmap(self) -> None:
        """Give memory and addresses back to the kernel; nothing may use them any more."""
        self.memory.release()
        _kept.pop(self.start, None)
        self._end()

    def holds(self, address: int) -> bool:
        """Return whether ``address`` lies in this mapping."""
        return self.start <= address < self.start + len(self.memory)

    def keep(self) -> None:
        """Have the addresses stay mapped until ``unmap``, or for good, whatever becomes of the views."""
        _kept[self.start] = self.memory.obj


_kept: dict[int, object] = {}


def map_file(fd: int, nbytes: int) -> memoryview:
    """Return the first ``nbytes`` of the file open as ``fd`` as memory; it is unmapped with the last view of it.

    The descriptor may be closed then. Raises OSError.
    """
    address = libc().mmap(None, nbytes, _PROT_READ_WRITE, _MAP_SHARED, fd, 0)
    if address == MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    array = array_type(nbytes).from_address(address)
    weakref.finalize(array, _unmap, address, nbytes, this_process()).atexit = False  # the process's end is theirs, too
    return memoryview(array).cast("B")


def _unmap(address: int, nbytes: int, process: Process) -> None:
    if process.is_here:  # a forked child has no such mapping, and may use its addresses for something else
        libc().munmap(address, nbytes)


@functools.lru_cache(maxsize=4096)  # a ctypes array type costs 20 us to make, and each size needs its own
def array_type(nbytes: int) -> type[ctypes.Array[ctypes.c_uint8]]:
    """Return the type of ``nbytes`` bytes."""
    return ctypes.c_uint8 * nbytes


@functools.cache
def libc() -> ctypes.CDLL:
    """Return the C library, with the types of mmap, munmap and madvise."""
    found = ctypes.CDLL(None, use_errno=True)
    found.mmap.restype = ctypes.c_void_p
    found.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    found.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    found.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return found


def advise(address: int, nbytes: int, advice: int) -> None:
    """Tell the kernel how the memory is used."""
    libc().madvise(address, nbytes, advice)  # only ever a hint, except DONTNEED, which cannot fail on our own pages


# -- addresses ---------------------------------------------------------------------------------------------------------


class AddressRanges:
    """The free addresses of an arena: ranges, warm (occupying memory) or cold, neighbours of one kind always merged."""

    __slots__ = ("_by_size", "_ends", "_starts", "warm_nbytes")

    def __init__(self) -> None:
        self._starts: list[int] = []  # sorted
        self._ends: dict[int, tuple[int, bool]] = {}  # start -> (end, is_warm)
        self._by_size: list[tuple[int, int]] = []  # sorted (nbytes, start) of the warm ones
        self.warm_nbytes = 0

    def insert(self, start: int, end: int, *, is_warm: bool) -> None:
        """Add a range that overlaps none."""
        index = bisect.bisect_left(self._starts, start)
        if index < len(self._starts):
            following = self._starts[index]
            assert end <= following, "a range was freed twice"
            if following == end and self._ends[following][1] == is_warm:
                end = self._remove(index)
        if index:
            previous = self._starts[index - 1]
            previous_end, previous_is_warm = self._ends[previous]
            assert previous_end <= start, "a range was freed twice"
            if previous_end == start and previous_is_warm == is_warm:
                index -= 1
                self._remove(index)
                start = previous
        self._starts.insert(index, start)
        self._ends[start] = (end, is_warm)
        if is_warm:
            bisect.insort(self._by_size, (end - start, start))
            self.warm_nbytes += end - start

    def take(self, start: int, end: int) -> None:
        """Remove [start, end), which may be part of a range or span neighbours of both kinds."""
        index = bisect.bisect_right(self._starts, start) - 1
        while start < end:
            first = self._starts[index]
            is_warm = self._ends[first][1]
            last = self._remove(index)
            assert first <= start < last, "a range was taken that is not free"
            if first < start:
                self.insert(first, start, is_warm=is_warm)
                index += 1
            if end < last:
                self.insert(end, last, is_warm=is_warm)
            start = last

    def find_warm(self, nbytes: int) -> int | None:
        """Return the start of the smallest warm range of at least ``nbytes``, the lowest of equals."""
        found = self.best_fit(nbytes)
        return None if found is None else found[0]

    def best_fit(self, nbytes: int, *, is_high: bool = False) -> tuple[int, int] | None:
        """Return (start, end) of the smallest warm range of at least ``nbytes``; of equals the lowest, or highest."""
        index = bisect.bisect_left(self._by_size, (nbytes, 0))
        if index == len(self._by_size):
            return None
        if is_high:
            index = bisect.bisect_left(self._by_size, (self._by_size[index][0] + 1, 0)) - 1
        size, start = self._by_size[index]
        return start, start + size

    def find_any(self, nbytes: int) -> int | None:
        """Return where ``nbytes`` fit at an end of free bytes that touch, the end with most warm ones; None if nowhere.

        There may be more warm bytes in the middle: these cost page faults, and no look at each place.
        """
        best: tuple[int, int] | None = None  # (-warm bytes, start)
        run: list[tuple[int, int, bool]] = []  # ranges that touch
        for start in [*self._starts, -1]:
            if run and start != run[-1][1]:
                if run[-1][1] - run[0][0] >= nbytes:
                    first, last = run[0][0], run[-1][1]
                    for window, ranges in ((first, run), (last - nbytes, reversed(run))):
                        warm = 0
                        for s, e, is_warm in ranges:
                            if s >= window + nbytes or e <= window:
                                break
                            warm += min(e, window + nbytes) - max(s, window) if is_warm else 0
                        best = min(best or (1, 0), (-warm, window))
                run = []
            if start >= 0:
                run.append((start, *self._ends[start]))
        return best[1] if best else None

    def largest_warm(self) -> list[tuple[int, int]]:
        """Return (start, end) of the warm ranges, the largest first."""
        return [(start, start + nbytes) for nbytes, start in reversed(self._by_size)]

    def _remove(self, index: int) -> int:
        start = self._starts.pop(index)
        end, is_warm = self._ends.pop(start)
        if is_warm:
            del self._by_size[bisect.bisect_left(self._by_size, (end - start, start))]
            self.warm_nbytes -= end - start
        return end


# -- arena -------------------------------------------------------------------------------------------------------------


PAGE_NBYTES = 4 * KiB
"""Buffers start at, and are, multiples of this."""

_SLACK_NBYTES = 64 * MiB  # address space, not memory: room for buffers of odd sizes in a small arena

_HUGE_PAGE_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")

_T = TypeVar("_T")
_log = logging.getLogger("tiered")


Watched = weakref.ref[ctypes.Array[ctypes.c_uint8]]


class Buffer:
    """An aligned slice of an arena, leased until ``Arena.release``."""

    __slots__ = ("_aliases", "_keeps_pages", "address", "memory", "nbytes")

    def __init__(self, address: int, memory: memoryview, *, keeps_pages: bool = False) -> None:
        self._keeps_pages = keeps_pages
        self.address = address
        self.nbytes = memory.nbytes
        self.memory = memory  # uint8, writeable, all of the buffer; dead after release
        self._aliases: list[Watched] = []

    @property
    def is_aliased(self) -> bool:
        """Whether a tensor made by ``alias`` (or a view of one) is alive."""
        return any(alias() is not None for alias in self._aliases)

    def alias(self, nbytes: int, on_dead: Callable[[object], object]) -> tuple[torch.Tensor, Watched]:
        """Return a uint8 tensor of shape (nbytes,) over the first ``nbytes`` of this buffer, zero copy, and its life.

        The latter gives None from the moment on when the last tensor on the storage has died.
        Its storage is its own: ``on_dead`` is called once the last tensor on that storage has died, with nothing of
        use. The call may come from any thread and from inside a garbage collection, so ``on_dead`` must be reentrant: a
        ``queue.SimpleQueue().put`` is, taking a lock is not. Where Ctrl-C interrupts a function of Python, the rest of
        it is lost without a message. ``on_dead`` is not called at the end of the process.
        """
        assert 0 <= nbytes <= self.nbytes, (nbytes, self.nbytes)
        # An empty tensor has a storage of one byte, which it never shows: a storage of none could not be watched.
        array = array_type(max(nbytes, 1)).from_address(self.address)
        array.mapping = self.memory.obj  # type: ignore[attr-defined]  # lifetime: mapped as long as a tensor is there
        self._aliases = [alias for alias in self._aliases if alias() is not None]
        watched = weakref.ref(array, on_dead)
        self._aliases.append(watched)
        tensor = torch.frombuffer(array, dtype=torch.uint8)
        return (tensor if nbytes else tensor.resize_(0)), watched

    def follow_up(self, action: Callable[[], object]) -> None:
        """Have ``action()`` called after the ``on_dead`` of each alias that lives now, which is called twice then."""
        for alias in self._aliases:
            array = alias()
            if array is not None:  # order: the last to watch an object is called first
                weakref.finalize(array, _end, alias.__callback__, alias, action).atexit = False

    def give_pages_back(self) -> None:
        """Give the memory back to the kernel until the next touch, if the arena does that; the bytes are undefined."""
        if not self._keeps_pages:
            advise(self.address, self.nbytes, DONTNEED)

    def __repr__(self) -> str:
        return f"Buffer(0x{self.address:x}, {format_bytes(self.nbytes)}, aliased={self.is_aliased})"


class Arena:
    """Buffers under a budget: ``allocate_nowait(n)`` succeeds if and only if ``n <= free_nbytes``.

    Address space is plentiful and memory is not, so the mapping is larger than the budget, and fragmentation costs
    addresses only. Free ranges are *warm* (they occupy memory) or *cold*; a lease reuses the best fitting warm range,
    and where one must be made of cold pages, warm ranges elsewhere are given back to the kernel first. The invariant:
    leased + warm bytes <= budget (plus at most a huge page at each end of a warm range).

    All methods are thread-safe. After a fork the child must not use the arena: its memory does not exist there, and
    methods raise UsageError.
    """

    is_pinned = False  # page-locked for an accelerator
    why_pageable: str | None = "it serves no accelerator"
    keeps_pages = False  # free memory, once touched, stays with the process

    def __init__(self, nbytes: int) -> None:
        """Map the address space for a budget of ``nbytes``. Raises ValueError; CapacityError when there is none."""
        if nbytes < 0:
            raise ValueError(f"an arena needs a budget of 0 bytes or more, got {nbytes}")
        self.nbytes = nbytes
        self._process = this_process()
        self._lock = threading.Lock()
        self._is_closed = False
        self._mappings: list[MemoryMapping] = []
        self._free = AddressRanges()
        self._leased_nbytes = 0
        self._peak_nbytes = 0
        self.discarded_nbytes = 0  # warm bytes given back to the kernel so far; steady use keeps this constant
        self._num_leased = 0
        self._quarantined: list[Buffer] = []
        _warn_of_small_pages()
        self._map(self._first_sizes())

    @property
    def leased_nbytes(self) -> int:
        """Bytes of all buffers leased now."""
        return self._leased_nbytes

    @property
    def peak_nbytes(self) -> int:
        """Most bytes that were ever leased at one time."""
        return self._peak_nbytes

    @property
    def free_nbytes(self) -> int:
        """Bytes of the budget that are not leased."""
        return self.nbytes - self._leased_nbytes

    def could_place(self, nbytes: int, evictable_nbytes: int, evictable: Iterable[tuple[int, int]]) -> bool:
        """Return whether ``nbytes`` could be leased once the leased buffers ``evictable`` were released.

        They are (address, nbytes) and ``evictable_nbytes`` in all; an arena whose budget alone decides asks for none.
        """
        return round_up(nbytes, PAGE_NBYTES) - evictable_nbytes <= self.free_nbytes

    def in_the_way(self, nbytes: int, evictable: Iterable[tuple[int, int]]) -> list[int] | None:
        """Return the addresses of those of ``evictable`` that take up the place for ``nbytes`` that costs fewest bytes.

        None where there is no such place. In this arena nothing stands in the way but the budget.
        """
        return []

    def lock_pages(self, device: torch.device) -> None:
        """Have the memory page-locked for ``device``; this arena serves none, and stays as it is."""

    def allocate_nowait(self, nbytes: int) -> Buffer | None:
        """Lease a buffer of ``nbytes`` rounded up to whole pages, or return None where there is no room for it.

        Its contents are undefined. The caller owns it until ``release``. Raises ClosedError, UsageError in a fork.
        """
        size = round_up(nbytes, PAGE_NBYTES)
        self._process.check("the arena")
        with self._lock:
            if self._is_closed:
                raise ClosedError("the arena is closed: no buffer can be leased from it any more")
            if self._leased_nbytes + size > self.nbytes:
                return None
            start = self._place(size) if size else self._mappings[0].start
            if start is None:
                return None
            self._leased_nbytes += size
            self._peak_nbytes = max(self._peak_nbytes, self._leased_nbytes)
            self._num_leased += 1
            return Buffer(start, self._memory(start, size), keeps_pages=self.keeps_pages)

    def release(self, buffer: Buffer) -> bool:
        """Give ``buffer`` back, whose ``memory`` may not be used again; False, with nothing done, if a tensor lives.

        Not reentrant: never call it from an ``on_dead``. Raises UsageError in a fork.
        """
        self._process.check("the arena")
        if buffer.is_aliased:
            return False
        start, end = buffer.address, buffer.address + buffer.nbytes
        buffer.memory.release()  # lifetime: a later use of it raises ValueError; so does a second release of the buffer
        with self._lock:
            if start != end:
                self._take_back(start, end)
            self._leased_nbytes -= buffer.nbytes
            self._num_leased -= 1
            if self._is_closed and self._num_leased == len(self._quarantined):
                self._unmap_unused()
        return True

    def quarantine(self, buffer: Buffer) -> None:
        """Never lease the bytes of ``buffer`` again: another process, or a thread of a library, may write into them.

        They stay leased until ``close``, which does not wait for them, and mapped to the end of the process. The buffer
        is released no more. Raises UsageError in a fork.
        """
        self._process.check("the arena")
        with self._lock:
            self._quarantined.append(buffer)
            if self._is_closed and self._num_leased == len(self._quarantined):
                self._unmap_unused()

    def close(self) -> None:
        """Refuse new leases and unmap; while buffers are leased, the release of the last one unmaps. Idempotent."""
        if not self._process.is_here:
            return  # a forked child has no mapping, and may use its addresses for something else
        with self._lock:
            self._is_closed = True
            if self._num_leased == len(self._quarantined):
                self._unmap_unused()

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "open"
        leased, budget = format_bytes(self._leased_nbytes), format_bytes(self.nbytes)
        return f"{type(self).__name__}({state}, {leased} of {budget} leased in {self._num_leased} buffers)"

    # Below: under the lock

    def _first_sizes(self) -> list[int]:
        """Return how much address space to map at first: the largest of these that the kernel grants."""
        return [max(4 * self.nbytes, self.nbytes + _SLACK_NBYTES), self.nbytes + _SLACK_NBYTES, self.nbytes]

    def _place(self, size: int) -> int | None:
        """Take ``size`` bytes of free addresses, which the budget allows; None where they are too scattered."""
        start = self._free.find_warm(size)
        if start is None:
            start = self._free.find_any(size)
        if start is None:  # fragmentation has eaten the address space; rare, and addresses cost nothing
            self._map([max(4 * size, size + _SLACK_NBYTES), size])
            start = self._mappings[-1].start
        self._free.take(start, start + size)
        # Order: the memory that this lease is about to touch is given back elsewhere before it is touched.
        self._discard(self._leased_nbytes + size + self._free.warm_nbytes - self.nbytes)
        return start

    def _take_back(self, start: int, end: int) -> None:
        """Add released addresses to the free ones."""
        self._free.insert(start, end, is_warm=True)

    def _discard(self, excess: int) -> None:
        """Give at least ``excess`` warm free bytes back to the kernel, if so many are warm."""
        # Whole huge pages first: a half that is given back comes back as small pages, which halve the bandwidth.
        for granule in (HUGE_PAGE_NBYTES, PAGE_NBYTES):
            for start, end in self._free.largest_warm() if excess > 0 else ():
                inner_start, inner_end = round_up(start, granule), end // granule * granule
                inner_start = max(inner_start, inner_end - round_up(excess, granule))
                if inner_start >= inner_end:
                    continue
                self._free.take(inner_start, inner_end)
                advise(inner_start, inner_end - inner_start, DONTNEED)
                self._free.insert(inner_start, inner_end, is_warm=False)
                self.discarded_nbytes += inner_end - inner_start
                excess -= inner_end - inner_start
                if excess <= 0:
                    return

    def _map(self, sizes: list[int]) -> None:
        """Map the largest of ``sizes`` that the kernel grants (limits on address space may refuse the larger ones)."""
        for size in sizes:
            mapping = MemoryMapping.create(round_up(max(size, 1), HUGE_PAGE_NBYTES))
            if mapping is not None:
                self._mappings.append(mapping)
                self._free.insert(mapping.start, mapping.start + len(mapping.memory), is_warm=False)
                return
        raise CapacityError(
            f"the kernel refused to map {format_bytes(sizes[-1])} for the arena; "
            f"give a smaller DRAM budget, or raise the limit on address space (ulimit -v, vm.overcommit_memory)"
        )

    def _memory(self, start: int, size: int) -> memoryview:
        for mapping in self._mappings:
            offset = start - mapping.start
            if 0 <= offset < len(mapping.memory):
                return mapping.memory[offset : offset + size]
        raise AssertionError(f"0x{start:x} is in no mapping")

    def _unmap_unused(self) -> None:
        """Unmap, when no buffer is leased but those in quarantine, which keep their mappings."""
        for mapping in list(self._mappings):
            if any(mapping.holds(buffer.address) for buffer in self._quarantined):
                mapping.keep()
                self._mappings.remove(mapping)
        self._leased_nbytes -= sum(buffer.nbytes for buffer in self._quarantined)
        self._num_leased -= len(self._quarantined)
        self._quarantined.clear()
        self._unmap()

    def _unmap(self) -> None:
        while self._mappings:
            self._mappings.pop().unmap()
        self._free = AddressRanges()


def _end(on_dead: Callable[[_T], object], alias: _T, action: Callable[[], object]) -> None:
    on_dead(alias)
    action()


def _warn_of_small_pages() -> None:
    """Warn where the kernel grants no huge pages on request."""
    if kernel_file.choice(_HUGE_PAGE_SETTING) in (None, "never"):
        _log.warning(
            "no huge pages (%s is missing or says never): direct I/O will run at about a third of its bandwidth; "
            "as root: echo madvise > %s",
            _HUGE_PAGE_SETTING,
            _HUGE_PAGE_SETTING,
        )

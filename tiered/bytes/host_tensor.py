"""Tensors in host memory: copied to and from buffers and compute devices, or made on huge pages for direct I/O."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable

import torch

from tiered.bytes.arena import Buffer
from tiered.bytes.pinned_arena import pinned_arena_at
from tiered.units import MiB, round_up

__all__ = ["address_of", "copy_across", "copy_contiguous", "empty_aligned", "storage_address"]

storage_address: Callable[[torch.Tensor], int] = torch._C._data_address  # type: ignore[attr-defined]  # not in the stub
"""Return the address of the storage of a tensor, to be read; ``data_ptr`` raises where torch may only read."""

_HUGE_PAGE_NBYTES = 2 * MiB


def empty_aligned(nbytes: int, alignment: int) -> tuple[torch.Tensor, memoryview]:
    """Return a new (nbytes,) uint8 tensor and its memory, rounded up to ``alignment``; both aligned to a huge page.

    The contents are zeros. The memory goes back to the system with the last reference; a forked child inherits it.
    Raises MemoryError or OSError when there is none. ``nbytes`` is at least 1.
    """
    size = round_up(nbytes, max(alignment, mmap.PAGESIZE))
    # Private and advised before the first touch: small pages under a buffer cost two thirds of the bandwidth.
    pages = mmap.mmap(-1, size + _HUGE_PAGE_NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    start = -torch.frombuffer(pages, dtype=torch.uint8, count=1).data_ptr() % _HUGE_PAGE_NBYTES
    tensor = torch.frombuffer(pages, dtype=torch.uint8, count=nbytes, offset=start)
    return tensor, memoryview(pages)[start : start + size]


def address_of(tensor: torch.Tensor) -> int:
    """Return the address of the first element of ``tensor``, to be read."""
    return storage_address(tensor) + int(tensor.storage_offset()) * tensor.element_size()


def copy_across(target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool = False) -> None:
    """Copy ``source`` to ``target``, of the same shape, as ``target.copy_`` does, and refer to neither afterwards.

    Every copy goes here that may be between an arena and a compute device: the arena's memory is page-locked for the
    first one, and a copy that reaches over a border between locked pieces, which a device refuses, is cut there.
    """
    host, other = (target, source) if target.is_cpu else (source, target)
    arena = None if other.is_cpu or other.is_meta or not host.is_cpu else pinned_arena_at(address_of(host))
    try:
        if arena is not None:
            arena.lock_pages(other.device)
            while (nbytes := arena.nbytes_to_border(address_of(host))) < _nbytes_from_first_to_last(host):
                stride, dim = max((host.stride(dim), dim) for dim in range(host.dim()) if host.shape[dim] > 1)
                row = min(max(1, nbytes // (stride * host.element_size())), host.shape[dim] - 1)
                copy_across(target.narrow(dim, 0, row), source.narrow(dim, 0, row), non_blocking=non_blocking)
                target, source = (each.narrow(dim, row, host.shape[dim] - row) for each in (target, source))
                host = target if target.is_cpu else source
        target.copy_(source, non_blocking=non_blocking)
    finally:
        del host, other, target, source  # lifetime: an error that is kept keeps no views of a buffer


def _nbytes_from_first_to_last(tensor: torch.Tensor) -> int:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(last + 1) * tensor.element_size()


def copy_contiguous(buffer: Buffer, tensor: torch.Tensor, *, to_buffer: bool) -> None:
    """Copy the bytes of ``tensor``, contiguous on any device, to the first of ``buffer``, or from there."""
    if tensor.is_cpu:
        # By this thread alone, at memory speed: torch would wait for the busiest of all cores, and one is doing I/O.
        place = buffer.address
        ctypes.memmove(*((place, address_of(tensor)) if to_buffer else (tensor.data_ptr(), place)), tensor.nbytes)
        return
    alias = buffer.alias(tensor.nbytes, _ignore)[0].view(tensor.dtype).view(tensor.shape)
    try:
        copy_across(*((alias, tensor) if to_buffer else (tensor, alias)))
    finally:
        del alias  # lifetime: the buffer is about to be given back, while an error has this frame


def _ignore(reference: object) -> None:
    """Do nothing at the end of an alias that lives for one copy."""

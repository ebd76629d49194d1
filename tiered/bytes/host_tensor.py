"""The caller's tensors: copied to and from buffers, or made on huge pages, aligned for direct I/O."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable

import torch

from tiered.bytes.arena import Buffer
from tiered.units import MiB, round_up

__all__ = ["address_of", "copy_contiguous", "empty_aligned", "storage_address"]

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


def copy_contiguous(buffer: Buffer, tensor: torch.Tensor, *, to_buffer: bool) -> None:
    """Copy the bytes of ``tensor``, contiguous on any compute device, to the start of ``buffer``, or from there."""
    nbytes = tensor.nbytes
    if tensor.is_cpu:
        # By this thread alone, at memory speed: torch would wait for the busiest of all cores, and one is doing I/O.
        places = (buffer.address, address_of(tensor)) if to_buffer else (tensor.data_ptr(), buffer.address)
        ctypes.memmove(*places, nbytes)
        return
    alias = buffer.alias(nbytes, _ignore)[0].view(tensor.dtype).view(tensor.shape)
    if to_buffer:
        alias.copy_(tensor)
    else:
        tensor.copy_(alias)


def _ignore(reference: object) -> None:
    """Do nothing at the end of an alias that lives for one copy."""

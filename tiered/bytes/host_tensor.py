"""The caller's tensors: copied to and from buffers, or made so that direct I/O can read into them without a copy."""

from __future__ import annotations

import ctypes
import functools
import mmap

import torch

from tiered.bytes.arena import Buffer
from tiered.units import MiB, round_up

__all__ = ["aligned_memory", "copy_contiguous", "empty_aligned", "populate"]

_HUGE_PAGE_NBYTES = 2 * MiB
_MADV_POPULATE_WRITE = 23  # <asm-generic/mman-common.h>, Linux 5.14


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


def populate(memory: memoryview) -> None:
    """Have the kernel make the pages of ``memory``, page-aligned, in this thread: a read would do it in the device's.

    Only a hint: where the kernel refuses, the first touch makes them. Contents do not change.
    """
    _libc().madvise(ctypes.addressof(ctypes.c_char.from_buffer(memory)), len(memory), _MADV_POPULATE_WRITE)


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


def aligned_memory(flat: torch.Tensor, alignment: int) -> memoryview | None:
    """Return the memory of ``flat``, (nbytes,) uint8 in DRAM, if its address and size are multiples of ``alignment``.

    The memory keeps the tensor's bytes alive.
    """
    if not flat.is_cpu or flat.data_ptr() % alignment or flat.numel() % alignment or not flat.numel():
        return None
    return memoryview(flat.numpy())  # type: ignore[arg-type]  # numpy's arrays are buffers


def copy_contiguous(buffer: Buffer, tensor: torch.Tensor, *, to_buffer: bool) -> None:
    """Copy the bytes of ``tensor``, contiguous on any compute device, to the start of ``buffer``, or from there."""
    nbytes = tensor.nbytes
    if tensor.is_cpu:
        # By this thread alone, at memory speed: torch would wait for the busiest of all cores, and one is doing I/O.
        places = (buffer.address, tensor.data_ptr()) if to_buffer else (tensor.data_ptr(), buffer.address)
        ctypes.memmove(*places, nbytes)
        return
    alias = buffer.alias(nbytes, _ignore)[0].view(tensor.dtype).view(tensor.shape)
    if to_buffer:
        alias.copy_(tensor)
    else:
        tensor.copy_(alias)


def _ignore(reference: object) -> None:
    """Do nothing at the end of an alias that lives for one copy."""

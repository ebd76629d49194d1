"""Memory held at its address while the kernel has that address."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

__all__ = ["address_of", "pin"]

address_of = ctypes.addressof
"""The address of the result of ``pin``."""


class _ReadOnly(ctypes.c_char):
    """The first byte of read-only memory, which ctypes takes by its address alone."""

    array: npt.NDArray[np.uint8]  # lifetime: holds the memory


def pin(memory: memoryview, *, is_read_only: bool = False) -> ctypes.c_char:
    """Return an object at the address of ``memory`` that keeps it mapped for as long as the object lives.

    Raises TypeError for read-only memory unless ``is_read_only`` says that nothing will be written to it, and
    ValueError for memory that was released or has no bytes.
    """
    try:
        return ctypes.c_char.from_buffer(memory)
    except TypeError:
        if not is_read_only:
            raise
    array = np.frombuffer(memory, dtype=np.uint8)
    pinned = _ReadOnly.from_address(array.ctypes.data)
    pinned.array = array
    return pinned

"""Kernels of lossless masters: what codes.py does by torch operations, in one pass each.

Ties are looked for by rows of 1,024 elements, as torch's operations look for those in the signs of a moment: what
happens to the sign of a moment that is NaN is the same, too.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from tiered.zero.kernel import Call, compile_kernel

__all__ = ["ExactKernels", "Marks", "compile_exact_kernels"]

Marks = Literal["signs", "bitmap"]
"""Where ties are marked: in the sign bits of a moment (``Remainder``), or in a bitmap (``MarkedRemainder``)."""


class ExactKernels(NamedTuple):
    """``join(hi, lo, marks, master, numel)``, ``split(master, hi, lo, marks, numel, nan)``, on addresses.

    ``nan`` is what torch rounds a NaN to on this machine, as signed 16 bits: all bits set where it is vectorised.
    """

    join: Call
    split: Call
    nan: int


def compile_exact_kernels(marks: Marks) -> ExactKernels:
    """Compile the kernels for one kind of ``marks``; blocks as ``compile_kernel`` does, and raises what it does."""
    nan = int(torch.full((1024,), torch.nan).bfloat16().view(torch.int16)[0])
    if marks == "signs":
        join = compile_kernel(_join, "int16* int16* int32* int32* int64")
        return ExactKernels(join, compile_kernel(_split, "int32* int16* int16* int32* int64 int32"), nan)
    join = compile_kernel(_join_by_bitmap, "int16* int16* uint8* int32* int64")
    return ExactKernels(join, compile_kernel(_split_by_bitmap, "int32* int16* int16* uint8* int64 int32"), nan)


# Below is what numba compiles.


def _join(hi: Any, lo: Any, marks: Any, master: Any, numel: int) -> None:
    for first in range(0, numel, 1024):
        stop = min(numel, first + 1024)
        least = np.int32(0)
        for i in range(first, stop):
            low = np.int32(lo[i])
            least = min(least, low)
            master[i] = np.int32((np.int32(hi[i]) << np.int32(16)) + low)
        if least == np.int32(-0x8000) or stop - first < 1024:
            for i in range(first, stop):
                tie = np.int32(np.int32(marks[i]) >> np.int32(31))  # -1 where marked
                master[i] = np.int32(master[i] - np.int32(tie << np.int32(16)))
                marks[i] = np.int32(marks[i] & np.int32(0x7FFFFFFF))


def _split(master: Any, hi: Any, lo: Any, marks: Any, numel: int, nan: int) -> None:
    for first in range(0, numel, 1024):
        stop = min(numel, first + 1024)
        least = np.int32(0)
        for i in range(first, stop):
            bits = np.int32(master[i])
            low = np.int16(bits)
            least = min(least, np.int32(low))
            lo[i] = low
            odd = np.int32(np.int32(bits >> np.int32(16)) & np.int32(1))
            rounded = np.int32(np.int32(bits + np.int32(0x7FFF)) + odd) >> np.int32(16)  # to the nearest, ties to even
            hi[i] = np.int16(nan if np.int32(bits & np.int32(0x7FFFFFFF)) > np.int32(0x7F800000) else rounded)
        if least == np.int32(-0x8000):
            for i in range(first, stop):
                if np.int32(master[i] & np.int32(0x1FFFF)) == np.int32(0x8000):
                    marks[i] = np.int32(marks[i] | np.int32(-0x80000000))


def _join_by_bitmap(hi: Any, lo: Any, marks: Any, master: Any, numel: int) -> None:
    for first in range(0, numel, 1024):
        stop = min(numel, first + 1024)
        for i in range(first, stop):
            master[i] = np.int32((np.int32(hi[i]) << np.int32(16)) + np.int32(lo[i]))
        some = np.uint8(0)
        for i in range(first // 8, (stop + 7) // 8):
            some |= marks[i]
        if some:
            for i in range(first, stop):
                tie = np.int32(np.int32(np.int32(marks[i // 8]) >> np.int32(i % 8)) & np.int32(1))
                master[i] = np.int32(master[i] + np.int32(tie << np.int32(16)))


def _split_by_bitmap(master: Any, hi: Any, lo: Any, marks: Any, numel: int, nan: int) -> None:
    for first in range(0, numel, 1024):
        stop = min(numel, first + 1024)
        least = np.int32(0)
        for i in range(first, stop):
            bits = np.int32(master[i])
            low = np.int16(bits)
            least = min(least, np.int32(low))
            lo[i] = low
            odd = np.int32(np.int32(bits >> np.int32(16)) & np.int32(1))
            rounded = np.int32(np.int32(bits + np.int32(0x7FFF)) + odd) >> np.int32(16)
            hi[i] = np.int16(nan if np.int32(bits & np.int32(0x7FFFFFFF)) > np.int32(0x7F800000) else rounded)
        for i in range(first // 8, (stop + 7) // 8):
            marks[i] = np.uint8(0)
        if least == np.int32(-0x8000):
            for i in range(first, stop):
                if np.int32(master[i] & np.int32(0x1FFFF)) == np.int32(0x8000):
                    marks[i // 8] = np.uint8(marks[i // 8] | np.uint8(1 << (i % 8)))

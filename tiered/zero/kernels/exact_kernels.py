"""Kernels of lossless masters whose ties are marked in a bitmap: codes.py's torch operations, in one pass each.

Ties are looked for by rows of 1,024 elements, as torch's operations look for them. Masters whose ties are in the signs
of a moment, AdamW's, have one kernel for the whole update (adamw_kernel.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from tiered.bytes.kernel import Call, compile_kernel

__all__ = ["ExactKernels", "compile_exact_kernels", "torch_nan"]


class ExactKernels(NamedTuple):
    """``join(hi, lo, marks, master, numel)``, ``split(master, hi, lo, marks, numel, nan)``, on addresses.

    ``nan`` is what torch rounds a NaN to on this machine, as signed 16 bits: all bits set where it is vectorised.
    """

    join: Call
    split: Call
    nan: int


def compile_exact_kernels() -> ExactKernels:
    """Compile the kernels; blocks as ``compile_kernel`` does, and raises what it does."""
    join = compile_kernel(_join, "int16* int16* uint8* int32* int64")
    return ExactKernels(join, compile_kernel(_split, "int32* int16* int16* uint8* int64 int32"), torch_nan())


def torch_nan() -> int:
    """Return what torch rounds a NaN of fp32 to on this machine, as signed 16 bits."""
    return int(torch.full((1024,), torch.nan, dtype=torch.float32, device="cpu").bfloat16().view(torch.int16)[0])


# Below is what numba compiles.


def _join(hi: Any, lo: Any, marks: Any, master: Any, numel: int) -> None:
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
            rounded = np.int32(np.int32(bits + np.int32(0x7FFF)) + odd) >> np.int32(16)
            hi[i] = np.int16(nan if np.int32(bits & np.int32(0x7FFFFFFF)) > np.int32(0x7F800000) else rounded)
        for i in range(first // 8, (stop + 7) // 8):
            marks[i] = np.uint8(0)
        if least == np.int32(-0x8000):
            for i in range(first, stop):
                if np.int32(master[i] & np.int32(0x1FFFF)) == np.int32(0x8000):
                    marks[i // 8] = np.uint8(marks[i // 8] | np.uint8(1 << (i % 8)))

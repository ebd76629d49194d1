"""The arithmetic that a device is capable of, measured by a product of two matrices."""

from __future__ import annotations

import time

import torch

__all__ = ["matrix_flop_per_s"]

_SMALLEST, _LARGEST = 256, 8192  # rows and columns
_LONG_ENOUGH_S = 5e-3  # of one product, beside the launch of an operation
_NUM_PRODUCTS = 5  # the shortest counts


def matrix_flop_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """Return the operations a second of a product of square matrices on ``device``; blocks for about 50 ms.

    It is the peak that training can be compared with: a card's data sheet is of another clock, and often of sparse
    matrices.
    """
    size = _SMALLEST
    while (seconds := _seconds(size, device, dtype)) < _LONG_ENOUGH_S and size < _LARGEST:
        size *= 2
    return 2.0 * size**3 / seconds


def _seconds(size: int, device: torch.device, dtype: torch.dtype) -> float:
    """Return the shortest time of a product of matrices of ``size`` rows and columns."""
    left, right = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    out = torch.mm(left, right)
    times = []
    for _ in range(_NUM_PRODUCTS):
        torch.accelerator.synchronize(device)
        begun_s = time.perf_counter()
        torch.mm(left, right, out=out)
        torch.accelerator.synchronize(device)
        times.append(time.perf_counter() - begun_s)
    return min(times)

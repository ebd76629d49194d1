"""AdamW of exact bf16 parameters by one kernel: masters joined, updated and split again in one pass over the bytes.

It goes by rows of 1,024 elements, which stay in the first cache: 26 bytes per element are read and written once, where
join, torch's operation and split read or write 70 (bench/LOG.md). The arithmetic is torch's vectorised one
(aten/src/ATen/native/cpu/FusedAdamKernel.cpp) with the products that its compiler fuses with their sums; whether that
is so on this machine is tried (kernel_trial.py). Rows with a number that is not finite, and what is left of less than a
row, are torch's own business.
"""

from __future__ import annotations

import importlib
import math
import platform
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from tiered.bytes.kernel import Call, compile_kernel
from tiered.zero.formats.rules import Hyperparameters

__all__ = ["AdamWKernel", "compile_adamw_kernel"]

# hi lo m v gradient | row | numel nan | factor sign decay | share of the gradient in m, whether it is the base | ...
_SIGNATURE = (
    "int16* int16* float32* float32* int16* int32* int64 int32 float32 float32 float32 float32 int32 float32 float32"
    " float32 float32 float32"
)


class AdamWKernel:
    """The kernel and what it must know of torch. Thread-safe; runs in the caller's thread, without the lock."""

    def __init__(self, call: Call, nan: int) -> None:
        self._call = call
        self._nan = nan  # what torch rounds a NaN to on this machine, as signed 16 bits

    def update(
        self,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        state: Sequence[torch.Tensor],
        factor: torch.Tensor | None,
        hyper: Hyperparameters,
        row: torch.Tensor,
    ) -> int:
        """Update rows from the first on in place; return how many elements, a multiple of 1,024.

        They are fewer than all where a row is not whole or not finite, as it was then. ``parameter``, ``gradient``:
        (numel,) bf16; ``state``: the remainder, (numel,) int16, and both moments, (numel,) fp32, ties marked in the
        signs of the second; ``row``: 4 KiB of scratch. All of them contiguous and on the CPU.
        """
        scale = 1.0 if factor is None else float(factor)
        if not math.isfinite(scale):
            return 0
        values = hyper.values
        (beta1, beta2), lr, weight_decay = values["betas"], values["lr"], values["weight_decay"]
        step = float(np.float32(hyper.step))  # as torch counts it
        share = float(np.float32(1 - beta1))
        is_from_gradient = share >= 0.5  # torch's lerp counts from the nearer end
        return int(
            self._call(
                parameter.data_ptr(), *(field.data_ptr() for field in state[:3]), gradient.data_ptr(), row.data_ptr(),
                parameter.numel(), self._nan, scale, -1.0 if values["maximize"] else 1.0,
                1 - lr * weight_decay if weight_decay else 1.0,
                share - 1 if is_from_gradient else share, is_from_gradient, beta2, 1 - beta2,
                math.sqrt(1 - beta2**step), values["eps"], -(lr / (1 - beta1**step)),
            )
        )  # fmt: skip


def compile_adamw_kernel(nan: int) -> AdamWKernel:
    """Compile it; blocks as ``compile_kernel`` does, and raises what it does. RuntimeError where there is no FMA."""
    if platform.machine() == "x86_64" and torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        raise RuntimeError(f"torch computes without FMA here ({torch.backends.cpu.get_cpu_capability()})")
    return AdamWKernel(compile_kernel(_adamw(_fused_multiply_add()), _SIGNATURE, result="int64"), nan)


def _fused_multiply_add() -> Callable[..., Any]:
    """Return a function for kernels: a * b + c of fp32, rounded once."""
    numba: Any = importlib.import_module("numba")
    extending: Any = importlib.import_module("numba.extending")
    fp32 = numba.types.float32

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    def fma(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
        return fp32(fp32, fp32, fp32), generate

    made: Callable[..., Any] = extending.intrinsic(fma)
    return made


def _adamw(fma: Callable[..., Any]) -> Callable[..., Any]:
    """Return what numba compiles; the row is a master's bits, which ties need twice."""

    def adamw(
        hi: Any, lo: Any, m: Any, v: Any, gradient: Any, row: Any, numel: int, nan: int, factor: Any, sign: Any,
        decay: Any, share: Any, is_from_gradient: int, beta2: Any, rest2: Any, correction2: Any, eps: Any, rate: Any,
    ) -> int:  # fmt: skip
        for first in range(0, numel - numel % 1024, 1024):
            least, largest = np.int32(0), np.int32(0)
            for i in range(1024):
                at = first + i
                low = np.int32(lo[at])
                least = min(least, low)
                row[i] = np.int32((np.int32(hi[at]) << np.int32(16)) + low)
                largest = max(largest, np.int32(np.int32(np.int32(hi[at]) & np.int32(0x7FFF)) << np.int32(16)))
                largest = max(largest, np.int32(np.float32(m[at]).view(np.int32) & np.int32(0x7FFFFFFF)))
                largest = max(largest, np.int32(np.float32(v[at]).view(np.int32) & np.int32(0x7FFFFFFF)))
                largest = max(largest, np.int32(np.int32(np.int32(gradient[at]) & np.int32(0x7FFF)) << np.int32(16)))
            if largest >= np.int32(0x7F800000):
                return first
            if least == np.int32(-0x8000):
                for i in range(1024):
                    bits = np.float32(v[first + i]).view(np.int32)
                    tie = np.int32(bits >> np.int32(31))  # -1 where marked
                    row[i] = np.int32(row[i] - np.int32(tie << np.int32(16)))
                    v[first + i] = np.int32(bits & np.int32(0x7FFFFFFF)).view(np.float32)
            least = np.int32(0)
            for i in range(1024):
                at = first + i
                g = np.int32(np.int32(gradient[at]) << np.int32(16)).view(np.float32)
                g = np.float32(np.float32(g * factor) * sign)
                old = m[at]
                new = fma(share, np.float32(g - old), g if is_from_gradient else old)
                square = fma(np.float32(rest2 * g), g, np.float32(v[at] * beta2))
                m[at], v[at] = new, square
                below = np.float32(np.float32(np.float32(math.sqrt(square)) / correction2) + eps)
                kept = np.float32(np.int32(row[i]).view(np.float32) * decay)
                bits = np.float32(kept + np.float32(np.float32(rate * new) / below)).view(np.int32)
                row[i] = bits
                least = min(least, np.int32(np.int16(bits)))
                lo[at] = np.int16(bits)
                odd = np.int32(np.int32(bits >> np.int32(16)) & np.int32(1))
                rounded = np.int32(np.int32(bits + np.int32(0x7FFF)) + odd) >> np.int32(16)  # nearest, ties to even
                hi[at] = np.int16(nan if np.int32(bits & np.int32(0x7FFFFFFF)) > np.int32(0x7F800000) else rounded)
            if least == np.int32(-0x8000):
                for i in range(1024):
                    if np.int32(row[i] & np.int32(0x1FFFF)) == np.int32(0x8000):
                        bits = np.float32(v[first + i]).view(np.int32)
                        v[first + i] = np.int32(bits | np.int32(-0x80000000)).view(np.float32)
        return numel - numel % 1024

    return adamw

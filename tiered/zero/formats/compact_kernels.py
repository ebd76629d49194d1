"""Kernels of ``state="compact"``: the torch operations of compact_codes.py, in one pass each, on plain memory only.

numba compiles them when a process first needs them, and nothing is kept: numba pickles its files, and no code here
reads those. Kernels take addresses, allocate nothing, start no thread, and run without the interpreter's lock.
Arithmetic is IEEE's; no operation is contracted or reordered.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import numpy as np

__all__ = ["Call", "CompactKernels", "compile_compact_kernels", "compile_kernel", "compile_nothing"]

Call = Callable[..., None]


def compile_kernel(function: Callable[..., None], signature: str) -> Call:
    """Compile ``function``, whose arguments ``signature`` names: numba's words, ``*`` behind those that are addresses.

    Blocks for 0.1 to 0.5 s of CPU time, the first time half a second more. Memory must be contiguous, aligned to its
    elements and alive during a call; inputs and outputs do not overlap. Any thread may call. Raises as numba does:
    ImportError where it is missing.

    Each np.int32 and the like fixes a type in a compiled function, and its additions wrap around. view() shows a value
    as other bits; numba wants it right behind a conversion.
    """
    numba: Any = importlib.import_module("numba")  # late: importing tiered takes none of its time
    words = signature.split()
    types = [getattr(numba.types, word.removesuffix("*")) for word in words]
    given = [numba.types.CPointer(each) if "*" in word else each for word, each in zip(words, types, strict=True)]
    with _less_said():
        kernel = numba.cfunc(numba.types.void(*given), nopython=True, error_model="numpy")(function)
    plain = [_PLAIN.get(word, ctypes.c_void_p) for word in words]
    prototype = ctypes.CFUNCTYPE(None, *plain)  # whose calls give the interpreter's lock away
    call: Any = prototype(kernel.address)
    call.kernel = kernel  # lifetime: the code is the kernel's
    return cast(Call, call)


def compile_nothing() -> None:
    """Compile a small kernel that is never called: in half a second it shows whether numba works. Raises as numba."""
    compile_kernel(_copy, "int32* int32* int64")


@contextlib.contextmanager
def _less_said() -> Iterator[None]:
    """Have numba's compiler log nothing below INFO: where the root logger is at DEBUG, it says 10,000 lines."""
    logger = logging.getLogger("numba")
    level = logger.level
    logger.setLevel(max(level, logging.INFO))
    try:
        yield
    finally:
        logger.setLevel(level)


def _copy(source: Any, target: Any, numel: int) -> None:
    for i in range(numel):
        target[i] = source[i]


_PLAIN: dict[str, Any] = {"int64": ctypes.c_int64, "uint32": ctypes.c_uint32}


# -- compact kernels ---------------------------------------------------------------------------------------------------


class CompactKernels(NamedTuple):
    """The compiled kernels: each takes the arguments of the function of its name, addresses for pointers.

    ``numbers, period, shift, is_random`` are those of ``Dither.numbers``.
    """

    fill_numbers: Call
    decode_master: Call
    encode_master: Call
    decode_signed: Call
    encode_signed: Call
    decode_positive: Call
    encode_positive: Call


def compile_compact_kernels() -> CompactKernels:
    """Compile all kernels; blocks for a second or two, and raises as ``compile_kernel`` does."""
    named = {each.__name__.removeprefix("_"): compile_kernel(each, words) for each, words in _SIGNATURES.items()}
    return CompactKernels(**named)


# numba compiles the functions below.


def _fill_numbers(numbers: Any, numel: int, seed: int, start: int, mask: int) -> None:
    """Fill ``numbers`` with the hash of the positions ``start + i`` under ``mask``; as ``Dither`` does by torch."""
    for i in range(numel):
        number = np.uint32(np.uint32(np.uint32((start + i) & mask) * np.uint32(0x9E3779B1)) + seed)
        number ^= number >> np.uint32(16)
        number = np.uint32(number * np.uint32(0x7FEB352D))
        number ^= number >> np.uint32(15)
        number = np.uint32(number * np.uint32(0x846CA68B))
        numbers[i] = number ^ (number >> np.uint32(16))


def _decode_master(hi: Any, remainder: Any, master: Any, numel: int) -> None:
    for i in range(numel):
        master[i] = np.int32((np.int32(hi[i]) << np.int32(16)) + (np.int32(remainder[i]) << np.int32(8)))


def _encode_master(
    master: Any, hi: Any, remainder: Any, numel: int, numbers: Any, period: int, shift: int, is_random: int
) -> None:
    mask = np.uint32(0xFF) if is_random else np.uint32(0)
    offset = np.uint32(0x8000) if is_random else np.uint32(0x8000 + 0x80)
    for first in range(0, numel, 128):
        place = first % period - first
        for i in range(first, min(numel, first + 128)):
            bits = master[i]
            if np.int32(bits & np.int32(0x7FFFFFFF)) > np.int32(0x7F800000):
                bits = np.int32(0x7FC00000)
            rounded = np.uint32(np.uint32(bits) + (((numbers[i + place] >> shift) & mask) + offset))
            hi[i] = np.int16(rounded >> np.uint32(16))
            remainder[i] = np.int8((rounded >> np.uint32(8)) ^ np.uint32(0x80))


def _decode_signed(code: Any, scale: Any, out: Any, numel: int) -> None:
    for first in range(0, numel, 128):
        unit = scale[first // 128] / np.float32(16129)
        for i in range(first, min(numel, first + 128)):
            value = np.float32(code[i])
            out[i] = np.float32(value * abs(value)) * unit


def _encode_signed(
    values: Any, code: Any, scale: Any, numel: int, numbers: Any, period: int, shift: int, is_random: int
) -> None:
    """``values``: bits of fp32."""
    mask = np.uint32(0x7FFF) if is_random else np.uint32(0)
    offset = np.uint32(128 << 15) if is_random else np.uint32((128 << 15) + (1 << 14))
    for first in range(0, numel, 128):
        stop = min(numel, first + 128)
        largest = np.int32(0)
        for i in range(first, stop):
            largest = max(largest, np.int32(values[i] & np.int32(0x7FFFFFFF)))
        if largest >= np.int32(0x7F800000):
            scale[first // 128] = np.float32(np.inf) if largest == np.int32(0x7F800000) else np.float32(np.nan)
            for i in range(first, stop):
                code[i] = np.int8(0)
            continue
        unit = np.int32(largest + np.int32(0)).view(np.float32)
        scale[first // 128] = unit
        factor = np.float32(np.float32(1) / max(unit, np.float32(1e-30))) * np.float32(16129)
        place = first % period - first
        for i in range(first, stop):
            square = np.float32(np.int32(values[i] & np.int32(0x7FFFFFFF)).view(np.float32) * factor)
            root = np.float32(math.sqrt(square))
            signed = np.int32(root.view(np.int32) | (values[i] & np.int32(-0x80000000)))
            shifted = np.float32(signed.view(np.float32) + np.float32(384))
            number = ((numbers[i + place] >> shift) & mask) + offset
            code[i] = np.int8(np.uint32(np.uint32(shifted.view(np.int32)) + number) >> np.uint32(15))


def _decode_positive(code: Any, scale: Any, out: Any, numel: int) -> None:
    """``scale``, ``out``: bits of fp32."""
    for first in range(0, numel, 128):
        smallest = np.int32(scale[first // 128] - np.int32(255 << 20))
        for i in range(first, min(numel, first + 128)):
            out[i] = max(np.int32((np.int32(code[i]) << np.int32(20)) + smallest), np.int32(0))


def _encode_positive(
    values: Any, code: Any, scale: Any, numel: int, numbers: Any, period: int, shift: int, is_random: int
) -> None:
    """``values``, ``scale``: bits of fp32. Values below zero, which no rule makes, are ordered as torch orders them."""
    mask = np.uint32(0xFFFFF) if is_random else np.uint32(0)
    offset = np.uint32(255 << 20) if is_random else np.uint32((255 << 20) + (1 << 19))
    for first in range(0, numel, 128):
        stop = min(numel, first + 128)
        largest, least, magnitude = np.int32(-0x80000000), np.int32(0x7FFFFFFF), np.int32(0)
        for i in range(first, stop):
            largest = max(largest, values[i])
            least = min(least, values[i])
            magnitude = max(magnitude, np.int32(values[i] & np.int32(0x7FFFFFFF)))
        if magnitude > np.int32(0x7F800000):
            scale[first // 128] = np.int32(0x7FC00000)
            for i in range(first, stop):
                code[i] = np.uint8(255)
            continue
        if largest < 0:  # all are below zero, whose order is that of their bits the other way round
            largest = np.int32(0) if least == np.int32(-0x80000000) or stop - first < 128 else least
        scale[first // 128] = largest
        place = first % period - first
        for i in range(first, stop):
            number = ((numbers[i + place] >> shift) & mask) + offset
            steps = np.int32(np.uint32(np.uint32(values[i] - largest) + number)) >> np.int32(20)
            code[i] = np.uint8(min(max(steps, np.int32(32)), np.int32(255)))


_DITHER = "uint32* int64 uint32 uint32"
_SIGNATURES: dict[Callable[..., None], str] = {
    _fill_numbers: "uint32* int64 uint32 int64 int64",
    _decode_master: "int16* int8* int32* int64",
    _encode_master: f"int32* int16* int8* int64 {_DITHER}",
    _decode_signed: "int8* float32* float32* int64",
    _encode_signed: f"int32* int8* float32* int64 {_DITHER}",
    _decode_positive: "uint8* int32* int32* int64",
    _encode_positive: f"int32* uint8* int32* int64 {_DITHER}",
}

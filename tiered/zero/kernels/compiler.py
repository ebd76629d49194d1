"""The compiler of kernels: functions on plain memory, compiled when a process first needs them and kept nowhere.

numba compiles them; it pickles its files, and no code here reads those. Kernels take addresses, allocate nothing, start
no thread, and run without the interpreter's lock. Arithmetic is IEEE's; no operation is contracted or reordered.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import logging
import re
from collections.abc import Callable, Iterator
from typing import Any, cast

__all__ = ["Call", "compile_kernel", "compile_nothing", "give_back_compiler"]

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


def give_back_compiler() -> None:
    """Take the pages of the compiler's library out of this process: 70 MiB of RSS that only a compilation needs.

    Only mappings that were never written to lose their pages, so these come back from the file when they are touched.
    Thread-safe. Where the operating system does not tell which mappings these are, nothing happens.
    """
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    with contextlib.suppress(OSError):
        with open("/proc/self/smaps", encoding="utf-8", errors="surrogateescape") as file:
            mappings = _MAPPING.findall(file.read())
        for start, end, protection, path, anonymous, swapped in mappings:
            if _COMPILER.search(path) and "w" not in protection and int(anonymous) + int(swapped) == 0:
                libc.madvise(int(start, 16), int(end, 16) - int(start, 16), _MADV_DONTNEED)


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


_COMPILER = re.compile(r"/libllvmlite\.|/libLLVM")
_MADV_DONTNEED = 4
# Of smaps: start, end, protection, path, and how much of it was written to, in memory and in swap.
_MAPPING = re.compile(
    r"^([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ \S+ *(.*)\n"
    r"(?:[A-Z].*\n)*?Anonymous: +(\d+) kB\n(?:[A-Z].*\n)*?Swap: +(\d+) kB$",
    re.MULTILINE,
)

_PLAIN: dict[str, Any] = {"int64": ctypes.c_int64, "uint32": ctypes.c_uint32}

"""ScratchFile: a file to measure on, the device that it lies on, and random bytes for its blocks.

The file has no name, so that nothing is left behind however the process ends.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType

import numpy as np

from tiered.bytes.arena import Arena
from tiered.bytes.device.engines import choose_engine, open_device
from tiered.bytes.device.file_device import FileDevice
from tiered.bytes.device.threads import ThreadsDevice
from tiered.bytes.device.uring import UringDevice
from tiered.errors import CapacityError
from tiered.measure.fio import Fio, find_fio, open_file_path
from tiered.measure.pattern import Pattern
from tiered.measure.rounds import Round, run_round, write_file
from tiered.units import MiB, format_bytes, round_up

__all__ = ["ScratchFile", "forget"]

_WRITE_BLOCK_NBYTES = 4 * MiB
_MOST_THREADS = 64


class ScratchFile:
    """An unnamed file of ``file_nbytes`` in ``directory`` on a device of its own, and ``memory_nbytes`` for blocks.

    The memory is in huge pages where the kernel grants them. It holds random bytes, which no drive can compress, until
    something is read into it; ``write_file`` fills the file with them.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        engine: str,
        memory_nbytes: int,
        file_nbytes: int,
        depth: int = 8,
    ) -> None:
        """Open device and memory; ``depth`` is the most operations there will be in flight.

        Raises TieredError; then nothing is left open.
        """
        self.file_nbytes = round_up(file_nbytes, _WRITE_BLOCK_NBYTES)
        self.engine_reason = "it was asked for"
        if engine == "auto":  # even if an earlier bench has written a profile
            engine, self.engine_reason = choose_engine(directory)
        self.path = ""  # of the scratch file, for other processes; once it is written
        self._exit = ExitStack()
        with ExitStack() as undo:
            # Order: the device is closed, and so nothing is in flight, before the memory goes.
            arena = Arena(round_up(memory_nbytes, _WRITE_BLOCK_NBYTES))
            undo.callback(arena.close)
            self.device = _open_device(os.fspath(directory), engine, depth)
            undo.callback(self.device.close)
            whole = arena.allocate_nowait(arena.nbytes)
            if whole is None:
                raise CapacityError(f"no {format_bytes(arena.nbytes)} of memory for the blocks")
            undo.callback(arena.release, whole)
            self.memory = whole.memory
            _fill(self.memory)
            self._exit = undo.pop_all()

    @property
    def engine(self) -> str:
        """The name of the engine that moves the bytes."""
        return self.device.engine

    @property
    def is_direct(self) -> bool:
        """Whether I/O passes the page cache by."""
        return self.device.is_direct

    def write_file(self, on_written: Callable[[int], object] = lambda nbytes: None) -> None:
        """Write the scratch file from start to end, so that every later write overwrites; blocks.

        ``on_written(nbytes)`` is called now and then, and may raise.
        """
        depth = min(16, len(self.memory) // _WRITE_BLOCK_NBYTES)
        pattern = Pattern("write", _WRITE_BLOCK_NBYTES, depth, self.file_nbytes, seconds=1)
        write_file(self.device, self.memory, pattern, on_written)
        self.path = open_file_path(self.device)

    def run(self, pattern: Pattern, *, is_spread: bool = False) -> Round:
        """Run one round on the file that ``write_file`` wrote; blocks. ``is_spread``: over all of the memory.

        An engine that goes through the page cache finds nothing there, makes one pass over the file at most, and what
        it leaves there is written back within the time. Raises TieredError, OSError.
        """
        if self.is_direct:
            ring = self.device if isinstance(self.device, UringDevice) else None
            if ring is not None:  # a block is one request, as fio's are
                ring.cut(round_up(pattern.block_nbytes, ring.alignment))
            try:
                return run_round(self.device, self.memory, pattern, is_spread=is_spread)
            finally:
                if ring is not None:
                    ring.cut()
        forget(self.path)
        once = min(pattern.max_nbytes or self.file_nbytes, self.file_nbytes)
        found = run_round(self.device, self.memory, replace(pattern, max_nbytes=once), is_spread=is_spread)
        if not found.write_nbytes:
            return found
        cpu_s, start = time.process_time(), time.perf_counter()
        forget(self.path)
        return replace(
            found, seconds=found.seconds + time.perf_counter() - start, cpu_s=found.cpu_s + time.process_time() - cpu_s
        )

    def find_fio(self) -> Fio | None:
        """Return a way to call fio that works on this file, or None where fio is not installed."""
        return find_fio(self.path, self.device.alignment)

    def close(self) -> None:
        """Close the device, and with it the scratch file; give the memory back. Idempotent."""
        self._exit.close()

    def __enter__(self) -> ScratchFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def forget(path: str) -> None:
    """Write the file's dirty pages back to the drive, and drop its pages from the cache; blocks. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fdatasync(fd)  # order: only clean pages are dropped
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def _open_device(directory: str, engine: str, depth: int) -> FileDevice:
    """Open the device of ``directory``; with as many threads as will be needed, where it is made of threads."""
    if engine == "threads":
        return ThreadsDevice(directory, num_threads=max(2, min(depth, _MOST_THREADS)))
    return open_device(directory, engine)


def _fill(memory: memoryview) -> None:
    """Fill ``memory`` with random bytes, which no drive can compress."""
    words = np.frombuffer(memory, dtype=np.uint64)
    random = np.random.default_rng()
    for start in range(0, len(words), MiB):
        part = words[start : start + MiB]
        part[:] = random.integers(0, 1 << 64, size=len(part), dtype=np.uint64)

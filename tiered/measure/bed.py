"""The test bed: a device on one directory or striped over several, its scratch file, and random bytes for the blocks.

The scratch file has no name, so nothing is left behind, whatever ends the process.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType

import numpy as np

from tiered.bytes.arena import Arena
from tiered.bytes.device.base import Device
from tiered.bytes.device.engines import choose_engine, open_device
from tiered.bytes.device.file_device import FileDevice
from tiered.bytes.device.striped import StripedDevice
from tiered.bytes.device.threads import ThreadsDevice
from tiered.bytes.device.uring import UringDevice
from tiered.errors import CapacityError
from tiered.measure.cold import forget
from tiered.measure.fio import Fio, find_fio, open_file_path
from tiered.measure.huge_pages import HUGE_PAGE_NBYTES, LentPages, RepeatedMemory
from tiered.measure.pattern import LARGE_NBYTES, Pattern
from tiered.measure.rounds import Round, cpu_seconds, run_round, write_file
from tiered.units import MiB, divide_up, format_bytes, round_up

__all__ = ["Bed"]

_WRITE_BLOCK_NBYTES = 4 * MiB
_MOST_THREADS = 64


class Bed:
    """A device with a scratch file of ``file_nbytes`` over ``directories``, and ``memory_nbytes`` of memory for blocks.

    The memory is in huge pages where the kernel grants them, and holds random bytes until something is read into it:
    incompressible, as what is in the file after ``write_file``. Several directories are striped by their ``weights``.
    Large operations of a pattern whose blocks in flight take ``periods`` bytes go through as much memory as those do,
    again and again, where the kernel lends huge pages for it; else through all of it.
    """

    def __init__(
        self,
        directories: Sequence[str | os.PathLike[str]],
        *,
        engine: str,
        memory_nbytes: int,
        file_nbytes: int,
        depth: int = 8,
        weights: Sequence[float] | None = None,
        stripe_nbytes: int = _WRITE_BLOCK_NBYTES,
        periods: Collection[int] = (),
    ) -> None:
        """Open device and memory; ``depth`` is the most operations there will be in flight on one directory.

        Raises TieredError; then nothing is left open.
        """
        self.directories = tuple(os.fspath(directory) for directory in directories)
        self.file_nbytes = round_up(file_nbytes, _WRITE_BLOCK_NBYTES)
        self.engine_reason = "it was asked for"
        if engine == "auto":  # whatever an earlier bench has written
            engine, self.engine_reason = choose_engine(self.directories[0])
        self.is_registered = False
        self.paths: list[str] = []  # of the scratch files, for other processes; once they are written
        self._exit = ExitStack()
        with ExitStack() as undo:
            # Order: devices are closed, and so nothing is in flight, before the memory goes.
            arena = Arena(round_up(memory_nbytes, _WRITE_BLOCK_NBYTES))
            undo.callback(arena.close)
            self._lent: list[LentPages] = []
            undo.callback(self.restore)
            self._repeated: dict[int, RepeatedMemory] = {}  # by the bytes that are in flight
            undo.callback(self._unmap_repeated)
            for nbytes in sorted(set(periods)):
                self._repeat(nbytes)
            self.parts: list[FileDevice] = []
            for directory in self.directories:
                self.parts.append(_open_device(directory, engine, depth))
                undo.callback(self.parts[-1].close)
            self.device: Device = self.parts[0]
            if len(self.parts) > 1:
                self.device = StripedDevice(self.parts, weights, stripe_nbytes=stripe_nbytes)
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
        """What moves the bytes; several are joined by "+"."""
        return "+".join(dict.fromkeys(part.engine for part in self.parts))

    @property
    def is_direct(self) -> bool:
        """Whether I/O passes the page cache by."""
        return all(part.is_direct for part in self.parts)

    def write_file(self, on_written: Callable[[int], object] = lambda nbytes: None) -> None:
        """Write the scratch file from start to end, so that every later write overwrites; blocks.

        ``on_written(nbytes)`` is called now and then, and may raise.
        """
        depth = min(16, len(self.memory) // _WRITE_BLOCK_NBYTES)
        pattern = Pattern("write", _WRITE_BLOCK_NBYTES, depth, self.file_nbytes, seconds=1)
        write_file(self.device, self.memory, pattern, on_written)
        self.paths = [open_file_path(part) for part in self.parts]

    def run(self, pattern: Pattern, *, is_spread: bool = False) -> Round:
        """Run one round on the file that ``write_file`` wrote; blocks. ``is_spread``: over all of the memory.

        An engine that goes through the page cache finds nothing there, makes one pass over the file at most, and what
        it leaves there is written back within the time. Raises TieredError, OSError.
        """
        if self.is_direct:
            rings = [part for part in self.parts if isinstance(part, UringDevice)]
            for ring in rings:  # a block is one request, as fio's are
                ring.cut(round_up(pattern.block_nbytes, ring.alignment))
            try:
                return run_round(self.device, self.memory, pattern, is_spread=is_spread)
            finally:
                for ring in rings:
                    ring.cut()
        self._forget()
        once = min(pattern.max_nbytes or self.file_nbytes, self.file_nbytes)
        found = run_round(self.device, self.memory, replace(pattern, max_nbytes=once), is_spread=is_spread)
        if not found.write_nbytes:
            return found
        cpu_s, start = cpu_seconds(), time.perf_counter()
        self._forget()
        return replace(
            found, seconds=found.seconds + time.perf_counter() - start, cpu_s=found.cpu_s + cpu_seconds() - cpu_s
        )

    def register_memory(self) -> bool:
        """Pin the memory for the engine, where it can and may be; else one warning is logged, and it works without."""
        memories = [self.memory, *(repeated.memory for repeated in self._repeated.values())]
        answers = [isinstance(part, UringDevice) and part.register_memory(*memories) for part in self.parts]
        self.is_registered = all(answers)
        return self.is_registered

    def can_run_large(self, pattern: Pattern) -> bool:
        """Whether ``run_large`` can run it: the engine cuts operations, and there is memory and file for two of them.

        Compiles what does so, if nobody has; blocks for up to two seconds then.
        """
        if not isinstance(self.device, UringDevice) or pattern.op not in ("read", "write"):
            return False
        if not self.is_direct or pattern.depth > self.device.most_depth:
            return False
        return self._large_nbytes(pattern) >= pattern.block_nbytes * pattern.depth and self.device.compile_loop()

    def run_large(self, pattern: Pattern) -> Round:
        """Run one round of operations of up to 128 MiB, which the engine cuts into the pattern's blocks; blocks.

        The drive sees what it sees in ``run`` and from fio: so many blocks of that size at a time, reads or writes; and
        the processor's caches see as much memory where ``is_repeated``. Latencies are those of whole operations.
        Only where ``can_run_large`` says so; raises as ``run``.
        """
        assert isinstance(self.device, UringDevice), self.device
        self.device.cut(pattern.block_nbytes, pattern.depth)
        try:
            large = replace(pattern, block_nbytes=self._large_nbytes(pattern), depth=2)
            return run_round(self.device, self._large_memory(pattern), large)
        finally:
            self.device.cut()

    def is_repeated(self, pattern: Pattern) -> bool:
        """Whether ``run_large`` goes through as much memory as ``run`` and fio do."""
        return pattern.block_nbytes * pattern.depth in self._repeated

    def restore(self) -> None:
        """Give back what would outlive a process that ends at once: huge pages. Idempotent; never raises."""
        for lent in self._lent:
            lent.restore()

    def _repeat(self, nbytes: int) -> None:
        """Make the memory of large operations that have ``nbytes`` in flight, where there are huge pages for it."""
        period = round_up(nbytes, HUGE_PAGE_NBYTES)
        self._lent.append(LentPages(divide_up(period, HUGE_PAGE_NBYTES)))
        if not self._lent[-1].lend():
            self._lent[-1].restore()
            return
        try:
            self._repeated[nbytes] = repeated = RepeatedMemory(period, 2 * LARGE_NBYTES)
        except OSError:  # others were faster
            self._lent[-1].restore()
        else:
            _fill(repeated.memory[:period])

    def _unmap_repeated(self) -> None:
        while self._repeated:
            self._repeated.popitem()[1].close()

    def _large_memory(self, pattern: Pattern) -> memoryview:
        repeated = self._repeated.get(pattern.block_nbytes * pattern.depth)
        return self.memory if repeated is None else repeated.memory

    def _large_nbytes(self, pattern: Pattern) -> int:
        most = min(LARGE_NBYTES, len(self._large_memory(pattern)) // 2, self.file_nbytes // 2)
        return most // pattern.block_nbytes * pattern.block_nbytes

    def _forget(self) -> None:
        for path in self.paths:
            forget(path)

    def find_fio(self) -> Fio | None:
        """Return a way to call fio that works on this file, or None where fio is not installed."""
        return find_fio(self.paths[0], self.device.alignment)

    def close(self) -> None:
        """Close the device, and with it the scratch file; give the memory back. Idempotent."""
        self._exit.close()

    def __enter__(self) -> Bed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


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

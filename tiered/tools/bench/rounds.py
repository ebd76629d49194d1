"""Rounds of blocks on a scratch file: a closed loop that keeps so many blocks in flight, and fio beside it.

The loop runs in the device's own threads: each completion submits the next block of its direction. The file has no
name, so that nothing is left behind however the process ends. fio is the reference: it runs the same pattern on the
same file, in huge pages as ours, as a process of its own.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tiered.bytes.arena import Arena
from tiered.bytes.device.base import SCRATCH, Device, IOClass, Operation
from tiered.bytes.device.engines import choose_engine, open_device
from tiered.bytes.device.file_device import FileDevice
from tiered.bytes.device.threads import ThreadsDevice
from tiered.bytes.device.uring import UringDevice
from tiered.bytes.private_file import opened
from tiered.errors import CapacityError, DeviceError, TieredError
from tiered.units import MiB, format_bytes, round_up

__all__ = [
    "OPS", "STEP_READ", "STEP_WRITTEN", "Direction", "Fio", "FioError", "Latency", "Pattern", "Round", "ScratchFile",
    "forget", "run_round",
]  # fmt: skip

OPS = ("read", "write", "mixed")

STEP_READ, STEP_WRITTEN = 14, 12
"""Bytes of a parameter that a step moves: those of bf16 and state="exact" with nothing held (README)."""

_MAX_LATENCIES = 1 << 18  # of one direction; a longer round keeps the last ones
_WRITE_BLOCK_NBYTES = 4 * MiB
_MOST_THREADS = 64
_FIO_ENGINES = ("io_uring", "libaio")  # the first that works here; no other keeps a depth
# fio's buffers come from malloc: in huge pages (glibc 2.35), and written to before they are used, as ours are, or the
# kernel would look for those pages while it is timed.
_HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.perturb=85"}
_START_S = 30.0  # the time that fio may take beyond its run time before it is called stuck


@dataclass(frozen=True, slots=True)
class Direction:
    """One direction of a pattern: ``depth`` blocks in flight, in order over its part of the file, again and again."""

    io_class: IOClass
    depth: int
    first_block: int
    num_blocks: int

    @property
    def is_write(self) -> bool:
        """Whether the blocks are written."""
        return self.io_class is IOClass.WRITE


@dataclass(frozen=True, slots=True)
class Pattern:
    """The blocks that a round moves: sequential, wrapping at the end of the scratch file.

    A round ends after ``seconds``, or after ``max_nbytes`` where they are given, whichever comes first.
    "mixed" reads the first half of the file and writes the second, with 14 of 26 blocks in flight reads, as a training
    step mixes them: what is swapped in is not what was just swapped out. It ends when either has moved its half.
    """

    op: str
    block_nbytes: int
    depth: int
    file_nbytes: int
    seconds: float
    max_nbytes: int | None = None

    @property
    def max_blocks(self) -> int | None:
        """The most blocks that one direction moves."""
        return self.max_nbytes and max(1, self.max_nbytes // self.block_nbytes // len(self.directions))

    @property
    def directions(self) -> tuple[Direction, ...]:
        """The pattern by direction; fio is given the same."""
        num_blocks = self.file_nbytes // self.block_nbytes
        if self.op != "mixed":
            io_class = IOClass.WRITE if self.op == "write" else IOClass.PREFETCH
            return (Direction(io_class, self.depth, 0, num_blocks),)
        half, write_depth = num_blocks // 2, round(self.depth * STEP_WRITTEN / (STEP_READ + STEP_WRITTEN))
        reads = Direction(IOClass.PREFETCH, self.depth - write_depth, 0, half)
        return reads, Direction(IOClass.WRITE, write_depth, half, half)


@dataclass(frozen=True, slots=True)
class Latency:
    """From submission to completion of one block, in seconds."""

    p50_s: float
    p99_s: float
    p999_s: float
    max_s: float

    @classmethod
    def of(cls, seconds: npt.NDArray[np.float64]) -> Latency:
        """Return the percentiles of at least one time; between two of them, the higher."""
        return cls(*np.percentile(seconds, (50, 99, 99.9, 100), method="higher").tolist())


@dataclass(frozen=True, slots=True)
class Round:
    """The figures of one round of ours or of fio's: bytes, wall time, CPU time of all threads, and latencies.

    ``seconds`` runs from the first submission to the last completion.
    """

    read_nbytes: int
    write_nbytes: int
    seconds: float
    cpu_s: float
    latency: Latency

    @property
    def nbytes(self) -> int:
        """Bytes in both directions."""
        return self.read_nbytes + self.write_nbytes

    @property
    def gb_per_s(self) -> float:
        """10^9 bytes a second, both directions together."""
        return self.nbytes / self.seconds / 1e9

    @property
    def cpu_s_per_gb(self) -> float:
        """CPU-seconds per 10^9 bytes."""
        return self.cpu_s / (self.nbytes / 1e9)


def run_round(
    device: Device,
    memory: memoryview,
    pattern: Pattern,
    *,
    is_spread: bool = False,
    watch: Callable[[], object] = lambda: None,
    watch_every_s: float = 1.0,
) -> Round:
    """Run one round; blocks. ``memory`` holds at least ``depth`` blocks, aligned, and is overwritten by reads.

    ``is_spread`` uses all of it in turn, as a swap of tensors does. Otherwise it is the same few blocks again and
    again, as in fio, which are then in the processor's caches when the drive's bytes arrive.
    ``watch`` is called from this thread while it runs, and may raise to end it. Raises what the device raised or
    reported, once nothing is in flight any more.
    """
    loop = _Loop(device, memory, pattern, is_spread=is_spread)
    cpu_s, start = time.process_time(), time.perf_counter()  # io_uring's kernel workers count as threads of ours
    try:
        loop.begin(start + pattern.seconds)
        while not loop.finished.wait(watch_every_s):
            watch()
    except BaseException:  # an interrupt: transfers in flight still use the memory, until the device is closed
        loop.stop()
        raise
    cpu_s = time.process_time() - cpu_s
    if loop.errors:
        raise loop.errors[0]
    nbytes = [0, 0]
    for slot in loop.slots:
        nbytes[slot.direction.is_write] += slot.num_done * pattern.block_nbytes
    latency = Latency.of(np.concatenate([np.array(seconds) for seconds in loop.latencies.values()]))
    return Round(nbytes[False], nbytes[True], loop.end - start, cpu_s, latency)


class _Loop:
    """One pattern on one device. Its slots are busy from ``begin`` until each has seen the end.

    ``next`` of a counter and ``append``, which the slots of a direction share, are single steps under the GIL.
    """

    def __init__(self, device: Device, memory: memoryview, pattern: Pattern, *, is_spread: bool) -> None:
        nbytes, num_slots = pattern.block_nbytes, pattern.depth
        if len(memory) < nbytes * num_slots:
            raise ValueError(f"{num_slots} blocks of {nbytes} bytes need more memory than {len(memory)} bytes")
        self.submit = device.submit
        self.max_blocks = sys.maxsize if pattern.max_blocks is None else pattern.max_blocks
        self.deadline = self.end = 0.0
        self.errors: list[Exception] = []
        self.finished = threading.Event()  # nothing is in flight any more; the device ends every operation in time
        self._num_finished = itertools.count(1)
        num_blocks = len(memory) // nbytes if is_spread else num_slots
        blocks = [memory[start : start + nbytes] for start in range(0, nbytes * num_blocks, nbytes)]
        self.turns = {direction: itertools.count() for direction in pattern.directions}
        self.latencies = {direction: deque[float](maxlen=_MAX_LATENCIES) for direction in pattern.directions}
        owners = [direction for direction in pattern.directions for _ in range(direction.depth)]
        self.slots = [_Slot(self, direction, blocks[number::num_slots]) for number, direction in enumerate(owners)]

    def begin(self, deadline: float) -> None:
        """Submit the first blocks; none is submitted after ``deadline`` (of time.perf_counter)."""
        self.deadline = deadline
        for slot in self.slots:
            slot.submit(time.perf_counter())

    def stop(self) -> None:
        """Let no more be submitted."""
        self.deadline = 0.0

    def fail(self, error: Exception) -> None:
        """Stop, and keep ``error``: the round raises the first one when it ends."""
        self.errors.append(error)
        self.stop()

    def finish_slot(self, now: float) -> None:
        """Count a slot that will submit no more; any thread."""
        self.end = max(self.end, now)  # the last slot's is the latest: a lost update is an earlier one
        if next(self._num_finished) == len(self.slots):
            self.end = max(self.end, now)
            self.finished.set()


class _Slot:
    """One place in the queue with its blocks of memory: one is in flight, or the slot finished for good."""

    __slots__ = (
        "_blocks", "_latencies", "_loop", "_operation", "_operations", "_start", "_turns", "direction", "num_done",
    )  # fmt: skip

    def __init__(self, loop: _Loop, direction: Direction, blocks: Sequence[memoryview]) -> None:
        self.direction = direction
        self.num_done = 0
        self._loop = loop
        self._turns = loop.turns[direction]
        self._latencies = loop.latencies[direction]
        self._blocks = blocks
        self._operation = Operation(  # one for all turns: it is the submitter's again once it is done
            is_write=direction.is_write,
            file=SCRATCH,
            offset=0,
            memory=blocks[0],
            io_class=direction.io_class,
            on_done=self._on_done,
        )
        self._operations = (self._operation,)
        self._start = 0.0

    def submit(self, now: float) -> None:
        """Submit the next block of the direction ``now``. One thread at a time: nothing of this slot is in flight."""
        loop, operation, direction = self._loop, self._operation, self.direction
        turn = next(self._turns)
        if turn >= loop.max_blocks:
            loop.stop()
            loop.finish_slot(now)
            return
        operation.offset = (direction.first_block + turn % direction.num_blocks) * operation.nbytes
        if len(self._blocks) > 1:
            operation.memory = self._blocks[self.num_done % len(self._blocks)]
        self._start = now
        try:
            loop.submit(self._operations)
        except TieredError as error:
            loop.fail(error)
            loop.finish_slot(time.perf_counter())

    def _on_done(self, operation: Operation) -> None:
        now = time.perf_counter()
        if operation.error is None:
            self._latencies.append(now - self._start)
            self.num_done += 1
        else:
            self._loop.fail(operation.error)
        if now < self._loop.deadline:
            self.submit(now)
        else:
            self._loop.finish_slot(now)


# -- fio and the file ----------------------------------------------------------------------------------------------


class FioError(DeviceError):
    """fio is there and failed; its measurement is not known."""


class Fio:
    """A way to call fio: its path, and the engine that works here."""

    def __init__(self, program: str, engine: str) -> None:
        self.engine = engine
        self._program = program

    def run(self, pattern: Pattern, file: str) -> Round:
        """Run ``pattern`` on ``file`` and return fio's figures; blocks.

        Raises FioError when fio fails. Interrupted, it ends fio. The CPU time is as fio counts that of its jobs.
        """
        limits = [f"--runtime={max(1, round(pattern.seconds * 1000))}ms"]
        if pattern.max_blocks is None:
            limits.append("--time_based")
        else:
            limits.append(f"--io_size={pattern.max_blocks * pattern.block_nbytes}")
        wait_s = pattern.seconds + _START_S
        try:
            ended = subprocess.run(
                self.command(pattern, file, limits),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=wait_s,
                env={**os.environ, **_HUGE_PAGES},
                process_group=0,  # Ctrl-C on the terminal is ours to obey: after the round
            )
        except subprocess.TimeoutExpired:
            raise FioError(f"fio did not end within {wait_s:.0f} s; check the drive") from None
        complaint = re.sub(r"\s+", " ", (ended.stderr or ended.stdout).strip())[:200] or "it said nothing"
        try:
            report: Mapping[str, Any] = json.loads(ended.stdout[ended.stdout.index("{") :])
        except ValueError:
            raise FioError(f"fio did not report: {complaint}") from None
        failed = next((job for job in report["jobs"] if job["error"]), None)
        if failed:
            raise FioError(f"fio failed with error {failed['error']}: {complaint}")
        return _parse(report)

    def command(self, pattern: Pattern, file: str, limits: Sequence[str]) -> list[str]:
        """Return the command line: one job per direction, each over the same blocks as ours."""
        command = [
            self._program, "--output-format=json", f"--ioengine={self.engine}", "--direct=1", "--overwrite=1",
            "--allow_file_create=0", "--randrepeat=0", "--scramble_buffers=0", f"--bs={pattern.block_nbytes}",
            "--clat_percentiles=0", "--lat_percentiles=1", "--percentile_list=50:99:99.9",
        ]  # fmt: skip
        if pattern.op == "mixed":
            command.append("--exitall")
        for index, direction in enumerate(pattern.directions):
            verb = "write" if direction.is_write else "read"
            command += [
                f"--name={verb}-{index}", f"--filename={file}", f"--rw={verb}", f"--iodepth={direction.depth}",
                f"--offset={direction.first_block * pattern.block_nbytes}",
                f"--size={direction.num_blocks * pattern.block_nbytes}", *limits,
            ]  # fmt: skip
        return command


class ScratchFile(AbstractContextManager["ScratchFile"]):
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
        self.path = ""  # of the scratch file, for other processes until the device closes; once it is written
        self._exit = ExitStack()
        with ExitStack() as undo:
            # Order: the device is closed, and so nothing is in flight, before the memory goes.
            arena = Arena(round_up(memory_nbytes, _WRITE_BLOCK_NBYTES))
            undo.callback(arena.close)
            self.device: FileDevice = (
                ThreadsDevice(os.fspath(directory), num_threads=max(2, min(depth, _MOST_THREADS)))
                if engine == "threads"  # as many as will be needed
                else open_device(os.fspath(directory), engine)
            )
            undo.callback(self.device.close)
            whole = arena.allocate_nowait(arena.nbytes)
            if whole is None:
                raise CapacityError(f"no {format_bytes(arena.nbytes)} of memory for the blocks")
            undo.callback(arena.release, whole)
            self.memory = whole.memory
            words, random = np.frombuffer(self.memory, dtype=np.uint64), np.random.default_rng()
            for part in np.split(words, range(MiB, len(words), MiB)):
                part[:] = random.integers(0, 1 << 64, size=len(part), dtype=np.uint64)
            self._exit = undo.pop_all()

    def write_file(self, check: Callable[[], object] = lambda: None) -> None:
        """Write the scratch file from start to end, so that every later write overwrites; blocks.

        ``check()`` is called now and then, and may raise to end it.
        """
        block, nbytes = _WRITE_BLOCK_NBYTES, self.file_nbytes
        once = Pattern("write", block, min(16, len(self.memory) // block), nbytes, seconds=math.inf, max_nbytes=nbytes)
        self.device.grow(SCRATCH, nbytes)
        run_round(self.device, self.memory, once, watch=check, watch_every_s=0.1)
        self.path = f"/proc/{os.getpid()}/fd/{self.device.descriptor(SCRATCH)}"

    def run(self, pattern: Pattern, *, is_spread: bool = False) -> Round:
        """Run one round on the file that ``write_file`` wrote; blocks. ``is_spread``: over all of the memory.

        An engine that goes through the page cache finds nothing there, makes one pass over the file at most, and what
        it leaves there is written back within the time. Raises TieredError, OSError.
        """
        if self.device.is_direct:
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
        """Return a way to call fio that works on this file, or None where fio is not installed; blocks.

        Raises FioError for a fio that is there and works with no engine.
        """
        program = shutil.which("fio")
        if program is None:
            return None
        reasons: list[FioError] = []
        for engine in _FIO_ENGINES:
            fio = Fio(program, engine)
            try:
                fio.run(Pattern("read", self.device.alignment, 1, self.device.alignment, 0.01), self.path)
                return fio
            except FioError as error:
                reasons.append(error)
        raise FioError(f"{program} is there and does not work: {reasons[0]}; mend it or take it off the path")

    def close(self) -> None:
        """Close the device, and with it the scratch file; give the memory back. Idempotent."""
        self._exit.close()

    def __exit__(self, *error: object) -> None:
        self.close()


def forget(path: str) -> None:
    """Write the file's dirty pages back to the drive, and drop its pages from the cache; blocks. Raises OSError."""
    with opened(path, os.O_RDONLY) as fd:
        os.fdatasync(fd)  # order: only clean pages are dropped
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _parse(report: Mapping[str, Any]) -> Round:
    jobs_cpu_s = sum((job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000 for job in report["jobs"])
    sides = [job[verb] for job in report["jobs"] for verb in ("read", "write") if job[verb]["io_bytes"]]
    if not sides:
        raise FioError("fio moved no byte; check the drive")
    slowest = max(sides, key=lambda side: float(side["lat_ns"]["percentile"]["99.000000"]))["lat_ns"]
    p50, p99, p999 = (float(slowest["percentile"][key]) / 1e9 for key in ("50.000000", "99.000000", "99.900000"))
    return Round(
        read_nbytes=sum(job["read"]["io_bytes"] for job in report["jobs"]),
        write_nbytes=sum(job["write"]["io_bytes"] for job in report["jobs"]),
        seconds=max(side["runtime"] for side in sides) / 1000,  # fio counts whole milliseconds
        cpu_s=jobs_cpu_s,
        latency=Latency(p50, p99, p999, float(slowest["max"]) / 1e9),
    )

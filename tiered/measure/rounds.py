"""One round on a device: a closed loop that keeps so many blocks in flight for so long, and its figures.

The loop runs in the device's own threads: each completion submits the next block of its direction. ``pairs`` and the
command choose the rounds.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tiered.bytes.device.base import Device, IOClass, Operation
from tiered.errors import TieredError
from tiered.measure.pattern import Direction, Pattern
from tiered.units import format_short

__all__ = [
    "Latency", "Moved", "Round", "duplex_of", "median_ratio", "move_seconds", "row_line", "run_round", "spread",
    "write_file",
]  # fmt: skip

_MAX_LATENCIES = 1 << 18  # of one stream; a longer round keeps the last ones
_MAX_BYTES_PER_S = 64e9  # beyond any drive: the latencies a round may have


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
        p50, p99, p999 = np.percentile(seconds, (50, 99, 99.9), method="higher")
        return cls(float(p50), float(p99), float(p999), float(seconds.max()))


@dataclass(frozen=True, slots=True)
class Moved:
    """The bytes moved in a time, and the CPU time of all threads of the process, user and system."""

    read_nbytes: int
    write_nbytes: int
    seconds: float
    cpu_s: float

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


@dataclass(frozen=True, slots=True)
class Round(Moved):
    """The figures of one round; ``seconds`` runs from the first submission to the last completion."""

    read_latencies_s: npt.NDArray[np.float64]  # shape (num_reads,), of the last quarter million
    write_latencies_s: npt.NDArray[np.float64]

    @property
    def latencies_s(self) -> npt.NDArray[np.float64]:
        """Those of both directions, reads first."""
        return np.concatenate((self.read_latencies_s, self.write_latencies_s))


def spread(rates: Sequence[float]) -> tuple[int, float, float, float]:
    """Return the number of ``rates``, their median, the least and the most."""
    return len(rates), statistics.median(rates), min(rates), max(rates)


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the median over pairs of rounds."""
    return statistics.median(our / their for our, their in zip(ours, theirs, strict=True))


def row_line(op: str, nbytes: int, rates: tuple[float, float, float], reference: float, ratio: float) -> str:
    """Return a row for people: ``rates`` are the median, the least and the most."""
    median, least, most = rates
    return (
        f"{op:<8} {format_short(nbytes):>7} {median:>9.2f} {f'{least:.2f}-{most:.2f}':>14} {reference:>6.2f} "
        f"{ratio:>6.2f}"
    )


def duplex_of(mixed_read: float, mixed_write: float, read: float, write: float) -> float:
    """Return how far reads and writes run beside each other: 0 they share the drive, 1 neither slows the other.

    The rates are of both directions at once, and of each alone. In a second of both the drive did what takes r seconds
    of reads alone and w of writes alone; with no overlap r + w = 1, with all of it the longer one is 1: d solves
    1 = max(r, w) + (1 - d) * min(r, w).
    """
    r, w = mixed_read / read, mixed_write / write
    if min(r, w) <= 0:
        return 0.0
    return min(1.0, max(0.0, 1 - (1 - max(r, w)) / min(r, w)))


def move_seconds(
    read_nbytes: float, write_nbytes: float, read_gb_per_s: float, write_gb_per_s: float, *, duplex: float
) -> float:
    """Return the time to move bytes both ways: max(r, w) + (1 - duplex) * min(r, w), with r and w of each way alone."""
    r, w = read_nbytes / (read_gb_per_s * 1e9), write_nbytes / (write_gb_per_s * 1e9)
    return max(r, w) + (1 - duplex) * min(r, w)


def run_round(
    device: Device,
    memory: memoryview,
    pattern: Pattern,
    *,
    is_spread: bool = False,
    watch: Callable[[], bool] | None = None,
    watch_every_s: float = 1.0,
) -> Round:
    """Run one round; blocks. ``memory`` holds at least ``depth`` blocks, aligned, and is overwritten by reads.

    ``is_spread`` uses all of it in turn, as a swap of tensors does. Otherwise it is the same few blocks again and
    again, as in fio, which are then in the processor's caches when the drive's bytes arrive.
    ``watch`` is called from this thread while it runs; the round ends early when it returns False. Raises what the
    device raised or reported, once nothing is in flight any more.
    """
    loop = _Loop(device, memory, pattern, is_spread=is_spread)
    cpu_s, start = time.process_time(), time.perf_counter()  # io_uring's kernel workers count as threads of ours
    try:
        loop.begin(start + pattern.seconds)
        while not loop.finished.wait(watch_every_s if watch else None):
            if watch is not None and not watch():
                loop.stop()
                watch = None
    except BaseException:  # an interrupt: transfers in flight still use the memory, until the device is closed
        loop.stop()
        raise
    cpu_s = time.process_time() - cpu_s
    loop.check()
    nbytes = {stream.direction.is_write: stream.num_done * pattern.block_nbytes for stream in loop.streams}
    latencies = {stream.direction.is_write: stream.times() for stream in loop.streams}
    none = np.empty(0)
    return Round(
        read_nbytes=nbytes.get(False, 0),
        write_nbytes=nbytes.get(True, 0),
        seconds=loop.end - start,
        cpu_s=cpu_s,
        read_latencies_s=latencies.get(False, none),
        write_latencies_s=latencies.get(True, none),
    )


def write_file(device: Device, memory: memoryview, pattern: Pattern, on_written: Callable[[int], object]) -> None:
    """Write the pattern's file once from start to end, so that it is overwritten from now on; blocks.

    The file is grown first. ``on_written(nbytes)`` is called now and then from this thread.
    """
    nbytes = pattern.file_nbytes // pattern.block_nbytes * pattern.block_nbytes
    device.grow(pattern.file, nbytes)
    step = pattern.block_nbytes * pattern.depth
    done = threading.Semaphore(0)
    for start in range(0, nbytes, step):
        operations = [
            Operation(
                is_write=True,
                file=pattern.file,
                offset=offset,
                memory=memory[offset - start :][: pattern.block_nbytes],
                io_class=IOClass.WRITE,
                on_done=lambda operation: done.release(),
            )
            for offset in range(start, min(start + step, nbytes), pattern.block_nbytes)
        ]
        device.submit(operations)
        for _ in operations:
            done.acquire()
        for operation in operations:
            if operation.error is not None:
                raise operation.error
        on_written(len(operations) * pattern.block_nbytes)


class _Loop:
    """One pattern on one device. Its streams' slots are busy from ``begin`` until each has seen the end."""

    def __init__(self, device: Device, memory: memoryview, pattern: Pattern, *, is_spread: bool) -> None:
        nbytes = pattern.block_nbytes
        self.num_slots = pattern.num_slots
        if len(memory) < nbytes * self.num_slots:
            raise ValueError(f"{self.num_slots} blocks of {nbytes} bytes need more memory than {len(memory)} bytes")
        self.device = device
        self.pattern = pattern
        self.end = 0.0
        self.deadline = 0.0
        self._errors: list[Exception] = []
        self.finished = threading.Event()  # nothing is in flight any more; the device ends every operation in time
        self._num_finished = itertools.count(1)
        num_blocks = len(memory) // nbytes if is_spread else self.num_slots
        blocks = [memory[start : start + nbytes] for start in range(0, nbytes * num_blocks, nbytes)]
        shares = (blocks[slot :: self.num_slots] for slot in range(self.num_slots))
        self.streams = [_Stream(self, direction, shares) for direction in pattern.directions]

    def begin(self, deadline: float) -> None:
        """Submit the first blocks; none is submitted after ``deadline`` (of time.perf_counter)."""
        self.deadline = deadline
        for stream in self.streams:
            for slot in stream.slots:
                slot.submit(time.perf_counter())

    def check(self) -> None:
        """Raise the first error there was."""
        if self._errors:
            raise self._errors[0]

    def stop(self) -> None:
        """Let no more be submitted."""
        self.deadline = 0.0

    def fail(self, error: Exception) -> None:
        """Stop, and keep ``error`` for ``check``."""
        self._errors.append(error)
        self.stop()

    def finish_slot(self, now: float) -> None:
        """Count a slot that will submit no more; any thread."""
        self.end = max(self.end, now)  # the last slot's is the latest: a lost update is an earlier one
        if next(self._num_finished) == self.num_slots:
            self.end = max(self.end, now)
            self.finished.set()


class _Stream:
    """The blocks of one direction. Counters are ``itertools.count``: ``next`` of one is a single step under the GIL."""

    def __init__(self, loop: _Loop, direction: Direction, shares: Iterator[Sequence[memoryview]]) -> None:
        self.direction = direction
        self.turns = itertools.count()
        self.submit = loop.device.submit
        self.block_nbytes = loop.pattern.block_nbytes
        self.start = direction.first_block * self.block_nbytes
        self.num_blocks = direction.num_blocks
        num_latencies = direction.depth + int(_MAX_BYTES_PER_S * loop.pattern.seconds / self.block_nbytes)
        self.max_blocks = sys.maxsize if loop.pattern.max_blocks is None else loop.pattern.max_blocks
        self.capacity = min(num_latencies, self.max_blocks, _MAX_LATENCIES)
        self.latencies = array("d", bytes(8 * self.capacity))
        self.places = itertools.count()  # in ``latencies``, modulo their capacity
        self.slots = [_Slot(loop, self, share) for share in itertools.islice(shares, direction.depth)]

    @property
    def num_done(self) -> int:
        """Blocks that have moved; for after the end."""
        return sum(slot.num_done for slot in self.slots)

    def times(self) -> npt.NDArray[np.float64]:
        """Return the latencies kept, a view of shape (at most num_done,)."""
        return np.frombuffer(self.latencies, dtype=np.float64)[: self.num_done]


class _Slot:
    """One place in the queue with its blocks of memory: one is in flight, or the slot finished for good."""

    __slots__ = ("_blocks", "_loop", "_operation", "_operations", "_start", "_stream", "num_done")

    def __init__(self, loop: _Loop, stream: _Stream, blocks: Sequence[memoryview]) -> None:
        self._loop = loop
        self._stream = stream
        self._blocks = blocks
        self._operation = Operation(  # one for all turns: it is the submitter's again once it is done
            is_write=stream.direction.is_write,
            file=loop.pattern.file,
            offset=0,
            memory=blocks[0],
            io_class=stream.direction.io_class,
            on_done=self._on_done,
        )
        self._operations = (self._operation,)
        self._start = 0.0
        self.num_done = 0

    def submit(self, now: float) -> None:
        """Submit the next block of the direction ``now``. One thread at a time: nothing of this slot is in flight."""
        stream = self._stream
        turn = next(stream.turns)
        if turn >= stream.max_blocks:
            self._loop.stop()
            self._loop.finish_slot(now)
            return
        self._operation.offset = stream.start + turn % stream.num_blocks * stream.block_nbytes
        if len(self._blocks) > 1:
            self._operation.memory = self._blocks[self.num_done % len(self._blocks)]
        self._start = now
        try:
            stream.submit(self._operations)
        except TieredError as error:
            self._loop.fail(error)
            self._loop.finish_slot(time.perf_counter())

    def _on_done(self, operation: Operation) -> None:
        now = time.perf_counter()
        if operation.error is None:
            stream = self._stream
            stream.latencies[next(stream.places) % stream.capacity] = now - self._start
            self.num_done += 1
        else:
            self._loop.fail(operation.error)
        if now < self._loop.deadline:
            self.submit(now)
        else:
            self._loop.finish_slot(now)

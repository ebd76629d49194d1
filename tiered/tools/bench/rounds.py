"""One round on a device: a closed loop that keeps so many blocks in flight for so long, and its figures.

The loop runs in the device's own threads: each completion submits the next block of its direction.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tiered.bytes.device.base import SCRATCH, Device, IOClass, Operation
from tiered.errors import TieredError
from tiered.units import format_bytes

__all__ = ["DEMAND_OPS", "OPS", "Direction", "Latency", "Moved", "Pattern", "Round", "run_round"]

OPS = ("read", "write", "mixed")
DEMAND_OPS = ("demand", "demand beside writes")

_MAX_LATENCIES = 1 << 18  # of one direction; a longer round keeps the last ones


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
    "mixed" reads the first half of the file and writes the second, each with half of the depth: the blocks of a step
    that are swapped in are not those just swapped out. It ends when either direction has moved its half.
    "demand" is one demand read after another over the first half; "demand beside writes" has ``depth`` writes in flight
    over the second half as well. Raises ValueError for blocks, a depth or a file that make no pattern.
    """

    op: str
    block_nbytes: int
    depth: int
    file_nbytes: int
    seconds: float
    max_nbytes: int | None = None

    def __post_init__(self) -> None:
        if self.op not in (*OPS, *DEMAND_OPS):
            raise ValueError(f"op must be one of {', '.join((*OPS, *DEMAND_OPS))}; got {self.op!r}")
        if self.block_nbytes < 1 or self.depth < 1 or not self.seconds > 0:
            raise ValueError(f"block, depth and seconds must be positive: {self!r}")
        if self.op == "mixed" and self.depth < 2:
            raise ValueError(f"mixed needs a depth of 2 or more, a read and a write; got {self.depth}")
        if self.file_nbytes < self.block_nbytes * (1 if self.op in ("read", "write") else 2):
            raise ValueError(f"a file of {format_bytes(self.file_nbytes)} is too small: {self!r}")

    @property
    def max_blocks(self) -> int | None:
        """The most blocks that one direction moves."""
        return self.max_nbytes and max(1, self.max_nbytes // self.block_nbytes // len(self.directions))

    @property
    def directions(self) -> tuple[Direction, ...]:
        """The pattern by direction; fio is given the same."""
        num_blocks = self.file_nbytes // self.block_nbytes
        half, write_depth = num_blocks // 2, self.depth // 2 if self.op == "mixed" else self.depth
        if self.op in ("read", "write"):
            io_class = IOClass.WRITE if self.op == "write" else IOClass.PREFETCH
            return (Direction(io_class, self.depth, 0, num_blocks),)
        reads = Direction(IOClass.DEMAND, 1, 0, half)
        if self.op == "mixed":
            reads = Direction(IOClass.PREFETCH, self.depth - write_depth, 0, half)
        return (reads,) if self.op == "demand" else (reads, Direction(IOClass.WRITE, write_depth, half, half))

    @property
    def num_slots(self) -> int:
        """Blocks in flight in all."""
        return sum(direction.depth for direction in self.directions)


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
    nbytes, latencies = [0, 0], [np.empty(0), np.empty(0)]
    for slot in loop.slots:
        nbytes[slot.direction.is_write] += slot.num_done * pattern.block_nbytes
    for direction, seconds in loop.latencies.items():
        latencies[direction.is_write] = np.array(seconds)
    return Round(nbytes[False], nbytes[True], loop.end - start, cpu_s, latencies[False], latencies[True])


class _Loop:
    """One pattern on one device. Its slots are busy from ``begin`` until each has seen the end.

    ``next`` of a counter and ``append``, which the slots of a direction share, are single steps under the GIL.
    """

    def __init__(self, device: Device, memory: memoryview, pattern: Pattern, *, is_spread: bool) -> None:
        nbytes, num_slots = pattern.block_nbytes, pattern.num_slots
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

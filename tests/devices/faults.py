"""An adaptor that injects faults: what a device below the store's checks may do wrong, at exactly known operations.

Faults of system calls (short transfers, EAGAIN, EINTR) an engine mends itself: they are injected below it, in tests.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import errno
import mmap
import os
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from tests.devices.adaptor import Adaptor, relay
from tiered.bytes.condition import Condition
from tiered.bytes.device.base import Device, DeviceStatistics, Operation
from tiered.bytes.device.files import translate
from tiered.errors import DeviceError
from tiered.units import round_up

__all__ = ["Call", "Fault", "FaultKind", "FaultsDevice"]

Call = Literal["read", "write", "flush", "grow"]


class FaultKind(enum.Enum):
    """What goes wrong, and where the bytes are then."""

    FAIL = "fail"  # nothing is done; the call ends with an error
    LOSE = "lose"  # nothing is done; success is reported: a lost write, a read that leaves old bytes in the memory
    MISDIRECT = "misdirect"  # all is done at another place of the same file; success is reported
    TEAR = "tear"  # only the first blocks are moved, perhaps none; success is reported
    FLIP = "flip"  # one bit of what is moved differs; success is reported
    HOLD = "hold"  # all is done, but the completion waits for ``release``


_POSSIBLE = {
    "read": set(FaultKind),
    "write": set(FaultKind),
    "flush": {FaultKind.FAIL, FaultKind.LOSE, FaultKind.HOLD},
    "grow": {FaultKind.FAIL, FaultKind.HOLD},
}


@dataclass(frozen=True, slots=True)
class Fault:
    """Hits ``count`` calls of one sort from the ``nth`` on, counted from 0 at ``inject`` in order of submission."""

    call: Call
    kind: FaultKind = FaultKind.FAIL
    nth: int = 0
    count: int = 1
    errno: int = errno.EIO  # of FAIL

    def __post_init__(self) -> None:
        if self.call not in _POSSIBLE or self.kind not in _POSSIBLE[self.call]:
            raise ValueError(f"there is no {self.kind} of a {self.call}")
        if self.nth < 0 or self.count < 1:
            raise ValueError(f"nth must be at least 0 and count at least 1, got {self.nth} and {self.count}")


class FaultsDevice(Adaptor):
    """Passes everything on, but for the calls that a fault hits; which bit, block or place it is comes from ``seed``.

    After a flush that failed every later one fails too, as on every device. ``hits`` lists the faults that have hit.
    """

    def __init__(self, upstream: Device, faults: Sequence[Fault] = (), *, seed: int = 0) -> None:
        super().__init__(upstream)
        self.hits: list[Fault] = []
        self._random = random.Random(seed)
        self._condition = Condition()
        self._num_calls: collections.Counter[Call] = collections.Counter()
        self._faults: list[tuple[Fault, int]] = []  # and the number of the first call that each hits
        self._held: list[Callable[[], None]] = []  # what ends each call that is held
        self._num_held_operations = 0
        self._is_closing = False
        self._flush_error: Exception | None = None
        self.inject(*faults)

    def inject(self, *faults: Fault) -> None:
        """Add ``faults``, counted from now; the first that hits a call wins."""
        with self._condition:
            self._faults += [(fault, self._num_calls[fault.call] + fault.nth) for fault in faults]

    def forget(self) -> None:
        """Drop the faults that have not hit yet."""
        with self._condition:
            self._faults.clear()

    def wait_until_held(self, num: int, timeout_s: float) -> bool:
        """Wait until ``num`` calls are held; return whether they are."""
        with self._condition:
            return self._condition.wait_for(lambda: len(self._held) >= num, timeout_s)

    def release(self) -> None:
        """Let everything that is held complete, in the order in which it was done; callbacks run here."""
        with self._condition:
            held, self._held = self._held, []
        for end in held:
            end()

    def submit(self, operations: Sequence[Operation]) -> None:
        """Start all ``operations``, the faults with them; does not block."""
        self._process.check(self.name)
        started: list[Operation] = []
        ended: list[Operation] = []  # those that the upstream never sees
        for operation in operations:
            fault = self._next("write" if operation.is_write else "read")
            relayed = operation if fault is None else self._spoil(operation, fault)
            if relayed is None:
                ended.append(operation)
            else:
                started.append(relayed)
        self.upstream.submit(started)
        for operation in ended:
            operation.on_done(operation)

    def grow(self, file: int, nbytes: int) -> None:
        """Make ``file`` at least ``nbytes`` long; blocks."""
        self._process.check(self.name)
        fault = self._next("grow")
        if fault is not None and fault.kind is FaultKind.FAIL:
            raise _injected(fault, f"cannot grow {self.path(file)} to {nbytes} bytes")
        self.upstream.grow(file, nbytes)
        if fault is not None:
            self._hold_here()

    def flush(self) -> None:
        """Flush, or not, as the faults say; blocks."""
        self._process.check(self.name)
        fault = self._next("flush")
        if self._flush_error is not None:
            raise DeviceError(f"an earlier flush of {self.name} failed; reopen the store") from self._flush_error
        if fault is not None and fault.kind is FaultKind.FAIL:
            self._flush_error = _injected(fault, f"flush of {self.name} failed")
            raise self._flush_error
        if fault is None or fault.kind is not FaultKind.LOSE:
            self.upstream.flush()
        if fault is not None and fault.kind is FaultKind.HOLD:
            self._hold_here()

    def statistics(self) -> DeviceStatistics:
        """Return the upstream's counters; what is held here is in flight too."""
        self._process.check(self.name)
        statistics = self.upstream.statistics()
        with self._condition:
            num_held = self._num_held_operations
        return dataclasses.replace(statistics, num_in_flight=statistics.num_in_flight + num_held)

    def close(self) -> None:
        """Release what is held, then close the upstream. Idempotent."""
        if self._process.is_here:
            with self._condition:
                self._is_closing = True  # order: what completes from now on is not held any more
            self.release()
        self.upstream.close()

    def _next(self, call: Call) -> Fault | None:
        """Count a call and return the fault that hits it."""
        with self._condition:
            number = self._num_calls[call]
            self._num_calls[call] += 1
            for fault, first in self._faults:
                if fault.call == call and first <= number < first + fault.count:
                    self.hits.append(fault)
                    return fault
        return None

    def _spoil(self, operation: Operation, fault: Fault) -> Operation | None:
        """Return what the upstream is to do in the stead of ``operation``; None if nothing, and its error is set."""
        if fault.kind is FaultKind.FAIL:
            verb = "write" if operation.is_write else "read"
            where = f"{len(operation.memory)} bytes at offset {operation.offset} of {self.path(operation.file)}"
            operation.error = _injected(fault, f"{verb} of {where} failed")
            return None
        if fault.kind is FaultKind.LOSE or not len(operation.memory):
            return None
        end = _ender(operation)
        if fault.kind is FaultKind.HOLD:
            return relay(operation, lambda relayed: self._hold(relayed, end))
        if fault.kind is FaultKind.MISDIRECT:
            offset = self._elsewhere(operation)
            return None if offset is None else relay(operation, end, offset=offset)
        if fault.kind is FaultKind.TEAR:
            num_blocks = self._draw(len(operation.memory) // self.alignment)
            return relay(operation, end, memory=operation.memory[: num_blocks * self.alignment]) if num_blocks else None
        bit = self._draw(8 * len(operation.memory))
        if operation.is_write:
            memory = _private_copy(operation.memory, self.alignment)
            memory[bit // 8] ^= 1 << bit % 8
            return relay(operation, end, memory=memory)

        def flip(relayed: Operation) -> None:
            if relayed.error is None:
                operation.memory[bit // 8] ^= 1 << bit % 8
            end(relayed)

        return relay(operation, flip)

    def _draw(self, below: int) -> int:
        with self._condition:
            return self._random.randrange(below)

    def _elsewhere(self, operation: Operation) -> int | None:
        """Return another offset of the file that has room for the operation; None where there is none."""
        nbytes = self.upstream.files().get(operation.file, 0)
        num_places = (nbytes - len(operation.memory)) // self.alignment  # beside the right one
        if num_places < 1:
            return None
        offset = self._draw(num_places) * self.alignment
        return offset if offset < operation.offset else offset + self.alignment

    def _hold(self, relayed: Operation, end: Callable[[Operation], None]) -> None:
        def release() -> None:
            with self._condition:
                self._num_held_operations -= 1
            end(relayed)

        with self._condition:
            if not self._is_closing:
                self._num_held_operations += 1
                self._held.append(release)
                self._condition.notify_all()
                return
        end(relayed)

    def _hold_here(self) -> None:
        """Block until ``release``."""
        released = threading.Event()
        with self._condition:
            if self._is_closing:
                return
            self._held.append(released.set)
            self._condition.notify_all()
        released.wait()


def _ender(operation: Operation) -> Callable[[Operation], None]:
    def end(relayed: Operation) -> None:
        operation.error = relayed.error
        operation.on_done(operation)

    return end


def _injected(fault: Fault, what: str) -> Exception:
    return translate(OSError(fault.errno, f"{os.strerror(fault.errno)} (injected)"), what)


def _private_copy(memory: memoryview, alignment: int) -> memoryview:
    """Return a copy of ``memory`` at an address aligned to ``alignment``, a page at most."""
    pages = memoryview(mmap.mmap(-1, round_up(len(memory), max(alignment, mmap.PAGESIZE))))
    pages[: len(memory)] = memory
    return pages[: len(memory)]

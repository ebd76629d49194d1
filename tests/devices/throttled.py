"""An adaptor that slows a device down to given bandwidths: to try what a slower drive would do, and for tests."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import deque
from collections.abc import Sequence

from tests.devices.adaptor import Adaptor
from tiered.bytes.condition import Condition
from tiered.bytes.critical_section import ServiceThread
from tiered.bytes.device.base import Device, DeviceStatistics, IOClass, Operation
from tiered.bytes.exit_and_fork import at_exit
from tiered.errors import ClosedError, DeviceError, TieredError

__all__ = ["Pace", "ThrottledDevice"]

_BURST_S = 0.002
"""How far an idle device may be ahead: so much time's worth of bytes passes at once. Who submits late keeps pace."""


class Pace:
    """The operations of one direction, or of both, and when each may pass: not before its bytes have been paid for.

    Time is paid for from the end of the last operation or from the arrival, less the burst, so that whoever asks late
    loses nothing. Most urgent class first, then in order. Pure arithmetic over times in s: its owner's lock guards it.
    """

    def __init__(self, read_bytes_per_s: float, write_bytes_per_s: float) -> None:
        self.num_waiting = 0
        self._read_bytes_per_s = read_bytes_per_s
        self._write_bytes_per_s = write_bytes_per_s
        self._queued: tuple[deque[tuple[Operation, float]], ...] = tuple(deque() for _ in IOClass)
        self._next: Operation | None = None
        self._paid_until = float("-inf")

    def put(self, operation: Operation, now: float) -> None:
        """Queue ``operation``, which arrives now."""
        self._queued[operation.io_class].append((operation, now))
        self.num_waiting += 1

    def take(self, now: float) -> list[Operation]:
        """Return the operations that may pass by now, in order."""
        ready: list[Operation] = []
        while self._choose() and self._paid_until <= now:
            assert self._next is not None
            ready.append(self._next)
            self._next = None
        self.num_waiting -= len(ready)
        return ready

    def take_all(self) -> list[Operation]:
        """Return all that wait, in order, paid for or not."""
        ready = [] if self._next is None else [self._next]
        for queued in self._queued:
            ready += [operation for operation, _ in queued]
            queued.clear()
        self._next, self.num_waiting = None, 0
        return ready

    def next_s(self) -> float | None:
        """Return when the next operation may pass; None when none waits."""
        return self._paid_until if self._choose() else None

    def _choose(self) -> bool:
        if self._next is None:
            queued = next((queued for queued in self._queued if queued), None)
            if queued is None:
                return False
            self._next, arrival = queued.popleft()
            bytes_per_s = self._write_bytes_per_s if self._next.is_write else self._read_bytes_per_s
            self._paid_until = max(self._paid_until, arrival - _BURST_S) + _nbytes(self._next) / bytes_per_s
        return True


class ThrottledDevice(Adaptor):
    """Lets reads and writes through at no more than ``read_bytes_per_s`` and ``write_bytes_per_s``; None: unlimited.

    Neither direction slows the other, unless it ``is_half_duplex``, as SATA is: then only one moves at a time, reads
    before writes.

    One thread, ``tiered-throttle``, hands operations on when their time has come. An operation waits here or is with
    the upstream. ``close`` and the end of the process let what waits through at once.
    """

    def __init__(
        self,
        upstream: Device,
        *,
        read_bytes_per_s: float | None = None,
        write_bytes_per_s: float | None = None,
        is_half_duplex: bool = False,
    ) -> None:
        """Start the thread. Raises ValueError for a limit that is not positive."""
        limits = [math.inf if limit is None else limit for limit in (read_bytes_per_s, write_bytes_per_s)]
        if not all(limit > 0 for limit in limits):
            raise ValueError(f"a limit is a positive number of bytes per second or None, got {limits}")
        super().__init__(upstream)
        self._condition = Condition()
        self._is_closed = False
        self._paces = [Pace(*limits) for _ in range(1 if is_half_duplex else 2)]  # one for both, or reads' and writes'
        self._thread = ServiceThread(target=self._serve, name="tiered-throttle")
        at_exit(self, _stop_at_exit)  # Order: before the upstream's, which was added earlier and then still serves
        self._thread.start()

    def submit(self, operations: Sequence[Operation]) -> None:
        """Queue ``operations`` until their time has come. Does not block."""
        self._process.check(self.name)
        now = time.monotonic()
        with self._condition:
            self._check_open()
            for operation in operations:
                self._paces[-1 if operation.is_write else 0].put(operation, now)
            self._condition.notify_all()

    def grow(self, file: int, nbytes: int) -> None:
        """Make ``file`` at least ``nbytes`` long; blocks, at full speed."""
        self._check_open()
        self.upstream.grow(file, nbytes)

    def flush(self) -> None:
        """Make completed writes, growth and new files durable; blocks."""
        self._check_open()
        self.upstream.flush()

    def statistics(self) -> DeviceStatistics:
        """Return the upstream's counters; what waits here is in flight too."""
        self._process.check(self.name)
        statistics = self.upstream.statistics()
        with self._condition:
            num_waiting = sum(pace.num_waiting for pace in self._paces)
        return dataclasses.replace(statistics, num_in_flight=statistics.num_in_flight + num_waiting)

    def close(self) -> None:
        """Let through what waits, end the thread, close the upstream. Idempotent; nothing happens in a forked child."""
        if self._process.is_here:
            self._stop()
            self._thread.join()
        self.upstream.close()

    def _serve(self) -> None:
        while True:
            with self._condition:
                ready = self._wait()
            if ready is None:
                return
            try:
                self.upstream.submit(ready)
            except Exception as error:  # none of them was started: somebody else closed the upstream
                for operation in ready:
                    operation.error = error if isinstance(error, TieredError) else _unexpected(error)
                    operation.on_done(operation)
            del ready  # lifetime: memory and callbacks must not live until the next ones come

    def _wait(self) -> list[Operation] | None:
        """Return what may pass, under the lock; None when closed and nothing is left."""
        while True:
            if self._is_closed:
                return [operation for pace in self._paces for operation in pace.take_all()] or None
            now = time.monotonic()
            ready = [operation for pace in self._paces for operation in pace.take(now)]
            if ready:
                return ready
            times = [due for due in (pace.next_s() for pace in self._paces) if due is not None]
            self._condition.wait(min(times) - now if times else None)

    def _stop(self) -> None:
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()

    def _check_open(self) -> None:
        self._process.check(self.name)
        if self._is_closed:
            raise ClosedError(f"{self.name} is closed")


def _unexpected(error: Exception) -> DeviceError:
    translated = DeviceError(f"handing an operation on failed: {error!r}; this is a bug of the device below")
    translated.__cause__ = error
    return translated


def _nbytes(operation: Operation) -> int:
    try:
        return len(operation.memory)
    except ValueError:  # released too early: the engine below will say so
        return 0


def _stop_at_exit(device: ThrottledDevice) -> None:
    if device._process.is_here:
        device._stop()
        device._thread.join()

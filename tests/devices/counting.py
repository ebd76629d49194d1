"""An adaptor that counts: bytes, operations in flight and latencies of each class."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields

from tests.devices.adaptor import Adaptor, relay
from tests.devices.latency import Latencies, LatencyHistogram
from tiered.bytes.device.base import Device, DeviceStatistics, IOClass, Operation

__all__ = ["ClassStatistics", "CountingDevice", "CountingStatistics"]


@dataclass(frozen=True, slots=True)
class ClassStatistics:
    """The operations of one class; bytes of those that completed without an error."""

    num_operations: int
    nbytes: int
    num_errors: int
    num_in_flight: int
    in_flight_bytes: int
    peak_in_flight: int  # the most operations at one time
    peak_in_flight_bytes: int
    latency: Latencies  # from submit to completion, errors included


@dataclass(frozen=True, slots=True)
class CountingStatistics(DeviceStatistics):
    """The upstream's counters and, since this adaptor was made, those of each class and of the flushes."""

    classes: tuple[ClassStatistics, ...]  # IOClass is the index
    flush_latency: Latencies


class CountingDevice(Adaptor):
    """Counts what passes through; memory and callbacks stay the submitter's. Allocates nothing that it keeps."""

    def __init__(self, upstream: Device) -> None:
        super().__init__(upstream)
        self._lock = threading.Lock()
        self._counters = tuple(_Counter() for _ in IOClass)
        self._flushes = LatencyHistogram()

    def submit(self, operations: Sequence[Operation]) -> None:
        """Count ``operations`` and hand them on; does not block."""
        self._process.check(self.name)
        start = time.monotonic()
        sizes = [_nbytes(operation) for operation in operations]
        relayed = [
            relay(operation, functools.partial(self._done, operation, nbytes, start))
            for operation, nbytes in zip(operations, sizes, strict=True)
        ]
        with self._lock:  # order: counted before the upstream, which may complete inside submit
            for operation, nbytes in zip(operations, sizes, strict=True):
                self._counters[operation.io_class].begin(nbytes)
        try:
            self.upstream.submit(relayed)
        except BaseException:  # then it started none of them
            with self._lock:
                for operation, nbytes in zip(operations, sizes, strict=True):
                    self._counters[operation.io_class].take_back(nbytes)
            raise

    def flush(self) -> None:
        """Flush the upstream and note how long it took; blocks."""
        self._process.check(self.name)
        start = time.monotonic()
        self.upstream.flush()
        with self._lock:
            self._flushes.add(time.monotonic() - start)

    def statistics(self) -> CountingStatistics:
        """Return the upstream's counters and those of the classes."""
        self._process.check(self.name)
        upstream = self.upstream.statistics()
        with self._lock:
            return CountingStatistics(
                **{field.name: getattr(upstream, field.name) for field in fields(DeviceStatistics)},
                classes=tuple(counter.statistics() for counter in self._counters),
                flush_latency=self._flushes.summary(),
            )

    def _done(self, operation: Operation, nbytes: int, start: float, relayed: Operation) -> None:
        latency_s = time.monotonic() - start
        operation.error = relayed.error
        with self._lock:
            self._counters[operation.io_class].end(nbytes, latency_s, operation.error)
        operation.on_done(operation)


class _Counter:
    """One class's counts, under the device's lock."""

    __slots__ = (
        "_histogram", "_in_flight_bytes", "_nbytes", "_num_errors", "_num_in_flight", "_num_operations",
        "_peak_in_flight", "_peak_in_flight_bytes",
    )  # fmt: skip

    def __init__(self) -> None:
        self._num_operations = self._nbytes = self._num_errors = 0
        self._num_in_flight = self._in_flight_bytes = self._peak_in_flight = self._peak_in_flight_bytes = 0
        self._histogram = LatencyHistogram()

    def begin(self, nbytes: int) -> None:
        self._num_in_flight += 1
        self._in_flight_bytes += nbytes
        self._peak_in_flight = max(self._peak_in_flight, self._num_in_flight)
        self._peak_in_flight_bytes = max(self._peak_in_flight_bytes, self._in_flight_bytes)

    def take_back(self, nbytes: int) -> None:
        self._num_in_flight -= 1
        self._in_flight_bytes -= nbytes

    def end(self, nbytes: int, latency_s: float, error: Exception | None) -> None:
        self.take_back(nbytes)
        self._histogram.add(latency_s)
        self._num_operations += 1
        if error is None:
            self._nbytes += nbytes
        else:
            self._num_errors += 1

    def statistics(self) -> ClassStatistics:
        return ClassStatistics(
            num_operations=self._num_operations,
            nbytes=self._nbytes,
            num_errors=self._num_errors,
            num_in_flight=self._num_in_flight,
            in_flight_bytes=self._in_flight_bytes,
            peak_in_flight=self._peak_in_flight,
            peak_in_flight_bytes=self._peak_in_flight_bytes,
            latency=self._histogram.summary(),
        )


def _nbytes(operation: Operation) -> int:
    try:
        return len(operation.memory)
    except ValueError:  # released too early: the engine below will say so
        return 0

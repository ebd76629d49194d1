"""The bandwidth of each of a store's devices: as measured before, and as seen now.

Only ratios between a store's devices matter: extents are dealt out by them.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence

from tiered.bytes.critical_section import CRITICAL_SECTION
from tiered.bytes.device.base import Adaptor, Device, Operation, relay
from tiered.bytes.device.profile import Profile, load_profile
from tiered.units import MiB

__all__ = ["BandwidthMeter", "profiled_weights"]

_NEWEST = 0.3  # the weight of a new sample
_LEAST = 1 / 32  # of the fastest: a device that seems slower still gets enough to be measured again
_NOTICEABLE = 0.02


class BandwidthMeter:
    """The bandwidth of each device while it is busy, reads and writes together, smoothed.

    Time counts while at least ``busy_nbytes`` are in flight on a device, and the bytes that complete in it. A sample is
    ``sample_nbytes`` and 0.25 s of that, whichever takes longer. Thread-safe; nothing is allocated after the start.
    """

    def __init__(
        self,
        num_devices: int,
        *,
        busy_nbytes: int = 4 * MiB,
        sample_nbytes: int = 64 * MiB,
        sample_s: float = 0.25,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """From 4 MiB in flight on, bandwidth and not latency is a drive's limit. ``clock`` in s."""
        self._clock = clock
        self._lock = threading.Lock()
        self._gauges = [_Gauge(busy_nbytes, sample_nbytes, sample_s) for _ in range(num_devices)]
        self._has_news = False
        self._weights: list[float] | None = None

    def metered(self, devices: Sequence[Device]) -> tuple[Device, ...]:
        """Return an adaptor over each of ``devices``, in their order, that counts here. They stay their owner's."""
        return tuple(_MeteredDevice(device, self, index) for index, device in enumerate(devices))

    def begin(self, device: int, nbytes: int) -> None:
        """Count ``nbytes`` that are submitted to a device."""
        with CRITICAL_SECTION.lock, self._lock:
            self._gauges[device].begin(nbytes, self._clock())

    def end(self, device: int, nbytes: int) -> None:
        """Count ``nbytes`` that were submitted to a device and have completed."""
        with CRITICAL_SECTION.lock, self._lock:
            self._has_news |= self._gauges[device].end(nbytes, self._clock())

    def take_back(self, device: int, nbytes: int) -> None:
        """Forget ``nbytes`` that were not submitted after all, or came to nothing."""
        with CRITICAL_SECTION.lock, self._lock:
            self._gauges[device].take_back(nbytes, self._clock())

    def bytes_per_s(self) -> list[float | None]:
        """Return the bandwidth of each device; None before its first sample."""
        with CRITICAL_SECTION.lock, self._lock:
            return [gauge.bytes_per_s for gauge in self._gauges]

    def new_weights(self) -> list[float] | None:
        """Return the bandwidths when one has changed noticeably since they were last returned, all being known."""
        if not self._has_news:  # without the lock: most calls end here
            return None
        with CRITICAL_SECTION.lock, self._lock:
            self._has_news = False
            known = [gauge.bytes_per_s for gauge in self._gauges if gauge.bytes_per_s is not None]
            if len(known) < len(self._gauges):
                return None
            total = sum(known)
            weights = [max(rate, max(known) * _LEAST) / total for rate in known]
            if self._weights is not None and all(
                abs(new / old - 1) < _NOTICEABLE for new, old in zip(weights, self._weights, strict=True)
            ):
                return None
            self._weights = weights
            return list(weights)


class _MeteredDevice(Adaptor):
    """Counts the passing operations on a meter."""

    def __init__(self, upstream: Device, meter: BandwidthMeter, index: int) -> None:
        super().__init__(upstream)
        self._meter = meter
        self._index = index

    def submit(self, operations: Sequence[Operation]) -> None:
        self._check_process()  # order: before the meter's lock, which some thread may have held at a fork
        sizes = [len(operation.memory) for operation in operations]
        relayed = [
            relay(operation, functools.partial(self._done, operation, nbytes))
            for operation, nbytes in zip(operations, sizes, strict=True)
        ]
        nbytes = sum(sizes)
        self._meter.begin(self._index, nbytes)
        try:
            self.upstream.submit(relayed)
        except BaseException:  # it started none of them
            self._meter.take_back(self._index, nbytes)
            raise

    def _done(self, operation: Operation, nbytes: int, relayed: Operation) -> None:
        (self._meter.end if relayed.error is None else self._meter.take_back)(self._index, nbytes)
        operation.error = relayed.error
        operation.on_done(operation)


class _Gauge:
    """One device's meter, under the lock."""

    __slots__ = (
        "_busy_nbytes", "_busy_s", "_busy_since", "_in_flight_nbytes", "_moved_nbytes", "_sample_nbytes", "_sample_s",
        "bytes_per_s",
    )  # fmt: skip

    def __init__(self, busy_nbytes: int, sample_nbytes: int, sample_s: float) -> None:
        self._busy_nbytes, self._sample_nbytes, self._sample_s = busy_nbytes, sample_nbytes, sample_s
        self.bytes_per_s: float | None = None
        self._in_flight_nbytes = 0
        self._busy_since: float | None = None
        self._busy_s = 0.0  # of this sample, but the current period
        self._moved_nbytes = 0

    def begin(self, nbytes: int, now: float) -> None:
        self._in_flight_nbytes += nbytes
        if self._busy_since is None and self._in_flight_nbytes >= self._busy_nbytes:
            self._busy_since = now

    def end(self, nbytes: int, now: float) -> bool:
        """Count; return whether a sample is complete."""
        if self._busy_since is not None:
            self._moved_nbytes += nbytes
        self.take_back(nbytes, now)
        if self._moved_nbytes < self._sample_nbytes or self._busy_s < self._sample_s or not self._busy_s:
            return False
        sample = self._moved_nbytes / self._busy_s
        self.bytes_per_s = (
            sample if self.bytes_per_s is None else self.bytes_per_s + _NEWEST * (sample - self.bytes_per_s)
        )
        self._busy_s, self._moved_nbytes = 0.0, 0
        return True

    def take_back(self, nbytes: int, now: float) -> None:
        self._in_flight_nbytes -= nbytes
        if self._busy_since is not None:
            self._busy_s += now - self._busy_since
            self._busy_since = now if self._in_flight_nbytes >= self._busy_nbytes else None


def profiled_weights(directories: Sequence[str]) -> list[float] | None:
    """Return the bandwidths that ``tiered bench`` measured in ``directories``; None unless all have a profile. Blocks.

    A weight is the cost of moving a byte in and out again: the harmonic mean of both bandwidths, in bytes per second.
    """
    profiles: list[Profile] = []
    for directory in directories:
        profile = load_profile(directory)
        if profile is None:
            return None
        profiles.append(profile)
    return [2 / (1 / profile.read_bytes_per_s + 1 / profile.write_bytes_per_s) for profile in profiles]

"""Recorder: the times that threads wait and work, always as sums, and as single intervals while it is recording.

It knows words, threads and times, and nothing of keys, units and their results. Times are those
of ``time.monotonic``, in seconds.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from tiered.bytes.critical_section import CRITICAL_SECTION
from tiered.stats import ComputeDeviceStatistics, MovedStatistics, RecorderStatistics, WaitStatistics, WorkStatistics

__all__ = ["CALLER", "Begun", "Interval", "Recorder", "StreamClock", "Wait"]

CALLER = "caller"
"""Every thread that is not one of tiered's own: in training, the thread that runs the model."""

_OWN = "tiered-"  # our threads' names begin so
_SAME_WAIT_S = 1e-4  # a wait that goes on so soon after it was woken is the same one


class Wait(StrEnum):
    """The reason why a thread waits."""

    READ = "demand read"
    UPDATE = "update"
    WRITE = "write-back"  # room in the DRAM budget, which is made by writing
    COMMIT = "commit"
    COPY = "copy in"  # to a compute device; streams wait for it, threads do not


class Interval(NamedTuple):
    """The work of one thread, or a transfer in flight, from ``start_s`` to ``end_s``."""

    word: str  # such as "forward", "swap in", "wait: commit"
    subject: str  # a unit's name, a key, a generation
    who: str  # CALLER, or the name of one of our threads or of a device's stream; "" for a transfer
    start_s: float
    end_s: float
    nbytes: int  # moved; 0 where nothing was


class Begun(NamedTuple):
    """The beginning of a wait or a piece of work."""

    at_s: float
    mark: Any = None  # the same moment on a stream of a compute device, if there is one


class StreamClock(Protocol):
    """Times on the streams of a compute device."""

    def mark(self, *, is_caller: bool = True) -> Any:
        """Mark this moment on the current stream; without ``is_caller`` on one of tiered's own streams alone."""

    def note(self, word: str, subject: str, begun: Any) -> None:
        """``word`` has lasted since ``begun`` on the current stream."""

    def collect(self) -> None:
        """Tell the recorder of all that has ended."""


class Recorder:
    """Sums of times and bytes, and the last intervals while it ``is_recording``. All methods are thread-safe.

    The sums cost about a microsecond a call, and a call comes with a unit, a bucket or a swap, never with an operation
    of a device. Of the intervals only the last are kept: nothing grows with the length of a run.
    """

    def __init__(self) -> None:
        self.is_recording = False
        self.clock: StreamClock | None = None
        self._device: weakref.WeakMethod[Callable[[], ComputeDeviceStatistics]] | None = None
        self._lock = threading.Lock()
        self._totals: dict[tuple[str, str], tuple[int, float]] = {}  # (who, word) -> how often, how long; few
        self._classes: dict[str, str] = {}  # prefix of keys -> class
        self._moved: dict[str, list[int]] = {}  # class -> bytes read, bytes written
        self._num_in_flight = 0
        self._busy_s = 0.0
        self._busy_since_s = 0.0
        self._ring = _Ring(0)

    # Below: always

    def classify(self, prefix: str, name: str) -> None:
        """Count moves of keys that begin with ``prefix`` as ``name``; other keys count as "other"."""
        with CRITICAL_SECTION.lock, self._lock:
            self._classes[prefix] = name

    def attach(self, clock: StreamClock, device: Callable[[], ComputeDeviceStatistics]) -> None:
        """From now on waits and work count on the streams of a compute device, too; ``device()``: its counters."""
        self.clock = clock
        self._device = weakref.WeakMethod(device)  # lifetime: it leads to a model, and that to the store

    def begin(self, *, on_device: bool = True) -> Begun:
        """A wait or a piece of work of this thread begins; ``on_device``: its stream's time counts as well."""
        mark = None
        if self.clock is not None and on_device:
            mark = self.clock.mark(is_caller=_CURRENT.who == CALLER)
        return Begun(time.monotonic(), mark)

    def waited(self, reason: Wait, subject: str, begun: Begun) -> None:
        """This thread waited for ``reason`` since ``begun``."""
        self.worked(_WAIT_WORDS[reason], subject, begun)

    def worked(self, word: str, subject: str, begun: Begun) -> None:
        """This thread did ``word`` with ``subject`` since ``begun``."""
        if begun.mark is not None and self.clock is not None:
            self.clock.note(word, subject, begun.mark)
        self.add(word, subject, _CURRENT.who, begun.at_s, time.monotonic())

    def begin_move(self) -> float:
        """A tensor is on its way to or from the devices; return when that was, for ``end_move``."""
        now_s = time.monotonic()
        with CRITICAL_SECTION.lock, self._lock:
            if not self._num_in_flight:
                self._busy_since_s = now_s
            self._num_in_flight += 1
        return now_s

    def end_move(self, key: str, nbytes: int, begun_s: float, *, is_write: bool) -> None:
        """Note that ``nbytes`` of ``key`` have arrived, on the devices where ``is_write``; 0 for a move that failed."""
        now_s = time.monotonic()
        with CRITICAL_SECTION.lock, self._lock:
            self._num_in_flight -= 1
            if not self._num_in_flight:
                self._busy_s += now_s - self._busy_since_s
            found = "other"
            for prefix, name in self._classes.items():
                if key.startswith(prefix):
                    found = name
            self._moved.setdefault(found, [0, 0])[is_write] += nbytes
            if self.is_recording:
                self._ring.add(Interval("swap out" if is_write else "swap in", key, "", begun_s, now_s, nbytes))

    def read_bytes(self, name: str) -> int:
        """Return the bytes of keys that count as ``name`` that have arrived so far."""
        return self._moved.get(name, (0, 0))[0]

    def statistics(self) -> RecorderStatistics:
        """Return the sums so far."""
        if self.clock is not None:
            self.clock.collect()
        device = None if self._device is None else self._device()
        with CRITICAL_SECTION.lock, self._lock:
            busy_s = self._busy_s + (time.monotonic() - self._busy_since_s if self._num_in_flight else 0.0)
            totals = [(*names, *total) for names, total in self._totals.items()]
            return RecorderStatistics(
                waits=tuple(
                    WaitStatistics(who, _REASONS[word], seconds) for who, word, _, seconds in totals if word in _REASONS
                ),
                work=tuple(WorkStatistics(*total) for total in totals if total[1] not in _REASONS),
                moved=tuple(MovedStatistics(name, *nbytes) for name, nbytes in self._moved.items()),
                device_busy_seconds=busy_s,
                device=None if device is None else device(),
            )

    # Below: interval by interval

    def start(self, capacity: int) -> None:
        """Record the last ``capacity`` intervals from now on, and forget older ones; about 200 bytes each."""
        if capacity < 1:
            raise ValueError(f"a timeline needs room for at least one interval, got {capacity}")
        ring = _Ring(capacity)
        with CRITICAL_SECTION.lock, self._lock:
            self._ring = ring
            self.is_recording = True

    def stop(self) -> tuple[list[Interval], int]:
        """Stop; return the intervals in the order of their ends, and how many older ones were dropped."""
        if self.clock is not None:
            self.clock.collect()
        with CRITICAL_SECTION.lock, self._lock:
            ring, self._ring, self.is_recording = self._ring, _Ring(0), False
        return list(ring.intervals), ring.num - len(ring.intervals)

    def add(self, word: str, subject: str, who: str, start_s: float, end_s: float, *, nbytes: int = 0) -> None:
        """Note that ``who``, a thread or a stream, did ``word`` from ``start_s`` to ``end_s``."""
        with CRITICAL_SECTION.lock, self._lock:
            num, seconds = self._totals.get((who, word), (0, 0.0))
            self._totals[who, word] = num + 1, seconds + end_s - start_s
            if self.is_recording:
                self._ring.add(Interval(word, subject, who, start_s, end_s, nbytes))


class _Current(threading.local):
    """The name of the current thread where it is one of tiered's own, else CALLER: known when it is first asked for."""

    def __init__(self) -> None:
        name = threading.current_thread().name
        self.who = name if name.startswith(_OWN) else CALLER


_CURRENT = _Current()


class _Ring:
    """The last ``capacity`` intervals, and how many there were."""

    def __init__(self, capacity: int) -> None:
        self.intervals: deque[Interval] = deque(maxlen=capacity)
        self.num = 0

    def add(self, interval: Interval) -> None:
        last = self.intervals[-1] if self.intervals and interval.word in _REASONS else None
        if last is not None and last[:3] == interval[:3] and interval.start_s - last.end_s < _SAME_WAIT_S:
            self.intervals[-1] = last._replace(end_s=interval.end_s)
            return
        self.intervals.append(interval)
        self.num += 1


_WAIT_WORDS = {reason: f"wait: {reason}" for reason in Wait}
_REASONS = {word: str(reason) for reason, word in _WAIT_WORDS.items()}

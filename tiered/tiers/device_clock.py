"""DeviceClock: the times that the streams of a compute device work and stand idle, for the store's recorder.

A time is that between two events on one stream. No thread waits for an event: those that have come are read later.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import NamedTuple

import torch

from tiered.store.waiting.recorder import Recorder

__all__ = ["COMPUTE", "COPY_AHEAD", "COPY_IN", "COPY_OUT", "COPY_TO_UPDATE", "UPDATE", "DeviceClock"]

COMPUTE, COPY_IN, COPY_OUT, UPDATE = "stream: compute", "stream: copy in", "stream: copy out", "stream: update"
COPY_AHEAD, COPY_TO_UPDATE = "stream: copy in ahead", "stream: copy in for update"
"""The tracks of a device. ``COMPUTE`` is whatever stream the caller is on."""

_EVERY = 64  # spans of a track
_MOST_PENDING = 10_000  # pairs whose events have not come: of a device that hangs, no more are kept


class Mark(NamedTuple):
    """A moment on a stream."""

    event: torch.Event
    track: str


class _Span(NamedTuple):
    begun: Mark
    end: torch.Event
    word: str
    subject: str
    nbytes: int

    def has_ended(self) -> bool:
        """Return whether both events have come: the caller may have gone to another stream in between."""
        return self.end.query() and self.begun.event.query()


class DeviceClock:
    """Measures streams of ``device`` and tells ``recorder``. Thread-safe; no call blocks but the first of a recording.

    The caller's stream stands idle from a mark at the beginning of a wait to one at its end, unless it had work left to
    do: then the first event comes late, and the time between the two is that much shorter.
    """

    def __init__(self, device: torch.device, recorder: Recorder) -> None:
        self._device = device
        self._recorder = recorder
        self._lock = threading.Lock()
        self._tracks: dict[int, str] = {}  # by the stream's id
        self._pending: dict[str, deque[_Span]] = {}  # by track, oldest first
        self._free: list[torch.Event] = []
        # An event and its time by the host's clock; the distance to it is told in single precision: 1 ms after hours.
        self._zero: tuple[torch.Event, float] | None = None

    def __repr__(self) -> str:
        return f"DeviceClock({self._device}, {sum(map(len, self._pending.values()))} spans pending)"

    def name(self, stream: torch.Stream, track: str) -> None:
        """Let what happens on ``stream`` count for ``track``."""
        self._tracks[stream.stream_id] = track

    def mark(self, *, is_caller: bool = True) -> Mark | None:
        """Mark this moment on the current stream; without ``is_caller`` on one of tiered's own streams alone."""
        stream = torch.accelerator.current_stream(self._device)
        track = self._tracks.get(stream.stream_id, COMPUTE)
        return None if track == COMPUTE and not is_caller else self.mark_on(stream, track)

    def mark_on(self, stream: torch.Stream, track: str) -> Mark:
        """Mark this moment on ``stream``."""
        with self._lock:
            event = self._free.pop() if self._free else torch.Event(self._device, enable_timing=True)
        stream.record_event(event)
        return Mark(event, track)

    def note(self, word: str, subject: str, begun: Mark, *, nbytes: int = 0) -> None:
        """``word`` with ``subject`` has lasted on the current stream, where ``begun`` was marked, until now."""
        self.note_on(torch.accelerator.current_stream(self._device), word, subject, begun, nbytes=nbytes)

    def note_on(self, stream: torch.Stream, word: str, subject: str, begun: Mark, *, nbytes: int = 0) -> None:
        """The same on ``stream``."""
        end = self.mark_on(stream, begun.track).event
        with self._lock:
            pending = self._pending.setdefault(begun.track, deque(maxlen=_MOST_PENDING))
            pending.append(_Span(begun, end, word, subject, nbytes))
            is_time = len(pending) % _EVERY == 0
        if is_time:  # so that events are used again, whoever asks for no figures
            self.collect()

    def collect(self) -> None:
        """Tell the recorder of all that has ended."""
        with self._lock:
            ended = []
            for spans in self._pending.values():
                while spans and spans[0].has_ended():
                    ended.append(spans.popleft())
            for span in ended:
                self._tell(span)
                self._free += [span.begun.event, span.end]

    def _tell(self, span: _Span) -> None:
        seconds = max(0.0, span.begun.event.elapsed_time(span.end) / 1e3)
        start_s = 0.0
        if self._recorder.is_recording:
            self._zero = self._zero or self._new_zero()
            zero, zero_s = self._zero
            start_s = zero_s + zero.elapsed_time(span.begun.event) / 1e3
        self._recorder.add(span.word, span.subject, span.begun.track, start_s, start_s + seconds, nbytes=span.nbytes)

    def _new_zero(self) -> tuple[torch.Event, float]:
        """Return an event that has come, and its time by the host's clock: halfway between two readings."""
        before_s = time.monotonic()
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        event.synchronize()
        return event, (before_s + time.monotonic()) / 2

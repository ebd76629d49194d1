"""A device whose streams run late: what a collective writes is there only for a stream that waits for it.

Streams keep their work in lists until an event is asked for; copies are of CPU tensors, on a stream of their own. So a
reader that does not wait, or whose event was recorded before ``work.wait()``, gets the old bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch


class Event:
    def __init__(self) -> None:
        self.stream: Stream | None = None
        self.place = 0

    def record(self, stream: Stream) -> None:
        self.stream, self.place = stream, len(stream.work)

    def query(self) -> bool:
        if self.stream is not None:
            self.stream.run(self.place)
        return True


class Stream:
    def __init__(self, device: Any = None) -> None:
        self.work: list[Callable[[], object]] = []
        self.num_done = 0

    def run(self, place: int) -> None:
        while self.num_done < place:
            self.num_done += 1
            self.work[self.num_done - 1]()

    def wait_event(self, event: Event) -> None:
        self.work.append(event.query)


class Module:
    """torch.cuda, as far as DeviceComm asks for it; and the collectives of two ranks, the other one's bytes given."""

    Event, Stream = Event, Stream

    def __init__(self, theirs: torch.Tensor) -> None:
        self.theirs = theirs  # (nbytes,) uint8: the other rank's piece
        self.current = self.compute = Stream()
        self.transport = Stream()

    def current_stream(self) -> Stream:
        return self.current

    @contextmanager
    def stream(self, stream: Stream) -> Any:
        before, self.current = self.current, stream
        yield
        self.current = before

    def all_gather_into_tensor(self, whole: torch.Tensor, mine: torch.Tensor, **how: Any) -> Any:
        return self._copy(whole, mine)

    def all_to_all_single(self, received: torch.Tensor, send: torch.Tensor, **how: Any) -> Any:
        return self._copy(received, send.view(2, -1)[0])

    def _copy(self, whole: torch.Tensor, mine: torch.Tensor) -> Any:
        ready, done = Event(), Event()
        ready.record(self.current)
        self.transport.wait_event(ready)
        self.transport.work.append(lambda: whole.copy_(torch.cat([mine.clone(), self.theirs])))
        done.record(self.transport)
        issuing = self.current
        return type("Work", (), {"wait": lambda work: issuing.wait_event(done)})()

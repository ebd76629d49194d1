"""Ctrl-C, or SIGTERM, as a request: the first lets the step in hand finish, the second ends the process at once.

An exception out of nowhere could strike between any two lines of the engine; a flag cannot, and a process that ends at
once is what commits are made for.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterable
from types import FrameType, TracebackType

__all__ = ["INTERRUPTED", "Interruption"]

INTERRUPTED = 130
"""The exit status of a process that ended on Ctrl-C: 128 + SIGINT."""

_SHOW_CURSOR = b"\x1b[?25h"  # a progress bar hides it


class Interruption:
    """Catches ``signals`` between ``__enter__`` and ``__exit__``; for the main thread.

    ``notice`` is written to standard error at the first signal, ``farewell()`` at the second, just before the process
    ends without any clean-up. ``status`` is the exit status that the last signal asks for, 128 and its number.
    """

    def __init__(
        self, notice: str, farewell: Callable[[], str], *, signals: Iterable[signal.Signals] = (signal.SIGINT,)
    ) -> None:
        self.requested = False
        self.status = INTERRUPTED
        self._notice = notice
        self._farewell = farewell
        self._signals = tuple(signals)
        self._previous: list[Callable[[int, FrameType | None], object] | int | None] = []

    @property
    def cause(self) -> str:
        """The name of the signal that stopped the process, for people."""
        return "Ctrl-C" if self.status == INTERRUPTED else signal.Signals(self.status - 128).name

    def __enter__(self) -> Interruption:
        self._previous = [signal.signal(number, self._on_signal) for number in self._signals]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, previous in zip(self._signals, self._previous, strict=True):
            signal.signal(number, previous)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.status = 128 + number
        if self.requested:
            if os.isatty(1):
                _write(1, _SHOW_CURSOR)
            _write(2, f"\n{self._farewell()}\n".encode("utf-8", "replace"))
            os._exit(self.status)
        self.requested = True
        _write(2, f"\n{self._notice}\n".encode("utf-8", "replace"))


def _write(descriptor: int, text: bytes) -> None:
    """Write past the buffers, whose lock the interrupted line may hold. The reader may be gone."""
    with contextlib.suppress(OSError):
        os.write(descriptor, text)

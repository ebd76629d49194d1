"""Ctrl-C as a request: the first one lets the step in hand finish, the second one ends the process at once.

An exception out of nowhere could strike between any two lines of the engine; a flag cannot, and a process that ends at
once is what commits are made for.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType, TracebackType

__all__ = ["INTERRUPTED", "Interruption"]

INTERRUPTED = 130
"""The exit status of a process that ended on Ctrl-C: 128 + SIGINT."""

_SHOW_CURSOR = b"\x1b[?25h"  # a progress bar hides it


class Interruption:
    """Catches SIGINT between ``__enter__`` and ``__exit__``; for the main thread.

    ``notice`` is written to standard error at the first signal, ``farewell()`` at the second, just before the process
    ends without any clean-up.
    """

    def __init__(self, notice: str, farewell: Callable[[], str]) -> None:
        self.requested = False
        self._notice = notice
        self._farewell = farewell
        self._previous: Callable[[int, FrameType | None], object] | int | None = None

    def __enter__(self) -> Interruption:
        self._previous = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Write with os.write: the interrupted line may hold the lock of standard error's buffer."""
        if self.requested:
            if os.isatty(1):
                os.write(1, _SHOW_CURSOR)
            os.write(2, f"\n{self._farewell()}\n".encode("utf-8", "replace"))
            os._exit(INTERRUPTED)
        self.requested = True
        os.write(2, f"\n{self._notice}\n".encode("utf-8", "replace"))

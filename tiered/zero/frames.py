"""The frames of this thread tell which calls it is in, where torch does not report them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import CodeType, FrameType

__all__ = ["num_on_stack", "stack"]


def stack() -> Iterator[FrameType]:
    """Yield this thread's frames, the caller's first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def num_on_stack(code: CodeType) -> int:
    """Return how many calls of the function with ``code`` this thread is in."""
    return sum(frame.f_code is code for frame in stack())

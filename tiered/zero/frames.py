"""The frames of this thread tell which calls it is in, where torch does not report them; those of an error end here."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from types import CodeType, FrameType

__all__ = ["num_on_stack", "outcome_of", "stack"]


def stack() -> Iterator[FrameType]:
    """Yield this thread's frames, the caller's first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def num_on_stack(code: CodeType) -> int:
    """Return how many calls of the function with ``code`` this thread is in."""
    return sum(frame.f_code is code for frame in stack())


def outcome_of(action: Callable[[], object]) -> BaseException | None:
    """Do ``action``; return the error that it raised, whatever it is, for another thread to hear of."""
    try:
        action()
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # lifetime: their locals may be views of leased bytes
        return error
    return None

"""Origin: the line of the user's code that a call comes from, for messages."""

from __future__ import annotations

import sys
from types import FrameType

__all__ = ["origin"]


def origin() -> str:
    """Return "file:line" of the innermost frame that is none of tiered's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "tiered":
        frame = frame.f_back
    return "an unknown place" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"

"""Standard streams that outlast whoever reads them: `| head -1` and `>&-` end what is shown, never what is done.

A command then ends as it would have ended with a reader: with its own status, and a run with all of its steps.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast

__all__ = ["lasting_streams"]


class _Outlet:
    """A text stream that goes to nowhere from the moment on that its reader is gone; otherwise ``stream`` itself."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write ``text`` and return its length, also where nobody reads it any more. Raises OSError with a name."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self._failed(error)
            return len(text)

    def flush(self) -> None:
        """Flush what was written, as far as somebody reads it. Raises OSError with a name."""
        try:
            self._stream.flush()
        except OSError as error:
            self._failed(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _failed(self, error: OSError) -> None:
        """Let the descriptor lead to nowhere: what the stream's buffer still holds goes there too, at exit."""
        nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
        if not isinstance(error, BrokenPipeError):  # a disk that is full is no reader who has seen enough
            raise OSError(error.errno, error.strerror, self._stream.name) from error


@contextlib.contextmanager
def lasting_streams() -> Iterator[None]:
    """Have ``sys.stdout`` and ``sys.stderr`` that can always be written to, flushed at the end, and a ``sys.stdin``."""
    _fill_descriptors()
    before = sys.stdin, sys.stdout, sys.stderr
    with open(os.devnull, "r+", encoding="utf-8") as nowhere:
        sys.stdin = sys.stdin or nowhere
        sys.stdout, sys.stderr = (cast("TextIO", _Outlet(stream or nowhere)) for stream in before[1:])
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                sys.stdout.flush()
                sys.stderr.flush()
            sys.stdin, sys.stdout, sys.stderr = before


def _fill_descriptors() -> None:
    """Open nowhere as 0, 1 and 2 where they are closed, lest a store's file gets such a number and is written to."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)

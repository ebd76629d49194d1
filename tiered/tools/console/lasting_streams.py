"""Standard streams that outlast their readers: `| head -1` and `>&-` end the output of a command, never its work.

The command then ends with its own status, and a run with all of its steps, as with a reader.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast

__all__ = ["lasting_streams"]


class _LastingStream:
    """A text stream that writes to ``stream``, and to nowhere once the reader of ``stream`` is gone."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write ``text`` and return its length, with or without a reader. Raises OSError with a name."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self._failed(error)
            return len(text)

    def flush(self) -> None:
        """Flush the stream if it has a reader. Raises OSError with a name."""
        try:
            self._stream.flush()
        except OSError as error:
            self._failed(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _failed(self, error: OSError) -> None:
        """Point the descriptor to nowhere, which also takes the rest of the stream's buffer at exit."""
        nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
        if not isinstance(error, BrokenPipeError):  # a full disk is an error, a reader that has gone is none
            raise OSError(error.errno, error.strerror, self._stream.name) from error


@contextlib.contextmanager
def lasting_streams() -> Iterator[None]:
    """Make ``sys.stdout`` and ``sys.stderr`` writable in any case, and flush them at the end; open ``sys.stdin``."""
    _fill_descriptors()
    before = sys.stdin, sys.stdout, sys.stderr
    with open(os.devnull, "r+", encoding="utf-8") as nowhere:
        sys.stdin = sys.stdin or nowhere
        sys.stdout, sys.stderr = (cast("TextIO", _LastingStream(stream or nowhere)) for stream in before[1:])
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                sys.stdout.flush()
                sys.stderr.flush()
            sys.stdin, sys.stdout, sys.stderr = before


def _fill_descriptors() -> None:
    """Open nowhere as 0, 1 and 2 where they are closed: else a store's file could get such a number."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)

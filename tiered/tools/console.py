"""The terminal of the commands: pages of text, questions, interruption, files for reports, and lasting streams.

A page is as wide as the terminal, or as COLUMNS says; 80 columns where neither is known, such as in a pipe.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, TextIO, cast

from tiered.errors import UsageError

__all__ = [
    "INTERRUPTED", "MAY_HANG", "Interruption", "check_writable", "columns", "confirm", "fold", "lasting_streams",
    "page_width", "say", "write_report",
]  # fmt: skip

INTERRUPTED = 130
"""The exit status of a process that ended on Ctrl-C: 128 + SIGINT."""

MAY_HANG = "tiered-doctor"
"""The name of threads that may hang for good: the process of a command line ends without them."""

_NARROWEST = 40  # below it a line of figures is worse folded than broken by the terminal


def page_width() -> int:
    """Return the columns of a line."""
    return max(_NARROWEST, shutil.get_terminal_size((80, 24)).columns)


def fold(text: str, *, indent: int = 8, width: int | None = None) -> list[str]:
    """Return ``text`` in lines that fit the page, or ``width``, all but the first indented; its own line ends stay.

    A word is never divided, a path of the user's above all: a longer one has a longer line.
    """
    wrapper = textwrap.TextWrapper(
        width or page_width(), subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False,
        replace_whitespace=False,
    )  # fmt: skip
    return [line for part in text.split("\n") for line in wrapper.wrap(part) or [""]]


def say(*texts: str, indent: int = 8) -> None:
    """Print ``texts``, each from the start of a line and folded, at once."""
    print("\n".join(line for text in texts for line in fold(text, indent=indent)), flush=True)


def columns(rows: Sequence[Sequence[str]], right: Sequence[int] = (), *, indent: int = 0) -> Iterator[str]:
    """Yield ``rows`` as lines of aligned columns, those numbered in ``right`` flush right; the last one is free."""
    sizes = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(size) if number in right else cell.ljust(size)
            for number, (cell, size) in enumerate(zip(row, sizes, strict=True))
        ]
        yield f"{' ' * indent}{'  '.join(cells)}".rstrip()


def confirm(question: str, *, unasked: str, declined: str, yes: bool) -> None:
    """Return once ``question`` is answered with yes, on the terminal or by ``yes`` beforehand; blocks.

    Raises UsageError: ``unasked`` where there is no terminal to ask on, ``declined`` for any other answer.
    """
    if yes:
        return
    if not all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout)):  # None: closed
        raise UsageError(unasked)
    if input("\n".join(fold(f"{question} [y/N]", indent=2)) + " ").strip().lower() not in ("y", "yes"):
        raise UsageError(declined)


def check_writable(*files: Path | None) -> None:
    """Raise UsageError unless each of ``files`` can be written, and no two are one; nothing is opened."""
    given = [file for file in files if file is not None]
    for file in given:
        there = file if file.exists() else Path(os.path.realpath(file)).parent
        if file.is_dir():
            raise UsageError(f"cannot write {file}: it is a directory")
        if not there.exists():
            raise UsageError(f"cannot write {file}: the directory does not exist")
        if not os.access(there, os.W_OK):
            raise UsageError(f"cannot write {file}: {there} is not yours to write")
    if len({os.path.realpath(file) for file in given}) < len(given):
        raise UsageError(f"{given[0]} is given for two reports: give each a file of its own")


def write_report(file: Path, content: str) -> None:
    """Write ``content`` to ``file``; blocks. Raises UsageError, which names the file, when that fails after all."""
    try:
        file.write_text(content, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror}; everything else is done") from error


class Interruption:
    """Catches ``signals`` between ``__enter__`` and ``__exit__``; for the main thread.

    The first signal is a request that lets the step in hand finish, and ``notice`` is written to standard error. The
    second writes ``farewell()`` and ends the process at once, without any clean-up: what commits are made for. An
    exception could strike between any two lines of the engine. ``status`` is the exit status that the last signal asks
    for, 128 and its number. An empty text is not written.
    """

    def __init__(
        self, notice: str, farewell: Callable[[], str], *, signals: Iterable[signal.Signals] = (signal.SIGINT,)
    ) -> None:
        self.requested = False
        self.status = INTERRUPTED
        self._notice = notice
        self._farewell = farewell
        self._signals = tuple(signals)
        self._previous: dict[signal.Signals, Callable[[int, FrameType | None], object] | int | None] = {}

    @property
    def cause(self) -> str:
        """The name of the signal that stopped the process, for people."""
        return "Ctrl-C" if self.status == INTERRUPTED else signal.Signals(self.status - 128).name

    def take(self, status: int) -> None:
        """Take the request of a signal that another process has got, by its exit status; without a notice."""
        self.requested, self.status = True, status

    def __enter__(self) -> Interruption:
        for number in self._signals:
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *error: object) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.status = 128 + number
        if self.requested:
            _write(2, f"\n{self._farewell()}\n".encode("utf-8", "replace"))
            os._exit(self.status)
        self.requested = True
        _write(2, f"\n{self._notice}\n".encode("utf-8", "replace"))


def _write(descriptor: int, text: bytes) -> None:
    """Write past the buffers, whose lock the interrupted line may hold. The reader may be gone."""
    with contextlib.suppress(OSError):
        os.write(descriptor, text if text.strip() else b"")


class _LastingStream:
    """A text stream that writes to ``stream``, and to nowhere once the reader of ``stream`` is gone."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write ``text`` and return its length, with or without a reader. Raises OSError with a name."""
        with self._to_nowhere_without_a_reader():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush the stream if it has a reader. Raises OSError with a name."""
        with self._to_nowhere_without_a_reader():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def _to_nowhere_without_a_reader(self) -> Iterator[None]:
        """Point the descriptor to nowhere on an error, which also takes the rest of the stream's buffer at exit."""
        try:
            yield
        except OSError as error:
            nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
            if not isinstance(error, BrokenPipeError):  # a full disk is an error, a reader that has gone is none
                raise OSError(error.errno, error.strerror, self._stream.name) from error


@contextlib.contextmanager
def lasting_streams() -> Iterator[None]:
    """Make ``sys.stdout`` and ``sys.stderr`` outlast their readers: `| head -1` and `>&-` end the output, not the work.

    The command ends with its own status, as with a reader. Both are flushed at the end; ``sys.stdin`` is opened.
    """
    for number in range(3):  # opened to nowhere where they are closed: else a store's file could get such a number
        try:
            os.fstat(number)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
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

"""The output of a run while it works: a bar on a terminal, a line per step elsewhere, nothing when quiet."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from tiered.console.page import page_width, say

__all__ = ["BarDisplay", "Display", "LineDisplay", "QuietDisplay", "StepRecord", "open_display"]

_WIDE = 110  # columns in which a bar has room for tokens/s and GB/s too


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The figures of one optimizer step, measured by the training thread."""

    step: int  # the number of steps done, this one included
    loss: float  # nats per byte, mean over the micro-steps
    seconds: float
    num_tokens: int
    read_bytes: int
    write_bytes: int
    stall_seconds: float  # the training thread waited: for reads, room, updates or commits
    waits: Mapping[str, float] = field(default_factory=dict)  # of these, seconds by reason
    moved: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # bytes read and written by class
    update_seconds: float = 0.0  # in which any thread updated parameters and state
    device_busy_seconds: float = 0.0  # with something on its way to or from the devices
    copied: tuple[int, int] = (0, 0)  # bytes, to a compute device and back
    copy_seconds: tuple[float, float] = (0.0, 0.0)  # that its copy streams worked, in and out

    @property
    def outline(self) -> str:
        """The most important figures of the step, for a narrow terminal."""
        return f"loss {self.loss:.3f}  stall {min(1.0, self.stall_seconds / self.seconds):.0%}"

    def __str__(self) -> str:
        return (
            f"loss {self.loss:.3f}  {self.num_tokens / self.seconds:,.0f} tokens/s  "
            f"in {self.read_bytes / self.seconds / 1e9:.2f} out {self.write_bytes / self.seconds / 1e9:.2f} GB/s  "
            f"stall {min(1.0, self.stall_seconds / self.seconds):.0%}"
        )


class Display(Protocol):
    """Shows a run's progress between ``__enter__`` and ``__exit__``; used by the training thread alone."""

    def __enter__(self) -> Display: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def note(self, text: str) -> None:
        """Show the run's present work."""

    def step(self, record: StepRecord) -> None:
        """Show a finished step."""


class QuietDisplay:
    """Shows nothing."""

    def __enter__(self) -> Display:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def note(self, text: str) -> None:
        """Say nothing."""

    def step(self, record: StepRecord) -> None:
        """Show nothing."""


class LineDisplay(QuietDisplay):
    """Prints a line per step and note: for logs and pipes."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps

    def note(self, text: str) -> None:
        """Print ``text``."""
        say(text)

    def step(self, record: StepRecord) -> None:
        """Print the step in one line, the most important figures alone where it would be wider than the page."""
        begin = f"step {record.step}/{self._num_steps}  {record.seconds:.2f} s"
        whole = f"{begin}  {record}"
        print(whole if len(whole) <= page_width() else f"{begin}  {record.outline}", flush=True)


class BarDisplay(QuietDisplay):
    """A progress bar that stays on one line of a terminal; the number of the step has room before all else."""

    def __init__(self, num_steps: int, *, first_step: int) -> None:
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(table_column=Column(no_wrap=True, min_width=2 * len(str(num_steps)) + 1)),
            BarColumn(bar_width=16),
            TextColumn("{task.description}", markup=False),
            TimeRemainingColumn(compact=True),
            console=Console(highlight=False),
        )
        self._task = self._progress.add_task("", total=num_steps, completed=first_step)

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def note(self, text: str) -> None:
        """Show ``text`` beside the bar until the next step."""
        self._progress.update(self._task, description=text)

    def step(self, record: StepRecord) -> None:
        """Move the bar and show the step beside it."""
        shown = str(record) if self._progress.console.width >= _WIDE else record.outline
        self._progress.update(self._task, completed=record.step, description=shown)


def open_display(num_steps: int, *, first_step: int, quiet: bool) -> Display:
    """Return the display that suits where standard output goes."""
    if quiet:
        return QuietDisplay()
    if sys.stdout.isatty():
        return BarDisplay(num_steps, first_step=first_step)
    return LineDisplay(num_steps)

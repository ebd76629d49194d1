"""`tiered bench`: checks and confirmation of the request, then a suite per directory, then files and the verdict."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from tiered.bytes.device.engines import DEVICES
from tiered.bytes.device.profile import write_profile
from tiered.errors import TieredError, UsageError
from tiered.tools.bench.accelerator import accelerator_of, measure_link, measure_swap
from tiered.tools.bench.report import BenchReport, DirectoryReport, compute_verdict_of, verdict_of
from tiered.tools.bench.settings import FULL, QUICK, BenchSettings
from tiered.tools.bench.suite import Session, Suite, measure_together
from tiered.tools.console import Interruption, check_writable, confirm, say, write_report
from tiered.tools.doctor.checks import check_drives
from tiered.tools.doctor.description import DirectoryDescription, machine_description
from tiered.units import format_bytes

__all__ = ["BenchRequest", "bench", "confirm_writes"]


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """The options of the command line."""

    directories: tuple[Path, ...]
    engine: str = "auto"
    device: str | None = None  # the accelerator to measure, too
    quick: bool = False
    sustained_s: float = 0.0
    yes: bool = False
    json_file: Path | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.sustained_s < float("inf"):
            raise UsageError(f"--sustained takes seconds, got {self.sustained_s}")
        if self.engine not in ("auto", *DEVICES):
            raise UsageError(f"--engine must be one of auto, {', '.join(DEVICES)}; got {self.engine!r}")
        real = [os.path.realpath(directory) for directory in self.directories]
        if not real or len(set(real)) != len(real):
            raise UsageError("give one directory or several different ones")
        for directory in self.directories:
            if not directory.is_dir() or not os.access(directory, os.W_OK | os.X_OK):
                raise UsageError(f"cannot measure in {directory}: it is no directory, or not yours to write; create it")
        check_writable(self.json_file)
        if self.device is not None:
            accelerator_of(self.device)


class _Stopped(Exception):
    """A signal came: end in good order."""


def bench(request: BenchRequest, settings: BenchSettings | None = None) -> int:
    """Measure and report; return the exit status: 0, or 130, 143 and 129 when a signal stopped it in good order.

    Nothing is written before that was agreed to. Afterwards only the profile of each directory is left there.
    Raises TieredError.
    """
    settings = settings or replace(QUICK if request.quick else FULL, sustained_s=request.sustained_s)
    machine = machine_description(request.directories)
    settings = settings.fitted(min((one.free_nbytes or 0 for one in machine.directories), default=0))
    has_device = request.device is not None
    nbytes = settings.write_nbytes(num_directories=len(machine.directories), has_device=has_device)
    each = "each of the directories" if len(machine.directories) > 1 else machine.directories[0].path
    say(f"this writes at most {format_bytes(nbytes)} to {each}", indent=2)
    paths = [one.path for one in machine.directories]
    say(*machine.lines(), *([f"drives    {check_drives(paths).found}"] if paths[1:] else []), indent=10)
    say("Ctrl-C ends it in good order")
    confirm_writes(machine.directories, nbytes, settings.file_nbytes, yes=request.yes)
    report = BenchReport(machine, settings)

    def check() -> None:
        if interruption.requested:
            raise _Stopped

    def farewell() -> str:
        session.remove_folders()
        return "ended at once; nothing was left behind"

    session = Session(report, request.engine, check)
    interruption = Interruption(
        "stopping after the round in hand (Ctrl-C again: at once)",
        farewell,
        signals=(signal.SIGINT, signal.SIGTERM, signal.SIGHUP),
    )
    with interruption:
        try:
            _measure(session, request)
        except _Stopped:
            session.line(f"stopped by {interruption.cause}; nothing was left behind, and nothing is reported")
            return interruption.status
    _finish(report, request)
    return 0


def _measure(session: Session, request: BenchRequest) -> None:
    """Fill in the report: the link to a compute device, each directory, all of them, and all three tiers."""
    report = session.report
    device = None if request.device is None else accelerator_of(request.device)
    if device is not None:
        measure_link(session, device, report.machine.directories[0].path)
    for one in report.machine.directories:
        report.directories.append(Suite(session, one).run())
    if len(report.directories) > 1:
        measure_together(session)
    if device is not None:
        measure_swap(session, device)


def confirm_writes(directories: Sequence[DirectoryDescription], nbytes: int, file_nbytes: int, *, yes: bool) -> None:
    """Return if at most a tenth of the free space will be written, or the user agrees. Raises UsageError."""
    asked = [one for one in directories if nbytes > (one.free_nbytes or 0) / 10]
    if not asked:
        return
    where = " and ".join(f"{one.path} ({format_bytes(one.free_nbytes or 0)} free)" for one in asked)
    what = (
        f"this writes up to {format_bytes(nbytes)} to {where}: one file of {format_bytes(file_nbytes)} again and again"
    )
    confirm(
        f"{what}. Go on?",
        unasked=f"{what}; there is no terminal to ask on: add --yes",
        declined="nothing was written",
        yes=yes,
    )


def _finish(report: BenchReport, request: BenchRequest) -> None:
    bests = [one.best for one in report.directories if one.best is not None]
    together = [row for row in report.results if report.directories[1:] and row.directory == report.joined]
    report.verdict = verdict_of(bests, report.drives, together, has_fio=shutil.which("fio") is not None)
    if report.compute_device is not None:
        report.verdict += f"; {compute_verdict_of(report.compute_device)}"
    with ExitStack() as steps:  # the last one first, and each even if others fail: minutes of measuring are in them
        steps.callback(say, "", report.verdict, indent=2)
        for one in reversed(report.directories):
            steps.callback(_keep_profiles, one, report)
        if request.json_file:
            steps.callback(write_report, request.json_file, f"{json.dumps(report.as_json(), indent=1)}\n")


def _keep_profiles(one: DirectoryReport, report: BenchReport) -> None:
    """Keep and tell the best settings of one directory, and the rates of a compute device beside them."""
    best, found = one.best, report.compute_device
    assert best is not None
    kept = _kept(lambda: write_profile(one.directory, report.profile_of(one)))
    say(
        f"best: engine {one.engine}, blocks of {format_bytes(best.block_bytes)}, {best.read_depth} in flight reading, "
        f'{best.write_depth} writing; {kept} for Store(engine="auto")',
        indent=2,
    )
    if found is not None:
        kept = _kept(lambda: write_profile(one.directory, report.link_profile_of(found)))
        say(f"{found.device}: {found.link}; {kept}", indent=2)


def _kept(write: Callable[[], Path]) -> str:
    """Write a profile and return where it is; where it cannot be kept, say so and go on."""
    try:
        return f"kept in {write()}"
    except TieredError as error:
        return f"not kept ({error})"

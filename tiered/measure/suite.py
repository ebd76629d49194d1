"""All that is measured in one directory, in order: points, demand reads, tensors, the long run; and then the advice.

Each part fills in its piece of the DirectoryReport. The pieces' own files know how to measure them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from tiered.doctor.description import DirectoryDescription
from tiered.errors import DeviceError
from tiered.measure.display import BenchDisplay
from tiered.measure.fio import Fio, FioError
from tiered.measure.pairs import ROW_TITLE, Pairs, measure_pairs
from tiered.measure.pattern import Pattern
from tiered.measure.report import BenchReport, DirectoryReport
from tiered.measure.scratch_file import ScratchFile
from tiered.measure.scratch_folders import ScratchFolders
from tiered.measure.settings import BenchSettings, Point
from tiered.measure.sustained import read_smart, sustain
from tiered.measure.swapping import measure_demand, measure_swapping
from tiered.measure.tensors import TENSOR_TITLE, TensorRow, measure_tensors
from tiered.measure.verdict import Best, best_of
from tiered.units import format_bytes

__all__ = ["Suite", "measure_together"]

_CLEARLY_FASTER = 0.95


class Suite:
    """Measures one directory. ``check`` is called between rounds and may raise to end it all."""

    def __init__(
        self,
        described: DirectoryDescription,
        settings: BenchSettings,
        display: BenchDisplay,
        check: Callable[[], object],
        folders: ScratchFolders,
        *,
        engine: str = "auto",
    ) -> None:
        self.report = DirectoryReport(described.path)
        self._described = described
        self._settings = settings
        self._display = display
        self._check = check
        self._engine = engine
        self._folders = folders
        self._fio: Fio | None = None

    def run(self) -> DirectoryReport:
        """Measure everything; blocks for minutes. Raises TieredError and the errors of ``check``; cleans up."""
        settings, report = self._settings, self.report
        with self._open_scratch(self._engine) as scratch:
            report.engine, report.engine_reason = scratch.engine, scratch.engine_reason
            self._find_fio(scratch)
            self._measure_points(scratch)
            best = report.best = best_of(report.rows)
            self._measure_swapping(scratch, best)
            self._now("demand reads beside writes", 0.9)
            report.demand = measure_demand(
                scratch, self._pattern("write", best), rounds=settings.rounds, check=self._check
            )
            self._display.line(str(report.demand))
            self._measure_tensors(scratch, best)
            self._sustain(scratch, best)
        for engine in settings.engines if self._engine == "auto" else ():
            if engine != report.engine:
                self._try_engine(engine, best)
        return report

    @contextmanager
    def _open_scratch(self, engine: str) -> Iterator[ScratchFile]:
        settings = self._settings
        self._now(f"engine {engine}: writing the file that is measured", 0.0)
        with ScratchFile(
            self.report.directory,
            engine=engine,
            memory_nbytes=settings.memory_nbytes + max(settings.blocks),  # a demand read beside the deepest writes
            file_nbytes=settings.file_nbytes,
            depth=max(settings.depths),
        ) as scratch:
            scratch.write_file(lambda nbytes: self._check())
            yield scratch

    def _try_engine(self, engine: str, best: Best) -> None:
        """Measure another engine at the best settings; it becomes the one to use where it is clearly faster."""
        report, rows = self.report, []
        try:
            with self._open_scratch(engine) as scratch:
                self._display.line(f"engine {engine}")
                for op, depth in (("read", best.read_depth), ("write", best.write_depth)):
                    pairs = self._measure(scratch, Point(op, best.block_bytes, depth))
                    rows.append(pairs.row(engine=engine, directory=report.directory))
                    self._display.line(str(rows[-1]))
                report.other_rows += rows
                other = best_of(rows)
                if report.best is not None and other.seconds < _CLEARLY_FASTER * report.best.seconds:
                    self._measure_swapping(scratch, other)
                    report.best = replace(other, duplex=best.duplex)
                    report.engine, report.engine_reason = engine, "it was the fastest"
        except DeviceError as error:
            self._display.line(f"engine {engine} does not work here: {error}")

    def _find_fio(self, scratch: ScratchFile) -> None:
        missing = "fio is not installed"
        try:
            self._fio = scratch.find_fio()
        except FioError as error:
            missing = str(error)
        reference = f"beside fio with {self._fio.engine}" if self._fio else f"without a reference: {missing}"
        self.report.fio_engine = self._fio.engine if self._fio else None
        self._display.line(f"\n{self.report.directory}: engine {scratch.engine} ({scratch.engine_reason}), {reference}")

    def _measure_points(self, scratch: ScratchFile) -> None:
        points = self._settings.points
        self._display.line(ROW_TITLE)
        for number, point in enumerate(points):
            self._now(
                f"{point.op} {format_bytes(point.block_nbytes)} x {point.depth}", (number + 1) / (len(points) + 2)
            )
            pairs = self._measure(scratch, point)
            row = pairs.row(engine=scratch.engine, directory=self.report.directory)
            self.report.rows.append(row)
            self._display.line(str(row))

    def _measure(self, scratch: ScratchFile, point: Point) -> Pairs:
        """Measure ``point``; without fio from here on should that fail."""
        settings, pattern = self._settings, self._settings.pattern(point)
        fio = self._fio if point.has_fio else None
        try:
            return measure_pairs(
                scratch,
                pattern,
                rounds=settings.rounds,
                fio=fio,
                warm_up_s=settings.warm_up_s,
                check=self._check,
            )
        except FioError as error:
            self._display.line(f"from here on without fio: {error}")
            self._fio = None
        return self._measure(scratch, point)

    def _measure_swapping(self, scratch: ScratchFile, best: Best) -> None:
        settings = self._settings
        self._now("through memory larger than the caches", 0.88)
        depths = {
            "read": best.read_depth,
            "write": best.write_depth,
            "mixed": max(2, best.read_depth, best.write_depth),
        }
        patterns = {op: settings.pattern(Point(op, best.block_bytes, depth)) for op, depth in depths.items()}
        self.report.swap = measure_swapping(scratch, patterns, rounds=settings.rounds, check=self._check)
        self._display.line(str(self.report.swap))

    def _measure_tensors(self, scratch: ScratchFile, best: Best) -> None:
        settings = self._settings
        if settings.tensor_nbytes:
            self._display.line(TENSOR_TITLE)
        for tensor_nbytes in settings.tensor_nbytes:
            self._now(f"tensors of {format_bytes(tensor_nbytes)}", 0.95)
            try:
                found = measure_tensors(
                    self._folders.make([self.report.directory]),
                    tensor_nbytes,
                    directory=self.report.directory,
                    total_nbytes=settings.tensors_nbytes,
                    dram_nbytes=settings.dram_nbytes,
                    rounds=settings.tensor_rounds,
                    engine=scratch.engine,
                    raw={op: self._raw(scratch, self._pattern(op, best)) for op in ("read", "write")},
                )
            finally:
                self._folders.remove()
            self.report.tensors += found
            self._display.line("\n".join(map(str, found)))

    def _raw(self, scratch: ScratchFile, pattern: Pattern) -> Callable[[], float]:
        def run() -> float:
            self._check()
            return scratch.run(pattern, is_spread=True).gb_per_s  # tensors are not in the processor's caches either

        return run

    def _sustain(self, scratch: ScratchFile, best: Best) -> None:
        settings, report = self._settings, self.report
        for op in ("write", "read") if settings.sustained_s else ():
            self._now(f"{op} for {settings.sustained_s:.0f} s", 0.98)
            samples = sustain(
                scratch,
                self._pattern(op, best),
                seconds=settings.sustained_s,
                window_s=settings.window_s,
                mount=self._described.mount,
                check=self._check,
            )
            report.sustained += samples
            rates = [sample.gb_per_s for sample in samples] or [0.0]
            heat = [sample.temperature_c for sample in samples if sample.temperature_c is not None]
            self._display.line(
                f"{op} for {settings.sustained_s:.0f} s: {rates[0]:.2f} GB/s at first, {rates[-1]:.2f} at last, "
                f"{min(rates):.2f}-{max(rates):.2f}; temperature "
                f"{f'{heat[0]:.0f} to {heat[-1]:.0f} C' if heat else 'not readable'}"
            )
        if settings.sustained_s:
            drive = self._described.block_device
            report.smart = read_smart(drive.disks if drive else ())
            self._display.line("\n".join(map(str, report.smart)) or "SMART counters: not readable (smartctl)")

    def _pattern(self, op: str, best: Best) -> Pattern:
        depth = best.write_depth if op == "write" else best.read_depth
        return self._settings.pattern(Point(op, best.block_bytes, depth))

    def _now(self, text: str, done: float) -> None:
        self._check()
        self._display.now(f"{self.report.directory}: {text}", done=done)


def measure_together(
    report: BenchReport,
    display: BenchDisplay,
    check: Callable[[], object],
    folders: ScratchFolders,
    *,
    engine: str,
) -> list[TensorRow]:
    """Put, get and lease tensors in a store over all directories of ``report``, each measured alone before; blocks.

    The raw rate of a row is the sum of the rates of the drives alone, through memory that no cache holds. Each
    folder is given the profile of its directory, which deals out the bytes. Raises TieredError; cleans up.
    """
    settings = report.settings
    sums = {op: sum(getattr(one, f"{op}_gb_per_s") for one in report.swapping) for op in ("read", "write")}

    def checked(gb_per_s: float) -> float:
        check()
        return gb_per_s

    check()
    display.now(f"a store over all {len(report.directories)} directories", done=0.99)
    display.line(f"\na store over all {len(report.directories)}; raw: the sum of each drive alone\n{TENSOR_TITLE}")
    try:
        rows = measure_tensors(
            folders.make_profiled(report),
            settings.together_tensor_nbytes,
            directory="+".join(one.directory for one in report.directories),
            total_nbytes=settings.tensors_nbytes,
            dram_nbytes=settings.dram_nbytes,
            rounds=settings.tensor_rounds,
            engine=engine,
            raw={op: partial(checked, rate) for op, rate in sums.items()},
        )
    finally:
        folders.remove()
    display.line("\n".join(map(str, rows)))
    return rows

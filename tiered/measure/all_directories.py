"""Several directories at once: a store over all of them, as a user has it, beside the sum of their drives' rates."""

from __future__ import annotations

from collections.abc import Callable

from tiered.measure.display import BenchDisplay
from tiered.measure.report import TENSOR_TITLE, BenchReport, TensorRow
from tiered.measure.scratch_folders import ScratchFolders
from tiered.measure.settings import BenchSettings
from tiered.measure.tensors import measure_tensors

__all__ = ["AllDirectories"]


class AllDirectories:
    """A store over folders in all directories of ``report``; each directory has been measured alone.

    Each folder is given the profile of its directory, which deals out the bytes. ``check`` is called between rounds and
    may raise to end it all.
    """

    def __init__(
        self,
        report: BenchReport,
        settings: BenchSettings,
        display: BenchDisplay,
        check: Callable[[], object],
        *,
        engine: str = "auto",
    ) -> None:
        self._report = report
        self._settings = settings
        self._display = display
        self._check = check
        self._engine = engine
        self._folders = ScratchFolders()

    def run(self) -> list[TensorRow]:
        """Put, get and lease tensors; return a row for each. Blocks; raises TieredError; cleans up.

        The raw rate of a row is the sum of the rates of the drives alone, through memory that no cache holds.
        """
        report, settings = self._report, self._settings
        sums = {op: sum(getattr(one, f"{op}_gb_per_s") for one in report.swapping) for op in ("read", "write")}
        self._check()
        self._display.now(f"a store over all {len(report.directories)} directories", done=0.99)
        where = f"a store over all {len(report.directories)}; raw: the sum of each drive alone"
        self._display.line(f"\n{where}\n{TENSOR_TITLE}")
        try:
            found = measure_tensors(
                self._folders.make_profiled(report),
                settings.together_tensor_nbytes,
                total_nbytes=settings.tensors_nbytes,
                dram_nbytes=settings.dram_nbytes,
                rounds=settings.tensor_rounds,
                engine=self._engine,
                raw={op: self._checked(rate) for op, rate in sums.items()},
            )
        finally:
            self.abandon()
        rows = [
            TensorRow.of(rounds, directory="+".join(one.directory for one in report.directories)) for rounds in found
        ]
        for row in rows:
            self._display.line(str(row))
        return rows

    def abandon(self) -> None:
        """Remove the folders; from a signal handler too."""
        self._folders.remove()

    def _checked(self, gb_per_s: float) -> Callable[[], float]:
        def rate() -> float:
            self._check()
            return gb_per_s

        return rate

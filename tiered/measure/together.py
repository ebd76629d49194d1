"""Several directories at once: one device striped over all, each with the share that its own figures call for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tiered.measure.bed import Bed
from tiered.measure.display import BenchDisplay
from tiered.measure.pairs import measure_pairs
from tiered.measure.pattern import Pattern
from tiered.measure.report import ROW_TITLE, DirectoryReport, Row
from tiered.measure.settings import Settings

__all__ = ["measure_together"]


def measure_together(
    reports: Sequence[DirectoryReport],
    settings: Settings,
    display: BenchDisplay,
    check: Callable[[], object],
) -> list[Row]:
    """Read and write all directories at once, at the best settings of the first; return both rows. Blocks.

    The file is as long as that of a single directory times their number. There is no fio beside it.
    """
    bests = [report.best for report in reports if report.best is not None]
    weights = [1 / (1 / best.read_gb_per_s + 1 / best.write_gb_per_s) for best in bests]
    block_nbytes = bests[0].block_bytes
    depths = {
        "read": sum(best.read_depth for best in bests),
        "write": sum(best.write_depth for best in bests),
    }
    directory = "+".join(report.directory for report in reports)
    display.now(f"all {len(reports)} directories together", done=0.99)
    rows = []
    with Bed(
        [report.directory for report in reports],
        engine=reports[0].engine,
        memory_nbytes=block_nbytes * max(depths.values()),
        file_nbytes=settings.file_nbytes * len(reports),
        depth=max(depths.values()),
        weights=weights,
        stripe_nbytes=block_nbytes,
    ) as bed:
        bed.write_file(lambda nbytes: check())
        display.line(f"\nall {len(reports)} together, striped by {', '.join(f'{w:.2f}' for w in weights)}\n{ROW_TITLE}")
        for op, depth in depths.items():
            pattern = Pattern(
                op, block_nbytes, depth, bed.file_nbytes, settings.round_s, settings.round_nbytes * len(reports)
            )
            pairs = measure_pairs(bed, pattern, rounds=settings.rounds, warm_up_s=settings.warm_up_s, check=check)
            rows.append(Row.of(pairs, engine=bed.engine, directory=directory))
            display.line(str(rows[-1]))
    return rows

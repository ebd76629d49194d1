"""One figure of a bench: bandwidth over block size beside fio, latency, and its other measurements.

Needs matplotlib, the extra ``plot``; nothing else imports this file before a plot is asked for.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from tiered.measure.report import BenchReport, DirectoryReport, PointRow
from tiered.measure.sustained import SustainedRate
from tiered.units import format_bytes

__all__ = ["draw", "figure_of"]

_LINE_LENGTH = 160  # at most, in characters, across the page
_MARGIN = 0.04  # left and right, of the page's width
_COLOURS = ("#1b6ca8", "#d1495b", "#2e933c", "#8f5db7", "#e08e0b", "#4a4e69")
_INK, _FAINT = "#222222", "#d9d9d9"
_DPI = 130


def draw(report: BenchReport) -> bytes:
    """Return the figure of ``report`` as a PNG; the panels are of the first directory."""
    png = io.BytesIO()
    figure_of(report).savefig(png, format="png")
    return png.getvalue()


def figure_of(report: BenchReport) -> Figure:
    """Return the figure that ``draw`` writes. Every label of it lies on the page, whatever the names of drives."""
    figure = Figure(figsize=(13, 9), dpi=_DPI, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2)
    first = report.directories[0]
    idle = [row for row in first.rows if not row.is_busy]
    for axis, op in ((axes[0, 0], "read"), (axes[0, 1], "write")):
        _draw_bandwidth(axis, [row for row in idle if row.op == op], f"{op}, GB/s by block and blocks in flight")
    top = max((row.gb_per_s_max for row in idle if row.op != "mixed"), default=1.0)
    for axis in axes[0]:
        axis.set_ylim(0, 1.25 * max([top, *(row.fio_gb_per_s or 0.0 for row in idle if row.op != "mixed")]))
    _draw_latency(axes[1, 0], idle)
    if first.sustained:
        _draw_sustained(axes[1, 1], first.sustained)
    else:
        _draw_summary(axes[1, 1], first)
    end = _write(figure, report.verdict, 0.975, fontsize=11, color=_INK, weight="bold")
    end = _write(figure, _hardware(report, first), end - 0.01, fontsize=9.5, color="#555555")
    figure.subplots_adjust(left=0.06, right=0.955, top=end - 0.04, bottom=0.07, hspace=0.3, wspace=0.3)
    return figure


def _write(figure: Figure, text: str, top: float, **look: Any) -> float:
    """Write ``text`` across the page, in at most three lines, from ``top`` on; return where it ends, from 0 to 1."""
    written = figure.text(_MARGIN, top, text, ha="left", va="top", **look)
    for length in range(_LINE_LENGTH, 0, -5):
        written.set_text(textwrap.fill(text, length, break_on_hyphens=False, max_lines=3, placeholder=" ..."))
        if written.get_window_extent().x1 <= (1 - _MARGIN) * figure.bbox.width:
            break
    return float(written.get_window_extent().y0 / figure.bbox.height)


def _hardware(report: BenchReport, first: DirectoryReport) -> str:
    machine, first_place = report.machine, report.machine.directories[0]
    device, mount = first_place.block_device, first_place.mount
    drive = (device.model or device.name) if device else "a drive not known"
    where = f"{mount.file_system} on {drive}" if mount else drive
    others = f", and {len(report.directories) - 1} more" if len(report.directories) > 1 else ""
    return (
        f"{first.directory} ({where}){others}; engine {first.engine}; {machine.cpu_model or 'CPU not known'}, "
        f"{machine.num_cores} cores, Linux {machine.kernel}; {report.measured_at[:10]}"
    )


def _draw_bandwidth(axis: Axes, rows: Sequence[PointRow], title: str) -> None:
    for colour, depth in zip(_COLOURS, sorted({row.depth for row in rows}), strict=False):
        line = sorted((row for row in rows if row.depth == depth), key=lambda row: row.block_bytes)
        blocks = [row.block_bytes for row in line]
        rates = [row.gb_per_s for row in line]
        spread = [
            [row.gb_per_s - row.gb_per_s_min for row in line],
            [row.gb_per_s_max - row.gb_per_s for row in line],
        ]
        label = f"x {depth}"
        axis.errorbar(blocks, rates, yerr=spread, color=colour, marker="o", ms=5, lw=1.8, capsize=3, label=label)
        fio = [(row.block_bytes, row.fio_gb_per_s) for row in line if row.fio_gb_per_s is not None]
        if fio:
            axis.plot(*zip(*fio, strict=True), color=colour, ls=":", marker="D", ms=8, mfc="none", lw=1.0)
    if any(row.fio_gb_per_s is not None for row in rows):
        axis.plot([], [], color=_INK, ls=":", marker="D", ms=8, mfc="none", lw=1.0, label="fio")
    _dress(axis, f"{title}: median, range of rounds")
    _label_blocks(axis, rows)
    axis.legend(frameon=False, fontsize=8.5, loc="upper left", ncols=5, columnspacing=1.0, handlelength=1.6)


def _draw_latency(axis: Axes, rows: Sequence[PointRow]) -> None:
    """Draw p50 to p99.9 of reads and writes at the depth that has most block sizes, the deeper of equals."""
    depths = [row.depth for row in rows if row.op == "read"]
    depth = max(depths, key=lambda one: (depths.count(one), one), default=1)
    for colour, op in zip(_COLOURS, ("read", "write"), strict=False):
        line = sorted((row for row in rows if (row.op, row.depth) == (op, depth)), key=lambda row: row.block_bytes)
        blocks = [row.block_bytes for row in line]
        low = [row.latency.p50_s * 1e3 for row in line]
        middle = [row.latency.p99_s * 1e3 for row in line]
        high = [row.latency.p999_s * 1e3 for row in line]
        axis.plot(blocks, low, color=colour, marker="o", ms=5, lw=1.8, label=f"{op} p50")
        axis.plot(blocks, middle, color=colour, marker="^", ms=5, lw=1.2, ls="--", label=f"{op} p99")
        axis.plot(blocks, high, color=colour, marker="v", ms=5, lw=1.0, ls=":", label=f"{op} p99.9")
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:.0e}"[0] in "25" else "")
    axis.tick_params(axis="y", which="minor", labelsize=8, colors=_INK)
    _dress(axis, f"latency of a block with {depth} in flight, ms")
    _label_blocks(axis, rows)
    low_end, high_end = axis.get_ylim()
    axis.set_ylim(low_end, high_end * (high_end / low_end) ** 0.28)  # room for the legend
    axis.legend(frameon=False, fontsize=9, ncols=2, loc="upper left")


def _draw_summary(axis: Axes, report: DirectoryReport) -> None:
    """Draw the best of each kind as bars, with fio's rate as a mark."""
    best = report.best
    block_bytes = best.block_bytes if best else 0
    bars: list[tuple[str, float, float | None]] = []
    for op in ("read", "write", "mixed"):
        for is_busy in (False, True):
            found = [row for row in report.rows if row.op == op and row.is_busy == is_busy]
            found = [row for row in found if row.block_bytes == block_bytes] or found
            if found:
                row = max(found, key=lambda one: one.gb_per_s)
                where = f"{_short(row.block_bytes)} x {row.depth}"
                bars.append((f"{op}{', busy thread' if is_busy else ''}\n{where}", row.gb_per_s, row.fio_gb_per_s))
    largest = max((row.tensor_bytes for row in report.tensors if row.tensor_bytes <= 64 << 20), default=0)
    bars += [
        (f"tensor {row.op}\n{_short(row.tensor_bytes)}", row.gb_per_s, None)
        for row in report.tensors
        if row.tensor_bytes == largest
    ]
    places = range(len(bars))
    colours = [_colour(name) for name, *_ in bars]
    axis.barh(places, [rate for _, rate, _ in bars], color=colours, height=0.62, alpha=0.85)
    right = max([rate for _, rate, _ in bars] + [fio or 0.0 for *_, fio in bars], default=1.0)
    for place, (_, rate, fio) in zip(places, bars, strict=True):
        axis.text(
            max(rate, (fio or 0.0) + 0.01 * right) + 0.015 * right,
            place,
            f"{rate:.2f}",
            va="center",
            fontsize=9,
            color=_INK,
        )
        if fio is not None:
            axis.plot([fio], [place], color=_INK, marker="D", ms=8, mfc="none", ls="none")
    axis.set_yticks(places, [name for name, *_ in bars], fontsize=8.5)
    axis.invert_yaxis()
    axis.set_xlim(0, 1.15 * right)
    _dress(axis, "side by side, GB/s (diamonds: fio)", grid="x")


def _colour(name: str) -> str:
    """Return the colour of a bar: that of reads or of writes elsewhere in the figure, a third one for both."""
    return _COLOURS[3] if "mixed" in name else _COLOURS[1] if "write" in name or "put" in name else _COLOURS[0]


def _draw_sustained(axis: Axes, samples: Sequence[SustainedRate]) -> None:
    for colour, op in zip(_COLOURS, ("read", "write"), strict=False):
        line = [sample for sample in samples if sample.op == op]
        axis.plot([one.at_s for one in line], [one.gb_per_s for one in line], color=colour, lw=1.6, label=op)
    axis.set_ylim(bottom=0)
    _dress(axis, "without a pause, GB/s over seconds")
    heat = [(one.at_s, one.temperature_c) for one in samples if one.op == "write" and one.temperature_c is not None]
    if heat:
        right = axis.twinx()
        right.plot(*zip(*heat, strict=True), color=_COLOURS[4], lw=1.2, ls="--")
        right.set_ylabel("temperature while writing, C", color=_COLOURS[4], fontsize=9)
        right.spines[["top", "left", "bottom"]].set_visible(False)
    axis.legend(frameon=False, fontsize=9, loc="lower right")


def _dress(axis: Axes, title: str, *, grid: str = "y") -> None:
    axis.set_title(title, fontsize=10.5, loc="left", color=_INK)
    axis.grid(axis="x" if grid == "x" else "y", color=_FAINT, lw=0.7)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=9, colors=_INK)


def _label_blocks(axis: Axes, rows: Sequence[PointRow]) -> None:
    blocks = sorted({row.block_bytes for row in rows})
    axis.set_xscale("log", base=2)
    axis.set_xticks(blocks, [_short(block) for block in blocks])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xlabel("block", fontsize=9, color=_INK)


def _short(nbytes: int) -> str:
    return format_bytes(nbytes).replace(".0 ", " ")

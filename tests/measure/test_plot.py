"""Every label of the pictures that benches draw lies on the page, however long names and figures are.

Pictures are drawn in children: matplotlib keeps the files of its fonts open for as long as a process lives.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.bytes.moving import exit_code_of_child
from tiered.doctor.block_device import BlockDevice
from tiered.doctor.description import DirectoryDescription, machine_description
from tiered.doctor.mount import Mount
from tiered.measure.report import BenchReport, DirectoryReport, PointRow, TensorRow
from tiered.measure.rounds import Latency
from tiered.measure.settings import QUICK
from tiered.measure.sustained import SustainedRate
from tiered.measure.verdict import Best
from tiered.units import KiB, MiB

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.text import Text

ROOT = Path(__file__).parents[2]
LONG_NAME = "MegaWide-Workgroup-Datacentre-NVMe-Mixed-Use-30720GB " * 6


def texts_on(figure: Figure) -> list[Text]:
    """Return the texts that are drawn: all but empty ones and labels of ticks beyond the ends of their axis."""
    from matplotlib.text import Text

    figure.draw_without_rendering()
    hidden = set()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
            hidden |= {one for tick in ticks if not low <= tick.get_loc() <= high for one in (tick.label1, tick.label2)}
    return [one for one in figure.findobj(Text) if one.get_visible() and one.get_text().strip() and one not in hidden]


def off_the_page(figure: Figure) -> list[str]:
    """Return the texts of which a part lies outside of ``figure``."""
    page = figure.bbox
    found = []
    for text in texts_on(figure):
        extent = text.get_window_extent()
        if extent.x0 < page.x0 or extent.y0 < page.y0 or extent.x1 > page.x1 or extent.y1 > page.y1:
            found.append(text.get_text())
    return found


def overlapping(figure: Figure) -> list[tuple[str, str]]:
    """Return the pairs of texts that lie on each other."""
    extents = [(text.get_text(), text.get_window_extent()) for text in texts_on(figure)]
    return [(a, b) for (a, one), (b, other) in combinations(extents, 2) if one.overlaps(other)]


def row(op: str, nbytes: int, depth: int, *, is_busy: bool = False) -> PointRow:
    """Return a row of a drive so fast that its figures are long."""
    latency = Latency(1e-4, 2e-3, 0.5, 1.5)
    return PointRow(
        op=op, block_bytes=nbytes, depth=depth, engine="uring", directory="/", is_busy=is_busy, rounds=5,
        gb_per_s=1234.5, gb_per_s_min=1000.0, gb_per_s_max=2345.6, latency=latency, cpu_s_per_gb=0.01,
        read_gb_per_s=600.0, write_gb_per_s=600.0, fio_gb_per_s=None if is_busy else 2400.25, ratio_to_fio=0.5,
        fio_cpu_s_per_gb=0.01, cpu_ratio_to_fio=1.0, fio_latency=latency,
    )  # fmt: skip


def long_report(*, is_sustained: bool) -> BenchReport:
    """Return a report of many points whose directory, drive and processor have long names."""
    directory = "/" + "/".join(["a_folder_with_a_long_name_and_no_blank"] * 8)
    mount = Mount(directory, "/", "ext4-or-something-longer", "/dev/x", "rw", (8, 1))
    device = BlockDevice("nvme0n1", LONG_NAME, *[None] * 11, ())
    described = DirectoryDescription(directory, mount, "local", device, None, None, 4096, None)
    machine = replace(
        machine_description(), cpu_model=LONG_NAME, kernel="6.18.0-" + "custom" * 20, directories=(described,)
    )
    rows = [
        row(op, 128 * KiB << shift, depth)
        for op in ("read", "write", "mixed") for shift in range(8) for depth in (1, 2, 8, 16, 32, 128)
    ]  # fmt: skip
    rows += [row(op, 16 * MiB, 128, is_busy=True) for op in ("read", "write", "mixed")]
    tensors = [
        TensorRow(op, 64 * MiB, 16, directory, 3, 1234.5, 1000.0, 2000.0, (1.0,), 0.9)
        for op in ("put", "get", "lease")
    ]  # fmt: skip
    first = DirectoryReport(directory, engine="uring", rows=rows, tensors=tensors)
    first.best = Best(16 * MiB, 128, 128, 2345.6, 2345.6, 0.1, 0.5, 0.5)
    if is_sustained:
        first.sustained = [SustainedRate(op, at_s, 1234.5, 71.0) for op in ("read", "write") for at_s in (1.0, 6000.0)]
    verdict = "read 2345.6 GB/s, write 2345.6 GB/s with 16 MiB x 128: " * 9
    return BenchReport(machine, QUICK, [first, DirectoryReport("/b")], verdict=verdict)


@pytest.mark.parametrize("is_sustained", [False, True], ids=["summary", "sustained"])
def test_labels_of_tiered_bench_lie_on_the_page_and_apart(is_sustained: bool) -> None:
    def check() -> None:
        from tiered.measure.plot import figure_of

        figure = figure_of(long_report(is_sustained=is_sustained))
        assert off_the_page(figure) == []
        assert overlapping(figure) == []

    assert exit_code_of_child(check) == 0


def test_a_report_with_few_points_is_drawn() -> None:
    def check() -> None:
        from tiered.measure.plot import figure_of

        report = long_report(is_sustained=False)
        report.verdict = "stopped"
        report.directories[0].rows = [row("read", MiB, 8), row("write", MiB, 8)]
        report.directories[0].tensors = []
        assert off_the_page(figure_of(report)) == []

    assert exit_code_of_child(check) == 0


def test_labels_of_the_quality_bench_lie_on_the_page_and_apart(tmp_path: Path) -> None:
    def check() -> None:
        quality = bench_module("quality")
        curves = {state: [[1234.5, 0.01] * 3000] for state in ("exact", "compact", "a_format_with_a_long_name")}
        figure = quality.figure_of(curves)
        assert off_the_page(figure) == []
        assert overlapping(figure) == []

    assert exit_code_of_child(check) == 0


def bench_module(name: str) -> Any:
    """Return the module of ``bench/<name>.py``, which is in no package."""
    specification = importlib.util.spec_from_file_location(name, ROOT / f"bench/{name}.py")
    assert specification and specification.loader
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_labels_off_the_page_or_on_each_other_are_seen() -> None:
    def check() -> None:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(4, 3))
        figure.text(0.9, 0.5, "runs off at the right")
        figure.text(0.1, 0.5, "one")
        figure.text(0.1, 0.5, "other")
        assert off_the_page(figure) == ["runs off at the right"]
        assert overlapping(figure) == [("one", "other")]

    assert exit_code_of_child(check) == 0

"""Every label of the pictures that benches draw lies on the page, however long names and figures are.

Pictures are drawn in children: matplotlib keeps the files of its fonts open for as long as a process lives.
"""

from __future__ import annotations

import importlib.util
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.bytes.moving import exit_code_of_child

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.text import Text

ROOT = Path(__file__).parents[1]


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

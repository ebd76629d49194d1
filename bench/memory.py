#!/usr/bin/env python3
"""Draws the memory of runs beside what training in memory needs, by size.

Usage: tiered train --params 7B --state compact --no-durable --dram 4GiB --json 7B.json    (and so on for other sizes)
       python bench/memory.py 0.4B.json 1.2B.json 3B.json 7B.json --plot memory.png

In memory a parameter takes 16 bytes before activations: in bf16 itself, its gradient, an fp32 master and two moments.
One JSON line comes last.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from tiered.units import format_count

IN_MEMORY_BYTES_PER_PARAM = 16


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("reports", nargs="+", type=Path, help="what `tiered train --json` wrote")
    parser.add_argument("--plot", type=Path, required=True, help="the file to draw to")
    parser.add_argument("--title", default="", help="what ran, and on what")
    return parser.parse_args()


def row_of(report: Path) -> dict[str, Any]:
    """Return a run's parameters, and the peak of its process's memory beside what training in memory needs."""
    found = json.loads(report.read_text())
    needed = IN_MEMORY_BYTES_PER_PARAM * found["params"]
    return {"params": found["params"], "peak_rss_bytes": found["peak_rss_bytes"], "in_memory_bytes": needed}


def draw(rows: Sequence[dict[str, Any]], title: str) -> Figure:
    """Return two bars for each row: what memory would need, and the run's peak."""
    figure = Figure(figsize=(8, 3.6), dpi=130, layout="constrained")
    axes = figure.subplots()
    top = max(row["in_memory_bytes"] for row in rows) / 1e9
    looks = (("in_memory_bytes", "in memory, before activations", "#9aa5b1"), ("peak_rss_bytes", "tiered", "#1b6ca8"))
    for shift, (name, label, color) in zip((-0.2, 0.2), looks, strict=True):
        heights = [row[name] / 1e9 for row in rows]
        axes.bar([place + shift for place in range(len(rows))], heights, width=0.38, color=color, label=label)
        for place, height in enumerate(heights):
            axes.text(place + shift, height + top / 80, f"{height:.3g}", ha="center", fontsize=9)
    axes.set_xticks(range(len(rows)), [f"{format_count(row['params'])} parameters" for row in rows])
    axes.set_ylabel("memory, GB")
    axes.set_ylim(0, 1.1 * top)
    axes.set_title(title, loc="left", fontsize=9)
    axes.legend(frameon=False, loc="upper left")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def main() -> None:
    args = arguments()
    rows = sorted(map(row_of, args.reports), key=lambda row: row["params"])
    draw(rows, args.title).savefig(args.plot)
    print(json.dumps({"bench": "memory", "rows": rows}))


if __name__ == "__main__":
    main()

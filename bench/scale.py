#!/usr/bin/env python3
"""Models of growing depth at one width: seconds per parameter and step, bytes, memory.

Usage: python bench/scale.py [--sizes 0.1B,0.4B,1.2B,3B --memory-limit 6GiB --no-durable --rounds 1 --store DIR]
       python bench/scale.py --sizes 0.4B,1.2B,3B,7B --beside-memory --plot memory.png

--memory-limit runs each model inside a memory cgroup (v1) of that size, page cache included; only root can make one.
--beside-memory also trains each model in memory, if this machine has as much, and --plot draws the memory of both.
The ceiling is the seconds per parameter of the second size (the first is mostly embedding and head), to which the
others are compared. One JSON line comes last.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from training import Settings, add_arguments, check, describe, environment, measure, median_s, settings_of

from tiered.bytes.free_memory import free_memory
from tiered.units import format_bytes, format_count, parse_bytes, parse_count


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--sizes", default="0.1B,0.4B,1.2B,3B", help="parameters; layers follow from the width")
    parser.add_argument("--memory-limit", type=parse_bytes, default=0, help="such as 6GiB; default: none")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--beside-memory", action="store_true", help="also in memory, where there is enough")
    parser.add_argument("--plot", type=Path, help="draw the memory of both to this file; needs the extra `plot`")
    return parser.parse_args()


def of_size(settings: Settings, num_params: int) -> Settings:
    """Return the settings with the number of layers that comes nearest to ``num_params``."""
    one, two = (dataclasses.replace(settings, layers=layers).shape.num_params for layers in (1, 2))
    return dataclasses.replace(settings, layers=max(1, 1 + round((num_params - one) / (two - one))))


@contextlib.contextmanager
def memory_group(limit: int) -> Iterator[Path | None]:
    """Make a memory cgroup (v1) of ``limit`` bytes below this process's own, and remove it; None for no limit."""
    if not limit:
        yield None
        return
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    own = next((line.split(":", 2)[2] for line in lines if "memory" in line.split(":", 2)[1].split(",")), None)
    if own is None:
        raise SystemExit("--memory-limit: no cgroup v1 memory controller here; leave it out")
    group = Path(f"/sys/fs/cgroup/memory{own}") / f"tiered-bench-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        raise SystemExit(
            f"--memory-limit: cannot make {group}: {error.strerror}; run as root, or leave it out"
        ) from None
    try:
        (group / "memory.limit_in_bytes").write_text(str(limit))
        yield group
    finally:
        group.rmdir()


def run(settings: Settings, folder: Path, limit: int) -> dict[str, Any]:
    """Train once, inside the limit if there is one; return what came of it."""
    with memory_group(limit) as group:
        prefix = f"echo $$ > {group}/cgroup.procs" if group else ""
        result = measure(settings, folder, prefix=prefix)
        if group:
            result["group_peak_bytes"] = int((group / "memory.max_usage_in_bytes").read_text())
    check(result)
    return result


def in_memory_nbytes(settings: Settings) -> int:
    """Return the bytes that the model takes in memory: parameters, gradients, masters of bf16, and two moments.

    16 a parameter: 2 + 2 + 4 + 8 in bf16, 4 + 4 + 8 in fp32.
    """
    return 16 * settings.shape.num_params


def run_in_memory(settings: Settings, folder: Path) -> int:
    """Train two steps in memory; return the peak RSS in bytes, 0 where the machine has too little."""
    if in_memory_nbytes(settings) > 0.8 * free_memory():
        return 0
    changes = {"kind": "memory", "steps": 2, "hold": "auto", "update": "step", "state": "exact"}
    return int(measure(dataclasses.replace(settings, **changes), folder)["peak_rss_bytes"])


def draw(rows: Sequence[dict[str, Any]], title: str, file: Path) -> None:
    """Draw the memory of both ways by size. What was not measured, as it does not fit, is hatched."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(9, 4.2), dpi=130, layout="constrained")
    axes = figure.subplots()
    largest = max(row["in_memory_bytes"] for row in rows) / 1e9
    for place, row in enumerate(rows):
        measured = row["in_memory_peak_rss_bytes"]
        for shift, nbytes, look in (
            (-0.2, measured or row["in_memory_bytes"], {"color": "#9aa5b1", "hatch": None if measured else "//"}),
            (0.2, row["peak_rss_bytes"], {"color": "#1b6ca8"}),
        ):
            axes.bar(place + shift, nbytes / 1e9, width=0.38, edgecolor="white", **look)
            axes.text(place + shift, nbytes / 1e9 + largest / 80, f"{nbytes / 1e9:.3g}", ha="center", fontsize=9)
    axes.set_xticks(
        range(len(rows)), [f"{format_count(row['num_params'])}\n{row['seconds']:.3g} s/step" for row in rows]
    )
    axes.set_ylabel("memory of the process, GB")
    axes.set_title(title, loc="left", fontsize=9.5)
    axes.legend(handles=[
        Patch(color="#9aa5b1", label="in memory"),
        Patch(facecolor="#9aa5b1", edgecolor="white", hatch="//", label="in memory, before activations: does not fit"),
        Patch(color="#1b6ca8", label="tiered"),
    ], frameon=False, loc="upper left")  # fmt: skip
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file)


def main() -> None:
    args = arguments()
    base = settings_of(args)
    sweep = [of_size(base, parse_count(size)) for size in args.sizes.split(",")]
    print(environment(base))
    limit = f", inside a memory limit of {format_bytes(args.memory_limit)}" if args.memory_limit else ""
    print(f"{base.words()}{limit}; ceiling: the same seconds per parameter at every size")
    args.store.mkdir(parents=True, exist_ok=True)
    results: dict[Settings, list[dict[str, Any]]] = {settings: [] for settings in sweep}
    with tempfile.TemporaryDirectory(dir=args.store, prefix="bench-") as folder:
        for _ in range(args.rounds):
            for settings in sweep:
                results[settings].append(run(settings, Path(folder) / "store", args.memory_limit))
                name = format_count(settings.shape.num_params)
                print(f"{name:>9s}, {settings.layers} layers: {describe(results[settings][-1])}", flush=True)
        peaks = {settings: run_in_memory(settings, Path(folder) / "store") for settings in sweep if args.beside_memory}
    rows = []
    for settings, found in results.items():
        last, seconds = found[-1], statistics.median(map(median_s, found))
        rows.append(
            {
                "num_params": last["num_params"],
                "layers": settings.layers,
                "seconds": seconds,
                "ns_per_param": 1e9 * seconds / last["num_params"],
                **{name: max(one[name] for one in found) for name in ("peak_rss_bytes", "peak_dram_bytes")},
                **{name: last[name] for name in ("read_bytes_per_param", "write_bytes_per_param", "stall", "verdict")},
                "group_peak_bytes": max(one.get("group_peak_bytes", 0) for one in found),
                "in_memory_bytes": in_memory_nbytes(settings),
                "in_memory_peak_rss_bytes": peaks.get(settings, 0),
            }
        )
    reference = rows[min(1, len(rows) - 1)]["ns_per_param"]
    for row in rows:
        row["fraction"] = reference / row["ns_per_param"]
        print(
            f"{format_count(row['num_params']):>9s} {row['seconds']:8.3f} s/step {row['ns_per_param']:7.2f} ns/param "
            f"({row['fraction']:.3f} of the ceiling), peak RSS {format_bytes(row['peak_rss_bytes'])}"
        )
    if args.plot:
        draw(rows, f"{base.words()}; {os.cpu_count()} cores, torch {torch.__version__}", args.plot)
    print(json.dumps({"bench": "scale", "memory_limit": args.memory_limit, "durable": base.durable, "rows": rows}))


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Models of growing depth at one width: seconds per parameter and step, bytes, memory.

Usage: python bench/scale.py [--sizes 0.1B,0.4B,1.2B,3B --memory-limit 6GiB --no-durable --rounds 1 --store DIR]

--memory-limit runs each model inside a memory cgroup (v1) of that size, page cache included; only root can make one.
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from training import Settings, add_arguments, check, describe, environment, measure, median_s, settings_of

from tiered.units import format_bytes, format_count, parse_bytes, parse_count


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--sizes", default="0.1B,0.4B,1.2B,3B", help="parameters; layers follow from the width")
    parser.add_argument("--memory-limit", type=parse_bytes, default=0, help="such as 6GiB; default: none")
    parser.add_argument("--rounds", type=int, default=1)
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
            }
        )
    reference = rows[min(1, len(rows) - 1)]["ns_per_param"]
    for row in rows:
        row["fraction"] = reference / row["ns_per_param"]
        print(
            f"{format_count(row['num_params']):>9s} {row['seconds']:8.3f} s/step {row['ns_per_param']:7.2f} ns/param "
            f"({row['fraction']:.3f} of the ceiling), peak RSS {format_bytes(row['peak_rss_bytes'])}"
        )
    print(json.dumps({"bench": "scale", "memory_limit": args.memory_limit, "durable": base.durable, "rows": rows}))


if __name__ == "__main__":
    main()

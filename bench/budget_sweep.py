#!/usr/bin/env python3
"""The DRAM budget swept from small to all: the bytes that a step reads and writes, beside their formula.

Usage: python bench/budget_sweep.py [--budgets smallest,640MiB,1GiB,2GiB,4GiB,8GiB --rounds 1 --no-durable --store DIR]

With p bytes of parameters and o of state per parameter, c_p and c_o of them held: read 2(p - c_p) + (o - c_o); written
p + o with a commit each step, (p - c_p) + (o - c_o) without. Gradients that go through the drive are shown beside it.
At the two turn-arounds of a step (forward to backward, backward to the next forward) what is still in DRAM is not read
again: at most the budget that holds nothing for good. Exits with status 1 when a budget reads or writes more than the
formula and the tolerance, or less by more than that. One JSON line comes last.
"""

import argparse
import dataclasses
import itertools
import json
import re
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from training import Settings, add_arguments, check, environment, measure, median_s, settings_of

import tiered
from tiered.errors import CapacityError
from tiered.tools.train.task import GPT
from tiered.units import MiB, parse_bytes, round_up


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    parser.add_argument(
        "--budgets", default="smallest,640MiB,1GiB,2GiB,4GiB,8GiB", help="in rising order; smallest: that works"
    )
    parser.add_argument("--tolerance", type=float, default=0.03, help="of the formula; default: 0.03")
    parser.add_argument("--rounds", type=int, default=1, help="over all budgets, for medians of the time")
    return parser.parse_args()


def smallest_budget(settings: Settings) -> str:
    """Return the smallest budget that the model can be sharded with, in whole MiB; its values are never touched."""
    nbytes = 8 * MiB
    with tiered.Store(engine="memory", dram=nbytes, durable=False) as store:
        with torch.device("meta"):
            model = GPT(settings.shape)
        try:
            tiered.shard(model.to_empty(device="cpu"), store, param_dtype=settings.param_dtype, hold=0)
        except CapacityError as error:
            found = re.search(r"smallest working budget is (\d+) bytes", str(error))
            assert found is not None, f"the refusal names no budget: {error}"
            nbytes = int(found[1])
    return f"{round_up(nbytes, MiB) // MiB}MiB"


def row_of(settings: Settings, results: list[dict[str, Any]], tolerance: float) -> dict[str, Any]:
    """Return one budget's line of the table."""
    last = results[-1]
    (p, held_p), (o, held_o) = (last["persistent_bytes_per_param"][name] for name in ("parameters", "state"))
    read = 2 * (p - held_p) + (o - held_o)
    written = p + o if settings.durable else (p - held_p) + (o - held_o)
    moved = last["moved_bytes_per_param"]
    found = [sum(moved.get(name, (0, 0))[side] for name in ("parameters", "optimizer state")) for side in (0, 1)]
    free = max(0.0, parse_bytes(settings.dram) / last["num_params"] - held_p - held_o)
    row = {
        "dram": settings.dram,
        "held": held_p + held_o,
        "read": found[0],
        "read_formula": read,
        "written": found[1],
        "written_formula": written,
        "gradients": moved.get("gradients", (0, 0)),
        "all_read": last["read_bytes_per_param"],
        "all_written": last["write_bytes_per_param"],
        "turn_around": min(read, 2 * free),
        "seconds": statistics.median(map(median_s, results)),
    }
    row["follows"] = all(
        formula * (1 - tolerance) - row["turn_around"] <= bytes_moved <= formula * (1 + tolerance) + 1e-3
        for bytes_moved, formula in ((row["read"], read), (row["written"], written))
    )
    return row


def main() -> None:
    args = arguments()
    base = settings_of(args)
    budgets = [smallest_budget(base) if dram == "smallest" else dram for dram in args.budgets.split(",")]
    sweep = [dataclasses.replace(base, dram=dram) for dram in budgets]
    print(environment(base))
    print(f"{base.words()}; budgets {', '.join(budgets)}\nceiling: the formula's bytes, none slower than a smaller one")
    args.store.mkdir(parents=True, exist_ok=True)
    results: dict[Settings, list[dict[str, Any]]] = {settings: [] for settings in sweep}
    with tempfile.TemporaryDirectory(dir=args.store, prefix="bench-") as folder:
        for _ in range(args.rounds):
            for settings in sweep:
                results[settings].append(measure(settings, Path(folder) / "store"))
                check(results[settings][-1])
    rows = [row_of(settings, found, args.tolerance) for settings, found in results.items()]
    print(
        f"{'budget':>8s} {'held':>6s} {'read':>6s} {'(formula)':>9s} {'written':>8s} {'(formula)':>9s} {'s/step':>8s}"
    )
    for row in rows:
        note = "" if row["follows"] else "  does not follow"
        print(
            f"{row['dram']:>8s} {row['held']:6.2f} {row['read']:6.2f} {row['read_formula']:9.2f} "
            f"{row['written']:8.2f} {row['written_formula']:9.2f}  "
            f"{row['gradients'][0]:4.2f} {row['gradients'][1]:4.2f} {row['seconds']:8.3f}{note}"
        )
    rising = max((b["seconds"] / a["seconds"] for a, b in itertools.pairwise(rows)), default=1.0)
    print(f"all bytes per parameter and step; the largest rise in time from one budget to the next: {rising:.3f}")
    follows = all(row["follows"] for row in rows)
    result = {
        "bench": "budget_sweep", "num_params": base.shape.num_params, "durable": base.durable, "rows": rows,
        "follows": follows, "largest_rise": rising,
    }  # fmt: skip
    print(json.dumps(result))
    sys.exit(0 if follows else 1)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""A training step through the tiers against the same step in memory, or otherwise set, in alternating pairs.

Usage: python bench/train_step.py [--layers 8 --batch 4 --dram 1GiB --pairs 5 --steps 4 --store DIR]
       python bench/train_step.py --against durable=no      (or digests=no, state=compact, hold=0, ...)
       python bench/train_step.py --against tree=CHECKOUT   (the same in another checkout of this repository)
       python bench/train_step.py --update step --micro-steps 4 --against micro-steps=1,batch=16

Each turn trains the same GPT from the same seed in a process of its own; the first step of a turn warms up, and a
turn's figure is the median of the others. Of the same batches, with exact state, the losses of both must be the same
bits. The device's counters must agree with /proc/self/io within 2 %. One JSON line comes last.
"""

import argparse
import dataclasses
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from training import (
    Settings,
    add_arguments,
    check,
    describe,
    environment,
    measure,
    median_s,
    settings_of,
)
from trees import checkout

BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False, "": False}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--against", default="memory", help="memory, or what is different: NAME=VALUE[,NAME=VALUE...]")
    return parser.parse_args()


def changed(settings: Settings, against: str) -> Settings:
    """Return ``settings`` as ``against`` says."""
    if against == "memory":
        return dataclasses.replace(settings, kind="memory")
    changes: dict[str, Any] = {}
    for part in against.split(","):
        name, _, value = part.partition("=")
        name = name.strip().replace("-", "_")
        if name not in {field.name for field in dataclasses.fields(Settings)}:
            raise SystemExit(f"--against {against}: there is no setting {name!r}")
        kind = type(getattr(settings, name))
        if kind is bool and value.lower() not in BOOLEANS:
            raise SystemExit(f"--against {against}: expected {name}=true or {name}=false, got {value!r}")
        changes[name] = BOOLEANS[value.lower()] if kind is bool else kind(value)
        if name == "tree":
            changes[name] = str(checkout(part))
    return dataclasses.replace(settings, **changes)


def run_pairs(args: argparse.Namespace, ours: Settings, other: Settings) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Run the pairs, the other first in every second one, and return what both gave."""
    pairs = []
    args.store.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.store, prefix="bench-") as folder:
        for number in range(args.pairs):
            order = (ours, other) if number % 2 else (other, ours)
            found = {settings: measure(settings, Path(folder) / "store") for settings in order}
            pairs.append((found[ours], found[other]))
            a, b = median_s(found[ours]), median_s(found[other])
            cpu = (
                f"CPU time {median_s(found[ours], 'cpu_seconds'):.2f} and {median_s(found[other], 'cpu_seconds'):.2f} s"
            )
            print(
                f"pair {number}: {a:.3f} s against {b:.3f} s, ratio {a / b:.3f}; {cpu}; {describe(found[ours])}",
                flush=True,
            )
            for result in pairs[-1]:
                check(result)
            same = {(each.dtype, each.state, each.batch, each.micro_steps) for each in (ours, other)}
            is_same = len(same) == 1 and ours.state == "exact"
            if is_same and found[ours]["losses"] != found[other]["losses"]:
                raise SystemExit("the losses differ: no figure is worth anything")
    return pairs


def main() -> None:
    args = arguments()
    ours = settings_of(args)
    other = changed(ours, args.against)
    if other == ours:
        raise SystemExit(f"--against {args.against} changes nothing")
    read, written = ours.formula
    print(environment(ours))
    print(f"ours:    {ours.words()}\nagainst: {other.words()}")
    print(
        f"ceiling: step/bound 1; with nothing held {read:g} bytes read and {written:g} written per parameter and step"
    )
    pairs = run_pairs(args, ours, other)
    last = pairs[-1][0]
    seconds, others = ([median_s(pair[side]) for pair in pairs] for side in (0, 1))
    ratios = [a / b for a, b in zip(seconds, others, strict=True)]
    cpu, cpu_others = ([median_s(pair[side], "cpu_seconds") for pair in pairs] for side in (0, 1))
    cpu_ratios = [a / b for a, b in zip(cpu, cpu_others, strict=True)]
    over_bound = statistics.median(pair[0]["step_over_bound"] for pair in pairs)
    print(
        f"median of {len(pairs)}: {statistics.median(seconds):.3f} s against {statistics.median(others):.3f} s, ratio "
        f"{statistics.median(ratios):.3f}, of CPU time {statistics.median(cpu_ratios):.3f}; "
        f"fraction of the ceiling {1 / over_bound:.3f}"
    )
    names = (
        "read_bytes_per_param", "write_bytes_per_param", "io_read_bytes_per_param", "io_write_bytes_per_param",
        "moved_bytes_per_param", "wait_seconds", "stall", "bound_s", "verdict", "peak_dram_bytes", "peak_rss_bytes",
        "resident_bytes",
    )  # fmt: skip
    result = {
        "bench": "train_step",
        "num_params": last["num_params"],
        "settings": dataclasses.asdict(ours),
        "against": args.against,
        "seconds": statistics.median(seconds),
        "against_seconds": statistics.median(others),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "cpu_seconds": statistics.median(cpu),
        "against_cpu_seconds": statistics.median(cpu_others),
        "cpu_ratio": statistics.median(cpu_ratios),
        "cpu_ratios": cpu_ratios,
        "step_over_bound": over_bound,
        **{name: last[name] for name in names},
        **{f"against_{name}": pairs[-1][1][name] for name in names if name in pairs[-1][1]},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()

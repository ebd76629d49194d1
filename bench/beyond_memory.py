#!/usr/bin/env python3
"""A model whose state exceeds GPU and CPU memory together, through three tiers, with the losses of training in memory.

Usage: python bench/beyond_memory.py [--memory-limit 6GiB --card 2GiB --layers 15 --dram 2GiB --device-memory 1GiB]

It runs on the simulated device of the tests, whose memory is limited to --card, inside a memory cgroup (v1, root) of
--memory-limit: of the real memory that both tiers, the page cache and Python have. The same model is then trained
on the same device without any limit. The ceilings: the group's limit, the card, the two budgets. One JSON line comes
last.
"""

import argparse
import dataclasses
import json
import tempfile
from pathlib import Path

from scale import run
from training import add_arguments, environment, measure, settings_of

from tiered.units import format_bytes, format_count, parse_bytes

STATE = 12  # bytes per parameter that last


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(
        parser, layers=15, batch=1, context=64, steps=3, dram="2GiB", device="sim", device_memory="1GiB", card="2GiB",
        hold="0", activations="recompute",
    )  # fmt: skip
    parser.add_argument("--memory-limit", type=parse_bytes, default=0, help="such as 6GiB; default: none")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    settings = settings_of(args)
    num_params = settings.shape.num_params
    print(environment(settings))
    print(
        f"{settings.words()}; a state of {format_bytes(STATE * num_params)} for {format_count(num_params)} parameters, "
        f"a card of {settings.card} and {format_bytes(args.memory_limit)} of memory for all"
    )
    args.store.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.store, prefix="bench-") as folder:
        ours = run(settings, Path(folder) / "store", args.memory_limit)
        memory = measure(dataclasses.replace(settings, kind="memory", card=""), Path(folder) / "none")
    device = ours["device"]
    result = {
        "bench": "beyond_memory",
        "num_params": num_params,
        "state_bytes": STATE * num_params,
        "settings": dataclasses.asdict(settings),
        "same_losses": ours["losses"] == memory["losses"],
        "within": device["peak_bytes"] <= parse_bytes(settings.device_memory)
        and device["allocator_peak_bytes"] <= parse_bytes(settings.card)
        and ours["peak_dram_bytes"] <= parse_bytes(settings.dram)
        and ours.get("group_peak_bytes", 0) <= (args.memory_limit or 1 << 62),
        "group_peak_bytes": ours.get("group_peak_bytes", 0),
        "memory_limit": args.memory_limit,
        "memory_peak_rss_bytes": memory["peak_rss_bytes"],
        **{name: ours[name] for name in ("losses", "seconds", "peak_rss_bytes", "peak_dram_bytes", "device")},
    }
    peaks = {
        "tiered's on the device": device["peak_bytes"],
        "the allocator's, activations included": device["allocator_peak_bytes"],
        "in DRAM": ours["peak_dram_bytes"],
        "the group's": result["group_peak_bytes"],
        "the process's in memory": memory["peak_rss_bytes"],
    }
    print(
        f"losses {'are those' if result['same_losses'] else 'are NOT those'} of training in memory; peaks: "
        f"{', '.join(f'{name} {format_bytes(nbytes)}' for name, nbytes in peaks.items())}"
    )
    print(json.dumps(result))


if __name__ == "__main__":
    main()

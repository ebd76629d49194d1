#!/usr/bin/env python3
"""Two directories, throttled alike: what a store over both gives of their sum.

Usage: python bench/two_directories.py [--limit 450MB --nbytes 512MiB --rounds 5 --dram 256MiB --store DIR]

Both directories lie in one folder; each device is slowed down to the limit, so that what the drive itself gives does
not count as long as it is faster than both together. The ceiling is twice the limit. Streams are puts and gets
of one tensor of --nbytes, swaps are of as many tensors of a thirty-second of that, half the budget read ahead. Two
rounds before the measured ones warm up. One JSON line comes last.
"""

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tests/devices

import torch

from tests.devices.throttled import ThrottledDevice
from tiered.bytes.arena import Arena
from tiered.bytes.device.engines import open_device
from tiered.store.catalog.sqlite_catalog import SqliteCatalog
from tiered.store.lifetime.opening import Parts, empty_root
from tiered.store.store import Store
from tiered.units import format_bytes, parse_bytes

NUM_PARTS = 32


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", type=parse_bytes, default="450MB", help="of each one, per second")
    parser.add_argument("--nbytes", type=parse_bytes, default="512MiB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dram", type=parse_bytes, default="256MiB")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--store", type=Path, default=None, help="where the directories are made (default: runs/)")
    return parser.parse_args()


def open_store(folder: Path, args: argparse.Namespace, stack: ExitStack) -> Store:
    """Return a store over two throttled devices, its catalog in memory."""
    devices: list[ThrottledDevice] = []
    for name in ("left", "right"):
        (folder / name).mkdir(mode=0o700)
        device = open_device(folder / name, args.engine)
        devices.append(ThrottledDevice(device, read_bytes_per_s=args.limit, write_bytes_per_s=args.limit))
    catalog = SqliteCatalog.create(None, empty_root(uuid.uuid4().bytes, 2))
    store = Store._from_parts(Parts(Arena(args.dram), devices, catalog), deadline_s=60.0)
    stack.callback(store.close)
    return store


def measure(store: Store, args: argparse.Namespace) -> dict[str, list[float]]:
    """Return the bytes per second of each round of each kind."""
    part_nbytes = args.nbytes // NUM_PARTS
    large = torch.randint(0, 256, (args.nbytes,), dtype=torch.uint8)
    part = large[:part_nbytes].clone()
    num_ahead = max(2, args.dram // 2 // part_nbytes)
    names = [[f"{side}/{i}" for i in range(NUM_PARTS)] for side in ("left", "right")]

    def swap_out(side: int) -> None:
        for name in names[side]:
            store[name] = part
        store.working_set.swap_out(names[side])

    def swap_in(side: int) -> None:
        for number, name in enumerate(names[side]):
            store.prefetch(names[side][number : number + num_ahead])
            store[name]

    kinds: dict[str, Callable[[int], object]] = {
        "stream_put": lambda side: store.__setitem__(str(side), large),
        "stream_get": lambda side: store[str(side)],
        "swap_out": swap_out,
        "swap_in": swap_in,  # of the side that was not used last: nothing of it is resident
    }
    found: dict[str, list[float]] = {}
    for kind, move in kinds.items():
        for turn in range(args.rounds + 2):
            start = time.perf_counter()
            move(turn % 2)
            found.setdefault(kind, []).append(part_nbytes * NUM_PARTS / (time.perf_counter() - start))
    return {kind: rates[2:] for kind, rates in found.items()}


def main() -> None:
    args = arguments()
    ceiling = args.limit * 2
    runs = args.store or Path(__file__).parents[1] / "runs"
    runs.mkdir(exist_ok=True)
    print(f"{platform.machine()}, Linux {platform.release()}; ceiling {format_bytes(int(ceiling))}/s: the sum of both")
    with tempfile.TemporaryDirectory(dir=runs) as folder, ExitStack() as stack:
        store = open_store(Path(folder), args, stack)
        rates = measure(store, args)
        store.commit()
    ratios = {kind: statistics.median(values) / ceiling for kind, values in rates.items()}
    for kind, values in rates.items():
        low, high = min(values) / ceiling, max(values) / ceiling
        print(f"{kind:11s} {ratios[kind]:.3f} of the sum (median of {len(values)}; {low:.3f} to {high:.3f})")
    result = {"bench": "two_directories", "limit": args.limit, "nbytes": args.nbytes, **ratios}
    print(json.dumps(result))


if __name__ == "__main__":
    main()

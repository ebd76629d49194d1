#!/usr/bin/env python3
"""Small tensors: put_many with its commit, opening, and get_many of all keys from a store opened anew.

Usage: python bench/small_tensors.py [--keys 1048576 --nbytes 4096 --dram 256MiB --turns 3 --slice 65536 --store DIR]
       python bench/small_tensors.py --against tree=CHECKOUT     (each turn here and in another checkout)

Each turn makes a store of its own and has three processes: one puts all keys in one call and commits (both inside the
timing), one only opens the store (seconds, and the growth of its resident memory), one opens it and gets every key in a
random order, a slice at a time; each value is compared. The ceiling is what the drive takes for the bytes alone,
written and read by dd with direct I/O in blocks of 1 MiB. One JSON line comes last.
"""

import argparse
import functools
import gc
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import trees

import tiered


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keys", type=int, default=1 << 20)
    parser.add_argument("--nbytes", type=int, default=4096)
    parser.add_argument("--dram", default="256MiB")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--slice", type=int, default=1 << 16, help="keys of one get_many")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--store", type=Path, default=None, help="where stores are made (default: a folder in runs/)")
    parser.add_argument("--against", default="", help="tree=CHECKOUT")
    parser.add_argument("--part", choices=("put", "open", "get"), help=argparse.SUPPRESS)
    return parser.parse_args()


def name_of(index: int) -> str:
    return f"embedding/{index:09d}"


def values(args: argparse.Namespace) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every key with a value of its own: random bytes, with the number of the key in front."""
    value = torch.randint(0, 256, (args.nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    head = value[:8].view(torch.int64)
    for index in range(args.keys):
        head.fill_(index)
        yield name_of(index), value


def memory_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} in /proc/self/status")


def put(args: argparse.Namespace) -> dict[str, float]:
    with tiered.Store(args.store, dram=args.dram, engine=args.engine) as store:
        start, cpu = time.perf_counter(), time.process_time()
        store.put_many(values(args))
        landed = time.perf_counter()
        store.commit()
        end, cpu_end = time.perf_counter(), time.process_time()
    return {
        "put_per_s": args.keys / (end - start),
        "put_cpu_s": cpu_end - cpu,
        "commit_s": end - landed,
        "put_peak_bytes": memory_bytes("VmHWM"),
    }


def open_only(args: argparse.Namespace) -> dict[str, float]:
    gc.collect()
    before = memory_bytes("VmRSS")
    start = time.perf_counter()
    with tiered.Store(args.store, dram=args.dram, engine=args.engine) as store:
        seconds = time.perf_counter() - start
        after, peak = memory_bytes("VmRSS"), memory_bytes("VmHWM")
        assert len(store) == args.keys
    return {
        "open_s": seconds,
        "dram_bytes_per_key": (after - before) / args.keys,
        "peak_bytes_per_key": (peak - before) / args.keys,
    }


def get(args: argparse.Namespace) -> dict[str, float]:
    order = list(range(args.keys))
    random.Random(0).shuffle(order)
    seconds = cpu = 0.0
    with tiered.Store(args.store, dram=args.dram, engine=args.engine) as store:
        for i in range(0, args.keys, args.slice):
            part = order[i : i + args.slice]
            names = [name_of(index) for index in part]
            start, cpu_start = time.perf_counter(), time.process_time()
            found = store.get_many(names)
            seconds, cpu = seconds + time.perf_counter() - start, cpu + time.process_time() - cpu_start
            heads = torch.stack([value[:8].view(torch.int64) for value in found.values()]).flatten().tolist()
            if heads != part:
                raise SystemExit("a value is not what was put: no figure is worth anything")
    return {"get_per_s": args.keys / seconds, "get_cpu_s": cpu}


def ceiling(folder: Path, nbytes: int) -> tuple[float, float]:
    """Return the bytes per s that dd writes, durably, and reads with direct I/O."""
    file, count = folder / "dd", max(1, min(nbytes, 1 << 30) >> 20)
    common = ["bs=1M", f"count={count}", "status=none"]
    rates = []
    for command in (
        ["dd", "if=/dev/zero", f"of={file}", "oflag=direct", "conv=fdatasync", *common],
        ["dd", f"if={file}", "of=/dev/null", "iflag=direct", *common],
    ):
        start = time.perf_counter()
        subprocess.run(command, check=True, timeout=600)
        rates.append((count << 20) / (time.perf_counter() - start))
    file.unlink()
    return rates[0], rates[1]


def turn_of(args: argparse.Namespace, store: Path, tree: Path) -> dict[str, float]:
    """Run the three processes of a turn over the tiered of ``tree``, print what they say and return it."""
    now: dict[str, float] = {}
    for kind in ("put", "open", "get"):
        command = [__file__, "--part", kind, "--store", str(store)]
        for name in ("keys", "nbytes", "dram", "slice", "engine"):
            command += [f"--{name}", str(getattr(args, name))]
        now |= trees.run(tree, command)
    shutil.rmtree(store)
    print(
        f"{now['put_per_s']:,.0f} put/s (commit {now['commit_s']:.1f} s), open in {now['open_s']:.2f} s and "
        f"{now['dram_bytes_per_key']:.0f} bytes of DRAM per key, {now['get_per_s']:,.0f} get/s"
        + ("" if tree == trees.HERE else f" of {tree}"),
        flush=True,
    )
    return now


def main() -> None:
    args = arguments()
    if args.part:
        print(json.dumps({"put": put, "open": open_only, "get": get}[args.part](args)))
        return
    total = args.keys * args.nbytes
    print(f"{platform.platform()}, {os.cpu_count()} cores, torch {torch.__version__}")
    print(f"{args.keys} keys of {args.nbytes} bytes, {total / 1e9:.2f} GB, dram {args.dram}, engine {args.engine}")
    parent = args.store or Path("runs")
    parent.mkdir(parents=True, exist_ok=True)
    other = trees.checkout(args.against) if args.against else None
    with tempfile.TemporaryDirectory(dir=parent, prefix="bench-") as folder:
        write, read = ceiling(Path(folder), total)
        print(f"ceiling: {write / args.nbytes:,.0f} puts/s and {read / args.nbytes:,.0f} gets/s, by the bytes alone")
        turn = functools.partial(turn_of, args, Path(folder) / "store")
        pairs = trees.pairs(args.turns, other, turn) if other else []
        turns = [pair["ours"] for pair in pairs] or [turn(trees.HERE) for _ in range(args.turns)]
    medians = {name: statistics.median(turn[name] for turn in turns) for name in turns[0]}
    print(
        json.dumps(
            {
                "bench": "small_tensors",
                "keys": args.keys,
                "nbytes": args.nbytes,
                "dram": args.dram,
                **medians,
                "put_of_ceiling": medians["put_per_s"] * args.nbytes / write,
                "get_of_ceiling": medians["get_per_s"] * args.nbytes / read,
                "turns": turns,
                "against": trees.medians(pairs) if other else {},
            }
        )
    )


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Keys of very many blocks: how long they take to open, in how much memory, and what one changed block costs.

Usage: python bench/large_keys.py [--blocks 16777216 --block 4096 --keys 1048576 --store DIR]

A key of blocks x block bytes (64 GiB by default) is made without writing it: its row and pages by the catalog itself,
its data file as a hole of that length. Then, in a process each: the store is opened, and its time and the memory that
it takes beyond an empty store are told, per page of 1,024 blocks; one block is written by itself and committed, and the
bytes of that commit are counted. A second store of so many ``--keys`` small ones is opened likewise. Ceilings: 5 s,
1 KiB per page and key, 256 KiB for a commit of one block. One JSON line comes last.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import torch

import tiered
from tiered.store.catalog.sqlite_catalog import SqliteCatalog
from tiered.store.format.checksum import DIGEST_NBYTES, PAGE_BLOCKS
from tiered.store.format.row import Extent, Row
from tiered.units import GiB, KiB, MiB, format_bytes

ROOT = Path(__file__).resolve().parents[1]
NAME = "table"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=1 << 24)
    parser.add_argument("--block", type=int, default=4 * KiB)
    parser.add_argument("--keys", type=int, default=1 << 20)
    parser.add_argument("--store", type=Path, default=ROOT / "runs", help="where stores are made, default: runs/")
    parser.add_argument("--part", choices=("open", "write"), help=argparse.SUPPRESS)
    parser.add_argument("--at", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def resident_bytes() -> int:
    return psutil.Process().memory_info().rss


def make_large(folder: Path, args: argparse.Namespace) -> None:
    """Make a store of one key of so many blocks, all of them in one extent."""
    with tiered.Store(folder, dram=16 * MiB) as store:
        store["a"] = torch.zeros(5000)
        store.commit()
        first = max(extent.offset + extent.nbytes for record in store.records() for extent in record.extents)
    first = -(-first // MiB) * MiB
    nbytes = args.blocks * args.block
    os.truncate(folder / "data-000", first + nbytes)
    catalog = SqliteCatalog(folder / "catalog.db")
    root, _ = catalog.load()
    row = Row(
        root.next_key_id, NAME, "uint8", (nbytes,), nbytes, 1, (Extent(0, 0, first, nbytes),),
        os.urandom(DIGEST_NBYTES * args.blocks), None, args.block,
    )  # fmt: skip
    catalog.apply(replace(root, generation=root.generation + 1, next_key_id=root.next_key_id + 1), [row], [])
    catalog.close()


def make_many(folder: Path, args: argparse.Namespace) -> None:
    def values() -> Iterator[tuple[str, torch.Tensor]]:
        value = torch.zeros(300)
        return ((f"key/{number}", value) for number in range(args.keys))

    with tiered.Store(folder, dram=256 * MiB) as store:
        store.put_many(values())


def open_only(args: argparse.Namespace) -> dict[str, float]:
    """Open the store and tell time and memory beyond those of an empty one."""
    with tempfile.TemporaryDirectory(dir=args.at.parent) as empty:
        tiered.Store(Path(empty) / "run", dram=16 * MiB).close()
    before, begun_s = resident_bytes(), time.perf_counter()
    store = tiered.Store(args.at, dram=16 * MiB)
    found = {"open_s": time.perf_counter() - begun_s, "resident_bytes": resident_bytes() - before}
    store.close()
    return found


def write_one(args: argparse.Namespace) -> dict[str, float]:
    """Write one block in the middle, and count what the commit of it writes."""
    with tiered.Store(args.at, dram=16 * MiB) as store:
        before, begun_s = store.statistics(), time.perf_counter()
        place = args.blocks // 2 * args.block
        store.write_part(NAME, place, torch.ones(args.block, dtype=torch.uint8))
        store.commit()
        took_s, after = time.perf_counter() - begun_s, store.statistics()
        assert store.read_part(NAME, place, place + args.block).all()
    data, catalog = (getattr(after, n) - getattr(before, n) for n in ("write_bytes", "catalog_write_bytes"))
    return {"commit_s": took_s, "data_bytes": data, "commit_bytes": data + catalog}


def part(args: argparse.Namespace, kind: str, at: Path) -> dict[str, float]:
    words = ["--part", kind, "--at", str(at), "--blocks", str(args.blocks), "--block", str(args.block)]
    done = subprocess.run([sys.executable, __file__, *words], capture_output=True, text=True, check=True, cwd=ROOT)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    args = arguments()
    if args.part is not None:
        print(json.dumps(open_only(args) if args.part == "open" else write_one(args)))
        return
    args.store.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=args.store, prefix="large-keys-"))
    try:
        make_large(folder / "large", args)
        large, one = part(args, "open", folder / "large"), part(args, "write", folder / "large")
        make_many(folder / "many", args)
        many = part(args, "open", folder / "many")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    pages = -(-args.blocks // PAGE_BLOCKS)
    print(
        f"one key of {args.blocks * args.block / GiB:g} GiB in blocks of {format_bytes(args.block)}: opened in "
        f"{large['open_s']:.2f} s (wanted: <= 5), {large['resident_bytes'] / pages:,.0f} bytes per page (<= 1,024)"
    )
    print(
        f"one block of it changed: {format_bytes(int(one['commit_bytes']))} (<= 256 KiB), of these "
        f"{format_bytes(int(one['data_bytes']))} of data, in {one['commit_s'] * 1e3:.0f} ms"
    )
    print(
        f"{args.keys:,} keys: opened in {many['open_s']:.2f} s (<= 5), "
        f"{many['resident_bytes'] / args.keys:,.0f} bytes per key (<= 1,024)"
    )
    print(json.dumps({"bench": "large_keys", "large": large, "one_block": one, "many": many, "pages": pages}))


if __name__ == "__main__":
    main()

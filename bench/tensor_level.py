#!/usr/bin/env python3
"""Tensors of 64 MiB in and out of a store, digests and commit included, beside raw blocks and beside what those can be.

Usage: python bench/tensor_level.py DIR [--rounds 9 --tensor 64MiB --total 2GiB --dram 768MiB --block 1MiB --depth 8]
       python bench/tensor_level.py DIR --against tree=CHECKOUT [--rounds 7]   (wall and CPU seconds of both, in pairs)

A put copies the caller's bytes and digests them, a get digests and copies them, a lease digests. Where the drive is
about as fast as memory is to two cores, that alone makes raw blocks slower, whoever does it. So the ceiling of an op is
raw blocks while another process, with nothing to do with the I/O, copies and digests as many bytes as they move (its
pace is the rate of the round before). Raw, ceiling and store run in rotation, each op with its own; medians of the
rounds' ratios, and one JSON line at the end. Run nothing else meanwhile.

Beside another checkout each side of a pair is a process of its own, which times an op three times and gives medians.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

import torch
import trees
import xxhash

import tiered
from tiered.units import MiB, divide_up, parse_bytes

if TYPE_CHECKING:
    from tiered.tools.bench.rounds import ScratchFile

BLOCK_NBYTES = 4 * MiB  # that a store digests
CALLERS_NBYTES = 256 * MiB  # of a caller's tensors: more than a processor caches
NUM_AHEAD = 6  # tensors that are read ahead
WORK = {"put": "copy, digest", "get": "digest, copy", "lease": "digest"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", nargs="?", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tensor", type=parse_bytes, default=64 * MiB)
    parser.add_argument("--total", type=parse_bytes, default=2048 * MiB)
    parser.add_argument("--dram", type=parse_bytes, default=768 * MiB)
    parser.add_argument("--block", type=parse_bytes, default=MiB, help="of the raw rounds")
    parser.add_argument("--depth", type=int, default=8, help="of the raw rounds")
    parser.add_argument("--against", default="", help="tree=CHECKOUT: pairs beside another checkout, no raw blocks")
    parser.add_argument("--side", choices=WORK, help=argparse.SUPPRESS)
    parser.add_argument("--work", choices=WORK.values(), help="be the other process, paced by standard input")
    args = parser.parse_args()
    if args.work:
        return work(args)
    if args.directory is None:
        parser.error("DIR is missing")
    if args.side:
        print(json.dumps(side(args)))
        return 0
    print(f"Python {platform.python_version()}, torch {torch.__version__}, Linux {platform.release()}")
    found = [show(row) for row in (against(args) if args.against else measure(args))]
    print(json.dumps({"bench": "tensor_level", "rows": found}))
    return 0


def measure(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    from tiered.tools.bench.rounds import ScratchFile  # not for the other tree of a pair

    tensors = Tensors(args)
    folder = tempfile.mkdtemp(dir=args.directory, prefix=".tiered-bench-")
    try:
        with ScratchFile(
            args.directory,
            engine="auto",
            memory_nbytes=max(min(CALLERS_NBYTES, args.total), args.block * args.depth),
            file_nbytes=args.total,
            depth=args.depth,
        ) as scratch:
            scratch.write_file()
            for op in WORK:
                yield measure_op(args, tensors, op, folder, scratch)
    finally:
        shutil.rmtree(folder)


def against(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Run each op in pairs beside the other checkout."""
    tree = trees.checkout(args.against)
    sizes = [f"--{name}={getattr(args, name)}" for name in ("tensor", "total", "dram")]
    for op in WORK:
        command = [__file__, str(args.directory), "--side", op, *sizes]
        pairs = trees.pairs(args.rounds, tree, lambda side, command=command: trees.run(side, command))
        row: dict[str, object] = {"op": op, "tensor_bytes": args.tensor}
        for name, figure in trees.medians(pairs).items():
            row |= {name: figure["ours"], f"against_{name}": figure["against"], f"{name}_ratio": figure["ratio"]}
            row |= {f"{name}_ratio_range": (min(figure["ratios"]), max(figure["ratios"]))}
        yield row


def side(args: argparse.Namespace) -> dict[str, float]:
    """Time ``args.side`` three times with the tiered that is imported; return the medians."""
    tensors = Tensors(args)
    folder = tempfile.mkdtemp(dir=args.directory, prefix=".tiered-bench-")
    try:
        with tiered.Store(folder, dram=args.dram) as store:
            times = [tensors.put(store) for _ in range(5)][2:]  # both sets of extents are written before
        if args.side != "put":
            times = [tensors.get(folder, is_lease=args.side == "lease") for _ in range(3)]
    finally:
        shutil.rmtree(folder)
    return {name: statistics.median(each[name] for each in times) for name in times[0]}


def measure_op(
    args: argparse.Namespace, tensors: Tensors, op: str, folder: str, scratch: ScratchFile
) -> dict[str, object]:
    from tiered.tools.bench.rounds import Pattern

    kind = "write" if op == "put" else "read"
    pattern = Pattern(kind, args.block, args.depth, args.total, 3600, max_nbytes=args.total)
    rates: dict[str, list[float]] = {"raw": [], "ceiling": [], "store": []}
    with Worker(WORK[op], args) as worker, tensors.open(folder, op) as store:
        for _ in range(2 if store is not None else 0):  # both sets of extents are written before they are timed
            tensors.put(store)
        pace = scratch.run(pattern, is_spread=True).gb_per_s
        for turn in range(args.rounds):
            for name in list(rates)[turn % 3 :] + list(rates)[: turn % 3]:
                if name == "raw":
                    rates[name].append(scratch.run(pattern, is_spread=True).gb_per_s)
                elif name == "ceiling":
                    with worker.at(pace):
                        pace = scratch.run(pattern, is_spread=True).gb_per_s
                    rates[name].append(pace)
                else:
                    took = tensors.put(store) if store is not None else tensors.get(folder, is_lease=op == "lease")
                    rates[name].append(tensors.nbytes / took["wall_s"] / 1e9)
    row: dict[str, object] = {"op": op, "tensor_bytes": args.tensor}
    row |= {f"{name}_gb_per_s": statistics.median(values) for name, values in rates.items()}
    for name, above, below in (
        ("store_to_raw", "store", "raw"),
        ("ceiling_to_raw", "ceiling", "raw"),
        ("store_to_ceiling", "store", "ceiling"),
    ):
        ratios = [a / b for a, b in zip(rates[above], rates[below], strict=True)]
        row |= {name: statistics.median(ratios), f"{name}_range": (min(ratios), max(ratios))}
    return row


class Tensors:
    """The tensors, and how they go into a store and come out of it."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._dram, self._tensor_nbytes = args.dram, args.tensor
        self._keys = [f"tensor/{number}" for number in range(divide_up(args.total, args.tensor))]
        num_sources = max(1, min(len(self._keys), CALLERS_NBYTES // args.tensor))
        self._sources = torch.empty((num_sources, args.tensor), dtype=torch.uint8)
        self._sources.view(torch.int64).random_()
        self._target = torch.ones(args.tensor, dtype=torch.uint8)

    @property
    def nbytes(self) -> int:
        return len(self._keys) * self._tensor_nbytes

    @contextmanager
    def open(self, folder: str, op: str) -> Iterator[tiered.Store | None]:
        """Puts go to one store; each round of gets has a store of its own, in which nothing is resident."""
        if op != "put":
            yield None
            return
        with tiered.Store(folder, dram=self._dram) as store:
            yield store

    def put(self, store: tiered.Store) -> dict[str, float]:
        with Stopwatch() as watch:
            store.put_many((key, self._sources[number % len(self._sources)]) for number, key in enumerate(self._keys))
            store.commit()
        return watch.seconds

    def get(self, folder: str, *, is_lease: bool) -> dict[str, float]:
        for file in Path(folder).glob("data-*"):
            forget(file)
        with tiered.Store(folder, dram=self._dram, mode="r") as store:
            for key in self._keys[len(self._keys) // 2 :]:  # fills the arena's memory, as in a store in use
                with store.lease(key):
                    pass
            with Stopwatch() as watch:
                for number, key in enumerate(self._keys):
                    store.prefetch(self._keys[number : number + NUM_AHEAD])
                    if is_lease:
                        with store.lease(key):
                            pass
                    else:
                        store.get(key, out=self._target)
        return watch.seconds


class Stopwatch:
    """The wall and the CPU seconds of this process that a block takes."""

    def __enter__(self) -> Stopwatch:
        self._start = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *error: object) -> None:
        wall, cpu = self._start
        self.seconds = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}


class Worker:
    """The other process."""

    def __init__(self, what: str, args: argparse.Namespace) -> None:
        self._command = [sys.executable, __file__, "--work", what, f"--total={args.total}", f"--dram={args.dram}"]

    def __enter__(self) -> Worker:
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._hear()
        return self

    def __exit__(self, *error: object) -> None:
        self._process.communicate()

    @contextmanager
    def at(self, gb_per_s: float) -> Iterator[None]:
        """Have it work at this pace in the block, if it can."""
        self._say(str(gb_per_s))
        yield
        self._say("enough")
        self._hear()

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        print(line, file=self._process.stdin, flush=True)

    def _hear(self) -> None:
        assert self._process.stdout is not None
        self._process.stdout.readline()


def work(args: argparse.Namespace) -> int:
    """Copy and digest block by block from the caller's memory to a store's, or back, at the pace that was last read."""
    small, large = huge_memory(min(CALLERS_NBYTES, args.total)), huge_memory(args.dram)
    steps = args.work.split(", ")
    told: SimpleQueue[str] = SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            told.put(line)
        told.put("")

    threading.Thread(target=listen).start()
    while True:
        print("idle", flush=True)
        line = told.get()
        if not line:
            return 0
        bytes_per_s = float(line) * 1e9
        number, start = 0, time.perf_counter()
        while told.empty():
            here, there = (number * BLOCK_NBYTES % len(memory) for memory in (small, large))
            for step in steps:
                if step == "digest":
                    xxhash.xxh3_64_intdigest(large[there : there + BLOCK_NBYTES])
                else:
                    places = [address_of(small) + here, address_of(large) + there]
                    ctypes.memmove(*(places[::-1] if args.work == WORK["put"] else places), BLOCK_NBYTES)
            number += 1
            ahead_s = number * BLOCK_NBYTES / bytes_per_s - (time.perf_counter() - start)
            if ahead_s > 0.0005:
                time.sleep(ahead_s)
        if not told.get():
            return 0


def forget(path: Path) -> None:
    """Drop the pages of a file from the page cache, the dirty ones written before."""
    fd = os.open(path, os.O_RDONLY)
    os.fdatasync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def huge_memory(nbytes: int) -> memoryview:
    pages = mmap.mmap(-1, nbytes)
    pages.madvise(mmap.MADV_HUGEPAGE)
    memory = memoryview(pages)
    ctypes.memset(address_of(memory), 1, nbytes)
    return memory


def address_of(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def show(row: dict[str, object]) -> dict[str, object]:
    cells = []
    for name, value in row.items():
        if isinstance(value, float):
            cells.append(f"{name} {value:.3g}")
        elif isinstance(value, tuple):
            cells.append(f"({value[0]:.2f}-{value[1]:.2f})")
        else:
            cells.append(f"{name} {value}")
    print("  ".join(cells), flush=True)
    return row


if __name__ == "__main__":
    sys.exit(main())

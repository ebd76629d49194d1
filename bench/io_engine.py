#!/usr/bin/env python3
"""The I/O engine against its bars: beside fio, beside a busy Python thread, demand reads under write-back, duplex.

Usage: python bench/io_engine.py DIR [--only engines,busy,demand,duplex,leaks] [--rounds 5] [--seconds 1]

Ours and what it is compared with run in turn, and medians of the pairs' ratios are printed. The bound is what fio gives
with the same block, depth and file, in huge pages. One JSON line comes last. Run nothing else meanwhile.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import torch

from tiered.bytes.device.base import SCRATCH, Device, IOClass, Operation
from tiered.bytes.device.engines import open_device
from tiered.tools.bench.rounds import Pattern, ScratchFile, run_round
from tiered.tools.bench.suite import measure_pairs, row_of
from tiered.units import GiB, KiB, MiB, format_bytes, parse_bytes

Figures = dict[str, object]


def main() -> int:
    args = arguments()
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    print(f"Linux {platform.release()}, {os.cpu_count()} cores, {versions}")
    figures: Figures = {}
    for name in args.only.split(","):
        figures[name] = SECTIONS[name](args)
    print(json.dumps({"bench": "io_engine", **figures}))
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--only", default="engines,busy,demand,duplex,leaks")
    parser.add_argument("--engines", default="uring/threads")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of one round")
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--blocks", type=parse_bytes, nargs="+", default=[MiB, 4 * MiB, 8 * MiB])
    parser.add_argument("--file", type=parse_bytes, default=GiB, help="size of the file that is overwritten")
    parser.add_argument("--opens", type=int, default=10_000)
    return parser.parse_args()


def scratch_of(args: argparse.Namespace, engine: str, depth: int, block: int) -> ScratchFile:
    scratch = ScratchFile(
        args.directory,
        engine=engine,
        memory_nbytes=depth * block,
        file_nbytes=args.file,
        depth=depth,
    )
    scratch.write_file()
    return scratch


def engines(args: argparse.Namespace) -> list[Figures]:
    """Each engine beside fio: GB/s and CPU-seconds per GB."""
    rows: list[Figures] = []
    for name in args.engines.split("/"):
        for block in args.blocks:
            with scratch_of(args, name, args.depth, block) as scratch:
                fio = scratch.find_fio()
                for op in ("read", "write"):
                    pattern = Pattern(op, block, args.depth, args.file, args.seconds)
                    pairs = measure_pairs(scratch, pattern, rounds=args.rounds, fio=fio)
                    found = row_of(pattern, *pairs, directory="")
                    row: Figures = {
                        "engine": name, "op": op, "block_bytes": block, "depth": args.depth,
                        "gb_per_s": found.gb_per_s, "fio_gb_per_s": found.reference_gb_per_s, "ratio": found.ratio,
                        "cpu_s_per_gb": found.cpu_s_per_gb, "fio_cpu_s_per_gb": found.reference_cpu_s_per_gb,
                    }  # fmt: skip
                    rows.append(show(row))
    return rows


def busy(args: argparse.Namespace) -> list[Figures]:
    """The rate with a thread of pure Python beside it, over the rate without, in alternating rounds."""
    rows = []
    for engine in ("uring", "threads"):
        for block, depth in ((4 * MiB, 8), (4 * MiB, 32), (MiB, 128)):
            with scratch_of(args, engine, depth, block) as scratch:
                for op in ("read", "write"):
                    pattern = Pattern(op, block, depth, args.file, args.seconds)
                    run_round(scratch.device, scratch.memory, replace(pattern, seconds=0.2))
                    ratios, rates = [], []
                    for _ in range(args.rounds):
                        idle = run_round(scratch.device, scratch.memory, pattern).gb_per_s
                        with BusyThread():
                            rates.append(run_round(scratch.device, scratch.memory, pattern).gb_per_s)
                        ratios.append(rates[-1] / idle)
                    row = {"engine": engine, "op": op, "block_bytes": block, "depth": depth}
                    rows.append(show({**row, "gb_per_s": statistics.median(rates), "ratio": statistics.median(ratios)}))
    return rows


class BusyThread:
    """A thread that runs pure Python between ``__enter__`` and ``__exit__``, as a data loader or a logger may."""

    def __init__(self) -> None:
        self._is_over = False
        self._thread = threading.Thread(target=self._spin, name="busy")

    def __enter__(self) -> BusyThread:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over = True
        self._thread.join()

    def _spin(self) -> None:
        count = 0
        while not self._is_over:
            for number in range(1000):
                count += number * number % 7


def demand(args: argparse.Namespace) -> list[Figures]:
    """The latency of single demand reads with the device idle, and with its queue full of writes."""
    rows = []
    for engine in ("uring", "threads"):
        for block in (MiB, 4 * MiB):
            with scratch_of(args, engine, 33, 4 * MiB) as scratch:
                reads, writes = scratch.memory[: 4 * MiB], scratch.memory[4 * MiB :]
                pattern = Pattern("write", 4 * MiB, 32, args.file, seconds=3600)
                ratios, idle_ms, full_ms = [], [], []
                for _ in range(args.rounds):
                    idle = demand_latencies(scratch.device, reads[:block], args.file)
                    with WriteBack(scratch.device, writes, pattern):
                        full = demand_latencies(scratch.device, reads[:block], args.file)
                    idle_ms.append(percentile_ms(idle, 99))
                    full_ms.append(percentile_ms(full, 99))
                    ratios.append(full_ms[-1] / idle_ms[-1])
                p99 = {"idle_p99_ms": statistics.median(idle_ms), "full_p99_ms": statistics.median(full_ms)}
                row = {"engine": engine, "block_bytes": block, **p99, "ratio": statistics.median(ratios)}
                rows.append(show(row))
    return rows


class WriteBack:
    """Writes that keep a device's queue full while the block runs."""

    def __init__(self, device: Device, memory: memoryview, pattern: Pattern) -> None:
        self._is_over = False
        self._idle = threading.Semaphore(0)
        self._device, self._pattern = device, pattern
        self._blocks = [
            memory[start : start + pattern.block_nbytes]
            for start in range(0, pattern.depth * pattern.block_nbytes, pattern.block_nbytes)
        ]

    def __enter__(self) -> WriteBack:
        for turn, block in enumerate(self._blocks):
            self._submit(turn, block)
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over = True
        for _ in self._blocks:
            self._idle.acquire()

    def _submit(self, turn: int, memory: memoryview) -> None:
        nbytes = self._pattern.block_nbytes

        def done(operation: Operation) -> None:
            if operation.error is not None or self._is_over:
                self._idle.release()
            else:
                self._submit(turn + self._pattern.depth, memory)

        offset = turn * nbytes % (self._pattern.file_nbytes // nbytes * nbytes)
        self._device.submit([operation_of(True, offset, memory, IOClass.WRITE, done)])


def operation_of(
    is_write: bool, offset: int, memory: memoryview, io_class: IOClass, on_done: Callable[[Operation], None]
) -> Operation:
    return Operation(
        is_write=is_write, file=SCRATCH, offset=offset, memory=memory, io_class=io_class, on_done=on_done
    )  # fmt: skip


def demand_latencies(device: Device, memory: memoryview, file_nbytes: int, num: int = 400) -> list[float]:
    places = np.random.default_rng(0).integers(0, file_nbytes // len(memory), num)
    seconds = []
    for place in places:
        done = threading.Event()
        report = functools.partial(report_to, done)
        operation = operation_of(False, int(place) * len(memory), memory, IOClass.DEMAND, report)
        start = time.perf_counter()
        device.submit([operation])
        done.wait()
        seconds.append(time.perf_counter() - start)
    return seconds


def report_to(done: threading.Event, operation: Operation) -> None:
    if operation.error is not None:
        raise operation.error
    done.set()


def percentile_ms(seconds: Sequence[float], percent: float) -> float:
    return float(np.percentile(seconds, percent, method="higher")) * 1e3


def duplex(args: argparse.Namespace) -> list[Figures]:
    """As many bytes read as written, in each order: both at once, or in bursts; against one after the other."""
    block, depth = 4 * MiB, 16
    total = args.file // 2
    rows = []
    with scratch_of(args, "uring", 2 * depth, block) as scratch:
        orders: dict[str, int] = {"reads, then writes": total, "bursts of 32 MiB": 32 * MiB}
        orders |= {"bursts of 128 MiB": 128 * MiB, "both at once": 0}
        found: dict[str, list[float]] = {name: [] for name in orders}
        for _ in range(args.rounds):
            for name, burst in orders.items():
                found[name].append(move_both(scratch, total, burst, block, depth))
        alone = found["reads, then writes"]
        for name, seconds in found.items():
            ratio = statistics.median(a / b for a, b in zip(alone, seconds, strict=True))
            rows.append(show({"order": name, "gb_per_s": 2 * total / statistics.median(seconds) / 1e9, "ratio": ratio}))
    return rows


def move_both(scratch: ScratchFile, total: int, burst: int, block: int, depth: int) -> float:
    """Read the file's first half and write its second; return the seconds. ``burst`` 0: both directions at once."""
    lanes = [scratch.memory[: depth * block], scratch.memory[depth * block :]]
    start = time.perf_counter()
    if burst == 0:
        run_round(
            scratch.device, scratch.memory, Pattern("mixed", block, 2 * depth, 2 * total, 3600, max_nbytes=2 * total)
        )
        return time.perf_counter() - start
    for place in range(0, total, burst):
        for is_write in (False, True):
            move_range(scratch.device, lanes[is_write], is_write, place + is_write * total, burst, block)
    return time.perf_counter() - start


def move_range(device: Device, memory: memoryview, is_write: bool, start: int, nbytes: int, block: int) -> None:
    depth = len(memory) // block
    free = threading.Semaphore(depth)
    io_class = IOClass.WRITE if is_write else IOClass.PREFETCH
    for number, offset in enumerate(range(start, start + nbytes, block)):
        free.acquire()
        part = memory[number % depth * block :][:block]
        device.submit([operation_of(is_write, offset, part, io_class, lambda _: free.release())])
    for _ in range(depth):
        free.acquire()


def leaks(args: argparse.Namespace) -> list[Figures]:
    """Open and close each engine so often: descriptors, threads and memory before and after."""
    rows = []
    for engine in ("uring", "threads"):
        with tempfile.TemporaryDirectory(dir=args.directory) as folder:
            for num in (200, args.opens):  # the first round brings what is allocated once
                before = held()
                for _ in range(num):
                    device = open_device(folder, engine)
                    device.grow(0, 64 * KiB)
                    device.close()
                after = held()
        grown = {name: after[name] - before[name] for name in before}
        rows.append(show({"engine": engine, "opens": args.opens, **grown}))
    return rows


def held() -> dict[str, int]:
    process = psutil.Process()
    rss = process.memory_info().rss
    return {"fds": process.num_fds(), "threads": threading.active_count(), "rss_bytes": rss}


def show(row: Figures) -> Figures:
    cells = []
    for name, value in row.items():
        if name.endswith("bytes") and isinstance(value, int):
            cells.append(f"{name.removesuffix('_bytes')} {format_bytes(value)}")
        else:
            cells.append(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}")
    print("  ".join(cells), flush=True)
    return row


SECTIONS: dict[str, Callable[[argparse.Namespace], list[Figures]]] = {
    "engines": engines, "busy": busy, "demand": demand, "duplex": duplex, "leaks": leaks,
}  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""A GPT that exceeds both budgets, trained through three tiers on this machine's accelerator, and beside it in memory.

Usage: python bench/gpu.py [--store DIR --minutes 5 --results DIR] [--device cuda] [--tiny]

First `tiered bench DIR --quick --device` measures the drive and the copies, whose profiles the bounds below come from.
Then three runs: one with so many tokens a step that arithmetic hides all I/O (design: tokens >= F (R/B_r + W/B_w) / 8),
the same one with everything in device memory, where it fits, and one with so few tokens that the drive is the bound.
Ceilings: 1.10 times the step in device memory, and 1.15 times the bound. Each run's figures are a JSON line as soon as
the run has ended; one JSON line of all comes last, and a file of results is written. On `sim`, the simulated device of
the tests, no time means anything.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for tests, and where nothing is installed

import psutil
import torch

from bench.gpu_device import part_arguments, said, simulated_device
from bench.gpu_runs import in_device_memory, train
from bench.gpu_sizes import IN_MEMORY, INTERIOR, LAYERS, TINY, Machine, Sizes, io_bound, sizes_for
from tiered.tools.bench.command import BenchRequest, bench
from tiered.tools.bench.settings import QUICK
from tiered.tools.train.summary import matrix_flop_per_s, profiled_bandwidth
from tiered.units import GiB, MiB, format_bytes
from tiered.zero.compute_device import describe_device, named_device

ROOT = Path(__file__).resolve().parents[1]
TINY_BENCH = replace(
    QUICK, blocks=(1 * MiB,), rounds=1, round_s=0.02, warm_up_s=0.01,
    round_nbytes=8 * MiB, file_nbytes=32 * MiB, most_in_flight_nbytes=16 * MiB, tensor_nbytes=(4 * MiB,),
    tensors_nbytes=64 * MiB, tensor_rounds=1, dram_nbytes=32 * MiB, copy_nbytes=4 * MiB, copies_nbytes=16 * MiB,
    copy_memory_nbytes=16 * MiB,
)  # fmt: skip

# -- the machine ---------------------------------------------------------------------------------------------------


class Clocks:
    """What the card's tool says every half second, where there is one: the largest and the smallest of each figure."""

    QUERY = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")

    def __init__(self) -> None:
        self._samples: list[list[float]] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="clocks")

    def __enter__(self) -> Clocks:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _sample(self) -> None:
        command = ["nvidia-smi", f"--query-gpu={','.join(self.QUERY)}", "--format=csv,noheader,nounits"]
        while not self._end.wait(0.5):
            try:
                line = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout
                self._samples.append([float(word) for word in line.splitlines()[0].split(",")])
            except (OSError, subprocess.SubprocessError, ValueError, IndexError):
                return

    def ranges(self) -> dict[str, list[float]]:
        columns = zip(*self._samples, strict=True)
        return {name: [min(column), max(column)] for name, column in zip(self.QUERY, columns, strict=False)}


def machine_at(folder: Path, device: torch.device) -> Machine:
    """Return the machine, the drive's rates as ``tiered bench`` has just measured them."""
    drive = profiled_bandwidth([folder])
    assert drive is not None
    free, _ = torch.accelerator.get_memory_info(device)
    return Machine(
        shutil.disk_usage(folder).free, psutil.virtual_memory().available, int(free), drive,
        matrix_flop_per_s(device, torch.bfloat16),
    )  # fmt: skip


# -- the report ----------------------------------------------------------------------------------------------------


def row(name: str, sizes: Sizes, found: dict[str, Any]) -> str:
    """Return one line of the table."""
    device = found["device"]
    return (
        f"| {name} | {sizes.tokens:,} | {found['seconds']:.3f} | {found['step_over_bound']:.2f} | "
        f"{device['share_of_peak']:.1%} | {found['read_bytes_per_param']:.1f} / {found['write_bytes_per_param']:.1f} | "
        f"{device['copied_in_bytes_per_param']:.1f} / {device['copied_out_bytes_per_param']:.1f} | "
        f"{format_bytes(device['peak_bytes'])} / {format_bytes(found['peak_dram_bytes'])} | {found['verdict']} |"
    )


def report(result: dict[str, Any], sizes: Sizes, rows: list[str], command: str) -> str:
    """Return the file of results."""
    clocks = {name: f"{low:g} to {high:g}" for name, (low, high) in result["clocks"].items()}
    beside, most = result["in_memory"], result["compute_bound"]
    ratio = f"{result['ratio']:.3f} (wanted: <= 1.10)" if result["ratio"] else f"not measured: {beside['why_not']}"
    return "\n".join(
        (
            f"# Training through three tiers on {result['device']}",
            "",
            f"`{command}`, {result['commit']}, {result['versions']}. {result['machine']}.",
            "",
            f"Model: {sizes.words()}. Clocks and power while it ran: {clocks or 'the card does not tell'}.",
            "",
            "| run | tokens a step | s a step | step/bound | of the card's peak | read / written | copied in / out |"
            " peak device / DRAM | verdict |",
            "|---|---|---|---|---|---|---|---|---|",
            *rows,
            "",
            "Bytes are per parameter and step.",
            "",
            f"- Compute-bound step over the same in device memory: {ratio}.",
            f"- Device memory at the most: {format_bytes(most['peak_allocated_bytes'])} allocated,"
            f" {format_bytes(most['peak_reserved_bytes'])} reserved by torch.",
            f"- I/O-bound step over its bound: {result['io_bound']['step_over_bound']:.3f} (wanted: <= 1.15).",
            "",
        )
    )


def commit() -> str:
    """Return the commit that runs, and whether anything was changed since."""
    try:
        said = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return "commit unknown"
    return f"commit {said.stdout.strip()}"


def arguments() -> argparse.Namespace:
    parser = part_arguments(__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="about as long as all may take, default: 5")
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results", help="where the file goes")
    return parser.parse_args()


def bench_drive(folder: Path, device: torch.device, *, is_tiny: bool) -> dict[str, Any]:
    """Run ``tiered bench --quick --device`` and return its figures."""
    figures = folder / "bench.json"
    request = BenchRequest((folder,), quick=True, device=str(device), yes=True, json_file=figures)
    if status := bench(request, TINY_BENCH if is_tiny else None):
        raise SystemExit(f"tiered bench ended with status {status}")
    found: dict[str, Any] = json.loads(figures.read_text())
    return found


def run(args: argparse.Namespace, folder: Path) -> None:
    """Run all parts in ``folder``, print the JSON line and write the file of results."""
    device = named_device(args.device)
    if device.type == "cpu":
        raise SystemExit("bench/gpu.py: this process has no accelerator")
    begun_s = time.perf_counter()
    measured = bench_drive(folder, device, is_tiny=args.tiny)
    said({"run": "measured"} | measured)
    machine = machine_at(folder, device)
    left_s = 60 * args.minutes - (time.perf_counter() - begun_s)
    sizes = TINY if args.tiny else sizes_for(machine, left_s)
    print(f"\nmodel   {sizes.words()}", flush=True)
    few = io_bound(sizes)
    with Clocks() as clocks:
        many_found = said({"run": "compute_bound"} | train(sizes, device, folder))
        beside: dict[str, Any] = {"why_not": "it does not fit the device's memory"}
        kept = sizes.tokens // sizes.micro_steps * sizes.width * (2 * LAYERS + INTERIOR)
        if IN_MEMORY * sizes.shape.num_params + kept < 0.9 * machine.device_bytes:
            try:
                beside = in_device_memory(sizes, device)
            except torch.OutOfMemoryError as error:
                beside = {"why_not": str(error)}
        said({"run": "in_memory"} | beside)
        few_found = said({"run": "io_bound"} | train(few, device, folder))
    ratio = many_found["seconds"] / beside["seconds"] if "seconds" in beside else 0.0
    result = {
        "bench": "gpu",
        "device": describe_device(device),
        "machine": f"{platform.platform()}, {psutil.cpu_count()} cores, {psutil.virtual_memory().total / GiB:.0f} GiB",
        "versions": f"torch {torch.__version__}, Python {platform.python_version()}",
        "commit": commit(),
        "sizes": asdict(sizes),
        "free": {k: v for k, v in asdict(machine).items() if k != "drive"},
        "measured": measured,
        "compute_bound": many_found,
        "io_bound": few_found,
        "in_memory": beside,
        "ratio": ratio,
        "clocks": clocks.ranges(),
    }
    name = "compute-bound" if sizes.is_compute_bound else "as many tokens as fit"
    rows = [row(name, sizes, many_found), row("I/O-bound", few, few_found)]
    text = report(result, sizes, rows, f"python bench/gpu.py --minutes {args.minutes:g}")
    card = "".join(letter if letter.isalnum() else "_" for letter in result["device"].split("(")[-1].strip(")"))
    file = args.results / f"gpu_{card.lower()}_{datetime.now(UTC):%Y%m}.md"
    file.write_text(text)
    print(f"\n{text}\nwritten to {file}")
    print(json.dumps(result))


def main() -> None:
    args = arguments()
    args.store.mkdir(parents=True, exist_ok=True)
    with simulated_device(args.device), tempfile.TemporaryDirectory(dir=args.store, prefix="gpu-") as folder:
        run(args, Path(folder))


if __name__ == "__main__":
    main()

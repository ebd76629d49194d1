#!/usr/bin/env python3
"""Training steps over ranks whose drives are throttled alike: what N ranks with a drive each give of N times one.

Usage: python bench/ranks_step.py [--worlds 1,2,4 --limit 60MiB --width 768 --layers 8 --update backward --steps 3]
       python bench/ranks_step.py --drive [--worlds 1,2,4 --nbytes 1GiB --turns 3]

Ranks are forked processes with gloo between them, each with a throttled device of its own, DRAM at the smallest budget
and a tenth, or ``--more`` of it. The bound is the drive: N ranks at best take 1 / N of the time of one. Read and
written are a rank's bytes of a step, beside N = 1's divided by N; collectives and moved bytes are those of a step and
rank; waits are the seconds of a step that a rank waited for others. Memory is VmRSS beyond that before the store, less
the budget.

With ``--drive`` all ranks put and get tensors of 16 MiB at the same time on one real drive, ``nbytes`` all together:
what N stores move in a second beside one. Worlds take turns. One JSON line comes last.
"""

import argparse
import json
import logging
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tiered
from tests.devices.throttled import ThrottledDevice
from tests.ranks.processes import Ranks, case
from tests.ranks.training import group_of
from tests.zero.training import budget_named_in
from tiered.errors import CapacityError
from tiered.store.lifetime import opening
from tiered.units import MiB, parse_bytes


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def resident_nbytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@case
def steps(
    send: Callable[[Any], None],
    *,
    world: int,
    limit: int,
    width: int,
    layers: int,
    update: str,
    num: int,
    folder: str,
    more: int,
) -> Any:
    """Train; return the seconds and counts of a step, medians."""
    group = group_of(world) if world > 1 else False
    before, torch_open = resident_nbytes(), opening.open_device

    def throttled(path: Any, engine: str) -> Any:
        return ThrottledDevice(torch_open(path, engine), read_bytes_per_s=limit, write_bytes_per_s=limit)

    def train(nbytes: int, *, is_trial: bool) -> Any:
        with tempfile.TemporaryDirectory(dir=folder) as directory, mock.patch.object(opening, "open_device", throttled):
            options = {"durable": False, "process_group": group, "rank_deadline": 300}
            with tiered.Store(directory, dram=nbytes * world, **options) as store:
                torch.manual_seed(0)
                model = nn.Sequential(*(Block(width) for _ in range(layers)), nn.Linear(width, 8))
                tiered.shard(model, store, hold=0)
                optimizer = tiered.AdamW(model.parameters(), update=update)
                return None if is_trial else measured(store, model, optimizer)

    def measured(store: tiered.Store, model: nn.Module, optimizer: Any) -> dict[str, Any]:
        rows = []
        for step in range(num + 1):
            first, counted = store.statistics(), store.ranks and store.ranks.comm_thread.statistics()
            begun = time.perf_counter()
            model(torch.ones(4, width)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds, last = time.perf_counter() - begun, store.statistics()
            row = {
                "s": seconds,
                "read": last.read_bytes - first.read_bytes,
                "written": last.write_bytes - first.write_bytes,
            }
            if store.ranks is not None and counted is not None:
                now = store.ranks.comm_thread.statistics()
                row |= {"collectives": now.num_collectives - counted.num_collectives}
                row |= {
                    "moved": now.moved_bytes - counted.moved_bytes,
                    "waits": now.wait_ranks_s - counted.wait_ranks_s,
                }
            rows += [row] if step else []
        medians = {name: statistics.median(each[name] for each in rows) for name in rows[0]}
        beyond = resident_nbytes() - before - store.working_set.budget_bytes
        return medians | {"beyond": beyond, "stored": store.statistics().used_bytes}

    smallest = 8 * MiB
    try:
        train(smallest, is_trial=True)
    except CapacityError as error:
        smallest = budget_named_in(error)
    budget = (smallest + (more or smallest // 10)) // MiB * MiB + MiB
    return train(budget, is_trial=False) | {"budget": budget}


@case
def move(send: Callable[[Any], None], *, world: int, nbytes: int, folder: str) -> Any:
    """Put and get this rank's part of ``nbytes``, with all others; return the seconds of each."""
    group = group_of(world) if world > 1 else False
    if group is torch.distributed.GroupMember.NON_GROUP_MEMBER:
        return None
    tensor, num = torch.ones(16 * MiB, dtype=torch.uint8), nbytes // world // (16 * MiB)
    with tempfile.TemporaryDirectory(dir=folder) as directory:
        options = {"durable": False, "process_group": group, "rank_deadline": 300}
        with tiered.Store(directory, dram=96 * MiB * world, **options) as store:

            def meet() -> float:
                if store.ranks is not None:
                    store.ranks.agreement.agree("turn")
                return time.perf_counter()

            begun = meet()
            for number in range(num):
                store[f"{number}"] = tensor
            written = meet()
            for number in range(num):
                store[f"{number}"]
            return {"put": written - begun, "get": meet() - written}


def measure_drive(worlds: list[int], nbytes: int, turns: int, folder: str) -> dict[str, Any]:
    rows: dict[int, list[dict[str, float]]] = {world: [] for world in worlds}
    with Ranks(max(worlds), limit_s=300.0) as ranks:
        for world in worlds * turns:
            seen = [each for each in ranks.run("move", world=world, nbytes=nbytes, folder=folder)[:world] if each]
            rows[world].append({word: nbytes / max(each[word] for each in seen) for word in ("put", "get")})
    first = worlds[0]
    for world in worlds:
        for word in ("put", "get"):
            speed = statistics.median(row[word] for row in rows[world])
            ratio = statistics.median(a[word] / b[word] for a, b in zip(rows[world], rows[first], strict=True))
            print(f"{world} ranks: {word} {speed / 1e9:.2f} GB/s, {ratio:.2f} of {first} rank's", flush=True)
    return {"bench": "ranks_step", "drive": rows}


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worlds", type=numbers, default="1,2,4", help="numbers of ranks")
    parser.add_argument("--limit", type=parse_bytes, default="60MiB", help="bytes per second of each drive, each way")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--update", default="backward", choices=("step", "backward"))
    parser.add_argument("--more", type=parse_bytes, default=0, help="DRAM beyond the smallest budget (a tenth of it)")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--store", default=tempfile.gettempdir(), help="the folder of the drives' files")
    parser.add_argument("--drive", action="store_true", help="puts and gets on one real drive")
    parser.add_argument("--nbytes", type=parse_bytes, default="1GiB", help="that all ranks put and get together")
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    logging.getLogger("tiered").setLevel(logging.CRITICAL)
    print(f"{platform.machine()}, {os.cpu_count()} CPUs, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}")
    if args.drive:
        print(json.dumps(measure_drive(args.worlds, args.nbytes, args.turns, args.store)))
        return
    result: dict[str, Any] = {"bench": "ranks_step", "update": args.update, "worlds": {}}
    one: dict[str, Any] = {}
    for world in args.worlds:
        with Ranks(world, limit_s=500.0) as ranks:
            seen = ranks.run(
                "steps", world=world, limit=args.limit, width=args.width, layers=args.layers, update=args.update,
                num=args.steps, folder=args.store, more=args.more,
            )  # fmt: skip
        slowest = max(seen, key=lambda each: each["s"])
        result["worlds"][world] = seen
        one = one or slowest
        print(f"{world} ranks: {slowest['s']:.2f} s a step ({slowest['s'] / one['s']:.3f} of one's)", end=", ")
        for name in ("read", "written"):
            most = max(each[name] for each in seen)
            share = most * world / one[name] if one[name] else 0.0
            print(f"{name} {most / MiB:.1f} MiB ({share:.3f} of one's / N)", end=", ")
        moved = sum(each["read"] + each["written"] for each in seen) / slowest["s"]
        bandwidth = (one["read"] + one["written"]) / one["s"]
        times = f"{moved / bandwidth:.2f} times one's bandwidth" if bandwidth else "one moved nothing"
        print(times, end=", ")
        print(f"{slowest['beyond'] / MiB:.0f} MiB beyond the budget of {slowest['budget'] / MiB:.0f}", end="")
        if world > 1:
            print(f"; {slowest['collectives']:.0f} collectives, {slowest['moved'] / MiB:.1f} MiB, ", end="")
            print(f"waits {slowest['waits']:.2f} s", end="")
        print(flush=True)
    print(json.dumps(result))


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Commits over ranks: what agreeing and confirming take, and what a run takes to be carried over to other ranks.

Usage: python bench/ranks_commit.py [--worlds 1,2,4 --commits 100 --carry 2,4,3 --width 1024 --layers 8 --restarts 1]

The first part commits a key of 4 KiB on each rank, again and again. "agree" is the wait of the training thread for the
proposal, "confirm" that of the commit's thread for all ranks, each the median over commits of the slowest rank. The
second part trains one step of fp32 with AdamW, and opens the run with each number of ranks in turn. "grew" is the
largest resident memory of a rank in that opening, beyond that before it, pages of the budget included: to be compared
with the largest span and 64 MiB. The third part, ``--restarts`` times, has torchrun start two ranks of which one is
killed between two steps, and says how many seconds after that all have begun again, have imported torch and tiered,
have the run, and have made a step. One JSON line comes last.
"""

import argparse
import json
import logging
import os
import platform
import statistics
import subprocess
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
from bench.ranks_step import Block, numbers, resident_nbytes
from tests.ranks.processes import Ranks, case
from tests.ranks.training import group_of
from tiered.store.lifetime.confirmation import RanksConfirmation
from tiered.units import MiB


@case
def commits(send: Callable[[Any], None], *, world: int, num: int, folder: str) -> Any:
    """Commit ``num`` times; return the milliseconds of each proposal, confirmation, and whole commit."""
    group = group_of(world)
    if group is torch.distributed.GroupMember.NON_GROUP_MEMBER:
        return None
    group = group if world > 1 else False
    times: dict[str, list[float]] = {"propose": [], "confirm": [], "commit": []}

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            begun = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                times[name].append(1e3 * (time.perf_counter() - begun))

        return call

    with (
        mock.patch.object(RanksConfirmation, "propose", timed("propose", RanksConfirmation.propose)),
        mock.patch.object(RanksConfirmation, "confirm", timed("confirm", RanksConfirmation.confirm)),
        tiered.Store(folder, dram=16 * MiB * world, process_group=group) as store,
    ):
        commit = timed("commit", store.commit)
        for number in range(num):
            store["x"] = torch.full((1024,), float(number))
            commit({"number": number})
    return {name: each[:num] for name, each in times.items()}


@case
def carry(send: Callable[[Any], None], *, world: int, width: int, layers: int, folder: str, trains: bool) -> Any:
    """Open the run, train a step where it is new; return the seconds and the memory of the opening."""
    group = group_of(world)
    if group is torch.distributed.GroupMember.NON_GROUP_MEMBER:
        return None
    group = group if world > 1 else False
    before, budget = resident_nbytes(), 128 * MiB
    Path("/proc/self/clear_refs").write_text("5")
    begun = time.perf_counter()
    with tiered.Store(folder, dram=budget * world, process_group=group, rank_deadline=300) as store:
        seconds = time.perf_counter() - begun
        (peak,) = (line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line)
        torch.manual_seed(0)
        model = tiered.shard(nn.Sequential(*(Block(width) for _ in range(layers))), store)
        optimizer = tiered.AdamW(model.parameters())
        store.resume()
        if trains:
            model(torch.ones(4, width)).square().mean().backward()
            optimizer.step()
            store.commit({"step": 1})
        span = max(span.nbytes for unit in model.get_parameter("0.up.weight").segment.unit.engine.units
                   for span in unit.layout.spans)  # fmt: skip
        stored = store.statistics().used_bytes
    return {"s": seconds, "grew": int(peak) * 1024 - before, "span": span, "stored": stored}


def measure_commits(worlds: list[int], num: int, folder: str) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = {}
    for world in worlds:
        with tempfile.TemporaryDirectory(dir=folder) as directory, Ranks(world, limit_s=300.0) as ranks:
            seen = ranks.run("commits", world=world, num=num, folder=directory)[:world]
        found[world] = {
            name: statistics.median(max(each) for each in zip(*(rank[name] for rank in seen), strict=True))
            for name, values in seen[0].items()
            if values
        }
        print(f"{world} ranks: " + ", ".join(f"{name} {ms:.2f} ms" for name, ms in found[world].items()), flush=True)
    return found


def measure_carry(worlds: list[int], width: int, layers: int, folder: str) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory(dir=folder) as directory, Ranks(max(worlds), limit_s=500.0) as ranks:
        for number, world in enumerate(worlds):
            options = {"width": width, "layers": layers, "folder": directory, "trains": not number}
            seen = ranks.run("carry", world=world, **options)[:world]
            row = {name: max(each[name] for each in seen) for name in seen[0]} | {"world": world}
            rows.append(row)
            if number:
                print(
                    f"{worlds[number - 1]} -> {world} ranks: {row['s']:.2f} s, {row['stored'] / MiB:.0f} MiB a rank;"
                    f" memory grew by {row['grew'] / MiB:.0f} MiB with a budget of 128, the largest span is"
                    f" {row['span'] / MiB:.0f}",
                    flush=True,
                )
    return rows


WORDS = ("begun", "imported", "resumed", "step")
RESTARTED = """
import json, os, signal, sys, time
def say(word):
    os.write(1, (json.dumps([word, os.environ["RANK"], time.monotonic()]) + "\\n").encode())
life = os.environ["TORCHELASTIC_RESTART_COUNT"]
say("begun" + life)
import torch
import torch.distributed as dist
import tiered
say("imported" + life)
dist.init_process_group("gloo")
torch.manual_seed(0)
with tiered.Store(sys.argv[1], dram="64MiB") as store:
    model = tiered.shard(torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4))), store)
    optimizer = tiered.AdamW(model.parameters())
    step = store.resume().get("step", 0)
    say("resumed" + life)
    while step < 8:
        model(torch.ones(4, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        store.commit({"step": step}, wait=False)
        say("step" + life)
        if life == "0" and step == 5 and dist.get_rank() == 1:
            say("killed")
            os.kill(os.getpid(), signal.SIGKILL)
dist.destroy_process_group()
"""


def measure_restarts(num: int, folder: str) -> list[dict[str, float]]:
    """Return, for each of ``num`` kills, the seconds from it until the last of two ranks has come to each word."""
    rows: list[dict[str, float]] = []
    for _ in range(num):
        with tempfile.TemporaryDirectory(dir=folder) as directory:
            script = Path(directory, "train.py")
            script.write_text(RESTARTED)
            words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
            root = str(Path(__file__).resolve().parents[1])
            ended = subprocess.run(
                [sys.executable, *words, str(script), f"{directory}/run"], capture_output=True, text=True, timeout=300,
                env=os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PYTHONPATH": root},
            )  # fmt: skip
        assert ended.returncode == 0, ended.stderr
        said: list[list[Any]] = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("[")]
        first = {(word, rank): s for word, rank, s in reversed(said)}
        times = {word: max(first[f"{word}1", rank] for rank in "01") for word in WORDS}
        rows.append({word: s - first["killed", "1"] for word, s in times.items()})
        print("killed: " + ", ".join(f"{word} after {s:.2f} s" for word, s in rows[-1].items()), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worlds", type=numbers, default="1,2,4", help="numbers of ranks that commit")
    parser.add_argument("--commits", type=int, default=100)
    parser.add_argument("--carry", type=numbers, default="2,4,3", help="numbers of ranks that open one run in turn")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--restarts", type=int, default=0, help="kills of a rank that torchrun starts again")
    parser.add_argument("--store", default=tempfile.gettempdir(), help="the folder of the stores")
    args = parser.parse_args()
    logging.getLogger("tiered").setLevel(logging.CRITICAL)
    print(f"{platform.machine()}, {os.cpu_count()} CPUs, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}")
    result: dict[str, Any] = {"bench": "ranks_commit"}
    result["commits"] = measure_commits(args.worlds, args.commits, args.store)
    result["carry"] = measure_carry(args.carry, args.width, args.layers, args.store)
    result["restarts"] = measure_restarts(args.restarts, args.store)
    print(json.dumps(result))


if __name__ == "__main__":
    main()

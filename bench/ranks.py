#!/usr/bin/env python3
"""The ranks' room on this machine's CPUs: gathers beside torch's, memory, kills, and every departure of a rank.

Usage: python bench/ranks.py [--nbytes 64MiB --pairs 9 --kills 200 --worlds 2,3,4 --seed 0]

Ranks are forked processes with gloo between them. A gather of ours and torch's own take turns, with a barrier before
each; the ceiling is one copy of the whole on each rank, so 1 is a gather that costs what memory does. Memory is
VmHWM after a collective over VmRSS before. A kill -9 strikes one of 2 to 4 ranks at a random instant of gathers and
exchanges: how soon each survivor has its named error, and how it ended. Departures are the product of kinds, numbers of
ranks and equal or other sizes, each an error on every rank. One JSON line comes last.
"""

import argparse
import itertools
import json
import logging
import os
import platform
import random
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.ranks import ends, room  # noqa: F401  # their cases
from tests.ranks.departures import AT_ONCE, DEADLINE_S, KINDS, complaints
from tests.ranks.processes import Ranks
from tiered.units import MiB, parse_bytes

WITHIN_S = 1.0


def measure_gathers(world: int, nbytes: int, num_pairs: int) -> dict[str, Any]:
    with Ranks(world) as ranks:
        seen = ranks.run("allocate", nbytes=nbytes // world * world, num_pairs=num_pairs)
    pairs = zip(seen[0]["times"]["gather"], seen[0]["times"]["torch's gather"], strict=True)
    whole, other = torch.ones(nbytes, dtype=torch.uint8), torch.ones(nbytes, dtype=torch.uint8)
    begun = time.perf_counter()
    whole.copy_(other)
    copy_s = time.perf_counter() - begun
    return {
        "world": world,
        "ratio": statistics.median(ours / theirs for ours, theirs in pairs),
        "over_copy": statistics.median(seen[0]["times"]["gather"]) / copy_s,
        "extra_mib": {name: max(each["extra"][name] for each in seen) for name in seen[0]["extra"]},
    }


def kill_one(draw: random.Random) -> dict[str, Any]:
    """Kill one rank; return the seconds until each survivor knew, and what was wrong."""
    world = draw.choice([2, 3, 4])
    seconds, wrong = [], []
    with Ranks(world) as ranks:
        ranks.start("work_until_the_end", nbytes=12 << draw.choice([6, 10, 16, 20]), deadline_s=60.0)
        for rank in range(world):
            ranks.line(rank)
        victim = draw.randrange(world)
        time.sleep(draw.random() * 0.2)
        os.kill(ranks.pids[victim], signal.SIGKILL)
        killed_at = time.monotonic()
        for rank in set(range(world)) - {victim}:
            line = ranks.line(rank)
            seconds.append(line["at"] - killed_at)
            status = ranks.wait_for(rank)
            if (line["error"], line["rank"], status) != ("RankLostError", victim, 75):
                wrong.append(f"rank {rank} of {world} ended with {status} after {line}")
    return {"seconds": seconds, "wrong": wrong}


def measure_kills(num_kills: int, seed: int) -> dict[str, Any]:
    draw = random.Random(seed)
    found = [kill_one(draw) for _ in range(num_kills)]
    seconds = sorted(each for kill in found for each in kill["seconds"])
    wrong = [each for kill in found for each in kill["wrong"]]
    late = sum(each > WITHIN_S for each in seconds)
    return {
        "kills": num_kills, "survivors": len(seconds), "late": late, "wrong": wrong,
        "median_s": statistics.median(seconds), "most_s": seconds[-1],
    }  # fmt: skip


def measure_departures(worlds: list[int], kinds: tuple[str, ...]) -> dict[str, Any]:
    wrong, most_s, num = [], 0.0, 0
    for world in worlds:
        with Ranks(max(worlds)) as ranks:
            for kind, are_equal in itertools.product(kinds, (True, False)):
                seen = ranks.run("depart", kind=kind, world=world, are_equal=are_equal)[:world]
                wrong += complaints(kind, seen, within_s=WITHIN_S)
                if kind in AT_ONCE:
                    most_s = max(most_s, *(each.get("took_s", 0.0) for each in seen))
                num += 1
    return {"departures": num, "wrong": wrong, "most_s": most_s}


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nbytes", type=parse_bytes, default="64MiB", help="of the tensor that is gathered")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--worlds", type=numbers, default="2,3,4", help="numbers of ranks")
    parser.add_argument("--kinds", default=",".join(KINDS), help="of departures")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    logging.getLogger("tiered").setLevel(logging.CRITICAL)  # survivors say why they leave
    print(
        f"{platform.machine()}, {os.cpu_count()} CPUs, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}; ",
        end="",
    )
    print("the ceiling of a gather is one copy of the whole in memory")
    result: dict[str, Any] = {"bench": "ranks", "gathers": []}
    for world in args.worlds:
        row = measure_gathers(world, args.nbytes, args.pairs)
        result["gathers"].append(row)
        extra = ", ".join(f"{name} +{mib:.1f} MiB" for name, mib in row["extra_mib"].items())
        print(f"{world} ranks, {args.nbytes / MiB:.0f} MiB: {row['ratio']:.2f} of torch's gather's time,", end=" ")
        print(f"{row['over_copy']:.1f} copies; {extra}", flush=True)
    if args.kills:
        result["kills"] = kills = measure_kills(args.kills, args.seed)
        print(f"{kills['kills']} kills, {kills['survivors']} survivors: median {kills['median_s']:.3f} s,", end=" ")
        print(
            f"most {kills['most_s']:.3f} s, {kills['late']} beyond {WITHIN_S:g} s; wrong: {kills['wrong']}", flush=True
        )
    result["departures"] = departures = measure_departures(args.worlds, tuple(args.kinds.split(",")))
    print(
        f"{departures['departures']} departures, at once where the deadline of {max(DEADLINE_S.values()):g} s", end=" "
    )
    print(f"does not speak: most {departures['most_s']:.3f} s; wrong: {departures['wrong']}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()

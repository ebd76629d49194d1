#!/usr/bin/env python3
"""A training step through the tiers against the same step in memory, in alternating pairs.

Usage: python bench/train_step.py [--layers 8 --width 2048 --batch 4 --dram 1GiB --pairs 5 --steps 4 --store DIR]

Each turn trains the same GPT from the same seed: in memory (bf16 parameters, fp32 masters, fused AdamW) in a process of
its own, then through tiered with a commit each step in another. The first step of a turn warms up; a turn's figure is
the median of the others. One JSON line comes last.
"""

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from tiered.train.model import GPT, Shape

_FUSED = {"beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01, "eps": 1e-8, "amsgrad": False, "maximize": False}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("layers", 8), ("width", 2048), ("heads", 16), ("context", 256), ("batch", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--dram", default="1GiB")
    parser.add_argument("--update", default="backward", choices=("backward", "step"))
    parser.add_argument("--store", type=Path, default=None, help="where the store is made (default: a folder in runs/)")
    parser.add_argument("--turn", choices=("memory", "tiered"), help=argparse.SUPPRESS)
    return parser.parse_args()


def batch_of(args: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 256, (args.batch, args.context + 1), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def time_steps(num_steps: int, step: Callable[[], float]) -> dict[str, object]:
    seconds, losses = [], []
    for _ in range(num_steps):
        start = time.perf_counter()
        losses.append(step())
        seconds.append(time.perf_counter() - start)
    return {
        "seconds": seconds,
        "losses": losses,
        "rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def in_memory(args: argparse.Namespace, shape: Shape) -> dict[str, object]:
    torch.manual_seed(0)
    model = GPT(shape)
    masters = [p.detach().clone() for p in model.parameters()]
    model = model.bfloat16()
    moments = [(torch.zeros_like(w), torch.zeros_like(w), torch.zeros(())) for w in masters]
    inputs, targets = batch_of(args)

    def step() -> float:
        loss = model(inputs, targets)
        loss.backward()
        for p, w, (m, v, n) in zip(model.parameters(), masters, moments, strict=True):
            assert p.grad is not None
            n += 1
            torch._fused_adamw_([w], [p.grad.float()], [m], [v], [], [n], lr=1e-4, **_FUSED)
            p.data.copy_(w)
            p.grad = None
        return float(loss)

    return time_steps(args.steps, step)


def through_tiers(args: argparse.Namespace, shape: Shape) -> dict[str, object]:
    import tiered

    torch.manual_seed(0)
    with tiered.Store(args.store, dram=args.dram) as store:
        with tiered.construct(store):
            model = GPT(shape)
        model = tiered.shard(model, store, param_dtype=torch.bfloat16)
        optimizer = tiered.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, update=args.update)
        inputs, targets = batch_of(args)
        before = store.statistics()

        def step() -> float:
            loss = model(inputs, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            store.commit(wait=False)
            return float(loss)

        result = time_steps(args.steps, step)
        after = store.statistics()
        moved = shape.num_params * args.steps
        result["read_bytes_per_param"] = (after.read_bytes - before.read_bytes) / moved
        result["write_bytes_per_param"] = (after.write_bytes - before.write_bytes) / moved
        result["stall_seconds"] = after.stall_seconds - before.stall_seconds
    return result


def turn(args: argparse.Namespace, kind: str, store: Path) -> dict[str, object]:
    command = [sys.executable, __file__, "--turn", kind, "--store", str(store)]
    for name in ("layers", "width", "heads", "context", "batch", "steps", "dram", "update"):
        command += [f"--{name}", str(getattr(args, name))]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=1800).stdout
    shutil.rmtree(store, ignore_errors=True)
    result: dict[str, object] = json.loads(output.splitlines()[-1])
    return result


def main() -> None:
    args = arguments()
    shape = Shape(layers=args.layers, width=args.width, heads=args.heads, context=args.context)
    if args.turn:
        print(json.dumps({"memory": in_memory, "tiered": through_tiers}[args.turn](args, shape)))
        return
    print(f"{platform.platform()}, {os.cpu_count()} cores, torch {torch.__version__}")
    print(f"{shape.num_params / 1e6:.1f} M parameters, batch {args.batch} x {args.context}, dram {args.dram}")
    print("ceiling: the in-memory step itself, where compute hides 26 bytes per parameter (14 read, 12 written)")
    parent = args.store or Path("runs")
    parent.mkdir(parents=True, exist_ok=True)
    ratios, ours, theirs, last = [], [], [], {}
    with tempfile.TemporaryDirectory(dir=parent, prefix="bench-") as folder:
        for pair in range(args.pairs):
            memory = turn(args, "memory", Path(folder) / "store")
            last = turn(args, "tiered", Path(folder) / "store")
            theirs.append(statistics.median(memory["seconds"][1:]))
            ours.append(statistics.median(last["seconds"][1:]))
            ratios.append(ours[-1] / theirs[-1])
            same = memory["losses"] == last["losses"]
            print(f"pair {pair}: in memory {theirs[-1]:.3f} s, tiered {ours[-1]:.3f} s, ratio {ratios[-1]:.3f}")
            if not same:
                raise SystemExit("the losses differ: no figure is worth anything")
    result = {
        "bench": "train_step",
        "num_params": shape.num_params,
        "in_memory_s": statistics.median(theirs),
        "tiered_s": statistics.median(ours),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        **{
            name: last[name] for name in ("read_bytes_per_param", "write_bytes_per_param", "stall_seconds", "rss_bytes")
        },
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()

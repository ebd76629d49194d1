#!/usr/bin/env python3
"""What a state format costs in quality: the same small GPT trained on real text with each of them, curves plotted.

Usage: python bench/quality.py [--steps 1000 --seeds 3 --states exact,compact --plot FILE.png]

A byte-level GPT of bf16 parameters learns the source of Python's standard library; formats differ in nothing but
``state=`` of tiered.AdamW, whose update code runs (over a store in memory, parameters unsharded). Seeds set weights and
batches. Printed per format: the training loss averaged over the last steps, against exact's of the same seed. The bar
is 0.5 %. No figure here is one of speed. One JSON line comes last.
"""

import argparse
import json
import math
import platform
import statistics
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import tiered
from tiered.tools.train.task import GPT, Corpus, Loader, Shape

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LAST = 50
BAR = 0.005
TINY = {"steps": 6, "seeds": 1, "layers": 1, "width": 32, "heads": 2, "context": 16, "batch": 2}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--states", default="exact,compact", help="exact must be among them")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--plot", type=Path, help="where the curves go, as PNG")
    parser.add_argument("--tiny", action="store_true", help="a few steps of a very small model")
    args = parser.parse_args()
    if args.tiny:
        vars(args).update(TINY)
    args.states = args.states.split(",")
    if "exact" not in args.states:
        raise SystemExit("--states without exact; expected it among them: all others are compared with it")
    return args


def losses_of(state: str, seed: int, args: argparse.Namespace, corpus: Corpus) -> list[float]:
    """Train from ``seed`` with ``state``; return the loss of each step."""
    torch.manual_seed(seed)
    model = GPT(Shape(args.layers, args.width, args.heads, args.context)).bfloat16()
    loader = Loader(corpus, batch=args.batch, context=args.context, seed=seed)
    losses = []
    with tempfile.TemporaryDirectory(prefix="quality-") as folder:
        with tiered.Store(folder, dram="256MiB", engine="memory", durable=False) as store:
            optimizer = tiered.AdamW(
                model.named_parameters(), lr=args.lr, weight_decay=args.weight_decay, state=state, store=store
            )  # fmt: skip
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, args.steps))
            for _, (x, y) in zip(range(args.steps), loader, strict=False):
                loss = model(x, y)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                losses.append(loss.item())
    return losses


def rate(step: int, num_steps: int) -> float:
    """Return the factor of the learning rate: a warm-up over 5 % of the steps, then a cosine down to a tenth."""
    warm_up = max(1, num_steps // 20)
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.55 + 0.45 * math.cos(math.pi * (step - warm_up) / max(1, num_steps - warm_up))


def figure_of(curves: dict[str, list[list[float]]]) -> "Figure":
    """Draw the mean curve of each format, smoothed, and below it each format's difference from exact."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 7), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True)
    exact = smooth(curves["exact"])
    for state, runs in curves.items():
        curve = smooth(runs)
        top.plot(curve, label=state, linewidth=1)
        if state != "exact":
            bottom.plot([100 * (a / b - 1) for a, b in zip(curve, exact, strict=True)], label=state, linewidth=1)
    bottom.axhline(100 * BAR, color="grey", linestyle="--", linewidth=0.8)
    bottom.axhline(-100 * BAR, color="grey", linestyle="--", linewidth=0.8)
    bottom.set(xlabel="step", ylabel="loss over exact, %")
    top.set(ylabel="training loss, nats a byte", title=f"mean of the seeds and of {LAST} steps")
    top.legend()
    bottom.legend()
    return figure


def smooth(runs: list[list[float]]) -> list[float]:
    """Return the mean of the runs, each point averaged with up to 49 before it."""
    mean = [statistics.fmean(values) for values in zip(*runs, strict=True)]
    return [statistics.fmean(mean[max(0, i + 1 - LAST) : i + 1]) for i in range(len(mean))]


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    corpus = Corpus.of_standard_library()
    shape = Shape(args.layers, args.width, args.heads, args.context)
    print(f"{platform.machine()}, torch {torch.__version__}, Python {platform.python_version()}, tiered")
    print(
        f"{shape.num_params:,} parameters, {args.steps} steps of {args.batch} x {args.context} bytes of {corpus.name}"
    )
    print(f"ceiling: the loss of exact, which is plain PyTorch's; bar: within {100 * BAR:g} % of it")
    curves: dict[str, list[list[float]]] = {state: [] for state in args.states}
    for seed in range(args.seeds):
        for state in args.states:
            curves[state].append(losses_of(state, seed, args, corpus))
            final = statistics.fmean(curves[state][-1][-LAST:])
            print(f"seed {seed} {state:8} final loss {final:.5f}", flush=True)
    finals = {state: [statistics.fmean(run[-LAST:]) for run in runs] for state, runs in curves.items()}
    exact = statistics.fmean(finals["exact"])
    over = {state: statistics.fmean(values) / exact - 1 for state, values in finals.items()}
    for state in args.states:
        print(f"{state:8} {statistics.fmean(finals[state]):.5f}, {100 * over[state]:+.3f} % of exact")
    if args.plot:
        figure_of(curves).savefig(args.plot, dpi=110)
    result = {
        "bench": "quality", "num_params": shape.num_params, "steps": args.steps, "seeds": args.seeds, "finals": finals,
        "over_exact": over, "bar": BAR, "is_met": all(value <= BAR for value in over.values()),
    }  # fmt: skip
    print(json.dumps(result))


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""What the tiers cost where nothing has to move: training beside plain PyTorch, all of it held in DRAM.

Usage: python bench/overhead.py [--widths 92,512,2048 --units 24,24,8 --turns 6 --steps 10 --store DIR]

A chain of equal units, each two linear layers of --widths features: 0.017, 0.53 and 8.4 M parameters by default, fp32,
8 rows of input, durable=False. The sides take turns in one process; a turn waits for what the tiers have pending at its
end. Beside plain PyTorch and the two modes there is "hooks": plain PyTorch that updates each unit and drops its
gradients as they are final, the operations of update="backward" in their order. (What a gradient's memory costs depends
on when it is freed: plain PyTorch frees all of it at the end of a step, and may have to fault it in again.) Then one
more session of each kind counts the Python functions that it calls, which a busy machine does not change, and the
objects that the collector knows after steps 10 and 20. The ceiling is a ratio of 1. One JSON line comes last.
"""

import argparse
import gc
import json
import platform
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import tiered
from tiered.units import MiB, format_bytes

NUM_ROWS = 8
WARM_UP_STEPS = 4
MODES = ("backward", "step")
ROOT = Path(__file__).resolve().parents[1]


class Unit(nn.Module):
    """Two linear layers with a nonlinearity between them, added to their input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, width)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:  # (NUM_ROWS, width)
        return rows + self.down(nn.functional.gelu(self.up(rows)))


class Chain(nn.Module):
    """Units one after the other."""

    def __init__(self, width: int, num_units: int) -> None:
        super().__init__()
        self.units = nn.ModuleList(Unit(width) for _ in range(num_units))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:  # (NUM_ROWS, width)
        for unit in self.units:
            rows = unit(rows)
        return rows


class Side:
    """A model in training: in memory where there is no store, else through it with ``update`` as the mode says."""

    def __init__(self, width: int, num_units: int, store: tiered.Store | None = None, update: str = "step") -> None:
        torch.manual_seed(7)
        self.model = Chain(width, num_units)
        self.rows = torch.randn(NUM_ROWS, width)
        self.optimizer: torch.optim.Optimizer
        if store is None:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        else:
            tiered.shard(self.model, store, unit=Unit)
            self.optimizer = tiered.AdamW(self.model.parameters(), update=update)
        self._engine: Any = None if store is None else next(self.model.parameters()).segment.unit.engine  # type: ignore[attr-defined]

    def train(self, num_steps: int) -> tuple[float, float]:
        """Train, wait for what is pending, and return the seconds of one step, and the CPU seconds."""
        begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
        for _ in range(num_steps):
            self.model(self.rows).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        if self._engine is not None:
            self._engine.updates.finish_all()
        return (time.perf_counter() - begun_s) / num_steps, (time.process_time() - begun_cpu_s) / num_steps


class HookedSide(Side):
    """A model in memory whose units are updated in the backward, by hooks, as ``update="backward"`` does it."""

    def __init__(self, width: int, num_units: int) -> None:
        super().__init__(width, num_units)
        for unit in self.model.units:
            parameters = list(unit.parameters())
            optimizer = torch.optim.AdamW(parameters, fused=True)
            for parameter in parameters:
                parameter.register_post_accumulate_grad_hook(
                    lambda _, parameters=parameters, optimizer=optimizer: _update_if_final(parameters, optimizer)
                )


def _update_if_final(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    if all(parameter.grad is not None for parameter in parameters):
        optimizer.step()
        optimizer.zero_grad()


class CallCounter:
    """Counts the Python functions that are entered, by thread; generators count each time that they go on.

    Threads that were started before ``install`` are not seen.
    """

    def __init__(self) -> None:
        self.is_on = False
        self.calls: dict[str, Counter[str]] = {"training thread": Counter(), "other threads": Counter()}
        self._main = threading.get_ident()

    @contextmanager
    def install(self) -> Iterator[None]:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]  # as the documentation has it

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and self.is_on:
            who = "training thread" if threading.get_ident() == self._main else "other threads"
            code = frame.f_code
            self.calls[who][f"{_short(code.co_filename)}:{code.co_firstlineno} {code.co_name}"] += 1


def _short(filename: str) -> str:
    path = Path(filename)
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else "/".join(path.parts[-3:])


def budget_of(width: int, num_units: int) -> int:
    """Return a DRAM budget that holds parameters, state and gradients, and as much again."""
    return 2 * 16 * num_units * 2 * width * (width + 1) + 64 * MiB


def measure_time(width: int, num_units: int, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return the median ratios of the sides' steps, in time and in CPU time."""
    turns: list[dict[str, tuple[float, float]]] = []
    with in_stores(width, num_units, args) as sides:
        for side in sides.values():
            side.train(WARM_UP_STEPS)
        for turn in range(args.turns):
            order = list(sides.items())
            turns.append({name: side.train(args.steps) for name, side in (order if turn % 2 else reversed(order))})
    medians: dict[str, dict[str, float]] = {"time": {}, "cpu": {}, "time beside hooks": {}}
    for what, found in medians.items():
        index, beside = what == "cpu", "hooks" if what.endswith("hooks") else "plain"
        for mode in [*MODES, "hooks"] if beside == "plain" else ["backward"]:
            ratios = [turn[mode][index] / turn[beside][index] for turn in turns]
            found[mode] = statistics.median(ratios)
            name = f'update="{mode}"' if mode in MODES else "in memory, updated in hooks"
            print(f"  {name}: {found[mode]:.2f} times the {what} ({min(ratios):.2f} to {max(ratios):.2f})")
    plain_s = statistics.median(turn["plain"][0] for turn in turns)
    print(f"  a step in plain PyTorch: {1e3 * plain_s:.2f} ms, {args.turns} turns of {args.steps} steps")
    return medians


@contextmanager
def in_stores(width: int, num_units: int, args: argparse.Namespace) -> Iterator[dict[str, Side]]:
    """Open a store for each mode, and give the sides that train: plain, and one for each mode."""
    with tempfile.TemporaryDirectory(dir=args.store) as folder:
        dram = budget_of(width, num_units)
        stores = {mode: tiered.Store(Path(folder) / mode, dram=dram, durable=False) for mode in MODES}
        try:
            sides = {mode: Side(width, num_units, store, mode) for mode, store in stores.items()}
            yield {"plain": Side(width, num_units), "hooks": HookedSide(width, num_units), **sides}
        finally:
            for store in stores.values():
                store.close()


def count_calls(width: int, num_units: int, mode: str, args: argparse.Namespace) -> dict[str, float]:
    """Return the calls per unit and step by thread; print them and the ten functions with most."""
    counter = CallCounter()
    with counter.install(), tempfile.TemporaryDirectory(dir=args.store) as folder:
        with tiered.Store(Path(folder) / mode, dram=budget_of(width, num_units), durable=False) as store:
            side = Side(width, num_units, store, mode)
            side.train(WARM_UP_STEPS)
            counter.is_on = True
            side.train(args.steps)
            counter.is_on = False
    each = num_units * args.steps
    found = {who: calls.total() / each for who, calls in counter.calls.items()}
    print(f'  update="{mode}": Python calls per unit and step: ', end="")
    print(", ".join(f"{number:.0f} on the {who}" for who, number in found.items()))
    for name, number in sum(counter.calls.values(), Counter()).most_common(10):
        print(f"    {number / each:8.1f}  {name}")
    return found


def count_objects(width: int, num_units: int, mode: str, args: argparse.Namespace) -> list[int]:
    """Return how many objects the collector knows after steps 10 and 20."""
    found = []
    with tempfile.TemporaryDirectory(dir=args.store) as folder:
        with tiered.Store(Path(folder) / mode, dram=budget_of(width, num_units), durable=False) as store:
            side = Side(width, num_units, store, mode)
            for _ in range(2):
                side.train(10)
                for _ in range(3):  # each stops to look at tuples of what none looks at
                    gc.collect()
                found.append(len(gc.get_objects()))
    print(f'  update="{mode}": objects after steps 10 and 20: {found[0]:,} and {found[1]:,}')
    return found


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--widths", type=numbers, default="92,512,2048", help="features of the units of each case")
    parser.add_argument("--units", type=numbers, default="24,24,8", help="units of each case")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--steps", type=int, default=10, help="of a turn")
    parser.add_argument("--only", choices=("time", "counts"), default=None)
    parser.add_argument("--store", type=Path, default=ROOT / "runs", help="where folders for stores are made")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    args.store.mkdir(exist_ok=True)
    print(f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}, ", end="")
    print(f"{torch.get_num_threads()} threads; the ceiling is 1: nothing moves that plain PyTorch does not move")
    rows: list[dict[str, Any]] = []
    for width, num_units in zip(args.widths, args.units, strict=True):
        numel = 2 * width * (width + 1)
        print(f"{num_units} units of {numel / 1e6:.3f} M parameters, {format_bytes(budget_of(width, num_units))}:")
        row: dict[str, Any] = {"numel": numel, "units": num_units}
        if args.only != "counts":
            row["ratio"] = measure_time(width, num_units, args)
        if args.only != "time":
            counts: dict[str, Callable[..., Any]] = {"calls": count_calls, "objects": count_objects}
            for name, count in counts.items():
                row[name] = {mode: count(width, num_units, mode, args) for mode in MODES}
        rows.append(row)
    print(json.dumps({"bench": "overhead", "rows": rows}))


if __name__ == "__main__":
    main()

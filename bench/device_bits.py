#!/usr/bin/env python3
"""The bits of every model of tests/models.py trained on a compute device, against plain PyTorch on the same device.

Usage: python bench/device_bits.py [--device sim --models gpt,cnn --every 1 --processes 2]

All models x fp32, bf16 x update "step", "backward" x update_on "cpu", "device" x activations "keep", "recompute",
"swap" x device memory roomy, the smallest. Compared are losses, parameters, buffers, moments and masters, bit by bit.
On the simulated accelerator, "sim", a race of any two accesses is a failure, too. Each failure is one line; one JSON
line comes last.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the models

import torch  # order: the path first

import tiered
from tests.accelerator import simulated
from tests.accelerator.registrar import SimulatedRegistrar
from tests.accelerator.training import ROOMY_NBYTES, case_on, reference_on, smallest_device_memory
from tests.models import CASES
from tests.reference import Recipe, Trained
from tests.zero.training import Session, assert_same, start
from tiered.bytes.pinned_arena import add_registrar
from tiered.zero.activations import swapped_activations

__all__ = ["difference", "quick_directory", "swap_all_activations"]

DTYPES = {"fp32": None, "bf16": torch.bfloat16}
UPDATES = ("step", "backward")
PLACES = ("cpu", "device")
ACTIVATIONS = ("keep", "recompute", "swap")
BUDGETS = ("roomy", "smallest")


class Run(NamedTuple):
    """One training: a model and the settings that must not show in its bits."""

    model: str
    dtype: str
    update: str
    update_on: str
    activations: str
    budget: str

    def __str__(self) -> str:
        return " ".join(self)


def all_runs(models: list[str]) -> list[Run]:
    """Return the whole product, the runs of one reference beside each other."""
    return [Run(*each) for each in itertools.product(models, DTYPES, UPDATES, PLACES, ACTIVATIONS, BUDGETS)]


def start_process(device: str) -> None:
    """Get a process ready for runs on ``device``."""
    torch.set_num_threads(1)
    logging.getLogger("tiered").setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")  # of torch itself, on a device of another kind
    swap_all_activations()
    if device == "sim":
        simulated.enable()
        add_registrar("sim", SimulatedRegistrar())
    else:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True)


def swap_all_activations() -> None:
    """Have activations of any size swapped."""
    swapped_activations.SMALLEST_NBYTES = 1


def wrong_runs(device: str, runs: list[Run]) -> list[str]:
    """Make ``runs``, of one model and dtype, and return a line for each that is not as it must be."""
    found = []
    for run in runs:
        with tempfile.TemporaryDirectory(prefix="bits-", dir=quick_directory()) as place:
            wrong = what_is_wrong(device, run, Path(place))
        found += [f"{run}: {wrong}"] if wrong else []
    return found


def what_is_wrong(device: str, run: Run, place: Path) -> str:
    """Return what is wrong with ``run``, on one line; "" where nothing is."""
    recipe = Recipe(param_dtype=DTYPES[run.dtype])
    try:
        expected = reference_on(device, run.model, recipe, recomputes=run.activations == "recompute")
        _forget_races(device)
        options: dict[str, Any] = {"device": device, "update_on": run.update_on, "activations": run.activations}
        budget = ROOMY_NBYTES
        if run.budget == "smallest":
            budget = smallest_device_memory(run.model, recipe, place / "refused", **options)
            options["hold"] = 0
        _watch(device)
        with tiered.Store(place / "store", dram=ROOMY_NBYTES, device_memory=budget, durable=False) as store:
            if wrong := difference(start(case_on(device, run.model), recipe, store, run.update, **options), expected):
                return wrong
        races = simulated.races() if device == "sim" else []
        return f"{len(races)} races: {races[0]}" if races else ""
    except Exception as error:  # whatever it is, the other runs go on
        return " ".join(f"{type(error).__name__}: {error}".split())


def difference(session: Session, expected: Trained) -> str:
    """Train all steps; return which bits are not those of ``expected``, or that the budget was exceeded; or ""."""
    try:
        assert_same(session.run(), expected)
    except AssertionError as error:
        return " ".join(str(error).split())
    tier: Any = next(session.model.parameters()).segment.unit.tier  # type: ignore[attr-defined]
    peak, budget = sum(memory.peak_bytes for memory in tier.memories), session.store.device_memory
    return f"{peak} bytes of a device budget of {budget} were taken" if peak > budget else ""


def _forget_races(device: str) -> None:
    if device == "sim":
        simulated.reset()


def _watch(device: str) -> None:
    """Have the simulated device see accesses of the host to memory of copies in flight, and answer late."""
    if device == "sim":
        simulated.reset()
        simulated.guard_pinned()
        simulated.set_query_delay(2)


def quick_directory() -> str | None:
    """Return a directory in memory where there is one."""
    return "/dev/shm" if os.path.isdir("/dev/shm") else None


def in_processes(device: str, runs: list[Run], num_processes: int) -> Iterator[list[str]]:
    """Make ``runs`` in so many processes; yield the wrong ones of each reference as they come."""
    groups = [list(group) for _, group in itertools.groupby(runs, key=lambda run: (run.model, run.dtype))]
    if num_processes == 1:
        start_process(device)
        yield from (wrong_runs(device, group) for group in groups)
        return
    context = multiprocessing.get_context("spawn")  # a fork has no thread of autograd's
    # A process for each reference: the simulated device keeps a clock for every stream that there ever was.
    options: dict[str, Any] = {"mp_context": context, "max_tasks_per_child": 1}
    with ProcessPoolExecutor(num_processes, initializer=start_process, initargs=(device,), **options) as processes:
        yield from processes.map(wrong_runs, itertools.repeat(device), groups)


def main() -> int:
    """Make the runs; print a line for each wrong one, and one line of JSON; return 1 if there were any."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="sim", help="sim, or an accelerator of this machine such as cuda")
    parser.add_argument("--models", help=f"some of {','.join(CASES)} (default: all)")
    parser.add_argument("--every", type=int, default=1, help="make only each so-manieth run")
    parser.add_argument("--processes", type=int, default=1)
    args = parser.parse_args()
    if args.device == "sim" and simulated.refusal() is not None:
        parser.error(f"--device sim: {simulated.refusal()}")
    begun_s = time.monotonic()
    runs = all_runs(args.models.split(",") if args.models else list(CASES))[:: args.every]
    wrong: list[str] = []
    for number, found in enumerate(in_processes(args.device, runs, args.processes), 1):
        wrong += found
        for line in found:
            print(f"WRONG: {line}", flush=True)
        print(f"{number} references, {time.monotonic() - begun_s:.0f} s", file=sys.stderr, flush=True)
    seconds = round(time.monotonic() - begun_s, 1)
    result = {"bench": "device_bits", "device": args.device, "runs": len(runs), "wrong": len(wrong), "seconds": seconds}
    print(json.dumps(result))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

"""Which mutants of the device tier give wrong values on the fake CUDA, where the simulated device reports a race.

`python -m tests.rigs.fake_cuda DIR mutants` runs it; each mutant trains in a process of its own, forked before CUDA is
set up. What is not seen here needs another order of things than these trainings have. The last line is JSON.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections import Counter
from pathlib import Path

import pytest

import tiered
from tests.accelerator import mutants
from tests.accelerator.mutants import Mutant
from tests.accelerator.training import ROOMY_NBYTES, case_on, reference_on, smallest_device_memory
from tests.reference import Recipe
from tests.store.places import quick_directory, short_files
from tests.zero.training import assert_same, start
from tiered.zero.activations import swapped_activations

__all__ = ["main"]

TRAININGS = [  # case, where it is updated, when
    ("gpt", "cpu", "step"),
    ("gpt", "device", "step"),
    ("gpt", "cpu", "backward"),
    ("cnn", "cpu", "step"),
    ("gpt", "device", "backward"),
]
LIMIT_S = 120  # of a mutant, some of which wait for ever
ENDS = {0: "unseen", 3: "wrong values", 4: "an error", None: "no end"}


def _is_right(directory: Path) -> bool:
    """Train, and return whether everything has the bits of plain PyTorch."""
    swapped_activations.SMALLEST_NBYTES = 1
    for number, (case, update_on, update) in enumerate(TRAININGS):
        is_step = update == "step"
        recipe = Recipe(num_steps=3, num_micro_steps=2 if is_step else 1, max_norm=0.5 if is_step else None)
        options = {"device": "cuda", "update_on": update_on, "hold": 0, "activations": "swap"}
        budget = smallest_device_memory(case, recipe, directory / f"refused {number}", **options)
        with tiered.Store(directory / str(number), dram=ROOMY_NBYTES, device_memory=budget, durable=False) as store:
            trained = start(case_on("cuda", case), recipe, store, update, **options).run()
        try:
            assert_same(trained, reference_on("cuda", case, recipe, update_on))
        except AssertionError:
            return False
    return True


def _run(mutant: Mutant | None, directory: Path) -> None:
    """End the process with the status of what the mutant did, whatever it has left running."""
    for descriptor in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
    status = 4
    try:
        if mutant is not None:
            mutant.apply(pytest.MonkeyPatch())
        status = 0 if _is_right(directory) else 3
    finally:
        os._exit(status)


def _end(mutant: Mutant | None) -> str:
    with quick_directory() as directory, short_files():
        process = multiprocessing.get_context("fork").Process(target=_run, args=(mutant, directory))
        process.start()
        process.join(LIMIT_S)
        ended = process.exitcode
        process.kill()
        process.join()
    return ENDS.get(ended, f"status {ended}")


def main() -> int:
    """Print what each mutant did; return 1 where the tier itself is not right, or no mutant is seen."""
    counts: Counter[str] = Counter()
    if (end := _end(None)) != "unseen":
        print(f"the tier without a mutant: {end}")
        return 1
    for mutant in mutants.found():
        end = _end(mutant)
        counts[end] += 1
        print(f"{end}: {mutant}", flush=True)
    print(json.dumps(counts))
    return int(counts["wrong values"] == 0)


if __name__ == "__main__":
    sys.exit(main())

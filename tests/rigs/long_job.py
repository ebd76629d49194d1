"""The process of the soak: it swaps, commits and trains, cycle by cycle, and says after each what it still holds.

usage: python -m tests.rigs.long_job DIRECTORY; a cycle's number per line on stdin, a line of JSON for each on stdout.
Every cycle makes its own stores and removes them. A drive that is full may refuse anything: what was committed must
then be there when the store is opened again. Anything else that goes wrong is reported as "wrong".
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import random
import shutil
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

import tiered
from tests.rigs.job import put_generation, violation
from tests.store.rig import numbers
from tiered.errors import CapacityError, DeviceError
from tiered.store.store import Store
from tiered.units import KiB, MiB

__all__: list[str] = []

_DRAM = "16MiB"
_REFUSALS = (CapacityError, DeviceError)  # SQLite's CANTOPEN and IOERR, where a full drive has no room for a journal


def swap(place: Path, rng: random.Random) -> None:
    """Swap three times the budget in and out of a store without commits."""
    with Store(place, dram=_DRAM, durable=False, engine=rng.choice(("auto", "threads"))) as store:
        values = {f"key {seed}": (rng.choice((900, 70 * KiB, 3 * MiB)), seed) for seed in range(32)}
        for name, (nbytes, seed) in values.items():
            store[name] = numbers(nbytes, seed)
        for name, (nbytes, seed) in rng.sample(sorted(values.items()), len(values)):
            assert torch.equal(store[name], numbers(nbytes, seed)), f"{name} has other bytes"


def commit(place: Path, rng: random.Random) -> None:
    """Commit generations; what the drive refuses must leave the last one."""
    seed, durable = rng.getrandbits(30), 0
    for _ in range(3):
        sealed = durable
        try:
            with Store(place, dram=_DRAM, engine=rng.choice(("auto", "threads"))) as store:
                for generation in range(store.generation + 1, store.generation + 4):
                    put_generation(store, seed, generation)
                    sealed = generation
                    store.commit({"generation": generation})
                    durable = generation
        except _REFUSALS:
            pass
        if not (place / "catalog.db").exists():
            assert not durable, "the store is gone"
            continue
        while True:  # a full drive may refuse to open it, too
            found, wrong = violation([place], seed, durable, sealed)
            if found >= 0 or "cannot be used" not in wrong or "Corruption" in wrong:
                break
        assert not wrong, wrong
        durable = found


def train(place: Path, rng: random.Random) -> None:
    """Train some steps of a small model, with a commit after each."""
    torch.manual_seed(rng.getrandbits(30))
    with Store(place, dram=_DRAM) as store:
        with tiered.construct(store):
            built = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(6)))
        model = tiered.shard(built, store)
        optimizer = tiered.AdamW(model.parameters(), lr=1e-3)
        for step in range(3):
            model(torch.randn(8, 256)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            store.commit({"step": step})


JOBS: tuple[Callable[[Path, random.Random], None], ...] = (swap, commit, train)


def cycle(directory: Path, number: int) -> dict[str, object]:
    """Run one cycle and return what it came to, and what the process holds after it."""
    job, place = JOBS[number % len(JOBS)], directory / f"store-{number}"
    wrong, is_refused = "", False
    try:
        job(place, random.Random(number))
    except _REFUSALS:
        is_refused = True
    except BaseException:
        wrong = f"{job.__name__}, cycle {number}: {traceback.format_exc()[-1500:]}"
    shutil.rmtree(place, ignore_errors=True)
    gc.collect()
    return {
        "cycle": number, "wrong": wrong, "refused": is_refused, "rss_kib": anonymous_kib(),
        "descriptors": len(os.listdir("/proc/self/fd")), "threads": threading.active_count(),
        "left": sorted(set(os.listdir(directory)) - {"lost+found", "balloon"}),
    }  # fmt: skip


def anonymous_kib() -> int:
    """Return the memory of this process that no file is behind, without what malloc keeps of what was freed."""
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


def main() -> None:
    """Run a cycle for each number on stdin."""
    torch.set_num_threads(1)
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(cycle(Path(sys.argv[1]), int(line))), flush=True)


if __name__ == "__main__":
    main()

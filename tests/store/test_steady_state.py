"""In the steady state nothing grows: no memory of Python's, no pages of the arena, no file."""

from __future__ import annotations

import gc
import tracemalloc
from pathlib import Path

import torch

from tiered.store.store import Store
from tiered.units import KiB, MiB

KEYS = [f"k{i}" for i in range(40)]


def cycle(store: Store, step: int, out: torch.Tensor) -> None:
    """Use one key in every way, and commit now and then; half of the keys fit into DRAM."""
    key = KEYS[step % len(KEYS)]
    store.prefetch([KEYS[(step + 1) % len(KEYS)], KEYS[(step + 2) % len(KEYS)]])
    with store.lease(key, "rw") as view:
        view[0] = step % 200
    store.working_set.swap_out([key])
    store.get(KEYS[(step + 7) % len(KEYS)], out=out)
    if step % len(KEYS) == 0:
        store.put_many((f"small{i}", out[:4096]) for i in range(10))
        store.get_many(f"small{i}" for i in range(10))
        store.commit()


def test_a_thousand_cycles_leave_nothing_behind(tmp_path: Path) -> None:
    out = torch.empty(512 * KiB, dtype=torch.uint8)
    with Store(tmp_path / "run", dram=10 * MiB) as store:
        store.put_many((key, torch.ones_like(out)) for key in KEYS)
        for step in range(200):
            cycle(store, step, out)
        tracemalloc.start()
        try:
            for step in range(80):  # what is made once and kept is made here, under the tracer
                cycle(store, step, out)
            gc.collect()
            before = tracemalloc.get_traced_memory()[0]
            arena, files = store._parts.arena.discarded_nbytes, store.statistics().file_bytes
            for step in range(1000):
                cycle(store, step, out)
            gc.collect()
            assert tracemalloc.get_traced_memory()[0] - before < 64 * KiB
        finally:
            tracemalloc.stop()
        # Of 500 MiB that went through. Buffers of 320 KiB come between those of 512; when, depends on the drive.
        assert store._parts.arena.discarded_nbytes - arena <= 4 * MiB
        assert store.statistics().file_bytes == files

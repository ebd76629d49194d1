"""A store job whose every generation is known beforehand: what it puts and deletes follows from seed and number.

So a job that was cut short goes on where the store stands, and whoever looks later knows what must be there.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from tests.store.rig import numbers
from tiered.errors import TieredError
from tiered.store.store import Store
from tiered.units import KiB, MiB

__all__ = ["MUTANTS", "contents", "put_generation", "run", "violation"]

NAMES = tuple("abcdefgh")
SIZES = (100, 5_000, 12 * KiB, 70 * KiB, 300 * KiB, 4 * MiB + 5_000)  # inline, in pages, odd, and of two blocks
DRAM = "16MiB"


def changes(seed: int, generation: int) -> dict[str, tuple[int, int] | None]:
    """Return what ``generation`` changes: sizes in bytes and seeds of what is put, None for what is deleted."""
    rng = random.Random(f"{seed}/{generation}")
    names = rng.sample(NAMES, rng.randint(2, 5))
    return {
        name: None if rng.random() < 0.15 else (rng.choices(SIZES, (3, 4, 4, 3, 2, 1))[0], rng.getrandbits(30))
        for name in names
    }


def contents(seed: int, generation: int) -> dict[str, tuple[int, int]]:
    """Return what a store at ``generation`` holds: size and seed of each key."""
    held: dict[str, tuple[int, int]] = {}
    for number in range(1, generation + 1):
        for name, change in changes(seed, number).items():
            held.pop(name, None)
            if change is not None:
                held[name] = change
    return held


def put_generation(store: Store, seed: int, generation: int) -> None:
    """Make ``store``, which holds the generation before, hold ``generation``; without a commit."""
    for name, change in changes(seed, generation).items():
        if change is not None:
            store[name] = numbers(*change)
        elif name in store:
            del store[name]


def run(
    directories: Sequence[str], seed: int, num_generations: int, engine: str, report: Callable[[str, int], None]
) -> None:
    """Go on with the job in ``directories`` for so many generations; ``report`` "sealed" before and "durable" after.

    Raises TieredError; the store is closed then.
    """
    with Store(*directories, dram=DRAM, engine=engine) as store:
        report("opened", store.generation)
        first = store.generation + 1
        for generation in range(first, first + num_generations):
            put_generation(store, seed, generation)
            report("sealed", generation)
            store.commit({"generation": generation}, wait=generation % 3 != 0)
            store.wait_for_commit()
            report("durable", generation)


def violation(
    directories: Sequence[str | Path], seed: int, acknowledged: int, sealed: int, engine: str = "auto"
) -> tuple[int, str]:
    """Open the store and return its generation and what is wrong with it; "" when all is as it must be."""
    try:
        with Store(*directories, dram=DRAM, engine=engine) as store:
            return store.generation, _violation(store, seed, acknowledged, sealed)
    except TieredError as error:
        return -1, f"cannot be used: {error!r}"


def _violation(store: Store, seed: int, acknowledged: int, sealed: int) -> str:
    found = store.generation
    if not acknowledged <= found <= sealed:
        return f"generation {found}; acknowledged {acknowledged}, sealed {sealed}"
    if found and store.state != {"generation": found}:
        return f"state {store.state} with generation {found}"
    expected = contents(seed, found)
    if set(store) != set(expected):
        return f"keys {sorted(store)}, expected {sorted(expected)}"
    for name, (nbytes, value_seed) in expected.items():
        if not torch.equal(store[name], numbers(nbytes, value_seed)):
            return f"{name!r} of generation {found} has other bytes"
    report = store.verify()
    return "" if report.is_clean else f"verify: {report.errors}"


def _without_data_flush() -> None:
    """The data files are never flushed."""
    from tiered.bytes.device.files import DataFiles

    DataFiles.flush = lambda files, fdatasync: None  # type: ignore[method-assign,assignment,misc]


def _without_catalog_flush() -> None:
    """SQLite does not flush."""
    import tiered.store.catalog.sqlite_catalog as catalog
    from tiered.store.catalog.sqlite_file import make_durable

    def make_fast(connection: object) -> None:
        make_durable(connection)  # type: ignore[arg-type]
        connection.execute("PRAGMA synchronous=OFF")  # type: ignore[attr-defined]

    catalog.make_durable = make_fast


MUTANTS: dict[str, Callable[[], None]] = {
    "no data flush": _without_data_flush,
    "no catalog flush": _without_catalog_flush,
}
"""Bugs to seed into a process, which is of no use afterwards."""

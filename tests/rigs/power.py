"""The campaign that cuts the power under a running store job, again and again, and looks at what is left.

What counts as acknowledged was said before the cut. Once, in 200 cuts of XFS on a busy machine, a generation that was
reported durable after the cut had begun was not there afterwards. It is not explained: that XFS answers an fsync with
success which a shutdown overtook is a guess that nobody has confirmed.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.rigs.children import Nursery
from tests.rigs.drives import PowerRig
from tests.rigs.job import violation

__all__ = ["Cut", "campaign"]

_NUM_GENERATIONS = 6
_CUTS_PER_STORE = 5
_ENGINES = ("auto", "threads")  # io_uring where there is one


@dataclass(frozen=True, slots=True)
class Cut:
    """One power cut: the generations before it and after, and what is wrong."""

    seed: int
    acknowledged: int
    sealed: int
    found: int
    wrong: str

    @property
    def is_inside_commit(self) -> bool:
        return self.sealed > self.acknowledged


def campaign(rig: PowerRig, nursery: Nursery, seeds: Iterator[int] | range, *, mutant: str = "") -> Iterator[Cut]:
    """Cut the power once per seed while a job runs, restore it, and look at the store; every few cuts on a new store.

    The job of the next seed goes on where the last one was cut.
    """
    num_operations, job_seed = 0, 0
    times: list[float] = []
    for number, seed in enumerate(seeds):
        if number % _CUTS_PER_STORE == 0:
            places = _new_store(rig, job_seed)
            job_seed, found = seed, 0
        rng = random.Random(f"{seed}/{mutant}")
        engine = rng.choice(_ENGINES)
        request = {
            "directories": [str(place) for place in places], "seed": job_seed, "engine": engine, "mutant": mutant,
            "num_generations": _NUM_GENERATIONS,
        }  # fmt: skip
        if not times:  # how long a job takes and how much it writes, on a store of its own
            measured = _new_store(rig, -1)
            rig.prepare(rng, 0)
            life = nursery.run(request | {"directories": [str(place) for place in measured]})
            if life.complaint or life.error:
                raise RuntimeError(f"an undisturbed job failed: {life}")
            times = life.times
            rig.cut()
            num_operations = rig.restore()
        chosen = rig.prepare(rng, num_operations if rng.random() < 0.9 else 0)
        after = len(times) + 1 if chosen else rng.randint(0, len(times) - 1)
        delay_s = rng.uniform(0, 1.5) * times[-1] / len(times)
        life = nursery.run(request, cut=rig.cut, after=after, delay_s=delay_s, kill=rng.random() < 0.5)
        rig.restore()
        acknowledged, sealed = max(life.acknowledged, found), max(life.sealed, found)
        found, wrong = violation(places, job_seed, acknowledged, sealed, engine)
        yield Cut(seed, acknowledged, sealed, found, life.complaint or wrong)
        if wrong:
            _new_store(rig, job_seed)
            return


def _new_store(rig: PowerRig, job_seed: int) -> list[Path]:
    """Return directories for a new store, and remove those of the one before."""
    places = []
    for mount in rig.mounts:
        for old in mount.glob("store-*"):
            shutil.rmtree(old)
        place = mount / f"store-{os.urandom(3).hex()}"
        place.mkdir(mode=0o700)
        places.append(place)
    return places

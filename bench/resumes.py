"""One run of `tiered train` killed many times, anywhere, and resumed each time: it must be the undisturbed run.

Equal are every tensor of the store (parameters and moments), the committed state (random numbers, the place in the
data), and the loss of every step that any life made, to the last bit.
"""

from __future__ import annotations

import random
import shutil
import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.kills import Campaign, digests
from bench.nursery import Instant, Life

__all__ = ["Resumed", "campaign_of", "resume_many"]

_MOST_STEPS_PER_LIFE = 2
_RUN = "killed"


@dataclass(frozen=True, slots=True)
class Resumed:
    """What became of one run: how often it was killed, in how many lives it lost no step, and what is wrong."""

    num_kills: int
    num_inside_commit: int
    num_repeated_steps: int  # steps that a kill undid and a later life made again
    wrong: str


@contextmanager
def campaign_of(num_kills: int, seed: int) -> Iterator[Campaign]:
    """Give a campaign with steps enough for so many kills, in a directory that goes at the end."""
    with tempfile.TemporaryDirectory(prefix="resume-") as root:
        num_steps = (_MOST_STEPS_PER_LIFE + 1) * num_kills
        with closing(Campaign(Path(root), seed=seed, num_steps=num_steps, options=("--seed", str(seed)))) as campaign:
            yield campaign


def resume_many(campaign: Campaign, *, seed: int, num_kills: int, more: Sequence[str] = ()) -> Resumed:
    """Kill one run ``num_kills`` times, let it end, and compare it; ``more`` are options that the lives have."""
    shutil.rmtree(campaign.root / _RUN, ignore_errors=True)
    lives = list(_lives(campaign, random.Random(seed), num_kills, more))
    wrong = "; ".join(_differences(campaign, lives))
    num_losses = sum(len(life.losses()) for life in lives)
    num_inside = sum(life.is_inside_commit for life in lives[:-1])
    return Resumed(len(lives) - 1, num_inside, num_losses - campaign.num_steps, wrong)


def _lives(campaign: Campaign, rng: random.Random, num_kills: int, more: Sequence[str]) -> Iterator[Life]:
    """Yield the lives that were killed, then the last one, which ends by itself."""
    kills, argv = 0, campaign.argv(_RUN, "--resume", *more)
    while kills < num_kills:
        life = campaign.nursery.run(argv, _somewhere(campaign.undisturbed, rng))
        if life.status == -signal.SIGKILL:
            kills += 1
            yield life
        elif life.status != 0:
            raise RuntimeError(f"a life ended with {life.status} after {kills} kills; see {campaign.nursery.log}")
        else:
            raise RuntimeError(f"the run was finished after {kills} of {num_kills} kills")
    yield campaign.nursery.run(argv)


def _somewhere(life: Life, rng: random.Random) -> Instant:
    """Return an instant before a few steps are durable, evenly in time."""
    return life.instant(rng.uniform(0, life.times("durable")[_MOST_STEPS_PER_LIFE - 1]))


def _differences(campaign: Campaign, lives: list[Life]) -> Iterator[str]:
    if lives[-1].status != 0:
        yield f"the last life ended with {lives[-1].status}"
        return
    durable = 0
    for number, life in enumerate(lives):
        found = life.generations("opened")
        if found and found[0] < durable:
            yield f"life {number} found generation {found[0]}, {durable} was durable"
        durable = max(durable, life.durable)
    expected = dict(campaign.undisturbed.losses())
    made = [step_and_loss for life in lives for step_and_loss in life.losses()]
    other = [step for step, loss in made if loss != expected.get(step)]
    if other or {step for step, _ in made} != set(expected):
        yield f"other losses in steps {other}, made are {sorted({step for step, _ in made})}"
    if digests(campaign.root / _RUN) != campaign.digests:
        yield "other parameters or moments"
    if _state(campaign.root / _RUN) != _state(campaign.root / "undisturbed"):
        yield "another committed state: random numbers, or the place in the data"


def _state(directory: Path) -> str:
    """Return the text of all that rides along with the last commit."""
    from tiered.store.catalog.sqlite_catalog import SqliteCatalog

    with closing(SqliteCatalog(directory / "catalog.db", read_only=True)) as catalog:
        return catalog.load()[0].state

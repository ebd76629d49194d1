"""Training over ranks that is killed many times, one rank or all at once: at its end it must be the undisturbed run.

Ranks are forked, with gloo between them. They train a small model, commit after each step, and report their opening,
their steps, and the parts of each commit; the parent kills some moment after a report, and starts all again in the same
directory. At the end equal are the parameters, masters, moments and numbers of updates, the random numbers of each
rank, and the loss of every step that any life made, to the last bit.

And crashes at each change of the files in a switch to another number of ranks, an opening, a commit, gc: see
tests/ranks/crash_states.py, which says what is wrong with one.
"""

from __future__ import annotations

import functools
import importlib
import io
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.ranks.commits import begun, opened
from tests.ranks.crash_states import ACTIONS, LOSSES, CrashStates, Rig, discarding, interrupted
from tests.ranks.processes import Ranks, case
from tests.ranks.training import digests_of
from tests.rigs.room import room
from tiered.store.catalog.sqlite_catalog import SqliteCatalog
from tiered.store.generations.commit import Committer
from tiered.store.lifetime.confirmation import RanksConfirmation
from tiered.zero.shard import stay_eager

__all__ = ["KILLS_A_RUN", "RankKill", "crashes_of_a_switch", "kill_many"]

KILLS_A_RUN = 20
_MOST_STEPS_PER_LIFE = 3
_MOST_REPORTS = 14  # of one rank, from its beginning into its second step
_MOST_DELAY_S = 0.02  # beyond a report: as long as a commit lasts
_LIMIT_S = 240.0  # of a life, on a busy machine
_SURVIVOR_S = 90.0


@dataclass(frozen=True, slots=True)
class RankKill:
    """One kill: how many ranks it struck, after which report, and what was confirmed and found."""

    num_victims: int
    after: str  # the last report of the rank that was listened to
    is_inside_commit: bool  # on some rank
    confirmed: int  # the last generation that any rank knew to be confirmed
    found: int  # the one that the next life opened that came so far
    survivor: str = ""  # what the survivor said, where it did not name a victim

    @property
    def is_lost(self) -> bool:
        """Whether a confirmed generation was lost."""
        return self.found < self.confirmed


def kill_many(num_kills: int, seed: int, *, world: int = 2) -> tuple[list[RankKill], str]:
    """Kill one run ``num_kills`` times and let it end; return the kills, and what was wrong, "" for nothing."""
    _warm_up()
    with tempfile.TemporaryDirectory(prefix="soak-ranks-") as directory:
        run = _Run(Path(directory), num_kills, seed, world)
        return run.kills, "; ".join(run.differences())


@functools.cache
def _warm_up() -> None:
    """Import once what the first sharded model and the first optimizer of each rank would: seconds a life."""
    importlib.import_module("torch._dynamo")
    stay_eager(torch.nn.Module())


class _Run:
    """A run that was killed, and the undisturbed one."""

    def __init__(self, root: Path, num_kills: int, seed: int, world: int) -> None:
        self._random = random.Random(seed)
        self._world = world
        self._options = {
            "num_steps": _MOST_STEPS_PER_LIFE * num_kills + 1, "dtype": ("fp32", "bf16")[seed // 2 % 2],
            "update": ("step", "backward")[seed % 2], "waits": seed // 4 % 2 == 0,
        }  # fmt: skip
        self.undisturbed = self._life(root / "undisturbed").to_the_end()
        lives = [self._life(root / "killed", self._random) for _ in range(num_kills)]
        self.last = self._life(root / "killed").to_the_end()
        self.lives = [*lives, self.last]
        confirmed = 0
        self.kills = []
        for number, life in enumerate(lives):
            confirmed = max(confirmed, *life.confirmed)
            found = next(min(after.found.values()) for after in self.lives[number + 1 :] if after.found)
            self.kills.append(life.kill(confirmed, found))

    def _life(self, path: Path, rng: random.Random | None = None) -> _Life:
        life = _Life(self._world)
        with Ranks(self._world, limit_s=_LIMIT_S) as ranks:
            ranks.start("train_reported", path=str(path), **self._options)
            life.follow(ranks, rng)
        return life

    def differences(self) -> Iterator[str]:
        """Say what is not as in the undisturbed run, and what was lost."""
        for number, kill in enumerate(self.kills):
            if kill.is_lost or kill.survivor:
                yield f"kill {number}: {kill}"
        for number, life in enumerate(self.lives):
            if len(set(life.found.values())) > 1:
                yield f"life {number}: the ranks opened {life.found}"
        for rank in range(self._world):
            expected = dict(self.undisturbed.losses[rank])
            made = [each for life in self.lives for each in life.losses[rank]]
            other = sorted({step for step, loss in made if loss != expected[step]})
            if other or len({step for step, _ in made}) != len(expected):
                yield f"rank {rank}: other losses in steps {other} of {len(made)}"
            for word, value in self.undisturbed.results[rank].items():
                if self.last.results[rank][word] != value:
                    yield f"rank {rank}: other {word}"


class _Life:
    """What the ranks of one life have reported."""

    def __init__(self, world: int) -> None:
        self.words: list[list[str]] = [[] for _ in range(world)]
        self.losses: list[list[tuple[int, str]]] = [[] for _ in range(world)]
        self.confirmed = [0] * world
        self.found: dict[int, int] = {}  # rank -> the generation that it has opened
        self.results: list[dict[str, Any]] = [{} for _ in range(world)]
        self.victims: list[int] = []
        self._after = ""
        self._survivors: list[str] = []

    def follow(self, ranks: Ranks, rng: random.Random | None) -> None:
        """Read all reports to the end, and kill at an instant of ``rng``."""
        if rng is not None:
            for rank in range(ranks.world):  # both have met: what torch does before is not ours
                self._take(rank, ranks.line(rank))
            self._kill(ranks, rng)
            return
        living = set(range(ranks.world))
        while living:
            for rank in sorted(living):
                if not self._take(rank, ranks.line(rank)):
                    living.discard(rank)

    def _kill(self, ranks: Ranks, rng: random.Random) -> None:
        listened = rng.randrange(ranks.world)
        for _ in range(rng.randrange(_MOST_REPORTS)):
            self._take(listened, ranks.line(listened))
        self._after = self.words[listened][-1]
        time.sleep(rng.choice((0.0, rng.random() * _MOST_DELAY_S)))
        self.victims = list(range(ranks.world)) if rng.random() < 0.5 else [rng.randrange(ranks.world)]
        for victim in self.victims:
            os.kill(ranks.pids[victim], signal.SIGKILL)
        for victim in self.victims:
            assert ranks.wait_for(victim) == -signal.SIGKILL
            while self._take(victim, ranks.line(victim)):
                pass
        for rank in set(range(ranks.world)) - set(self.victims):
            self._end_survivor(ranks, rank)

    def _end_survivor(self, ranks: Ranks, rank: int) -> None:
        """Hear what a survivor says; one that has met nobody yet waits longer than torchrun does, which ends it."""
        if "opened" not in self.words[self.victims[0]]:
            os.kill(ranks.pids[rank], signal.SIGKILL)
            ranks.wait_for(rank)
            return
        while (line := ranks.line(rank, _SURVIVOR_S)) is not None and self._take(rank, line):
            pass
        said = (line or {}).get("raised", f"{line}"[:200])
        if not any(f"rank {victim}" in said for victim in self.victims):
            self._survivors.append(said)

    def _take(self, rank: int, line: Any) -> bool:
        """Take a line of ``rank``; return whether others may follow."""
        if line is None or "raised" in line:
            if not self.victims:
                raise RuntimeError(f"rank {rank} has ended: {line and line['raised']}")
            return False
        if "result" in line:
            self.results[rank] = line["result"]
            return False
        self.words[rank].append(line["at"])
        if line["at"] == "loss":
            self.losses[rank].append((line["step"], line["loss"]))
        if line["at"] == "opened":
            self.found[rank] = line["generation"]
        if line["at"] == "confirmed":
            self.confirmed[rank] = line["generation"]
        return True

    def to_the_end(self) -> _Life:
        """Return this life, which nothing has ended."""
        assert all(self.results), "the run has ended"
        return self

    def kill(self, confirmed: int, found: int) -> RankKill:
        """Return the kill that ended this life; ``found`` is what the next one opened."""
        is_inside = any(words.count("flush") > words.count("confirmed") for words in self.words)
        return RankKill(len(self.victims), self._after, is_inside, confirmed, found, "; ".join(self._survivors))


_PARTS = 8  # of an action's changes: each seed takes one
_MOST_CHANGES = 1000  # of a rank in a switch
_AGAIN = (("2 to 1", 0.6), ("1 to 2", 0.55), ("2 to 3", 0.3))  # killed at which share of the changes, and done again


@contextmanager
def crashes_of_a_switch() -> Iterator[Callable[[int], tuple[int, list[str]]]]:
    """Lend a function of a seed, that looks at crashes of one action; it returns how many, and what was wrong.

    At every eighth change all ranks are killed, and lose power in several ways; at half of these one rank is killed.
    """
    _warm_up()
    with room() as made, Ranks(3, limit_s=_LIMIT_S) as ranks:
        rig = Rig(made, made.daemon("recorded"), ranks, lambda world: Ranks(world, limit_s=_LIMIT_S))
        recorded: list[Callable[[], CrashStates]] = [
            *(functools.partial(CrashStates.of, rig, action) for action in ACTIONS.values()),
            *(functools.partial(discarding, rig, world) for world in (2, 3)),
            *(functools.partial(interrupted, rig, name, share) for name, share in _AGAIN),
        ]

        def look(seed: int) -> tuple[int, list[str]]:
            number, part = seed % len(recorded), seed // len(recorded)
            with redirect_stdout(io.StringIO()):  # of gc
                states = recorded[number]()
            for change in range(part % _PARTS, len(states.changes) + 1, _PARTS):
                states.kill_all(change, goes_on=part % 4 == 0)
                for other, loss in enumerate(LOSSES):
                    states.cut_power(change, loss, len(LOSSES) * part + other, goes_on=part % 4 == 1)
            if states.action.kind == "open" and states.action.by > 1:
                for victim in range(states.action.by):
                    changes = range(part % _PARTS, _MOST_CHANGES, 2 * _PARTS)
                    next(change for change in changes if not states.kill_one(victim, change))
            return states.num_opened, states.wrong

        yield look


# -- in a rank -----------------------------------------------------------------------------------------------------


def _reported(send: Callable[[Any], None], word: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        send({"at": word})
        return real(*args, **options)

    return call


@case
def train_reported(
    send: Callable[[Any], None], *, path: str, num_steps: int, dtype: str, update: str, waits: bool
) -> dict[str, Any]:
    """Train to the end with a commit after each step, and report what is done."""
    group: Any = dist.group.WORLD
    confirm = RanksConfirmation.confirm

    def confirmed(self: Any, generation: Any, note_wait: Any) -> None:
        send({"at": "confirm"})
        confirm(self, generation, note_wait)
        send({"at": "confirmed", "generation": generation.number})

    with ExitStack() as stack:
        for word, (owner, name) in {"flush": (Committer, "_write"), "catalog": (SqliteCatalog, "apply")}.items():
            call = _reported(send, word, getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, call))
        stack.enter_context(mock.patch.object(RanksConfirmation, "confirm", confirmed))
        send({"at": "begun"})
        store = stack.enter_context(opened(path, group))
        send({"at": "opened", "generation": store.generation})
        session, first = begun(store, group, model="odd_sizes", dtype=dtype, update=update)
        if not first:
            torch.manual_seed(1000 + group.rank())
        for step in range(first, num_steps):
            send({"at": "step"})
            session.run_step(step)
            send({"at": "loss", "step": step, "loss": session.trained.losses[-1].item().hex()})
            store.commit({"step": step + 1, "rank": group.rank()}, wait=waits)
        store.wait_for_commit()
        trained = session.collect()
        trained.losses, trained.norms = [], []
        return digests_of(trained) | {"random numbers": torch.randint(1 << 30, ()).item(), "step": store.state["step"]}

"""Crash states of stores over ranks on real files: at each change of a switch to other ranks, an opening, a commit, gc.

The action runs once on a file system that records its changes; of these every directory is made that a kill of all
ranks, or a power cut, can leave. A kill of one rank is done for each: what the others still do is theirs. The product
opens what was left, with as many ranks as before and with the others: all have one generation, with the bytes and
states of the undisturbed run, and can commit.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tests.ranks.processes import Ranks
from tests.rigs.recorded_files import Change, Image, Loss, read_changes
from tests.rigs.room import Daemon, Room
from tiered.tools.cli import main

__all__ = ["ACTIONS", "LOSSES", "Action", "CrashStates", "Rig", "discarding", "interrupted"]

_MODEL = {"model": "odd_sizes", "dtype": "bf16"}
_NUM_STEPS = 2
_LATER = 100  # so many steps later is the commit of ``show``
LOSSES: tuple[Loss, ...] = ("drop", "subset", "subset", "torn")

Shown = dict[str, Any]  # what one rank has: "keys", "states", "step", "is_clean"; or its "error"


class Action(NamedTuple):
    """What ``by`` ranks do to a run that the numbers of ``prepared`` have opened before, one after the other.

    "open": open it, and commit; "commit": train a step, and commit; "gc": remove the sets that it has left.
    ``other`` is another number of ranks that is to find the run afterwards.
    """

    kind: str
    prepared: tuple[int, ...]
    by: int
    other: int


ACTIONS = {
    "2 to 1": Action("open", (2,), 1, 2),
    "1 to 2": Action("open", (1,), 2, 1),
    "2 to 3": Action("open", (2,), 3, 2),
    "3 to 2, which were there before": Action("open", (2, 3), 2, 3),
    "gc after 2 to 1": Action("gc", (2, 1), 1, 2),
    "a commit of 2": Action("commit", (2,), 2, 1),
}


@dataclass
class Rig:
    """A recorded directory, and the ranks that open what lies in it. ``others`` makes ranks that may be killed."""

    room: Room
    daemon: Daemon
    ranks: Ranks
    others: Callable[[int], AbstractContextManager[Ranks]] | None = None

    def prepare(self, worlds: Sequence[int]) -> Image:
        """Return a run that the first number of ranks has trained, and the next ones have opened."""
        run = self.daemon.mount / "run"
        self.ranks.run("commit_each_step", world=worlds[0], path=str(run), num_steps=_NUM_STEPS, **_MODEL)
        for world in worlds[1:]:
            self.ranks.run("show", world=world, path=str(run))
        return self._taken()

    def record(self, image: Image, action: Action, step: int = _NUM_STEPS) -> tuple[list[Change], Image]:
        """Do ``action`` in a directory that is ``image``, at ``step``; return its changes, and the directory before."""
        with self.written(image) as path:
            os.rename(path, self.daemon.backing / "run")
        image = Image.of(self.daemon.backing)
        run = str(self.daemon.mount / "run")
        self.daemon.call("begin")
        if action.kind == "gc":
            assert main(["gc", run, "--yes"]) == 0
        elif action.kind == "commit":
            self.ranks.run("commit_each_step", world=action.by, path=run, num_steps=step + 1, **_MODEL)
        else:
            self.ranks.run("show", world=action.by, path=run, commits=True)
        changes = self._changes()
        found = self._taken()
        assert found.digest() == image.killed(changes).digest(), "the changes are not all that was done"
        return changes, image

    def kill_one(self, image: Image, world: int, victim: int, number: int) -> tuple[Image | None, list[Any]]:
        """Have ``world`` ranks open ``image``; the ``victim`` is killed at the change ``number`` in its directory.

        Return what was left, None where it has made fewer changes, and what the others say.
        """
        assert self.others is not None
        with self.written(image) as path:
            os.rename(path, self.daemon.backing / "run")
        with self.others(world) as ranks:
            place = f"run/rank-{victim:04d}-of-{world:04d}"
            self.daemon.call("begin", kill_at=number, victims={place: ranks.pids[victim]})
            ranks.start("show", world=world, path=str(self.daemon.mount / "run"), commits=True)
            lines = [ranks._last_line(rank) for rank in range(world)]
        self._changes()
        left = self._taken()
        is_killed = lines.pop(victim) is None
        return left if is_killed else None, [line and line.get("result", line) for line in lines]

    def shown(self, path: Path, world: int, *, commits: bool = False) -> list[Shown]:
        """Return what ``world`` ranks find."""
        found: list[Shown] = self.ranks.run("show", world=world, path=str(path), commits=commits)[:world]
        return found

    @contextmanager
    def written(self, image: Image) -> Iterator[Path]:
        """Give a directory with the run of ``image``."""
        directory = self.room.directory / "state"
        image.write(directory)
        try:
            yield directory / "run"
        finally:
            shutil.rmtree(directory)

    def _changes(self) -> list[Change]:
        file = self.room.directory / "changes"
        self.daemon.call("end", path=str(file))
        return read_changes(file)

    def _taken(self) -> Image:
        image = Image.of(self.daemon.backing)
        shutil.rmtree(self.daemon.mount / "run")
        return image


@dataclass
class CrashStates:
    """An action, its changes, and what was wrong with crashes at some of them.

    States with the same files are opened once: ``num_opened`` of ``num_states``.
    """

    rig: Rig
    image: Image  # before the action
    action: Action
    changes: list[Change] = field(default_factory=list)
    wanted: dict[int, list[list[Shown]]] = field(default_factory=dict)  # by number of ranks, what they may find
    num_states: int = 0
    num_opened: int = 0
    wrong: list[str] = field(default_factory=list)
    last_step: int = 0  # that the action has committed
    _seen: set[tuple[bytes, bool]] = field(default_factory=set)

    @classmethod
    def of(cls, rig: Rig, action: Action, *, image: Image | None = None, wanted: Any = None) -> CrashStates:
        """Record ``action``. ``image``: begin with it; ``wanted``: what is to be found there."""
        states = cls(rig, rig.prepare(action.prepared) if image is None else image, action)
        states.changes, states.image = rig.record(states.image, action)
        states.wanted = {world: list(found) for world, found in (wanted or {}).items()}
        if wanted is None:
            states.want(states.image, action.other, action.by)
            states.want(states.image, action.by, action.other)
        states.want(states.image.killed(states.changes), action.by, action.other)
        return states

    def want(self, image: Image, *worlds: int) -> None:
        """Note what undisturbed ranks find in ``image``, one number of them after the other."""
        with self.rig.written(image) as path:
            for world in worlds:
                found = self.rig.shown(path, world)
                assert all(each.get("is_clean") for each in found), found
                self.last_step = found[0]["step"]
                if found not in self.wanted.setdefault(world, []):
                    self.wanted[world].append(found)

    def kill_all(self, number: int, *, goes_on: bool = True) -> None:
        """Look at what a kill of all ranks before the change ``number`` leaves."""
        left = self.image.killed(self.changes[:number])
        self.look(left, f"killed before change {number}", goes_on=goes_on, is_last=number == len(self.changes))

    def cut_power(self, number: int, loss: Loss, seed: int = 0, *, goes_on: bool = True) -> None:
        """Look at what a power cut before the change ``number`` may leave."""
        left = self.image.power_cut(self.changes[:number], loss, random.Random(f"{seed}/{number}"))
        where = f"power lost before change {number}, {loss}, seed {seed}"
        self.look(left, where, goes_on=goes_on, is_last=number == len(self.changes))

    def kill_one(self, victim: int, number: int) -> bool:
        """Kill one of the ranks at a change of its own, and look; return False where it has made fewer."""
        left, said = self.rig.kill_one(self.image, self.action.by, victim, number)
        if left is None:
            return False
        where = f"rank {victim} killed at its change {number}"
        for each in said:  # one that was past its last agreement has done all of it
            if each is None or f"rank {victim}" not in each.get("error", f"rank {victim}"):
                self.wrong.append(f"{where}: another rank says {each}")
        self.look(left, where)
        return True

    def look(self, image: Image, where: str, *, goes_on: bool = True, is_last: bool = False) -> None:
        """Open ``image`` with either number of ranks, and note what is wrong.

        ``goes_on``: each commits then, and the other number of ranks goes on with that. ``is_last``: the action was
        over, and its commit must be there.
        """
        self.num_states += 1
        state = image.digest(), is_last
        if state in self._seen:
            return
        self._seen.add(state)
        self.num_opened += 1
        for first, second in ((self.action.by, self.action.other), (self.action.other, self.action.by)):
            with self.rig.written(image) as path:
                wrong = self._wrong_in(path, first, second if goes_on else 0, self.last_step if is_last else 0)
            if wrong:
                self.wrong.append(f"{where}, opened by {first}: {wrong}")

    def _wrong_in(self, path: Path, first: int, second: int, least_step: int) -> str:
        """Open with the ``first`` number of ranks, commit, and go on with the ``second``, if any; say what is wrong."""
        found = self.rig.shown(path, first, commits=second > 0)
        if found not in self.wanted[first] or found[0]["step"] < least_step:
            return f"found {_short(found, self.wanted[first])}"
        if not second:
            return ""
        step = found[0]["step"] + _LATER
        found = self.rig.shown(path, second)
        if any(each.get("step") != step or not each["is_clean"] for each in found):
            return f"after the next commit {second} ranks found {_short(found, self.wanted[second])}"
        keys = [each["keys"] for each in found]
        is_there = any(keys == [each["keys"] for each in wanted] for wanted in self.wanted[second])
        return "" if is_there else f"after the next commit {second} ranks found {_short(found, self.wanted[second])}"


def _short(found: list[Shown], wanted: list[list[Shown]]) -> str:
    """Return the error of each rank, or its step and what differs from what it was to find."""
    said = []
    for rank, shown in enumerate(found):
        same = next((each[rank] for each in wanted if each[rank]["step"] == shown.get("step")), wanted[0][rank])
        other = [word for word, value in shown.get("keys", {}).items() if same["keys"].get(word) != value]
        other += [word for word, value in shown.get("states", {}).items() if same["states"].get(word) != value]
        said.append(shown.get("error") or f"step {shown['step']}, is_clean {shown['is_clean']}, other {other}")
    return "; ".join(said)


def interrupted(rig: Rig, name: str, share: float) -> CrashStates:
    """Return an action of ACTIONS that is done again, after all ranks were killed at ``share`` of its changes."""
    first = CrashStates.of(rig, ACTIONS[name])
    left = first.image.killed(first.changes[: int(share * len(first.changes))])
    return CrashStates.of(rig, first.action, image=left, wanted=first.wanted)


def discarding(rig: Rig, world: int, *, after: CrashStates | None = None) -> CrashStates:
    """Return an opening in which all but rank 0 discard a generation, which rank 0 was killed before it committed.

    The run is a new one, or that of ``after``, once its action is done.
    """
    action = Action("commit", (world,), world, 1 if world > 1 else 2)
    before = CrashStates(rig, rig.prepare(action.prepared), action) if after is None else after
    if after is None:
        before.want(before.image, action.other, action.by)
        before.want(before.image, action.by, action.other)
    changes, image = rig.record(before.image.killed(before.changes), action, before.last_step)
    wanted = {
        each: [found for found in they if found[0]["step"] == before.last_step] for each, they in before.wanted.items()
    }
    left: list[Change] = []
    for rank in range(world):
        own = [each for each in changes if each.place == f"run/rank-{rank:04d}-of-{world:04d}"]
        in_catalog = max(number for number, each in enumerate(own) if each.kind == "resize")  # its journal ends
        left += own[: in_catalog - 1 if rank == 0 else in_catalog + 1]
    return CrashStates.of(rig, action._replace(kind="open"), image=image.killed(left), wanted=wanted)

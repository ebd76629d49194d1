"""SIGKILL of `tiered train` at instants spread over its life; resumed, and compared with an undisturbed run.

``Campaign.run`` kills each run once or twice, at chosen instants; ``Campaign.resume`` one run many times, anywhere.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bench.nursery import Instant, Life, Nursery

__all__ = ["Campaign", "Kill", "Verdict", "campaign_in", "digests"]

_SIZES = "--layers 2 --width 64 --heads 2 --context 16 --batch 2 --commit-every 1 --dram 16MiB --seed 3"


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill: in which phase, and what the resumed run found and became."""

    phase: str  # "making" | "training" | "resuming"
    is_inside_commit: bool
    durable: int  # the last generation reported durable before the kill
    sealed: int  # the last generation sealed or being sealed
    found: int  # the generation that the next process opened
    same_losses: bool
    same_bits: bool

    @property
    def is_lost(self) -> bool:
        """Whether a durable generation was lost."""
        return self.found < self.durable

    @property
    def is_right(self) -> bool:
        """Whether nothing durable was lost and the end is that of the undisturbed run."""
        return not self.is_lost and self.same_losses and self.same_bits


@dataclass(slots=True)
class Verdict:
    """What a campaign found."""

    kills: list[Kill] = field(default_factory=list)
    num_survivors: int = 0  # children that ended before the kill reached them: not counted as kills

    def count(self, phase: str) -> int:
        """Return the number of kills in ``phase``."""
        return sum(kill.phase == phase for kill in self.kills)

    @property
    def num_inside_commit(self) -> int:
        return sum(kill.is_inside_commit for kill in self.kills)

    @property
    def wrong(self) -> list[Kill]:
        """The kills that lost something or changed the bits."""
        return [kill for kill in self.kills if not kill.is_right]


_ON_DEVICE = ("--device", "sim", "--device-memory", "1800000")  # for a few units of the small model


class Campaign:
    """Runs of one small model in ``root``, killed and resumed, each compared with an undisturbed one."""

    def __init__(
        self, root: Path, *, seed: int = 0, num_steps: int = 4, options: Sequence[str] = (), update_on: str = ""
    ) -> None:
        """``update_on``: on the simulated accelerator, with updates on the "cpu" or the "device"; "": on the CPU."""
        self.root = root
        self.num_steps = num_steps
        self.options = [*options, *([*_ON_DEVICE, "--update-on", update_on] if update_on else [])]
        self._random = random.Random(seed)
        text = "".join(f"{i} squared is {i * i}; " for i in range(2000))
        (root / "text").write_text(text)
        self.nursery = Nursery(root, is_simulated=bool(update_on))
        self.undisturbed = self._run("undisturbed")
        if self.undisturbed.status != 0:
            raise RuntimeError(f"the undisturbed run failed with {self.undisturbed.status}; see {self.nursery.log}")
        self.losses = self._losses("undisturbed")
        self.digests = digests(root / "undisturbed")

    def close(self) -> None:
        """End the nursery."""
        self.nursery.close()

    def argv(self, run: str, *more: str) -> list[str]:
        """Return the command line of ``run``."""
        places = ["--data", f"{self.root}/text", "--store", f"{self.root}/{run}", "--json", f"{self.root}/{run}.json"]
        steps = ["--steps", str(self.num_steps)]
        return ["train", *_SIZES.split(), *places, *steps, "--quiet", "--yes", *self.options, *more]

    def _run(self, run: str, *more: str, kill_at: Instant | None = None) -> Life:
        return self.nursery.run(self.argv(run, *more), kill_at)

    def _losses(self, run: str) -> list[float]:
        return list(json.loads((self.root / f"{run}.json").read_text())["losses"])

    def instants(self, num_kills: int, num_making: int) -> Iterator[tuple[str, Instant]]:
        """Yield phases and instants: evenly over the making, over first read to last commit, and over the commits."""
        life = self.undisturbed
        opening, opened, first_durable = life.times("opening")[0], life.times("opened")[0], life.times("durable")[0]
        for time_s in _evenly([(opening, opened)], num_making // 2):
            yield "making", life.instant(time_s)
        for time_s in _evenly([(opened, first_durable)], num_making - num_making // 2):
            yield "making", life.instant(time_s)
        commits = list(zip(life.times("commit"), life.times("durable"), strict=True))
        num_in_commits = -(-2 * num_kills // 5)
        first_read = next((r.time_s for r in life.reports if r.words == ("call", "preadv")), first_durable)
        for time_s in _evenly([(min(first_read, first_durable), commits[-1][1])], num_kills - num_in_commits):
            yield "training", life.instant(time_s)
        inside = [r.time_s for r in life.reports if any(start <= r.time_s < end for start, end in commits)]
        for number in range(num_in_commits):  # just as a call is made: commits are too short to be hit by the clock
            yield "training", life.instant(inside[(2 * number + 1) * len(inside) // (2 * num_in_commits)])

    def kill(self, phase: str, instant: Instant, run: str, *, again: bool = False) -> Iterator[Kill]:
        """Kill a fresh run at ``instant``, resume it, and yield what became of it; nothing if it survived.

        With ``again`` the resumed run is killed too, somewhere, before it may finish.
        """
        try:
            killed = [(phase, self._run(run, kill_at=instant))]
            if killed[0][1].status != -signal.SIGKILL:
                return
            if again:
                somewhere = self.undisturbed.instant(self._random.uniform(0, self.undisturbed.reports[-1].time_s))
                life = self._run(run, "--resume", kill_at=somewhere)
                killed += [("resuming", life)] if life.status == -signal.SIGKILL else []
            last = self._run(run, "--resume")
            assert last.status == 0, f"--resume after {killed[-1]} failed with {last.status}; see {self.nursery.log}"
            losses = self._losses(run)
            same_losses = losses == self.losses[len(self.losses) - len(losses) :]
            same_bits = digests(self.root / run) == self.digests
            lives = [life for _, life in killed] + [last]
            for (where, life), after in zip(killed, lives[1:], strict=True):
                found = after.generations("opened")
                yield Kill(
                    phase=where, is_inside_commit=life.is_inside_commit, durable=life.durable, sealed=life.sealed,
                    found=found[0] if found else life.durable, same_losses=same_losses,
                    same_bits=same_bits,
                )  # fmt: skip
        finally:
            shutil.rmtree(self.root / run, ignore_errors=True)
            (self.root / f"{run}.json").unlink(missing_ok=True)

    def run(self, num_kills: int, num_making: int, *, on_kill: Callable[[Kill], object] = lambda kill: None) -> Verdict:
        """Kill at all instants, the same ones again where a child survived, and return the verdict."""
        verdict = Verdict()
        waiting = list(self.instants(num_kills, num_making))
        for number, (phase, instant) in enumerate(waiting):
            kills = list(self.kill(phase, instant, f"run{number}", again=number % 4 == 3))
            if not kills:
                verdict.num_survivors += 1
                if verdict.num_survivors > num_kills + num_making:
                    raise RuntimeError("most children end before the kill reaches them: is the machine too busy?")
                waiting.append((phase, Instant(instant.num_marks, max(0, instant.num_calls - 2), instant.delay_s / 2)))
            for kill in kills:
                verdict.kills.append(kill)
                on_kill(kill)
        return verdict


def _evenly(spans: Sequence[tuple[float, float]], num_points: int) -> Iterator[float]:
    """Yield ``num_points`` instants, evenly spread over the spans laid end to end."""
    total_s = sum(end - start for start, end in spans)
    for point in range(num_points):
        left_s = (point + 0.5) / num_points * total_s
        for start, end in spans:
            if left_s <= end - start:
                yield start + left_s
                break
            left_s -= end - start


def digests(directory: Path) -> dict[str, str]:
    """Return a digest of every tensor of the store in ``directory``, by key."""
    import torch

    import tiered

    with tiered.Store(directory, dram="16MiB", mode="r") as store:
        return {
            key: hashlib.sha256(bytes(tensor.reshape(-1).view(torch.uint8).numpy())).hexdigest()
            for key, tensor in ((key, store[key]) for key in store)
        }


@contextmanager
def campaign_in(directory: str | None, seed: int, *, update_on: str = "") -> Iterator[Campaign]:
    """Give a campaign in a new directory under ``directory``, removed at the end; see ``Campaign``."""
    with tempfile.TemporaryDirectory(dir=directory, prefix="soak-") as root:
        campaign = Campaign(Path(root), seed=seed, update_on=update_on)
        try:
            yield campaign
        finally:
            campaign.close()

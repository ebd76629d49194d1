"""Several simulated stores in one process that commit together, by the product's confirmation; crashes of one of them.

Each rank has a disk and a thread. What the ranks tell each other goes through a Meeting, in place of torch's groups.
"""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import torch

from tests.devices.simulated_disk import Policy, SimulatedDisk
from tests.store.rig import WAIT_S, beside, numbers, simulated_store
from tiered.errors import CapacityError, RankLostError, TieredError, UsageError
from tiered.ranks.agreement import Agreement
from tiered.store.catalog.catalog import GenerationName
from tiered.store.lifetime.confirmation import RanksConfirmation
from tiered.store.store import Store
from tiered.units import KiB

__all__ = [
    "CRASHES", "NUM_OPERATIONS", "Crash", "Meeting", "Member", "Noted", "a_confirmed_generation_is_opened", "crashed",
    "no_crash_of_a_rank_is_wrong", "no_space_names_the_rank", "noted", "open_all", "run_all",
    "the_nonce_is_compared", "wrong_after", "wrong_in_discards",
]  # fmt: skip

NUM_COMMITS = 4


class Meeting:
    """The place where the ranks tell each other things: the n-th thing of each rank in one channel goes to all."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._condition = threading.Condition()
        self._told: dict[tuple[str, int], dict[int, tuple[str, bytes]]] = defaultdict(dict)
        self._gone: set[int] = set()

    def leave(self, rank: int) -> None:
        with self._condition:
            self._gone.add(rank)
            self._condition.notify_all()

    def tell(
        self, rank: int, place: tuple[str, int], word: str, message: bytes, look: Callable[[], object] = lambda: None
    ) -> list[bytes]:
        """Return the messages of all ranks. RankLostError for a rank that is gone without one."""
        with self._condition:
            told = self._told[place]
            told[rank] = word, message
            self._condition.notify_all()
            is_over = lambda: len(told) == self.world or self._gone - told.keys()  # noqa: E731
            end = time.monotonic() + WAIT_S
            while not self._condition.wait_for(is_over, 0.02):
                assert time.monotonic() < end, f"rank {rank} waits in vain for {word}"
                look()
            if len(told) < self.world:
                raise RankLostError(f"rank {min(self._gone - told.keys())} is gone")
            if len({each for each, _ in told.values()}) > 1:
                raise UsageError(f"the ranks do different things: {sorted(each for each, _ in told.values())}")
            return [told[each][1] for each in range(self.world)]


class Member:
    """What a RanksConfirmation asks of ``Ranks``, for one rank of a meeting. A rank without power tells nothing."""

    def __init__(self, meeting: Meeting, rank: int, disk: SimulatedDisk) -> None:
        self.rank, self.world, self.meeting = rank, meeting.world, meeting
        self._disk = disk
        self._counts = {"program order": 0, "commits": 0}
        self.agreement = Agreement(cast(Any, self))

    def agree(self, word: str, payload: bytes) -> Any:
        return SimpleNamespace(wait=lambda: self._tell("program order", word, payload))

    def tell_in_commit(self, message: bytes, note_wait: Callable[[], object]) -> tuple[bytes, ...]:
        return tuple(self._tell("commits", "the end of a commit", message, note_wait))

    def abandon(self, reason: str) -> None:
        self.meeting.leave(self.rank)

    def leave(self, error: BaseException, what: str) -> None:
        self.meeting.leave(self.rank)

    def _tell(self, channel: str, word: str, message: bytes, look: Callable[[], object] = lambda: None) -> list[bytes]:
        if self._disk._at_crash is not None:
            self.meeting.leave(self.rank)
            raise RankLostError("this rank has no power")
        self._counts[channel] += 1
        return self.meeting.tell(self.rank, (channel, self._counts[channel]), word, message, look)


def open_store(member: Member, disk: SimulatedDisk) -> Store:
    """Return the store of one rank, once all have opened theirs, as ``Store`` does."""
    opened: list[Store] = []
    try:
        with member.agreement.phase("tiered.Store"):
            confirmation = RanksConfirmation(cast(Any, member))
            opened.append(simulated_store(disk, budget_nbytes=48 * KiB, confirmation=confirmation))
    except TieredError:
        for store in opened:
            store.close(commit=False)
        raise
    return opened[0]


def run_all(disks: Sequence[SimulatedDisk], act: Callable[[Store, int], object]) -> list[str]:
    """Open the stores of all ranks, act on each, close them without a commit; return the error of each, "" for none."""
    meeting = Meeting(len(disks))
    errors = [""] * len(disks)

    def run(rank: int) -> None:
        store = None
        try:
            store = open_store(Member(meeting, rank, disks[rank]), disks[rank])
            act(store, rank)
        except TieredError as error:
            errors[rank] = f"{type(error).__name__}: {error}"
        finally:
            meeting.leave(rank)
            if store is not None:
                try:
                    store.close(commit=False)
                except TieredError:
                    pass  # of a disk without power

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(disks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * WAIT_S)
    assert not any(thread.is_alive() for thread in threads)
    return errors


@dataclass
class Noted:
    """The contents of each generation on each rank, and the last that any rank knew as everybody's."""

    contents: dict[tuple[int, int], dict[str, torch.Tensor]] = field(default_factory=dict)
    confirmed: int = 0


def noted(noted: Noted, store: Store, rank: int) -> None:
    """Change keys and commit, several times; note what each generation has, and which were confirmed."""
    for step in range(NUM_COMMITS):
        store["a"] = numbers(6000, 100 * step + rank)
        store[f"k{step % 3}"] = numbers(9000, 200 * step + rank)
        if step == 2:
            del store["k0"]
        noted.contents[store.generation + 1, rank] = {name: store[name] for name in store}
        generation = store.commit({"step": step, "rank": rank}, wait=step != 1)
        store.wait_for_commit()
        noted.confirmed = max(noted.confirmed, generation)


@dataclass(frozen=True)
class Crash:
    """A crash of ``rank`` at an operation of its disk; ``policy``: what survives there, and on the others' disks."""

    rank: int
    operation: int
    policy: Policy
    world: int = 2


def crashed(crash: Crash) -> tuple[list[SimulatedDisk], Noted]:
    """Return the disks after a crash in the job, and what was noted by then."""
    disks, found = [SimulatedDisk(capacity_nbytes=512 * KiB) for _ in range(crash.world)], Noted()
    run_all(disks, lambda store, rank: None)
    disks[crash.rank].crash_at = disks[crash.rank].num_operations + crash.operation
    run_all(disks, lambda store, rank: noted(found, store, rank))
    rng = random.Random(crash.operation)
    return [disk.power_cut(rng, crash.policy) for disk in disks], found


def wrong_after(
    crash: Crash, *, crash_again: int = -1, victims: Sequence[int] = (), policy: Policy | None = None
) -> str:
    """Return what is wrong after ``crash``, and one at an operation of the opening; "" if nothing.

    The second crash is one of ``victims``, all ranks by default; ``policy``: what survives it, by default as before.
    """
    disks, found = crashed(crash)
    rng = random.Random(crash.operation)
    if crash_again >= 0:
        for rank in victims or range(crash.world):
            disks[rank].crash_at = crash_again
        run_all(disks, lambda store, rank: None)
        disks = [disk.power_cut(rng, policy or crash.policy) for disk in disks]
    for _ in range(2):
        seen, wrong = open_all(disks, found)
        if wrong or any(seen):
            return f"{seen} {wrong}"
    return ""


def wrong_in_discards(world: int, operation: int) -> tuple[int, str]:
    """Crash each rank at ``operation`` of its job, then each, and all, where the opening discards a generation.

    Return how many openings there were, and what was wrong with the first bad one.
    """
    cases = [
        (Crash(rank, operation, "drop", world), victims, policy)
        for rank in range(world)
        for victims in ((), *((each,) for each in range(world)))
        for policy in ("drop", "keep")
    ]
    for number, (crash, victims, policy) in enumerate(cases):
        wrong = wrong_after(crash, crash_again=0, victims=victims, policy=policy)
        if wrong:
            return number, f"{crash}, then {victims} with {policy}: {wrong}"
    return len(cases), ""


def open_all(disks: Sequence[SimulatedDisk], found: Noted) -> tuple[list[str], list[str]]:
    """Open all stores; return the errors, and what is wrong with what they hold."""
    generations: dict[int, int] = {}
    wrong: list[str] = []

    def look(store: Store, rank: int) -> None:
        generation = generations[rank] = store.generation
        wanted = found.contents.get((generation, rank), {})
        if set(store) != set(wanted) or not all(torch.equal(store[name], wanted[name]) for name in wanted):
            wrong.append(f"rank {rank} has not what generation {generation} has")
        if not store.verify().is_clean:
            wrong.append(f"rank {rank} has damaged bytes")
        if generation < found.confirmed:
            wrong.append(f"rank {rank} has generation {generation}, and {found.confirmed} was confirmed")

    errors = run_all(disks, look)
    if len(set(generations.values())) > 1:
        wrong.append(f"the ranks have different generations: {generations}")
    return errors, wrong


NUM_OPERATIONS = 18  # of each rank in the job
CRASHES = [
    Crash(1, 0, "keep"), Crash(0, 3, "drop"), Crash(1, 7, "subset"), Crash(0, 8, "keep"), Crash(2, 9, "keep", 3),
    Crash(1, 13, "drop"), Crash(0, 14, "keep"), Crash(1, 17, "keep"),
]  # fmt: skip


def no_crash_of_a_rank_is_wrong() -> None:
    for number, crash in enumerate(CRASHES):
        assert not (wrong := wrong_after(crash, crash_again=number % 3 - 1)), (crash, wrong)


def a_confirmed_generation_is_opened() -> None:
    disks, found = crashed(Crash(0, 1_000_000, "keep"))
    assert found.confirmed == NUM_COMMITS
    assert open_all(disks, found) == ([""] * 2, [])


def the_nonce_is_compared() -> None:
    """Two generations of one number, of which no rank has both, are no generation in common; what came before is."""
    kept = [[GenerationName(5, 1), GenerationName(4, 7)], [GenerationName(5, 2), GenerationName(4, 7)]]
    meeting, chosen = Meeting(2), list[GenerationName]()
    members = [Member(meeting, rank, SimulatedDisk()) for rank in range(2)]
    with beside(*(lambda r=r: chosen.append(RanksConfirmation(cast(Any, members[r])).choose(kept[r])) for r in (0, 1))):
        pass
    assert chosen == [GenerationName(4, 7)] * 2


def no_space_names_the_rank() -> None:
    """One rank's device is full in a commit: all ranks say so, and open with the generation before."""
    world = 3
    disks, found = [SimulatedDisk(capacity_nbytes=512 * KiB) for _ in range(world)], Noted()

    def act(store: Store, rank: int) -> None:
        store["a"] = numbers(6000, rank)
        found.contents[1, rank] = {"a": store["a"]}
        store.commit()
        if rank == world - 1:
            disks[rank].fail_next("flush", CapacityError("no space left on the drive"))
        store["a"] = numbers(6000, 9 + rank)
        store.commit()

    errors = run_all(disks, act)
    for rank, error in enumerate(errors):
        assert "no space left on the drive" in error, errors
        if rank < world - 1:
            assert f"generation 2 is lost because rank {world - 1}: CapacityError: no space" in error, errors
    found.confirmed = 1
    assert open_all(disks, found) == ([""] * world, [])

"""Power cuts at every operation of a job that does everything: what was acknowledged is there, nothing is half."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from tests.store.rig import Counter, numbers, simulated_store
from tiered.bytes.device.simulated_disk import Policy, SimulatedDisk
from tiered.errors import TieredError
from tiered.store.commit import Committer
from tiered.store.entry import Entry
from tiered.store.records import Extents, Records
from tiered.store.space import Space
from tiered.store.store import Store
from tiered.units import KiB

POLICIES: tuple[Policy, ...] = ("drop", "keep", "subset", "torn")
CAPACITY_NBYTES = 512 * KiB
BUDGET_NBYTES = 48 * KiB
SIZES = (16, 4_096, 5_000, 7_000, 9_000, 14_000)  # inline, whole pages, odd, and streamed: above a quarter of 48 KiB
NAMES = tuple("abcdefgh")
NUM_STEPS = 50


class Oracle:
    """What each generation contains, and which of them a crash must not lose."""

    def __init__(self) -> None:
        self.contents: dict[int, dict[str, torch.Tensor]] = {0: {}}
        self.states: dict[int, int] = {0: 0}
        self.open: dict[str, torch.Tensor] = {}
        self.acknowledged = 0

    def seal(self, generation: int, state: int) -> None:
        self.contents[generation] = dict(self.open)
        self.states[generation] = state

    def allowed(self) -> range:
        return range(self.acknowledged, max(self.contents) + 1)


class Job:
    """A seeded sequence of puts, leases, deletes, commits and rollbacks, noted in the oracle before it is asked for."""

    def __init__(self, store: Store, oracle: Oracle, seed: int) -> None:
        self.store = store
        self.oracle = oracle
        self.rng = random.Random(seed)
        self.counter = Counter()
        self.step = 0
        store.register("counter", self.counter)
        store.resume()

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step += 1
            action = self.rng.choices(
                (self.put, self.write, self.delete, self.commit, self.commit_later, self.go_back, self.hint),
                (8, 6, 2, 2, 2, 1, 2),
            )[0]
            action()
        self.commit()

    def put(self) -> None:
        name = self.rng.choice(NAMES)
        value = numbers(self.rng.choice(SIZES), self.rng.getrandbits(30))
        self.store[name] = value
        self.oracle.open[name] = value

    def write(self) -> None:
        if not self.oracle.open:
            return
        name = self.rng.choice(sorted(self.oracle.open))
        with self.store.lease(name, "rw") as view:
            view += 1
        self.oracle.open[name] = self.oracle.open[name] + 1

    def delete(self) -> None:
        if self.oracle.open:
            name = self.rng.choice(sorted(self.oracle.open))
            del self.store[name]
            del self.oracle.open[name]

    def commit(self) -> None:
        self.commit_later()
        self.store.wait_for_commit()
        self.oracle.acknowledged = max(self.oracle.contents)

    def commit_later(self) -> None:
        self.counter.count += 1
        self.store.wait_for_commit()  # so that the oracle knows which generation comes next
        self.oracle.acknowledged = max(self.oracle.contents)
        self.oracle.seal(self.oracle.acknowledged + 1, self.counter.count)
        assert self.store.commit({"step": self.counter.count}, wait=False) == max(self.oracle.contents)

    def go_back(self) -> None:
        if len(self.oracle.contents) == 1:
            return
        self.store.rollback()
        generation = self.oracle.acknowledged = max(self.oracle.contents)
        self.oracle.open = dict(self.oracle.contents[generation])
        assert self.counter.count == self.oracle.states[generation]

    def hint(self) -> None:
        self.store.working_set.swap_out(NAMES)
        self.store.prefetch(NAMES)


def crashed(disk: SimulatedDisk, oracle: Oracle, *, seed: int, num_steps: int, crash_at: int | None) -> bool:
    """Run the job until it ends or the power goes; return whether it went."""
    disk.crash_at = crash_at
    store: Store | None = None
    try:
        store = simulated_store(disk, budget_nbytes=BUDGET_NBYTES)
        Job(store, oracle, seed).run(num_steps)
    except TieredError:
        return True
    finally:
        if store is not None:
            try:
                store.close()
            except TieredError:
                pass
    return False


def violation(disk: SimulatedDisk, oracle: Oracle) -> str:
    """Open what the power cut has left and say what is wrong with it; '' for nothing."""
    try:
        store = simulated_store(disk, budget_nbytes=BUDGET_NBYTES)
    except TieredError as error:
        return f"does not open: {error}"
    try:
        if store.generation not in oracle.allowed():
            return f"generation {store.generation}, expected one of {oracle.allowed()}"
        expected = oracle.contents[store.generation]
        if set(store) != set(expected):
            return f"keys {set(store) ^ set(expected)}"
        if store.state.get("step", 0) != oracle.states[store.generation]:
            return f"state {store.state}"
        report = store.verify()
        if not report.is_clean:
            return f"damage: {report.errors}"
        wrong = [name for name, value in expected.items() if not torch.equal(store[name], value)]
        oracle.open = dict(expected)
        oracle.contents = {store.generation: dict(expected)}
        oracle.states = {store.generation: oracle.states[store.generation]}
        oracle.acknowledged = store.generation
        return f"other bytes in {wrong}" if wrong else ""
    except TieredError as error:
        return f"cannot be read: {error}"
    finally:
        store.close()


def num_operations(seed: int, num_steps: int) -> int:
    disk = SimulatedDisk(capacity_nbytes=CAPACITY_NBYTES)
    crashed(disk, Oracle(), seed=seed, num_steps=num_steps, crash_at=None)
    return disk.num_operations


def cuts(seed: int, *, num_steps: int, num_points: int) -> Iterator[tuple[str, str]]:
    """Cut the power at ``num_points`` points of a job, with each policy; yield where, and what was violated."""
    total = num_operations(seed, num_steps)
    for point in range(num_points):
        crash_at = 1 + point * (total - 1) // num_points  # operation 0 creates the catalog
        disk, noted = SimulatedDisk(capacity_nbytes=CAPACITY_NBYTES), Oracle()
        crashed(disk, noted, seed=seed, num_steps=num_steps, crash_at=crash_at)
        for policy in POLICIES:
            rng = random.Random(f"{seed}/{crash_at}/{policy}")
            oracle = Oracle()
            oracle.contents, oracle.states = dict(noted.contents), dict(noted.states)
            oracle.acknowledged = noted.acknowledged
            survivor = disk.power_cut(rng, policy)
            yield f"seed {seed}, operation {crash_at} of {total}, {policy}", violation(survivor, oracle)
            if point % 8 == 0:  # and again, while the recovered store goes on
                crashed(survivor, oracle, seed=seed + 1, num_steps=6, crash_at=rng.randrange(1, 20))
                where = f"seed {seed}, operation {crash_at}, {policy}, and a second cut"
                yield where, violation(survivor.power_cut(rng, policy), oracle)


@pytest.mark.parametrize("seed", range(12))
def test_no_power_cut_loses_or_mixes_generations(seed: int) -> None:
    whole = SimulatedDisk(capacity_nbytes=CAPACITY_NBYTES)
    assert not crashed(whole, Oracle(), seed=seed, num_steps=NUM_STEPS, crash_at=None)
    outcomes = list(cuts(seed, num_steps=NUM_STEPS, num_points=32))
    assert len(outcomes) >= 128
    assert not [(where, what) for where, what in outcomes if what]


def test_a_campaign_sees_a_missing_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Space, "flush", lambda space: None)
    assert any(what for _, what in cuts(1, num_steps=NUM_STEPS, num_points=24))


def test_a_campaign_sees_writes_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    take_target, give_back = Records.take_target, Space.give_back
    in_place: set[Extents] = set()

    def take_committed(records: Records, entry: Entry) -> Extents | None:
        if entry.landing is None and not entry.is_pending and entry.committed is not None and entry.committed.extents:
            entry.landing = entry.committed.extents
            in_place.add(entry.landing)
        return take_target(records, entry)

    def give_back_others(space: Space, extents: Extents) -> None:
        if extents not in in_place:
            give_back(space, extents)

    monkeypatch.setattr(Records, "take_target", take_committed)
    monkeypatch.setattr(Space, "give_back", give_back_others)
    assert any(what for _, what in cuts(1, num_steps=NUM_STEPS, num_points=24))


def test_a_campaign_sees_a_flush_before_the_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    write, finish = Committer._write, Space.flush
    monkeypatch.setattr(Space, "flush", lambda space: None)

    def flush_then_write(committer: Committer, sealed: object) -> None:
        finish(committer._working_set.space)
        write(committer, sealed)  # type: ignore[arg-type]

    monkeypatch.setattr(Committer, "_write", flush_then_write)
    assert any(what for seed in (1, 2) for _, what in cuts(seed, num_steps=NUM_STEPS, num_points=24))

"""The campaign on the simulated disk: a job, every state that a power cut can leave of it, and what each must hold.

The job runs once; the disk hands over a Moment at each of its operations, and every crash state is made of one. What is
found wrong is a sentence, "" for nothing.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import xxhash

from tests.devices.simulated_disk import Moment, Policy, SimulatedDisk
from tests.store.rig import Counter, numbers, simulated_store
from tiered.errors import TieredError
from tiered.store.space import device_space
from tiered.store.space.extents import ExtentAllocator
from tiered.store.store import Store
from tiered.units import KiB

CAPACITY_NBYTES = 512 * KiB
BUDGET_NBYTES = 48 * KiB
SIZES = (16, 4_096, 5_000, 7_000, 9_000, 14_000)  # inline, whole pages, odd, and streamed: above a quarter of 48 KiB
NAMES = tuple("abcdefgh")
NUM_STEPS = 5
POLICIES: tuple[Policy, ...] = ("drop", "keep", *("subset",) * 20, *("torn",) * 2, *("torn pages",) * 2)
POLICIES_IN_RECOVERY: tuple[Policy, ...] = ("drop", "keep", "subset", "subset", "torn", "torn pages")

_GROWTH_NBYTES = 24 * KiB  # instead of 64 MiB: files grow throughout the job, and new ones are made
_FILE_NBYTES = 64 * KiB  # instead of a TiB


@dataclass(slots=True)
class Oracle:
    """What each generation contains, and which of them a crash must not lose."""

    contents: dict[int, dict[str, torch.Tensor]] = field(default_factory=lambda: {0: {}})
    states: dict[int, int] = field(default_factory=lambda: {0: 0})
    open: dict[str, torch.Tensor] = field(default_factory=dict)
    acknowledged: int = 0

    def seal(self, generation: int, state: int) -> None:
        self.states[generation] = state
        self.contents[generation] = dict(self.open)

    def at(self, generation: int) -> Oracle:
        """Return the oracle of a store that was opened and holds ``generation``."""
        content = self.contents[generation]
        return Oracle({generation: content}, {generation: self.states[generation]}, dict(content), generation)


class Job:
    """A seeded sequence of puts, leases, deletes, commits and rollbacks, noted in the oracle before it is asked for."""

    def __init__(self, store: Store, oracle: Oracle, seed: int) -> None:
        self.store = store
        self.oracle = oracle
        self.rng = random.Random(seed)
        self.counter = Counter()
        store.register("counter", self.counter)
        store.resume()

    def run(self, num_steps: int) -> None:
        """Each step changes some keys and commits; the next one goes on while that commit runs."""
        for _ in range(num_steps):
            for _ in range(self.rng.randint(4, 8)):
                actions = self.put, self.write, self.delete, self.go_back, self.hint
                self.rng.choices(actions, (8, 6, 2, 1, 2))[0]()
            self.commit_later()
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
        self.wait()

    def commit_later(self) -> None:
        self.counter.count += 1
        self.wait()  # so that the oracle knows which generation comes next
        self.oracle.seal(self.oracle.acknowledged + 1, self.counter.count)
        assert self.store.commit({"step": self.counter.count}, wait=False) == max(self.oracle.contents)

    def wait(self) -> None:
        self.store.wait_for_commit()
        self.oracle.acknowledged = max(self.oracle.contents)

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


@contextmanager
def small_files() -> Iterator[None]:
    """Let files grow in steps of 24 KiB and end at 64 KiB, so that growth and new files are part of every job."""
    limits = ExtentAllocator.__init__.__kwdefaults__
    assert limits is not None
    saved = device_space.GROWTH_NBYTES, limits["max_file_nbytes"]
    device_space.GROWTH_NBYTES, limits["max_file_nbytes"] = _GROWTH_NBYTES, _FILE_NBYTES
    try:
        yield
    finally:
        device_space.GROWTH_NBYTES, limits["max_file_nbytes"] = saved


@dataclass(frozen=True, slots=True)
class Instant:
    """A moment of the disk, and what the oracle had noted by then."""

    moment: Moment
    acknowledged: int
    newest: int  # sealed, or about to be

    @property
    def is_inside_commit(self) -> bool:
        return self.newest > self.acknowledged


def job_instants(disk: SimulatedDisk, oracle: Oracle, *, seed: int, num_devices: int, num_steps: int) -> list[Instant]:
    """Run the job to its end; return the instants at all its operations, and the one after the last."""
    instants: list[Instant] = []
    lock = threading.Lock()  # not the disk's own: the oracle is noted by another thread

    def note(moment: Moment) -> None:
        with lock:
            # Order: ``acknowledged`` first, which only ever follows what is on the disk by now.
            instants.append(Instant(moment, oracle.acknowledged, max(list(oracle.contents))))

    with simulated_store(disk, budget_nbytes=BUDGET_NBYTES, num_devices=num_devices) as store:
        disk.watch = note
        Job(store, oracle, seed).run(num_steps)
        disk.watch = None
    note(disk.moment())
    return instants


@dataclass(slots=True)
class Campaign:
    """All crash states of the job of one seed. Odd seeds stripe over two devices.

    States of one instant with the same bytes, files and catalog, are opened once: ``num_opened`` counts those,
    ``num_states`` all.
    """

    seed: int
    part: slice = field(default_factory=lambda: slice(None))  # of the instants, for campaigns that share them out
    num_steps: int = NUM_STEPS
    num_operations: int = 0
    num_states: int = 0
    num_opened: int = 0
    num_in_recovery: int = 0  # of these opened, after a crash of what a crash had left
    num_inside_commit: int = 0  # of these opened
    wrong: list[str] = field(default_factory=list)
    _found: dict[bytes, int | str] = field(default_factory=dict)  # what a state holds: generation, or what is wrong

    @property
    def num_devices(self) -> int:
        return 1 + self.seed % 2

    def run(self, *, until_wrong: bool = False) -> Campaign:
        """Crash after every operation, and once at each instant again after every operation of the recovery.

        ``until_wrong``: the first instant with something wrong is enough.
        """
        with small_files():
            oracle = Oracle()
            disk = SimulatedDisk(capacity_nbytes=CAPACITY_NBYTES)
            simulated_store(disk, num_devices=self.num_devices).close()  # an empty store: creation has its own tests
            try:
                instants = job_instants(
                    disk, oracle, seed=self.seed, num_devices=self.num_devices, num_steps=self.num_steps
                )
            except Exception as error:
                self.wrong.append(f"the job fails: {error!r}")
                return self
            self.num_operations = len(instants) - 1
            for instant in instants[self.part]:
                if until_wrong and self.wrong:
                    break
                self._found.clear()  # what a key stands for lives as long as its moment
                where = f"operation {instant.moment.number}"
                self._crash(instant, oracle, POLICIES, where)
                self._crash_in_recovery(instant, oracle, where)
        return self

    def _crash(self, instant: Instant, oracle: Oracle, policies: tuple[Policy, ...], where: str) -> None:
        rng = random.Random(f"{self.seed}/{where}")
        for number, policy in enumerate(policies):
            disk = instant.moment.survivor(rng, policy)
            found = self._look(disk, oracle, instant)
            if isinstance(found, int) and not instant.acknowledged <= found <= instant.newest:
                found = f"generation {found}, expected {instant.acknowledged} to {instant.newest}"
            if isinstance(found, str):
                self.wrong.append(f"{where}, {policy} (number {number}): {found}")

    def _look(self, disk: SimulatedDisk, oracle: Oracle, instant: Instant) -> int | str:
        self.num_states += 1
        key = _fingerprint(disk, self.num_devices)
        if key not in self._found:
            self.num_opened += 1
            self.num_inside_commit += instant.is_inside_commit
            self._found[key] = look(disk, oracle, num_devices=self.num_devices)
        return self._found[key]

    def _crash_in_recovery(self, instant: Instant, oracle: Oracle, where: str) -> None:
        """Go on with what one crash has left: commit, and crash after every operation of that."""
        seed = f"{self.seed}/{where}/recovery"
        disk, twin = (instant.moment.survivor(random.Random(seed), "subset") for _ in range(2))
        found = look(twin, oracle, num_devices=self.num_devices)
        if isinstance(found, str):
            self.wrong.append(f"{where}, before the recovery: {found}")
            return
        recovered = oracle.at(found)
        try:
            instants = job_instants(
                disk, recovered, seed=instant.moment.number, num_devices=self.num_devices, num_steps=1
            )
        except Exception as error:
            self.wrong.append(f"{where}, in the recovery: {error!r}")
            return
        before = self.num_opened
        for second in instants:
            self._found.clear()
            self._crash(second, recovered, POLICIES_IN_RECOVERY, f"{where}, recovery {second.moment.number}")
        self.num_in_recovery += self.num_opened - before


def _fingerprint(disk: SimulatedDisk, num_devices: int) -> bytes:
    """Return what tells one disk from another; the catalog's content is alive as long as the moment."""
    digest = xxhash.xxh3_128(str(id(disk.load("catalog"))).encode())
    for device in range(num_devices):
        for file, nbytes in sorted(disk.sizes(device).items()):
            digest.update(f"{device} {file} {nbytes} ".encode())
            digest.update(disk.image(device, file))
    return digest.digest()


def look(disk: SimulatedDisk, oracle: Oracle, *, num_devices: int = 1) -> int | str:
    """Open what the power cut has left, check all of it, and commit once more; return its generation."""
    try:
        with simulated_store(disk, budget_nbytes=BUDGET_NBYTES, num_devices=num_devices) as store:
            generation = store.generation
            return _wrong_in(store, oracle) or _next_commit(store) or generation
    except TieredError as error:
        return f"cannot be used: {error}"
    except Exception as error:  # an assertion of the allocator, or whatever nobody foresaw
        return f"fails: {error!r}"


def _wrong_in(store: Store, oracle: Oracle) -> str:
    expected = oracle.contents.get(store.generation)
    if expected is None:
        return f"generation {store.generation} was never sealed"
    if set(store) != set(expected):
        return f"generation {store.generation}: other keys, {sorted(set(store) ^ set(expected))}"
    step = oracle.states[store.generation]
    if store.state.get("step", 0) != step or (step and store.registered_state("counter") != {"count": step}):
        return f"generation {store.generation}: other state, {store.state} for step {step}"
    report = store.verify()
    if not report.is_clean:
        return f"damage: {report.errors}"
    found = store.get_many(expected)
    wrong = [name for name, value in expected.items() if not torch.equal(found[name], value)]
    return f"generation {store.generation}: other bytes in {wrong}" if wrong else _wrong_extents(store)


def _next_commit(store: Store) -> str:
    names = list(store)
    if names:
        with store.lease(names[0], "rw") as view:
            view += 1
    store["one more"] = torch.ones(5_000, dtype=torch.uint8)
    store.commit({"step": -1})
    return _wrong_extents(store)


def _wrong_extents(store: Store) -> str:
    """Every byte in use belongs to one committed extent: nothing leaks, nothing overlaps."""
    extents = sorted(extent for record in store.records() for extent in record.extents)
    for one, other in itertools.pairwise(extents):
        if one[:2] == other[:2] and one.offset + one.nbytes > other.offset:
            return f"{one} overlaps {other}"
    used, named = store.working_set.space.used_nbytes, sum(extent.nbytes for extent in extents)
    return "" if used == named else f"{used} bytes are in use, the keys name {named}"

"""The campaign on the simulated disk: a job, every state that a power cut can leave of it, and what each must hold.

The job runs once; the disk hands over a Moment at each of its operations, and every crash state is made of one. A state
of a store that others share is opened with its newest generation and, from a copy, with the one before, until the
newest is confirmed. What is found wrong is a sentence, "" for nothing.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

import torch
import xxhash

from tests.devices.simulated_disk import Moment, Policy, SimulatedDisk
from tests.store.rig import Counter, await_true, numbers, simulated_store
from tests.store.simulated_catalog import SimulatedCatalog
from tests.store.together import Together
from tiered.errors import TieredError
from tiered.store.catalog.catalog import GenerationName
from tiered.store.format.row import Extent, Row, part_of
from tiered.store.space import extents as device_space
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

LAGS = (0, 0, 3, 6)  # actions of a job between a commit and its confirmation, where no call waits for that

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
    """A seeded sequence of puts, leases, deletes, commits and rollbacks, noted in the oracle before it is asked for.

    The job confirms its commits itself, where ``together`` says that others share the store.
    """

    def __init__(self, store: Store, oracle: Oracle, seed: int, together: Together | None) -> None:
        self.store = store
        self.oracle = oracle
        self.together = together
        self.lag = 0
        if together is not None:
            condition = store.working_set.condition
            together.is_awaited = lambda: bool(condition._waiters)
        self.rng = random.Random(seed)
        self.counter = Counter()
        store.register("counter", self.counter)
        store.resume()

    def run(self, num_steps: int) -> None:
        """Each step changes some keys and commits; the next one goes on while that commit runs."""
        for _ in range(num_steps):
            for _ in range(self.rng.randint(4, 8)):
                actions = self.put, self.write, self.write_part, self.delete, self.go_back, self.hint
                self.rng.choices(actions, (8, 6, 4, 2, 1, 2))[0]()
                self.confirm()
            self.commit_later()
        self.commit()

    def put(self) -> None:
        name = self.rng.choice(NAMES)
        value = numbers(self.rng.choice(SIZES), self.rng.getrandbits(30))
        self.store.put(name, value, block_size=self.rng.choice((None, "4KiB")))
        self.oracle.open[name] = value

    def write(self) -> None:
        if not self.oracle.open:
            return
        name = self.rng.choice(sorted(self.oracle.open))
        with self.store.lease(name, "rw") as view:
            view += 1
        self.oracle.open[name] = self.oracle.open[name] + 1

    def write_part(self) -> None:
        """Write some bytes by themselves: their blocks, and the pages of the catalog that these are in."""
        if not self.oracle.open:
            return
        name = self.rng.choice(sorted(self.oracle.open))
        value = self.oracle.open[name].clone()
        start = self.rng.randrange(value.numel())
        if self.rng.random() < 0.5:
            part = numbers(self.rng.randint(1, value.numel() - start), self.rng.getrandbits(30))
            self.store.write_part(name, start, part)
            value[start : start + part.numel()] = part
        else:
            index = torch.tensor(self.rng.sample(range(value.numel()), min(9, value.numel())))
            self.store.rows(name).add(index, numbers(len(index), start))
            value.index_add_(0, index, numbers(len(index), start))
        self.oracle.open[name] = value

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
        self.lag = 0 if self.together is None else self.rng.choice(LAGS)
        if self.together is None or not self.lag:
            self._start_commit()
            return
        asked = self.together.asked
        asked.clear()
        self.together.may_confirm.clear()
        self._start_commit()
        await_true(lambda: asked.is_set() or self.store.working_set.sealed is None)

    def _start_commit(self) -> None:
        assert self.store.commit({"step": self.counter.count}, wait=False) == max(self.oracle.contents)

    def confirm(self) -> None:
        """Let the last commit be confirmed, if it is time."""
        self.lag -= 1
        if self.together is not None and self.lag <= 0:
            self.together.may_confirm.set()

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
    oracle: Oracle
    acknowledged: int
    newest: int  # sealed, or about to be
    confirmed: int  # by all that share the store; ``acknowledged``, or newer than that

    @property
    def is_inside_commit(self) -> bool:
        return self.newest > self.acknowledged


@dataclass(frozen=True, slots=True)
class Setting:
    """How the store of a job is opened."""

    num_devices: int = 1
    is_shared: bool = False

    def open(self, disk: SimulatedDisk, together: Together | None) -> Store:
        return simulated_store(disk, budget_nbytes=BUDGET_NBYTES, num_devices=self.num_devices, confirmation=together)

    def confirmation(self, chosen: int | None = None) -> Together | None:
        """Return that of a store that others share, all of which have ``chosen``; None: that of this store alone."""
        return Together(chosen) if self.is_shared else None


def job_instants(
    disk: SimulatedDisk, oracle: Oracle, setting: Setting, *, seed: int, num_steps: int, left: Instant | None = None
) -> list[Instant]:
    """Run the job to its end; return the instants at all its operations, and the one after the last.

    ``left`` is what a crash has left, where ``oracle`` is of the generation before the newest in it: then the instants
    of the opening, which discards that one, come first.
    """
    instants: list[Instant] = []
    lock = threading.Lock()  # not the disk's own: the oracle is noted by another thread
    together = setting.confirmation(None if left is None else oracle.acknowledged)

    def note(moment: Moment) -> None:
        with lock:
            # Order: ``acknowledged`` first, which only ever follows what is on the disk by now.
            acknowledged = oracle.acknowledged
            confirmed = acknowledged if together is None else together.confirmed
            instants.append(Instant(moment, oracle, acknowledged, max(list(oracle.contents)), confirmed))

    def note_opening(moment: Moment) -> None:
        assert left is not None
        instants.append(Instant(moment, left.oracle, oracle.acknowledged, left.newest, oracle.acknowledged))

    disk.watch = None if left is None else note_opening
    with setting.open(disk, together) as store:
        disk.watch = note
        Job(store, oracle, seed, together).run(num_steps)
        disk.watch = None
    note(disk.moment())
    return instants


@dataclass(slots=True)
class Campaign:
    """All crash states of the job of one seed. Odd seeds stripe over two devices; 1, 2, 5, 6 and so on are shared.

    States of one instant with the same bytes, files and catalog, are opened once with each generation that others may
    choose: ``num_opened`` counts these, ``num_states`` all states.
    """

    seed: int
    part: slice = field(default_factory=lambda: slice(None))  # of the instants, for campaigns that share them out
    num_steps: int = NUM_STEPS
    num_operations: int = 0
    num_states: int = 0
    num_opened: int = 0
    num_in_recovery: int = 0  # of these opened, after a crash of what a crash had left
    num_inside_commit: int = 0  # of these opened
    num_before: int = 0  # of these opened, with the generation before the newest
    num_discards: int = 0  # recoveries that began with one
    wrong: list[str] = field(default_factory=list)
    _found: dict[bytes, str] = field(default_factory=dict)  # what is wrong with a state, by its bytes

    @property
    def setting(self) -> Setting:
        return Setting(1 + self.seed % 2, is_shared=self.seed % 4 in (1, 2))

    def run(self, *, until_wrong: bool = False) -> Campaign:
        """Crash after every operation, and once at each instant again after every operation of the recovery.

        ``until_wrong``: the first instant with something wrong is enough.
        """
        with small_files():
            oracle = Oracle()
            disk = SimulatedDisk(capacity_nbytes=CAPACITY_NBYTES)
            setting = self.setting
            simulated_store(disk, num_devices=setting.num_devices).close()  # empty: creation has its own tests
            try:
                instants = job_instants(disk, oracle, setting, seed=self.seed, num_steps=self.num_steps)
            except Exception as error:
                self.wrong.append(f"the job fails: {error!r}")
                return self
            self.num_operations = len(instants) - 1
            for instant in instants[self.part]:
                if until_wrong and self.wrong:
                    break
                where = f"operation {instant.moment.number}"
                self._crash(instant, POLICIES, where)
                self._crash_in_recovery(instant, where)
        return self

    def _crash(self, instant: Instant, policies: tuple[Policy, ...], where: str) -> None:
        self._found.clear()  # what a key stands for lives as long as its moment
        rng = random.Random(f"{self.seed}/{where}")
        for number, policy in enumerate(policies):
            self.num_states += 1
            disk = instant.moment.survivor(rng, policy)
            key = _fingerprint(disk, self.setting.num_devices)
            if key not in self._found:
                self._found[key] = self._look(disk, instant)
            if self._found[key]:
                self.wrong.append(f"{where}, {policy} (number {number}): {self._found[key]}")

    def _look(self, disk: SimulatedDisk, instant: Instant) -> str:
        """Open a state, with each generation that others may choose; return what is wrong."""
        try:
            kept = _choices(disk, instant)
        except TieredError as error:
            return f"cannot be opened: {error}"
        before = disk.moment()
        self.num_opened += len(kept)
        self.num_before += len(kept) - 1
        self.num_inside_commit += instant.is_inside_commit * len(kept)
        found = look(disk, instant.oracle, self.setting)
        if not isinstance(found, int):
            return found
        if not instant.confirmed <= found <= instant.newest:
            return f"generation {found}, expected {instant.confirmed} to {instant.newest}"
        if self.setting.is_shared and found > instant.confirmed and len(kept) < 2:
            return f"generation {found} is not confirmed, and the one before is gone"
        for name in kept[1:]:
            found = look(before.survivor(random.Random(0), "drop"), instant.oracle, self.setting, chosen=name.number)
            if found != name.number:
                return f"with generation {name.number}, which all have: {found}"
        return ""

    def _crash_in_recovery(self, instant: Instant, where: str) -> None:
        """Go on with what one crash has left: open it, commit, and crash after every operation of that."""
        disk = instant.moment.survivor(random.Random(f"{self.seed}/{where}/recovery"), "subset")
        left, before = disk.moment(), self.num_opened
        for name in _choices(disk, instant):
            self._recover(left, instant, name.number, f"{where}, recovery with generation {name.number}")
        self.num_in_recovery += self.num_opened - before

    def _recover(self, left: Moment, instant: Instant, chosen: int, where: str) -> None:
        disk, twin = (left.survivor(random.Random(0), "drop") for _ in range(2))
        found = look(twin, instant.oracle, self.setting, chosen=chosen)
        if found != chosen:
            self.wrong.append(f"{where}: {found}")
            return
        is_discarded = chosen < _kept(disk)[0].number
        self.num_discards += is_discarded
        try:
            instants = job_instants(
                disk,
                instant.oracle.at(chosen),
                self.setting,
                seed=instant.moment.number,
                num_steps=1,
                left=instant if is_discarded else None,
            )
        except Exception as error:
            self.wrong.append(f"{where}: {error!r}")
            return
        for second in instants:
            self._crash(second, POLICIES_IN_RECOVERY, f"{where}, operation {second.moment.number}")


def _choices(disk: SimulatedDisk, instant: Instant) -> tuple[GenerationName, ...]:
    """Return the generations that all that share the store may have: the newest on ``disk``, or the one before."""
    kept = _kept(disk)
    return kept if kept[0].number > instant.confirmed else kept[:1]


def _kept(disk: SimulatedDisk) -> tuple[GenerationName, ...]:
    with closing(SimulatedCatalog(disk)) as catalog:
        return catalog.kept()


def _fingerprint(disk: SimulatedDisk, num_devices: int) -> bytes:
    """Return what tells one disk from another; the catalog's content is alive as long as the moment."""
    digest = xxhash.xxh3_128(str(id(disk.load("catalog"))).encode())
    for device in range(num_devices):
        for file, nbytes in sorted(disk.sizes(device).items()):
            digest.update(f"{device} {file} {nbytes} ".encode())
            digest.update(disk.image(device, file))
    return digest.digest()


def look(disk: SimulatedDisk, oracle: Oracle, setting: Setting, *, chosen: int | None = None) -> int | str:
    """Open what the power cut has left, check all of it, and commit once more; return its generation."""
    try:
        with setting.open(disk, setting.confirmation(chosen)) as store:
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


def _extents(row: Row) -> tuple[Extent, ...]:
    return part_of(row, 0, row.num_blocks).extents if row.is_paged else row.extents


def _wrong_extents(store: Store) -> str:
    """Every byte in use belongs to one committed extent: nothing leaks, nothing overlaps."""
    rows = [store.working_set.entries[name].row for name in store]
    extents = sorted(extent for row in rows if row is not None for extent in _extents(row))
    for one, other in itertools.pairwise(extents):
        if one[:2] == other[:2] and one.offset + one.nbytes > other.offset:
            return f"{one} overlaps {other}"
    used, named = store.working_set.space.used_nbytes, sum(extent.nbytes for extent in extents)
    return "" if used == named else f"{used} bytes are in use, the keys name {named}"

"""A drive that does one transfer wrongly and says it was right, or does less of it than it was asked to.

Wrong ones are injected over simulated devices, short ones below the engines, at the system call. A case is one store
with some generations behind it, so that every place that is written again has held an earlier version of the same key.
"""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from tests.bytes.faulty import ENGINES, Call, Faulty
from tests.devices.adaptor import Adaptor, relay
from tests.devices.faults import Fault, FaultKind, FaultsDevice
from tests.devices.simulated_disk import SimulatedDisk
from tests.store.rig import WAIT_S, numbers, simulated_store
from tiered.bytes.arena import Arena
from tiered.bytes.device.base import Device, Operation
from tiered.errors import CorruptionError
from tiered.store.catalog.sqlite_catalog import SqliteCatalog
from tiered.store.lifetime.directory import CATALOG_NAME, Directories
from tiered.store.lifetime.opening import Parts, empty_root
from tiered.store.store import Store
from tiered.units import KiB, MiB

__all__ = ["KINDS", "Case", "Kind", "Outcome", "batch", "try_cases", "try_short"]

Kind = Literal[
    "lost write", "misdirected write", "torn write", "flipped write",
    "lost read", "misdirected read", "stale read", "torn read", "flipped read",
]  # fmt: skip
KINDS: dict[Kind, int] = {
    "lost write": 4, "misdirected write": 4, "torn write": 2, "flipped write": 1,
    "lost read": 1, "misdirected read": 2, "stale read": 3, "torn read": 1, "flipped read": 1,
}  # fmt: skip
"""What goes wrong, and how often it is drawn. A lost write over an earlier version leaves that one: a stale write."""

_FAULTS = {
    "lost": FaultKind.LOSE,
    "misdirected": FaultKind.MISDIRECT,
    "torn": FaultKind.TEAR,
    "flipped": FaultKind.FLIP,
}
_SIZES = (4 * KiB, 5001, 8 * KiB, 12 * KiB, 20_000, 40 * KiB)  # the last one is streamed
_BATCH = 50


@dataclass(frozen=True, slots=True)
class Case:
    """The ``nth`` transfer of a generation, or of the reading after it, goes wrong as ``kind`` says."""

    kind: Kind
    nth: int

    @property
    def is_write(self) -> bool:
        return self.kind.endswith("write")


@dataclass(slots=True)
class Outcome:
    """What became of a case: how often it came to happen, which keys were refused, and what was wrong ("")."""

    num_hits: int
    refused: set[str] = field(default_factory=set)
    wrong: str = ""


class StaleDevice(Adaptor):
    """Gives what the device held at ``remember`` for the ``nth`` read after it of something that has changed since."""

    def __init__(self, upstream: Device, disk: SimulatedDisk, index: int) -> None:
        super().__init__(upstream)
        self._disk, self._index = disk, index
        self._past: dict[int, bytes] = {}
        self.num_hits = 0
        self._left = -1

    def remember(self) -> None:
        self._past = {file: bytes(self._disk.image(self._index, file)) for file in self.files()}

    def give_stale(self, nth: int) -> None:
        self._left = nth

    def submit(self, operations: Sequence[Operation]) -> None:
        self.upstream.submit([self._spoiled(operation) for operation in operations])

    def _spoiled(self, operation: Operation) -> Operation:
        start, end = operation.offset, operation.offset + len(operation.memory)
        past = self._past.get(operation.file, b"")[start:end]
        if operation.is_write or self._left < 0 or len(past) < len(operation.memory):
            return operation
        if past == self._disk.image(self._index, operation.file)[start:end]:
            return operation
        self._left -= 1
        if self._left >= 0:
            return operation
        self.num_hits += 1

        def spoil(relayed: Operation) -> None:
            operation.memory[:] = past
            operation.error = relayed.error
            operation.on_done(operation)

        return relay(operation, spoil)


class Job:
    """A store over simulated devices that goes through case after case, mended and opened again in between."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._disk = SimulatedDisk(capacity_nbytes=2 * MiB, can_lose_power=False)
        self._num_devices = self._rng.choice((1, 2))
        names = "abcdef"[: self._rng.randrange(3, 7)]
        self._sizes = {name: self._rng.choice(_SIZES) for name in names} | {"inline": 100}
        self._values: dict[str, torch.Tensor] = {}
        self._open()
        for _ in range(3):
            self._put(list(self._sizes))
            self._store.commit()

    def close(self) -> None:
        self._store.close()

    def try_case(self, case: Case) -> Outcome:
        """Make a generation with the fault of ``case`` in its writes or in the reads after it, and look at it."""
        target = self._rng.randrange(self._num_devices)
        faults, stale = self._faults[target], self._stale[target]
        stale.remember()
        num_hits = len(faults.hits) + stale.num_hits
        if case.is_write:
            _inject(faults, case)
        # Each is put once: so whatever is written is read later.
        self._put(self._rng.sample(sorted(self._sizes), self._rng.randrange(2, len(self._sizes) + 1)))
        self._store.commit()
        _bring_out(self._store)
        if case.kind == "stale read":
            stale.give_stale(case.nth)
        elif not case.is_write:
            _inject(faults, case)
        refused, wrong = _look(self._store, self._values, self._rng)
        stale.give_stale(-1)
        faults.forget()
        outcome = Outcome(len(faults.hits) + stale.num_hits - num_hits, refused, wrong)
        if not wrong:
            outcome.wrong = self._judge(case, outcome)
        return outcome

    def _judge(self, case: Case, outcome: Outcome) -> str:
        """Verify, open the store again now and then, and mend it; return what is wrong."""
        refused = outcome.refused
        if case.kind.startswith("flipped") and not refused:
            outcome.num_hits = 0  # a bit behind the end of a tensor, which is nobody's
        if bool(refused) != bool(outcome.num_hits):
            return f"{outcome.num_hits} faults, and {sorted(refused)} are refused"
        damaged = refused if case.is_write else set()  # one read was wrong, the next one is not
        for _ in range(2):
            found = {error.key for error in self._store.verify().errors}
            again, wrong = _look(self._store, self._values, self._rng)
            if wrong or not (found == again == damaged):
                return wrong or f"{refused} were refused, then {again}, and verify reports {found}"
            if self._rng.random() < 0.8:
                break
            self.close()
            self._open()
        self._put(sorted(refused))
        self._store.commit()
        return ""

    def _open(self) -> None:
        self._faults: list[FaultsDevice] = []
        self._stale: list[StaleDevice] = []

        def wrap(device: Device) -> Device:
            self._stale.append(StaleDevice(device, self._disk, len(self._stale)))
            self._faults.append(FaultsDevice(self._stale[-1], seed=self._rng.getrandbits(30)))
            return self._faults[-1]

        self._store = simulated_store(self._disk, num_devices=self._num_devices, wrap=wrap)

    def _put(self, names: Sequence[str]) -> None:
        values = {name: numbers(self._sizes[name], self._rng.getrandbits(30)) for name in names}
        self._values |= values
        self._store.put_many(values)


def _inject(device: FaultsDevice, case: Case) -> None:
    word, call = case.kind.split()
    device.inject(Fault("write" if call == "write" else "read", _FAULTS[word], nth=case.nth))


def draw(rng: random.Random) -> Case:
    return Case(rng.choices(list(KINDS), list(KINDS.values()))[0], rng.choice((0, 0, 0, 1, 1, 2, 3)))


def try_cases(seed: int, num: int) -> list[tuple[Case, Outcome]]:
    """Try so many cases of ``seed`` that came to happen; one that goes wrong is the last."""
    rng, tried, job = random.Random(f"cases of {seed}"), [], Job(seed)
    with closing(job):
        while len(tried) < num:
            case = draw(rng)
            try:
                outcome = job.try_case(case)
            except Exception as error:
                outcome = Outcome(1, wrong=f"{type(error).__name__}: {error}")
            if outcome.num_hits or outcome.wrong:
                tried.append((case, outcome))
            if outcome.wrong:
                break
    return tried


def batch(seed: int, place: Path) -> tuple[int, list[str]]:
    """Try the cases of ``seed``, one of them with short transfers in ``place``; return their number, what was wrong."""
    tried = try_cases(seed, _BATCH - 1)
    wrong = [f"{case}: {outcome.wrong}" for case, outcome in tried if outcome.wrong]
    num_short, short_wrong = try_short(seed, place)
    return len(tried) + (num_short > 0), wrong + [short_wrong] * bool(short_wrong)


def _bring_out(store: Store) -> None:
    """Leave nothing of the store in DRAM, not even in free memory."""
    store.working_set.swap_out(list(store))
    buffer = store.working_set.reserve(store.working_set.budget_bytes)
    buffer.memory[:] = bytes(buffer.nbytes)
    store.working_set.unreserve(buffer)


def _look(store: Store, values: dict[str, torch.Tensor], rng: random.Random) -> tuple[set[str], str]:
    """Read every key, one way or another; return those that are refused, and what is wrong."""
    refused: set[str] = set()
    names = rng.sample(sorted(values), len(values))
    for name in names:
        try:
            if rng.random() < 0.5:
                found = store[name]
            else:
                with store.lease(name) as view:
                    found = view.clone()
                    del view
            if not torch.equal(found, values[name]):
                return refused, f"{name!r} was read with other bytes"
        except CorruptionError as error:
            if error.key != name or not error.file or error.offset < 0:
                return refused, f"damage without its place: {error!r}"
            refused.add(name)
    return refused, ""


# Below: transfers that are short


class _Short:
    """A fault below an engine: every second call at an offset moves only some sectors of what it was asked for."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._num_calls = Counter[int]()  # by offset
        self.num_hits = 0

    def __call__(self, call: Call, fd: int, memory: memoryview, offset: int) -> int:
        self._num_calls[offset] += 1
        if self._num_calls[offset] % 2 == 0 or len(memory) <= 512:
            return call(fd, memory, offset)
        self.num_hits += 1
        return call(fd, memory[: self._rng.randrange(1, len(memory) // 512) * 512], offset)


def try_short(seed: int, place: Path) -> tuple[int, str]:
    """Make a store in ``place`` while many transfers are short; return how many were, and what was wrong."""
    rng = random.Random(f"short {seed}")
    engine = rng.choice(sorted(ENGINES))
    short = _Short(rng)
    with tempfile.TemporaryDirectory(dir=place) as directory:
        path = Path(directory) / "store"
        values = {name: numbers(rng.choice(_SIZES), rng.getrandbits(30)) for name in "abcdef"}
        with _store_of_files(path, engine, short) as store:
            store.put_many(values)
            store.commit()
            _bring_out(store)
            refused, wrong = _look(store, values, rng)
        if not wrong and not refused:
            with Store(path, dram="8MiB") as store:
                refused, wrong = _look(store, values, rng)
    return short.num_hits, wrong or f"{engine}: {sorted(refused)} came out short" * bool(refused)


def _store_of_files(place: Path, engine: str, fault: _Short) -> Store:
    """Open a new store whose one device passes its system calls through ``fault``."""
    directories = Directories.open([place])
    catalog = SqliteCatalog.create(directories.paths[0] / CATALOG_NAME, empty_root(directories.store_uuid, 1))
    options = {} if engine.startswith("uring") else {"num_threads": 2}
    device: Faulty = ENGINES[engine](directories.paths[0], **options)
    device.fault = fault
    parts = Parts(Arena(8 * MiB), [device], catalog, directories)
    store = Store._from_parts(parts, deadline_s=WAIT_S)
    return store

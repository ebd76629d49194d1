"""Stores over simulated devices, small enough to evict, split, stream and run out of everything."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch

from tests.devices.simulated_disk import SimulatedDisk
from tests.store.simulated_catalog import SimulatedCatalog
from tiered.bytes.arena import Arena
from tiered.bytes.device.base import Device, DeviceStatistics, Operation
from tiered.bytes.device.memory import MemoryDevice
from tiered.bytes.pinned_arena import PinnedArena, Registrar
from tiered.errors import TieredError
from tiered.store.catalog.catalog import Alone, Confirmation
from tiered.store.catalog.sqlite_catalog import SqliteCatalog
from tiered.store.format.root import Root
from tiered.store.format.row import Row
from tiered.store.lifetime.external import ExternalSources
from tiered.store.lifetime.opening import Parts, empty_root
from tiered.store.residency.residency import Residency
from tiered.store.store import Store
from tiered.units import KiB, MiB

BUDGET_NBYTES = 128 * KiB
WAIT_S = 30.0  # longer than anything here takes; a lost wake-up fails a test instead of hanging it


def simulated_store(
    disk: SimulatedDisk | None = None,
    *,
    budget_nbytes: int = BUDGET_NBYTES,
    num_devices: int = 1,
    durable: bool = True,
    deadline_s: float = WAIT_S,
    wrap: Callable[[Device], Device] = lambda device: device,
    arena: Arena | None = None,
    confirmation: Confirmation | None = None,
    external: Sequence[Path] = (),
) -> Store:
    """Open the store on ``disk``, creating it where there is none. ``wrap`` puts an adaptor around each device."""
    arena = Arena(budget_nbytes) if arena is None else arena
    disk = SimulatedDisk(capacity_nbytes=4 * MiB, can_lose_power=False) if disk is None else disk
    catalog = None
    if durable:
        is_new = disk.load("catalog") is None
        root = empty_root(uuid.UUID(int=7).bytes, num_devices)
        catalog = SimulatedCatalog.create(disk, root) if is_new else SimulatedCatalog(disk)
    devices = [wrap(MemoryDevice(disk, index)) for index in range(num_devices)]
    sources = ExternalSources(external, "threads")
    parts = Parts(arena, devices, catalog, confirmation=confirmation or Alone(), external=sources)
    store = Store._from_parts(parts, deadline_s=deadline_s)
    store.working_set.space.least_given_nbytes = 16 * KiB  # so that deletions make holes here
    return store


def pinned_arena(registrar: Registrar, nbytes: int) -> PinnedArena:
    """Return an arena of four pieces, where half of the tensors here are large."""
    arena = PinnedArena(nbytes, registrar, piece_nbytes=nbytes // 3, large_nbytes=16 * KiB)
    arena.lock_pages(torch.device("xpu", 0))
    return arena


def numbers(nbytes: int, seed: int = 0) -> torch.Tensor:
    """Return (nbytes,) uint8, different for each seed."""
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def filled(store: Store, seed: int = 0) -> dict[str, torch.Tensor]:
    """Put an inline, an ordinary and a streamed tensor; return what they are."""
    values = {"inline": numbers(100, seed), "ordinary": numbers(12 * KiB, seed), "streamed": numbers(40 * KiB, seed)}
    store.put_many(values)
    return values


def written(store: Store) -> None:
    """Bring everything to the devices and out of DRAM."""
    store.working_set.swap_out(store)
    store.working_set.unreserve(store.working_set.reserve(16 * MiB))


def write_key(working_set: Residency, key: str, nbytes: int, value: int, *, scratch: bool = False) -> None:
    working_set.create(key, nbytes, scratch=scratch)
    lease = working_set.lease(key, "w")
    lease.tensor.fill_(value)
    assert lease.release()


def read_key(working_set: Residency, key: str) -> int:
    lease = working_set.lease(key, "r")
    found = lease.tensor.unique().tolist()
    assert lease.release()
    assert len(found) == 1, f"{key} holds {found}"
    return int(found[0])


def stored(working_set: Residency, *keys: str) -> None:
    """Bring ``keys`` to the device and out of DRAM."""
    working_set.swap_out(keys)
    buffer = working_set.reserve(working_set.budget_bytes)
    working_set.unreserve(buffer)
    assert not any(working_set.is_resident(key) for key in keys if working_set.entries[key].nbytes)


def assert_holds(store: Store, values: dict[str, torch.Tensor]) -> None:
    assert set(store) == set(values)
    for name, value in values.items():
        assert torch.equal(store[name], value), name


@contextmanager
def beside(*calls: Callable[[], object]) -> Iterator[list[threading.Thread]]:
    """Do ``calls`` in threads of their own beside the block; once all have ended, raise the first error of one."""
    errors: list[BaseException] = []

    def run(call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    try:
        yield threads
    finally:
        for thread in threads:
            thread.join(2 * WAIT_S)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]


def await_true(is_so: Callable[[], bool]) -> None:
    """Return when ``is_so()``: for what another thread does and tells nobody."""
    for _ in range(int(WAIT_S / 0.001)):
        if is_so():
            return
        threading.Event().wait(0.001)
    raise AssertionError("it did not come to pass")


class GatedDevice(Device):
    """Another device, whose operations a test can hold up, fail and watch.

    ``hold`` chooses operations that wait until ``open``; ``fail`` returns the error an operation is to end with.
    ``events`` are "read", "write", "flush" and "grow", as they are asked for.
    """

    def __init__(self, device: Device) -> None:
        self.name = device.name
        self.alignment = device.alignment
        self.hold: Callable[[Operation], bool] = lambda operation: False
        self.fail: Callable[[Operation], Exception | None] = lambda operation: None
        self.events: list[str] = []
        self.held: list[Operation] = []
        self.has_held = threading.Event()
        self.device = device
        self._gate = threading.Lock()

    def submit(self, operations: Sequence[Operation]) -> None:
        for operation in operations:
            self.events.append("write" if operation.is_write else "read")
            error = self.fail(operation)
            if error is not None:
                operation.error = error
                operation.on_done(operation)
            elif not self._is_held(operation):
                self.device.submit([operation])

    def _is_held(self, operation: Operation) -> bool:
        with self._gate:  # order: nothing may be held once ``open`` has looked
            is_held = self.hold(operation)
            if is_held:
                self.held.append(operation)
                self.has_held.set()
            return is_held

    def open(self) -> None:
        """Let what is held go on, and hold nothing any more."""
        with self._gate:
            self.hold = lambda operation: False
        while self.held:
            self.device.submit([self.held.pop(0)])

    def files(self) -> dict[int, int]:
        return self.device.files()

    def grow(self, file: int, nbytes: int) -> None:
        self.events.append("grow")
        self.device.grow(file, nbytes)

    def punch(self, file: int, start: int, end: int) -> bool:
        return self.device.punch(file, start, end)

    def fill(self, file: int, start: int, end: int) -> None:
        self.device.fill(file, start, end)

    def holes(self, file: int) -> list[tuple[int, int]]:
        return self.device.holes(file)

    def flush(self) -> None:
        self.events.append("flush")
        self.device.flush()

    def free_bytes(self) -> int:
        return self.device.free_bytes()

    def path(self, file: int) -> str:
        return self.device.path(file)

    def statistics(self) -> DeviceStatistics:
        return self.device.statistics()

    def close(self) -> None:
        self.device.close()


class GatedCatalog:
    """Another catalog, whose commits a test can hold up and fail. ``events`` gets "apply"."""

    def __init__(self, catalog: SqliteCatalog, events: list[str]) -> None:
        self.events = events
        self.failure: Exception | None = None
        self.may_apply = threading.Event()
        self.may_apply.set()
        self.reached = threading.Event()
        self._catalog = catalog

    def __getattr__(self, name: str) -> Any:
        return getattr(self._catalog, name)

    def apply(self, root: Root, upserts: Sequence[Row], deleted: Sequence[int], *, keeps_before: bool = False) -> None:
        self.reached.set()
        assert self.may_apply.wait(WAIT_S)
        if self.failure is not None:
            raise self.failure
        self.events.append("apply")
        self._catalog.apply(root, upserts, deleted, keeps_before=keeps_before)


class GatedStore:
    """A store whose device and catalog can be held up, failed and watched; opened again, it is the same one."""

    def __init__(
        self,
        *,
        budget_nbytes: int = BUDGET_NBYTES,
        deadline_s: float = WAIT_S,
        confirmation: Confirmation | None = None,
    ) -> None:
        self.disk = SimulatedDisk(capacity_nbytes=1 * MiB, can_lose_power=False)
        self.confirmation = confirmation or Alone()
        self.budget_nbytes = budget_nbytes
        self.deadline_s = deadline_s
        self.events: list[str] = []
        self.catalog: GatedCatalog
        self.device: GatedDevice
        self.store: Store
        self.open()

    def open(self) -> None:
        """Open the store; the one before must be closed."""
        if self.disk.load("catalog") is None:
            SimulatedCatalog.create(self.disk, empty_root(uuid.UUID(int=7).bytes, 1)).close()
        self.device = GatedDevice(MemoryDevice(self.disk, 0))
        self.device.events = self.events
        self.catalog = GatedCatalog(SimulatedCatalog(self.disk), self.events)
        arena = Arena(self.budget_nbytes)
        parts = Parts(arena, [self.device], cast(Any, self.catalog), confirmation=self.confirmation)
        self.store = Store._from_parts(parts, deadline_s=self.deadline_s)

    def let_through(self, action: Callable[[Callable[[], None]], None]) -> None:
        """Run ``action(done)`` in a thread, which calls ``done`` only once the device is open; return at its end."""
        done = threading.Event()
        thread = threading.Thread(target=lambda: action(done.set))
        thread.start()
        assert not done.is_set()
        self.device.open()
        thread.join(WAIT_S)
        assert done.is_set()

    def close(self) -> None:
        """Let everything go on, and close, whatever state the store is in."""
        self.device.fail = lambda operation: None
        self.device.open()
        self.catalog.may_apply.set()
        try:
            self.store.close()
        except TieredError:
            pass


class Counter:
    """Something with a state to register."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state_dict(self) -> dict[str, object]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]

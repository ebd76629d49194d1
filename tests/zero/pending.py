"""A commit whose seal waits for an update that is held, and what its generation must contain."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

import tiered
from tests.devices.simulated_disk import SimulatedDisk
from tests.store.rig import Counter, GatedCatalog, simulated_store
from tests.zero.test_pipeline import ROOMY_NBYTES, Rig
from tiered.units import MiB

Contents = tuple[int, str, dict[str, torch.Tensor]]


def new_disk() -> SimulatedDisk:
    return SimulatedDisk(capacity_nbytes=4 * MiB)


def is_pending(store: tiered.Store) -> bool:
    return store.working_set.must_await_seal


def sealed(store: tiered.Store) -> int:
    """Return the number of the last sealed generation."""
    return store.working_set.generation


def contents(disk: SimulatedDisk) -> Contents:
    """Return what a store opened on ``disk`` holds after a kill -9 now: generation, state and all tensors."""
    store = simulated_store(disk.moment().survivor(random.Random(0), "keep"), budget_nbytes=ROOMY_NBYTES)
    root = store._generations.root
    found = root.generation, root.state, store.get_many(store)
    store.close()
    return found


def assert_equal(left: Contents, right: Contents) -> None:
    assert left[:2] == right[:2]
    assert left[2].keys() == right[2].keys()
    assert [name for name in left[2] if not torch.equal(left[2][name], right[2][name])] == []


class Pending(Rig):
    """A rig with a key and a counter of the user's, both in every commit."""

    def __init__(self, disk: SimulatedDisk, *, seed: int = 7) -> None:
        super().__init__(disk, "step", seed=seed)
        self.counter = Counter(1)
        self.store.register("counter", self.counter)

    @classmethod
    @contextmanager
    def reopened(cls, disk: SimulatedDisk) -> Iterator[Pending]:
        """Yield the rig on ``disk``, with another model until it is resumed."""
        made = cls(disk, seed=1)
        try:
            yield made
        finally:
            made.close()

    def fail_what_is_held(self, error: Exception) -> None:
        """End every operation that is held, and all like it, with ``error``."""
        is_hit, self.device.hold = self.device.hold, lambda operation: False
        self.device.fail = lambda operation: error if is_hit(operation) else None
        while self.device.held:
            operation = self.device.held.pop()
            operation.error = error
            operation.on_done(operation)
        self.worker._wait(lambda: not self.worker.is_busy, "")
        self.device.fail = lambda operation: None


@contextmanager
def pending(*, disk: SimulatedDisk | None = None, wait: bool = False, fits: bool = True) -> Iterator[Pending]:
    """Yield a rig whose second step is committed and, unless ``wait``, not sealed: an update waits for its state.

    Where it does not fit the device, only the seal will find that out.
    """
    made = Pending(disk or SimulatedDisk(capacity_nbytes=4 * MiB if fits else MiB, can_lose_power=False))
    try:
        made.store["user"] = torch.zeros(5000)
        made.session.run_step(0)
        made.store.commit({"step": 1})
        is_hit = made.reads_of("blocks.3")
        made.device.hold = made.device.hold if wait else is_hit
        if not fits:
            made.store["large"] = torch.zeros(75_000)
        made.session.run_step(1)
        assert made.store.commit({"step": 2}, wait=wait) == 2
        assert is_pending(made.store) == (not wait)
        assert sealed(made.store) == (2 if wait else 1)
        yield made
    finally:
        made.close()


def commit_twice(r: Rig, *, fits: bool = True) -> threading.Event:
    """Commit two steps. All updates are done, and the second seal waits for the first commit until the event is set."""
    catalog = GatedCatalog(r.store._parts.catalog, [])
    r.store._generations._committer._catalog = catalog
    r.session.run_step(0)
    r.worker.wait_for_all()
    catalog.may_apply.clear()
    r.store.commit({"step": 1}, wait=False)
    r.device.hold = r.reads_of("root")
    if not fits:
        r.store["large"] = torch.zeros(75_000)
    r.session.run_step(1)
    r.store.commit({"step": 2}, wait=False)
    r.device.open()
    r.worker._wait(lambda: not r.worker._is_updating, "")
    return catalog.may_apply

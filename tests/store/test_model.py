"""The store against a dict: hypothesis chooses the calls, every answer must be the dict's."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.store.rig import Counter, numbers, simulated_store
from tiered.bytes.device.memory import SimulatedDisk
from tiered.errors import LeaseError, UsageError
from tiered.store.store import Store
from tiered.store.working_set import Lease
from tiered.units import KiB, MiB

BUDGET_NBYTES = 64 * KiB
NAMES = st.sampled_from([*"abcdef", "", "\ud800", "../x", "n\0"])
SIZES = st.sampled_from([0, 1, 1024, 1025, 4096, 6000, 12 * KiB, 16 * KiB, 20 * KiB, 24 * KiB])
SEEDS = st.integers(0, 1000)


class StoreAgainstDict(RuleBasedStateMachine):
    """One store, reopened now and then; ``open``, ``sealed`` are what it must hold now and after a rollback."""

    @initialize(num_devices=st.sampled_from([1, 3]))
    def create(self, num_devices: int) -> None:
        self.disk = SimulatedDisk(capacity_nbytes=1 * MiB, can_lose_power=False)
        self.num_devices = num_devices
        self.open: dict[str, torch.Tensor] = {}
        self.sealed: dict[str, torch.Tensor] = {}
        self.state: dict[str, int] = {}
        self.sealed_count = 0
        self.generation = 0
        self.leases: list[tuple[Lease, torch.Tensor]] = []  # for reading, and what they must go on to show
        self.leased: set[str] = set()  # keys whose present bytes are among these
        self._open_store()

    def _open_store(self) -> None:
        self.store: Store = simulated_store(self.disk, budget_nbytes=BUDGET_NBYTES, num_devices=self.num_devices)
        self.counter = Counter()
        self.store.register("counter", self.counter)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self._release()
            self.store.close()

    def _release(self) -> None:
        for lease, _ in self.leases:
            lease.release()
        self.leases.clear()
        self.leased.clear()

    @rule(name=NAMES, nbytes=SIZES, seed=SEEDS)
    def put(self, name: str, nbytes: int, seed: int) -> None:
        value = numbers(nbytes, seed)
        self.store[name] = value
        self.open[name] = value
        self.leased.discard(name)

    @rule(name=NAMES, seed=SEEDS)
    def put_of_another_kind(self, name: str, seed: int) -> None:
        value = numbers(6000, seed).view(torch.bfloat16).reshape(30, 100)
        self.store[name] = value
        self.open[name] = value.clone()
        self.leased.discard(name)

    @rule(name=NAMES)
    def get(self, name: str) -> None:
        found = self.store.get(name)
        assert (found is None) == (name not in self.open)
        assert found is None or same(found, self.open[name])

    @rule(name=NAMES)
    def delete(self, name: str) -> None:
        if name in self.open:
            del self.store[name]
            del self.open[name]
            self.leased.discard(name)
        else:
            with pytest.raises(KeyError):
                del self.store[name]

    @rule(name=NAMES)
    def write_through_a_lease(self, name: str) -> None:
        if name not in self.open:
            return
        if name in self.leased:
            with pytest.raises(LeaseError):
                self.store.working_set.lease(name, "rw")
            return
        with self.store.lease(name, "rw") as view:
            view.view(-1)[:1].view(torch.uint8)[:1] += 1
        expected = self.open[name] = self.open[name].clone()
        expected.view(-1)[:1].view(torch.uint8)[:1] += 1

    @rule(name=NAMES, seed=SEEDS)
    def overwrite_through_a_lease(self, name: str, seed: int) -> None:
        if name in self.open and name not in self.leased:
            expected = self.open[name] = torch.empty_like(self.open[name])
            expected.view(-1).view(torch.uint8).copy_(numbers(expected.nbytes, seed))
            with self.store.lease(name, "w") as view:
                view.copy_(expected)

    @precondition(lambda self: len(self.leases) < 2)
    @rule(name=NAMES)
    def begin_to_read(self, name: str) -> None:
        if name in self.open and self.open[name].nbytes <= 12 * KiB:
            self.leases.append((self.store.working_set.lease(name, "r"), self.open[name].clone()))
            self.leased.add(name)

    @rule()
    def end_reading(self) -> None:
        for lease, expected in self.leases:
            assert same(lease.tensor, expected)
        self._release()

    @rule(names=st.lists(NAMES, max_size=6))
    def hint(self, names: list[str]) -> None:
        self.store.working_set.swap_out(names[:3])
        self.store.prefetch(names[3:])

    @rule(name=st.sampled_from("ab"))  # held, leased and streamed bytes together fit the budget
    def hold(self, name: str) -> None:
        if name in self.open:
            change = self.store.working_set.hold if self.open[name].nbytes <= 6000 else None
            (change or self.store.working_set.release_hold)([name])

    @rule(value=st.integers(), wait=st.booleans())
    def commit(self, value: int, wait: bool) -> None:
        self.counter.count += 1
        self.generation += 1
        assert self.store.commit({"value": value}, wait=wait) == self.generation
        self.sealed, self.sealed_count, self.state = dict(self.open), self.counter.count, {"value": value}

    @rule()
    def roll_back(self) -> None:
        if not self.generation:
            with pytest.raises(UsageError):
                self.store.rollback()
            return
        self.store.rollback()
        self.leased = {name for name in self.leased if self.open.get(name) is self.sealed.get(name)}
        self.open = dict(self.sealed)
        assert self.counter.count == self.sealed_count
        assert self.store.state == self.state

    @rule()
    def resume(self) -> None:
        if self.generation:
            assert self.store.resume() == self.state
            self.leased = {name for name in self.leased if self.open.get(name) is self.sealed.get(name)}
            self.open = dict(self.sealed)
            assert self.counter.count == self.sealed_count
        else:
            assert self.store.resume() == {}

    @rule(orderly=st.booleans())
    def reopen(self, orderly: bool) -> None:
        self._release()
        changed = self.store._records.has_changes
        if orderly:
            self.store.close()
            self.generation += changed
            if changed:
                self.sealed, self.sealed_count = dict(self.open), self.counter.count
        else:
            with pytest.raises(ZeroDivisionError), self.store:
                raise ZeroDivisionError
            self.open = dict(self.sealed)
        self._open_store()
        assert self.store.generation == self.generation
        assert self.store.resume() == self.state
        assert not self.generation or self.counter.count == self.sealed_count

    @invariant()
    def keys_are_the_dicts(self) -> None:
        if hasattr(self, "store"):
            assert len(self.store) == len(self.open)
            assert set(self.store) == set(self.open)

    @invariant()
    def budget_is_kept(self) -> None:
        if hasattr(self, "store"):
            statistics = self.store.working_set.statistics()
            assert statistics.arena_bytes <= statistics.peak_bytes <= BUDGET_NBYTES

    @invariant()
    def space_is_that_of_two_sets_and_no_more(self) -> None:
        if hasattr(self, "store"):
            self.store.wait_for_commit()
            taken = 2 * sum(-(-t.nbytes // 4096) * 4096 for t in [*self.open.values(), *self.sealed.values()])
            assert self.store.statistics().used_bytes <= taken

    @rule()
    def verify(self) -> None:
        assert self.store.verify().is_clean


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether dtype, shape and all bits are the same (NaN included)."""
    bits: Callable[[torch.Tensor], torch.Tensor] = lambda t: t.contiguous().view(-1).view(torch.uint8)  # noqa: E731
    return first.dtype == second.dtype and first.shape == second.shape and torch.equal(bits(first), bits(second))


StoreAgainstDict.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=True,
    database=None,
)
TestStoreAgainstDict = StoreAgainstDict.TestCase

"""The store against a dict: hypothesis chooses the calls, every answer must be the dict's."""

from __future__ import annotations

import atexit
import functools
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from safetensors.torch import save_file

from tests.devices.simulated_disk import SimulatedDisk
from tests.store.rig import WAIT_S, Counter, numbers, simulated_store
from tests.store.together import Together
from tiered.errors import DeviceError, LeaseError, TieredError, UsageError
from tiered.store.residency.residency import Lease
from tiered.store.store import Store
from tiered.units import KiB, MiB

_BATCH = 40

__all__ = ["StoreAgainstDict", "batch", "machine_settings"]

BUDGET_NBYTES = 64 * KiB
NAMES = st.sampled_from([*"abcdef", "", "\ud800", "../x", "n\0"])
SIZES = st.sampled_from([0, 1, 1024, 1025, 4096, 6000, 12 * KiB, 16 * KiB, 20 * KiB, 24 * KiB])
WIDTHS = st.sampled_from([1, 7, 512, 4096, 5000])
SEEDS = st.integers(0, 1000)
POLICIES = st.sampled_from(["drop", "keep", "subset", "torn", "torn pages"])
DTYPES = st.sampled_from(
    [torch.bfloat16, torch.bool, torch.complex64, torch.float8_e5m2, torch.float64, torch.int16, torch.uint32]
)
SHAPES = st.sampled_from([(), (0,), (0, 7), (3, 0, 2), (1,), (30, 20), (2, 3, 5, 7), (1,) * 8, (1024,), (1031,)])


class Sealed(NamedTuple):
    """What a generation holds."""

    generation: int
    contents: dict[str, torch.Tensor]
    count: int
    state: dict[str, int]


NOTHING = Sealed(0, {}, 0, {})

EXTERNAL = {"small": numbers(3001, 77), "large": numbers(22_222, 78)}
"""The tensors of a file of the user's own."""


@functools.cache
def _base() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="tiered-model-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    save_file(EXTERNAL, folder / "base.safetensors")
    return folder / "base.safetensors"


class StoreAgainstDict(RuleBasedStateMachine):
    """One store, reopened now and then; ``open`` is what it must hold now, ``sealed`` after a rollback.

    ``durable`` is the last generation that a crash must not lose: ``sealed``, or the one before while that commits. A
    store that others share is opened with either, as they say, until ``sealed`` is confirmed.
    """

    @initialize(num_devices=st.sampled_from([1, 3]), is_shared=st.booleans(), has_external=st.booleans())
    def create(self, num_devices: int, is_shared: bool, has_external: bool) -> None:
        self.external = [_base()] if has_external else []
        self.disk = SimulatedDisk(capacity_nbytes=1 * MiB)
        self.is_shared = is_shared
        self.together = Together()
        self.num_devices = num_devices
        self.open: dict[str, torch.Tensor] = {}
        self.sealed = self.durable = NOTHING
        self.leases: list[tuple[Lease, torch.Tensor]] = []  # for reading, and what they must go on to show
        self.leased: set[str] = set()  # keys whose present bytes are among these
        self._open_store()

    def _open_store(self, chosen: int | None = None) -> None:
        """Open the store; ``chosen`` is the generation that all have, where others share it: None for the newest."""
        self.together = Together(chosen)
        self.store: Store = simulated_store(
            self.disk,
            budget_nbytes=BUDGET_NBYTES,
            num_devices=self.num_devices,
            confirmation=self.together if self.is_shared else None,
            external=self.external,
        )
        condition = self.store.working_set.condition
        self.together.is_awaited = lambda: bool(condition._waiters)
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

    @rule(name=NAMES, nbytes=SIZES, seed=SEEDS, block=st.sampled_from([None, "4KiB", "8KiB"]))
    def put(self, name: str, nbytes: int, seed: int, block: str | None) -> None:
        value = numbers(nbytes, seed)
        self.store.put(name, value, block_size=block)
        self.open[name] = value
        self.leased.discard(name)

    @rule(name=NAMES, start=st.floats(0, 1), share=st.floats(0, 1), seed=SEEDS)
    def write_part(self, name: str, start: float, share: float, seed: int) -> None:
        if name not in self.open or self.open[name].dtype != torch.uint8:
            return
        expected = self.open[name].clone()
        first = int(start * expected.numel())
        part = numbers(int(share * (expected.numel() - first)), seed)
        try:
            self.store.write_part(name, first, part)
        except LeaseError:  # the bytes are in DRAM alone, and somebody reads them there
            assert name in self.leased
            return
        expected.view(-1)[first : first + part.numel()] = part
        self.open[name] = expected
        if part.numel():
            self.leased.discard(name)

    @rule(name=NAMES, start=st.floats(0, 1), share=st.floats(0, 1))
    def read_part(self, name: str, start: float, share: float) -> None:
        if name in self.open:
            flat = self.open[name].reshape(-1)
            first = int(start * flat.numel())
            stop = first + int(share * (flat.numel() - first))
            assert same(self.store.read_part(name, first, stop), flat[first:stop])

    @rule(name=NAMES, num_rows=st.sampled_from([0, 1, 3, 5, 20]), width=WIDTHS)
    def create_rows(self, name: str, num_rows: int, width: int) -> None:
        width = min(width, 24 * KiB // max(1, num_rows))
        if name in self.open:
            with pytest.raises(UsageError, match="the key is there"):
                self.store.create_rows(name, num_rows, (width,), torch.uint8)
            return
        assert len(self.store.create_rows(name, num_rows, (width,), torch.uint8)) == num_rows
        self.open[name] = torch.zeros(num_rows, width, dtype=torch.uint8)
        self.leased.discard(name)

    @rule(name=NAMES, seed=SEEDS, adds=st.booleans())
    def write_rows(self, name: str, seed: int, adds: bool) -> None:
        index = self._index(name, seed)
        if index is None:
            return
        expected = self.open[name].clone()
        values = numbers(len(index) * expected[:1].nbytes, seed).view(len(index), *expected.shape[1:])
        rows = self.store.rows(name)
        try:
            rows.add(index, values) if adds else rows.put(index, values)
        except LeaseError:  # as in write_part
            assert name in self.leased
            return
        for number, value in zip(index.tolist(), values, strict=True):
            expected[number] = expected[number] + value if adds else value
        self.open[name] = expected
        if values.numel():
            self.leased.discard(name)

    @rule(name=NAMES, seed=SEEDS)
    def read_rows(self, name: str, seed: int) -> None:
        index = self._index(name, seed)
        if index is not None:
            assert same(self.store.rows(name).get(index), self.open[name][index])

    def _index(self, name: str, seed: int) -> torch.Tensor | None:
        """Return some rows of the table of ``name``, repeats among them; None where it is no table of bytes."""
        table = self.open.get(name)
        if table is None or table.dtype != torch.uint8 or not table.dim() or not len(table):
            return None
        rng = random.Random(seed)
        return torch.tensor([rng.randrange(-len(table), len(table)) for _ in range(rng.choice((0, 1, 3, 9)))]).long()

    @precondition(lambda self: self.external)
    @rule(name=NAMES, source=st.sampled_from(["small", "large"]))
    def adopt(self, name: str, source: str) -> None:
        self.store.adopt(name, self.external[0], source)
        self.open[name] = EXTERNAL[source].clone()
        self.leased.discard(name)

    @rule(name=NAMES, dtype=DTYPES, shape=SHAPES, seed=SEEDS, is_strided=st.booleans())
    def put_of_another_kind(
        self, name: str, dtype: torch.dtype, shape: tuple[int, ...], seed: int, is_strided: bool
    ) -> None:
        numel = torch.Size(shape).numel()
        content = numbers(numel * dtype.itemsize, seed) & (1 if dtype == torch.bool else 255)
        value = content.view(dtype).reshape(shape)
        if is_strided:
            value = value.mT if value.dim() > 1 else value[::2] if value.dim() else value
        self.store[name] = value
        self.open[name] = torch.empty(value.shape, dtype=dtype).copy_(value)
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
            view.view(-1)[:1].view(torch.uint8)[:1] ^= 1  # a byte of a bool is 0 or 1: torch copies no other
        expected = self.open[name] = self.open[name].clone()
        expected.view(-1)[:1].view(torch.uint8)[:1] ^= 1

    @rule(name=NAMES, seed=SEEDS)
    def overwrite_through_a_lease(self, name: str, seed: int) -> None:
        if name in self.open and name not in self.leased:
            expected = self.open[name] = torch.empty_like(self.open[name])
            content = numbers(expected.nbytes, seed) & (1 if expected.dtype == torch.bool else 255)
            expected.view(-1).view(torch.uint8).copy_(content)
            with self.store.lease(name, "w") as view:
                view.copy_(expected)

    @rule(name=NAMES)
    def begin_to_read(self, name: str) -> None:
        """Lease a key, unless two are. No precondition: which keys a crash leaves depends on threads."""
        if len(self.leases) < 2 and name in self.open and self.open[name].nbytes <= 12 * KiB:
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

    @rule(name=NAMES)
    def commit_while_writing(self, name: str) -> None:
        if name in self.open and name not in self.leased and self.open[name].nbytes <= 12 * KiB:
            with self.store.lease(name, "rw"), pytest.raises(LeaseError):
                self.store.commit()

    @rule(value=st.integers(), wait=st.booleans())
    def commit(self, value: int, wait: bool) -> None:
        self._begin_commit(value)
        assert self.store.commit({"value": value}, wait=wait) == self.sealed.generation
        if wait:
            self.durable = self.sealed

    @precondition(lambda self: self.is_shared)
    @rule(value=st.integers())
    def commit_to_be_confirmed(self, value: int) -> None:
        """Commit; ``confirm`` says when it is confirmed, or the first call that has to wait for that."""
        self._begin_commit(value)
        self.together.may_confirm.clear()
        self.together.asked.clear()
        self.store.commit({"value": value}, wait=False)
        assert self.together.asked.wait(WAIT_S)

    @precondition(lambda self: not self.together.may_confirm.is_set())
    @rule()
    def confirm(self) -> None:
        self.together.may_confirm.set()

    def _begin_commit(self, value: int) -> None:
        """Note what is about to be sealed; what was sealed before is durable by the time that is."""
        self.store.wait_for_commit()
        self.together.may_confirm.set()
        self.counter.count += 1
        self.durable = self.sealed
        self.sealed = Sealed(self.sealed.generation + 1, dict(self.open), self.counter.count, {"value": value})

    @rule(value=st.integers(), kind=st.sampled_from(["write", "grow", "flush", "transact"]), wait=st.booleans())
    def lose_a_commit(self, value: int, kind: Any, wait: bool) -> None:
        self._begin_commit(value)
        self.disk.fail_next(kind, DeviceError("no"))
        try:
            self.store.commit({"value": value}, wait=wait)
            self.store.wait_for_commit()
        except DeviceError:
            if kind == "grow":  # there was no room: nothing was sealed
                self.sealed = self.durable
                return
            with pytest.raises(DeviceError, match="generation"):
                len(self.store)
            self._close_broken()
            self._open_what_is_left()
            return
        finally:
            self.disk._failures.clear()
        self.durable = self.sealed  # nothing of that kind was to be done

    @precondition(lambda self: self.is_shared)
    @rule(value=st.integers(), wait=st.booleans(), takes_before=st.booleans())
    def lose_a_confirmation(self, value: int, wait: bool, takes_before: bool) -> None:
        self._begin_commit(value)
        self.together.error = DeviceError("no")
        with pytest.raises(DeviceError, match="not confirmed"):
            self.store.commit({"value": value}, wait=wait)
            self.store.wait_for_commit()
        self._close_broken()
        if not takes_before:
            self.durable = self.sealed
        self._open_what_is_left(takes_before)

    @rule(policy=POLICIES, seed=SEEDS, takes_before=st.booleans())
    def crash(self, policy: Any, seed: int, takes_before: bool) -> None:
        self._cut_power(policy, seed, takes_before)

    @rule(
        policy=POLICIES, seed=SEEDS, num_operations=st.integers(0, 30), value=st.integers(), takes_before=st.booleans()
    )
    def crash_in_a_commit(self, policy: Any, seed: int, num_operations: int, value: int, takes_before: bool) -> None:
        self._begin_commit(value)
        self.disk.crash_at = self.disk.num_operations + num_operations
        try:
            self.store.commit({"value": value})
            self.durable = self.sealed
        except TieredError:
            pass
        self._cut_power(policy, seed, takes_before)

    def _cut_power(self, policy: Any, seed: int, takes_before: bool) -> None:
        survivor = self.disk.power_cut(random.Random(seed), policy)
        if self.is_shared and self.together.confirmed == self.sealed.generation:  # order: when no write can follow it
            self.durable = self.sealed
        self._close_broken()
        self.disk = survivor
        self._open_what_is_left(takes_before)

    def _close_broken(self) -> None:
        self._release()
        try:
            self.store.close()
        except TieredError:
            pass

    def _open_what_is_left(self, takes_before: bool = False) -> None:
        """Open what a crash or a failure has left: the durable generation, or the one that was being committed.

        ``takes_before``: others that share the store have the durable one only.
        """
        chooses = takes_before and self.is_shared
        self._open_store(self.durable.generation if chooses else None)
        found = {each.generation: each for each in (self.durable, self.durable if chooses else self.sealed)}
        assert self.store.generation in found
        self.sealed = self.durable = found[self.store.generation]
        self.open = dict(self.sealed.contents)
        self._assert_is_sealed(self.store.resume())

    def _assert_is_sealed(self, state: dict[str, int]) -> None:
        assert state == self.store.state == self.sealed.state
        assert not self.sealed.generation or self.counter.count == self.sealed.count

    @rule()
    def roll_back(self) -> None:
        if not self.sealed.generation:
            with pytest.raises(UsageError):
                self.store.rollback()
            return
        self.store.rollback()
        self._go_back(self.store.state)

    @rule()
    def resume(self) -> None:
        state = self.store.resume()
        if self.sealed.generation:
            self._go_back(state)
        else:
            assert state == {}

    def _go_back(self, state: dict[str, int]) -> None:
        self.leased = {name for name in self.leased if self.open.get(name) is self.sealed.contents.get(name)}
        self.open = dict(self.sealed.contents)
        self._assert_is_sealed(state)

    @rule(orderly=st.booleans())
    def reopen(self, orderly: bool) -> None:
        self._release()
        self.store.wait_for_commit()
        changed = self.store.working_set.has_changes
        if orderly:
            self.store.close()
            if changed:
                generation, count = self.sealed.generation + 1, self.counter.count
                self.sealed = self.sealed._replace(generation=generation, contents=dict(self.open), count=count)
        else:
            with pytest.raises(ZeroDivisionError), self.store:
                raise ZeroDivisionError
        self.durable = self.sealed
        self._open_what_is_left()

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

    @rule()
    def space_is_that_of_two_sets_and_no_more(self) -> None:
        self.store.wait_for_commit()
        self.durable = self.sealed
        taken = [*self.open.values(), *self.sealed.contents.values()]
        assert self.store.statistics().used_bytes <= 2 * sum(-(-t.nbytes // 4096) * 4096 for t in taken)

    @rule()
    def verify(self) -> None:
        assert self.store.verify().is_clean


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether dtype, shape and all bits are the same (NaN included)."""
    bits: Callable[[torch.Tensor], torch.Tensor] = lambda t: t.contiguous().view(-1).view(torch.uint8)  # noqa: E731
    return first.dtype == second.dtype and first.shape == second.shape and torch.equal(bits(first), bits(second))


def machine_settings(num_examples: int, num_steps: int, **more: Any) -> settings:
    """Return settings for so many lives of a store, of so many calls each."""
    return settings(
        max_examples=num_examples,
        stateful_step_count=num_steps,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
        **more,
    )


def batch(seed: int, place: Path) -> tuple[int, list[str]]:
    """Try the lives of ``seed``, 100 calls each, without files; return their number and what was wrong."""
    machine = hypothesis.seed(seed)(type("Seeded", (StoreAgainstDict,), {}))
    try:
        run_state_machine_as_test(machine, settings=machine_settings(_BATCH, 100, print_blob=True))
    except BaseException as error:
        notes = " / ".join(getattr(error, "__notes__", []))
        return _BATCH, [f"{type(error).__name__}: {error} {notes}"]
    return _BATCH, []

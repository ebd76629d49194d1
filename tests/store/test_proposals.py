"""A generation is proposed to all that share the store before anything is sealed; a refusal changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from tests.devices.simulated_disk import SimulatedDisk
from tests.models import CASES
from tests.reference import Recipe
from tests.store.rig import GatedStore, numbers, simulated_store
from tests.store.together import Together
from tests.zero.pending import pending
from tests.zero.training import Session, start
from tiered.errors import CapacityError, DeviceError, LeaseError, UsageError
from tiered.store.catalog.catalog import Alone
from tiered.store.lifetime.opening import new_arena, open_parts
from tiered.store.store import Store
from tiered.units import MiB


class Steps(Together):
    """Also notes the steps that were proposed."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[dict[str, int]] = []

    def propose(self, number: int, steps: Mapping[str, int], refusal: str) -> int:
        self.steps.append(dict(steps))
        return super().propose(number, steps, refusal)


def test_another_store_refuses_before_a_write_and_the_next_commit_is_whole() -> None:
    disk, together = SimulatedDisk(), Together()
    with simulated_store(disk, confirmation=together) as store:
        store["a"] = numbers(9000, 1)
        store.commit({"step": 1})
        store["a"], store["b"] = numbers(9000, 2), numbers(6000, 3)
        del together.log[:]
        before, together.refusal = disk.num_operations, "rank 1 is at step 6, rank 0 at step 5"
        for wait in (True, False):
            with pytest.raises(UsageError, match=r"generation 2 is refused by a store: rank 1 is at step 6"):
                store.commit({"step": 2}, wait=wait)
        assert disk.num_operations == before, "nothing was written"
        assert together.log == [("propose", 2)] * 2, "and a refused one neither fails nor is confirmed"
        assert (store.generation, store.state) == (1, {"step": 1}) and torch.equal(store["a"], numbers(9000, 2))
        together.refusal = ""
        assert store.commit({"step": 3}) == 2
    with simulated_store(disk, confirmation=together) as store:
        assert store.state == {"step": 3} and torch.equal(store["b"], numbers(6000, 3)) and store.verify().is_clean


def test_a_refusal_of_this_store_is_told_to_all_and_raised_by_all() -> None:
    together = Together()
    together.is_strict = True
    with simulated_store(confirmation=together) as store:
        store["a"] = numbers(9000, 1)
        store.commit()
        with store.lease("a", mode="rw"), pytest.raises(UsageError, match=r"refused by a store: LeaseError: .*'a'"):
            store.commit()
        with pytest.raises(UsageError, match=r"refused by a store: TypeError") as caught:
            store.commit({"step": object()})
        assert isinstance(caught.value.__context__, TypeError), "the store's own error is behind it"
        store.add_guard(refuse_commits)
        with pytest.raises(UsageError, match=r"refused by a store: CapacityError: not now"):
            store.commit()
        assert [word for word, _ in together.log] == ["propose", "confirm", "propose", "propose", "propose"]


def refuse_commits(word: str) -> None:
    if word == "commit":
        raise CapacityError("not now")


def test_alone_a_refusal_is_the_stores_own_error() -> None:
    with simulated_store() as store:
        store["a"] = numbers(9000, 1)
        with store.lease("a", mode="rw"), pytest.raises(LeaseError):
            store.commit()
        assert store.commit() == 1


def test_a_commit_that_fails_after_the_proposal_says_so(gated: GatedStore) -> None:
    together = Together()
    committer = gated.store._generations._committer
    assert committer is not None
    committer._confirmation = together
    gated.store["a"] = numbers(9000, 1)
    gated.catalog.failure = DeviceError("the drive is gone")
    with pytest.raises(DeviceError, match="the drive is gone"):
        gated.store.commit()
    assert together.log == [("propose", 1), ("failed", 1)]


def shared_session(directory: Path, together: Together) -> Session:
    arena = new_arena(16 * MiB, serves_accelerator=False)
    parts = open_parts([directory], arena, durable=True, engine="threads", mode="a")
    parts.confirmation = together
    return start(CASES["gpt"], Recipe(num_steps=4), Store._from_parts(parts))


def test_the_steps_of_the_optimizer_are_proposed_also_where_the_seal_waits_for_updates(tmp_path: Path) -> None:
    together = Steps()
    session = shared_session(tmp_path, together)
    with session.store as store:
        for step in range(3):
            session.run_step(step)
            store.commit({"step": step + 1}, wait=step == 2)
        assert together.steps[:3] == [{"tiered.optimizer": step + 1} for step in range(3)]
        together.refusal = "rank 1 has lost its drive"
        session.run_step(3)
        with pytest.raises(UsageError, match="rank 1 has lost its drive"):
            store.commit({"step": 4}, wait=False)
        together.refusal = ""
        assert store.commit({"step": 4}) == 4, "the store goes on, and its next commit is whole"
        assert session.model.state_dict() and [word for word, _ in together.log].count("failed") == 0


def test_a_deferred_seal_whose_updates_fail_is_called_off() -> None:
    together = Together()
    with pending(wait=True) as r:
        committer = r.store._generations._committer
        assert committer is not None
        committer._confirmation = together
        r.device.hold = r.reads_of("blocks.0")
        r.session.run_step(2)
        number = r.store.commit({"step": 3}, wait=False)
        assert together.log == [("propose", number)]
        r.fail_what_is_held(DeviceError("injected"))
        assert r.worker._last_thread is not None
        r.worker._last_thread.join()
        assert together.log == [("propose", number), ("failed", number)]
        with pytest.raises(DeviceError, match="injected"):
            r.store.wait_for_commit()
        r.store.rollback()


class Slow(Together):
    """While the stores agree, another thread of this one leases a key for writing."""

    store: Store | None = None

    def propose(self, number: int, steps: Mapping[str, int], refusal: str) -> int:
        nonce = super().propose(number, steps, refusal)
        if self.store is not None:
            self.lease, self.store = self.store.working_set.lease("beside", "rw"), None
        return nonce


def test_a_lease_for_writing_that_begins_during_the_agreement_is_a_failure_for_all_and_harms_nothing() -> None:
    together = Slow()
    with pending(wait=True) as r:
        committer = r.store._generations._committer
        assert committer is not None
        r.store["beside"] = numbers(9000, 1)
        committer._confirmation = together
        for wait in (True, False):
            r.session.run_step(2 if wait else 3)
            r.device.hold = (lambda operation: False) if wait else r.reads_of("blocks.0")
            together.store = r.store
            with pytest.raises(LeaseError, match="'beside'"):
                r.store.commit({"step": 3}, wait=wait)
            assert [word for word, _ in together.log] == ["propose", "failed"]
            together.lease.release()
            del together.log[:]
            r.device.open()
        committer._confirmation = Alone()
        r.store.commit({"step": 4})

"""Leases of the working set: who may share, who must wait, what lingers, and how they end."""

from __future__ import annotations

import pytest
import torch

from tests.store.rig import read_key, simulated_store, stored, write_key
from tiered.errors import (
    CapacityError,
    ClosedError,
    LeaseError,
    UsageError,
)
from tiered.store.format.row import Spec
from tiered.store.residency.residency import Residency
from tiered.store.store import Store
from tiered.units import KiB

BOTH_ARENAS = True

PAGE = 4 * KiB
BUDGET = 16 * PAGE  # of the stores here


# Leases


def test_a_lease_is_typed_and_shaped_and_starts_on_a_page(working_set: Residency) -> None:
    working_set.create("a", 24, dtype=torch.float32, shape=(2, 3))
    lease = working_set.lease("a", "w")
    assert lease.tensor.dtype == torch.float32
    assert lease.tensor.shape == (2, 3)
    assert lease.tensor.is_contiguous()
    assert lease.tensor.data_ptr() % PAGE == 0
    assert not lease.tensor._is_view()
    assert lease.release()


@pytest.mark.parametrize("is_committed", [True, False])
def test_a_lease_for_writing_that_changed_nothing_leaves_nothing_to_write(store: Store, is_committed: bool) -> None:
    """And what no commit had before it is in the next one nevertheless."""
    working_set = store.working_set
    write_key(working_set, "a", PAGE, 7)
    store.commit() if is_committed else stored(working_set, "a")
    written = store.statistics().write_bytes
    lease = working_set.lease("a", "rw")
    assert store.working_set.has_changes
    assert lease.release(is_unchanged=True)
    assert working_set.statistics().dirty_bytes == 0 and store.working_set.has_changes is not is_committed
    store.commit()
    assert store.statistics().write_bytes == written
    store.rollback()
    stored(working_set, "a")
    assert read_key(working_set, "a") == 7


def test_a_key_without_bytes_can_only_be_written(working_set: Residency) -> None:
    working_set.create("a", PAGE)
    for mode in ("r", "rw"):
        with pytest.raises(UsageError, match="never written"):
            working_set.lease("a", mode)
    with pytest.raises(KeyError):
        working_set.lease("b", "r")


def test_create_replaces_an_existing_key(working_set: Residency) -> None:
    write_key(working_set, "a", PAGE, 1)
    working_set.create("a", 2 * PAGE)
    with pytest.raises(UsageError, match="never written"):
        working_set.lease("a", "r")
    write_key(working_set, "a", 3 * PAGE, 2)
    assert read_key(working_set, "a") == 2


@pytest.mark.parametrize(
    ("open_mode", "mode"), [("r", "w"), ("r", "rw"), ("w", "r"), ("rw", "r"), ("rw", "rw"), ("w", "w")]
)
def test_leases_that_conflict_are_refused_until_the_first_is_released(
    working_set: Residency, open_mode: str, mode: str
) -> None:
    write_key(working_set, "a", PAGE, 1)
    lease = working_set.lease("a", open_mode)
    with pytest.raises(LeaseError, match="'a' is leased for"):
        working_set.lease("a", mode)
    lease.release()
    assert working_set.lease("a", mode).release()


def test_leases_for_reading_share_bytes(working_set: Residency) -> None:
    write_key(working_set, "a", PAGE, 1)
    first, second = working_set.lease("a", "r"), working_set.lease("a", "r")
    assert first.tensor.data_ptr() == second.tensor.data_ptr()
    first.release()
    second.release()


def test_release_says_whether_the_lease_has_ended_and_is_idempotent(working_set: Residency) -> None:
    write_key(working_set, "a", PAGE, 1)
    lease = working_set.lease("a", "rw")
    alias = lease.tensor[3:5]
    assert not lease.release()
    assert not lease.release()
    del alias
    assert lease.release()
    with pytest.raises(LeaseError, match="was released"):
        lease.tensor.zero_()


def test_a_dropped_lease_is_a_released_one(working_set: Residency) -> None:
    write_key(working_set, "a", PAGE, 1)
    lease = working_set.lease("a", "rw")
    del lease
    assert working_set.lease("a", "rw").release()


@pytest.mark.parametrize("mode", ["r", "rw", "w"])
@pytest.mark.parametrize("is_kept", [False, True])
def test_a_lease_that_fails_at_its_last_step_ends_once(
    store: Store, working_set: Residency, monkeypatch: pytest.MonkeyPatch, mode: str, is_kept: bool
) -> None:
    def fail(flat: torch.Tensor, spec: Spec) -> torch.Tensor:
        raise CapacityError

    write_key(working_set, "a", 8 * KiB, 1)
    with monkeypatch.context() as patch:
        patch.setattr("tiered.store.residency.residency.tensor_over", fail)
        with pytest.raises(CapacityError) as caught:
            working_set.lease("a", mode)
    if is_kept:  # as a debugger keeps it: its frames have a tensor on the bytes
        write_key(working_set, "a", 8 * KiB, 2)
        write_key(working_set, "b", 8 * KiB, 3)
    del caught
    store.commit()
    assert read_key(working_set, "a") == (2 if is_kept else 1)
    assert not working_set.users
    store["a"] = torch.ones(5)
    store.close()
    assert working_set.statistics().arena_bytes == 0


def test_lingering_readers_keep_their_bytes_when_the_key_is_written(working_set: Residency) -> None:
    write_key(working_set, "a", PAGE, 1)
    lease = working_set.lease("a", "r")
    alias = lease.tensor[:8]
    lease.release()
    lease = working_set.lease("a", "rw")
    assert lease.tensor[0] == 1  # copied
    lease.tensor.fill_(2)
    assert lease.release()
    assert alias.tolist() == [1] * 8
    assert read_key(working_set, "a") == 2
    assert working_set.statistics().orphan_bytes == PAGE
    del alias, lease
    assert working_set.statistics().orphan_bytes == 0


def test_lingering_writers_are_joined(working_set: Residency) -> None:
    write_key(working_set, "a", PAGE, 1)
    first = working_set.lease("a", "rw")
    alias = first.tensor[:1]
    first.release()
    second = working_set.lease("a", "rw")
    third_party = second.tensor.data_ptr()
    assert third_party == alias.data_ptr()
    assert second.release()
    reader = working_set.lease("a", "r")
    assert reader.tensor.data_ptr() == third_party
    assert reader.release()
    working_set.swap_out(["a"])
    assert working_set.statistics().writing_bytes == working_set.statistics().swaps.swap_out_bytes == 0
    del alias
    working_set.swap_out(["a"])
    assert working_set.statistics().swaps.swap_out_bytes == PAGE


# The end


def test_bytes_return_when_the_last_tensor_dies_also_after_close() -> None:
    store = simulated_store(budget_nbytes=BUDGET)
    write_key(store.working_set, "a", PAGE, 5)
    lease = store.working_set.lease("a", "r")
    alias = lease.tensor[2:4]
    lease.release()
    arena = store.working_set.arena
    store.close()
    assert alias.tolist() == [5, 5]
    assert arena.leased_nbytes == PAGE
    del alias
    assert arena.leased_nbytes == 0


def test_an_open_lease_survives_close_and_can_be_released_after() -> None:
    store = simulated_store(budget_nbytes=BUDGET)
    write_key(store.working_set, "a", PAGE, 5)
    lease = store.working_set.lease("a", "r")
    store.close()
    assert lease.tensor[0] == 5
    assert lease.release()
    for call in (
        lambda: store.working_set.lease("a", "r"),
        lambda: store.working_set.reserve(1),
        lambda: store.working_set.create("b", 1),
        lambda: store.working_set.prefetch(["a"]),
    ):
        with pytest.raises(ClosedError):
            call()

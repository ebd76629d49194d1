"""Writing back and swapping in, over a device that is slow or fails."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import pytest

from tests.store.rig import WAIT_S, GatedStore, beside, read_key, stored, write_key
from tiered.bytes.device.base import IOClass
from tiered.errors import (
    DeadlineError,
    DeviceError,
)
from tiered.store.residency.residency import Residency
from tiered.units import KiB

BOTH_ARENAS = True

PAGE = 4 * KiB
BUDGET = 16 * PAGE  # of the stores here


# Write-back


def test_dirty_bytes_above_an_eighth_of_the_budget_are_written(working_set: Residency) -> None:
    write_key(working_set, "a", 2 * PAGE, 1)
    assert working_set.statistics().dirty_bytes == 2 * PAGE  # an eighth
    write_key(working_set, "b", PAGE, 2)
    assert working_set.statistics().dirty_bytes == PAGE
    assert working_set.statistics().swaps.swap_out_bytes == 2 * PAGE
    assert working_set.is_resident("a")


def test_bytes_are_not_written_while_somebody_may_change_them(gated: GatedStore) -> None:
    write_key(gated.store.working_set, "a", PAGE, 1)
    lease = gated.store.working_set.lease("a", "rw")
    gated.store.working_set.swap_out(["a"])
    assert "write" not in gated.device.events
    lease.release()
    gated.store.working_set.swap_out(["a"])
    assert gated.device.events.count("write") == 1


def test_a_key_that_is_named_twice_is_written_once(gated: GatedStore) -> None:
    working_set = gated.store.working_set
    write_key(working_set, "a", PAGE, 1)
    gated.device.hold = lambda operation: True
    working_set.swap_out(["a", "a"])
    working_set.swap_out(["a"])
    assert working_set.statistics().writing_bytes == PAGE
    gated.device.open()
    assert gated.device.events.count("write") == 1
    assert working_set.statistics().writing_bytes == 0
    stored(working_set, "a")
    assert read_key(working_set, "a") == 1


class _InOrder:
    """Takes the alphabet for the order of the next uses."""

    def victim(self, evictable: Mapping[str, int], incoming: str | None) -> str | None:
        return max(evictable, default=None)

    def is_worth_waiting(self, victim: str, leaving: Iterable[str]) -> bool:
        return max(leaving) > victim


@pytest.mark.parametrize(("dirty", "goes"), [("z", "z"), ("a", "b")])
def test_what_is_written_and_needed_later_goes_before_what_is_clean(gated: GatedStore, dirty: str, goes: str) -> None:
    """A lease waits for that write; it does not for one of what is needed sooner."""
    working_set = gated.store.working_set
    write_key(working_set, "b", 8 * PAGE, 1)
    write_key(working_set, "y", 8 * PAGE, 2)
    stored(working_set, "b", "y")
    working_set.set_policy(_InOrder())
    assert read_key(working_set, "b") == 1
    gated.device.hold = lambda operation: operation.is_write
    write_key(working_set, dirty, 8 * PAGE, 3)  # more than an eighth of the budget: it is written at once
    assert gated.device.has_held.wait(WAIT_S)
    assert working_set.prefetch(["y"]) == (0 if goes == dirty else 8 * PAGE)  # as a lease, but never waits

    def read(done: Callable[[], None]) -> None:
        assert read_key(working_set, "y") == 2
        done()

    if goes == dirty:
        gated.let_through(read)
    else:
        read(lambda: None)
    gated.device.open()
    assert [key for key in ("b", dirty) if not working_set.is_resident(key)] == [goes]
    assert working_set.statistics().swaps.num_demands + working_set.statistics().swaps.num_prefetches == 2


def test_a_writer_waits_for_the_write_in_flight_and_readers_do_not(gated: GatedStore) -> None:
    write_key(gated.store.working_set, "a", PAGE, 1)
    gated.device.hold = lambda operation: operation.is_write
    gated.store.working_set.swap_out(["a"])
    assert gated.device.has_held.wait(WAIT_S)
    assert read_key(gated.store.working_set, "a") == 1

    def change(leased: Callable[[], None]) -> None:
        lease = gated.store.working_set.lease("a", "rw")
        leased()
        lease.tensor.fill_(2)
        lease.release()

    gated.let_through(change)
    assert read_key(gated.store.working_set, "a") == 2


def test_a_failed_write_leaves_the_tensor_resident_and_is_raised_by_the_next_call(gated: GatedStore) -> None:
    write_key(gated.store.working_set, "a", PAGE, 1)
    gated.device.fail = lambda operation: DeviceError("the drive said no") if operation.is_write else None
    gated.store.working_set.swap_out(["a"])
    gated.device.fail = lambda operation: None
    assert gated.store.working_set.is_resident("a")
    with pytest.raises(DeviceError, match="said no"):
        gated.store.working_set.lease("a", "r")
    assert read_key(gated.store.working_set, "a") == 1
    gated.store.working_set.swap_out(["a"])
    stored(gated.store.working_set, "a")
    assert read_key(gated.store.working_set, "a") == 1
    assert gated.store.statistics().quarantined_bytes == PAGE  # where the failed write went, nobody writes again


def test_a_full_budget_of_unwritable_bytes_raises_why(gated: GatedStore) -> None:
    gated.device.fail = lambda operation: DeviceError("the drive said no") if operation.is_write else None
    with pytest.raises(DeviceError, match="said no"):
        for i in range(20):
            write_key(gated.store.working_set, f"k{i}", 2 * PAGE, i)


# Swapping in


def test_a_failed_read_gives_its_buffer_back_and_can_be_tried_again(gated: GatedStore) -> None:
    write_key(gated.store.working_set, "a", 2 * PAGE, 1)
    stored(gated.store.working_set, "a")
    gated.device.fail = lambda operation: None if operation.is_write else DeviceError("cannot read")
    with pytest.raises(DeviceError, match="cannot read"):
        gated.store.working_set.lease("a", "r")
    assert gated.store.working_set.statistics().arena_bytes == 0
    assert gated.store.working_set.prefetch(["a"]) == 2 * PAGE  # a hint does not raise
    assert gated.store.working_set.statistics().arena_bytes == 0
    gated.device.fail = lambda operation: None
    assert read_key(gated.store.working_set, "a") == 1


def test_a_prefetch_is_joined_by_the_lease_that_needs_it(gated: GatedStore) -> None:
    write_key(gated.store.working_set, "a", PAGE, 1)
    stored(gated.store.working_set, "a")
    gated.device.events.clear()
    gated.device.hold = lambda operation: operation.io_class is IOClass.PREFETCH
    assert gated.store.working_set.prefetch(["a"]) == PAGE
    found: list[int] = []
    with beside(lambda: found.append(read_key(gated.store.working_set, "a"))):
        gated.device.open()
    assert found == [1]
    assert gated.device.events == ["read"]


def test_waiting_for_a_read_ends_with_the_deadline(gated: GatedStore, caplog: pytest.LogCaptureFixture) -> None:
    write_key(gated.store.working_set, "a", PAGE, 1)
    stored(gated.store.working_set, "a")
    gated.device.hold = lambda operation: True
    gated.store.working_set.deadline_s = 1.0  # order: long enough for the warning at half of it, also on a busy machine
    with pytest.raises(DeadlineError, match=r"lease of 'a' for 'r' did not happen within 1 s"):
        gated.store.working_set.lease("a", "r")
    assert "takes long" in caplog.text
    assert gated.store.working_set.statistics().arena_bytes == PAGE  # the buffer belongs to the read until it completes
    gated.device.open()
    assert read_key(gated.store.working_set, "a") == 1


def test_waiting_for_memory_ends_with_the_deadline() -> None:
    gated = GatedStore(budget_nbytes=BUDGET, deadline_s=0.05)
    gated.device.hold = lambda operation: True
    write_key(gated.store.working_set, "a", 10 * PAGE, 1)
    assert gated.device.held
    with pytest.raises(DeadlineError, match=r"reservation of 40.0 KiB"):
        gated.store.working_set.reserve(10 * PAGE)
    gated.device.open()
    gated.close()

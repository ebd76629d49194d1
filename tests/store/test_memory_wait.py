"""Callers that wait for memory: a starved one goes first; and what wakes them."""

from __future__ import annotations

import functools
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from tests.devices.simulated_disk import SimulatedDisk
from tests.interrupts import in_ours
from tests.store.rig import WAIT_S, await_true, beside, simulated_store, write_key
from tiered.errors import CapacityError
from tiered.store.residency.residency import Residency
from tiered.store.store import Store
from tiered.units import KiB, MiB

BOTH_ARENAS = True

NUM_SMALL = 8
SMALL_NBYTES = 16 * KiB  # all of them are the budget
LARGE_NBYTES = 96 * KiB


def fill(working_set: Residency) -> None:
    write_key(working_set, "large", LARGE_NBYTES, 9)
    for index in range(NUM_SMALL):
        write_key(working_set, f"small {index}", SMALL_NBYTES, index)


@contextmanager
def crowded(deadline_s: float) -> Iterator[Store]:
    """A store with a large key and small ones, each of which a thread of its own leases again and again."""
    disk = SimulatedDisk(capacity_nbytes=4 * MiB, can_lose_power=False)
    with simulated_store(disk, deadline_s=deadline_s) as store:
        working_set = store.working_set
        fill(working_set)
        ended = threading.Event()

        def lease_in_turn(index: int) -> None:
            while not ended.is_set():
                lease = working_set.lease(f"small {index}", "r")
                time.sleep(0.003)
                lease.release()

        with beside(*(functools.partial(lease_in_turn, index) for index in range(NUM_SMALL))):
            try:
                yield store
            finally:
                ended.set()


def lease(working_set: Residency) -> None:
    large = working_set.lease("large", "r")
    assert large.tensor.unique().tolist() == [9]
    assert large.release()


def reserve(working_set: Residency) -> None:
    working_set.unreserve(working_set.reserve(LARGE_NBYTES))


@pytest.mark.parametrize("ask", [lease, reserve])
def test_who_asks_for_most_of_the_budget_is_served_before_the_deadline(ask: Callable[[Residency], None]) -> None:
    deadline_s = 4.0
    with crowded(deadline_s=deadline_s) as store:
        thread = threading.Thread(target=ask, args=(store.working_set,))
        begun_s = time.monotonic()
        thread.start()
        thread.join(2 * deadline_s)
        waited_s = time.monotonic() - begun_s
    thread.join(WAIT_S)
    assert waited_s < deadline_s


def test_a_starved_caller_keeps_no_other_thread_waiting_for_ever() -> None:
    """A thread that has memory goes on at once; it may wait, outside of the store, for one that has none."""
    deadline_s = 5.0
    with simulated_store(deadline_s=deadline_s) as store:
        working_set = store.working_set
        fill(working_set)
        held = [working_set.lease(f"small {index}", "r") for index in range(3)]

        def is_starved() -> bool:
            with working_set.condition:
                working_set.condition.notify_all()  # so that it looks again
                return bool(working_set._starved)

        with beside(lambda: lease(working_set)):
            await_true(is_starved)
            begun_s = time.monotonic()
            held.append(working_set.lease("small 5", "r"))
            assert time.monotonic() - begun_s < deadline_s / 8
            with beside(lambda: working_set.lease("small 6", "r").release()) as (other,):
                other.join(deadline_s / 2)
                assert not other.is_alive() and time.monotonic() - begun_s > deadline_s / 8
                while held:
                    held.pop().release()
        assert not is_starved()


@pytest.mark.parametrize("num_waiting", [1, 3])
def test_the_death_of_a_tensor_wakes_who_waits_for_its_memory(num_waiting: int) -> None:
    """No call of the store follows it, and whoever waits looks again at nothing else before its deadline."""
    with simulated_store(deadline_s=10 * WAIT_S) as store:
        working_set = store.working_set
        write_key(working_set, "large", LARGE_NBYTES, 9)
        views = [working_set.lease("large", "r").tensor]
        with beside(*[lambda: reserve(working_set)] * num_waiting):
            await_true(lambda: working_set.num_waiting == num_waiting)
            time.sleep(0.05)  # all of them wait by now, or will find the end
            views.clear()


def test_an_interrupt_of_who_waits_loses_no_end_of_a_lease() -> None:
    with simulated_store() as store:
        working_set = store.working_set
        write_key(working_set, "large", LARGE_NBYTES, 9)
        views: list[torch.Tensor] = []
        with beside(lambda: views.append(working_set.lease("large", "r").tensor)):
            pass

        def interrupt() -> None:
            await_true(lambda: working_set.num_waiting == 1)
            signal.raise_signal(signal.SIGINT)
            views.clear()

        with beside(interrupt), pytest.raises(KeyboardInterrupt):
            in_ours(reserve)(working_set)  # whoever reserves is one of tiered's calls, which ends
        reserve(working_set)
        assert not working_set.users and not working_set.num_waiting


def test_a_buffer_given_back_under_a_tensor_is_waited_for_as_a_lease_is() -> None:
    """By a caller in another thread; the thread that gave it back is told what keeps the bytes."""
    with simulated_store(deadline_s=WAIT_S) as store:
        working_set, is_given_back = store.working_set, threading.Event()

        def give_back() -> None:
            buffer = working_set.reserve(LARGE_NBYTES)
            tensor, _ = buffer.alias(LARGE_NBYTES, lambda reference: None)
            working_set.unreserve(buffer)
            with pytest.raises(CapacityError, match=r"96\.0 KiB \('a copy'\) kept alive by tensors"):
                reserve(working_set)
            is_given_back.set()
            await_true(lambda: working_set.num_waiting == 1)
            del tensor

        with beside(give_back):
            assert is_given_back.wait(WAIT_S)
            reserve(working_set)

"""What signal handlers and finalizers ask of a store that their own thread is inside of."""

from __future__ import annotations

import contextlib
import signal
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType

import pytest
import torch

from tests.devices.simulated_disk import SimulatedDisk
from tests.store.rig import numbers, simulated_store
from tiered.bytes.critical_section import CRITICAL_SECTION, ServiceThread
from tiered.errors import ClosedError, UsageError
from tiered.store.residency.eviction import LeastRecentlyUsed
from tiered.store.store import Store
from tiered.units import KiB, MiB

DOORS: dict[str, Callable[[Store], object]] = {
    "in": lambda store: "a" in store,
    "len": len,
    "iter": list,
    "get": lambda store: store["a"],
    "get_many": lambda store: store.get_many(["a"]),
    "put": lambda store: store.__setitem__("b", torch.ones(3)),
    "put_many": lambda store: store.put_many({"b": torch.ones(3)}),
    "pop": lambda store: store.pop("a"),
    "clear": Store.clear,
    "prefetch": lambda store: store.prefetch(["a"]),
    "lease": lambda store: store.lease("a").__enter__(),
    "commit": Store.commit,
    "wait_for_commit": Store.wait_for_commit,
    "rollback": Store.rollback,
    "resume": Store.resume,
    "records": Store.records,
    "statistics": Store.statistics,
    "verify": Store.verify,
}


class Interrupting(LeastRecentlyUsed):
    """A policy, which is asked under the store's lock, in the middle of which a signal comes."""

    def victim(self, evictable: Mapping[str, int], incoming: str | None) -> str | None:
        signal.raise_signal(signal.SIGVTALRM)
        return super().victim(evictable, incoming)


@contextlib.contextmanager
def handled(number: signal.Signals, handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


@contextlib.contextmanager
def no_hang() -> Iterator[None]:
    """Fail what waits for its own thread."""

    def give_up(number: int, frame: FrameType | None) -> None:
        raise AssertionError("it waits for its own thread")

    with handled(signal.SIGALRM, give_up):
        signal.setitimer(signal.ITIMER_REAL, 20)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)


@pytest.mark.parametrize("door", DOORS)
def test_a_signal_handler_inside_a_call_is_refused_and_the_call_goes_on(door: str) -> None:
    refusals: list[UsageError] = []
    store = simulated_store()
    values = {f"{i}": numbers(40 * KiB // 2, i) for i in range(9)}

    def handle(number: int, frame: FrameType | None) -> None:
        with pytest.raises(UsageError, match=r"set a flag there .* and commit") as caught:
            DOORS[door](store)
        refusals.append(caught.value)

    with no_hang(), store:
        store["a"] = numbers(100)
        store.working_set.set_policy(Interrupting())
        with handled(signal.SIGVTALRM, handle):
            for name, value in values.items():
                store[name] = value
                store.commit()
        assert refusals
        for name, value in values.items():
            with handled(signal.SIGVTALRM, lambda number, frame: None):
                assert torch.equal(store[name], value)
        store.working_set.set_policy(LeastRecentlyUsed())


def test_close_inside_a_call_warns_and_closes_nothing() -> None:
    with no_hang(), simulated_store() as store:
        store["a"] = numbers(100)
        with (
            store._condition,
            pytest.warns(ResourceWarning, match="a finalizer or a signal handler .* nothing was closed"),
        ):
            store.close()
        with CRITICAL_SECTION.lock, pytest.warns(ResourceWarning, match="nothing was closed"):
            store.close()
        assert torch.equal(store["a"], numbers(100))


def test_close_in_a_finalizer_outside_of_calls_closes() -> None:
    class Owner:
        def __init__(self, store: Store) -> None:
            weakref.finalize(self, store.close)

    disk = SimulatedDisk(capacity_nbytes=4 * MiB, can_lose_power=False)
    store = simulated_store(disk)
    owner = Owner(store)
    store["a"] = numbers(100)
    del owner
    with pytest.raises(ClosedError):
        store["a"]
    with simulated_store(disk) as store:
        assert torch.equal(store["a"], numbers(100))


def test_a_lease_that_a_finalizer_ends_inside_a_call_is_ended_by_the_next() -> None:
    with no_hang(), simulated_store() as store:
        store["a"] = numbers(12 * KiB)
        block = store.lease("a", mode="rw")
        block.__enter__().add_(1)
        with store._condition:
            block.__exit__(None, None, None)
        assert torch.equal(store["a"], numbers(12 * KiB) + 1)
        store.commit()


def test_a_finalizer_in_a_thread_of_tiered_is_refused() -> None:
    refusals: list[UsageError] = []

    def finalize() -> None:
        with pytest.raises(UsageError, match="in one of tiered's own") as caught:
            store.pop("a", None)
        refusals.append(caught.value)

    with simulated_store() as store:
        thread = ServiceThread(target=finalize)
        thread.start()
        thread.join()
        assert len(refusals) == 1


def test_every_thread_that_completes_io_is_a_service_thread(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with Store(tmp_path / "store", dram="8MiB", engine="threads") as store:
        store["a"] = numbers(2 * 1024 * KiB)
        store.commit()
        own = [thread for thread in threading.enumerate() if thread not in before]
        assert own and all(isinstance(thread, ServiceThread) for thread in own)

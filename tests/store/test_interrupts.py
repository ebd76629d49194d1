"""Ctrl-C while something is being handed to the devices, or files grow: what was not begun ends, the store goes on."""

from __future__ import annotations

import contextlib
import linecache
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import pytest
import torch

from tests.store.rig import await_true, numbers, simulated_store
from tiered.bytes.device.adaptor import Adaptor
from tiered.bytes.device.memory import SimulatedDisk
from tiered.store import batch, transfer
from tiered.store.condition import Condition
from tiered.store.store import Store
from tiered.units import KiB, MiB

STARTING: dict[CodeType, int] = {  # and the lines at the beginning that are its caller's to mend
    transfer.start_all.__code__: 2,
    transfer.Transfer.start.__code__: 2,
    transfer.Transfer._operations.__code__: 0,
    transfer.Transfer._pieces.__code__: 0,
    transfer.Transfer._write.__code__: 0,
    batch.Batch._operation.__code__: 0,
}


@contextlib.contextmanager
def interrupt(number: int) -> Iterator[Counter[str]]:
    """Raise KeyboardInterrupt before line ``number`` of what this thread does to start transfers; count the lines."""
    counts: Counter[str] = Counter()
    skipped: dict[FrameType, int] = {}

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_code not in STARTING:
            return None
        left = skipped.setdefault(frame, STARTING[frame.f_code])
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and left:
            skipped[frame] -= 1
        elif event == "line" and "submit_all(" not in line:  # who was handed something may have begun with it
            counts["lines"] += 1
            if counts["lines"] == number:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield counts
    finally:
        sys.settrace(before)
        skipped.clear()  # lifetime: frames keep leased tensors alive


def _swap_out(store: Store) -> None:
    store.put_many({f"dirty {i}": numbers(12 * KiB, i) for i in range(3)})
    store.working_set.swap_out([f"dirty {i}" for i in range(3)])


def _large_put(store: Store) -> None:
    store["large"] = numbers(9 * MiB, 7)


def _read(store: Store) -> None:
    store["stored"]


def _prefetch(store: Store) -> None:
    store.working_set.prefetch(["stored", "stored too"])


def _verify(store: Store) -> None:
    store.verify()


def _put_many(store: Store) -> None:
    store.put_many({f"small {i}": numbers(4 * KiB, i) for i in range(4)})


@pytest.mark.parametrize(
    ("act", "budget_nbytes", "step"),  # the large one takes 0.1 s
    [
        (_swap_out, 1 * MiB, 1),
        (_large_put, 48 * MiB, 12),
        (_read, 1 * MiB, 1),
        (_prefetch, 1 * MiB, 1),
        (_verify, 1 * MiB, 1),
        (_put_many, 64 * KiB, 1),
    ],
)
def test_an_interrupt_of_what_starts_transfers_leaves_the_store_as_good_as_before(
    act: Callable[[Store], None], budget_nbytes: int, step: int
) -> None:
    disk = SimulatedDisk(capacity_nbytes=256 * MiB, can_lose_power=False)
    values = {"stored": numbers(12 * KiB), "stored too": numbers(9 * KiB, 1)}
    with simulated_store(disk, budget_nbytes=budget_nbytes) as store:
        store.put_many(values)
    for number in range(1, 1000, step):
        with simulated_store(disk, budget_nbytes=budget_nbytes, deadline_s=2.0) as store:
            before = store.statistics()
            was_interrupted = True
            with contextlib.suppress(KeyboardInterrupt), interrupt(number) as counts:
                act(store)
                was_interrupted = False
            await_true(lambda: store.working_set.statistics().writing_bytes == 0)
            statistics = store.working_set.statistics()
            assert statistics.arena_bytes - statistics.resident_bytes < 4 * 4 * KiB, number  # what buffers round up
            assert not store.working_set.space._streams, number
            act(store)
            store.commit()
            assert all(torch.equal(store[name], value) for name, value in values.items())
            assert store.statistics().used_bytes - before.used_bytes <= 10 * MiB
            assert store.verify().is_clean, number
            store.working_set.unreserve(store.working_set.reserve(budget_nbytes))
            for name in set(store) - set(values):
                del store[name]
        if not was_interrupted:
            assert counts["lines"] >= number - step > 5
            return
    raise AssertionError("it never came to its end")


def test_an_interrupt_when_a_file_has_grown_does_not_keep_it_from_growing() -> None:
    class Interrupted(Adaptor):
        is_due = True

        def grow(self, file: int, nbytes: int) -> None:
            self.upstream.grow(file, nbytes)
            is_due, Interrupted.is_due = Interrupted.is_due, False
            if is_due:
                raise KeyboardInterrupt

    with simulated_store(wrap=Interrupted) as store:
        store["a"] = numbers(12 * KiB)
        with pytest.raises(KeyboardInterrupt):
            store.commit()
        file_nbytes = store.statistics().file_bytes
        store.commit()
        store["b"] = numbers(12 * KiB, 1)
        store.commit()
        statistics = store.statistics()
        assert statistics.file_bytes == file_nbytes == statistics.used_bytes + statistics.free_bytes
        assert torch.equal(store["a"], numbers(12 * KiB)) and torch.equal(store["b"], numbers(12 * KiB, 1))


def test_an_interrupt_on_the_way_into_the_lock_or_out_of_it_does_not_keep_it() -> None:
    """Before any line of Python that ``with`` runs besides the block itself."""
    condition = Condition()
    own = sys._getframe().f_code

    def interrupt_at(number: int) -> int:
        num_lines = 0

        def trace(frame: FrameType, event: str, arg: object) -> Any:
            nonlocal num_lines
            if frame.f_code is not used and frame.f_code is not own:
                num_lines += 1
                if num_lines == number:
                    raise KeyboardInterrupt
            return trace

        def use() -> None:
            with condition:
                pass

        used = use.__code__
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            use()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        return num_lines

    number = 1
    while True:
        num_lines = interrupt_at(number)
        assert condition.acquire(blocking=False), f"kept by an interrupt before line {number}"
        condition.release()
        if num_lines < number:
            return
        number += 1


def test_interrupts_by_signals_never_keep_the_lock() -> None:
    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    condition, num_interrupts = Condition(), 0
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for i in range(1000):
            try:
                signal.setitimer(signal.ITIMER_REAL, 2e-5 + i % 50 * 1e-6)
                for _ in range(1000):
                    with condition:
                        condition.notify_all()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                num_interrupts += 1
            assert condition.acquire(blocking=False)
            condition.release()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert num_interrupts

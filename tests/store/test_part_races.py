"""Parts read and written while other calls change the key: each call sees one state of it, and undoes no other call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.devices.simulated_disk import SimulatedDisk
from tests.store.rig import WAIT_S, GatedDevice, GatedStore, await_true, numbers, simulated_store, stored
from tests.store.test_parts import LARGE, read
from tiered.store.format.row import Page, Row
from tiered.store.residency.entry import Granted
from tiered.store.residency.paged_rows import Pages
from tiered.store.store import Store
from tiered.store.waiting.calling_thread import NestedCalls
from tiered.units import KiB, MiB

NBYTES = 48 * KiB


@pytest.fixture
def gated() -> Iterator[GatedStore]:
    gated = GatedStore()
    yield gated
    gated.close()


class Call:
    """A call in a thread of its own, and the error that it ended with."""

    def __init__(self, action: Callable[[], object]) -> None:
        self.error: Exception | None = None
        self._action = action
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self._action()
        except Exception as error:
            self.error = error

    def end(self) -> None:
        """Wait for its end; raise its error."""
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()
        if self.error is not None:
            raise self.error


def in_thread(action: Callable[[], object]) -> None:
    """Run ``action`` in a thread of its own; return at its end."""
    thread = threading.Thread(target=action)
    thread.start()
    thread.join(WAIT_S)
    assert not thread.is_alive()


def test_a_reader_of_parts_of_one_key_is_nothing_to_the_key_that_had_the_extents_before() -> None:
    with simulated_store(SimulatedDisk(can_lose_power=False), budget_nbytes=64 * KiB) as store:
        store.put("a", numbers(NBYTES, 1), block_size="4KiB")
        store.commit()
        first = store.working_set.entries["a"].row
        store.write_part("a", 0, numbers(NBYTES, 2))  # all of it lies elsewhere then
        store.commit()
        value = numbers(NBYTES, 3)
        store.put("b", value, block_size="4KiB")
        store.commit()
        second = store.working_set.entries["b"].row
        assert first is not None and second is not None and first.extents == second.extents
        store.write_part("b", 5000, numbers(100, 4))
        value[5000:5100] = numbers(100, 4)
        row = store._values._row_past("b")
        assert row is not None and row.pages is not None
        store.write_part("a", 0, numbers(10, 5))
        store["b"] = numbers(NBYTES, 6)
        store.commit()
        for number in range(3):
            store[f"other {number}"] = numbers(NBYTES, 50 + number)
            store.commit()
        assert torch.equal(read(store, row), value)


def test_a_page_that_goes_while_a_reader_asks_for_it_is_no_damage() -> None:
    """The reader has seen that it has none of its own; a commit drops the catalog's before it gets there."""
    with simulated_store(SimulatedDisk(can_lose_power=False), budget_nbytes=8 * MiB) as store:
        value = numbers(LARGE, 1)
        store.put("a", value, block_size="4KiB")
        store.commit()
        row = store._values._row_past("a")
        assert row is not None and isinstance(row.pages, Pages)
        pages, from_catalog = row.pages, row.pages._read

        def replace() -> None:
            store["a"] = numbers(LARGE, 2)
            store.commit()

        def late(row: Row, numbers: Sequence[int]) -> list[Page]:
            if pages._read is late:
                pages._read = from_catalog
                in_thread(replace)
            return from_catalog(row, numbers)

        pages._read = late
        assert torch.equal(read(store, row), value)
        assert pages._read is from_catalog


def before_it_has_the_bytes(store: Store, action: Callable[[], object]) -> None:
    """Have another thread do ``action`` when the next call has looked at a resident key, and comes for its bytes."""
    working_set = store.working_set
    obtain = working_set.obtain

    def late(*args: Any, **options: Any) -> Granted:
        working_set.obtain = obtain  # type: ignore[method-assign]
        in_thread(action)
        return obtain(*args, **options)

    working_set.obtain = late  # type: ignore[method-assign]


def test_a_part_has_the_type_of_the_bytes_it_is_read_from() -> None:
    with simulated_store() as store:
        store["a"] = torch.arange(2000.0)
        before_it_has_the_bytes(store, lambda: store.put("a", torch.arange(500)))
        assert torch.equal(store.read_part("a", 200, 210), torch.arange(200, 210))


def test_a_part_of_a_tensor_that_became_shorter_is_refused() -> None:
    """What lies behind its end in memory is no part of it."""
    with simulated_store() as store:
        store["a"] = torch.arange(2000.0)
        before_it_has_the_bytes(store, lambda: store.put("a", torch.zeros(1030, dtype=torch.uint8)))
        with pytest.raises(ValueError, match=r"elements \[1500, 1510\) of 'a', which has 1030"):
            store.read_part("a", 1500, 1510)
        assert not store.read_part("a", 0, 1030).any()


def hold_first_write(device: GatedDevice) -> None:
    """Hold up one write: those that come meanwhile go on."""
    device.hold = lambda operation: operation.is_write and not device.held


def test_no_part_is_written_to_a_tensor_that_took_another_type(gated: GatedStore) -> None:
    store = gated.store
    store.put("a", torch.zeros(4 * 4096, dtype=torch.uint8), block_size="4KiB")
    store.commit()
    hold_first_write(gated.device)
    call = Call(lambda: store.write_part("a", 10, torch.full((1,), 255, dtype=torch.uint8)))
    assert gated.device.has_held.wait(WAIT_S)
    store["a"] = torch.ones(4096)  # of as many bytes
    gated.device.open()
    with pytest.raises(ValueError, match=r"expected torch\.float32, got torch\.uint8"):
        call.end()
    assert (store["a"] == 1).all()


@pytest.mark.parametrize("what", ["put", "lease"])
def test_a_part_of_an_inline_tensor_undoes_no_write_that_has_returned(what: str) -> None:
    with simulated_store() as store:
        store["a"] = torch.zeros(400, dtype=torch.uint8)
        settle, me = store.working_set.await_seal, threading.get_ident()
        num_writes = 0

        def write() -> None:
            nonlocal num_writes
            num_writes += 1
            if what == "put":
                store["a"] = torch.full((400,), num_writes, dtype=torch.uint8)
            else:
                with store.lease("a", "rw") as view:
                    view.fill_(num_writes)

        def late() -> None:
            settle()
            if threading.get_ident() == me:  # it is about to look at the key, or to put what it made of that
                in_thread(write)

        store.working_set.await_seal = late  # type: ignore[method-assign]
        store.write_part("a", 0, torch.full((4,), 99, dtype=torch.uint8))
        store.working_set.await_seal = settle  # type: ignore[method-assign]
        assert num_writes and store["a"].tolist() == [99] * 4 + [num_writes] * 396


def test_a_part_of_an_adopted_tensor_undoes_no_write_that_has_returned(tmp_path: Path) -> None:
    save_file({"x": numbers(40_000, 1)}, tmp_path / "base.safetensors")
    gates: list[GatedDevice] = []

    def gate(device: Any) -> GatedDevice:
        gates.append(GatedDevice(device))
        return gates[0]

    with simulated_store(wrap=gate, external=[tmp_path / "base.safetensors"]) as store:
        store.adopt("a", tmp_path / "base.safetensors", "x")
        store.commit()
        hold_first_write(gates[0])
        call = Call(lambda: store.write_part("a", 5, torch.full((3,), 99, dtype=torch.uint8)))
        assert gates[0].has_held.wait(WAIT_S)
        value = numbers(40_000, 2)
        store["a"] = value
        gates[0].open()
        call.end()
        value[5:8] = 99
        assert torch.equal(store["a"], value)
        store.commit()
        assert store.working_set.space.used_nbytes == 40 * KiB and store.verify().is_clean


def test_who_waits_for_memory_keeps_nobody_from_writing_the_key() -> None:
    with simulated_store(budget_nbytes=64 * KiB) as store:
        store.put("a", numbers(60_000, 1), block_size="4KiB")
        store["other"] = numbers(60_000, 2)
        store.commit()
        stored(store.working_set, "a", "other")
        with store.lease("other", "r"):
            call = Call(lambda: store.write_part("a", 0, numbers(50_000, 3)))
            await_true(lambda: store.working_set.num_waiting == 1)
            store.write_part("a", 55_000, numbers(10, 4))  # by the thread that the call waits for
        call.end()
        value = numbers(60_000, 1)
        value[:50_000], value[55_000:55_010] = numbers(50_000, 3), numbers(10, 4)
        assert torch.equal(store["a"], value)


class Busy:
    """A producer with pending work until ``end``."""

    def __init__(self, store: Store) -> None:
        self.nested_calls = NestedCalls(store._condition)
        self.is_busy = True
        self._conclude: Callable[[BaseException | None], None] | None = None
        self._thread: threading.Thread | None = None

    def is_this_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def finish(self, key: str) -> None:
        pass

    def finish_all(self) -> None:
        pass

    def pending_keys(self) -> list[str]:
        return []

    def when_done(self, conclude: Callable[[BaseException | None], None]) -> bool:
        self._conclude = conclude
        return True

    def end(self) -> None:
        """Finish the pending work in the producer's thread, and what was to come at its end."""
        assert self._conclude is not None
        self.is_busy = False
        self._thread = threading.Thread(target=self._conclude, args=(None,))
        self._thread.start()
        self._thread.join(WAIT_S)


CHANGES: dict[str, Callable[[Store], object]] = {
    "part": lambda store: store.write_part("blocks", 0, numbers(10, 9)),
    "part of an inline tensor": lambda store: store.write_part("inline", 0, numbers(10, 9)),
    "inline put": lambda store: store.put("inline", numbers(400, 9)),
    "put": lambda store: store.put("blocks", numbers(20_000, 9)),
    "large put": lambda store: store.put("large", numbers(60_000, 9)),
    "small puts": lambda store: store.put_many({f"small {i}": numbers(4000, 9 + i) for i in range(12)}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_commit_that_has_returned_contains_no_change_that_came_later(change: str) -> None:
    """Its seal waits for a producer. The change had looked for such a seal before the call of commit."""
    with simulated_store() as store:
        store.put("blocks", numbers(20_000, 1), block_size="4KiB")
        store.put_many({"inline": numbers(400, 2), "large": numbers(60_000, 3)})
        store.put_many({f"small {i}": numbers(4000, i) for i in range(12)})
        store.commit()
        before = store.get_many(store)
        producer, working_set = Busy(store), store.working_set
        store.add_producer(producer)
        settle, has_committed, is_back = working_set.await_seal, threading.Event(), threading.Event()

        def late() -> None:
            is_call = threading.current_thread() is call.thread
            if is_call and has_committed.is_set():
                is_back.set()
            settle()
            if is_call and not has_committed.is_set():
                in_thread(lambda: store.commit(wait=False))
                has_committed.set()

        working_set.await_seal = late  # type: ignore[method-assign]
        may_begin = threading.Event()
        call = Call(lambda: (may_begin.wait(WAIT_S), CHANGES[change](store)))
        may_begin.set()
        await_true(lambda: is_back.is_set() or not call.thread.is_alive())
        assert working_set.must_await_seal
        producer.end()
        call.end()
        assert has_committed.is_set()
        store.wait_for_commit()
        assert any(not torch.equal(store[name], value) for name, value in before.items())
        store.rollback()
        assert all(torch.equal(store[name], value) for name, value in before.items())

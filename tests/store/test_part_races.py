"""Parts read and written while other calls change the key: each call sees one state of it, and undoes no other call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.devices.simulated_disk import SimulatedDisk
from tests.store.rig import WAIT_S, numbers, simulated_store
from tests.store.test_parts import LARGE, read
from tiered.store.format.row import Page, Row
from tiered.store.records.entry import Granted
from tiered.store.records.pages import Pages
from tiered.store.store import Store
from tiered.units import KiB, MiB

NBYTES = 48 * KiB


def in_thread(action: Callable[[], object]) -> None:
    """Run ``action`` in a thread of its own; return at its end."""
    thread = threading.Thread(target=action)
    thread.start()
    thread.join(WAIT_S)
    assert not thread.is_alive()


@pytest.mark.parametrize("what", ["part", "whole"])
def test_a_reader_of_parts_that_were_rolled_back_keeps_what_they_stand_on(what: str) -> None:
    with simulated_store(SimulatedDisk(can_lose_power=False), budget_nbytes=64 * KiB) as store:
        value = numbers(NBYTES, 1)
        store.put("a", value, block_size="4KiB")
        store.commit()
        store.write_part("a", 5000, numbers(100, 2))
        value[5000:5100] = numbers(100, 2)
        row = store._values._stored_row("a")  # as get does
        assert row is not None and row.pages is not None
        store.rollback()
        store.write_part("a", 20_000, numbers(12_000, 3))
        if what == "whole":
            store["a"] = numbers(NBYTES, 9)
        store.commit()
        for number in range(4):
            store[f"other {number}"] = numbers(16 * KiB, 50 + number)
            store.commit()
        assert torch.equal(read(store, row), value)
        del store["a"]
        store.commit()
        assert store.working_set.space.used_nbytes == 4 * 16 * KiB


def test_a_reader_of_parts_of_one_key_is_nothing_to_the_key_that_had_the_extents_before() -> None:
    with simulated_store(SimulatedDisk(can_lose_power=False), budget_nbytes=64 * KiB) as store:
        store.put("a", numbers(NBYTES, 1), block_size="4KiB")
        store.commit()
        first = store._records.entries["a"].row
        store.write_part("a", 0, numbers(NBYTES, 2))  # all of it lies elsewhere then
        store.commit()
        value = numbers(NBYTES, 3)
        store.put("b", value, block_size="4KiB")
        store.commit()
        second = store._records.entries["b"].row
        assert first is not None and second is not None and first.extents == second.extents
        store.write_part("b", 5000, numbers(100, 4))
        value[5000:5100] = numbers(100, 4)
        row = store._values._stored_row("b")
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
        row = store._values._stored_row("a")
        assert row is not None and isinstance(row.pages, Pages)
        pages, from_catalog = row.pages, row.pages._read

        def replace() -> None:
            store["a"] = numbers(LARGE, 2)
            store.commit()

        def late(row: Row, number: int) -> Page:
            if pages._read is late:
                pages._read = from_catalog
                in_thread(replace)
            return from_catalog(row, number)

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

"""Keys that nobody has used since the store was opened cost little, and become entries when they are."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import torch

from tests.devices.simulated_disk import SimulatedDisk
from tests.store.rig import assert_holds, filled, numbers, simulated_store
from tiered.store.format.row import decode_row
from tiered.store.store import Store


def num_used(store: Store) -> int:
    return len(list(store.working_set.entries.used()))


def test_looking_at_keys_makes_no_entries(disk: SimulatedDisk) -> None:
    with simulated_store(disk) as store:
        values = filled(store)
    with simulated_store(disk) as store:
        assert list(store) == list(values)
        assert len(store) == 3
        assert "inline" in store and "nothing" not in store
        assert [record.name for record in store.records()] == list(values)
        assert {record.residency for record in store.records()} == {"stored"}
        assert store.verify().is_clean
        assert store.working_set.has("inline") and not store.working_set.has("nothing")  # without the lock
        assert not store.working_set.is_resident("ordinary")
        assert num_used(store) == 0
        assert_holds(store, values)


def test_a_used_key_has_one_entry_from_then_on(disk: SimulatedDisk) -> None:
    with simulated_store(disk) as store:
        values = filled(store)
    with simulated_store(disk) as store:
        table = store.working_set.entries
        entry = table.get("ordinary")
        assert entry is not None
        assert entry is table.get("ordinary") is table["ordinary"] is table.peek("ordinary")
        assert entry.row is not None and entry.row is entry.committed
        store["ordinary"] = values["ordinary"] = numbers(12 * 1024, 5)
        del store["inline"], values["inline"]
        store.rollback()
        assert num_used(store) == 2
        assert_holds(store, filled(store))


def test_a_key_that_was_never_used_can_be_replaced_and_deleted(disk: SimulatedDisk) -> None:
    with simulated_store(disk) as store:
        filled(store)
    with simulated_store(disk) as store:
        store["ordinary"] = torch.ones(5)
        del store["streamed"]
        store.commit()
    with simulated_store(disk) as store:
        assert sorted(store) == ["inline", "ordinary"]
        assert torch.equal(store["ordinary"], torch.ones(5))


def test_a_stored_key_costs_less_than_half_a_kibibyte(tmp_path: Path) -> None:
    num_keys = 4000
    with Store(tmp_path / "run", dram="16MiB") as store:
        store.put_many((f"embedding/{i:08d}", numbers(4096)) for i in range(num_keys))
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        with Store(tmp_path / "run", dram="16MiB") as store:
            assert len(store) == num_keys
            assert tracemalloc.get_traced_memory()[0] - before < 512 * num_keys
            rows = [decode_row(row) for row in store._parts.catalog.load()[1].encoded.values()]  # type: ignore[union-attr]
            assert [row.name for row in rows] == [f"embedding/{i:08d}" for i in range(num_keys)]
    finally:
        tracemalloc.stop()

"""Keys that nobody has used since the store was opened cost little, and become entries when they are."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import torch

from tests.devices.simulated_disk import SimulatedDisk
from tests.store.rig import filled, numbers, simulated_store
from tiered.store.format.row import decode_row
from tiered.store.store import Store


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

"""Gets of tensors that are too large for the working set: as safe as any other get."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.devices.simulated_disk import SimulatedDisk
from tests.store.rig import WAIT_S, GatedDevice, await_true, numbers, simulated_store, written
from tiered.errors import CorruptionError, DeadlineError, DeviceError
from tiered.store.store import Store
from tiered.units import MiB


@pytest.fixture(params=[1, 3])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    with Store(*(tmp_path / str(i) for i in range(request.param)), dram="16MiB") as made:
        yield made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64])
def test_large_tensors_come_whole_in_memory_of_their_own(store: Store, dtype: torch.dtype) -> None:
    value = (numbers(6 * MiB) % 2).to(dtype).view(3, -1)[:, 1:].contiguous()
    store["a"] = value
    found = store["a"]
    assert torch.equal(found, value)
    assert (found.dtype, found.shape, found.storage_offset()) == (value.dtype, value.shape, 0)
    assert found.untyped_storage().nbytes() == value.nbytes
    found.zero_()
    assert torch.equal(store["a"], value)
    assert store.working_set.statistics().arena_bytes == 0


def test_get_many_takes_large_and_small_ones(store: Store) -> None:
    values = {f"k{i}": numbers(5 * MiB, i) for i in range(7)} | {"small": numbers(5000)}
    store.put_many(values)
    written(store)
    found = store.get_many(reversed(list(values)))
    assert list(found) == list(reversed(list(values)))
    assert all(torch.equal(found[name], value) for name, value in values.items())


def gated_store(disk: SimulatedDisk) -> tuple[Store, GatedDevice]:
    gates: list[GatedDevice] = []
    store = simulated_store(
        disk,
        budget_nbytes=4 * MiB,
        wrap=lambda device: gates.append(GatedDevice(device)) or gates[-1],  # type: ignore[func-returns-value]
    )
    return store, gates[0]


def test_bytes_that_are_being_read_stay_until_the_read_has_ended() -> None:
    disk = SimulatedDisk(capacity_nbytes=64 * MiB, can_lose_power=False)
    store, gate = gated_store(disk)
    store["a"] = numbers(6 * MiB)
    store.commit()
    gate.hold = lambda operation: not operation.is_write
    store.working_set.deadline_s = 0.05
    with pytest.raises(DeadlineError, match="transfer of slab 0 of 'a'"):
        store["a"]
    store.working_set.deadline_s = WAIT_S  # order: a commit takes longer than that on a busy machine
    used = store.statistics().used_bytes
    del store["a"]
    store.commit()
    assert store.statistics().used_bytes == used
    gate.open()
    await_true(lambda: store.statistics().used_bytes == 0)
    store.close()


def test_a_failed_read_a_damaged_block_and_an_out_that_does_not_fit_end_the_stream() -> None:
    disk = SimulatedDisk(capacity_nbytes=64 * MiB, can_lose_power=False)
    store, gate = gated_store(disk)
    values = {name: numbers(9 * MiB, seed) for seed, name in enumerate("abc")}
    store.put_many(values)
    store.commit()
    gate.fail = lambda operation: DeviceError("no such block") if operation.offset >= 4 * MiB else None
    for _ in range(2):
        with pytest.raises((DeviceError, CorruptionError)):
            store["a"]
        with pytest.raises((DeviceError, CorruptionError)):
            store.get_many("abc")
    with pytest.raises(ValueError, match="expected out of"):
        store.get("a", out=torch.empty(1))
    gate.fail = lambda operation: None
    assert all(torch.equal(store[name], value) for name, value in values.items())
    store.clear()
    store.commit()
    await_true(lambda: store.statistics().used_bytes == 0)
    store.close()

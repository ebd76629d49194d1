"""Gets past the working set: straight into the caller's memory, as safe as any other get."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.devices.simulated_disk import SimulatedDisk
from tests.store.rig import WAIT_S, GatedDevice, await_true, numbers, simulated_store, written
from tiered.bytes.host_tensor import empty_aligned
from tiered.errors import CorruptionError, DeadlineError, DeviceError
from tiered.store.format.checksum import BLOCK_NBYTES
from tiered.store.store import Store
from tiered.store.values import streaming
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


def test_an_aligned_out_is_read_into(store: Store) -> None:
    store["a"] = value = numbers(9 * MiB)
    for out in (empty_aligned(9 * MiB, 4096)[0], torch.empty(9 * MiB, dtype=torch.uint8)):
        assert store.get("a", out=out) is out
        assert torch.equal(out, value)
    assert store.working_set.statistics().swaps.streamed_in_bytes == 18 * MiB


def test_a_tensor_for_which_others_would_have_to_go_does_not_become_resident(store: Store) -> None:
    values = {f"k{i}": numbers(3 * MiB, i) for i in range(9)}
    store.put_many(values)
    written(store)
    for _ in range(2):
        assert all(torch.equal(store[name], value) for name, value in values.items())
        assert [store.working_set.is_resident(name) for name in values] == [True] * 5 + [False] * 4
    assert store.working_set.statistics().num_evictions <= 9


def test_many_large_tensors_are_read_ahead(store: Store) -> None:
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
    with pytest.raises(DeadlineError, match="get of 'a'"):
        store["a"]
    store.working_set.deadline_s = WAIT_S  # order: a commit takes longer than that on a busy machine
    used = store.statistics().used_bytes
    del store["a"]
    store.commit()
    assert store.statistics().used_bytes == used
    gate.open()
    await_true(lambda: store.statistics().used_bytes == 0)
    store.close()


def test_get_many_has_several_tensors_on_their_way() -> None:
    disk = SimulatedDisk(capacity_nbytes=64 * MiB, can_lose_power=False)
    store, gate = gated_store(disk)
    values = {name: numbers(9 * MiB, seed) for seed, name in enumerate("abc")}
    store.put_many(values)
    store.commit()
    gate.hold = lambda operation: not operation.is_write
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(store.get_many, "abc")
        await_true(lambda: len(gate.held) == 9)  # blocks of 4, 4 and 1 MiB each
        gate.held.reverse()
        gate.open()
        assert all(torch.equal(found.result(WAIT_S)[name], value) for name, value in values.items())
    assert store.working_set.statistics().arena_bytes == 0
    store.close()


def test_a_get_of_more_than_may_be_on_its_way_starts_the_rest_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "_DIRECT_NBYTES", 2 * BLOCK_NBYTES)
    disk = SimulatedDisk(capacity_nbytes=64 * MiB, can_lose_power=False)
    store, gate = gated_store(disk)
    store["a"] = value = numbers(5 * BLOCK_NBYTES + 1)
    store.commit()
    gate.hold = lambda operation: not operation.is_write
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(store.__getitem__, "a")
        for _ in range(4):
            await_true(lambda: len(gate.held) == 2)
            gate.device.submit([gate.held.pop()])
        gate.open()
        assert torch.equal(found.result(WAIT_S), value)
    store.close()


def test_memory_and_stream_outlive_a_get_that_failed() -> None:
    disk = SimulatedDisk(capacity_nbytes=64 * MiB, can_lose_power=False)
    store, gate = gated_store(disk)
    store["a"] = value = numbers(9 * MiB)
    store.commit()
    place = store.working_set.records.entries["a"].row.extents[0].offset  # type: ignore[union-attr]
    gate.fail = lambda operation: DeviceError("no such block") if operation.offset == place + 2 * BLOCK_NBYTES else None
    gate.hold = lambda operation: not operation.is_write
    with pytest.raises(DeviceError, match="no such block"):
        store["a"]
    assert store.working_set.space.is_streaming(store.records()[0].extents)
    for operation in gate.held:  # the result is gone, its memory is not
        operation.memory[:] = bytes(len(operation.memory))
    gate.fail = lambda operation: None
    gate.open()
    await_true(lambda: not store.working_set.space.is_streaming(store.records()[0].extents))
    assert torch.equal(store["a"], value)
    store.close()


def test_a_failed_read_and_a_damaged_block_end_the_stream() -> None:
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
    gate.fail = lambda operation: None
    assert all(torch.equal(store[name], value) for name, value in values.items())
    store.clear()
    store.commit()
    await_true(lambda: store.statistics().used_bytes == 0)
    store.close()

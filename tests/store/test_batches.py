"""put_many and get_many of small tensors: moved in batches, with the contract of single puts and gets."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.devices.faults import Fault, FaultsDevice
from tests.devices.simulated_disk import SimulatedDisk
from tests.store.rig import GatedDevice, assert_holds, numbers, simulated_store
from tiered.bytes.device.base import Device, Operation
from tiered.errors import CorruptionError, DeviceError, LeaseError
from tiered.store.store import Store
from tiered.units import KiB, MiB

BOTH_ARENAS = True

BUDGET = 1 * MiB  # batches of 32 KiB, and 128 KiB of dirty bytes before they begin
SIZES = (1025, 4096, 5000, 12 * KiB, 32 * KiB, 100, 70 * KiB)  # small ones, an inline one and one with its own buffer


@pytest.fixture
def disk() -> SimulatedDisk:
    return SimulatedDisk(capacity_nbytes=64 * MiB, can_lose_power=False)


@pytest.fixture(params=[1, 3])
def store(request: pytest.FixtureRequest, disk: SimulatedDisk) -> Iterator[Store]:
    with simulated_store(disk, budget_nbytes=BUDGET, num_devices=request.param) as made:
        yield made


def many(number: int, seed: int = 0) -> dict[str, torch.Tensor]:
    return {f"k{i}": numbers(SIZES[i % len(SIZES)], 1000 * seed + i) for i in range(number)}


def small(number: int, seed: int = 0) -> dict[str, torch.Tensor]:
    return {f"k{i}": numbers(4096, 1000 * seed + i) for i in range(number)}


def num_operations(store: Store) -> tuple[int, int]:
    statistics = [device.statistics() for device in store._parts.devices]
    return sum(device.num_reads for device in statistics), sum(device.num_writes for device in statistics)


def test_what_is_put_in_batches_is_got_again(store: Store, disk: SimulatedDisk) -> None:
    values = many(300)
    store.put_many(values)
    assert store.working_set.statistics().swaps.streamed_out_bytes > 0
    assert_holds(store, values)
    assert store.verify().is_clean
    num_devices = len(store._parts.devices)
    store.close()
    with simulated_store(disk, budget_nbytes=BUDGET, num_devices=num_devices) as again:
        names = list(values)
        random.Random(1).shuffle(names)
        found = again.get_many([*names, *names[:50]])
        assert list(found) == names
        assert all(torch.equal(found[name], value) for name, value in values.items())
        assert again.working_set.statistics().swaps.streamed_in_bytes > 0
        found["k1"].zero_()
        assert torch.equal(again["k1"], values["k1"])
        assert again._parts.arena.peak_nbytes <= BUDGET


def test_neighbours_share_operations(store: Store) -> None:
    values = small(800)
    store.put_many(values)
    store.commit()
    _, num_writes = num_operations(store)
    assert num_writes < 32 + 800 / 8 + 20  # 32 keys were dirty in DRAM, the others go by eight
    num_reads, _ = num_operations(store)
    found = store.get_many(reversed(list(values)))
    assert num_operations(store)[0] - num_reads < 32 + 800 / 8 * 2 + 20
    assert list(found) == list(reversed(list(values)))


def test_a_few_keys_are_swapped_in_and_stay(store: Store) -> None:
    store.put_many(small(400))
    store.commit()
    keys = ["k300", "k301", "k302"]
    store.get_many(keys)
    assert all(map(store.working_set.is_resident, keys))


def test_the_last_put_of_a_key_wins(store: Store) -> None:
    pairs = [(f"k{i % 37}", numbers(SIZES[i % len(SIZES)], i)) for i in range(400)]
    store.put_many(pairs)
    assert_holds(store, dict(pairs))


def test_a_source_may_reuse_its_tensor(store: Store) -> None:
    value = torch.zeros(4096, dtype=torch.uint8)
    store.put_many((f"k{i}", value.fill_(i % 251)) for i in range(500))
    assert all(store[f"k{i}"].unique().tolist() == [i % 251] for i in range(500))


def test_committed_values_are_replaced_and_rolled_back(store: Store, disk: SimulatedDisk) -> None:
    first, second = many(300), many(300, seed=1)
    store.put_many(first)
    store.commit()
    used = store.statistics().used_bytes
    store.put_many(second)
    assert_holds(store, second)
    store.rollback()
    assert_holds(store, first)
    assert store.statistics().used_bytes == used
    store.put_many(second)
    store.commit(wait=False)
    store.put_many(first)  # while the commit may run
    store.commit()
    assert_holds(store, first)
    assert store.statistics().used_bytes == used
    assert store.verify().is_clean


def test_a_key_that_is_not_there_is_an_error_before_anything_is_read(store: Store) -> None:
    store.put_many(small(400))
    store.commit()
    before = num_operations(store)
    with pytest.raises(KeyError, match="nothing"):
        store.get_many([*(f"k{i}" for i in range(400)), "nothing"])
    assert num_operations(store) == before


def test_what_comes_before_a_wrong_value_is_put(store: Store) -> None:
    values = small(400)

    def pairs() -> Iterator[tuple[str, torch.Tensor]]:
        yield from values.items()
        yield "wrong", "text"  # type: ignore[misc]
        yield "after", numbers(4096)

    with pytest.raises(TypeError, match="put of 'wrong'"):
        store.put_many(pairs())
    assert_holds(store, values)

    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield from small(300, seed=1).items()
        raise OSError("the source is gone")

    with pytest.raises(OSError, match="the source is gone"):
        store.put_many(failing())
    assert_holds(store, values | small(300, seed=1))


@pytest.mark.parametrize("nbytes", [4096, 70 * KiB])
def test_a_leased_key_stops_the_puts_after_it(store: Store, nbytes: int) -> None:
    store["k200"] = old = numbers(nbytes)
    values = small(400)
    values["k200"] = numbers(nbytes, 5)
    with store.lease("k200", "rw"), pytest.raises(LeaseError, match="k200"):
        store.put_many(values)
    assert torch.equal(store["k200"], old)
    assert all(torch.equal(store[f"k{i}"], values[f"k{i}"]) for i in range(190))
    assert "k210" not in store
    used = sum(-(-record.nbytes // 4096) * 4096 for record in store.records() if record.extents)
    assert store.statistics().used_bytes <= used + nbytes + 4096
    store.put_many(values)
    assert_holds(store, values)


def test_a_failed_batch_is_put_nowhere_and_its_extents_are_not_used_again(disk: SimulatedDisk) -> None:
    gates: list[GatedDevice] = []

    def wrap(device: object) -> GatedDevice:
        gates.append(GatedDevice(device))  # type: ignore[arg-type]
        return gates[-1]

    with simulated_store(disk, budget_nbytes=BUDGET, wrap=wrap) as store:
        first = small(100)
        store.put_many(first)
        store.commit()

        def fail(operation: Operation) -> Exception | None:
            is_batch = operation.is_write and len(operation.memory) > 4096
            return DeviceError("the drive is gone") if is_batch else None

        gates[0].fail = fail
        with pytest.raises(DeviceError, match="the drive is gone"):
            store.put_many({f"n{i}": numbers(4096, i) for i in range(400)})
        gates[0].fail = lambda operation: None
        assert store.statistics().quarantined_bytes > 0
        assert all(torch.equal(store[name], value) for name, value in first.items())
        assert sum(name.startswith("n") for name in store) <= 33
        more = small(400, seed=3)
        store.put_many(more)
        found = store.get_many(more)
        assert all(torch.equal(found[name], value) for name, value in more.items())


def test_nothing_behind_a_batch_that_fails_is_put(disk: SimulatedDisk) -> None:
    faults: list[FaultsDevice] = []

    def wrap(device: Device) -> FaultsDevice:
        faults.append(FaultsDevice(device))
        return faults[-1]

    with simulated_store(disk, budget_nbytes=8 * MiB, wrap=wrap) as store:
        store.put_many((f"dirty {i}", numbers(32 * KiB, i)) for i in range(32))  # so much that others go straight
        faults[0].inject(Fault("write"))
        values = {f"small {i}": numbers(32 * KiB, i) for i in range(40)}
        with pytest.raises(DeviceError, match="injected"):
            store.put_many(values | {"large": numbers(1 * MiB), "inline": numbers(100)})
        assert "small 39" not in store
        assert "large" not in store
        assert "inline" not in store


def test_a_put_between_batches_waits_for_room_with_none_in_its_hands(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads that each kept buffers while they waited for one would wait for each other."""
    values_of_store = store._values
    put, kept = values_of_store.put, []

    def watched(key: str, value: torch.Tensor) -> None:
        statistics = store.working_set.statistics()
        kept.append(statistics.arena_bytes - statistics.resident_bytes)
        put(key, value)

    store.put_many({f"before {i}": numbers(32 * KiB, i) for i in range(8)})
    monkeypatch.setattr(values_of_store, "put", watched)
    values = {f"{size} {i}": numbers(size, i) for i in range(4) for size in (4096, 72 * KiB)}
    store.put_many(values)
    assert len(kept) >= 4 and not any(kept)
    assert store.working_set.statistics().swaps.streamed_out_bytes > 0
    assert all(torch.equal(store[name], value) for name, value in values.items())


def test_damage_in_a_batch_is_named_and_the_rest_unharmed(tmp_path: Path) -> None:
    values = {f"k{i}": numbers(4096, i) for i in range(600)}
    with Store(tmp_path / "run", dram="8MiB") as store:
        store.put_many(values)
        store.commit()
        extent = next(record.extents[0] for record in store.records() if record.name == "k500")
    with open(tmp_path / "run" / "data-000", "r+b") as file:
        file.seek(extent.offset + 77)
        byte = file.read(1)[0]
        file.seek(extent.offset + 77)
        file.write(bytes([byte ^ 1]))
    with Store(tmp_path / "run", dram="8MiB") as store:
        with pytest.raises(CorruptionError, match="'k500' is damaged") as caught:
            store.get_many(values)
        assert (caught.value.key, caught.value.offset) == ("k500", extent.offset)
        del values["k500"]
        found = store.get_many(values)
        assert all(torch.equal(found[name], value) for name, value in values.items())
        assert store.statistics().working_set.arena_bytes == 0


def test_one_str_is_no_list_of_keys(store: Store) -> None:
    store["a"] = store["b"] = torch.zeros(3)
    for call in (store.get_many, store.prefetch):
        with pytest.raises(TypeError, match=r"expected an iterable of keys, got the one key 'ab': pass \['ab'\]"):
            call("ab")

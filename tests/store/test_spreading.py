"""A store over several directories: its tensors lie on all of them by bandwidth, and streams keep all of them busy."""

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.devices.simulated_disk import SimulatedDisk
from tests.store.places import short_files
from tests.store.rig import numbers, simulated_store
from tests.store.test_bandwidth import PROFILE
from tiered.bytes.device.base import Adaptor, Device, Operation
from tiered.bytes.device.profile import write_profile
from tiered.errors import CapacityError
from tiered.store.records.records import Extents
from tiered.store.store import Store
from tiered.units import KiB, MiB


def test_the_profiles_of_the_directories_say_how_tensors_are_spread(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("fast", "slow")]
    for path, bytes_per_s in zip(paths, (3e9, 1e9), strict=True):
        path.mkdir(mode=0o700)
        write_profile(path, dataclasses.replace(PROFILE, read_bytes_per_s=bytes_per_s, write_bytes_per_s=bytes_per_s))
    value = numbers(32 * MiB)
    with Store(*paths, dram="16MiB") as store:
        store["streamed"] = value
        on = {extent.device: extent.nbytes for extent in store.records()[0].extents}
        assert on == {0: 24 * MiB, 1: 8 * MiB}
        assert torch.equal(store["streamed"], value)
        assert store.verify().is_clean


class Weights:
    """A meter of bandwidths that says new weights once, when it has some."""

    def __init__(self) -> None:
        self.weights: list[float] | None = None

    def new_weights(self) -> list[float] | None:
        weights, self.weights = self.weights, None
        return weights


def grows_of(draws: random.Random, num_commits: int = 12) -> int:
    """Take space as commits do, with weights that change; return the most times that the files grew for one of them."""
    disk, most = SimulatedDisk(capacity_nbytes=1 << 30, can_lose_power=False), 0
    with short_files(), simulated_store(disk, num_devices=2) as store:
        space, meter = store.working_set.space, Weights()
        space.meter = meter  # type: ignore[assignment]
        for _ in range(num_commits):
            meter.weights = [draws.choice([1, 2, 3, 10, 100]) for _ in range(2)]
            sizes = [draws.choice([1, 2, 3, 5, 6, 7, 8, 9, 16]) * MiB for _ in range(draws.randint(1, 6))]
            landed: dict[int, Extents] = {}
            for num_grows in range(10):
                for index, nbytes in enumerate(sizes):
                    if index not in landed and (extents := space.take_nowait(nbytes, scratch=False)) is not None:
                        landed[index] = extents
                missing = sum(nbytes for index, nbytes in enumerate(sizes) if index not in landed)
                most = max(most, num_grows)
                if not missing:
                    break
                space.grow(missing, scratch=False)
            for extents in landed.values():
                if draws.random() < 0.6:
                    space.give_back(extents)
    return most


@pytest.mark.parametrize("seed", [5, 6, 7])
def test_a_commit_does_without_balance_where_all_of_it_has_room(seed: int) -> None:
    """There is room in balance for all that it writes, and not for a tensor that goes to one directory whole: 5."""
    assert grows_of(random.Random(seed)) <= 3


def test_small_tensors_use_every_directory_from_the_start(tmp_path: Path) -> None:
    with Store(tmp_path / "a", tmp_path / "b", dram="16MiB") as store:
        store.put_many({str(i): numbers(1 * MiB, i) for i in range(12)})
        store.commit()
        used = [0, 0]
        for record in store.records():
            for extent in record.extents:
                used[extent.device] += extent.nbytes
        assert used == [6 * MiB, 6 * MiB]


def test_directories_of_one_file_system_share_its_room() -> None:
    devices: list[Device] = []

    class Shared(Adaptor):
        def free_bytes(self) -> int:
            return 32 * MiB - sum(sum(device.files().values()) for device in devices)

        def grow(self, file: int, nbytes: int) -> None:
            if nbytes - self.files().get(file, 0) > self.free_bytes():
                raise CapacityError(f"{self.name} is full")
            self.upstream.grow(file, nbytes)

    def share(device: Device) -> Device:
        devices.append(Shared(device))
        return devices[-1]

    with simulated_store(num_devices=2, wrap=share, disk=SimulatedDisk(can_lose_power=False)) as store:
        space = store.working_set.space
        space._allocator.set_weights([0.1, 0.9])
        space.grow(30 * MiB, scratch=False)  # the first grows ahead, by what the second was to have
        assert space.free_nbytes >= 30 * MiB
        with pytest.raises(CapacityError, match="more are needed on the devices, which have room for 0 B"):
            space.grow(40 * MiB, scratch=False)


def test_a_stream_takes_turns_between_the_devices() -> None:
    order: list[tuple[bool, str]] = []

    class Watched(Adaptor):
        def submit(self, operations: Sequence[Operation]) -> None:
            order.extend((operation.is_write, self.name) for operation in operations)
            self.upstream.submit(operations)

    def watch(device: Device) -> Device:
        return Watched(device)

    disk = SimulatedDisk(capacity_nbytes=64 * MiB, can_lose_power=False)
    store = simulated_store(disk, budget_nbytes=16 * MiB, num_devices=2, wrap=watch)
    value = numbers(23 * MiB + 100 * KiB)  # six blocks, the last one short
    store["a"] = value
    assert torch.equal(store["a"], value)
    names = ["memory:0", "memory:1"] * 3
    assert [name for is_write, name in order if is_write] == names
    assert sorted(name for is_write, name in order if not is_write) == sorted(names)
    store.close()


class Small(Adaptor):
    """A drive with room for 1 MiB."""

    def free_bytes(self) -> int:
        return 1 * MiB - sum(self.files().values())


@pytest.mark.parametrize("size", [64 * KiB, 1 * MiB, 9 * MiB])
def test_what_a_full_drive_lacks_the_other_gives(size: int) -> None:
    def wrap(device: Device) -> Device:
        return Small(device) if device.name.endswith("0") else device

    disk = SimulatedDisk(capacity_nbytes=256 * MiB, can_lose_power=False)
    store = simulated_store(disk, budget_nbytes=16 * MiB, num_devices=2, wrap=wrap)
    values = {str(i): numbers(size, i) for i in range(24 * MiB // size)}
    for _ in range(2):  # again: over what is there
        store.put_many(values)
        store.commit()
    for key, value in values.items():
        assert torch.equal(store[key], value), key
    assert disk.image(1, 0) and len(disk.image(0, 0)) <= 1 * MiB
    store.close()

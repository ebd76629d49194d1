"""A store over several directories: its tensors lie on all of them alike, and streams keep all of them busy."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.devices.adaptor import Adaptor
from tests.devices.simulated_disk import SimulatedDisk
from tests.store.rig import numbers, simulated_store
from tiered.bytes.device.base import Device, Operation
from tiered.errors import CapacityError
from tiered.store.store import Store
from tiered.units import KiB, MiB


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
        space.grow(30 * MiB, scratch=False)  # the first grows ahead, by what the second was to have
        assert space.free_nbytes >= 30 * MiB
        with pytest.raises(CapacityError, match="more are needed on the devices, which have room for"):
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

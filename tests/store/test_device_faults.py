"""What a device does wrong in silence the store finds out: no wrong bytes, and key, file and offset are named."""

from __future__ import annotations

import pytest
import torch

from tests.devices.faults import Fault, FaultKind, FaultsDevice
from tests.store.rig import numbers, simulated_store
from tiered.bytes.device.base import Device
from tiered.errors import CorruptionError
from tiered.store.store import Store
from tiered.units import KiB

SILENT = [FaultKind.LOSE, FaultKind.MISDIRECT, FaultKind.TEAR, FaultKind.FLIP]
SIZES = {"small": 4 * KiB, "ordinary": 12 * KiB, "streamed": 40 * KiB, "another": 8 * KiB}


def faulty_store(seed: int) -> tuple[Store, list[FaultsDevice]]:
    devices: list[FaultsDevice] = []

    def wrap(device: Device) -> Device:
        devices.append(FaultsDevice(device, seed=seed))
        return devices[-1]

    return simulated_store(num_devices=2, wrap=wrap), devices


def bring_out(store: Store) -> None:
    """Bring everything to the devices, and leave nothing of it in DRAM, not even in free memory."""
    working_set = store.working_set
    working_set.swap_out(store)
    buffer = working_set.reserve(working_set.budget_bytes)
    buffer.memory[:] = bytes(buffer.nbytes)
    working_set.unreserve(buffer)


def damaged(store: Store, values: dict[str, torch.Tensor]) -> set[str]:
    """Return the keys whose reading is refused; all others must be what was put."""
    refused = set()
    for key, value in values.items():
        try:
            assert torch.equal(store[key], value), key
        except CorruptionError as error:
            assert error.key == key and error.file and error.offset >= 0
            refused.add(key)
    return refused


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", SILENT, ids=lambda kind: kind.value)
def test_a_write_that_went_wrong_in_silence_is_found_at_the_next_read(kind: FaultKind, seed: int) -> None:
    store, devices = faulty_store(seed)
    values = {key: numbers(nbytes, 10 * seed + i) for i, (key, nbytes) in enumerate(SIZES.items())}
    for device in devices:
        device.inject(Fault("write", kind, nth=seed % 2))
    store.put_many(values)
    bring_out(store)
    assert sum(len(device.hits) for device in devices) >= 1
    refused = damaged(store, values)
    assert refused
    assert {error.key for error in store.verify().errors} == refused
    store.close()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", SILENT, ids=lambda kind: kind.value)
def test_a_read_that_went_wrong_in_silence_is_found_and_does_no_harm(kind: FaultKind, seed: int) -> None:
    store, devices = faulty_store(seed)
    values = {key: numbers(nbytes, 10 * seed + i) for i, (key, nbytes) in enumerate(SIZES.items())}
    store.put_many(values)
    bring_out(store)
    for device in devices:
        device.inject(Fault("read", kind, nth=seed % 2))
    assert damaged(store, values)
    assert damaged(store, values) == set()  # the bytes on the device are sound
    store.commit()
    store.close()

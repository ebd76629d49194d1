"""A sector that gives no bytes is reported by verify as damage of its key, and stops nobody from reading the others."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

import pytest
import torch

from tests.devices.faults import Fault, FaultsDevice
from tests.devices.simulated_disk import SimulatedDisk
from tests.store.rig import GatedStore, filled, numbers, simulated_store
from tiered.bytes.device.base import Device, Operation
from tiered.bytes.device.files import translate
from tiered.errors import DeadlineError, DeviceError, UsageError
from tiered.store.format.checksum import BLOCK_NBYTES
from tiered.units import KiB, MiB

LOST_SECTOR = [errno.EIO, errno.ENODATA, errno.EILSEQ, errno.EREMOTEIO, errno.EBADMSG, errno.EUCLEAN]
LOST_DRIVE = [errno.ENODEV, errno.ENXIO, errno.ENOTCONN, errno.ESTALE, errno.ETIMEDOUT, errno.ENOMEM]
NBYTES = 2 * BLOCK_NBYTES + 5000


@pytest.mark.parametrize("num_devices", [1, 2])
def test_every_unreadable_block_is_reported_and_all_others_are_read(num_devices: int) -> None:
    number = errno.EIO
    disk = SimulatedDisk(capacity_nbytes=64 * MiB, can_lose_power=False)
    devices: list[FaultsDevice] = []

    def wrap(device: Device) -> Device:
        devices.append(FaultsDevice(device))
        return devices[-1]

    with simulated_store(disk, budget_nbytes=64 * MiB, num_devices=num_devices, wrap=wrap) as store:
        store.put_many({name: numbers(NBYTES, seed) for seed, name in enumerate("abc")})
        store["inline"] = numbers(100)
        store.commit()
        whole = store.verify()
        assert whole.is_clean and whole.num_blocks == 9
        places = {
            (device.path(extent.file), offset)
            for record in store.records()
            for device, extent in ((devices[extent.device], extent) for extent in record.extents)
            for offset in range(extent.offset, extent.offset + extent.nbytes, 4 * KiB)
        }
        found = set()
        for device in devices:
            for nth in range(9):
                device.inject(Fault("read", nth=nth, errno=number))
                hits = len(device.hits)
                report = store.verify()
                device.forget()
                assert len(report.errors) == len(device.hits) - hits
                for error in report.errors:
                    assert error.errno == number and (error.file, error.offset) in places
                    assert os.strerror(number) in str(error) and errno.errorcode[number] in str(error)
                    found.add((error.key, error.file, error.offset))
                assert report.num_keys == 4 and report.num_blocks == 9 - len(report.errors)
                assert report.nbytes >= whole.nbytes - BLOCK_NBYTES * len(report.errors)
        assert len(found) >= 9 and {key for key, _, _ in found} == set("abc")
        assert store.verify().is_clean


def unreadable(offset: int, number: int) -> Callable[[Operation], Exception | None]:
    """Return what fails every read of the byte at ``offset``."""

    def fail(operation: Operation) -> Exception | None:
        if operation.is_write or not operation.offset <= offset < operation.offset + operation.nbytes:
            return None
        return translate(OSError(number, os.strerror(number)), "read of data failed")

    return fail


def reopened(gated: GatedStore, number: int) -> dict[str, torch.Tensor]:
    """Commit three tensors, open the store again with the second unreadable, and return them."""
    values = filled(gated.store)
    gated.store.commit()
    offset = next(record.extents[0].offset for record in gated.store.records() if record.name == "ordinary")
    gated.close()
    gated.open()
    gated.device.fail = unreadable(offset + 5000, number)
    return values


@pytest.mark.parametrize("number", LOST_SECTOR)
def test_the_key_of_a_bad_sector_can_be_dropped_and_no_other(gated: GatedStore, number: int) -> None:
    values = reopened(gated, number)
    with pytest.raises(UsageError, match=r"'streamed' is not damaged.*nothing was dropped"):
        gated.store.drop_damaged(["ordinary", "streamed"])
    assert [error.errno for error in gated.store.verify().errors] == [number]
    gated.store.drop_damaged(["ordinary"])
    assert gated.store.generation == 2 and gated.store.verify().is_clean
    del values["ordinary"]
    assert set(gated.store) == set(values)
    assert all(torch.equal(gated.store[key], value) for key, value in values.items())


def test_whoever_wants_the_bytes_is_told_of_the_drive_and_not_of_damage(gated: GatedStore) -> None:
    values = reopened(gated, errno.EIO)
    with pytest.raises(DeviceError, match="Input/output error"):
        gated.store["ordinary"]
    gated.device.fail = lambda operation: None
    assert torch.equal(gated.store["ordinary"], values["ordinary"])


@pytest.mark.parametrize("number", LOST_DRIVE)
def test_a_drive_that_does_not_answer_is_no_damage_and_nothing_is_dropped(gated: GatedStore, number: int) -> None:
    reopened(gated, number)
    with pytest.raises(DeviceError, match="read of data failed"):
        gated.store.verify()
    with pytest.raises(DeviceError):
        gated.store.drop_damaged(["ordinary"])
    assert gated.store.generation == 1 and "ordinary" in gated.store


def test_a_read_that_hangs_is_no_damage(gated: GatedStore) -> None:
    reopened(gated, errno.EIO)
    gated.device.hold = lambda operation: not operation.is_write
    gated.store.working_set.deadline_s = 0.2
    with pytest.raises(DeadlineError):
        gated.store.verify()

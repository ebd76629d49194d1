"""Each fault does what it says, to the call it names, and the same again for the same seed."""

import errno
import threading

import pytest

from tests.bytes.moving import WAIT_S, Batch, fill, move
from tests.devices.faults import Fault, FaultKind, FaultsDevice
from tests.devices.simulated_disk import SimulatedDisk
from tiered.bytes.arena import Buffer
from tiered.bytes.device.memory import MemoryDevice
from tiered.errors import CapacityError, DeviceError
from tiered.units import KiB, MiB

NBYTES = 64 * KiB


def device_with(*faults: Fault, seed: int = 0) -> tuple[FaultsDevice, SimulatedDisk]:
    disk = SimulatedDisk()
    device = FaultsDevice(MemoryDevice(disk, 0), seed=seed)
    device.grow(0, 1 * MiB)
    device.inject(*faults)
    return device, disk


@pytest.mark.parametrize("verb", ["read", "write"])
def test_the_named_calls_fail_and_the_others_do_not(buffer: Buffer, verb: str) -> None:
    device, disk = device_with(Fault(verb, nth=1, count=2), Fault("flush", nth=5))
    fill(buffer, 1)
    errors = [move(device, verb, buffer, 4096) for _ in range(4)]
    assert [isinstance(error, DeviceError) for error in errors] == [False, True, True, False]
    assert f"{verb} of 65536 bytes at offset 4096 of {device.path(0)}" in str(errors[1])
    assert isinstance(errors[1].__cause__, OSError) and errors[1].__cause__.errno == errno.EIO
    assert [fault.call for fault in device.hits] == [verb, verb]
    assert disk.num_operations == 1 + 2 * (verb == "write")  # the growth, and the writes that were done
    device.close()


def test_faults_that_have_not_hit_can_be_forgotten(buffer: Buffer) -> None:
    device, _ = device_with(Fault("write"), Fault("write", nth=1), Fault("read"))
    assert isinstance(move(device, "write", buffer), DeviceError)
    device.forget()
    assert move(device, "write", buffer) is None and move(device, "read", buffer) is None
    assert len(device.hits) == 1
    device.close()


def test_an_error_number_becomes_the_error_an_engine_would_raise(buffer: Buffer) -> None:
    device, _ = device_with(Fault("write", errno=errno.ENOSPC), Fault("grow", errno=errno.EDQUOT))
    assert isinstance(move(device, "write", buffer), CapacityError)
    with pytest.raises(CapacityError):
        device.grow(0, 2 * MiB)
    assert device.files() == {0: 1 * MiB}
    device.grow(0, 2 * MiB)
    device.close()


def test_lost_calls_report_success_and_do_nothing(buffer: Buffer) -> None:
    device, disk = device_with(Fault("write", FaultKind.LOSE), Fault("read", FaultKind.LOSE))
    content = fill(buffer, 1)
    assert move(device, "write", buffer) is None and bytes(disk.image(0, 0)[:NBYTES]) == bytes(NBYTES)
    assert move(device, "read", buffer) is None and bytes(buffer.memory) == content  # stale: what was there before
    assert move(device, "read", buffer) is None and bytes(buffer.memory) == bytes(NBYTES)
    device.close()


@pytest.mark.parametrize("seed", range(8))
def test_a_misdirected_write_lands_elsewhere_in_the_file(buffer: Buffer, seed: int) -> None:
    images = []
    for _ in range(2):
        device, disk = device_with(Fault("write", FaultKind.MISDIRECT), seed=seed)
        content = fill(buffer, 1)
        assert move(device, "write", buffer, 128 * KiB) is None
        images.append(bytes(disk.image(0, 0)))
        assert images[-1].count(content) == 1 and images[-1].index(content) != 128 * KiB
        device.close()
    assert images[0] == images[1]


def test_a_misdirected_read_brings_other_bytes(buffer: Buffer) -> None:
    device, _ = device_with(Fault("read", FaultKind.MISDIRECT))
    content = fill(buffer, 1)
    assert move(device, "write", buffer) is None and move(device, "read", buffer) is None
    assert bytes(buffer.memory) != content
    device.close()


def test_without_another_place_a_misdirected_write_is_lost(buffer: Buffer) -> None:
    device, disk = device_with(Fault("write", FaultKind.MISDIRECT))
    device.grow(1, NBYTES)
    fill(buffer, 1)
    assert move(device, "write", buffer, file=1) is None and bytes(disk.image(0, 1)) == bytes(NBYTES)
    device.close()


@pytest.mark.parametrize("seed", range(4))
def test_a_torn_write_stops_at_a_block(buffer: Buffer, seed: int) -> None:
    device, disk = device_with(Fault("write", FaultKind.TEAR, count=4), seed=seed)
    content = fill(buffer, 1)
    lengths = set()
    for file in range(1, 5):
        device.grow(file, NBYTES)
        assert move(device, "write", buffer, file=file) is None
        image = bytes(disk.image(0, file))
        lengths.add(next(n for n in range(0, NBYTES, 4096) if image == content[:n] + bytes(NBYTES - n)))
    assert len(lengths) > 1
    device.close()


def test_a_torn_read_leaves_the_rest_of_the_memory(buffer: Buffer) -> None:
    device, _ = device_with(Fault("read", FaultKind.TEAR), seed=1)
    content = fill(buffer, 1)
    assert move(device, "read", buffer) is None
    found = bytes(buffer.memory)
    assert any(found == bytes(n) + content[n:] for n in range(0, NBYTES, 4096))
    device.close()


@pytest.mark.parametrize("verb", ["read", "write"])
def test_one_bit_is_flipped_on_its_way(buffer: Buffer, verb: str) -> None:
    device, _ = device_with(Fault(verb, FaultKind.FLIP))
    content = fill(buffer, 1)
    assert move(device, "write", buffer) is None
    assert bytes(buffer.memory) == content  # the submitter's memory of a write is never touched
    assert move(device, "read", buffer) is None
    found = bytes(buffer.memory)
    assert sum((a ^ b).bit_count() for a, b in zip(found, content, strict=True)) == 1
    assert move(device, "read", buffer) is None
    assert (bytes(buffer.memory) == content) == (verb == "read")  # in flight only, or for good
    device.close()


@pytest.mark.parametrize("verb", ["read", "write"])
def test_a_held_completion_waits_for_its_release(buffer: Buffer, verb: str) -> None:
    device, _ = device_with(Fault(verb, FaultKind.HOLD, count=2))
    batch = Batch(device)
    device.submit([batch.operation(verb, buffer.memory[i * 4096 : i * 4096 + 4096], i * 4096) for i in range(3)])
    assert device.wait_until_held(2, WAIT_S) and device.statistics().num_in_flight == 2
    assert [done.offset for done in batch.wait(1)] == [8192] and batch.done.empty()
    device.release()
    assert [done.offset for done in batch.wait(2)] == [0, 4096]
    assert device.statistics().num_in_flight == 0
    device.close()


def test_close_releases_what_is_held(buffer: Buffer) -> None:
    device, _ = device_with(Fault("write", FaultKind.HOLD))
    batch = Batch(device)
    device.submit([batch.operation("write", buffer.memory, 0)])
    device.close()
    assert batch.wait(1)[0].error is None


@pytest.mark.parametrize("call", ["flush", "grow"])
def test_a_call_that_blocks_is_held_too(call: str) -> None:
    device, _ = device_with(Fault(call, FaultKind.HOLD))
    ended = threading.Event()

    def make() -> None:
        device.flush() if call == "flush" else device.grow(0, 2 * MiB)
        ended.set()

    thread = threading.Thread(target=make)
    thread.start()
    assert device.wait_until_held(1, WAIT_S) and not ended.is_set()
    device.release()
    thread.join()
    assert ended.is_set()
    device.close()


def test_after_a_flush_that_failed_all_fail() -> None:
    device, _ = device_with(Fault("flush", nth=1))
    device.flush()
    for _ in range(2):
        with pytest.raises(DeviceError, match="flush of"):
            device.flush()
    device.close()


def test_a_lost_flush_makes_nothing_durable(buffer: Buffer) -> None:
    device, disk = device_with(Fault("flush", FaultKind.LOSE))
    assert move(device, "write", buffer) is None
    device.flush()
    assert disk.num_unsynced == 2  # the growth and the write
    device.flush()
    assert disk.num_unsynced == 0
    device.close()


def test_faults_that_make_no_sense_are_refused() -> None:
    for call, kind in (("flush", FaultKind.TEAR), ("grow", FaultKind.LOSE), ("open", FaultKind.FAIL)):
        with pytest.raises(ValueError, match="there is no"):
            Fault(call, kind)
    with pytest.raises(ValueError, match="nth must be"):
        Fault("read", nth=-1)

"""One contract, met by every device."""

import os
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.bytes.moving import Batch, fill, move
from tiered.bytes.arena import Arena, Buffer
from tiered.bytes.device.base import SCRATCH, Device, IOClass
from tiered.bytes.device.memory import MemoryDevice, SimulatedDisk
from tiered.bytes.device.threads import ThreadsDevice
from tiered.errors import ClosedError, DeviceError
from tiered.units import KiB, MiB

SHM = Path("/dev/shm")
DEVICES = ["memory", "threads", "threads-buffered", "threads-tmpfs"]


@pytest.fixture(params=DEVICES)
def opener(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Device]]:
    """What opens the device under test, again and again over the same files."""
    fds = len(os.listdir("/proc/self/fd"))
    if request.param == "memory":
        yield partial(MemoryDevice, SimulatedDisk(), 0)
    elif request.param == "threads-tmpfs":
        if not os.access(SHM, os.W_OK):
            pytest.skip("no /dev/shm")
        with tempfile.TemporaryDirectory(dir=SHM) as directory:
            yield partial(ThreadsDevice, directory, num_threads=3)
    else:
        yield partial(ThreadsDevice, tmp_path, num_threads=3, direct=False if "buffered" in request.param else None)
    assert len(os.listdir("/proc/self/fd")) == fds, "the device leaked a descriptor"


def test_a_device_keeps_its_contract(opener: Callable[[], Device], arena: Arena) -> None:
    check_device(opener, arena)


def check_device(opener: Callable[[], Device], arena: Arena) -> None:
    """Check all of the contract that a caller can see; ``opener`` opens an empty device, then the same one again."""
    device = opener()
    buffers = [_lease(arena, 64 * KiB) for _ in range(4)]
    contents = [fill(buffer, seed) for seed, buffer in enumerate(buffers)]
    assert device.alignment >= 4096 and device.alignment & (device.alignment - 1) == 0
    assert device.files() == {} and device.free_bytes() > 1 * MiB
    _check_growth(device)
    _check_round_trip(device, buffers, contents)
    _check_scratch(device, buffers[0])
    _check_refusals(device, buffers[0])
    _check_statistics(device)
    device.flush()
    device.close()
    device.close()
    _check_closed(device, buffers[0])

    reopened = opener()
    assert reopened.files() == {0: 512 * KiB, 12: 64 * KiB}  # scratch is gone
    assert move(reopened, "read", buffers[3], 192 * KiB) is None
    assert bytes(buffers[3].memory) == contents[3]
    reopened.close()
    for buffer in buffers:
        arena.release(buffer)


def _lease(arena: Arena, nbytes: int) -> Buffer:
    buffer = arena.allocate_nowait(nbytes)
    assert buffer is not None
    return buffer


def _check_growth(device: Device) -> None:
    device.grow(0, 256 * KiB)
    device.grow(12, 64 * KiB)
    assert device.files() == {0: 256 * KiB, 12: 64 * KiB}
    device.grow(0, 512 * KiB)
    device.grow(0, 4096)  # never shrinks
    assert device.files() == {0: 512 * KiB, 12: 64 * KiB}
    assert device.statistics().file_bytes == 576 * KiB
    assert device.path(0) != device.path(12) != device.path(SCRATCH)
    assert all(device.name in device.path(file) for file in (0, 12, SCRATCH))


def _check_round_trip(device: Device, buffers: list[Buffer], contents: list[bytes]) -> None:
    batch = Batch(device)
    device.submit([batch.operation("write", b.memory, i * b.nbytes) for i, b in enumerate(buffers)])
    assert [operation.error for operation in batch.wait(4)] == [None] * 4
    for buffer in buffers:
        buffer.memory[:] = bytes(buffer.nbytes)
    classes = (IOClass.PREFETCH, IOClass.DEMAND, IOClass.PREFETCH, IOClass.DEMAND)
    reads = zip(buffers, classes, strict=True)
    device.submit(
        [batch.operation("read", b.memory, i * b.nbytes, io_class=io_class) for i, (b, io_class) in enumerate(reads)]
    )
    assert [operation.error for operation in batch.wait(4)] == [None] * 4
    assert [bytes(buffer.memory) for buffer in buffers] == contents
    part = batch.operation("read", buffers[0].memory[4096:8192], 128 * KiB)  # one page of the third, in the middle
    device.submit([part])
    batch.wait(1)
    assert bytes(buffers[0].memory) == contents[0][:4096] + contents[2][:4096] + contents[0][8192:]
    buffers[0].memory[:] = contents[0]
    device.submit([])
    assert batch.done.empty()


def _check_scratch(device: Device, buffer: Buffer) -> None:
    device.grow(SCRATCH, 64 * KiB)
    assert device.files()[SCRATCH] == 64 * KiB
    content = bytes(buffer.memory)
    assert move(device, "write", buffer, file=SCRATCH) is None
    buffer.memory[:] = bytes(buffer.nbytes)
    assert move(device, "read", buffer, file=SCRATCH) is None
    assert bytes(buffer.memory) == content


def _check_refusals(device: Device, buffer: Buffer) -> None:
    sizes = device.files()
    for verb in ("read", "write"):
        for offset, file in ((512 * KiB, 0), (480 * KiB, 0), (0, 7)):
            error = move(device, verb, buffer, offset, file=file)
            assert isinstance(error, DeviceError), (verb, offset, file, error)
            assert device.path(file) in str(error) and str(offset) in str(error)
    assert device.files() == sizes


def _check_statistics(device: Device) -> None:
    statistics = device.statistics()
    assert statistics.num_writes == 5 and statistics.write_bytes == 5 * 64 * KiB
    assert statistics.num_reads == 6 and statistics.read_bytes == 5 * 64 * KiB + 4096
    assert statistics.num_in_flight == 0
    num_flushes = statistics.num_flushes
    device.flush()
    assert device.statistics().num_flushes == num_flushes + 1


def _check_closed(device: Device, buffer: Buffer) -> None:
    batch = Batch(device)
    with pytest.raises(ClosedError):
        device.submit([batch.operation("read", buffer.memory, 0)])
    with pytest.raises(ClosedError):
        device.grow(0, 1 * MiB)
    with pytest.raises(ClosedError):
        device.flush()
    assert batch.done.empty()

"""One contract, met by every device: every engine, on every kind of file system, and every adaptor."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from tests.bytes.moving import Batch, fill, move
from tests.bytes.places import PLACES, plain
from tests.devices.counting import CountingDevice
from tests.devices.faults import FaultsDevice
from tests.devices.simulated_disk import SimulatedDisk
from tests.devices.throttled import ThrottledDevice
from tiered.bytes.arena import Arena, Buffer
from tiered.bytes.device.base import SCRATCH, Device, IOClass
from tiered.bytes.device.memory import MemoryDevice
from tiered.bytes.device.threads import AiofilesDevice, MmapDevice, ThreadsDevice
from tiered.bytes.device.uring import UringDevice
from tiered.errors import ClosedError, DeviceError
from tiered.units import KiB, MiB

Opener = Callable[[], Device]


def cutting(directory: Path) -> UringDevice:
    """Return a device that makes two requests at a time, of one block each, of whatever is larger than that."""
    device = UringDevice(directory)
    device.cut(device.alignment, 2)
    return device


ENGINES: dict[str, Callable[..., Device]] = {
    "threads": partial(ThreadsDevice, num_threads=3),
    "threads-buffered": partial(ThreadsDevice, num_threads=3, direct=False),
    "uring": UringDevice,
    "uring-cut": cutting,
    "aiofiles": partial(AiofilesDevice, num_threads=3),
    "mmap": partial(MmapDevice, num_threads=3),
}
ONE_SLOT: dict[str, Callable[..., Device]] = {
    "threads": partial(ThreadsDevice, num_threads=1),
    "aiofiles": partial(AiofilesDevice, num_threads=1),
    "mmap": partial(MmapDevice, num_threads=1),
}


Engine = Callable[[Path], Device]


def counting(engine: Engine, directory: Path) -> Device:
    return CountingDevice(engine(directory))


def throttled(engine: Engine, directory: Path) -> Device:
    return ThrottledDevice(engine(directory), write_bytes_per_s=1e9)


def faults(engine: Engine, directory: Path) -> Device:
    return FaultsDevice(engine(directory))


def all_of_them(engine: Engine, directory: Path) -> Device:
    return CountingDevice(ThrottledDevice(FaultsDevice(engine(directory)), read_bytes_per_s=1e9))


ADAPTORS: dict[str, Callable[[Engine, Path], Device]] = {
    "counting": counting,
    "throttled": throttled,
    "faults": faults,
    "all-of-them": all_of_them,
}
DEVICES = [
    "memory",
    "counting/memory",
    *(f"{engine}@{place}" for engine in ENGINES for place in PLACES),
    *(f"{adaptor}/{engine}" for adaptor in ADAPTORS for engine in ENGINES),
]
OPENED_OFTEN = ["memory", *(f"{engine}@plain" for engine in ENGINES), "throttled/threads", "all-of-them/aiofiles"]


@pytest.fixture
def opener(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opener]:
    """What opens the device under test, again and again over the same files."""
    name: str = request.param
    with ExitStack() as stack:
        if name.endswith("memory"):
            disk = SimulatedDisk()
            memory = partial(MemoryDevice, disk, 0)
            yield (lambda: CountingDevice(memory())) if name.startswith("counting") else memory
        elif "@" in name:
            engine, _, place = name.partition("@")
            yield partial(ENGINES[engine], stack.enter_context(PLACES[place](tmp_path)))
        else:
            adaptor, _, engine = name.partition("/")
            yield partial(ADAPTORS[adaptor], ENGINES[engine], stack.enter_context(plain(tmp_path)))


@pytest.mark.parametrize("opener", DEVICES, indirect=True)
def test_a_device_keeps_its_contract(opener: Opener, arena: Arena) -> None:
    check_device(opener, arena)


@pytest.mark.parametrize("opener", OPENED_OFTEN, indirect=True)
def test_opening_200_times_leaks_nothing(opener: Opener, buffer: Buffer) -> None:
    with LeavesNothing():
        for _ in range(200):
            device = opener()
            device.grow(0, 64 * KiB)
            device.close()


@pytest.mark.parametrize("name", ONE_SLOT)
def test_a_class_is_served_in_order_and_the_most_urgent_first(name: str, tmp_path: Path, arena: Arena) -> None:
    device = ONE_SLOT[name](tmp_path)
    buffers = [_lease(arena, 64 * KiB) for _ in range(13)]
    device.grow(0, 13 * 64 * KiB)
    batch = Batch(device)
    classes = [IOClass.WRITE] * 5 + [IOClass.PREFETCH, IOClass.DEMAND] * 4
    operations = [
        batch.operation("write" if io_class is IOClass.WRITE else "read", b.memory, i * 64 * KiB, io_class=io_class)
        for i, (b, io_class) in enumerate(zip(buffers, classes, strict=True))
    ]
    device.submit(operations)
    done = batch.wait(13)
    assert [each.error for each in done] == [None] * 13
    assert done == sorted(operations, key=lambda each: each.io_class)  # stable: submission breaks ties
    device.close()
    for each in buffers:
        arena.release(each)


class LeavesNothing:
    """A block that leaves no thread and no descriptor behind."""

    def __enter__(self) -> None:
        self._before = self._count()

    def __exit__(self, *exception: object) -> None:
        assert self._count() == self._before, "the device left something behind"

    def _count(self) -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()


def check_device(opener: Opener, arena: Arena) -> None:
    """Check all of the contract that a caller can see; ``opener`` opens an empty device, then the same one again."""
    buffers = [_lease(arena, 64 * KiB) for _ in range(4)]
    contents = [fill(buffer, seed) for seed, buffer in enumerate(buffers)]
    with LeavesNothing():
        device = opener()
        assert device.alignment >= 4096 and device.alignment & (device.alignment - 1) == 0
        assert device.files() == {} and device.free_bytes() > 1 * MiB
        _check_growth(device)
        _check_round_trip(device, buffers, contents)
        _check_scratch(device, buffers[0])
        _check_refusals(device, buffers[0])
        _check_statistics(device)
        _check_odd_sizes(device, arena)
        _check_resubmission(device, buffers[0])
        _check_unusual_memory(device, buffers[0])
        device.flush()
        device.close()
        device.close()
        _check_closed(device, buffers[0])
    with LeavesNothing():
        reopened = opener()
        assert reopened.files() == {0: 512 * KiB, 12: 64 * KiB}  # scratch is gone
        assert move(reopened, "read", buffers[3], 192 * KiB) is None
        assert bytes(buffers[3].memory) == contents[3]
        _check_concurrent_submitters(reopened, arena)
        _check_close_in_flight(reopened, opener, buffers)
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


def _check_resubmission(device: Device, buffer: Buffer) -> None:
    """What the submitter has back may be mended and submitted once more, other memory included."""
    batch = Batch(device)
    for verb in ("write", "read"):
        operation = batch.operation(verb, buffer.memory, 512 * KiB)
        device.submit([operation])
        assert batch.wait(1)[0].error is not None
        operation.offset, operation.memory = 0, buffer.memory[: device.alignment]
        device.submit([operation])
        assert batch.wait(1)[0].error is None
        if verb == "write":
            content = bytes(buffer.memory)
            buffer.memory[:] = bytes(buffer.nbytes)
    assert bytes(buffer.memory) == content[: device.alignment] + bytes(buffer.nbytes - device.alignment)


def _check_statistics(device: Device) -> None:
    statistics = device.statistics()
    assert statistics.num_writes == 5 and statistics.write_bytes == 5 * 64 * KiB
    assert statistics.num_reads == 6 and statistics.read_bytes == 5 * 64 * KiB + 4096
    assert statistics.num_in_flight == 0
    num_flushes = statistics.num_flushes
    device.flush()
    assert device.statistics().num_flushes == num_flushes + 1


def _check_odd_sizes(device: Device, arena: Arena) -> None:
    """Any number of blocks at any block's offset, from memory that starts at any block of a buffer."""
    buffer = _lease(arena, 256 * KiB)
    batch = Batch(device)
    for blocks, first, offset in ((1, 3, 1), (3, 0, 5), (7, 2, 9), (13, 1, 17), (37, 5, 21)):
        nbytes = blocks * device.alignment
        memory = buffer.memory[first * device.alignment :][:nbytes]
        content = bytes(range(1 + blocks, 255)) * (nbytes // 200 + 1)
        memory[:] = content[:nbytes]
        device.submit([batch.operation("write", memory, 256 * KiB + offset * device.alignment)])
        assert batch.wait(1)[0].error is None
        memory[:] = bytes(nbytes)
        device.submit([batch.operation("read", memory, 256 * KiB + offset * device.alignment)])
        assert batch.wait(1)[0].error is None and bytes(memory) == content[:nbytes]
    arena.release(buffer)


def _check_unusual_memory(device: Device, buffer: Buffer) -> None:
    """No bytes at all, and memory that may only be read from."""
    batch = Batch(device)
    content = fill(buffer, 9)
    operations = [batch.operation(verb, buffer.memory[:0], 0) for verb in ("read", "write")]
    device.submit([*operations, batch.operation("write", buffer.memory.toreadonly(), 0)])
    assert [operation.error for operation in batch.wait(3)] == [None] * 3
    buffer.memory[:] = bytes(buffer.nbytes)
    assert move(device, "read", buffer) is None and bytes(buffer.memory) == content


def _check_concurrent_submitters(device: Device, arena: Arena) -> None:
    """Each submitter sees its completed writes, each operation completes exactly once, whoever else submits."""
    failures: list[str] = []

    def work(index: int) -> None:
        buffer, batch = _lease(arena, 64 * KiB), Batch(device)
        start = 256 * KiB + index * 64 * KiB
        for turn in range(6):
            content = fill(buffer, 100 * index + turn)
            pages = [buffer.memory[i * 16 * KiB :][: 16 * KiB] for i in range(4)]
            for verb in ("write", "read"):
                device.submit([batch.operation(verb, page, start + i * 16 * KiB) for i, page in enumerate(pages)])
                done = batch.wait(4)
                if len(set(map(id, done))) != 4 or any(operation.error for operation in done):
                    failures.append(f"{verb}: {done}")
                if verb == "write":
                    buffer.memory[:] = bytes(buffer.nbytes)
            if bytes(buffer.memory) != content:
                failures.append(f"submitter {index} read other bytes than it wrote in turn {turn}")
        if not batch.done.empty():
            failures.append("an operation completed twice")
        arena.release(buffer)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert device.statistics().num_in_flight == 0


def _check_close_in_flight(device: Device, opener: Opener, buffers: list[Buffer]) -> None:
    """Whatever was submitted before ``close`` has completed when it returns."""
    batch = Batch(device)
    contents = [fill(buffer, 50 + i) for i, buffer in enumerate(buffers)]
    device.submit([batch.operation("write", buffer.memory, i * 64 * KiB) for i, buffer in enumerate(buffers)])
    device.close()
    assert batch.done.qsize() == len(buffers)
    assert [operation.error for operation in batch.wait(len(buffers))] == [None] * len(buffers)
    assert device.statistics().num_in_flight == 0
    reopened = opener()
    for i, buffer in enumerate(buffers):
        assert move(reopened, "read", buffer, i * 64 * KiB) is None and bytes(buffer.memory) == contents[i]
    reopened.close()


def _check_closed(device: Device, buffer: Buffer) -> None:
    batch = Batch(device)
    with pytest.raises(ClosedError):
        device.submit([batch.operation("read", buffer.memory, 0)])
    with pytest.raises(ClosedError):
        device.grow(0, 1 * MiB)
    with pytest.raises(ClosedError):
        device.flush()
    assert batch.done.empty()

"""Operations cut into requests: every byte once, the most urgent first."""

import errno
import mmap
import os
import random
import resource
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from tests.bytes.faulty import Call, Errors, FaultyCutting, Gate, faulty
from tests.bytes.moving import WAIT_S, Batch, exit_code_of_child, fill, move
from tiered.bytes.arena import Buffer
from tiered.bytes.device import uring
from tiered.bytes.device.base import IOClass, Operation
from tiered.bytes.device.queue import MOST_REQUESTS, InFlight, Requests
from tiered.bytes.device.ring import Ring
from tiered.bytes.device.uring import UringDevice
from tiered.errors import CapacityError, DeviceError
from tiered.units import KiB, MiB

DEMAND, UPDATE, PREFETCH, WRITE_BACK = IOClass
MEMORY = memoryview(bytes(16 * MiB))


def large(io_class: IOClass, nbytes: int) -> InFlight:
    """Return an operation of ``nbytes`` at offset 8192 that its engine has located."""
    operation = Operation(
        is_write=io_class is WRITE_BACK,
        file=0,
        offset=8192,
        memory=MEMORY[:nbytes],
        io_class=io_class,
        on_done=lambda operation: None,
    )
    flight = InFlight(operation, io_class, 0.0)
    flight.address, flight.file_slot = 1_000_000, 3
    return flight


def requests_of(depth: int) -> Requests:
    requests = Requests()
    requests.depth = depth
    return requests


def add(requests: Requests, io_class: IOClass, nbytes: int, *, most: int = 4096) -> InFlight:
    flight = large(io_class, nbytes)
    requests.add(flight, most)
    return flight


def take_all(requests: Requests, *, most_writes: int = MOST_REQUESTS) -> list[InFlight]:
    taken = []
    while (part := requests.take(1.0, most_writes=most_writes)) is not None:
        taken.append(part)
    return taken


def whole(part: InFlight) -> InFlight:
    assert part.whole is not None
    return part.whole


def end(requests: Requests, part: InFlight) -> InFlight | None:
    """End ``part`` as one that moved all its bytes."""
    part.moved = part.nbytes
    return requests.end(part)


def test_an_operation_is_given_in_order_and_whole() -> None:
    requests = requests_of(3)
    flight = add(requests, PREFETCH, 5 * 4096 + 512)
    found = taken = take_all(requests)
    assert len(found) == 3 and not requests.can_start and requests.num_waiting == 1
    ended = []
    while taken:
        assert whole(taken[0]) is flight
        ended.append(end(requests, taken[0]))
        more = take_all(requests)
        taken, found = taken[1:] + more, found + more
    assert ended == [None] * 5 + [flight]
    assert [part.nbytes for part in found] == [4096] * 5 + [512]
    assert [part.address for part in found] == [1_000_000 + 4096 * place for place in range(6)]
    assert [part.offset for part in found] == [8192 + 4096 * place for place in range(6)]
    assert {(part.file_slot, part.start) for part in found} == {(3, 1.0)}
    assert flight.moved == flight.nbytes and requests.num_waiting == 0


def test_an_operation_that_has_failed_ends_with_what_the_kernel_has() -> None:
    requests = requests_of(2)
    first, second = (add(requests, PREFETCH, 10 * 4096) for _ in range(2))
    parts = take_all(requests)
    first.operation.error = DeviceError("scripted")
    assert [requests.end(parts[0]), end(requests, parts[1])] == [None, first]
    assert first.moved == 4096 and requests.num_waiting == 1
    assert {whole(part) is second for part in take_all(requests)} == {True}


def test_the_depth_follows_at_once_and_no_byte_is_lost() -> None:
    requests = Requests()
    numbers = random.Random(1)
    num_left, given = 300, dict[InFlight, int]()
    with_kernel: list[InFlight] = []
    while num_left or given:
        if num_left and numbers.random() < 0.5:
            num_left -= 1
            nbytes = 4096 * numbers.randint(2, 9)
            given[add(requests, numbers.choice(list(IOClass)), nbytes)] = nbytes
        depth = requests.depth = numbers.choice([1, 7, MOST_REQUESTS])
        found = take_all(requests)
        with_kernel += found
        assert len(set(with_kernel)) == len(with_kernel)
        assert not found or len(with_kernel) <= depth
        for _ in range(min(len(with_kernel), numbers.randint(0, 9))):
            part = with_kernel.pop(numbers.randrange(len(with_kernel)))
            given[whole(part)] -= part.nbytes
            ended = end(requests, part)
            if ended is not None:
                assert given.pop(ended) == 0 and ended.moved == ended.nbytes
    assert not with_kernel and not requests.num_waiting


def test_only_the_first_that_is_overtaken_loses_its_patience() -> None:
    requests = requests_of(1)
    flights = [add(requests, PREFETCH, 4096) for _ in range(4)]
    flights += [add(requests, DEMAND, 4096) for _ in range(20)]
    order = []
    while found := take_all(requests):
        order += [flights.index(whole(part)) for part in found]
        for part in found:
            end(requests, part)
    assert order == [*range(4, 12), 0, *range(12, 20), 1, *range(20, 24), 2, 3]


def test_reads_that_are_behind_writes_do_not_wait_for_them_while_somebody_waits() -> None:
    requests = requests_of(8)
    for _ in range(4):
        add(requests, WRITE_BACK, 2 * MiB, most=MiB)
    (write,) = take_all(requests, most_writes=1)  # which the drive keeps
    reads = [add(requests, DEMAND, 2 * 4096) for _ in range(30)]
    order: list[InFlight] = []
    while found := take_all(requests, most_writes=1):
        assert len(found) < 8
        for part in found:
            order.append(whole(part))
            end(requests, part)
    assert order == [read for read in reads for _ in range(2)]
    assert requests.num_waiting == 4
    end(requests, write)
    writes = [MiB]
    while found := take_all(requests):
        for part in found:
            writes.append(part.nbytes)
            end(requests, part)
    assert writes == [MiB] * 8 and requests.num_waiting == 0


@pytest.fixture
def device(tmp_path: Path) -> Iterator[UringDevice]:
    device = opened(tmp_path)
    yield device
    device.close()


def opened(directory: Path, *, kind: type[UringDevice] = UringDevice) -> UringDevice:
    device = kind(directory, deadline_s=WAIT_S)
    device.cut(8 * KiB, 4)
    return device


def pages(nbytes: int) -> memoryview:
    return memoryview(mmap.mmap(-1, nbytes))


def test_large_and_small_operations_of_all_classes_keep_their_bytes(device: UringDevice) -> None:
    numbers = random.Random(2)
    sizes = [4096 * numbers.choice([1, 2, 3, 7, 40, 200]) for _ in range(300)]
    offsets = [sum(sizes[:place]) for place in range(300)]
    device.grow(0, sum(sizes))
    content = os.urandom(sum(sizes))
    memory = pages(sum(sizes))
    memory[:] = content
    parts = [memory[offset : offset + nbytes] for offset, nbytes in zip(offsets, sizes, strict=True)]
    for verb in ("write", "read"):
        batch = Batch(device)
        classes = [WRITE_BACK] if verb == "write" else [DEMAND, UPDATE, PREFETCH]
        operations = [
            batch.operation(verb, part, offset, io_class=numbers.choice(classes))
            for part, offset in zip(parts, offsets, strict=True)
        ]
        numbers.shuffle(operations)
        for start in range(0, 300, 50):
            device.submit(operations[start : start + 50])
        assert {operation.error for operation in batch.wait(300)} == {None}
        if verb == "write":
            memory[:] = bytes(len(memory))
    assert memory == content
    statistics = device.statistics()
    assert statistics.read_bytes == statistics.write_bytes == sum(sizes)
    assert statistics.num_reads == statistics.num_writes == 300 and statistics.num_in_flight == 0


def test_a_large_operation_fails_alone_and_is_counted_as_far_as_it_moved(tmp_path: Path, device: UringDevice) -> None:
    block = MiB
    device.grow(0, 8 * block)
    memory = pages(8 * block)
    memory[:] = content = os.urandom(8 * block)
    batch = Batch(device)
    parts = [(start, memory[start : start + block]) for start in range(0, 8 * block, block)]
    device.submit([batch.operation("write", part, start) for start, part in parts])
    assert {operation.error for operation in batch.wait(8)} == {None}
    memory[:] = bytes(8 * block)
    os.truncate(tmp_path / "data-000", 5 * block + block // 2)  # behind the device's back
    device.submit([batch.operation("read", part, start, io_class=PREFETCH) for start, part in parts])
    errors = {operation.offset // block: operation.error for operation in batch.wait(8)}
    assert all(errors[index] is None for index in range(5))
    assert all(isinstance(errors[index], DeviceError) for index in range(5, 8))
    assert memory[: 5 * block] == content[: 5 * block]
    assert 5 * block <= device.statistics().read_bytes <= 5 * block + block // 2
    assert move_all(device, "read", memory[:block]) is None  # nothing is left behind


def move_all(device: UringDevice, verb: str, memory: memoryview, offset: int = 0) -> Exception | None:
    batch = Batch(device)
    device.submit([batch.operation(verb, memory, offset)])
    return batch.wait(1)[0].error


def test_a_write_beyond_the_limit_of_files_is_a_capacity_error(tmp_path: Path) -> None:
    def check() -> None:
        device = opened(tmp_path)
        device.grow(0, 4 * MiB)
        resource.setrlimit(resource.RLIMIT_FSIZE, (MiB, MiB))
        signal_less = pages(2 * MiB)
        assert isinstance(move_all(device, "write", signal_less), CapacityError)
        assert move_all(device, "write", signal_less[:MiB]) is None
        device.close()

    assert exit_code_of_child(check) == 0


def test_an_operation_outside_of_its_file_is_refused_whole(device: UringDevice) -> None:
    device.grow(0, MiB)
    memory = pages(64 * KiB)
    for offset in (MiB - 32 * KiB, -4096):
        error = move_all(device, "read", memory, offset)
        assert isinstance(error, DeviceError) and "the file has 1048576 bytes" in str(error)
    assert device.statistics().read_bytes == 0
    assert move_all(device, "read", memory, MiB - 64 * KiB) is None


def test_a_demand_read_comes_before_the_rest_of_large_ones(device: UringDevice) -> None:
    device.grow(0, 64 * MiB)
    memory = pages(64 * MiB)
    batch = Batch(device)
    for verb, io_class in (("write", WRITE_BACK), ("read", PREFETCH)):
        bulk = batch.operation(verb, memory[MiB:], MiB, io_class=io_class)
        demand = batch.operation("read", memory[:4096], 0)
        device.submit([bulk])
        device.submit([demand])
        assert batch.wait(2) == [demand, bulk]
        assert bulk.error is None and demand.error is None


def test_close_completes_what_is_cut(tmp_path: Path) -> None:
    device = opened(tmp_path)
    device.grow(0, 32 * MiB)
    memory = pages(32 * MiB)
    memory[:] = content = os.urandom(32 * MiB)
    batch = Batch(device)
    device.submit(
        [batch.operation("write", memory[start : start + 8 * MiB], start) for start in range(0, 32 * MiB, 8 * MiB)]
    )
    device.close()
    assert [operation.error for operation in batch.wait(4)] == [None] * 4
    assert (tmp_path / "data-000").read_bytes() == content


def test_in_a_tight_ring_fewer_requests_are_in_flight(tmp_path: Path) -> None:
    class Tight(UringDevice):
        def _new_ring(self, num_entries: int) -> Ring:
            if num_entries > 16:
                raise OSError(errno.ENOMEM, "scripted")
            return super()._new_ring(num_entries)

    device = opened(tmp_path, kind=Tight)
    device.cut(4 * KiB, 64)
    device.grow(0, 4 * MiB)
    memory = pages(4 * MiB)
    memory[:] = content = os.urandom(4 * MiB)
    batch = Batch(device)
    for verb in ("write", "read"):
        parts = [(start, memory[start : start + MiB // 4]) for start in range(0, 4 * MiB, MiB // 4)]
        device.submit([batch.operation(verb, part, start) for start, part in parts])
        assert {operation.error for operation in batch.wait(16)} == {None}
        if verb == "write":
            memory[:] = bytes(4 * MiB)
    assert memory == content
    device.close()


def test_each_request_is_retried_three_times_after_eio(tmp_path: Path, buffer: Buffer) -> None:
    content = fill(buffer, 1)
    with faulty(tmp_path, "uring-cut") as device:
        assert move(device, "write", buffer) is None
        lock, failures = threading.Lock(), dict[int, int]()

        def failing(call: Call, fd: int, memory: memoryview, offset: int) -> int:
            with lock:
                failures[offset] = failures.get(offset, 0) + 1
                if failures[offset] <= (most if offset % (16 * KiB) == 0 else 0):
                    raise OSError(errno.EIO, "scripted")
            return call(fd, memory, offset)

        device.fault = failing
        for most in (3, 4):
            failures.clear()
            buffer.memory[:] = bytes(buffer.nbytes)
            error = move(device, "read", buffer)
            assert (error is None and bytes(buffer.memory) == content) if most == 3 else isinstance(error, DeviceError)
            assert max(failures.values()) == 4  # three times after the first
        assert len(failures) < 8  # what follows a failure is not begun
        device.fault = None
        assert move(device, "read", buffer) is None and bytes(buffer.memory) == content


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_no_request_of_a_write_is_retried(tmp_path: Path, buffer: Buffer, number: int) -> None:
    with faulty(tmp_path, "uring-cut") as device:
        device.fault = Errors(*[number] * 8)
        error = move(device, "write", buffer)
        assert isinstance(error, CapacityError if number == errno.ENOSPC else DeviceError)
        assert device.fault.num_calls <= 2  # those that were with the kernel already
        assert device.statistics().write_bytes == 0


class Cancelling:
    """A ring that only cancels."""

    num_free = 1000

    def __init__(self) -> None:
        self.cancelled: list[int] = []

    def prepare_cancel(self, target: int, tag: int) -> None:
        self.cancelled.append(target)


def test_only_what_the_drive_has_for_too_long_is_overdue_and_it_is_said_once(
    tmp_path: Path, buffer: Buffer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(uring, "_TICK_S", WAIT_S)  # the thread's own look comes too late
    ring = Cancelling()
    with faulty(tmp_path, "uring-cut") as device:
        assert isinstance(device, FaultyCutting)
        gate = device.fault = Gate()
        batch = Batch(device)
        half = len(buffer.memory) // 2
        try:
            device.submit([batch.operation("read", buffer.memory[start : start + half], start) for start in (0, half)])
            first, second = wait_for_requests(device, 2)  # of the first operation: the other waits behind it
            first.start -= 2 * device.deadline_s
            device._look_for_overdue(ring)  # type: ignore[arg-type]
            assert (first.is_slow, second.is_slow, len(ring.cancelled)) == (True, False, 1)
            second.start -= 2 * device.deadline_s
            for _ in range(2):
                device._look_for_overdue(ring)  # type: ignore[arg-type]
            assert second.is_slow and len(set(ring.cancelled)) == len(ring.cancelled) == 2
            assert sum("has not completed" in record.getMessage() for record in caplog.records) == 1
        finally:
            gate.opened.set()
        assert [operation.error for operation in batch.wait(2)] == [None] * 2


def wait_for_requests(device: UringDevice, number: int) -> list[InFlight]:
    """Return what the kernel has, once that is so many requests."""
    while len(found := list(device._running())) < number:
        time.sleep(0.001)
    return found


def test_all_requests_of_what_is_overdue_are_cancelled(
    tmp_path: Path, buffer: Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uring, "_TICK_S", WAIT_S)  # the thread's own look comes too late
    ring = Cancelling()
    with faulty(tmp_path, "uring-cut") as device:
        assert isinstance(device, FaultyCutting)
        gate = device.fault = Gate()
        batch = Batch(device)
        device.submit([batch.operation("read", buffer.memory, 0)])
        wait_for_requests(device, 2)
        device.deadline_s = -1.0
        device._look_for_overdue(ring)  # type: ignore[arg-type]
        device.deadline_s = WAIT_S
        assert len(set(ring.cancelled)) == 2
        gate.opened.set()
        assert batch.wait(1)[0].error is None


def test_what_requests_cannot_be_is_refused(device: UringDevice) -> None:
    for nbytes, depth, complaint in ((5000, 1, "a multiple of 4096"), (2 << 30, 1, "up to 1 GiB"), (4096, 0, "from 1")):
        with pytest.raises(ValueError, match=complaint):
            device.cut(nbytes, depth)


def test_once_an_operation_has_failed_nothing_of_it_is_tried_again(tmp_path: Path, buffer: Buffer) -> None:
    with faulty(tmp_path, "uring-cut") as device:
        operation = Batch(device).operation("read", buffer.memory, 0)
        done = threading.Event()
        operation.on_done = lambda _: done.set()
        lock, offsets = threading.Lock(), list[int]()

        def failing(call: Call, fd: int, memory: memoryview, offset: int) -> int:
            with lock:
                offsets.append(offset)
                is_first = len(offsets) == 1
            while not is_first and operation.error is None:
                time.sleep(0.001)
            raise OSError(errno.ENODEV if is_first else errno.EIO, "scripted")

        device.fault = failing
        device.submit([operation])
        assert done.wait(WAIT_S)
        assert len(offsets) == 2 and isinstance(operation.error, DeviceError)
        assert isinstance(operation.error.__cause__, OSError) and operation.error.__cause__.errno == errno.ENODEV


def test_while_writes_are_calm_a_mebibyte_goes_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = opened(tmp_path)
    device.grow(0, 8 * MiB)
    memory = pages(8 * MiB)
    device.cut(4 * MiB, 4)
    assert device._ring is not None
    sizes, prepare = list[int](), device._ring.prepare

    def noting(opcode: int, file: int, address: int, nbytes: int, offset: int, tag: int) -> None:
        if tag < uring._WAKE:
            sizes.append(nbytes)
        prepare(opcode, file, address, nbytes, offset, tag)

    monkeypatch.setattr(device._ring, "prepare", noting)
    monkeypatch.setattr(device._queue, "calm_nbytes", lambda now: MiB)
    assert move_all(device, "write", memory) is None
    assert sizes == [MiB] * 8
    device.close()


class FailingOnce(Ring):
    """Each of ``tags`` comes back with EIO the next time it ends, having moved nothing."""

    tags: ClassVar[set[int]] = set()

    def prepare(self, opcode: int, file: int, address: int, nbytes: int, offset: int, tag: int) -> None:
        # A slot without a file is EBADF to the kernel, which becomes EIO below.
        super().prepare(opcode, 200 if tag in self.tags else file, address, nbytes, offset, tag)

    def completions(self) -> list[tuple[int, int, int]]:
        found = []
        for tag, result, flags in super().completions():
            is_ours = tag in self.tags and result == -errno.EBADF
            self.tags.discard(tag)
            found.append((tag, -errno.EIO if is_ours else result, flags))
        return found


class FailsOnce(UringDevice):
    def _new_ring(self, num_entries: int) -> Ring:
        return FailingOnce(num_entries)


def test_what_was_tried_again_leaves_nothing_to_the_next_operation(tmp_path: Path) -> None:
    def check() -> None:
        device = opened(tmp_path, kind=FailsOnce)
        device.grow(0, 4 * MiB)
        memory = pages(2 * MiB)
        assert move_all(device, "write", memory) is None
        FailingOnce.tags = set(range(uring._WAKE))
        assert move_all(device, "read", memory) is None
        assert len(FailingOnce.tags) < uring._WAKE
        FailingOnce.tags = set()
        resource.setrlimit(resource.RLIMIT_FSIZE, (MiB, MiB))
        assert isinstance(move_all(device, "write", memory), CapacityError)
        device.close()

    assert exit_code_of_child(check) == 0


def test_how_operations_are_cut_may_change_while_they_come(device: UringDevice) -> None:
    device.grow(0, 8 * MiB)
    memory = pages(8 * MiB)
    memory[:] = content = os.urandom(8 * MiB)
    batch, is_over = Batch(device), threading.Event()

    def cut() -> None:
        while not is_over.is_set():
            for nbytes in (4 * KiB, 64 * KiB, 4 * MiB):
                device.cut(nbytes, 4)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=cut)
    thread.start()
    try:
        for verb in ["write", *["read"] * 6]:
            io_class = WRITE_BACK if verb == "write" else PREFETCH
            for start in range(0, 8 * MiB, 32 * KiB):
                device.submit([batch.operation(verb, memory[start : start + 32 * KiB], start, io_class=io_class)])
            assert {operation.error for operation in batch.wait(256)} == {None}
            assert memory == content
            memory[:] = bytes(8 * MiB)
    finally:
        is_over.set()
        thread.join()
        sys.setswitchinterval(interval)

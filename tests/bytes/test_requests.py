"""Operations cut into requests: every byte once, the most urgent first, and compiled or not the same."""

import ctypes
import errno
import logging
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
from tiered.bytes.device import request_loop, uring
from tiered.bytes.device.base import IOClass
from tiered.bytes.device.request_loop import compiled_loop
from tiered.bytes.device.requests import MOST_REQUESTS, NUM_ROWS, Requests
from tiered.bytes.device.ring import ENTER, GETEVENTS, READ, WRITE, Ring, system_call
from tiered.bytes.device.uring import UringDevice
from tiered.errors import CapacityError, DeviceError
from tiered.units import KiB, MiB

DEMAND, PREFETCH, WRITE_BACK = IOClass
Prepared = tuple[int, int, int, int, int, int, int]


class NotedRing:
    """A ring that only notes what is prepared, and how much with each call."""

    def __init__(self) -> None:
        self.prepared: list[Prepared] = []
        self.batches: list[int] = []

    def prepare(self, opcode: int, file: int, address: int, nbytes: int, offset: int, tag: int, index: int = 0) -> None:
        self.prepared.append((opcode, file, address, nbytes, offset, tag & 0xFFFF, index))

    def enter_briefly(self) -> None:
        self.batches.append(len(self.prepared) - sum(self.batches))

    def take(self) -> list[Prepared]:
        found, self.prepared, self.batches = self.prepared, [], []
        return found


def fill_ring(requests: Requests, ring: NotedRing, *, is_calm: bool = False, are_apart: bool = False) -> list[Prepared]:
    requests.fill(ring, is_calm=is_calm, are_apart=are_apart)  # type: ignore[arg-type]
    return ring.take()


def add(requests: Requests, row: int, io_class: IOClass, nbytes: int, *, most: int = 4096) -> None:
    opcode = WRITE if io_class is WRITE_BACK else READ
    requests.add(row, io_class, opcode, 3, 1_000_000 * (row + 1), 8192, nbytes, 7, most=most)


def test_an_operation_is_given_in_order_and_whole() -> None:
    requests, ring = Requests(), NotedRing()
    requests.set_depth(3)
    add(requests, 5, PREFETCH, 5 * 4096 + 512)
    found = fill_ring(requests, ring)
    assert requests.num_with_kernel == 3 and requests.num_startable == 0 and requests.num_waiting == 1
    ended = []
    while requests.num_with_kernel:
        number = min(requests.requests_of(5))
        assert requests.request(number)[0] == requests.owner(number) == 5
        ended.append(requests.end(number))
        found += fill_ring(requests, ring)
    assert ended == [False] * 5 + [True]
    assert [nbytes for _, _, _, nbytes, *_ in found] == [4096] * 5 + [512]
    assert [address for _, _, address, *_ in found] == [6_000_000 + 4096 * place for place in range(6)]
    assert [offset for *_, offset, _, _ in found] == [8192 + 4096 * place for place in range(6)]
    assert {(opcode, file, index) for opcode, file, *_, index in found} == {(READ, 3, 7)}
    assert requests.left(5) == 0 and requests.num_waiting == 0


def test_the_most_urgent_operation_goes_first_then_the_oldest() -> None:
    requests, ring = Requests(), NotedRing()
    requests.set_depth(2)
    order = [(1, WRITE_BACK), (2, PREFETCH), (3, WRITE_BACK), (4, DEMAND), (5, PREFETCH), (6, DEMAND)]
    for row, io_class in order:
        add(requests, row, io_class, 2 * 4096)
    owners = []
    while found := fill_ring(requests, ring):
        for *_, number, _ in found:
            owners.append(requests.owner(number))
            requests.end(number)
    assert owners == [row for row in (4, 6, 2, 5, 1, 3) for _ in range(2)]


def test_what_is_urgent_overtakes_an_operation_that_has_begun() -> None:
    requests, ring = Requests(), NotedRing()
    requests.set_depth(1)
    add(requests, 0, WRITE_BACK, 3 * 4096)
    owners = []
    for turn in range(5):
        (request,) = fill_ring(requests, ring)
        owners.append(requests.owner(request[5]))
        if turn == 0:
            add(requests, 1, DEMAND, 2 * 4096)
        requests.end(request[5])
    assert owners == [0, 1, 1, 0, 0] and fill_ring(requests, ring) == []


def test_while_somebody_waits_for_a_read_writes_go_a_mebibyte_at_a_time() -> None:
    requests, ring = Requests(), NotedRing()
    add(requests, 0, WRITE_BACK, 9 * MiB, most=4 * MiB)
    (first,) = fill_ring(requests, ring, is_calm=True)
    assert first[3] == MiB and fill_ring(requests, ring, is_calm=True) == []
    assert requests.are_writes_waiting
    requests.end(first[5])
    assert [request[3] // MiB for request in fill_ring(requests, ring, is_calm=True)] == [1]
    add(requests, 1, DEMAND, 8 * MiB, most=4 * MiB)
    assert [request[3] // MiB for request in fill_ring(requests, ring, is_calm=True)] == [4, 4]
    assert [request[3] // MiB for request in fill_ring(requests, ring)] == [4, 3]
    assert not requests.are_writes_waiting


def test_requests_go_two_at_a_time_so_that_the_kernel_keeps_them_apart() -> None:
    for are_apart, batches in ((True, [2, 2, 2]), (False, [])):
        requests, ring = Requests(), NotedRing()
        requests.set_depth(8)
        add(requests, 0, PREFETCH, 8 * 4096)
        requests.fill(ring, is_calm=False, are_apart=are_apart)  # type: ignore[arg-type]
        assert ring.batches == batches and len(ring.take()) == 8


def test_an_operation_that_is_given_up_ends_with_what_the_kernel_has() -> None:
    requests, ring = Requests(), NotedRing()
    requests.set_depth(2)
    for row in (0, 1):
        add(requests, row, PREFETCH, 10 * 4096)
    numbers = [request[5] for request in fill_ring(requests, ring)]
    assert requests.give_up(0) == 8 * 4096 and requests.num_waiting == 1
    assert [requests.end(number) for number in numbers] == [False, True]
    assert {requests.owner(request[5]) for request in fill_ring(requests, ring)} == {1}


def test_the_depth_follows_at_once_and_no_number_is_lost() -> None:
    requests, ring = Requests(), NotedRing()
    numbers = random.Random(1)
    free, left, given = list(range(NUM_ROWS)), 300, {}
    with_kernel: list[int] = []
    while left or given:
        if left and free and numbers.random() < 0.5:
            left -= 1
            row = free.pop()
            given[row] = 4096 * numbers.randint(2, 9)
            add(requests, row, numbers.choice(list(IOClass)), given[row])
        depth = numbers.choice([1, 7, MOST_REQUESTS])
        requests.set_depth(depth)
        found = fill_ring(requests, ring)
        with_kernel += [request[5] for request in found]
        assert len(set(with_kernel)) == len(with_kernel) == requests.num_with_kernel
        assert not found or len(with_kernel) <= depth
        for _ in range(min(len(with_kernel), numbers.randint(0, 9))):
            number = with_kernel.pop(numbers.randrange(len(with_kernel)))
            row, nbytes = requests.request(number)
            given[row] -= nbytes
            if requests.end(number):
                assert given.pop(row) == 0
                free.append(row)
    assert not with_kernel


@pytest.fixture(params=["Python", "compiled"])
def is_compiled(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "compiled")


@pytest.fixture
def device(tmp_path: Path, is_compiled: bool) -> Iterator[UringDevice]:
    device = opened(tmp_path, is_compiled=is_compiled)
    yield device
    device.close()


def opened(directory: Path, *, is_compiled: bool, kind: type[UringDevice] = UringDevice) -> UringDevice:
    device = kind(directory, deadline_s=WAIT_S)
    device.cut(8 * KiB, 4)
    assert not is_compiled or device.compile_loop()
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
        operations = [
            batch.operation(verb, part, offset, io_class=WRITE_BACK if verb == "write" else numbers.choice([0, 1]))
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


def test_a_write_beyond_the_limit_of_files_is_a_capacity_error(tmp_path: Path, is_compiled: bool) -> None:
    def check() -> None:
        device = opened(tmp_path, is_compiled=is_compiled)
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


def test_close_completes_what_is_cut(tmp_path: Path, is_compiled: bool) -> None:
    device = opened(tmp_path, is_compiled=is_compiled)
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


def test_in_a_tight_ring_fewer_requests_are_in_flight(tmp_path: Path, is_compiled: bool) -> None:
    class Tight(UringDevice):
        def _new_ring(self, num_entries: int) -> Ring:
            if num_entries > 16:
                raise OSError(errno.ENOMEM, "scripted")
            return super()._new_ring(num_entries)

    device = opened(tmp_path, is_compiled=is_compiled, kind=Tight)
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


def test_an_operation_that_waits_behind_an_overdue_one_is_not_overdue(
    tmp_path: Path, buffer: Buffer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(uring, "_TICK_S", WAIT_S)  # the thread's own look comes too late
    ring = Cancelling()
    with faulty(tmp_path, "uring-cut") as device:
        assert isinstance(device, FaultyCutting)
        gate = device.fault = Gate()
        batch = Batch(device)
        half = len(buffer.memory) // 2
        device.submit([batch.operation("read", buffer.memory[start : start + half], start) for start in (0, half)])
        for _ in range(2):
            assert gate.reached.acquire(timeout=WAIT_S)
        flights = list(device._running())
        for flight in flights:
            flight.start -= 2 * device.deadline_s
        device._look_for_overdue(ring)  # type: ignore[arg-type]
        assert [flight.is_slow for flight in flights].count(True) == 1 and len(set(ring.cancelled)) == 2
        assert sum("has not completed" in record.getMessage() for record in caplog.records) == 1
        gate.opened.set()
        assert [operation.error for operation in batch.wait(2)] == [None] * 2


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
        for _ in range(2):
            assert gate.reached.acquire(timeout=WAIT_S)
        device.deadline_s = -1.0
        device._look_for_overdue(ring)  # type: ignore[arg-type]
        device.deadline_s = WAIT_S
        assert len(set(ring.cancelled)) == 2 and min(ring.cancelled) >= uring.FIRST_TAG
        gate.opened.set()
        assert batch.wait(1)[0].error is None


def test_without_a_compiler_all_works_and_it_is_said_once(
    tmp_path: Path, buffer: Buffer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ImportError("no module named numba")

    monkeypatch.setattr(request_loop, "compile_kernel", broken)
    compiled_loop.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, logger="tiered"):
            for _ in range(2):
                device = opened(tmp_path, is_compiled=False)
                assert not device.compile_loop()
                device.grow(0, MiB)
                content = fill(buffer, 4)
                assert move(device, "write", buffer) is None
                buffer.memory[:] = bytes(buffer.nbytes)
                assert move(device, "read", buffer) is None and bytes(buffer.memory) == content
                device.close()
        assert caplog.text.count("no module named numba") == 1
    finally:
        compiled_loop.cache_clear()


def test_what_requests_cannot_be_is_refused(device: UringDevice) -> None:
    for nbytes, depth, complaint in ((5000, 1, "a multiple of 4096"), (2 << 30, 1, "up to 1 GiB"), (4096, 0, "from 1")):
        with pytest.raises(ValueError, match=complaint):
            device.cut(nbytes, depth)


def test_registered_memory_is_used_as_such(device: UringDevice) -> None:
    device.grow(0, 2 * MiB)
    memory = pages(2 * MiB)
    assert device.register_memory(memory)
    memory[:] = content = os.urandom(2 * MiB)
    assert move_all(device, "write", memory) is None
    memory[:] = bytes(2 * MiB)
    assert move_all(device, "read", memory) is None and memory == content


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


def test_a_large_operation_that_gets_on_is_not_overdue(
    tmp_path: Path, buffer: Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uring, "_TICK_S", WAIT_S)  # the thread's own look comes too late
    may_go = threading.Semaphore(0)

    def slow(call: Call, fd: int, memory: memoryview, offset: int) -> int:
        assert may_go.acquire(timeout=WAIT_S)
        return call(fd, memory, offset)

    cancelled: list[int] = []
    ring = type("Cancelling", (), {"num_free": 1000, "prepare_cancel": lambda _, tag, __: cancelled.append(tag)})()
    with faulty(tmp_path, "uring-cut") as device:
        assert isinstance(device, FaultyCutting)
        device.fault = slow
        batch = Batch(device)
        try:
            device.submit([batch.operation("read", buffer.memory, 0)])
            may_go.release()
            while not device._requests.left(0) or device._requests.left(0) == buffer.nbytes:  # of the first slot
                time.sleep(0.001)
            device.deadline_s = 0.0
            device._look_for_overdue(ring)
            assert cancelled == []  # something was moved since the last look
            device._look_for_overdue(ring)
            assert cancelled
        finally:
            device.deadline_s = WAIT_S
            may_go.release(100)
        assert batch.wait(1)[0].error is None


def test_while_writes_are_calm_python_starts_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = opened(tmp_path, is_compiled=True)
    device.grow(0, 8 * MiB)
    memory = pages(8 * MiB)
    device.cut(4 * MiB, 4)
    assert device._ring is not None
    sizes, prepare = list[int](), device._ring.prepare

    def noting(opcode: int, file: int, address: int, nbytes: int, offset: int, tag: int, index: int = 0) -> None:
        if tag >= uring.FIRST_TAG:
            sizes.append(nbytes)
        prepare(opcode, file, address, nbytes, offset, tag, index)

    monkeypatch.setattr(device._ring, "prepare", noting)
    monkeypatch.setattr(device._queue, "is_calm", lambda now: True)
    assert move_all(device, "write", memory) is None
    assert sizes == [MiB] * 8
    device.close()


def test_a_loop_whose_system_call_failed_leaves_the_ring_as_it_is(tmp_path: Path) -> None:
    ring = Ring(8)
    ring.register_files(1)
    with open(tmp_path / "file", "w+b") as file:
        file.write(b"x" * 4096)
        file.flush()
        ring.set_file(0, file.fileno())
        memory = bytearray(4096)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        table = memoryview(bytearray(24)).cast("q")

        def failing(fd: int, *words: int) -> int:
            """Submit, and know nothing of it."""
            ctypes.c_uint32.from_address(words[5]).value = table[0]
            assert system_call(ENTER, fd, 1, 1, GETEVENTS, 0, 0) == 1
            return -1

        ring.prepare(READ, 0, address, 4096, 0, 5)
        assert ring.num_free == ring.num_entries - 1
        ring.lend(failing, table, 0)
        assert ring.num_free == ring.num_entries
        assert [completion[:2] for completion in ring.completions()] == [(5, 4096)] and memory == b"x" * 4096
        fd, ring._fd = ring._fd, -1
        with pytest.raises(OSError, match="Bad file descriptor"):
            ring.lend(lambda *words: -1, table, 0)
        ring._fd = fd
    ring.close()


class FailingOnce(Ring):
    """Each of ``tags`` comes back with EIO the next time it ends, having moved nothing."""

    tags: ClassVar[set[int]] = set()

    def prepare(self, opcode: int, file: int, address: int, nbytes: int, offset: int, tag: int, index: int = 0) -> None:
        # A slot without a file is EBADF to the kernel, which becomes EIO below.
        super().prepare(opcode, 200 if tag in self.tags else file, address, nbytes, offset, tag, index)

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


def test_what_was_tried_again_leaves_nothing_to_the_next_operation(tmp_path: Path, is_compiled: bool) -> None:
    def check() -> None:
        device = opened(tmp_path, is_compiled=is_compiled, kind=FailsOnce)
        device.grow(0, 4 * MiB)
        memory = pages(2 * MiB)
        assert move_all(device, "write", memory) is None
        FailingOnce.tags = {uring.FIRST_TAG + number for number in range(MOST_REQUESTS)}
        assert move_all(device, "read", memory) is None
        assert len(FailingOnce.tags) < MOST_REQUESTS and not device._parts
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


def test_nobody_is_overtaken_for_ever() -> None:
    requests, ring = Requests(), NotedRing()
    requests.set_depth(1)
    add(requests, 0, WRITE_BACK, 2 * 4096)
    add(requests, 1, PREFETCH, 2 * 4096)
    owners: list[int] = []
    for turn in range(40):
        if turn % 2 == 0:
            add(requests, 2 + turn // 2, DEMAND, 2 * 4096)
        (request,) = fill_ring(requests, ring)
        owners.append(requests.owner(request[5]))
        requests.end(request[5])
    assert owners.index(1) < 24 and owners.index(0) < 40  # the first that is overtaken lets eight pass, then the next
    assert owners[:14] == [owner for row in range(2, 9) for owner in (row, row)]


def test_only_the_first_that_is_overtaken_loses_its_patience() -> None:
    requests, ring = Requests(), NotedRing()
    requests.set_depth(1)
    for row in range(4):
        add(requests, row, PREFETCH, 4096)
    for row in range(4, 24):
        add(requests, row, DEMAND, 4096)
    owners = []
    while found := fill_ring(requests, ring):
        owners += [requests.owner(request[5]) for request in found]
        for request in found:
            requests.end(request[5])
    assert owners == [*range(4, 12), 0, *range(12, 20), 1, *range(20, 24), 2, 3]


def test_reads_that_are_behind_writes_do_not_wait_for_them_while_somebody_waits() -> None:
    requests, ring = Requests(), NotedRing()
    requests.set_depth(8)
    for row in range(4):
        add(requests, row, WRITE_BACK, 2 * MiB, most=MiB)
    (write,) = fill_ring(requests, ring, is_calm=True)  # which the drive keeps
    for row in range(4, 34):
        add(requests, row, DEMAND, 2 * 4096)
    owners: list[int] = []
    while found := fill_ring(requests, ring, is_calm=True):
        assert requests.num_with_kernel <= 8
        for request in found:
            owners.append(requests.owner(request[5]))
            requests.end(request[5])
    assert owners == [row for row in range(4, 34) for _ in range(2)]
    assert requests.num_waiting == 4 and requests.num_with_kernel == 1
    requests.end(write[5])
    writes: list[int] = [MiB]
    while found := fill_ring(requests, ring):
        for request in found:
            writes.append(request[3])
            requests.end(request[5])
    assert writes == [MiB] * 8 and requests.num_waiting == 0

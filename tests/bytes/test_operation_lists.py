"""Lists of operations: on every engine as its single operations, and on a ring as arrays of submissions."""

from __future__ import annotations

import errno
import mmap
import queue
import random
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.bytes.faulty import Call, Errors, Gate, faulty
from tests.bytes.moving import WAIT_S
from tiered.bytes.device import uring
from tiered.bytes.device.base import Device, IOClass, OperationList
from tiered.bytes.device.queue import CALM_NBYTES, FIRST_LIST_TAG, IOQueue
from tiered.bytes.device.uring import UringDevice
from tiered.errors import ClosedError, DeadlineError, DeviceError
from tiered.units import KiB, MiB

PAGE = 4096


@pytest.fixture(params=["uring", "uring-cut", "threads", "aiofiles", "mmap"])
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Lists:
    """Lists of pages, submitted to a device, and their ends. ``pages`` are (file, page) of the device."""

    def __init__(self, device: Device, num_pages: int) -> None:
        self.device = device
        self.memory = memoryview(mmap.mmap(-1, num_pages * PAGE))
        self.done: queue.SimpleQueue[OperationList] = queue.SimpleQueue()

    def submit(
        self,
        pages: list[tuple[int, int]],
        *,
        is_write: bool = False,
        io_class: IOClass = IOClass.DEMAND,
        sizes: int = 1,
    ) -> OperationList:
        file, page = np.array(pages, np.int64).T
        operations = OperationList(
            is_write=is_write, file=file, offset=page * PAGE, nbytes=np.full(len(file), sizes * PAGE),
            start=np.arange(len(file)) * sizes * PAGE, memory=self.memory,
            io_class=IOClass.WRITE if is_write else io_class, on_done=self.done.put,
        )  # fmt: skip
        self.device.submit_list(operations)
        return operations

    def wait(self) -> Exception | None:
        return self.done.get(timeout=WAIT_S).error

    def move(self, pages: list[tuple[int, int]], **options: bool) -> Exception | None:
        self.submit(pages, **options)  # type: ignore[arg-type]
        return self.wait()

    def fill(self, pages: list[tuple[int, int]], seed: int = 0) -> None:
        for number, each in enumerate(pages):
            self.memory[number * PAGE : (number + 1) * PAGE] = content(each, seed)

    def assert_has(self, pages: list[tuple[int, int]], seed: int = 0) -> None:
        for number, each in enumerate(pages):
            assert self.memory[number * PAGE : (number + 1) * PAGE] == content(each, seed), each


def content(page: tuple[int, int], seed: int) -> bytes:
    return f"{seed}/{page}.".encode().ljust(64, b"#") * 64


def drawn(number: int, seed: int = 1) -> list[tuple[int, int]]:
    """Return pages of two files of 1 MiB, each once, in any order."""
    return random.Random(seed).sample([(file, page) for file in (0, 1) for page in range(256)], number)


@pytest.fixture
def lists(tmp_path: Path, engine: str) -> Iterator[Lists]:
    with faulty(tmp_path, engine) as device:
        device.grow(1, MiB)
        yield Lists(device, 512)


def test_all_pages_of_a_list_arrive(lists: Lists) -> None:
    pages = drawn(512)
    lists.fill(pages)
    before = lists.device.statistics()
    assert lists.move(pages, is_write=True) is None
    for number in (1, 7, 8, 400, 512):
        lists.memory[:] = bytes(len(lists.memory))
        some = drawn(number, 2)
        assert lists.move(some) is None
        lists.assert_has(some)
    after = lists.device.statistics()
    assert (after.read_bytes - before.read_bytes) == (1 + 7 + 8 + 400 + 512) * PAGE
    assert after.num_reads - before.num_reads == 1 + 7 + 8 + 400 + 512 and not after.num_in_flight


def test_a_read_that_fails_is_tried_again_alone(lists: Lists) -> None:
    pages = drawn(64)
    lists.fill(pages)
    assert lists.move(pages, is_write=True) is None
    lists.memory[:] = bytes(len(lists.memory))
    lists.device.fault = Errors(errno.EIO, errno.EINTR, errno.EAGAIN, errno.EIO)  # type: ignore[attr-defined]
    assert lists.move(pages) is None
    lists.assert_has(pages)


def test_short_reads_go_on(lists: Lists) -> None:
    def half(call: Call, fd: int, memory: memoryview, offset: int) -> int:
        return call(fd, memory[: len(memory) // 2 // PAGE * PAGE] if len(memory) > PAGE else memory, offset)

    pages = [(0, 4 * number) for number in range(20)]
    each = [(file, page + more) for file, page in pages for more in range(4)]
    lists.fill(each)
    lists.submit(pages, is_write=True, sizes=4)
    assert lists.wait() is None
    lists.memory[:] = bytes(len(lists.memory))
    lists.device.fault = half  # type: ignore[attr-defined]
    lists.submit(pages, sizes=4)
    assert lists.wait() is None
    lists.assert_has(each)


def test_an_error_names_its_place_and_the_other_reads_have_ended(lists: Lists) -> None:
    def bad_sector(call: Call, fd: int, memory: memoryview, offset: int) -> int:
        if offset <= 17 * PAGE < offset + len(memory):
            raise OSError(errno.EIO, "lost")
        return call(fd, memory, offset)

    pages = [(0, page) for page in range(40)]
    lists.fill(pages)
    assert lists.move(pages, is_write=True) is None
    lists.memory[:] = bytes(len(lists.memory))
    lists.device.fault = bad_sector  # type: ignore[attr-defined]
    error = lists.move(pages)
    assert isinstance(error, DeviceError) and f"offset {17 * PAGE} of" in str(error)
    lists.memory[17 * PAGE : 18 * PAGE] = content((0, 17), 0)
    lists.assert_has(pages)


def test_pages_that_no_file_has_are_an_error_of_the_list(lists: Lists) -> None:
    good = [(0, page) for page in range(20)]
    for bad in ((0, 256), (5, 0), (0, -1)):
        error = lists.move([*good, bad])
        assert isinstance(error, DeviceError) and "the file has" in str(error), bad
    assert lists.move(good) is None


def test_close_completes_lists_and_refuses_later_ones(tmp_path: Path, engine: str) -> None:
    with faulty(tmp_path, engine) as device:
        lists = Lists(device, 200)
        for _ in range(5):
            lists.submit([(0, page) for page in range(200)])
        device.close()
        assert [lists.wait() for _ in range(5)] == [None] * 5
        with pytest.raises(ClosedError):
            lists.submit([(0, page) for page in range(20)])


def test_lists_of_many_threads_each_have_their_own_pages(lists: Lists) -> None:
    pages = drawn(512)
    lists.fill(pages)
    assert lists.move(pages, is_write=True) is None
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        own = Lists(lists.device, 512)
        try:
            for turn in range(15):
                some = drawn(random.Random(seed + turn).randint(1, 512), seed * 100 + turn)
                assert own.move(some) is None
                own.assert_has(some)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


# -- a ring ------------------------------------------------------------------------------------------------------------


def test_a_ring_has_the_arrays_in_the_kernel_and_no_operations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = UringDevice(tmp_path)
    device.grow(0, MiB)
    lists = Lists(device, 256)
    assert lists.move([(0, page) for page in range(256)], is_write=True) is None
    monkeypatch.setattr(OperationList, "operation", None)
    monkeypatch.setattr(OperationList, "one_by_one", None)
    for _ in range(3):
        assert lists.move([(0, page) for page in range(256)]) is None
    device.close()


def test_memory_that_was_released_is_an_error_and_the_device_goes_on(tmp_path: Path) -> None:
    with faulty(tmp_path, "uring") as device:
        lists, others = Lists(device, 20), Lists(device, 20)
        others.memory.release()
        pages = [(0, page) for page in range(20)]
        error = others.move(pages)
        assert isinstance(error, DeviceError) and "released" in str(error)
        assert lists.move(pages) is None


def test_a_file_that_the_ring_does_not_take_is_an_error_of_the_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, "scripted")

    device = UringDevice(tmp_path)
    device.grow(0, MiB)
    lists = Lists(device, 20)
    pages = [(0, page) for page in range(20)]
    with monkeypatch.context() as patch:
        patch.setattr("tiered.bytes.device.ring.Ring.set_file", refuse)
        error = lists.move(pages)
    assert isinstance(error, DeviceError) and "scripted" in str(error)
    assert lists.move(pages) is None  # the thread goes on
    device.close()


def test_overdue_reads_of_a_list_are_cancelled_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Narrow:
        num_free = 0

        def __init__(self) -> None:
            self.cancelled: list[int] = []

        def prepare_cancel(self, target: int, tag: int) -> None:
            self.cancelled.append(target)

    monkeypatch.setattr(uring, "_TICK_S", WAIT_S)  # the thread's own look comes too late
    narrow = Narrow()
    with faulty(tmp_path, "uring") as device:
        assert isinstance(device, UringDevice)
        lists = Lists(device, 20)
        gate = device.fault = Gate()
        lists.submit([(0, page) for page in range(20)])
        for _ in range(20):
            assert gate.reached.acquire(timeout=WAIT_S)
        assert "read of 4096 bytes at offset 0 of" in device._oldest_running()
        device.deadline_s = -1.0
        for narrow.num_free in (0, 1000, 1000):
            device._look_for_overdue(narrow)  # type: ignore[arg-type]
        device.deadline_s = WAIT_S
        gate.opened.set()
        assert lists.wait() is None
    assert narrow.cancelled == [FIRST_LIST_TAG + page for page in range(20)]
    assert "20 reads of" in caplog.text and "have not completed" in caplog.text


def test_reads_that_the_kernel_cancelled_are_a_deadline_error(tmp_path: Path) -> None:
    with faulty(tmp_path, "uring", deadline_s=0.05) as device:
        assert isinstance(device, UringDevice)

        def cancelled(*_: object) -> int:
            for flight in device._lists.running.values():
                flight.is_slow = True
            raise OSError(errno.ECANCELED, "cancelled")

        device.fault = cancelled
        assert isinstance(Lists(device, 20).move([(0, page) for page in range(20)]), DeadlineError)


def test_close_past_the_deadline_names_a_read_of_the_list(tmp_path: Path) -> None:
    with faulty(tmp_path, "uring") as device:
        lists = Lists(device, 20)
        gate = device.fault = Gate()
        lists.submit([(0, page) for page in range(20)])
        assert gate.reached.acquire(timeout=WAIT_S)
        device.deadline_s = 0.05
        with pytest.raises(DeadlineError, match=r"read of 4096 bytes at offset 0 .* running for"):
            device.close()
        gate.opened.set()
        assert lists.wait() is None


def test_queued_lists_fail_where_the_thread_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class BugError(Exception):
        pass

    def fail(*_: object) -> None:
        raise BugError

    device = UringDevice(tmp_path)
    device.grow(0, MiB)
    monkeypatch.setattr(device, "_start_lists", fail)
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    lists = Lists(device, 20)
    error = lists.move([(0, page) for page in range(20)])
    assert isinstance(error, DeviceError) and "the I/O thread has ended" in str(error)
    device.close()


def test_writes_are_calm_beside_lists() -> None:
    queue_ = IOQueue(128)
    now = time.monotonic()
    assert queue_.calm_nbytes(now) == sys.maxsize
    nothing = np.zeros(4096, np.int64)
    operations = OperationList(
        is_write=False, file=nothing, offset=nothing, nbytes=nothing + 4 * KiB, start=nothing, memory=memoryview(b""),
        io_class=IOClass.DEMAND, on_done=lambda _: None,
    )  # fmt: skip
    queue_.put_list(operations)
    assert queue_.calm_nbytes(now) == 4 * MiB and queue_.num_listed == 4096
    queue_.list_done(operations, now)
    assert queue_.calm_nbytes(now) == CALM_NBYTES and queue_.calm_nbytes(now + 1) == sys.maxsize

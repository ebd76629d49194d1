"""Faults that every engine over files meets: what it mends, what it reports, and that it never waits for ever."""

import errno
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.bytes import places
from tests.bytes.faulty import ENGINES, Call, Errors, Gate, faulty
from tests.bytes.moving import WAIT_S, Batch, exit_code_of_child, fill, move
from tiered.bytes.arena import Arena, Buffer
from tiered.bytes.device.base import Device, IOClass, Operation
from tiered.bytes.device.mount import RAM_COST, RAM_MEND
from tiered.bytes.device.threads import ThreadsDevice
from tiered.errors import CapacityError, ClosedError, DeadlineError, DeviceError, UsageError
from tiered.units import KiB, MiB

WHOLE = [name for name in ENGINES if name != "uring-cut"]  # which move an operation in one call


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("most", [4096, 12 * KiB, 5000])  # 5000: not aligned, so 4096 of them count
def test_short_reads_and_writes_go_on_until_complete(tmp_path: Path, engine: str, buffer: Buffer, most: int) -> None:
    def short(call: Call, fd: int, memory: memoryview, offset: int) -> int:
        if len(memory) <= most:
            return call(fd, memory, offset)
        call(fd, memory[: most // 4096 * 4096], offset)
        return most

    with faulty(tmp_path, engine) as device:
        content = fill(buffer, 1)
        device.fault = short if device.is_direct or most % 4096 == 0 else None
        assert move(device, "write", buffer, 4096) is None
        buffer.memory[:] = bytes(buffer.nbytes)
        assert move(device, "read", buffer, 4096) is None
        assert bytes(buffer.memory) == content


@pytest.mark.parametrize("verb", ["read", "write"])
@pytest.mark.parametrize("engine", WHOLE)
def test_less_than_a_block_is_moved_again_three_times(tmp_path: Path, engine: str, buffer: Buffer, verb: str) -> None:
    moved: list[int] = []

    def short(call: Call, fd: int, memory: memoryview, offset: int) -> int:
        moved.append(512 if len(moved) < num_short else call(fd, memory, offset))
        return moved[-1]

    with faulty(tmp_path, engine) as device:
        fill(buffer, 1)
        for num_short in (3, 4):
            moved.clear()
            device.fault = short
            error = move(device, verb, buffer, 4096)
            if device.is_direct:
                assert (error is None) == (num_short == 3)
            else:
                assert error is None  # any offset will do to go on
            assert moved[:3] == [512] * 3


@pytest.mark.parametrize("verb", ["read", "write"])
def test_moving_nothing_is_an_error(tmp_path: Path, engine: str, buffer: Buffer, verb: str) -> None:
    with faulty(tmp_path, engine) as device:
        device.fault = lambda call, fd, memory, offset: 0
        error = move(device, verb, buffer, 4096)
        assert isinstance(error, DeviceError)
        assert f"{verb} of 65536 bytes at offset 4096 of {tmp_path}/data-000" in str(error)


def test_a_watch_is_told_once_for_each_step_that_was_written(tmp_path: Path, engine: str, buffer: Buffer) -> None:
    calls: list[int] = []
    with faulty(tmp_path, engine) as device:
        move(device, "write", buffer)
        device.watch_writes(2 * buffer.nbytes, lambda: calls.append(device.statistics().write_bytes))
        for _ in range(3):
            for _ in range(2):
                assert move(device, "write", buffer) is None
                assert move(device, "read", buffer) is None
        assert calls == [num * buffer.nbytes for num in (3, 5, 7)]
        device.watch_writes(buffer.nbytes, calls.clear)
        move(device, "write", buffer)
        assert not calls


@pytest.mark.parametrize("engine", WHOLE)
def test_a_read_is_retried_three_times_after_eio(tmp_path: Path, engine: str, buffer: Buffer) -> None:
    with faulty(tmp_path, engine) as device:
        content = fill(buffer, 2)
        assert move(device, "write", buffer) is None
        buffer.memory[:] = bytes(buffer.nbytes)
        device.fault = Errors(*[errno.EIO] * 3)
        assert move(device, "read", buffer) is None
        assert bytes(buffer.memory) == content
        device.fault = Errors(*[errno.EIO] * 4)
        error = move(device, "read", buffer)
        assert isinstance(error, DeviceError) and "dmesg" in str(error)
        assert isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EIO
        assert device.fault.num_calls == 4


@pytest.mark.parametrize("engine", WHOLE)
def test_a_write_is_never_retried_after_eio(tmp_path: Path, engine: str, buffer: Buffer) -> None:
    with faulty(tmp_path, engine) as device:
        device.fault = Errors(errno.EIO)
        assert isinstance(move(device, "write", buffer), DeviceError)
        assert device.fault.num_calls == 1


@pytest.mark.parametrize("verb", ["read", "write"])
def test_interruptions_are_retried(tmp_path: Path, engine: str, buffer: Buffer, verb: str) -> None:
    with faulty(tmp_path, engine) as device:
        device.fault = Errors(errno.EINTR, errno.EAGAIN)
        assert move(device, verb, buffer) is None


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_write_without_space_is_a_capacity_error(tmp_path: Path, engine: str, buffer: Buffer, number: int) -> None:
    with faulty(tmp_path, engine) as device:
        device.fault = Errors(number)
        assert isinstance(move(device, "write", buffer), CapacityError)


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_a_broken_completion_does_not_end_the_thread(
    tmp_path: Path, engine: str, error: type[BaseException], buffer: Buffer, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: object) -> None:
        raise error("a bug of the submitter")

    with faulty(tmp_path, engine) as device:
        operation = Batch(device).operation("read", buffer.memory, 0)
        operation.on_done = broken
        device.submit([operation])
        assert move(device, "read", buffer) is None
    assert "a bug of the submitter" in caplog.text


def test_an_operation_on_released_memory_fails_alone(tmp_path: Path, engine: str, arena: Arena, buffer: Buffer) -> None:
    with faulty(tmp_path, engine) as device:
        gate = device.fault = Gate()
        stale = arena.allocate_nowait(4096)
        assert stale is not None
        batch = Batch(device)
        operations = [batch.operation("read", buffer.memory, 0), batch.operation("write", stale.memory, 0)]
        arena.release(stale)  # a bug of the submitter, made on purpose
        device.submit(operations)
        gate.opened.set()
        errors = [operation.error for operation in batch.wait(2) if operation.is_write]
        assert isinstance(errors[0], DeviceError) and "write of released bytes" in str(errors[0])
        assert move(device, "read", buffer) is None


def test_the_most_urgent_operation_goes_first_then_the_oldest(tmp_path: Path, buffer: Buffer) -> None:
    with faulty(tmp_path, num_threads=1) as device:
        gate = device.fault = Gate()
        batch = Batch(device)
        device.submit([batch.operation("read", buffer.memory, 0)])
        assert gate.reached.acquire(timeout=WAIT_S)  # the only thread is busy: what follows queues up
        order = [IOClass.WRITE, IOClass.PREFETCH, IOClass.DEMAND, IOClass.WRITE, IOClass.DEMAND]
        device.submit(
            [
                batch.operation("read", buffer.memory, (index + 1) * 4096, io_class=io_class)
                for index, io_class in enumerate(order)
            ]
        )
        assert device.statistics().num_in_flight == 6
        gate.opened.set()
        batch.wait(6)
        assert [offset // 4096 for offset in gate.offsets] == [0, 3, 5, 2, 1, 4]


def test_close_completes_what_is_queued(tmp_path: Path, engine: str, buffer: Buffer) -> None:
    with faulty(tmp_path, engine) as device:
        batch = Batch(device)
        device.submit([batch.operation("write", buffer.memory, index * buffer.nbytes) for index in range(16)])
        device.close()
        assert [operation.error for operation in batch.wait(16)] == [None] * 16
        with pytest.raises(ClosedError):
            device.submit([])


def test_close_past_the_deadline_raises_and_leaves_the_operation_its_buffer(
    tmp_path: Path, engine: str, buffer: Buffer
) -> None:
    content = fill(buffer, 3)
    with faulty(tmp_path, engine) as device:
        assert move(device, "write", buffer, 4096) is None
        buffer.memory[:] = bytes(buffer.nbytes)
        gate = device.fault = Gate()
        batch = Batch(device)
        device.submit([batch.operation("read", buffer.memory, 4096)])
        assert gate.reached.acquire(timeout=WAIT_S)
        give_up = time.monotonic() + WAIT_S
        while not list(device._running()):  # a ring's thread notes it once it is under way
            assert time.monotonic() < give_up
        device.deadline_s = 0.05
        for _ in range(2):
            with pytest.raises(DeadlineError, match=r"read of 65536 bytes at offset 4096 .* running for"):
                device.close()
        assert batch.done.empty()
        gate.opened.set()
        assert batch.wait(1)[0].error is None and bytes(buffer.memory) == content


class RefusesDirect(ThreadsDevice):
    def _pwrite(self, fd: int, memory: memoryview, offset: int) -> int:
        raise OSError(errno.EINVAL, "scripted refusal")


def test_without_direct_io_one_warning_says_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "tiered"):
        device = RefusesDirect(tmp_path, num_threads=1)
        device.grow(0, 64 * KiB)
        device.close()
    assert not device.is_direct and "buffered" in repr(device)
    assert len(caplog.records) == 1 and "scripted refusal" in caplog.text and str(tmp_path) in caplog.text


def test_a_directory_in_ram_has_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With direct I/O, as newer kernels have it there, and without."""
    with places.tmpfs(tmp_path) as directory, caplog.at_level(logging.WARNING, "tiered"):
        for engine in (ThreadsDevice, RefusesDirect):
            caplog.clear()
            engine(directory, num_threads=1).close()
            (record,) = caplog.records
            said = record.getMessage()
            assert f"{directory}: tmpfs on /dev/shm" in said and f"keeps files in RAM: {RAM_COST}; {RAM_MEND}" in said


def test_direct_io_can_be_insisted_on_and_done_without(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    num_threads = threading.active_count()
    with pytest.raises(DeviceError, match="no direct I/O"):
        RefusesDirect(tmp_path, direct=True)
    device = ThreadsDevice(tmp_path, direct=False, num_threads=1)
    assert not device.is_direct and not caplog.records
    device.close()
    assert threading.active_count() == num_threads


def test_without_threads_left_the_error_says_what_to_raise(
    tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, num_threads = threading.Thread.start, threading.active_count()

    def refused(thread: threading.Thread) -> None:
        if thread.name in ("tiered-io-1", "tiered-io-loop", "tiered-io-ring"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    with pytest.raises(DeviceError, match=r"can't start new thread; .*ulimit -u"):
        ENGINES[engine](tmp_path)
    assert threading.active_count() == num_threads


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match=r"cannot open the directory .*absent"):
        ThreadsDevice(tmp_path / "absent")


def test_a_forked_child_holds_no_descriptor_and_is_refused(tmp_path: Path, engine: str, buffer: Buffer) -> None:
    with faulty(tmp_path, engine) as device:

        def check() -> None:
            held = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)]
            assert not [path for path in held if str(tmp_path) in path]
            batch = Batch(device)
            uses: list[Callable[[], object]] = [
                lambda: device.submit([batch.operation("read", buffer.memory, 0)]),
                lambda: device.grow(0, 2 * MiB),
                device.flush,
                device.files,
                device.free_bytes,
            ]
            for use in uses:
                with pytest.raises(UsageError, match="fork"):
                    use()
            device.close()

        assert exit_code_of_child(check) == 0
        assert move(device, "read", buffer) is None


def _is_open(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


EXIT_WITH_IO_IN_FLIGHT = """
import mmap, os, sys, threading
from tests.bytes.faulty import ENGINES
from tiered.bytes.device.base import IOClass, Operation

directory, engine, deadline_s, is_hung = sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4] == "hung"
stopping, has_begun = threading.Event(), threading.Event()

class Slow(ENGINES[engine]):
    def _stop(self):
        super()._stop()
        if not is_hung:
            stopping.set()

def slow(call, fd, memory, offset):
    if offset == 0:
        has_begun.set()
    assert stopping.wait(60)  # every write is in flight until the process ends
    return call(fd, memory, offset)

device = Slow(directory, deadline_s=deadline_s)
device.grow(0, 16 * 4096)
device.fault = slow
page = mmap.mmap(-1, 4096)
page[:] = b"e" * 4096
device.submit([Operation(is_write=True, file=0, offset=i * 4096, memory=memoryview(page), io_class=IOClass.WRITE,
                         on_done=lambda operation: os.write(1, f"{operation.error}\\n".encode())) for i in range(16)])
assert has_begun.wait(60)  # order: the deadline is for what the drive has
print("the end")
"""


def run_to_the_end(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", EXIT_WITH_IO_IN_FLIGHT, str(directory), *arguments]
    root = Path(__file__).parents[2]
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, cwd=root, check=False)


def test_the_interpreter_ends_with_io_in_flight_and_completes_it(tmp_path: Path, engine: str) -> None:
    child = run_to_the_end(tmp_path, engine, "30", "slow")
    assert (child.returncode, child.stderr) == (0, "")
    assert sorted(child.stdout.splitlines()) == ["None"] * 16 + ["the end"]
    assert (tmp_path / "data-000").read_bytes() == b"e" * 16 * 4096


def test_the_interpreter_ends_with_a_drive_that_does_not_answer(tmp_path: Path, engine: str) -> None:
    child = run_to_the_end(tmp_path, engine, "0.1", "hung")
    assert child.returncode == os.EX_IOERR
    assert child.stdout == "the end\n"
    assert "write of 4096 bytes at offset 0" in child.stderr and str(tmp_path) in child.stderr


def test_arguments_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="num_threads"):
        ThreadsDevice(tmp_path, num_threads=0)
    with pytest.raises(ValueError, match="deadline_s"):
        ThreadsDevice(tmp_path, deadline_s=0)
    device: Device = ThreadsDevice(tmp_path, num_threads=1)
    with pytest.raises(ValueError, match="not a multiple"):
        device.grow(0, 5000)
    device.close()


def test_a_write_in_flight_during_a_flush_is_covered_by_the_next(tmp_path: Path, engine: str, buffer: Buffer) -> None:
    with faulty(tmp_path, engine) as device:
        gate = device.fault = Gate()
        batch = Batch(device)
        device.submit([batch.operation("write", buffer.memory, 0)])
        assert gate.reached.acquire(timeout=WAIT_S)
        device.flush()
        assert device.num_syncs == 1  # of the growth
        gate.opened.set()
        assert batch.wait(1)[0].error is None
        device.flush()
        assert device.num_syncs == 2


class Interrupted(list[Operation]):
    """A batch that Ctrl-C strikes at its third operation."""

    def __iter__(self) -> Iterator[Operation]:
        yield self[0]
        yield self[1]
        raise KeyboardInterrupt


def test_a_batch_that_is_interrupted_is_not_started(tmp_path: Path, engine: str, buffer: Buffer) -> None:
    with faulty(tmp_path, engine) as device:
        batch = Batch(device)
        classes = (IOClass.WRITE, IOClass.DEMAND, IOClass.PREFETCH)
        operations = [batch.operation("write", buffer.memory, 0, io_class=io_class) for io_class in classes]
        with pytest.raises(KeyboardInterrupt):
            device.submit(Interrupted(operations))
        assert device.statistics().num_in_flight == 0
        assert move(device, "read", buffer) is None
        device.close()
        assert batch.done.empty() and device.statistics().num_writes == 0

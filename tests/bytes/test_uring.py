"""The io_uring engine: where it is refused, in each of its modes, and what a hung drive leaves behind."""

import errno
import logging
import mmap
import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bytes.faulty import Gate, faulty
from tests.bytes.moving import WAIT_S, Batch, exit_code_of_child, fill, move
from tests.seccomp import forbid
from tiered.bytes.arena import Buffer
from tiered.bytes.device import engines, ring, uring
from tiered.bytes.device.base import IOClass
from tiered.bytes.device.engines import choose_engine, open_device, probe_uring
from tiered.bytes.device.file_device import FileDevice
from tiered.bytes.device.ring import Ring
from tiered.bytes.device.uring import UringDevice
from tiered.errors import DeadlineError, DeviceError, UsageError
from tiered.store.store import Store
from tiered.units import KiB, MiB


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(engines, "_said", set())
    yield


def check_round_trip(device: FileDevice) -> None:
    """Write, read back and close, in memory of a forked child's own: it has none of its parent's arena."""
    device.grow(0, 64 * KiB)
    with mmap.mmap(-1, 64 * KiB) as pages, memoryview(pages) as memory:
        content = pages[:] = os.urandom(64 * KiB)
        batch = Batch(device)
        for verb in ("write", "read"):
            device.submit([batch.operation(verb, memory, 0)])
            assert batch.wait(1)[0].error is None
            if verb == "write":
                memory[:] = bytes(64 * KiB)
        assert memory == content
        device.close()


@pytest.mark.parametrize("mode", list(ring._MODES))
def test_every_mode_moves_the_same_bytes(
    tmp_path: Path, buffer: Buffer, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring, "_MODES", {mode: ring._MODES[mode]})
    device = UringDevice(tmp_path)
    assert device._ring is not None and device._ring.mode == mode
    device.grow(0, 64 * MiB)
    content = fill(buffer, 1)
    batch = Batch(device)
    device.submit([batch.operation("write", buffer.memory, i * buffer.nbytes) for i in range(1024)])
    assert {operation.error for operation in batch.wait(1024)} == {None}
    buffer.memory[:] = bytes(buffer.nbytes)
    assert move(device, "read", buffer, 1023 * buffer.nbytes) is None
    assert bytes(buffer.memory) == content
    assert device.statistics().write_bytes == 1024 * buffer.nbytes
    device.close()


def test_a_kernel_without_the_newest_flags_gets_the_next_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = {"from the future": 1 << 31, **{mode: flags for mode, flags in ring._MODES.items() if mode == "plain"}}
    monkeypatch.setattr(ring, "_MODES", unknown)
    ring_ = Ring(1)
    assert ring_.mode == "plain"
    ring_.close()
    ring_.close()


@pytest.mark.parametrize(
    ("system_call", "number"),
    [("io_uring_setup", errno.EPERM), ("io_uring_setup", errno.ENOSYS), ("io_uring_register", errno.EACCES)],
)
def test_refused_by_a_container_threads_serve_and_it_is_said_once(
    tmp_path: Path, system_call: str, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    def check() -> None:
        forbid([system_call], number)
        refusal = probe_uring(tmp_path)
        assert refusal is not None and os.strerror(number) in refusal
        with caplog.at_level(logging.WARNING, "tiered"):
            for name in ("a", "b"):
                (tmp_path / name).mkdir()
                device = open_device(tmp_path / name)
                assert device.engine == "threads"
                check_round_trip(device)
        assert len(caplog.records) == 1 and os.strerror(number) in caplog.text
        with pytest.raises(DeviceError, match=os.strerror(number)):
            open_device(tmp_path, "uring")
        with pytest.raises(DeviceError, match=os.strerror(number)):
            UringDevice(tmp_path)

    assert exit_code_of_child(check) == 0


def test_a_trial_that_does_not_complete_is_given_up_and_keeps_what_the_kernel_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[tuple[Ring, object]] = []
    monkeypatch.setattr(engines, "_abandoned", kept)
    with monkeypatch.context() as patch:
        patch.setattr(Ring, "completions", lambda ring_: [])
        refusal = probe_uring(tmp_path, deadline_s=0.05)
        assert refusal is not None and "a trial write through io_uring did not complete within 0.05 s" in refusal
        with pytest.raises(DeviceError, match="check the drive"):
            open_device(tmp_path, "uring", deadline_s=0.05)
    assert [ring_.fd >= 0 for ring_, _ in kept] == [True, True]
    for ring_, _ in kept:
        ring_.enter(1)
        assert len(ring_.completions()) == 1  # it was in flight
        ring_.close()


def test_little_lockable_memory_is_enough(tmp_path: Path) -> None:
    def check() -> None:
        os.setresuid(65534, 65534, 65534)  # root has no limit
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 * KiB, 64 * KiB))
        check_round_trip(open_device(tmp_path, "uring"))

    tmp_path.chmod(0o777)
    for parent in [*tmp_path.parents][:-2]:
        parent.chmod(parent.stat().st_mode | 0o011)
    assert exit_code_of_child(check) == 0


def test_a_user_with_little_lockable_memory_may_open_and_close_again_and_again(tmp_path: Path) -> None:
    def check() -> None:
        os.setresuid(65534, 65534, 65534)  # the kernel takes a closed ring off a user's locked memory a little later
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (256 * KiB, 256 * KiB))
        num_fds = len(os.listdir("/proc/self/fd"))
        for _ in range(100):
            open_device(tmp_path, "uring").close()
        assert len(os.listdir("/proc/self/fd")) == num_fds and threading.active_count() == 1

    tmp_path.chmod(0o777)
    for parent in [*tmp_path.parents][:-2]:
        parent.chmod(parent.stat().st_mode | 0o011)
    assert exit_code_of_child(check) == 0


def test_a_process_without_descriptors_left_gets_a_typed_error_and_loses_none(tmp_path: Path) -> None:
    def check() -> None:
        fds = set(os.listdir("/proc/self/fd"))
        num_refused = 0
        for limit in range(3, max(map(int, fds)) + 64):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, 4096))
            try:
                UringDevice(tmp_path).close()
            except DeviceError as error:
                assert "ulimit -n" in str(error)
                num_refused += 1
            else:
                break
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 4096))
                assert len(os.listdir("/proc/self/fd")) == len(fds)
        else:
            raise AssertionError("no limit was high enough")
        assert num_refused >= 3  # the directory, the wake-up, the ring

    assert exit_code_of_child(check) == 0


def test_a_ring_that_does_not_fit_is_made_smaller(tmp_path: Path, buffer: Buffer) -> None:
    class Tight(UringDevice):
        def _new_ring(self, num_entries: int) -> Ring:
            if num_entries > 16:
                raise OSError(errno.ENOMEM, "scripted")
            return super()._new_ring(num_entries)

    device = Tight(tmp_path)
    device.grow(0, 64 * buffer.nbytes)
    batch = Batch(device)
    device.submit([batch.operation("write", buffer.memory, i * buffer.nbytes) for i in range(64)])
    assert {operation.error for operation in batch.wait(64)} == {None}
    device.close()


def test_an_engine_can_be_asked_for_by_name(tmp_path: Path) -> None:
    for name in engines.DEVICES:
        device = open_device(tmp_path, name)
        assert device.engine == name
        device.close()
    assert choose_engine(tmp_path)[0] == "uring"
    with pytest.raises(UsageError, match="there is: 'uring', 'threads'"):
        open_device(tmp_path, "libaio")
    with pytest.raises(DeviceError, match=r"cannot make a file in .*absent"):
        open_device(tmp_path / "absent", "uring")


def test_a_store_runs_on_it(tmp_path: Path) -> None:
    with Store(tmp_path / "run", dram="16MiB") as store:
        assert all(isinstance(device, UringDevice) for device in store._parts.devices)


@pytest.mark.parametrize("engine", ["uring", "uring-cut"])
def test_an_overdue_operation_is_reported_once_and_keeps_its_memory(
    tmp_path: Path, buffer: Buffer, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uring, "_TICK_S", 0.01)
    content = fill(buffer, 3)
    with faulty(tmp_path, engine) as device:
        assert move(device, "write", buffer) is None
        device.deadline_s = 0.05  # order: not for the drive's own transfers
        gate = device.fault = Gate()
        batch = Batch(device)
        said = threading.Event()
        monkeypatch.setattr(uring._log, "warning", lambda *arguments: said.set())
        device.submit([batch.operation("read", buffer.memory, 0)])
        assert said.wait(WAIT_S)
        assert batch.done.empty()
        with pytest.raises(DeadlineError, match="outstanding; their buffers stay"):
            device.close()
        gate.opened.set()
        assert batch.wait(1)[0].error is None and bytes(buffer.memory) == content


def test_no_more_is_cancelled_in_a_turn_than_the_ring_has_room_for(
    tmp_path: Path, buffer: Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Narrow:
        """A ring that only cancels."""

        def __init__(self) -> None:
            self.num_free = 0
            self.cancelled: list[int] = []

        def prepare_cancel(self, target: int, tag: int) -> None:
            self.num_free -= 1
            self.cancelled.append(target)

    monkeypatch.setattr(uring, "_TICK_S", WAIT_S)  # the thread's own look comes too late
    narrow = Narrow()
    with faulty(tmp_path, "uring") as device:
        gate = device.fault = Gate()
        batch = Batch(device)
        device.submit([batch.operation("read", buffer.memory, 0, io_class=IOClass.PREFETCH) for _ in range(5)])
        while len(list(device._running())) < 5:
            pass
        device.deadline_s = -1.0
        cancelled = []
        for _ in range(4):
            narrow.num_free = len(device._free_slots) + 1 + 2  # what the next turn may prepare, and two more
            device._look_for_overdue(narrow)  # type: ignore[arg-type]
            cancelled.append(len(narrow.cancelled))
        device.deadline_s = WAIT_S
        gate.opened.set()
        batch.wait(5)
    assert cancelled == [2, 4, 5, 5] and len(set(narrow.cancelled)) == 5


def test_what_the_kernel_cancelled_is_a_deadline_error(tmp_path: Path, buffer: Buffer) -> None:
    with faulty(tmp_path, "uring", deadline_s=0.05) as device:

        def cancelled(*_: object) -> int:
            raise OSError(errno.ECANCELED, "cancelled")

        device.fault = cancelled
        assert isinstance(move(device, "read", buffer), DeadlineError)


def test_what_waited_behind_an_operation_that_failed_is_carried_out(tmp_path: Path) -> None:
    block = 4 * MiB
    device = UringDevice(tmp_path)
    device.grow(0, 16 * block)
    memory = memoryview(mmap.mmap(-1, 16 * block))
    for index in range(16):
        memory[index * block : (index + 1) * block] = bytes([index]) * block
    batch = Batch(device)

    def move_all(verb: str, order: list[int]) -> dict[int, Exception | None]:
        # 64 MiB at once: the kernel begins the second half when the first has completed
        blocks = [(index * block, memory[index * block : (index + 1) * block]) for index in order]
        device.submit([batch.operation(verb, part, offset, io_class=IOClass.PREFETCH) for offset, part in blocks])
        return {operation.offset // block: operation.error for operation in batch.wait(16)}

    assert set(move_all("write", list(range(16))).values()) == {None}
    memory[:] = bytes(16 * block)
    os.truncate(tmp_path / "data-000", 8 * block)
    errors = move_all("read", [*range(8, 16), *range(8)])
    assert all(isinstance(errors[index], DeviceError) for index in range(8, 16))
    assert all(errors[index] is None for index in range(8))
    assert all(memory[index * block] == memory[(index + 1) * block - 1] == index for index in range(8))
    device.close()


class NotingUring(UringDevice):
    """Notes how many operations each system call carries, those without any left out."""

    def _new_ring(self, num_entries: int) -> Ring:
        self.noted: list[int] = []
        return NotingRing(num_entries, self.noted)


class NotingRing(Ring):
    def __init__(self, num_entries: int, noted: list[int]) -> None:
        super().__init__(num_entries)
        self._noted = noted
        self._num_prepared = 0

    def prepare(self, opcode: int, file: int, address: int, nbytes: int, offset: int, tag: int) -> None:
        self._num_prepared += tag < uring._WAKE
        super().prepare(opcode, file, address, nbytes, offset, tag)

    def _count_submitted(self, submitted: int) -> None:
        if self._num_prepared:
            self._noted.append(self._num_prepared)
        self._num_prepared = 0
        super()._count_submitted(submitted)


@pytest.mark.parametrize(("block", "direct", "expected"), [
    (128 * KiB, None, [2, 2, 2, 1]), (64 * KiB, None, [7]), (128 * KiB, False, [7]),
])  # fmt: skip
def test_blocks_go_two_at_a_time_so_that_the_kernel_makes_one_request_of_each(
    tmp_path: Path, block: int, direct: bool | None, expected: list[int]
) -> None:
    device = NotingUring(tmp_path, direct=direct)
    device.grow(0, 7 * block)
    with mmap.mmap(-1, 7 * block) as pages, memoryview(pages) as memory:
        content = pages[:] = os.urandom(7 * block)
        batch = Batch(device)
        for verb in ("write", "read"):
            parts = [(start, memory[start : start + block]) for start in range(0, 7 * block, block)]
            device.noted.clear()
            device.submit([batch.operation(verb, part, start, io_class=IOClass.PREFETCH) for start, part in parts])
            assert [operation.error for operation in batch.wait(7)] == [None] * 7
            assert device.noted == (expected if device.is_direct else [7])
            if verb == "write":
                memory[:] = bytes(7 * block)
        assert memory == content
        del parts
        device.close()


@pytest.mark.parametrize("io_class", [IOClass.DEMAND, IOClass.PREFETCH])
def test_what_is_too_long_for_one_submission_goes_in_several(
    tmp_path: Path, buffer: Buffer, io_class: IOClass, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert uring._MOST_NBYTES < 1 << 31  # what the kernel moves at once
    monkeypatch.setattr(uring, "_CHAINED_NBYTES", 64 * KiB)
    content = fill(buffer, 7)
    device = NotingUring(tmp_path)
    device.cut(24 * KiB, 8)
    device.grow(0, 4 * buffer.nbytes)
    batch = Batch(device)
    for verb in ("write", "read"):
        device.noted.clear()
        device.submit([batch.operation(verb, buffer.memory, i * buffer.nbytes, io_class=io_class) for i in range(4)])
        assert [operation.error for operation in batch.wait(4)] == [None] * 4
        assert sum(device.noted) >= 4 * 3
        if verb == "write":
            buffer.memory[:] = bytes(buffer.nbytes)
    assert bytes(buffer.memory) == content
    device.close()


def test_a_bug_that_ends_the_thread_fails_what_is_queued(
    tmp_path: Path, buffer: Buffer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)
    device = UringDevice(tmp_path)
    device.grow(0, 1 * MiB)

    def broken(_: object) -> None:
        raise RuntimeError("a bug of ours")

    monkeypatch.setattr(device, "_start_queued", broken)
    batch = Batch(device)
    device.submit([batch.operation("read", buffer.memory, 0) for _ in range(300)])  # more than may be in flight
    for operation in batch.wait(300):
        assert isinstance(operation.error, DeviceError) and "the I/O thread has ended" in str(operation.error)
    assert "a bug of ours" in caplog.text
    device.close()

"""Memory that a kernel has the address of: what may be written to and what not, and what is registered for good."""

import ctypes
import mmap
import os
import resource
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.bytes.faulty import faulty
from tests.bytes.moving import WAIT_S, Batch, exit_code_of_child, fill, move
from tests.bytes.test_uring import check_round_trip
from tiered.bytes.arena import Arena, Buffer
from tiered.bytes.device.pinning import address_of, pin
from tiered.bytes.device.registration import Registration
from tiered.bytes.device.ring import READ_FIXED, WRITE_FIXED, Ring
from tiered.bytes.device.uring import UringDevice
from tiered.errors import DeviceError, UsageError
from tiered.units import KiB, MiB


def test_what_is_pinned_stays_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 4096)
    with open(tmp_path / "file", "r+b") as file:
        for access in (mmap.ACCESS_WRITE, mmap.ACCESS_READ):
            pages = mmap.mmap(file.fileno(), 4096, access=access)
            memory = memoryview(pages)
            with pytest.raises(TypeError) if memory.readonly else nullcontext():
                pin(memory)
            pinned = pin(memory, is_read_only=True)
            memory.release()
            with pytest.raises(BufferError):
                pages.close()
            assert ctypes.string_at(address_of(pinned), 4096) == b"x" * 4096
            with pytest.raises(ValueError, match="released"):
                pin(memory, is_read_only=True)
            del pinned
            pages.close()


def test_a_read_into_memory_that_may_not_be_written_to_fails(tmp_path: Path, buffer: Buffer) -> None:
    content = fill(buffer, 7)
    with faulty(tmp_path, "uring") as device:
        batch = Batch(device)
        device.submit([batch.operation("read", buffer.memory.toreadonly(), 0)])
        assert isinstance(batch.wait(1)[0].error, DeviceError) and bytes(buffer.memory) == content


def test_registered_buffers_move_bytes(tmp_path: Path, buffer: Buffer) -> None:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    content = fill(buffer, 4)
    ring_ = Ring(4)
    ring_.register_files(1)
    ring_.set_file(0, fd)
    ring_.register_buffers([(buffer.address, buffer.nbytes)])
    for opcode in (WRITE_FIXED, READ_FIXED):
        ring_.prepare(opcode, 0, buffer.address, buffer.nbytes, 0, tag=7)
        while not (completions := ring_.completions()):
            ring_.enter(1)
        assert [(tag, result) for tag, result, _ in completions] == [(7, buffer.nbytes)]
        if opcode == WRITE_FIXED:
            ctypes.memset(buffer.address, 0, buffer.nbytes)
    ring_.close()
    os.close(fd)
    assert bytes(buffer.memory) == content


def test_memory_is_registered_once_where_the_limit_allows_it(
    tmp_path: Path, arena: Arena, buffer: Buffer, caplog: pytest.LogCaptureFixture
) -> None:
    device = UringDevice(tmp_path)
    device.grow(0, 1 * MiB)
    other = arena.allocate_nowait(64 * KiB)
    assert other is not None
    assert device.register_memory(buffer.memory)
    with pytest.raises(UsageError, match="already"):
        device.register_memory(buffer.memory)
    content = fill(buffer, 6)
    for memory in (buffer, other):  # what is not registered works as well
        assert move(device, "write", buffer) is None
        memory.memory[:] = bytes(memory.nbytes)
        assert move(device, "read", memory) is None and bytes(memory.memory) == content
    device.close()
    arena.release(other)

    def check() -> None:
        os.setresuid(65534, 65534, 65534)
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 * KiB, 64 * KiB))
        device = UringDevice(tmp_path / "theirs")
        with mmap.mmap(-1, 1 * MiB) as pages, memoryview(pages) as memory:
            assert not device.register_memory(memory)
            check_round_trip(device)

    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", 65534, 65534)
    for parent in [tmp_path, *tmp_path.parents][:-2]:
        parent.chmod(parent.stat().st_mode | 0o011)
    assert exit_code_of_child(check) == 0


def test_of_two_threads_that_register_memory_one_is_refused(
    tmp_path: Path, buffer: Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is registered before both threads have asked, or one waits for the other."""

    class Late(UringDevice):
        asked = threading.Semaphore(0)
        may_register = threading.Event()

        def _wake(self) -> None:
            super()._wake()
            self.asked.release()

    def late(registration: Registration, ring: Ring) -> None:
        Late.may_register.wait(WAIT_S)
        carry_out(registration, ring)

    carry_out = Registration.carry_out
    monkeypatch.setattr(Registration, "carry_out", late)
    device = Late(tmp_path)
    answers: list[object] = []

    def register() -> None:
        try:
            answers.append(device.register_memory(buffer.memory))
        except DeviceError as error:
            answers.append(error)
        except UsageError as error:
            answers.append(str(error))

    threads = [threading.Thread(target=register) for _ in range(2)]
    threads[0].start()
    assert device.asked.acquire(timeout=WAIT_S)
    threads[1].start()
    device.asked.acquire(timeout=0.05)  # nobody asks while the first one waits
    device.may_register.set()
    for thread in threads:
        thread.join()
    assert set(map(str, answers)) == {"True", f"{tmp_path} has registered memory already"}
    device.close()

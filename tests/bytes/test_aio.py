"""The aiofiles engine: what is its own, beside what every engine does."""

import asyncio
import os
import threading
from pathlib import Path

import pytest

from tests.bytes.moving import Batch, exit_code_of_child, fill, move
from tiered.bytes.arena import Buffer
from tiered.bytes.device.base import Operation
from tiered.bytes.device.threads import AiofilesDevice
from tiered.errors import DeviceError


def test_io_is_buffered_unless_direct_is_asked_for(tmp_path: Path, buffer: Buffer) -> None:
    for direct in (None, False, True):
        device = AiofilesDevice(tmp_path, num_threads=1, direct=direct)
        assert device.is_direct == bool(direct)
        device.grow(0, buffer.nbytes)
        content = fill(buffer, 1)
        assert move(device, "write", buffer) is None and move(device, "read", buffer) is None
        assert bytes(buffer.memory) == content
        device.close()


def test_it_serves_a_caller_who_runs_an_event_loop(tmp_path: Path, buffer: Buffer) -> None:
    device = AiofilesDevice(tmp_path)
    device.grow(0, buffer.nbytes)

    async def write_and_read() -> bytes:
        loop = asyncio.get_running_loop()
        for verb in ("write", "read"):
            done: asyncio.Future[Operation] = loop.create_future()
            operation = Batch(device).operation(verb, buffer.memory, 0)
            operation.on_done = lambda operation, done=done: loop.call_soon_threadsafe(done.set_result, operation)
            device.submit([operation])
            assert (await done).error is None
        return bytes(buffer.memory)

    content = fill(buffer, 2)
    assert asyncio.run(write_and_read()) == content
    device.close()


def test_what_cannot_be_opened_leaves_no_loop_behind(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    with pytest.raises(DeviceError, match="cannot open the directory"):
        AiofilesDevice(tmp_path / "absent")
    with pytest.raises(ValueError, match="num_threads"):
        AiofilesDevice(tmp_path, num_threads=0)
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before


def test_a_forked_child_holds_nothing_of_the_loop(tmp_path: Path, buffer: Buffer) -> None:
    before = len(os.listdir("/proc/self/fd"))
    device = AiofilesDevice(tmp_path)
    device.grow(0, buffer.nbytes)

    def check() -> None:
        assert len(os.listdir("/proc/self/fd")) == before

    assert exit_code_of_child(check) == 0
    assert move(device, "write", buffer) is None  # and the parent's loop still wakes up
    device.close()


def test_nobody_wakes_a_loop_that_is_being_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = AiofilesDevice(tmp_path, num_threads=1)
    close, wake = device._loop.close, device._loop.call_soon_threadsafe
    waker = threading.Thread(target=device._wake)
    woken: list[object] = []

    def close_slowly() -> None:
        waker.start()
        waker.join(0.05)  # it waits, or has written to what is about to be closed
        assert not woken
        close()

    monkeypatch.setattr(device._loop, "close", close_slowly)
    monkeypatch.setattr(
        device._loop, "call_soon_threadsafe", lambda action: woken.append(action) if waker.ident else wake(action)
    )
    device.close()
    waker.join()
    assert not woken

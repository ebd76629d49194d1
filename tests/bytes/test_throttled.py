"""The pace of a throttled device, by arithmetic and by what a clock cannot make faster."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.bytes.moving import Batch, exit_code_of_child, move
from tests.devices.simulated_disk import SimulatedDisk
from tests.devices.throttled import Pace, ThrottledDevice
from tiered.bytes.arena import Buffer
from tiered.bytes.device.base import IOClass, Operation
from tiered.bytes.device.memory import MemoryDevice
from tiered.bytes.device.threads import ThreadsDevice
from tiered.errors import ClosedError, UsageError
from tiered.units import KiB, MiB


def operation(nbytes: int, io_class: IOClass = IOClass.WRITE) -> Operation:
    return Operation(
        is_write=io_class is IOClass.WRITE,
        file=0,
        offset=0,
        memory=memoryview(bytes(nbytes)),
        io_class=io_class,
        on_done=lambda _: None,
    )


def test_an_operation_passes_when_its_bytes_are_paid_for() -> None:
    pace = Pace(1000.0, 1000.0)
    operations = [operation(100) for _ in range(3)]
    for each in operations:
        pace.put(each, now=5.0)
    assert pace.take(5.0) == [] and pace.next_s() == pytest.approx(5.098)  # less the burst of 2 ms
    assert pace.take(5.1) == operations[:1]
    assert pace.take(5.4) == operations[1:]  # who asks late loses nothing
    assert pace.next_s() is None and pace.num_waiting == 0
    pace.put(operations[0], now=5.3)
    assert pace.next_s() == pytest.approx(5.398)  # the time between was idle, and is not owed beyond the burst


def test_the_most_urgent_goes_first_and_each_class_in_order() -> None:
    pace = Pace(1000.0, 1000.0)
    prefetch = [operation(10, IOClass.PREFETCH) for _ in range(3)]
    demand = [operation(10, IOClass.DEMAND) for _ in range(2)]
    for each in prefetch:
        pace.put(each, now=0.0)
    assert pace.take(0.009) == prefetch[:1]
    assert pace.next_s() == pytest.approx(0.018)  # chosen: what has begun to pass is not put back
    for each in demand:
        pace.put(each, now=0.0)
    assert pace.take(1.0) == [prefetch[1], *demand, prefetch[2]]


def test_without_a_limit_everything_passes_at_once() -> None:
    pace = Pace(float("inf"), float("inf"))
    operations = [operation(1 * MiB) for _ in range(3)]
    for each in operations:
        pace.put(each, now=1.0)
    assert pace.take(1.0) == operations


def test_throughput_stays_below_the_limits(buffer: Buffer) -> None:
    device = ThrottledDevice(MemoryDevice(SimulatedDisk(), 0), read_bytes_per_s=4e6, write_bytes_per_s=2e6)
    device.grow(0, 1 * MiB)
    batch = Batch(device)
    for verb, limit in (("write", 2e6), ("read", 4e6)):
        start = time.monotonic()
        device.submit([batch.operation(verb, buffer.memory, i * 64 * KiB) for i in range(4)])
        assert [done.error for done in batch.wait(4)] == [None] * 4
        assert time.monotonic() - start >= 256 * KiB / limit - 0.003
    device.close()


@pytest.mark.parametrize("is_half_duplex", [False, True])
def test_directions_share_the_time_where_the_drive_is_half_duplex(is_half_duplex: bool, buffer: Buffer) -> None:
    device = ThrottledDevice(
        MemoryDevice(SimulatedDisk(), 0), read_bytes_per_s=4e6, write_bytes_per_s=2e6, is_half_duplex=is_half_duplex
    )
    device.grow(0, 1 * MiB)
    batch = Batch(device)
    start = time.monotonic()
    device.submit([batch.operation(verb, buffer.memory, 0) for verb in ("write", "read") for _ in range(4)])
    done = batch.wait(8)
    seconds = time.monotonic() - start
    read_s, write_s = (4 * len(buffer.memory) / limit for limit in (4e6, 2e6))
    assert seconds >= (read_s + write_s if is_half_duplex else write_s) - 0.006
    if is_half_duplex:  # the more urgent class first
        assert [operation.is_write for operation in done] == [False] * 4 + [True] * 4
    device.close()


def test_close_lets_everything_through_and_ends_the_thread(buffer: Buffer) -> None:
    device = ThrottledDevice(MemoryDevice(SimulatedDisk(), 0), write_bytes_per_s=1.0)
    device.grow(0, 1 * MiB)
    batch = Batch(device)
    device.submit([batch.operation("write", buffer.memory, i * 64 * KiB) for i in range(4)])
    assert device.statistics().num_in_flight == 4
    device.close()
    assert [done.error for done in batch.wait(4)] == [None] * 4
    assert not [thread for thread in threading.enumerate() if thread.name == "tiered-throttle"]
    with pytest.raises(ClosedError):
        device.submit([batch.operation("write", buffer.memory, 0)])


def test_an_upstream_that_is_closed_under_it_is_an_error_of_each_operation(buffer: Buffer) -> None:
    upstream = MemoryDevice(SimulatedDisk(), 0)
    device = ThrottledDevice(upstream)
    device.grow(0, 64 * KiB)
    upstream.close()
    assert isinstance(move(device, "write", buffer), ClosedError)
    device.close()


def test_limits_are_positive() -> None:
    with pytest.raises(ValueError, match="positive"):
        ThrottledDevice(MemoryDevice(SimulatedDisk(), 0), read_bytes_per_s=0)


def test_a_forked_child_is_refused_and_closes_nothing(tmp_path: Path, buffer: Buffer) -> None:
    device = ThrottledDevice(ThreadsDevice(tmp_path, num_threads=1), write_bytes_per_s=1e9)
    device.grow(0, 64 * KiB)

    def check() -> None:
        batch = Batch(device)
        with pytest.raises(UsageError, match="fork"):
            device.submit([batch.operation("write", buffer.memory, 0)])
        device.close()

    assert exit_code_of_child(check) == 0
    assert move(device, "write", buffer) is None
    device.close()


def test_what_waits_is_written_when_the_interpreter_ends_without_close(tmp_path: Path) -> None:
    script = f"""
import mmap
from tiered.bytes.device.base import IOClass, Operation
from tiered.bytes.device.threads import ThreadsDevice
from tests.devices.throttled import ThrottledDevice
device = ThrottledDevice(ThreadsDevice({str(tmp_path)!r}, num_threads=2), write_bytes_per_s=1.0)
device.grow(0, 65536)
memory = memoryview(mmap.mmap(-1, 65536))
memory[:] = b"x" * 65536
device.submit([Operation(is_write=True, file=0, offset=0, memory=memory, io_class=IOClass.WRITE,
                         on_done=lambda operation: print("done", operation.error, flush=True))])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60, check=True, text=True)
    assert done.stdout == "done None\n" and done.stderr == ""
    assert (tmp_path / "data-000").read_bytes() == b"x" * 65536
    assert os.stat(tmp_path / "data-000").st_mode & 0o777 == 0o600

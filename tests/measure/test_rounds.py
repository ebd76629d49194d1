"""One round: what it moves, where, how it ends; percentiles by known inputs."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.devices.counting import CountingDevice
from tiered.bytes.arena import Arena
from tiered.bytes.device.base import SCRATCH, Device, Operation
from tiered.bytes.device.threads import ThreadsDevice
from tiered.errors import ClosedError, DeviceError
from tiered.tools.bench.rounds import Latency, Pattern, Round, run_round
from tiered.units import KiB, MiB

BLOCK, DEPTH, FILE = 64 * KiB, 4, MiB


def pattern(op: str = "read", **changes: object) -> Pattern:
    given: dict[str, object] = dict(op=op, block_nbytes=BLOCK, depth=DEPTH, file_nbytes=FILE, seconds=30.0)
    return Pattern(**{**given, **changes})  # type: ignore[arg-type]  # as the test says


@pytest.fixture
def memory() -> Iterator[memoryview]:
    arena = Arena(BLOCK * DEPTH)
    buffer = arena.allocate_nowait(arena.nbytes)
    assert buffer is not None
    buffer.memory[:] = os.urandom(BLOCK) * DEPTH
    yield buffer.memory
    arena.release(buffer)
    arena.close()


@pytest.fixture
def device(tmp_path: Path, memory: memoryview) -> Iterator[Device]:
    device = ThreadsDevice(tmp_path, num_threads=DEPTH)
    device.grow(SCRATCH, FILE)
    run_round(device, memory, pattern("write", max_nbytes=FILE))
    yield device
    device.close()


@pytest.mark.parametrize("op", ["read", "mixed"])
def test_a_spread_round_goes_through_all_memory_and_another_through_as_much_as_is_in_flight(
    device: Device, memory: memoryview, op: str
) -> None:
    with contextlib.closing(Arena(3 * BLOCK * DEPTH)) as arena:
        buffer = arena.allocate_nowait(arena.nbytes)
        assert buffer is not None
        for is_spread, num_used in ((False, DEPTH), (True, 3 * DEPTH)):
            recording = Recording(device)
            run_round(recording, buffer.memory, pattern(op, max_nbytes=40 * FILE), is_spread=is_spread)
            places = [np.frombuffer(done.memory, dtype=np.uint8).ctypes.data for done in recording.operations]
            assert set(places) == {buffer.address + BLOCK * i for i in range(num_used)}
        arena.release(buffer)


class Recording(CountingDevice):
    """Remembers what was submitted, as it was then."""

    def __init__(self, upstream: Device) -> None:
        super().__init__(upstream)
        self.operations: list[Operation] = []

    def submit(self, operations: object) -> None:
        self.operations += map(copy.copy, operations)  # type: ignore[call-overload]
        super().submit(operations)  # type: ignore[arg-type]


class TestRound:
    @pytest.mark.parametrize("op", ["read", "write"])
    def test_it_moves_the_bytes_it_was_given(self, op: str, device: Device, memory: memoryview) -> None:
        before = device.statistics()
        found = run_round(device, memory, pattern(op, max_nbytes=3 * FILE))
        after = device.statistics()
        assert (found.read_nbytes, found.write_nbytes) == ((3 * FILE, 0) if op == "read" else (0, 3 * FILE))
        assert after.read_bytes - before.read_bytes == found.read_nbytes
        assert after.write_bytes - before.write_bytes == found.write_nbytes
        assert 0 < found.latency.p50_s <= found.latency.max_s <= found.seconds
        assert found.cpu_s > 0

    def test_blocks_are_sequential_and_wrap(self, device: Device, memory: memoryview) -> None:
        recording = Recording(device)
        run_round(recording, memory, pattern(max_nbytes=2 * FILE))
        expected = [number * BLOCK for number in range(FILE // BLOCK)] * 2
        assert sorted(operation.offset for operation in recording.operations) == sorted(expected)
        assert [operation.offset for operation in recording.operations[:DEPTH]] == expected[:DEPTH]

    def test_mixed_reads_one_half_and_writes_the_other(self, device: Device, memory: memoryview) -> None:
        recording = Recording(device)
        found = run_round(recording, memory, pattern("mixed", max_nbytes=2 * FILE))
        assert found.read_nbytes > 0 < found.write_nbytes
        assert max(found.read_nbytes, found.write_nbytes) == FILE
        for operation in recording.operations:
            assert (operation.offset >= FILE // 2) == operation.is_write

    def test_it_ends_after_its_seconds(self, device: Device, memory: memoryview) -> None:
        found = run_round(device, memory, pattern(seconds=0.02))
        assert found.nbytes >= DEPTH * BLOCK
        assert device.statistics().num_in_flight == 0

    def test_a_watch_ends_it_early(self, device: Device, memory: memoryview) -> None:
        calls: list[None] = []

        def watch() -> None:
            calls.append(None)
            if len(calls) == 3:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run_round(device, memory, pattern(seconds=3600.0), watch=watch, watch_every_s=0.001)
        assert len(calls) == 3

    def test_an_error_of_the_device_is_raised_when_nothing_is_in_flight(
        self, device: Device, memory: memoryview
    ) -> None:
        with pytest.raises(DeviceError, match="the file has"):
            run_round(device, memory, pattern(file_nbytes=2 * FILE))
        assert device.statistics().num_in_flight == 0

    def test_a_closed_device_ends_it(self, device: Device, memory: memoryview) -> None:
        device.close()
        with pytest.raises(ClosedError):
            run_round(device, memory, pattern())


class TestArithmetic:
    def test_percentiles_of_known_times(self) -> None:
        times = np.arange(1, 1001, dtype=np.float64) / 1000
        np.random.default_rng(1).shuffle(times)
        assert Latency.of(times) == Latency(p50_s=0.501, p99_s=0.991, p999_s=1.0, max_s=1.0)
        assert Latency.of(np.array([0.25])) == Latency(0.25, 0.25, 0.25, 0.25)

    def test_rates(self) -> None:
        found = Round(3 * 10**9, 10**9, 2.0, 0.5, Latency(1.0, 1.0, 1.0, 1.0))
        assert found.nbytes == 4 * 10**9
        assert found.gb_per_s == 2.0
        assert found.cpu_s_per_gb == 0.125

    def test_too_little_memory_is_refused(self, device: Device, memory: memoryview) -> None:
        with pytest.raises(ValueError, match="need more memory"):
            run_round(device, memory, pattern(depth=2 * DEPTH))

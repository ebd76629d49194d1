"""Bandwidths are measured while devices are busy, and extents come to be dealt out by them."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

from tests.bytes.moving import Batch
from tests.devices.faults import Fault, FaultsDevice
from tests.devices.simulated_disk import SimulatedDisk
from tests.devices.throttled import Pace
from tiered.bytes.arena import Arena
from tiered.bytes.device.base import Adaptor, Device, Operation
from tiered.bytes.device.memory import MemoryDevice
from tiered.bytes.device.profile import Profile, write_profile
from tiered.errors import ClosedError
from tiered.store.space.bandwidth import BandwidthMeter, profiled_weights
from tiered.store.space.extents import ExtentAllocator
from tiered.units import KiB, MiB

PROFILE = Profile(
    engine="threads",
    read_bytes_per_s=3e9,
    write_bytes_per_s=1.5e9,
    block_nbytes=4 * MiB,
    read_depth=8,
    write_depth=8,
    duplex=None,
    measured_at="2026-11-21T03:50:00+00:00",
    kernel="6.1",
)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def meter_of(num_devices: int) -> tuple[BandwidthMeter, Clock]:
    clock = Clock()
    return BandwidthMeter(num_devices, busy_nbytes=100, sample_nbytes=1000, sample_s=0.0, clock=clock), clock


def move(meter: BandwidthMeter, clock: Clock, device: int, nbytes: int, seconds: float) -> None:
    meter.begin(device, nbytes)
    clock.now += seconds
    meter.end(device, nbytes)


def test_bytes_count_per_time_in_which_a_device_is_busy() -> None:
    meter, clock = meter_of(2)
    for _ in range(2):
        move(meter, clock, 0, 500, 2.0)
        clock.now += 100.0  # idle
        move(meter, clock, 0, 99, 5.0)  # too little to keep it busy
    assert meter.bytes_per_s() == [250.0, None]


def test_time_with_several_in_flight_counts_once() -> None:
    meter, clock = meter_of(1)
    for _ in range(10):
        meter.begin(0, 100)
    for _ in range(10):
        clock.now += 0.5
        meter.end(0, 100)
    assert meter.bytes_per_s() == [200.0]


def test_samples_are_smoothed() -> None:
    meter, clock = meter_of(1)
    for seconds in (1.0, 0.5):
        move(meter, clock, 0, 1000, seconds)
    assert meter.bytes_per_s() == [pytest.approx(0.7 * 1000 + 0.3 * 2000)]


def test_weights_are_news_once_all_are_known_and_when_they_change() -> None:
    meter, clock = meter_of(2)
    assert meter.new_weights() is None
    move(meter, clock, 0, 1000, 1.0)
    assert meter.new_weights() is None
    move(meter, clock, 1, 1000, 3.0)
    assert meter.new_weights() == [pytest.approx(0.75), pytest.approx(0.25)]
    move(meter, clock, 1, 1000, 3.0)
    assert meter.new_weights() is None  # as before
    move(meter, clock, 1, 1000, 30.0)
    assert meter.new_weights() is not None


def test_a_device_that_hardly_moves_still_gets_some() -> None:
    meter, clock = meter_of(2)
    move(meter, clock, 0, 1000, 1.0)
    move(meter, clock, 1, 1000, 1e6)
    weights = meter.new_weights()
    assert weights is not None and weights[0] / weights[1] == pytest.approx(32)


class Paced(Adaptor):
    """A throttled device whose time is a ``Clock``'s: how late this machine wakes up a thread is none of its pace."""

    def __init__(self, upstream: Device, bytes_per_s: float, clock: Clock) -> None:
        super().__init__(upstream)
        self.pace = Pace(bytes_per_s, bytes_per_s)
        self._clock = clock

    def submit(self, operations: Sequence[Operation]) -> None:
        for operation in operations:
            self.pace.put(operation, self._clock())

    def go_on(self) -> None:
        """Let through what may pass by now."""
        self.upstream.submit(self.pace.take(self._clock()))


def let_time_pass(paced: Sequence[Paced], clock: Clock) -> None:
    """Go on from completion to completion until nothing is in flight."""
    while times := [next_s for device in paced if (next_s := device.pace.next_s()) is not None]:
        clock.now = max(clock.now, min(times))
        for device in paced:
            device.go_on()


def test_shares_converge_to_the_bandwidths_of_throttled_devices() -> None:
    disk, clock = SimulatedDisk(can_lose_power=False), Clock()
    paced = [Paced(MemoryDevice(disk, index), limit, clock) for index, limit in enumerate((36e6, 12e6))]
    meter = BandwidthMeter(2, busy_nbytes=256 * KiB, sample_nbytes=2 * MiB, sample_s=0.0, clock=clock)
    devices = meter.metered(paced)
    allocator = ExtentAllocator(2, 4096)
    for index, device in enumerate(devices):
        device.grow(0, 8 * MiB)
        allocator.add_space(index, 0, 0, 8 * MiB)
    arena = Arena(4 * MiB)
    shares = [_write_and_read(devices, allocator, meter, arena, partial(let_time_pass, paced, clock)) for _ in range(6)]
    arena.close()
    for device in devices:
        device.close()
    assert shares == [[2 * MiB, 2 * MiB], *[[3 * MiB, 1 * MiB]] * 5]


def _write_and_read(
    devices: tuple[Device, ...],
    allocator: ExtentAllocator,
    meter: BandwidthMeter,
    arena: Arena,
    complete: Callable[[], None],
) -> list[int]:
    """Write and read 16 tensors of 256 KiB, all in flight; return how many bytes each device was given."""
    weights = meter.new_weights()
    if weights is not None:
        allocator.set_weights(weights)
    taken = [extents for _ in range(16) if (extents := allocator.allocate_nowait(256 * KiB)) is not None]
    buffers = [arena.allocate_nowait(256 * KiB) for _ in taken]
    for verb in ("write", "read"):
        batches = [Batch(device) for device in devices]
        for (extent,), buffer in zip(taken, buffers, strict=True):
            assert buffer is not None
            batch = batches[extent.device]
            batch.device.submit([batch.operation(verb, buffer.memory, extent.offset)])
        complete()
        for index, batch in enumerate(batches):
            done = batch.wait(sum(extent.device == index for (extent,) in taken))
            assert [operation.error for operation in done] == [None] * len(done)
    for extents, buffer in zip(taken, buffers, strict=True):
        allocator.free(extents)
        assert buffer is not None
        arena.release(buffer)
    return [sum(extent.nbytes for (extent,) in taken if extent.device == index) for index in range(len(devices))]


def test_what_is_refused_or_fails_passes_through_the_meter() -> None:
    meter, _ = meter_of(1)
    (device,) = meter.metered([FaultsDevice(MemoryDevice(SimulatedDisk(), 0))])
    device.grow(0, 64 * KiB)
    assert isinstance(device.upstream, FaultsDevice)  # type: ignore[attr-defined]
    device.upstream.inject(Fault("write"))  # type: ignore[attr-defined]
    batch = Batch(device)
    device.submit([batch.operation("write", memoryview(bytes(4096)), 0)])
    assert batch.wait(1)[0].error is not None
    device.close()
    with pytest.raises(ClosedError):
        device.submit([batch.operation("write", memoryview(bytes(4096)), 0)])
    assert meter.bytes_per_s() == [None] and batch.done.empty()


def test_profiles_give_the_first_weights(tmp_path: Path) -> None:
    names = [tmp_path / name for name in ("a", "b")]
    for name in names:
        name.mkdir()
    paths = [str(name) for name in names]
    assert profiled_weights(paths) is None
    write_profile(names[0], PROFILE)
    assert profiled_weights(paths) is None
    write_profile(names[1], dataclasses.replace(PROFILE, read_bytes_per_s=1e9, write_bytes_per_s=1e9))
    assert profiled_weights(paths) == [pytest.approx(2e9), pytest.approx(1e9)]

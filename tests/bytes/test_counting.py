"""What the counting adaptor counts."""

import random
import statistics
import threading

import pytest

from tests.bytes.moving import WAIT_S, Batch, move
from tests.devices.counting import CountingDevice
from tests.devices.faults import Fault, FaultKind, FaultsDevice
from tests.devices.latency import LatencyHistogram
from tests.devices.simulated_disk import SimulatedDisk
from tiered.bytes.arena import Buffer
from tiered.bytes.device.base import IOClass
from tiered.bytes.device.memory import MemoryDevice
from tiered.errors import ClosedError, DeviceError
from tiered.units import KiB, MiB


def test_each_class_is_counted_apart(buffer: Buffer) -> None:
    device = CountingDevice(MemoryDevice(SimulatedDisk(), 0))
    device.grow(0, 1 * MiB)
    batch = Batch(device)
    page = buffer.memory[:4096]
    device.submit([batch.operation("write", buffer.memory, 0), batch.operation("write", page, 64 * KiB)])
    device.submit([batch.operation("read", page, 0, io_class=IOClass.PREFETCH)])
    device.submit([batch.operation("read", page, 2 * MiB)])
    assert [isinstance(operation.error, DeviceError) for operation in batch.wait(4)] == [False, False, False, True]
    device.flush()
    counted = device.statistics()
    demand, prefetch, write = (counted.classes[io_class] for io_class in IOClass)
    assert (write.num_operations, write.nbytes, write.num_errors) == (2, 68 * KiB, 0)
    assert (write.peak_in_flight, write.peak_in_flight_bytes) == (2, 68 * KiB)
    assert (prefetch.num_operations, prefetch.nbytes, prefetch.num_errors) == (1, 4096, 0)
    assert (demand.num_operations, demand.nbytes, demand.num_errors) == (1, 0, 1)
    assert counted.flush_latency.num == counted.num_flushes == 1
    assert counted.write_bytes == 68 * KiB  # the upstream's own
    assert write.latency.num == 2 and 0 <= write.latency.p50_s <= write.latency.p999_s <= write.latency.max_s
    device.close()


def test_what_is_in_flight_is_counted_until_it_completes(buffer: Buffer) -> None:
    faults = FaultsDevice(MemoryDevice(SimulatedDisk(), 0), [Fault("write", FaultKind.HOLD)])
    device = CountingDevice(faults)
    device.grow(0, 1 * MiB)
    batch = Batch(device)
    device.submit([batch.operation("write", buffer.memory, 0)])
    write = device.statistics().classes[IOClass.WRITE]
    assert (write.num_in_flight, write.in_flight_bytes, write.num_operations) == (1, 64 * KiB, 0)
    assert device.statistics().num_in_flight == 1
    faults.release()
    batch.wait(1)
    write = device.statistics().classes[IOClass.WRITE]
    assert (write.num_in_flight, write.in_flight_bytes, write.num_operations) == (0, 0, 1)
    device.close()
    with pytest.raises(ClosedError):
        device.submit([batch.operation("write", buffer.memory, 0)])
    assert device.statistics().classes[IOClass.WRITE] == write  # what was refused is not counted


def test_operations_may_be_submitted_from_a_completion(buffer: Buffer) -> None:
    device = CountingDevice(MemoryDevice(SimulatedDisk(), 0))
    device.grow(0, 1 * MiB)
    batch = Batch(device)
    done = threading.Event()
    first = batch.operation("write", buffer.memory, 0)
    second = batch.operation("read", buffer.memory, 0)
    first.on_done = lambda _: device.submit([second])
    second.on_done = lambda _: done.set()
    device.submit([first])
    assert done.wait(WAIT_S) and device.statistics().classes[IOClass.DEMAND].num_operations == 1
    assert move(device, "read", buffer) is None
    device.close()


def test_percentiles_are_right_to_a_sixteenth() -> None:
    rng = random.Random(3)
    latencies = [rng.lognormvariate(-7, 1.5) for _ in range(5000)]
    histogram = LatencyHistogram()
    for latency in latencies:
        histogram.add(latency)
    summary = histogram.summary()
    cuts = statistics.quantiles(latencies, n=1000, method="inclusive")
    for found, wanted in ((summary.p50_s, cuts[499]), (summary.p99_s, cuts[989]), (summary.p999_s, cuts[998])):
        assert wanted * 0.97 <= found <= wanted * 1.08
    assert summary.num == 5000 and summary.max_s == pytest.approx(max(latencies), rel=1e-4)
    assert summary.mean_s == pytest.approx(statistics.fmean(latencies), rel=1e-3)


def test_latencies_of_any_size_are_counted() -> None:
    histogram = LatencyHistogram()
    assert histogram.summary().max_s == 0.0 == histogram.percentile_s(99)
    for latency in (-1.0, 0.0, 1e-9, 1e9):
        histogram.add(latency)
    assert histogram.summary().max_s == 1e9 and histogram.percentile_s(50) == 0.0

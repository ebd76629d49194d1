"""Several devices as one: where the bytes lie, what is split, what fails."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.bytes.moving import WAIT_S, Batch, fill, move
from tiered.bytes.arena import Buffer
from tiered.bytes.device.base import SCRATCH
from tiered.bytes.device.counting import CountingDevice
from tiered.bytes.device.faults import Fault, FaultKind, FaultsDevice
from tiered.bytes.device.memory import MemoryDevice, SimulatedDisk
from tiered.bytes.device.striped import StripedDevice, StripeLayout
from tiered.bytes.device.threads import ThreadsDevice
from tiered.errors import CapacityError, ClosedError, DeviceError
from tiered.units import KiB, MiB

WEIGHTS = st.lists(st.floats(0.05, 10), min_size=1, max_size=5)


@given(WEIGHTS, st.integers(1, 5), st.integers(0, 2000))
def test_every_byte_has_a_place_of_its_own_and_files_have_the_size_of_their_parts(
    weights: list[float], stripe: int, nbytes: int
) -> None:
    layout = StripeLayout(weights, stripe)
    places = [(device, start + i) for device, start, length in layout.pieces(0, nbytes) for i in range(length)]
    assert len(set(places)) == len(places) == nbytes
    sizes = [sum(device == wanted for device, _ in places) for wanted in range(len(weights))]
    assert sizes == layout.sizes(nbytes) and layout.nbytes(sizes) == nbytes
    assert all(offset < sizes[device] for device, offset in places)  # no holes


@given(WEIGHTS, st.integers(1, 5), st.data())
def test_pieces_of_any_range_are_where_the_whole_file_has_them(
    weights: list[float], stripe: int, data: st.DataObject
) -> None:
    layout = StripeLayout(weights, stripe)
    places = [(device, start + i) for device, start, length in layout.pieces(0, 1000) for i in range(length)]
    offset = data.draw(st.integers(0, 1000))
    nbytes = data.draw(st.integers(0, 1000 - offset))
    pieces = list(layout.pieces(offset, nbytes))
    found = [(device, start + i) for device, start, length in pieces for i in range(length)]
    assert found == places[offset : offset + nbytes]
    assert all(a[0] != b[0] for a, b in itertools.pairwise(pieces))  # neighbours are one piece


@given(WEIGHTS, st.lists(st.integers(0, 500), min_size=5, max_size=5))
def test_the_longest_file_is_found_for_devices_of_any_size(weights: list[float], sizes: list[int]) -> None:
    layout = StripeLayout(weights, 3)
    nbytes = layout.nbytes(sizes[: len(weights)])
    assert all(need <= size for need, size in zip(layout.sizes(nbytes), sizes, strict=False))
    assert any(need > size for need, size in zip(layout.sizes(nbytes + 1), sizes, strict=False))


@given(WEIGHTS)
def test_stripes_stand_in_proportion_to_the_weights(weights: list[float]) -> None:
    counts = StripeLayout(weights, 1).counts
    assert sum(counts) <= 64 + len(weights)
    for count, weight in zip(counts, weights, strict=True):
        share = weight / sum(weights)
        assert abs(count / sum(counts) - share) <= len(weights) / 64  # one stripe each, however light


def test_simple_proportions_have_short_rounds() -> None:
    assert StripeLayout([3.6, 1.2], 1).counts == [3, 1]
    assert StripeLayout([5.0] * 4, 1).counts == [1, 1, 1, 1]
    assert [device for device, _, _ in StripeLayout([2, 1, 1], 1).pieces(0, 4)] == [0, 1, 2, 0]


@pytest.mark.parametrize("weights", [[], [1, 0], [1, -1], [float("inf"), 1], [float("nan")]])
def test_weights_are_checked(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="positive"):
        StripeLayout(weights, 1)


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="at least one"):
        StripedDevice([])
    device = MemoryDevice(SimulatedDisk(), 0)
    with pytest.raises(ValueError, match="one weight"):
        StripedDevice([device], [1, 2])
    with pytest.raises(ValueError, match="alignment"):
        StripedDevice([device], stripe_nbytes=1000)


def striped(
    *, capacity_nbytes: int = 4 * MiB, wrap: Callable[[MemoryDevice], object] = lambda device: device
) -> StripedDevice:
    disk = SimulatedDisk(capacity_nbytes=capacity_nbytes)
    devices = [wrap(MemoryDevice(disk, index)) for index in range(3)]
    return StripedDevice(devices, [2, 1, 1], stripe_nbytes=8 * KiB)  # type: ignore[arg-type]


def test_an_operation_across_borders_completes_once_when_all_parts_have(buffer: Buffer) -> None:
    device = striped(wrap=lambda upstream: FaultsDevice(upstream, [Fault("write", FaultKind.HOLD)]))
    device.grow(0, 256 * KiB)
    batch = Batch(device)
    device.submit([batch.operation("write", buffer.memory, 4096)])
    for index, upstream in enumerate(device.devices):
        assert isinstance(upstream, FaultsDevice) and upstream.wait_until_held(1, WAIT_S)
        assert batch.done.empty() and device.statistics().num_in_flight == 1
        upstream.release()
        assert batch.done.empty() or index == 2
    assert batch.wait(1)[0].error is None and batch.done.empty()
    assert device.statistics().num_writes == 1 and device.statistics().write_bytes == 64 * KiB
    device.close()


def test_bytes_survive_with_odd_offsets_and_reopening(tmp_path: Path, buffer: Buffer) -> None:
    def opener() -> StripedDevice:
        return StripedDevice(
            [ThreadsDevice(tmp_path / name, num_threads=1) for name in ("a", "b", "c")],
            [1, 2, 1],
            stripe_nbytes=12 * KiB,
        )

    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
    device = opener()
    device.grow(0, 300 * KiB)
    content = fill(buffer, 7)
    assert move(device, "write", buffer, 20 * KiB) is None
    device.flush()
    device.close()
    device = opener()
    assert device.files() == {0: 300 * KiB}
    buffer.memory[:] = bytes(64 * KiB)
    assert move(device, "read", buffer, 20 * KiB) is None and bytes(buffer.memory) == content
    assert sum((tmp_path / name / "data-000").stat().st_size for name in ("a", "b", "c")) == 300 * KiB
    device.close()


def test_bytes_are_dealt_out_by_weight(buffer: Buffer) -> None:
    device = striped(wrap=CountingDevice)
    device.grow(0, 1 * MiB)
    for offset in range(0, 1 * MiB, 64 * KiB):
        assert move(device, "write", buffer, offset) is None
    assert [upstream.statistics().write_bytes for upstream in device.devices] == [512 * KiB, 256 * KiB, 256 * KiB]
    device.close()


def test_the_first_error_of_the_parts_is_the_operations(buffer: Buffer) -> None:
    device = striped(wrap=FaultsDevice)
    device.grow(0, 256 * KiB)
    upstream = device.devices[1]
    assert isinstance(upstream, FaultsDevice)
    upstream.inject(Fault("read"))
    error = move(device, "read", buffer)
    assert isinstance(error, DeviceError) and upstream.path(0) in str(error)
    assert device.statistics().num_reads == 0 and device.statistics().num_in_flight == 0
    upstream.close()
    assert isinstance(move(device, "read", buffer), ClosedError)
    device.close()


def test_growth_without_room_changes_no_device() -> None:
    device = striped(capacity_nbytes=1 * MiB)
    assert device.free_bytes() == 2 * MiB  # half of it on the first
    device.grow(0, 1 * MiB)
    with pytest.raises(CapacityError, match="memory:0 needs"):
        device.grow(0, 3 * MiB)
    assert device.files() == {0: 1 * MiB} and device.statistics().file_bytes == 1 * MiB
    device.grow(0, 2 * MiB)
    device.close()


def test_growth_that_fails_in_the_middle_leaves_the_size(buffer: Buffer) -> None:
    device = striped(wrap=FaultsDevice)
    device.grow(0, 64 * KiB)
    upstream = device.devices[1]
    assert isinstance(upstream, FaultsDevice)
    upstream.inject(Fault("grow"))
    with pytest.raises(DeviceError):
        device.grow(0, 1 * MiB)
    assert device.files() == {0: 64 * KiB}
    assert isinstance(move(device, "write", buffer, 64 * KiB), DeviceError)
    device.grow(0, 1 * MiB)
    assert move(device, "write", buffer, 64 * KiB) is None
    device.close()


def test_all_devices_are_flushed_and_the_first_error_wins() -> None:
    device = striped(wrap=FaultsDevice)
    device.grow(0, 64 * KiB)
    device.flush()
    upstream = device.devices[2]
    assert isinstance(upstream, FaultsDevice)
    upstream.inject(Fault("flush"))
    for _ in range(2):
        with pytest.raises(DeviceError, match="memory:2"):
            device.flush()
    assert [upstream.statistics().num_flushes for upstream in device.devices] == [3, 3, 1]
    assert device.statistics().num_flushes == 1
    device.close()


def test_every_device_is_closed_whatever_happens() -> None:
    class Stubborn(MemoryDevice):
        def close(self) -> None:
            super().close()
            raise DeviceError("no")

    disk = SimulatedDisk()
    devices = [Stubborn(disk, 0), MemoryDevice(disk, 1)]
    device = StripedDevice(devices)
    device.grow(SCRATCH, 64 * KiB)
    with pytest.raises(DeviceError, match="no"):
        device.close()
    for upstream in devices:
        with pytest.raises(ClosedError):
            upstream.flush()

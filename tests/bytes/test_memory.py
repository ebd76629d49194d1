"""A simulated disk keeps what was flushed, and may lose any part of the rest."""

import random
from collections.abc import Iterator

import pytest

from tests.bytes.moving import move
from tests.devices.simulated_disk import SimulatedDisk
from tiered.bytes.arena import Arena, Buffer
from tiered.bytes.device.base import SCRATCH
from tiered.bytes.device.memory import MemoryDevice
from tiered.errors import CapacityError, DeviceError
from tiered.units import KiB

PAGE = 4096
POLICIES = ("drop", "keep", "subset", "torn", "torn pages")


@pytest.fixture
def page(arena: Arena) -> Iterator[Buffer]:
    buffer = arena.allocate_nowait(PAGE)
    assert buffer is not None
    yield buffer
    arena.release(buffer)


def write(device: MemoryDevice, page: Buffer, byte: bytes, offset: int = 0, file: int = 0) -> Exception | None:
    page.memory[:] = byte * PAGE
    return move(device, "write", page, offset, file=file)


def flushed_then_written(page: Buffer, num_pages: int = 8) -> SimulatedDisk:
    """Return a disk of ``a`` pages that were flushed, each overwritten by ``b`` since."""
    disk = SimulatedDisk()
    device = MemoryDevice(disk, 0)
    device.grow(0, num_pages * PAGE)
    for byte in (b"a", b"b"):
        for index in range(num_pages):
            assert write(device, page, byte, index * PAGE) is None
        if byte == b"a":
            device.flush()
    assert disk.num_unsynced == num_pages
    return disk


@pytest.mark.parametrize(("policy", "byte"), [("drop", b"a"), ("keep", b"b")])
def test_a_power_cut_drops_or_keeps_what_was_not_flushed(page: Buffer, policy: str, byte: bytes) -> None:
    disk = flushed_then_written(page)
    survivor = disk.power_cut(random.Random(0), policy)
    assert survivor.image(0, 0) == byte * 8 * PAGE
    assert survivor.num_unsynced == survivor.num_operations == 0


def test_a_subset_keeps_whole_writes_and_torn_keeps_sectors(page: Buffer) -> None:
    seen = {"subset": set[bytes](), "torn": set[bytes](), "torn pages": set[bytes]()}
    for seed in range(20):
        for policy, blocks in seen.items():
            image = flushed_then_written(page).power_cut(random.Random(seed), policy).image(0, 0)
            blocks |= {bytes(image[start : start + PAGE]) for start in range(0, len(image), PAGE)}
    whole = {b"a" * PAGE, b"b" * PAGE}
    assert seen["subset"] == seen["torn pages"] == whole
    torn = seen["torn"] - whole
    assert torn and whole < seen["torn"]
    for block in torn:
        assert {block[start : start + 512] for start in range(0, PAGE, 512)} == {b"a" * 512, b"b" * 512}


@pytest.mark.parametrize("policy", POLICIES)
def test_growth_and_new_files_are_durable_only_after_a_flush(page: Buffer, policy: str) -> None:
    disk = SimulatedDisk()
    device = MemoryDevice(disk, 0)
    device.grow(0, PAGE)
    device.flush()
    device.grow(0, 4 * PAGE)
    device.grow(1, PAGE)
    assert write(device, page, b"n", 3 * PAGE) is None
    sizes = set[tuple[int, int]]()
    for seed in range(100):
        sizes |= set(MemoryDevice(disk.power_cut(random.Random(seed), policy), 0).files().items())
    old, new = {(0, PAGE)}, {(0, 4 * PAGE), (1, PAGE)}
    made = {(1, 0)}  # and not yet grown
    expected = {"drop": old, "keep": new, "subset": old | new}
    if policy in expected:
        assert sizes == expected[policy]
    else:
        assert old | new | made < sizes, "a growth may have come to any part of it"
        assert all(nbytes in range(PAGE * (file == 0), PAGE * (4 if file == 0 else 1) + 1) for file, nbytes in sizes)


def test_scratch_never_survives(page: Buffer) -> None:
    disk = SimulatedDisk()
    device = MemoryDevice(disk, 0)
    device.grow(SCRATCH, PAGE)
    assert write(device, page, b"s", file=SCRATCH) is None
    device.flush()
    assert disk.num_unsynced == 0
    assert MemoryDevice(disk.power_cut(random.Random(0), "keep"), 0).files() == {}


def test_after_a_failed_flush_every_flush_fails(page: Buffer) -> None:
    disk = SimulatedDisk()
    device = MemoryDevice(disk, 0)
    device.grow(0, PAGE)
    disk.fail_next("flush", DeviceError("scripted"))
    for message in ("scripted", "earlier flush"):
        with pytest.raises(DeviceError, match=message):
            device.flush()
    assert MemoryDevice(disk.power_cut(random.Random(0), "drop"), 0).files() == {}


def test_growth_beyond_the_capacity_is_refused() -> None:
    device = MemoryDevice(SimulatedDisk(capacity_nbytes=64 * KiB), 0)
    device.grow(0, 40 * KiB)
    assert device.free_bytes() == 24 * KiB
    with pytest.raises(CapacityError, match=r"24\.0 KiB are free"):
        device.grow(1, 28 * KiB)
    assert device.files() == {0: 40 * KiB}


def test_an_unaligned_operation_is_an_assertion(page: Buffer) -> None:
    device = MemoryDevice(SimulatedDisk(), 0)
    device.grow(0, PAGE)
    with pytest.raises(AssertionError, match="unaligned"):
        move(device, "read", page, 512)

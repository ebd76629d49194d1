"""A simulated disk keeps what was flushed, and may lose any part of the rest."""

import random
from collections.abc import Iterator

import pytest

from tests.bytes.moving import move
from tests.devices.simulated_disk import PowerCutError, SimulatedDisk
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


def test_a_write_of_several_pages_may_be_torn_between_them(arena: Arena) -> None:
    buffer = arena.allocate_nowait(4 * PAGE)
    assert buffer is not None
    buffer.memory[:] = b"b" * 4 * PAGE
    disk = SimulatedDisk()
    device = MemoryDevice(disk, 0)
    device.grow(0, 4 * PAGE)
    device.flush()
    assert move(device, "write", buffer, file=0) is None
    arena.release(buffer)
    images = [bytes(disk.moment().survivor(random.Random(seed), "torn pages").image(0, 0)) for seed in range(20)]
    pages = {tuple(image[start : start + PAGE] for start in range(0, 4 * PAGE, PAGE)) for image in images}
    assert {page for image in pages for page in image} == {bytes(PAGE), b"b" * PAGE}
    assert len(pages) > 2  # not only all and nothing


def test_a_watcher_sees_each_operation_before_it_happens(page: Buffer) -> None:
    disk = SimulatedDisk()
    moments = []
    disk.watch = moments.append
    run_script(disk, page)
    moments.append(disk.moment())
    assert [moment.number for moment in moments] == [0, 1, 2, 3, 4]
    rng = random.Random(0)
    kept, dropped = ([moment.survivor(rng, policy) for moment in moments] for policy in ("keep", "drop"))
    assert [MemoryDevice(disk, 0).files() for disk in kept] == [{0: PAGE}] * 5  # what it hit may have happened
    assert [MemoryDevice(disk, 0).files() for disk in dropped] == [{}] * 3 + [{0: PAGE}] * 2
    assert [disk.load("catalog") for disk in kept] == [None] * 3 + [1] * 2
    assert [disk.load("catalog") for disk in dropped] == [None] * 4 + [1]


def test_a_failed_flush_forgets_no_growth(page: Buffer) -> None:
    disk = SimulatedDisk()
    device = MemoryDevice(disk, 0)
    device.grow(0, 8192)
    disk.fail_next("flush", DeviceError("scripted"))
    with pytest.raises(DeviceError):
        device.flush()
    again = MemoryDevice(disk, 0)
    page.memory[:] = b"c" * 4096
    assert move(again, "write", page, 4096) is None
    again.flush()
    assert bytes(disk.power_cut(random.Random(0), "drop").image(0, 0)) == bytes(4096) + b"c" * 4096


def test_what_a_failed_flush_was_to_cover_may_be_lost_after_a_flush_that_succeeds(page: Buffer) -> None:
    disk = SimulatedDisk()
    MemoryDevice(disk, 0).grow(0, 2 * PAGE)
    MemoryDevice(disk, 0).flush()
    for offset in (0, PAGE):
        assert write(MemoryDevice(disk, 0), page, b"x", offset) is None
    disk.fail_next("flush", DeviceError("scripted"))
    with pytest.raises(DeviceError, match="scripted"):
        MemoryDevice(disk, 0).flush()
    assert write(MemoryDevice(disk, 0), page, b"y", PAGE) is None
    MemoryDevice(disk, 0).flush()  # another one: it does not know of the failure
    images = {bytes(disk.moment().survivor(random.Random(seed), "subset").image(0, 0)) for seed in range(20)}
    assert images == {bytes(PAGE) + b"y" * PAGE, b"x" * PAGE + b"y" * PAGE}


def test_a_survivor_is_the_same_for_the_same_seed_and_the_dead_disk_is_dead(page: Buffer) -> None:
    images = [flushed_then_written(page).power_cut(random.Random(5), "torn").image(0, 0) for _ in range(2)]
    assert images[0] == images[1]
    disk = flushed_then_written(page)
    disk.power_cut(random.Random(0), "drop")
    assert isinstance(move(MemoryDevice(disk, 0), "read", page), PowerCutError)
    with pytest.raises(PowerCutError):
        disk.load("catalog")


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
    for seed in range(10):
        survivor = disk.power_cut(random.Random(seed), policy)
        sizes |= set(MemoryDevice(survivor, 0).files().items())
        assert len(survivor.image(0, 0)) in (PAGE, 4 * PAGE)
    old, new = {(0, PAGE)}, {(0, 4 * PAGE), (1, PAGE)}
    assert sizes == {"drop": old, "keep": new}.get(policy, old | new)


def test_a_flush_covers_its_own_device_only(page: Buffer) -> None:
    disk = SimulatedDisk()
    devices = [MemoryDevice(disk, index) for index in range(2)]
    for device in devices:
        device.grow(0, PAGE)
        assert write(device, page, b"x") is None
    devices[0].flush()
    survivor = disk.power_cut(random.Random(0), "drop")
    assert [MemoryDevice(survivor, index).files() for index in range(2)] == [{0: PAGE}, {}]


def test_scratch_never_survives(page: Buffer) -> None:
    disk = SimulatedDisk()
    device = MemoryDevice(disk, 0)
    device.grow(SCRATCH, PAGE)
    assert write(device, page, b"s", file=SCRATCH) is None
    device.flush()
    assert disk.num_unsynced == 0
    assert MemoryDevice(disk.power_cut(random.Random(0), "keep"), 0).files() == {}


def run_script(disk: SimulatedDisk, page: Buffer) -> list[str]:
    """Do one of each counted operation; return what was acknowledged."""
    device, acknowledged = MemoryDevice(disk, 0), list[str]()
    try:
        device.grow(0, PAGE)
        acknowledged.append("grow")
        error = write(device, page, b"w")
        if error is not None:
            raise error
        acknowledged.append("write")
        device.flush()
        acknowledged.append("flush")
        disk.transact("catalog", 1)
        acknowledged.append("transact")
    except PowerCutError:
        pass
    return acknowledged


def test_a_crash_can_be_put_at_each_operation(page: Buffer) -> None:
    rehearsal = SimulatedDisk()
    steps = run_script(rehearsal, page)
    assert rehearsal.num_operations == len(steps) == 4
    for crash_at in range(4):
        for policy in POLICIES:
            disk = SimulatedDisk()
            disk.crash_at = crash_at
            acknowledged = run_script(disk, page)
            assert acknowledged == steps[:crash_at]
            survivor = disk.power_cut(random.Random(crash_at), policy)
            if "flush" in acknowledged:
                assert survivor.image(0, 0) == b"w" * PAGE
            if policy == "drop":
                assert MemoryDevice(survivor, 0).files() == ({0: PAGE} if "flush" in acknowledged else {})
            if policy == "keep" and crash_at == 1:  # the write that the cut hit happened
                assert survivor.image(0, 0) == b"w" * PAGE


def test_a_transaction_hit_by_the_crash_is_old_or_new() -> None:
    values = set[object]()
    for seed in range(20):
        disk = SimulatedDisk()
        disk.transact("catalog", "old")
        disk.crash_at = 1
        with pytest.raises(PowerCutError, match="operation 1"):
            disk.transact("catalog", "new")
        with pytest.raises(PowerCutError):
            disk.transact("catalog", "later")
        values.add(disk.power_cut(random.Random(seed), "subset").load("catalog"))
    assert values == {"old", "new"}
    assert SimulatedDisk().load("catalog") is None


def test_a_scripted_error_hits_the_next_operation_of_its_kind(page: Buffer) -> None:
    disk = SimulatedDisk()
    device = MemoryDevice(disk, 0)
    device.grow(0, PAGE)
    broken = DeviceError("scripted")
    disk.fail_next("write", broken)
    disk.fail_next("read", broken)
    assert write(device, page, b"1") is broken
    assert move(device, "read", page) is broken
    assert move(device, "read", page) is None and bytes(page.memory) == bytes(PAGE)
    disk.fail_next("grow", CapacityError("scripted"))
    with pytest.raises(CapacityError):
        device.grow(0, 2 * PAGE)
    assert device.files() == {0: PAGE}


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


def test_a_disk_that_cannot_lose_power_logs_nothing(page: Buffer) -> None:
    disk = SimulatedDisk(can_lose_power=False)
    device = MemoryDevice(disk, 0)
    device.grow(0, PAGE)
    assert write(device, page, b"x") is None
    assert disk.num_unsynced == 0 and disk.image(0, 0) == b"x" * PAGE

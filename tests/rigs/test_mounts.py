"""File systems that are not as a store would like them: read-only, of 4,096-byte sectors, an overlay, in memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.rigs.available import needs
from tests.rigs.room import Room, run
from tests.store.rig import numbers
from tiered.bytes.device.engines import probe_uring
from tiered.errors import CapacityError, DeviceError
from tiered.store.store import Store
from tiered.units import MiB

DRAM = "16MiB"


def on_4kn(room: Room, mount: Path) -> None:
    """ext4 on a loop device with sectors of 4,096 bytes, which refuses smaller direct transfers."""
    image = room.directory / "4kn.image"
    with open(image, "wb") as file:
        file.truncate(160 * MiB)
    device = run("losetup", "--find", "--show", "--sector-size", "4096", str(image))
    try:
        run("mkfs.ext4", "-q", "-F", "-E", "nodiscard", device)
        run("mount", "-o", "noatime", device, str(mount))
    finally:
        run("losetup", "-d", device)  # goes with the mount


def on_overlay(room: Room, mount: Path) -> None:
    """An overlay, as a container's layers are."""
    on_tmpfs(room, room.directory / "layers")
    parts = {name: room.directory / "layers" / name for name in ("lower", "upper", "work")}
    for part in parts.values():
        part.mkdir()
    options = ",".join(f"{name}dir={part}" for name, part in parts.items())
    run("mount", "-t", "overlay", "overlay", "-o", options, str(mount))


def on_tmpfs(room: Room, mount: Path) -> None:
    """In memory: no direct I/O on most kernels."""
    mount.mkdir(exist_ok=True)
    run("mount", "-t", "tmpfs", "-o", "size=192M,mode=0755", "tmpfs", str(mount))


@needs("ext4 shutdown")
@pytest.mark.parametrize("engine", ["auto", "threads"])
@pytest.mark.parametrize("make", [on_4kn, on_overlay, on_tmpfs])
def test_a_store_works_on(make, engine: str, a_room: Room) -> None:  # type: ignore[no-untyped-def]  # of the above
    mount = a_room.directory / "mount"
    mount.mkdir()
    make(a_room, mount)
    with Store(mount / "run", dram=DRAM, engine=engine) as store:
        store.put_many({"a": numbers(5 * MiB + 777), "b": numbers(3000, 1), "c": numbers(10, 2)})
        store.commit()
    with Store(mount / "run", dram=DRAM, engine=engine) as store:
        assert torch.equal(store["a"], numbers(5 * MiB + 777)) and torch.equal(store["b"], numbers(3000, 1))
        assert store.verify().is_clean


@needs("ext4 shutdown")
@pytest.mark.parametrize("engine", ["auto", "threads"])
def test_a_read_only_file_system_can_be_read_and_refuses_the_rest(engine: str, a_room: Room) -> None:
    mount = a_room.directory / "mount"
    on_tmpfs(a_room, mount)
    with Store(mount / "run", dram=DRAM, engine="threads") as store:  # a ring lets go of its files a little later
        store["a"] = numbers(5 * MiB)
        store.commit()
    run("mount", "-o", "remount,ro", str(mount))
    with pytest.raises(DeviceError, match="Read-only file system"):
        Store(mount / "run", dram=DRAM, engine=engine)
    with pytest.raises(DeviceError, match="Read-only file system"):
        Store(mount / "new", dram=DRAM, engine=engine)
    with Store(mount / "run", dram=DRAM, engine=engine, mode="r") as store:
        assert torch.equal(store["a"], numbers(5 * MiB)) and store.verify().is_clean
    run("mount", "-o", "remount,rw", str(mount))
    with Store(mount / "run", dram=DRAM, engine=engine) as store:
        store["b"] = numbers(5 * MiB, 1)
        store.commit()
        assert store.verify().is_clean


@needs("ext4 shutdown")
def test_a_full_file_system_is_not_called_a_refusal_of_io_uring(a_room: Room) -> None:
    mount = a_room.directory / "mount"
    mount.mkdir()
    run("mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(mount))
    (mount / "balloon").write_bytes(bytes(64 << 10))
    refusal = probe_uring(mount)
    assert refusal is not None and "No space left" in refusal and "refused" not in refusal


@needs("ext4 shutdown")
@pytest.mark.parametrize("engine", ["auto", "threads"])
def test_a_full_file_system_can_be_read(engine: str, a_room: Room) -> None:
    mount = a_room.directory / "mount"
    mount.mkdir()
    run("mount", "-t", "tmpfs", "-o", "size=300k,mode=0755", "tmpfs", str(mount))
    with Store(mount / "run", dram=DRAM, engine="threads") as store:
        store["a"] = numbers(800)
    with pytest.raises(OSError, match="No space left"), open(mount / "balloon", "wb", 0) as balloon:
        while balloon.write(bytes(4096)):
            pass
    for mode in ("r", "a"):
        with Store(mount / "run", dram=DRAM, engine=engine, mode=mode) as store:
            assert torch.equal(store["a"], numbers(800))
    with pytest.raises(CapacityError, match="free some space there"):
        Store(mount / "new", dram=DRAM, engine=engine)

"""Drives whose power can be cut under whatever runs on them.

``Shutdown`` stops a file system dead by its own ioctl: what it had not written is gone, and its journal is replayed.
``TornDrives`` are two drives that also forget what they had acknowledged and not flushed, sector by sector.
"""

from __future__ import annotations

import fcntl
import os
import random
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

from tests.rigs.room import Room, loop_mount, run, unmount

__all__ = ["RIGS", "PowerRig", "Shutdown", "TornDrives"]

_SHUTDOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN and XFS_IOC_GOINGDOWN: _IOR('X', 125, __u32)
_WITHOUT_THE_LOG = 2  # what is in memory of the log is lost too
_MAKE = {
    "ext4": ("mkfs.ext4", "-q", "-F", "-E", "nodiscard,lazy_itable_init=0,lazy_journal_init=0"),
    "xfs": ("mkfs.xfs", "-q", "-f", "-K"),
}


class PowerRig(ABC):
    """File systems to put a store on, and to cut the power of."""

    mounts: list[Path]

    @abstractmethod
    def prepare(self, rng: random.Random, num_operations: int) -> bool:
        """A job is about to run; return whether the rig itself chooses the instant of the cut."""

    @abstractmethod
    def cut(self) -> None:
        """Cut the power, unless it is cut already."""

    @abstractmethod
    def restore(self) -> int:
        """Bring the file systems back, recovered; return how many operations the drives have had, if that is known."""


class Shutdown(PowerRig):
    """One file system, "ext4" or "xfs", on a loop device over a file in ``room``."""

    def __init__(self, room: Room, kind: str) -> None:
        self._image = room.directory / f"{kind}.image"
        self.mounts = [room.directory / kind]
        _make_image(self._image, kind)
        loop_mount(self._image, self.mounts[0])

    def prepare(self, rng: random.Random, num_operations: int) -> bool:
        return False

    def cut(self) -> None:
        fd = os.open(self.mounts[0], os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(fd, _SHUTDOWN, struct.pack("I", _WITHOUT_THE_LOG))
        finally:
            os.close(fd)

    def restore(self) -> int:
        unmount(self.mounts[0])
        loop_mount(self._image, self.mounts[0])
        return 0


class TornDrives(PowerRig):
    """Two ext4 file systems on loop devices over drives with volatile caches; catalog on the first.

    Two, because on one drive the flushes of the catalog hide that the data was not flushed.
    """

    def __init__(self, room: Room) -> None:
        self._daemon = room.daemon("volatile")
        self._drives = [self._daemon.mount / name for name in ("drive0", "drive1")]
        self.mounts = [room.directory / name for name in ("mount0", "mount1")]
        for drive in self._drives:
            _make_image(self._daemon.backing / drive.name, "ext4")
        self._mount()

    def prepare(self, rng: random.Random, num_operations: int) -> bool:
        cut_at = rng.randint(1, num_operations) if num_operations else None
        sector_nbytes = rng.choice((512, 4096))
        self._daemon.call("prepare_cut", seed=rng.getrandbits(30), sector_nbytes=sector_nbytes, cut_at=cut_at)
        return cut_at is not None

    def cut(self) -> None:
        self._daemon.call("cut")

    def restore(self) -> int:
        for mount in self.mounts:
            unmount(mount)
        num_operations = int(self._daemon.call("power_on")["operations"])
        self._mount()
        return num_operations

    def _mount(self) -> None:
        for drive, mount in zip(self._drives, self.mounts, strict=True):
            loop_mount(drive, mount)


def _make_image(image: Path, kind: str) -> None:
    with open(image, "wb") as file:
        file.truncate((320 if kind == "xfs" else 96) << 20)  # the smallest that mkfs.xfs makes is 300 MiB
    run(*_MAKE[kind], str(image))


RIGS: dict[str, tuple[str, Callable[[Room], PowerRig]]] = {
    "shutdown-ext4": ("ext4 shutdown", lambda room: Shutdown(room, "ext4")),
    "shutdown-xfs": ("xfs shutdown", lambda room: Shutdown(room, "xfs")),
    "torn": ("torn drives", TornDrives),
}
"""By the campaign's name: the rig as available.py calls it, and how it is made."""

"""The machine description: true where it can be checked, complete on machines made of files, and never in the way."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import resource
from pathlib import Path

import psutil
import pytest
import torch

import tiered
from tiered.bytes import kernel_file
from tiered.bytes.device.mount import Mount, find_mount, mounts
from tiered.tools.doctor.description import find_block_device, machine_description


def plant(root: Path, files: dict[str, str]) -> Path:
    """Make ``files`` under ``root``: the machine that a test is about."""
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{content}\n")
    return root


class TestThisMachine:
    """What other ways of asking say too."""

    def test_the_machine(self) -> None:
        description = machine_description()
        assert description.kernel == platform.release()
        assert description.ram_nbytes == psutil.virtual_memory().total
        assert description.num_cores == len(os.sched_getaffinity(0))
        assert description.python_version == platform.python_version()
        assert (description.tiered_version, description.torch_version) == (tiered.__version__, torch.__version__)
        assert description.num_open_files == resource.getrlimit(resource.RLIMIT_NOFILE)[0]

    def test_a_directory(self, tmp_path: Path) -> None:
        (description,) = machine_description([tmp_path]).directories
        assert description.path == str(tmp_path.resolve())
        assert description.mount is not None
        partitions = {each.mountpoint: each.fstype for each in psutil.disk_partitions(all=True)}
        assert partitions[description.mount.mount_point] == description.mount.file_system
        assert description.total_nbytes == psutil.disk_usage(str(tmp_path)).total
        assert (description.direct_alignment is None) == (description.direct_refusal is not None)
        assert not os.listdir(tmp_path), "the trial left something behind"

    def test_tmpfs_is_memory(self) -> None:
        (description,) = machine_description(["/dev/shm"]).directories
        assert (description.kind, description.block_device) == ("memory", None)

    @pytest.mark.parametrize("place", ["/nowhere/at/all", "/proc", "/sys", "/dev/null", "\0", "x" * 5000])
    def test_no_place_is_an_error(self, place: str) -> None:
        description = machine_description([place])
        assert description.directories[0].direct_alignment is None
        assert "could not be tried: " in "\n".join(description.lines())
        json.dumps(dataclasses.asdict(description))

    def test_for_people(self, tmp_path: Path) -> None:
        description = machine_description([tmp_path, "/dev/shm"])
        said = "\n".join(description.lines())
        for expected in (platform.release(), torch.__version__, str(tmp_path), "tmpfs", "nr_requests", "memlock"):
            assert expected in said


DISK = {
    "size": "2048",
    "queue/rotational": "0",
    "queue/scheduler": "[none] mq-deadline kyber",
    "queue/nr_requests": "1023",
    "queue/max_sectors_kb": "128",
    "queue/logical_block_size": "512",
    "queue/write_cache": "write back",
}


def mount_of(*device: int, source: str = "none") -> Mount:
    return Mount("/drive", "/", "ext4", source, "rw", (device[0], device[1]))


class TestBlockDevices:
    """Machines made of files, as /sys shows them."""

    def test_a_partition_of_an_nvme_drive(self, tmp_path: Path) -> None:
        disk = tmp_path / "devices/pci0000:00/nvme/nvme0/nvme0n1"
        plant(disk, DISK | {"nvme0n1p1/partition": "1", "nvme0n1p1/size": "1024"})
        plant(disk.parent, {"model": "Samsung SSD 990", "hwmon3/temp1_input": "41850"})
        (disk / "device").symlink_to("..")
        (tmp_path / "dev/block").mkdir(parents=True)
        (tmp_path / "dev/block/259:1").symlink_to(disk / "nvme0n1p1")
        found = find_block_device(mount_of(259, 1), tmp_path)
        assert found is not None
        assert (found.name, found.model) == ("nvme0n1", "Samsung SSD 990")
        assert (found.is_rotational, found.scheduler, found.logical_block_nbytes) == (False, "none", 512)
        assert (found.nr_requests, found.max_sectors_kb, found.temperature_c) == (1023, 128, 41.85)
        assert (found.parts, found.disks) == ((), ("nvme0n1",))
        assert "temperature 42 C" in found.line()

    def test_what_is_made_of_others_names_the_disks(self, tmp_path: Path) -> None:
        """dm-0 (encrypted) on md0 (RAID 0) on a partition of each of two drives."""
        for name in ("nvme0n1", "nvme1n1"):
            plant(tmp_path / "devices" / name, DISK | {f"{name}p1/partition": "1"})
        for name, parts in (("md0", ("nvme0n1/nvme0n1p1", "nvme1n1/nvme1n1p1")), ("dm-0", ("md0",))):
            plant(tmp_path / "devices" / name, DISK | {"slaves/.keep": "", "dm/name": "secret"})
            (tmp_path / "devices" / name / "slaves/.keep").unlink()
            for part in parts:
                (tmp_path / "devices" / name / "slaves" / Path(part).name).symlink_to(tmp_path / "devices" / part)
        (tmp_path / "dev/block").mkdir(parents=True)
        (tmp_path / "dev/block/252:0").symlink_to(tmp_path / "devices/dm-0")
        found = find_block_device(mount_of(252, 0), tmp_path)
        assert found is not None
        assert (found.name, found.model) == ("dm-0", "secret")
        assert found.disks == ("nvme0n1", "nvme1n1")
        assert "made of nvme0n1, nvme1n1" in found.line()

    def test_what_says_nothing_is_not_readable(self, tmp_path: Path) -> None:
        (tmp_path / "dev/block/8:0").mkdir(parents=True)
        (tmp_path / "dev/block/8:0/queue").mkdir()
        (tmp_path / "dev/block/8:0/queue/nr_requests").write_text("many")
        found = find_block_device(mount_of(8, 0), tmp_path)
        assert found is not None
        assert found.nr_requests is found.temperature_c is found.is_rotational is None
        assert found.line().count("not readable") == 8
        assert find_block_device(mount_of(0, 50), tmp_path) is None

    def test_members_in_a_circle_come_to_an_end(self, tmp_path: Path) -> None:
        place = tmp_path / "dev/block/9:0"
        (place / "slaves").mkdir(parents=True)
        (place / "slaves/self").symlink_to(place)
        assert find_block_device(mount_of(9, 0), tmp_path) is not None


class TestMounts:
    """/proc/self/mountinfo."""

    LINES = (
        "36 35 98:0 /sub /mnt/two\\040words rw,noatime shared:1 master:2 - xfs /dev/sdb1 rw,noatime,attr2\n"
        "37 35 0:50 / /net rw - nfs4 server:/export rw,vers=4.2\n"
        "38 35 0:51 / /merged rw - overlay overlay rw,lowerdir=/a\n"
        "39 35 0:52 / /remote rw - fuse.sshfs me@host: rw\n"
        "40 35 0:53 / /ntfs rw - fuseblk /dev/sdc1 rw\n"
        "nonsense\n41 35 zero / /bad rw - ext4 none rw\n"
    )

    def test_lines_are_understood(self, tmp_path: Path) -> None:
        found = mounts(plant(tmp_path, {"mountinfo": self.LINES}))
        assert found[36] == Mount("/mnt/two words", "/sub", "xfs", "/dev/sdb1", "rw,noatime,attr2", (98, 0))
        assert [found[number].kind for number in (36, 37, 38, 39, 40)] == [
            "local",
            "network",
            "overlay",
            "network",
            "fuse",
        ]
        assert 41 not in found

    def test_a_directory_is_found_on_its_mount(self) -> None:
        mount = find_mount("/dev/shm")
        assert mount is not None
        assert (mount.mount_point, mount.file_system) == ("/dev/shm", "tmpfs")
        assert find_mount("/nowhere") is None


def test_the_kernels_files(tmp_path: Path) -> None:
    plant(tmp_path, {"a": "always [madvise] never", "b": "mq-deadline", "c": " 12 ", "d": "", "e": "12 kB"})
    assert [kernel_file.choice(tmp_path / name) for name in "abdx"] == ["madvise", "mq-deadline", None, None]
    assert [kernel_file.number(tmp_path / name) for name in "acdex"] == [None, 12, None, None, None]
    (tmp_path / "f").write_bytes(b"\xff\xfe")
    assert kernel_file.text(tmp_path / "f") == "\ufffd\ufffd"
    assert kernel_file.text(tmp_path) is None

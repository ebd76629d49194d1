"""The memory that a process may take: what the machine has left, and what the control groups above it allow."""

from pathlib import Path

import pytest

from tiered.bytes.free_memory import free_memory, memory_limit, memory_size
from tiered.units import GiB, MiB


@pytest.fixture
def groups(tmp_path: Path) -> Path:
    """Return a /sys/fs/cgroup without groups."""
    (tmp_path / "cgroup").mkdir()
    return tmp_path / "cgroup"


@pytest.fixture(autouse=True)
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a /proc in which 8 GiB are available; it is psutil's."""
    figures = dict(MemTotal=16 << 20, MemFree=1 << 20, MemAvailable=8 << 20, Buffers=0, Cached=0)
    lines = [f"{name}: {kib} kB" for name, kib in (figures | dict(Shmem=0, Active=0, Inactive=0)).items()]
    write(tmp_path / "proc" / "meminfo", *lines)
    monkeypatch.setattr("psutil.PROCFS_PATH", str(tmp_path / "proc"))
    return tmp_path / "proc"


def write(path: Path, *lines: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))


def test_without_control_groups_it_is_what_is_available(groups: Path) -> None:
    assert free_memory(groups) == 8 * GiB
    assert memory_size(groups) == 16 * GiB


def test_the_tightest_group_decides_and_page_cache_counts_as_free(proc: Path, groups: Path) -> None:
    write(proc / "self" / "cgroup", "0::/outer/inner")
    for path, limit in (("outer", str(6 * GiB)), ("outer/inner", "max")):
        write(groups / path / "memory.max", limit)
        write(groups / path / "memory.current", str(5 * GiB))
        write(groups / path / "memory.stat", "anon 1", f"inactive_file {512 * MiB}")
    assert free_memory(groups) == GiB + 512 * MiB
    assert memory_limit(groups) == memory_size(groups) == 6 * GiB


def test_groups_of_version_1(proc: Path, groups: Path) -> None:
    write(proc / "self" / "cgroup", "4:memory:/job", "1:cpu:/")
    write(groups / "memory" / "memory.limit_in_bytes", str((1 << 63) - 4096))
    write(groups / "memory" / "job" / "memory.limit_in_bytes", str(2 * GiB))
    write(groups / "memory" / "job" / "memory.usage_in_bytes", str(3 * GiB))
    write(groups / "memory" / "job" / "memory.stat", f"total_inactive_file {512 * MiB}")
    assert free_memory(groups) == 0
    assert memory_limit(groups) == 2 * GiB


def test_groups_without_a_limit(proc: Path, groups: Path) -> None:
    write(proc / "self" / "cgroup", "0::/job")
    write(groups / "job" / "memory.max", "max")
    assert free_memory(groups) == 8 * GiB
    assert memory_limit(groups) == "unlimited"


def test_a_container_that_sees_its_own_group_only(proc: Path, groups: Path) -> None:
    write(proc / "self" / "cgroup", "0::/docker/4a")
    write(groups / "memory.max", str(4 * GiB))
    write(groups / "memory.current", str(GiB))
    assert free_memory(groups) == 3 * GiB
    assert memory_limit(groups) == 4 * GiB


def test_where_nothing_is_known_nothing_is_free(proc: Path, groups: Path) -> None:
    (proc / "meminfo").unlink()
    assert free_memory(groups) == memory_size(groups) == 0
    assert memory_limit(groups) is None

"""The memory that a process may take: what the machine has left, and what the control groups above it allow."""

from pathlib import Path

import pytest

from tiered.bytes.free_memory import free_memory, memory_limit, memory_size
from tiered.units import GiB, MiB


@pytest.fixture
def kernel(tmp_path: Path) -> tuple[Path, Path]:
    """Return a /proc in which 8 GiB are available and a /sys/fs/cgroup without groups."""
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    groups.mkdir()
    write(proc / "meminfo", f"MemTotal: {16 << 20} kB", f"MemAvailable: {8 << 20} kB")
    return proc, groups


def write(path: Path, *lines: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))


def test_without_control_groups_it_is_what_is_available(kernel: tuple[Path, Path]) -> None:
    assert free_memory(*kernel) == 8 * GiB
    assert memory_size(*kernel) == 16 * GiB


def test_the_tightest_group_decides_and_page_cache_counts_as_free(kernel: tuple[Path, Path]) -> None:
    proc, groups = kernel
    write(proc / "self" / "cgroup", "0::/outer/inner")
    for path, limit in (("outer", str(6 * GiB)), ("outer/inner", "max")):
        write(groups / path / "memory.max", limit)
        write(groups / path / "memory.current", str(5 * GiB))
        write(groups / path / "memory.stat", "anon 1", f"inactive_file {512 * MiB}")
    assert free_memory(*kernel) == GiB + 512 * MiB
    assert memory_limit(*kernel) == memory_size(*kernel) == 6 * GiB


def test_groups_of_version_1(kernel: tuple[Path, Path]) -> None:
    proc, groups = kernel
    write(proc / "self" / "cgroup", "4:memory:/job", "1:cpu:/")
    write(groups / "memory" / "memory.limit_in_bytes", str((1 << 63) - 4096))
    write(groups / "memory" / "job" / "memory.limit_in_bytes", str(2 * GiB))
    write(groups / "memory" / "job" / "memory.usage_in_bytes", str(3 * GiB))
    write(groups / "memory" / "job" / "memory.stat", f"total_inactive_file {512 * MiB}")
    assert free_memory(*kernel) == 0
    assert memory_limit(*kernel) == 2 * GiB


def test_groups_without_a_limit(kernel: tuple[Path, Path]) -> None:
    proc, groups = kernel
    write(proc / "self" / "cgroup", "0::/job")
    write(groups / "job" / "memory.max", "max")
    assert free_memory(*kernel) == 8 * GiB
    assert memory_limit(*kernel) == "unlimited"


def test_a_container_that_sees_its_own_group_only(kernel: tuple[Path, Path]) -> None:
    proc, groups = kernel
    write(proc / "self" / "cgroup", "0::/docker/4a")
    write(groups / "memory.max", str(4 * GiB))
    write(groups / "memory.current", str(GiB))
    assert free_memory(*kernel) == 3 * GiB
    assert memory_limit(*kernel) == 4 * GiB


def test_where_nothing_is_known_nothing_is_free(tmp_path: Path) -> None:
    assert free_memory(tmp_path, tmp_path) == 0
    assert memory_limit(tmp_path, tmp_path) is None

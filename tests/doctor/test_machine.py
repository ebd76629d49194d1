"""The checks of the machine, with what they look for really missing: by seccomp, by limits, by prctl."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.doctor.in_child import found_in_child
from tests.seccomp import forbid
from tiered.bytes.device.engines import probe_uring
from tiered.tools.doctor import checks
from tiered.tools.doctor.checks import (
    MACHINE,
    Finding,
    Outcome,
    check_huge_pages,
    check_io_uring,
    check_nodes,
    check_open_files,
    machine_checks,
)
from tiered.tools.doctor.description import by_drive
from tiered.tools.doctor.doctor import examine
from tiered.units import KiB

_PR_SET_THP_DISABLE = 41


def found_after(prepare: Callable[[], object], run: Callable[[], Finding]) -> Finding:
    """Return what ``run`` finds in a child of its own, after ``prepare`` has taken something away there."""

    (finding,) = found_in_child(lambda: [(prepare(), run())[1]])
    return finding


def become_somebody() -> None:
    """Give up root, whose memory is not counted against the limit on locked memory.

    A user of this process's own: the kernel counts by user, and what a closed ring had for a while longer.
    """
    if os.geteuid() == 0:
        user = 60_000 + os.getpid() % 5_000
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)


class TestThisMachine:
    """Everything is tried for real; what is found agrees with other ways of asking."""

    def test_every_check_answers(self) -> None:
        groups = machine_checks()
        found = {finding.check: finding for finding in examine(groups, 120)}
        assert list(found) == [name for _, named in groups for name in named]
        for finding in found.values():
            assert finding.subject == MACHINE and finding.found
            assert (finding.outcome is Outcome.OK) == (not finding.cost), finding
        assert found["process groups"].outcome is Outcome.OK

    def test_io_uring_is_what_the_engine_finds(self, tmp_path: Path) -> None:
        assert (check_io_uring().outcome is Outcome.OK) == (probe_uring(tmp_path) is None)


class TestIOUring:
    """Refusals, and what is said about each."""

    @pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS])
    def test_refused_by_a_container(self, number: int) -> None:
        finding = found_after(lambda: forbid(["io_uring_setup"], number), check_io_uring)
        assert finding.outcome is Outcome.SLOWER
        assert os.strerror(number) in finding.found and "seccomp" in finding.found
        assert "7 instead of 96 %" in finding.cost
        assert "--security-opt seccomp=unconfined" in finding.mend

    def test_forbidden_by_the_administrator(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        setting = tmp_path / "io_uring_disabled"
        setting.write_text("2\n")
        monkeypatch.setattr(checks, "_IO_URING_SETTING", setting)
        finding = found_after(lambda: forbid(["io_uring_setup"], errno.EPERM), check_io_uring)
        assert f"{setting} says 2" in finding.found
        assert "sysctl kernel.io_uring_disabled=0" in finding.mend

    @pytest.mark.parametrize(("number", "mend"), [(errno.ENOMEM, "ulimit -l"), (errno.EMFILE, "ulimit -n")])
    def test_short_of_something(self, number: int, mend: str) -> None:
        finding = found_after(lambda: forbid(["io_uring_setup"], number), check_io_uring)
        assert finding.outcome is Outcome.SLOWER and mend in finding.mend


class TestMemory:
    """Huge pages and locked memory."""

    def test_huge_pages_switched_off_for_the_process(self) -> None:
        def switch_off() -> None:
            arguments = [ctypes.c_ulong(value) for value in (1, 0, 0, 0)]
            assert ctypes.CDLL(None).prctl(_PR_SET_THP_DISABLE, *arguments) == 0

        finding = found_after(switch_off, check_huge_pages)
        assert finding.outcome is Outcome.SLOWER
        assert finding.found.startswith("0 B of 64.0 MiB")
        assert "reads 1.1 instead of 3.5 GB/s" in finding.cost

    def test_a_kernel_that_refuses_the_advice(self) -> None:
        finding = found_after(lambda: forbid(["madvise"], errno.EINVAL), check_huge_pages)
        setting = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
        assert (finding.outcome is Outcome.SLOWER) == ("[always]" not in setting)

    def test_a_low_limit_on_locked_memory(self) -> None:
        def lower() -> None:
            become_somebody()
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 * KiB, 64 * KiB))

        finding = found_after(lower, check_io_uring)
        assert finding.found.endswith("the limit on locked memory is 64.0 KiB")
        if "refused ring" in finding.found:  # a kernel that counts them
            assert finding.outcome is Outcome.SLOWER and "ulimit -l unlimited" in finding.mend


def test_a_low_limit_on_open_files() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    finding = found_after(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard)), check_open_files)
    assert finding.outcome is Outcome.BROKEN and "the limit is 64, " in finding.found
    assert finding.mend.startswith("ulimit -n 65536; ")


@pytest.mark.parametrize(
    ("online", "drive", "allowed", "outcome", "text"),
    [
        ("0", 0, "0", Outcome.OK, "one NUMA node"),
        ("0-1", 1, "1", Outcome.OK, "on node 1; this process's memory on node 1"),
        ("0-1", 1, "0-1", Outcome.SLOWER, "2 NUMA nodes: .* on node 1; this process's memory on nodes 0, 1"),
        ("0-1", -1, "0-1", Outcome.OK, "not known"),
    ],
)
def test_drives_of_another_node_than_the_memory_are_named(
    online: str, drive: int, allowed: str, outcome: Outcome, text: str, tmp_path: Path
) -> None:
    disk = next(each for name in by_drive([str(tmp_path)]) for each in name.split(", "))
    for file, content in {
        "devices/system/node/online": online,
        "devices/pci0/numa_node": str(drive),
        "devices/pci0/block/size": "0",
        "status": f"Cpus_allowed_list:\t0-3\nMems_allowed_list:\t{allowed}\n",
    }.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(f"{content}\n")
    (tmp_path / "class" / "block").mkdir(parents=True)
    (tmp_path / "class" / "block" / disk).symlink_to(tmp_path / "devices" / "pci0" / "block")
    finding = check_nodes([str(tmp_path)], tmp_path, tmp_path / "status")
    assert finding.outcome == outcome and re.search(text, finding.found), finding
    assert ("torchrun --numa-binding=node" in finding.mend) == (outcome == Outcome.SLOWER)

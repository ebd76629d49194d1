"""Limits that the kernel enforces on a process and its children, through cgroup v1: memory, and bytes per second."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["limited_memory", "memory_group", "throttled"]

_NAME = "tiered-test-"
_PATIENCE_S = 10.0


@contextmanager
def memory_group() -> Iterator[Path | str]:
    """Make a memory cgroup below this process's own; give its directory, or the reason why there is none."""
    with _group("memory") as group:
        yield group


@contextmanager
def limited_memory(limit_nbytes: int) -> Iterator[Path | str]:
    """Make a memory cgroup with a limit: who is over it is killed. Write a pid into its ``cgroup.procs``."""
    with _group("memory") as group:
        if isinstance(group, Path):
            (group / "memory.limit_in_bytes").write_text(str(limit_nbytes))
        yield group


@contextmanager
def throttled(path: Path, *, bytes_per_s: int) -> Iterator[Path | str]:
    """Make a blkio cgroup whose processes write to the block device under ``path`` no faster than that.

    Direct writes and what a process itself flushes are counted; what the kernel writes back for it is not.
    """
    with _group("blkio") as group:
        if isinstance(group, Path):
            device = os.stat(path).st_dev
            limit = f"{os.major(device)}:{os.minor(device)} {bytes_per_s}"
            (group / "blkio.throttle.write_bps_device").write_text(limit)
        yield group


@contextmanager
def _group(controller: str) -> Iterator[Path | str]:
    """Make a cgroup for one block, below this process's own; who is still in it at the end is killed."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    own = next((line.split(":", 2)[2] for line in lines if controller in line.split(":", 2)[1].split(",")), None)
    if own is None:
        yield f"no cgroup v1 {controller} controller"
        return
    above = Path(f"/sys/fs/cgroup/{controller}{own}")
    _sweep(above)
    group = above / f"{_NAME}{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        yield f"cannot make a {controller} cgroup: {error}"
        return
    try:
        yield group
    finally:
        _remove(group)


def _remove(group: Path) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        for pid in (group / "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        try:
            group.rmdir()
            return
        except OSError:  # what was killed is not gone yet
            if time.monotonic() > deadline:
                raise
            time.sleep(0.005)


def _sweep(above: Path) -> None:
    """Remove the groups of processes that were killed."""
    for group in above.glob(f"{_NAME}*"):
        if not os.path.exists(f"/proc/{group.name.removeprefix(_NAME)}"):
            with suppress(OSError):  # someone is in it still: the next one tries again
                group.rmdir()

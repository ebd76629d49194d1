"""Memory that this process may take: the machine's available memory, within the limits of its control groups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import psutil

from tiered.bytes import kernel_file

__all__ = ["free_memory", "memory_limit", "memory_size"]

_GROUPS = Path("/sys/fs/cgroup")
_NO_LIMIT = 1 << 60  # version 1 writes "none" as the largest number of pages, in bytes


def free_memory(groups: Path = _GROUPS) -> int:
    """Return the least, in bytes, of the kernel's available memory and the rest of each control group. 0: unknown."""
    found = _of_machine("available")
    for group in _groups(groups):
        if (limit := group.limit()) is not None:
            found.append(limit - group.used_nbytes())
    return max(0, min(found, default=0))


def memory_size(groups: Path = _GROUPS) -> int:
    """Return the bytes of memory that this process could have at most, within its control groups. 0: unknown."""
    limits = [limit for group in _groups(groups) if (limit := group.limit()) is not None]
    return min(_of_machine("total") + limits, default=0)


def memory_limit(groups: Path = _GROUPS) -> int | str | None:
    """Return the least limit of the control groups in bytes, "unlimited" if none has one, None if none is readable."""
    found = [group for group in _groups(groups) if kernel_file.text(group.directory / group.limit_name)]
    limits = [limit for group in found if (limit := group.limit()) is not None]
    return min(limits) if limits else "unlimited" if found else None


class _Group(NamedTuple):
    """One control group's directory, and how its version calls the files and the line that count memory."""

    directory: Path
    limit_name: str
    usage_name: str
    cache_name: str

    def limit(self) -> int | None:
        """Return the bytes that the group may use, None where it has no limit of its own."""
        limit = kernel_file.number(self.directory / self.limit_name)
        return limit if limit is not None and 0 <= limit < _NO_LIMIT else None

    def used_nbytes(self) -> int:
        """Return the bytes that the group uses, without the page cache that can be reclaimed."""
        used = kernel_file.number(self.directory / self.usage_name) or 0
        lines = [line.split() for line in kernel_file.lines(self.directory / "memory.stat")]
        return used - sum(int(count) for name, count in lines if name == self.cache_name and count.isdigit())


def _groups(groups: Path) -> Iterator[_Group]:
    """Yield the control groups that this process is in, from its own up to the one at the mount point.

    In a container the mount may show our own group as its root: then the others are missing, and nothing is lost.
    """
    for line in kernel_file.lines(Path(psutil.PROCFS_PATH, "self/cgroup")):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, names = groups, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top, names = groups / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        directory = top / path.strip("/")
        for place in (directory, *(parent for parent in directory.parents if parent.is_relative_to(top))):
            yield _Group(place, *names)


def _of_machine(figure: Literal["available", "total"]) -> list[int]:
    """Return a figure of the machine's memory; none where its /proc has processes alone."""
    try:
        return [getattr(psutil.virtual_memory(), figure)]
    except OSError:
        return []

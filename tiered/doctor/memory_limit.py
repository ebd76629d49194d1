"""How much memory the control group of this process may use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tiered.doctor import kernel_file
from tiered.doctor.mount import mounts

__all__ = ["Limit", "memory_limit"]

Limit = int | str | None
"""Bytes or a count; "unlimited"; None where it is not readable."""

_NO_LIMIT = 1 << 60  # version 1 writes "none" as the largest number of pages, in bytes


def memory_limit(proc: Path = Path("/proc/self")) -> Limit:
    """Return the least limit of the control group of this process and of those above it, in bytes."""
    found = [limit for directory, name in _groups(proc) for limit in _limits(*directory, name)]
    numbers = [limit for limit in found if isinstance(limit, int)]
    return min(numbers) if numbers else "unlimited" if found else None


def _groups(proc: Path) -> Iterator[tuple[tuple[Path, Path], str]]:
    """Yield ((mount point, directory of our group), name of the file with the limit) for each hierarchy."""
    ours: dict[str, str] = {}
    for line in (kernel_file.text(proc / "cgroup") or "").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        ours |= dict.fromkeys(controllers.split(","), path)
    for mount in mounts(proc).values():
        if mount.file_system == "cgroup2":
            controller, name = "", "memory.max"
        elif mount.file_system == "cgroup" and "memory" in mount.options.split(","):
            controller, name = "memory", "memory.limit_in_bytes"
        else:
            continue
        if controller in ours:
            # In a container the mount may show only our own group: then its root is a prefix of our path.
            inside = ours[controller].removeprefix(mount.root if mount.root != "/" else "")
            top = Path(mount.mount_point)
            yield (top, top / inside.strip("/")), name


def _limits(top: Path, directory: Path, name: str) -> Iterator[Limit]:
    for place in (directory, *directory.parents):
        limit = kernel_file.text(place / name)
        if limit == "max" or (limit and limit.isdigit()):
            yield int(limit) if limit != "max" and int(limit) < _NO_LIMIT else "unlimited"
        if place == top:
            return

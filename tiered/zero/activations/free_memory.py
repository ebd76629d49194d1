"""free_memory: how many bytes this process may still take before the machine or its control group is out of memory."""

from __future__ import annotations

from pathlib import Path

__all__ = ["free_memory"]

_NO_LIMIT = 1 << 60  # version 1 writes "none" as the largest number of pages, in bytes


def free_memory(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the least of what the kernel calls available and what each control group above us leaves. 0: unknown."""
    found = [_number(line.split()[1]) * 1024 for line in _lines(proc / "meminfo") if line.startswith("MemAvailable:")]
    for line in _lines(proc / "self" / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            found += _left(groups, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            found += _left(
                groups / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            )
    return max(0, min(found, default=0))


def _left(top: Path, path: str, limit: str, usage: str, reclaimable: str) -> list[int]:
    """Return what is left below the limit of each group from ``path`` up to ``top``; page cache can be reclaimed."""
    directory = top / path.strip("/")
    left = []
    for place in (directory, *(parent for parent in directory.parents if parent.is_relative_to(top))):
        most = "".join(_lines(place / limit))
        if most.isdigit() and int(most) < _NO_LIMIT:
            used = _number("".join(_lines(place / usage)))
            cache = [
                _number(line.split()[1]) for line in _lines(place / "memory.stat") if line.split()[0] == reclaimable
            ]
            left.append(int(most) - used + sum(cache))
    return left


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").splitlines()
    except OSError:
        return []


def _number(text: str) -> int:
    return int(text) if text.isdigit() else 0

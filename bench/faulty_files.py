"""A FUSE file system whose reads, writes and flushes go wrong as a script says: what a drive does to any engine.

A rule is {"call", "file", "kind", "nth", "count", "errno", "nbytes", "seconds", "at"}: from the ``nth`` call on a
``file`` (a name, or how it begins and "*") on, ``count`` calls go wrong. A call that reads or writes nothing knows only
"errno" and "delay". With "at", only reads of that byte of the file count: a bad sector. What a call does instead:

    errno      nothing: the error is returned            short      the first ``nbytes``, and says so
    lost       nothing, and says that it did             torn       the first ``nbytes``, and says that it did all
    misdirect  all of it, ``nbytes`` further on          stale      a read finds what was there before the last write
    flip       one bit in the middle changes             delay      all, after ``seconds``
"""

from __future__ import annotations

import os
import time
from collections import Counter
from typing import Any

from tests.rigs.passthrough import Passthrough

__all__ = ["FaultyFiles"]


class FaultyFiles(Passthrough):
    """The directory ``backing`` with faults."""

    def __init__(self, backing: str) -> None:
        super().__init__(backing)
        self._rules: list[dict[str, Any]] = []
        self._seen: list[int] = []  # matching calls, by rule
        self._counts: Counter[str] = Counter()
        self._hits: list[str] = []
        self._previous: dict[tuple[str, int], bytes] = {}  # what the last write to a place replaced

    # Below: commands

    def script(self, rules: list[dict[str, Any]]) -> None:
        """Replace the rules; counting starts anew."""
        with self._lock:
            self._rules, self._seen = rules, [0] * len(rules)
            self._counts.clear()
            self._hits.clear()

    def report(self) -> dict[str, Any]:
        """Return how many calls there were of each kind on each file, and which of them went wrong."""
        with self._lock:
            return {"counts": dict(self._counts), "hits": list(self._hits)}

    # Below: what goes wrong

    def before(self, call: str, name: str) -> None:
        self._rule(call, name)

    def flush(self, fd: int, name: str) -> None:
        self._rule("fsync", name)

    def pread(self, fd: int, nbytes: int, offset: int, name: str) -> bytes:
        rule = self._rule("read", name, range(offset, offset + nbytes))
        if rule is None:
            return os.pread(fd, nbytes, offset)
        kind, part = rule["kind"], rule.get("nbytes", 0)
        if kind == "misdirect":
            return os.pread(fd, nbytes, _elsewhere(fd, nbytes, offset, part)).ljust(nbytes, b"\0")
        data = os.pread(fd, nbytes, offset)
        if kind == "short":
            return data[:part]
        if kind == "stale":
            return self._previous.get((name, offset), b"").ljust(nbytes, b"\0")[:nbytes]
        return _flipped(data) if kind == "flip" else data

    def pwrite(self, fd: int, data: memoryview, offset: int, name: str) -> int:
        rule = self._rule("write", name)
        if any(rule["kind"] == "stale" for rule in self._rules):
            self._previous[name, offset] = os.pread(fd, len(data), offset)
        if rule is None:
            return os.pwrite(fd, data, offset)
        kind, part = rule["kind"], rule.get("nbytes", 0)
        if kind == "short":
            return os.pwrite(fd, data[:part], offset) if part else 0
        if kind == "torn":
            os.pwrite(fd, data[:part], offset)
        elif kind == "misdirect":
            os.pwrite(fd, data, _elsewhere(fd, len(data), offset, part))
        elif kind != "lost":
            os.pwrite(fd, _flipped(bytes(data)) if kind == "flip" else data, offset)
        return len(data)

    def _rule(self, call: str, name: str, place: range = range(0)) -> dict[str, Any] | None:
        """Count the call; raise, wait or return the rule that it falls under."""
        with self._lock:
            self._counts[f"{call} {name}"] += 1
            found = None
            for index, rule in enumerate(self._rules):
                is_there = "at" not in rule or rule["at"] in place
                if rule["call"] == call and _is_meant(rule["file"], name) and is_there:
                    number = self._seen[index] - rule.get("nth", 0)
                    self._seen[index] += 1
                    if found is None and 0 <= number < rule.get("count", 1):
                        found = rule
            if found is None:
                return None
            self._hits.append(f"{call} {name} {found['kind']}")
        if found["kind"] == "errno":
            raise OSError(found["errno"], os.strerror(found["errno"]))
        if found["kind"] == "delay":
            time.sleep(found["seconds"])
        return found


def _is_meant(file: str, name: str) -> bool:
    return name.startswith(file[:-1]) if file.endswith("*") else name == file


def _elsewhere(fd: int, nbytes: int, offset: int, distance: int) -> int:
    """Return where an access to ``offset`` lands that goes wrong by ``distance``; never beyond the end."""
    other = offset + distance
    return other if other + nbytes <= os.fstat(fd).st_size else max(0, offset - distance)


def _flipped(data: bytes) -> bytes:
    changed = bytearray(data)
    if changed:
        changed[len(changed) // 2] ^= 0x10
    return bytes(changed)

"""Leftovers: files of crashes in a store's directories, found and removed; nothing else is ever touched.

A leftover is provably ours, by its name, its kind, its owner and the files beside it, and provably of no use, by the
catalog read under the writer's lock. Everything else in the directories is spared, under any name.
"""

from __future__ import annotations

import math
import os
import re
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tiered.bytes.device.files import punch_hole
from tiered.bytes.device.profile import LINK_PROFILE_NAME, PROFILE_NAME
from tiered.bytes.private_file import fsync_directory
from tiered.errors import CorruptionError, TieredError, UsageError
from tiered.store.catalog.sqlite_catalog import SqliteCatalog
from tiered.store.lifetime.directory import CATALOG_NAME, Directories, owned_files
from tiered.store.lifetime.ledger import LEDGER_NAME
from tiered.store.space.space import LEAST_HOLE_NBYTES
from tiered.units import MiB

__all__ = ["Leftover", "Leftovers"]

_CREATION = ("identity.new", f"{CATALOG_NAME}.new", f"{CATALOG_NAME}.new-journal")
# Order: the lock last; without an identity nothing else is ours.
_UNFINISHED = (*_CREATION, LEDGER_NAME, "identity", "lock")
_DATA = re.compile(r"data-(\d{3,})")
_BENCH = re.compile(r"\.tiered-bench-[a-z0-9_]{8}")
_PROFILES = "|".join(map(re.escape, (PROFILE_NAME, LINK_PROFILE_NAME)))
# Files that live for an instant: named before their content is whole, or until they are unnamed.
_BRIEF = {
    re.compile(rf"({_PROFILES})\.[0-9a-f]{{8}}"): "a profile that was not finished",
    re.compile(r"scratch-[0-9a-f]{16}"): "scratch space of a process that is gone",
}
_BRIEF_S = 60.0  # younger ones may be in their instant now


@dataclass(frozen=True, slots=True)
class Leftover:
    """A file or directory to remove, or a data file to cut at ``end`` bytes; ``nbytes`` of space become free.

    ``holes``: ranges of a data file, each its start and end, that the file system is given back.
    """

    path: Path
    what: str
    nbytes: int
    end: int | None
    status: os.stat_result
    holes: tuple[tuple[int, int], ...] = ()

    def __str__(self) -> str:
        places = [] if self.end is None or self.end == self.status.st_size else [f"behind byte {self.end:,}"]
        places += [f"{len(self.holes)} ranges between what is in use"] if self.holes else []
        return ", ".join([f"{self.path}: {self.what}", *places])


class Leftovers:
    """The leftovers in the directories of one store, or in directories without one; locked until ``close``.

    Looking changes nothing but the locks. No link is followed. A file is spared unless it is a plain one of its owner's
    alone, with one name.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        """Look into ``paths``: all directories of one store, of a creation that was cut short, or of none.

        Raises UsageError while the store is open anywhere (it names the process), CorruptionError where catalog and
        data do not belong together, DeviceError.
        """
        self.spared: list[str] = []  # files like leftovers that are not provably ones, and why
        self.items: tuple[Leftover, ...] = ()
        self._locks: list[Directories] = []
        try:
            self.items = tuple(self._find([Path(os.path.realpath(path)) for path in paths]))
        except BaseException:
            self.close()
            raise

    @property
    def nbytes(self) -> int:
        """The bytes that removing everything frees."""
        return sum(item.nbytes for item in self.items)

    def remove(self) -> int:
        """Remove everything that was found, durably, and return the bytes that this freed; blocks.

        A file that has changed since it was found is spared. Raises OSError; files removed by then are gone.
        """
        freed = 0
        for item in self.items:
            if _is_same(item):
                freed += self._remove(item)
            else:
                self.spared.append(f"{item.path}: it changed meanwhile")
        for directory in dict.fromkeys(item.path.parent for item in self.items):
            if directory.exists():  # a bench's own went just now
                fsync_directory(directory)
        return freed

    def close(self) -> None:
        """Release the locks. Idempotent."""
        while self._locks:
            self._locks.pop().close()

    def _find(self, paths: list[Path]) -> Iterator[Leftover]:
        for path in paths:
            if not path.is_dir():
                raise UsageError(f"{path} is no directory: give the directories of a run")
        if any(os.path.lexists(path / "identity") for path in paths):
            store = Directories.open(paths, "w")
            self._locks.append(store)
            for path in store.paths:
                names = _CREATION if store.store_uuid else _UNFINISHED
                yield from self._files(path, names, "of a creation that was cut short")
            if store.store_uuid:
                yield from self._data(store)
        for path in paths:
            yield from self._brief(path)
            yield from self._benches(path)

    def _files(
        self, path: Path, names: Sequence[str], what: str, *, least_age_s: float = -math.inf
    ) -> Iterator[Leftover]:
        for name in names:
            status = self._plain(path / name)
            if status is not None and time.time() - status.st_mtime < least_age_s:
                self.spared.append(f"{path / name}: it is younger than a minute and may be in use")
            elif status is not None:
                yield Leftover(path / name, what, status.st_blocks * 512, None, status)

    def _data(self, store: Directories) -> Iterator[Leftover]:
        """Yield the data files that no row names, and the ends of others that no row reaches."""
        with closing(SqliteCatalog(store.paths[0] / CATALOG_NAME)) as catalog:
            kept = [catalog.load(generation.number)[1] for generation in catalog.kept()]
        extents = np.concatenate([rows.extents for rows in kept])
        for device, path in enumerate(store.paths):
            for name in sorted(os.listdir(path)):
                match = _DATA.fullmatch(name)
                if match is None or name != f"data-{int(match[1]):03d}":
                    continue
                own = extents[(extents["device"] == device) & (extents["file"] == int(match[1]))]
                starts = np.sort(own["offset"].astype(np.int64))
                ends = (own["offset"] + own["nbytes"]).astype(np.int64)[np.argsort(own["offset"], kind="stable")]
                yield from self._data_file(path / name, starts, np.maximum.accumulate(ends))

    def _data_file(self, path: Path, starts: np.ndarray, ends: np.ndarray) -> Iterator[Leftover]:
        """Yield the parts of the file at ``path`` between and behind the ranges that the catalog knows, in order."""
        status = self._plain(path)
        if status is None:
            return
        end = int(ends[-1]) if len(ends) else 0
        before = np.concatenate([[0], ends])[: len(starts)]  # up to where the ranges before each reach
        holes = [(a, b) for a, b in zip(before.tolist(), starts.tolist(), strict=True) if b - a >= LEAST_HOLE_NBYTES]
        in_holes = sum(b - a for a, b in holes)
        freed = max(0, status.st_blocks * 512 - (end - in_holes))  # not what was given back already
        if freed < MiB:
            holes = []
        if end > status.st_size:
            raise CorruptionError(
                f"{path} has {status.st_size:,} bytes, the catalog knows {end:,}: catalog and data do not belong "
                "together; nothing was removed",
                file=str(path),
                offset=status.st_size,
            )
        if not end:
            yield Leftover(path, "data that nothing committed is in", status.st_blocks * 512, None, status)
        elif end < status.st_size or holes:
            yield Leftover(path, "space that nothing committed uses", freed, end, status, tuple(holes))

    def _brief(self, path: Path) -> Iterator[Leftover]:
        for pattern, what in _BRIEF.items():
            names = [name for name in sorted(os.listdir(path)) if pattern.fullmatch(name)]
            yield from self._files(path, names, what, least_age_s=_BRIEF_S)

    def _benches(self, path: Path) -> Iterator[Leftover]:
        """Yield the stores that `tiered bench` was measuring when it was killed, and their directories."""
        for name in sorted(os.listdir(path)):
            folder = path / name
            if _BENCH.fullmatch(name) is None:
                continue
            status = os.lstat(folder)
            if not stat.S_ISDIR(status.st_mode) or status.st_mode & 0o077 or status.st_uid != os.geteuid():
                self.spared.append(f"{folder}: it is no directory of your own")
                continue
            content = []
            if os.listdir(folder):
                try:
                    self._locks.append(Directories.open([folder], "w"))
                except TieredError as error:
                    self.spared.append(f"{folder}: {error}")
                    continue
                names = [entry.name for entry in owned_files(folder)]
                content = list(self._files(folder, [*names, "lock"], "of a bench that was killed"))
                if len(content) != len(os.listdir(folder)):
                    self.spared.append(f"{folder}: something else is in it")
                    continue
            yield from content
            yield Leftover(folder, "of a bench that was killed", status.st_blocks * 512, None, status)

    def _remove(self, item: Leftover) -> int:
        """Remove ``item`` and return the bytes that this freed."""
        if stat.S_ISDIR(item.status.st_mode):
            item.path.rmdir()
        elif item.end is None:
            item.path.unlink()
        else:
            fd = os.open(item.path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                os.ftruncate(fd, item.end)
                if not all(punch_hole(fd, start, end) for start, end in item.holes):
                    self.spared.append(f"{item.path}: its file system takes no ranges between others back")
                    return max(0, item.nbytes - sum(end - start for start, end in item.holes))
                os.fsync(fd)
            finally:
                os.close(fd)
        return item.nbytes

    def _plain(self, path: Path) -> os.stat_result | None:
        """Return the status of a plain file, its owner's alone and with one name; None for anything else."""
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            return None
        problem = ""
        if not stat.S_ISREG(status.st_mode):
            problem = f"it is no plain file ({stat.filemode(status.st_mode)})"
        elif status.st_nlink != 1:
            problem = f"it has {status.st_nlink} names"
        elif status.st_uid != os.geteuid() or status.st_mode & 0o077:
            problem = f"it is not your own alone ({stat.filemode(status.st_mode)} of user {status.st_uid})"
        if problem:
            self.spared.append(f"{path}: {problem}")
            return None
        return status


def _is_same(item: Leftover) -> bool:
    try:
        now = os.lstat(item.path)
    except FileNotFoundError:
        return False
    if stat.S_ISDIR(now.st_mode):  # its files have just been removed
        return (now.st_dev, now.st_ino) == (item.status.st_dev, item.status.st_ino)
    return now[:7] == item.status[:7] and now.st_mtime_ns == item.status.st_mtime_ns

"""Files that are drives with a volatile cache: what no flush has covered is there or not there after a power cut.

Meant to be used under loop devices. Every write is logged with what it replaced, until a flush of its file.
"""

from __future__ import annotations

import errno
import os
import random
import threading

from tests.rigs.passthrough import Passthrough

__all__ = ["VolatileDisks"]


class VolatileDisks(Passthrough):
    """Each file of ``backing`` is a drive; all of them lose power together.

    After the cut every call fails with EIO until ``power_on``. Of each sector, the version that survives is chosen at
    random from the durable one and all that were written since the drive's last flush.
    """

    def __init__(self, backing: str) -> None:
        super().__init__(backing)
        self._cache = threading.Lock()  # guards the rest
        self._log: dict[str, list[tuple[int, bytes, bytes]]] = {}  # offset, what it replaced, what was written
        self._num_operations = 0
        self._cut_at: int | None = None
        self._is_off = False
        self._seed = 0
        self._sector_nbytes = 512
        self._num_torn = 0

    # Below: commands

    def prepare_cut(self, seed: int, sector_nbytes: int, cut_at: int | None) -> None:
        """Count operations anew; the power goes with the ``cut_at``-th write or flush, before it is answered."""
        with self._cache:
            self._seed, self._sector_nbytes, self._cut_at, self._num_operations = seed, sector_nbytes, cut_at, 0

    def cut(self) -> None:
        """The power goes now, unless it is off already."""
        with self._cache:
            if not self._is_off:
                self._cut()

    def power_on(self) -> dict[str, int]:
        """The power is back; return how many operations there were, and how many logged sectors were not the last."""
        with self._cache:
            self._is_off = False
            return {"operations": self._num_operations, "lost_sectors": self._num_torn}

    # Below: a drive

    def pread(self, fd: int, nbytes: int, offset: int, name: str) -> bytes:
        with self._cache:
            self._check()
            return os.pread(fd, nbytes, offset)

    def pwrite(self, fd: int, data: memoryview, offset: int, name: str) -> int:
        with self._cache:
            self._check()
            new = bytes(data)
            self._log.setdefault(name, []).append((offset, os.pread(fd, len(new), offset).ljust(len(new), b"\0"), new))
            os.pwrite(fd, new, offset)
            self._count()
            return len(new)

    def flush(self, fd: int, name: str) -> None:
        with self._cache:
            self._check()
            self._count()
            self._log.pop(name, None)

    def _check(self) -> None:
        if self._is_off:
            raise OSError(errno.EIO, "the power is off")

    def _count(self) -> None:
        self._num_operations += 1
        if self._num_operations == self._cut_at:
            self._cut()
            self._check()

    def _cut(self) -> None:
        self._is_off = True
        self._cut_at = None
        self._num_torn = 0
        rng = random.Random(self._seed)
        for name, log in sorted(self._log.items()):
            sectors = self._versions(log)
            share = rng.choice((0.0, 0.1, 0.5, 0.5, 0.9, 1.0))  # of the sectors, that keep something of the cache
            fd = os.open(f"{self.backing}/{name}", os.O_RDWR)
            try:
                for offset, versions in sectors.items():
                    kept = rng.choice(versions[1:]) if rng.random() < share else versions[0]
                    self._num_torn += kept != versions[-1]
                    os.pwrite(fd, kept, offset)
            finally:
                os.close(fd)
        self._log.clear()

    def _versions(self, log: list[tuple[int, bytes, bytes]]) -> dict[int, list[bytes]]:
        """Return the versions of each sector that was written, the durable one first."""
        size = self._sector_nbytes
        sectors: dict[int, list[bytes]] = {}
        for offset, old, new in log:
            at = offset
            while at < offset + len(new):
                end = min(at // size * size + size, offset + len(new))
                part = slice(at - offset, end - offset)
                versions = sectors.setdefault(at, [old[part]])
                versions.append(new[part])
                at = end
        return sectors

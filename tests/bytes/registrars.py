"""A registrar that a test can watch and have refuse: the seam to an accelerator."""

from __future__ import annotations

from pathlib import Path


class WatchedRegistrar:
    """Notes registrations; refuses the one of number ``refused``, and to end any where ``is_stuck``."""

    def __init__(self, *, refused: int | None = None, is_stuck: bool = False) -> None:
        self.registered: dict[int, int] = {}  # address -> bytes
        self.num_registered = 0
        self.num_unregistered = 0
        self.indices: set[int] = set()  # of devices
        self.error: BaseException = RuntimeError("out of locked memory")
        self.refused = refused
        self._is_stuck = is_stuck

    def register(self, address: int, nbytes: int, index: int) -> None:
        if self.num_registered == self.refused:
            raise self.error
        assert is_mapped(address) and is_mapped(address + nbytes - 1)
        assert all(end <= address or address + nbytes <= start for start, end in self.ranges())
        self.registered[address] = nbytes
        self.indices.add(index)
        self.num_registered += 1

    def unregister(self, address: int, index: int) -> None:
        assert index in self.indices
        if self._is_stuck:
            raise RuntimeError("the driver is gone")
        assert is_mapped(address)
        del self.registered[address]
        self.num_unregistered += 1

    def ranges(self) -> list[tuple[int, int]]:
        return [(address, address + nbytes) for address, nbytes in self.registered.items()]


def is_mapped(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= address < end:
            return True
    return False

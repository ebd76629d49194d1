"""Stripes: which device gets how many bytes of each allocation, so that all hold the same. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

from tiered.store.format.checksum import BLOCK_NBYTES
from tiered.units import divide_up

__all__ = ["Stripes", "block_order"]


class Stripes:
    """Deals out allocations over devices in equal parts.

    An allocation of at least 4 MiB per device is cut into shares of whole blocks, a smaller one goes to one device
    whole: the one that was given least so far.
    """

    __slots__ = ("_first", "_given")

    def __init__(self, num_devices: int) -> None:
        self._first = 0  # the device that the next shares begin with
        self._given = [0] * num_devices  # bytes

    def take(self, nbytes: int) -> list[tuple[int, int]]:
        """Return the shares of an allocation, (device, bytes) in logical order, and count them as given."""
        shares = self.shares(nbytes)
        for device, share in shares:
            self._given[device] += share
        self._first = (self._first + 1) % len(self._given)
        return shares

    def shares(self, nbytes: int) -> list[tuple[int, int]]:
        """Return (device, bytes), in logical order, of the next allocation; the device that begins rotates."""
        num_devices, num_blocks = len(self._given), divide_up(nbytes, BLOCK_NBYTES)
        order = sorted(range(num_devices), key=lambda device: self._given[device])  # least first
        if nbytes < num_devices * BLOCK_NBYTES:
            return [(order[0], nbytes)] if nbytes else []
        each, more = divmod(num_blocks, num_devices)
        left, shares = nbytes, []
        for i in range(num_devices):
            device = (self._first + i) % num_devices
            share = min(left, (each + (device in order[:more])) * BLOCK_NBYTES)  # the last block of all may be short
            shares.append((device, share))
            left -= share
        return shares


def block_order(shares: Sequence[tuple[int, int]]) -> list[int]:
    """Return the blocks of a record in an order in which a window over a few of them keeps every device busy.

    ``shares`` are (device, bytes) in logical order, as the record's extents lie. Devices take turns, each as often as
    its share calls for; the blocks of one device stay in order.
    """
    devices: list[int] = []  # of each block: where it begins
    end = 0
    for device, nbytes in shares:
        end += nbytes
        devices += [device] * (divide_up(end, BLOCK_NBYTES) - len(devices))
    counts: dict[int, int] = {}
    ranks: list[int] = []
    for device in devices:
        ranks.append(counts.get(device, 0))
        counts[device] = ranks[-1] + 1
    return sorted(range(len(devices)), key=lambda block: (ranks[block] + 0.5) / counts[devices[block]])

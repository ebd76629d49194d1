"""Dealing: which device gets how many bytes of each allocation, so that all are busy for the same time.

Pure arithmetic in integers: no lock, no clock. Where on a device the bytes lie is the allocator's business; how fast
devices are is measured in bandwidth.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from tiered.store.format.checksum import BLOCK_NBYTES
from tiered.units import divide_up

__all__ = ["Dealer", "block_order"]

_PRECISION = 1 << 20  # parts that the weights are rounded to


class Dealer:
    """Deals out allocations in proportion to weights, by default equal ones.

    An allocation of at least 4 MiB per device is cut into shares of whole blocks, a smaller one goes to one device
    whole. The next allocations make up for the error of rounding: over time tensors of any size come out in
    proportion, to within a few blocks.
    """

    __slots__ = ("_due", "_first", "_weights")

    def __init__(self, num_devices: int) -> None:
        self._first = 0  # the device that the next shares begin with
        self._weights = [1] * num_devices
        self._due = [0] * num_devices  # bytes times the sum of the weights that a device is behind; all together 0

    @property
    def weights(self) -> list[float]:
        """The share of each device; together 1."""
        return [weight / sum(self._weights) for weight in self._weights]

    def set_weights(self, weights: Sequence[float]) -> None:
        """Deal in proportion to ``weights`` from now on, such as bandwidths. ValueError."""
        if len(weights) != len(self._weights) or not all(0 < weight < float("inf") for weight in weights):
            raise ValueError(f"expected {len(self._weights)} positive and finite weights, got {list(weights)}")
        total = sum(weights)
        self._weights = [max(1, round(weight / total * _PRECISION)) for weight in weights]
        self._due = [0] * len(weights)

    def deal(self, nbytes: int) -> list[tuple[int, int]]:
        """Return the shares of an allocation and count them as dealt."""
        if len(self._weights) == 1:
            return self.shares(nbytes)
        shares = self.shares(nbytes)
        for device, due in enumerate(self._wanted(nbytes)):
            self._due[device] = due
        for device, share in shares:
            self._due[device] -= share * sum(self._weights)
        self._first = (self._first + 1) % len(self._weights)
        return shares

    def shares(self, nbytes: int) -> list[tuple[int, int]]:
        """Return (device, bytes), in logical order, of the next allocation; the device that begins rotates."""
        num_devices = len(self._weights)
        if not nbytes or num_devices == 1:
            return [(0, nbytes)] if nbytes else []
        wanted = self._wanted(nbytes)
        if nbytes < num_devices * BLOCK_NBYTES:
            return [(wanted.index(max(wanted)), nbytes)]
        counts = _whole(wanted, sum(self._weights) * BLOCK_NBYTES, divide_up(nbytes, BLOCK_NBYTES))
        shares: list[tuple[int, int]] = []
        for i in range(num_devices):
            device = (self._first + i) % num_devices
            share = min(counts[device] * BLOCK_NBYTES, nbytes)  # the last block of all may be short
            if share:
                shares.append((device, share))
                nbytes -= share
        return shares

    def _wanted(self, nbytes: int) -> list[int]:
        """Return each device's share of ``nbytes`` that restores the proportion, times the sum of the weights."""
        return [due + weight * nbytes for due, weight in zip(self._due, self._weights, strict=True)]


def _whole(wanted: Sequence[int], unit: int, total: int) -> list[int]:
    """Return ``wanted`` in whole units, none below 0, that together are ``total``: the largest remainders go up."""
    counts = [max(0, want // unit) for want in wanted]
    while sum(counts) < total:  # at most a few times: the error is a few blocks
        behind = [want - count * unit for want, count in zip(wanted, counts, strict=True)]
        counts[behind.index(max(behind))] += 1
    while sum(counts) > total:
        ahead = [count * unit - want if count else -(1 << 200) for want, count in zip(wanted, counts, strict=True)]
        counts[ahead.index(max(ahead))] -= 1
    return counts


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
    if len(set(devices)) <= 1:
        return list(range(len(devices)))
    counts: dict[int, int] = {}
    ranks: list[int] = []
    for device in devices:
        ranks.append(counts.get(device, 0))
        counts[device] = ranks[-1] + 1
    return sorted(range(len(devices)), key=lambda block: (ranks[block] + 0.5) / counts[devices[block]])

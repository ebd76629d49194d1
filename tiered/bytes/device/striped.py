"""An adaptor over several devices that makes them one: offsets are dealt out in stripes, in proportion to weights.

For raw users of several directories. A store does not need it: its allocator deals out extents itself.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Iterator, Sequence

from tiered.bytes.device.adaptor import check_process, relay
from tiered.bytes.device.base import SCRATCH, Device, DeviceStatistics, Operation
from tiered.bytes.device.parallel import in_parallel
from tiered.errors import CapacityError, ClosedError, DeviceError, TieredError
from tiered.units import MiB, format_bytes

__all__ = ["StripeLayout", "StripedDevice"]

_MAX_NUM_STRIPES = 64
_CLOSE_ENOUGH = 0.02


class StripeLayout:
    """Which device holds which bytes: a round of stripes in a fixed order, again and again. Pure arithmetic.

    Each device has as many stripes of a round as its weight calls for, to 2 % or as near as 64 stripes come, spread
    evenly over the round. The order of the devices, their weights and the stripe's size make the layout: whoever opens
    the same files again gives the same ones.
    """

    def __init__(self, weights: Sequence[float], stripe_nbytes: int) -> None:
        """Raises ValueError for weights that are not positive and finite."""
        if not weights or not all(0 < weight < float("inf") for weight in weights) or stripe_nbytes < 1:
            raise ValueError(f"weights must be positive and finite, got {list(weights)}")
        self.stripe_nbytes = stripe_nbytes
        self.counts = _counts(weights)  # stripes of a round on each device
        self._order = _interleave(self.counts)  # the device of each stripe of a round
        seen = [0] * len(weights)
        self._ranks: list[int] = []  # how many stripes of the same device lie before it in the round
        for device in self._order:
            self._ranks.append(seen[device])
            seen[device] += 1

    def pieces(self, offset: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
        """Yield, in order, (device, offset there, bytes) for the logical bytes [offset, offset + nbytes)."""
        end = offset + nbytes
        while offset < end:
            number, within = divmod(offset, self.stripe_nbytes)
            turn, slot = divmod(number, len(self._order))
            length = min(self.stripe_nbytes - within, end - offset)
            device = self._order[slot]
            start = (turn * self.counts[device] + self._ranks[slot]) * self.stripe_nbytes + within
            offset += length
            while offset < end and length and self._goes_on(offset, device):  # neighbours on one device: one piece
                more = min(self.stripe_nbytes, end - offset)
                length += more
                offset += more
            yield device, start, length

    def sizes(self, nbytes: int) -> list[int]:
        """Return how many bytes each device holds of a file of ``nbytes``."""
        turns, rest = divmod(nbytes, len(self._order) * self.stripe_nbytes)
        sizes = [turns * count * self.stripe_nbytes for count in self.counts]
        for device in self._order:
            length = min(rest, self.stripe_nbytes)
            sizes[device] += length
            rest -= length
        return sizes

    def nbytes(self, sizes: Sequence[int]) -> int:
        """Return the length of the longest file for which devices with ``sizes`` bytes each have room."""
        turns = min(size // (count * self.stripe_nbytes) for size, count in zip(sizes, self.counts, strict=True))
        left = [size - turns * count * self.stripe_nbytes for size, count in zip(sizes, self.counts, strict=True)]
        nbytes = turns * len(self._order) * self.stripe_nbytes
        for device in self._order:
            length = min(left[device], self.stripe_nbytes)
            left[device] -= length
            nbytes += length
            if length < self.stripe_nbytes:
                break
        return nbytes

    def _goes_on(self, offset: int, device: int) -> bool:
        return self._order[offset // self.stripe_nbytes % len(self._order)] == device


class StripedDevice(Device):
    """Several devices as one, which it owns: file ``n`` here is file ``n`` on each of them.

    Operations that cross a border between devices are split and complete once, when all parts have; the first error
    wins. Growth is checked against the room of every device before any file changes. Counters are of whole operations.
    """

    def __init__(
        self, devices: Sequence[Device], weights: Sequence[float] | None = None, *, stripe_nbytes: int = 4 * MiB
    ) -> None:
        """Take over ``devices``; ``weights`` are their bandwidths in any unit, by default all the same.

        Raises ValueError for weights that do not fit and a stripe off the alignment.
        """
        if not devices or len(weights or devices) != len(devices):
            raise ValueError(f"expected one weight for each of at least one device, got {weights} for {len(devices)}")
        self.devices = tuple(devices)
        self.name = "+".join(device.name for device in devices)
        self.alignment = max(device.alignment for device in devices)  # powers of two: a multiple of each
        if stripe_nbytes % self.alignment:
            raise ValueError(f"a stripe of {stripe_nbytes} bytes is no multiple of the alignment {self.alignment}")
        self.layout = StripeLayout(weights or [1.0] * len(devices), stripe_nbytes)
        self._pid = os.getpid()
        self._lock = threading.Lock()  # guards the counters, the sizes and the state of split operations
        self._grow_lock = threading.Lock()  # held over the devices' growth
        self._is_closed = False
        self._read_bytes = self._write_bytes = 0
        self._num_reads = self._num_writes = self._num_flushes = self._num_in_flight = 0
        found = [device.files() for device in devices]
        self._sizes = {
            file: self._aligned(self.layout.nbytes([sizes.get(file, 0) for sizes in found]))
            for file in sorted({file for sizes in found for file in sizes})
        }

    def files(self) -> dict[int, int]:
        """Return the number and size of each file."""
        check_process(self.name, self._pid)
        with self._lock:
            return dict(self._sizes)

    def grow(self, file: int, nbytes: int) -> None:
        """Make ``file`` at least ``nbytes`` long; blocks.

        Should a device fail that had room a moment ago, the others keep what they grew; the file's size is as it was.
        """
        self._check_open()
        if nbytes % self.alignment:
            raise ValueError(f"{self.path(file)} cannot be {nbytes} bytes: not a multiple of {self.alignment}")
        with self._grow_lock:
            if self._sizes.get(file, -1) >= nbytes:
                return
            sizes = self.layout.sizes(nbytes)
            for device, size in zip(self.devices, sizes, strict=True):
                missing, room = size - device.files().get(file, 0), device.free_bytes()
                if missing > room:
                    raise CapacityError(
                        f"cannot grow {self.path(file)} to {format_bytes(nbytes)}: {device.name} needs "
                        f"{format_bytes(missing)} more and has {format_bytes(room)}; free space there"
                    )
            for device, size in zip(self.devices, sizes, strict=True):
                device.grow(file, size)
            with self._lock:
                self._sizes[file] = nbytes

    def submit(self, operations: Sequence[Operation]) -> None:
        """Start all ``operations``, in parts where they cross from device to device. Does not block."""
        check_process(self.name, self._pid)
        by_device: list[list[Operation]] = [[] for _ in self.devices]
        ended: list[Operation] = []
        with self._lock:
            self._check_open()
            self._num_in_flight += len(operations)
            for operation in operations:
                parts = self._split(operation)
                for index, part in parts:
                    by_device[index].append(part)
                if not parts:
                    ended.append(operation)
        for operation in ended:
            self._complete(operation)
        for device, parts_there in zip(self.devices, by_device, strict=True):
            if not parts_there:
                continue
            try:
                device.submit(parts_there)
            except Exception as error:  # none of these was started, but perhaps others
                for part in parts_there:
                    part.error = error
                    part.on_done(part)

    def flush(self) -> None:
        """Flush all devices at the same time; blocks until all have. Raises the first device's error."""
        self._check_open()
        errors = in_parallel([device.flush for device in self.devices])
        if errors:
            raise errors[0]
        with self._lock:
            self._num_flushes += 1

    def free_bytes(self) -> int:
        """Return how many bytes a new file could have; directories on one file system count its room once each."""
        self._check_open()
        return self._aligned(self.layout.nbytes([device.free_bytes() for device in self.devices]))

    def path(self, file: int) -> str:
        """Return the name of ``file`` for messages."""
        return f"{self.name}/{'(scratch)' if file == SCRATCH else f'data-{file:03d}'}"

    def statistics(self) -> DeviceStatistics:
        """Return the counters of whole operations; ``file_bytes`` is the sum over the devices."""
        check_process(self.name, self._pid)
        file_bytes = sum(device.statistics().file_bytes for device in self.devices)
        with self._lock:
            return DeviceStatistics(
                read_bytes=self._read_bytes,
                write_bytes=self._write_bytes,
                num_reads=self._num_reads,
                num_writes=self._num_writes,
                num_flushes=self._num_flushes,
                num_in_flight=self._num_in_flight,
                file_bytes=file_bytes,
            )

    def close(self) -> None:
        """Complete what is in flight and close every device, whatever happens; raises the first error. Idempotent."""
        if self._pid == os.getpid():
            with self._lock:
                self._is_closed = True
        failure: TieredError | None = None
        for device in self.devices:
            try:
                device.close()
            except TieredError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "open"
        return f"StripedDevice({len(self.devices)} devices, {state}, stripes {self.layout.counts}, {self.name})"

    def _split(self, operation: Operation) -> list[tuple[int, Operation]]:
        """Return the devices and parts of ``operation``, under the lock; [] if it is over already, perhaps in error."""
        try:
            nbytes = len(operation.memory)
        except ValueError as error:
            operation.error = DeviceError(f"an operation of {self.path(operation.file)} has released memory: {error}")
            return []
        size = self._sizes.get(operation.file, 0)
        if operation.file not in self._sizes or operation.offset < 0 or operation.offset + nbytes > size:
            verb = "write" if operation.is_write else "read"
            operation.error = DeviceError(
                f"{verb} of {nbytes} bytes at offset {operation.offset} of {self.path(operation.file)} failed: the "
                f"file has {size} bytes"
            )
            return []
        pieces = list(self.layout.pieces(operation.offset, nbytes))
        join = _Join(operation, len(pieces))
        parts: list[tuple[int, Operation]] = []
        start = 0
        for device, offset, length in pieces:
            memory = operation.memory if length == nbytes else operation.memory[start : start + length]
            on_done = functools.partial(self._part_done, join)
            parts.append((device, relay(operation, on_done, offset=offset, memory=memory)))
            start += length
        return parts

    def _part_done(self, join: _Join, part: Operation) -> None:
        with self._lock:
            join.error = join.error or part.error
            join.num_left -= 1
            if join.num_left:
                return
        join.operation.error = join.error
        self._complete(join.operation)

    def _complete(self, operation: Operation) -> None:
        with self._lock:
            self._num_in_flight -= 1
            if operation.error is not None:
                pass
            elif operation.is_write:
                self._write_bytes += len(operation.memory)
                self._num_writes += 1
            else:
                self._read_bytes += len(operation.memory)
                self._num_reads += 1
        operation.on_done(operation)

    def _aligned(self, nbytes: int) -> int:
        return nbytes // self.alignment * self.alignment

    def _check_open(self) -> None:
        check_process(self.name, self._pid)
        if self._is_closed:
            raise ClosedError(f"{self.name} is closed")


class _Join:
    """An operation that waits for its parts."""

    __slots__ = ("error", "num_left", "operation")

    def __init__(self, operation: Operation, num_left: int) -> None:
        self.operation = operation
        self.num_left = num_left
        self.error: Exception | None = None


def _counts(weights: Sequence[float]) -> list[int]:
    """Return the fewest stripes per device that stand in proportion to ``weights``, closely enough."""
    if len(weights) > _MAX_NUM_STRIPES:
        return [1] * len(weights)
    total = sum(weights)
    best, best_error = [1] * len(weights), float("inf")
    for num_stripes in range(len(weights), _MAX_NUM_STRIPES + 1):
        counts = [max(1, round(weight / total * num_stripes)) for weight in weights]
        ratios = [count / sum(counts) / (weight / total) for count, weight in zip(counts, weights, strict=True)]
        error = max(abs(ratio - 1) for ratio in ratios)
        if error < best_error:
            best, best_error = counts, error
        if error <= _CLOSE_ENOUGH:
            break
    return best


def _interleave(counts: Sequence[int]) -> list[int]:
    """Return a round in which device ``i`` comes ``counts[i]`` times, each as evenly spread as can be."""
    due = sorted(((turn + 0.5) / count, device) for device, count in enumerate(counts) for turn in range(count))
    return [device for _, device in due]

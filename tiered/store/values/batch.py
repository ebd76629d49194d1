"""Batch: small records in one buffer, moved with one operation for all that lie side by side on a device.

A record of 4 KiB costs little to move and much to account for: in a batch it has no buffer, no operation and no
completion of its own. How batches are put and got is in put_batches.py and get_batches.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

from tiered.bytes.device.base import Device, IOClass, Operation
from tiered.errors import DeviceError
from tiered.store.format.row import INLINE_NBYTES, Extent
from tiered.store.residency.working_set import WorkingSet
from tiered.store.transfers.transfer import submit_all
from tiered.units import KiB, MiB

__all__ = ["Batch", "batch_nbytes", "is_small"]

_SMALL_NBYTES = 64 * KiB  # a larger record is worth operations of its own
_BATCH_NBYTES = MiB


def batch_nbytes(working_set: WorkingSet) -> int:
    """Return the bytes of a batch's buffer; small against the budget."""
    return working_set.space.round_up(min(_BATCH_NBYTES, working_set.budget_bytes // 32))


def is_small(working_set: WorkingSet, nbytes: int) -> bool:
    """Whether records of ``nbytes`` are moved in batches: too large for a row, too small for a buffer of their own."""
    return INLINE_NBYTES < nbytes <= min(_SMALL_NBYTES, batch_nbytes(working_set))


class Batch:
    """The operations of one batch; a Movement. Extents and memory are its own until ``on_done(batch)`` is called.

    ``error`` is one that an operation ended with. Digests are the owner's business, which knows the records.
    """

    __slots__ = ("_devices", "_io_class", "_lock", "_num_left", "_on_done", "_pieces", "error", "is_done")

    def __init__(
        self,
        devices: Sequence[Device],
        pieces: Iterable[tuple[Extent, memoryview]],
        io_class: IOClass,
        on_done: Callable[[Batch], None],
    ) -> None:
        """``pieces`` are aligned and of equal length each: where on the devices, and where in memory."""
        self.error: Exception | None = None
        self.is_done = False  # for the owner, which sets it under its lock
        self._devices = devices
        self._pieces = list(pieces)
        self._io_class = io_class
        self._on_done = on_done
        self._lock = threading.Lock()
        self._num_left = 0

    @property
    def is_write(self) -> bool:
        return self._io_class is IOClass.WRITE

    def start(self) -> None:
        """Submit everything; raises interrupts only, and ends with an error then."""
        try:
            operations = [(extent.device, self._operation(extent, memory)) for extent, memory in self._pieces]
        except BaseException as error:
            self.error = DeviceError(f"it was not handed to the device: {error!r}")
            self._on_done(self)
            raise
        # Order: the count before the first submit, because a device may complete inside submit.
        self._num_left = len(operations)
        submit_all(self._devices, operations)
        if not operations:
            self._on_done(self)

    def _operation(self, extent: Extent, memory: memoryview) -> Operation:
        return Operation(
            is_write=self.is_write,
            file=extent.file,
            offset=extent.offset,
            memory=memory,
            io_class=self._io_class,
            on_done=self._piece_done,
        )

    def _piece_done(self, operation: Operation) -> None:
        with self._lock:
            self.error = self.error or operation.error
            self._num_left -= 1
            is_last = not self._num_left
        if is_last:
            self._on_done(self)

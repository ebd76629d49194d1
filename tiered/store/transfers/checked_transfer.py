"""Transfer: some slabs of one record moved between a buffer and the devices, its blocks each under its digest.

It knows neither residency nor generations; its owner knows the meaning of a finished transfer. Operations handed to
their devices are all accounted for, whatever comes in between.
"""

from __future__ import annotations

import errno
import functools
import itertools
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import numpy as np

from tiered.bytes.device.base import Device, IOClass, Operation
from tiered.errors import CorruptionError, DeviceError, TieredError
from tiered.store.format.checksum import BLOCK_NBYTES, DIGEST_NBYTES, block_digests, block_seed, digest, num_blocks
from tiered.store.format.row import Extent, Row, has_unread, learn, part_of, pieces
from tiered.store.transfers.digest_threads import WORTHWHILE_NBYTES, DigestThreads
from tiered.units import round_up

__all__ = ["SLAB_NBYTES", "Progress", "Transfer", "start_all", "submit_all", "without_frames"]

_E = TypeVar("_E", bound=BaseException)


def submit_all(devices: Sequence[Device], operations: Iterable[tuple[int, Operation]]) -> None:
    """Submit operations, each with the number of its device; one that cannot be submitted ends with an error.

    Those of one device are submitted together, in their order.
    """
    by_device: dict[int, list[Operation]] = {}
    for index, operation in operations:
        by_device.setdefault(index, []).append(operation)
    for index, group in by_device.items():
        try:
            devices[index].submit(group)
        except (TieredError, OSError, ValueError) as error:  # none of them was started
            for operation in group:
                operation.error = error
                operation.on_done(operation)


# -- transfer ----------------------------------------------------------------------------------------------------------


SLAB_NBYTES = BLOCK_NBYTES
"""Bytes of a record that are handed to the devices, and whose digests are computed, together: one block or several."""

_UNREADABLE = {errno.EIO, errno.ENODATA, errno.EILSEQ, errno.EREMOTEIO, errno.EBADMSG, errno.EUCLEAN}
"""The errors of a drive or file system that has lost these bytes (Linux, blk_errors[]), unlike one that is gone."""


class Progress:
    """How many slabs of some transfers are done: it changes as long as their devices get on, however slowly."""

    __slots__ = ("learned", "num_blocks")

    def __init__(self) -> None:
        self.num_blocks = 0
        self.learned: dict[str, None] = {}  # names of records with blocks that were read for the first time


class Transfer:
    """Reads or writes the slabs of ``row`` from ``first_slab`` on that ``memory`` has room for.

    ``memory`` is one buffer's bytes, a multiple of ``alignment``; it and the extents belong to the transfer until
    ``on_done(transfer)`` is called, once, from any thread or from inside ``start``. A write zeroes the bytes behind
    the record's end and leaves ``digests``, which it computes unless the row has them; a read checks the row's digests,
    slab by slab as they arrive or, where ``is_checked_by_owner``, when ``check`` is called. ``error`` is then None or
    a TieredError. ``start`` reads the pages of a row that has its extents there.

    Digests of large slabs are computed in ``threads``, others where they come up: by the caller of ``start`` and in
    the device's thread. ``on_moved(transfer)`` is called before ``on_done``, from any thread, once the devices have
    done their part of a read; slabs may wait for their check then.
    """

    __slots__ = (
        "_alignment", "_devices", "_is_unchecked", "_lock", "_num_pieces_left", "_num_slabs_left", "_on_done",
        "_on_moved", "_pieces_left", "_progress", "_slabs", "_start", "_store_uuid", "_threads", "digests", "error",
        "failed_piece", "first_slab", "io_class", "is_done", "memory", "row",
    )  # fmt: skip

    def __init__(
        self,
        devices: Sequence[Device],
        store_uuid: bytes,
        row: Row,
        *,
        memory: memoryview,
        io_class: IOClass,
        threads: DigestThreads,
        progress: Progress,
        on_done: Callable[[Transfer], None],
        on_moved: Callable[[Transfer], None] | None = None,
        first_slab: int = 0,
        is_checked_by_owner: bool = False,
    ) -> None:
        self.row = row
        self.memory = memory
        self.io_class = io_class
        self.first_slab = first_slab
        self.digests = bytearray()
        self.error: Exception | None = None
        self.failed_piece: Extent | None = None  # in which the device failed with ``error``
        self.is_done = False  # for the owner, which sets it under its lock
        self._devices = devices
        self._alignment = max(device.alignment for device in devices)
        self._store_uuid = store_uuid
        self._threads = threads
        self._progress = progress
        self._on_done = on_done
        self._on_moved = on_moved
        self._lock = threading.Lock()
        last_slab = min(num_blocks(row.nbytes, SLAB_NBYTES), first_slab + -(-len(memory) // SLAB_NBYTES))
        self._slabs = range(first_slab, last_slab)
        self._start = 0  # of the row's bytes in its record
        self._num_pieces_left = 0  # with the devices
        self._num_slabs_left = 0  # slabs with pieces at the devices, or that wait for their check
        self._is_unchecked = is_checked_by_owner and io_class is not IOClass.WRITE
        self._pieces_left: dict[int, int] = {}

    @property
    def is_write(self) -> bool:
        return self.io_class is IOClass.WRITE

    def start(self) -> None:
        """Submit everything; a failure is an error of the transfer, and not raised."""
        operations: list[list[tuple[int, Operation]]] = []
        try:
            if self.row.is_paged:
                self._find_pages()
            operations = self._operations()
        except Exception as error:  # nothing was submitted
            self.error = without_frames(error)
        if not operations:  # a failure, or a row of no bytes
            if self._on_moved is not None:
                self._on_moved(self)
            self._on_done(self)
        elif self.is_write and not self.row.digests:
            for slab, pieces_of_slab in zip(self._slabs, operations, strict=True):
                self._compute(slab, functools.partial(self._write, slab, pieces_of_slab))
        else:
            submit_all(self._devices, itertools.chain.from_iterable(operations))

    def _find_pages(self) -> None:
        """Take extents and digests from the row's pages."""
        blocks = SLAB_NBYTES // self.row.block_nbytes
        self._start = self._slabs.start * SLAB_NBYTES
        self.row = part_of(self.row, self._slabs.start * blocks, len(self._slabs) * blocks)

    def _operations(self) -> list[list[tuple[int, Operation]]]:
        """Return the operations of each slab, each with the number of its device, and count them."""
        operations: list[list[tuple[int, Operation]]] = []
        for slab in self._slabs:
            operations.append([])
            for piece, memory in self._pieces(slab):
                operation = Operation(
                    is_write=self.is_write,
                    file=piece.file,
                    offset=piece.offset,
                    memory=memory,
                    io_class=self.io_class,
                    on_done=functools.partial(self._piece_done, slab, piece),
                )
                operations[-1].append((piece.device, operation))
            self._pieces_left[slab] = len(operations[-1])
        # Order: all counts before the first submit, because a device may complete inside submit.
        self._num_pieces_left = sum(map(len, operations))
        self._num_slabs_left = len(operations)
        if self.is_write:
            self.digests = bytearray(self.row.digests or self._digests_end(self._slabs[-1]) if operations else 0)
        return operations

    def _compute(self, slab: int, job: Callable[[], None]) -> None:
        """Call ``job``, which computes the digest of ``slab``: here, or in a thread for that."""
        if len(self._bytes_of(slab)) < WORTHWHILE_NBYTES:
            job()
        else:
            self._threads.submit(self.io_class, job)

    def _write(self, slab: int, operations: list[tuple[int, Operation]]) -> None:
        row, content = self.row, self._bytes_of(slab)
        block = self._block(slab)
        found = block_digests(content, self._store_uuid, row.key_id, row.block_nbytes, block, row.generation)
        # Order: before the slab can be done, and with it the transfer.
        self.digests[self._digests_end(slab) - len(found) : self._digests_end(slab)] = found
        submit_all(self._devices, operations)

    def _pieces(self, slab: int) -> list[tuple[Extent, memoryview]]:
        start = slab * SLAB_NBYTES - self._start
        base = self.first_slab * SLAB_NBYTES - self._start
        logical = min(SLAB_NBYTES, self.row.nbytes - start)
        nbytes = round_up(logical, self._alignment)
        assert start - base + nbytes <= len(self.memory), f"{len(self.memory)} bytes of memory for {self.row}"
        if self.is_write and nbytes > logical:
            self.memory[start - base + logical : start - base + nbytes] = bytes(nbytes - logical)
        found: list[tuple[Extent, memoryview]] = []
        position = start - base
        for piece in pieces(self.row.extents, start, nbytes):
            found.append((piece, self.memory[position : position + piece.nbytes]))
            position += piece.nbytes
        return found

    def _bytes_of(self, slab: int) -> memoryview:
        start = (slab - self.first_slab) * SLAB_NBYTES
        return self.memory[start : start + min(SLAB_NBYTES, self.row.nbytes + self._start - slab * SLAB_NBYTES)]

    def _block(self, slab: int) -> int:
        """Return the number in the record of the first block of ``slab``."""
        return self.row.base_block + (slab * SLAB_NBYTES - self._start) // self.row.block_nbytes

    def _digests_end(self, slab: int) -> int:
        """Return where in ``digests`` those of ``slab`` end."""
        nbytes = (slab - self.first_slab) * SLAB_NBYTES + len(self._bytes_of(slab))
        return DIGEST_NBYTES * num_blocks(nbytes, self.row.block_nbytes)

    def _piece_done(self, slab: int, piece: Extent, operation: Operation) -> None:
        failure = None if operation.error is None else without_frames(self._translate(piece, operation.error))
        with self._lock:
            if failure is not None and self.error is None:
                self.error, self.failed_piece = failure, piece
            self._pieces_left[slab] -= 1
            self._num_pieces_left -= 1
            is_moved = not self._num_pieces_left
            is_complete = not self._pieces_left[slab]
            is_due = is_complete and self.error is None and not self.is_write and not self._is_unchecked
        if is_moved and self._on_moved is not None:  # order: before the last slab can be done
            self._on_moved(self)
        if is_due:
            self._compute(slab, lambda: self._slab_done(self._check(slab)))
        elif is_complete:
            self._slab_done()

    def _slab_done(self, error: Exception | None = None) -> None:
        self._progress.num_blocks += 1
        with self._lock:
            self.error = self.error or error
            self._num_slabs_left -= 1
            is_last = not self._num_slabs_left
        if is_last:
            self._on_done(self)

    def check(self) -> None:
        """Check the bytes read, if the device's thread has not: for an owner that waited for it. Sets ``error``."""
        if not self._is_unchecked:
            return
        self._is_unchecked = False
        for slab in self._slabs:
            self.error = self.error or self._check(slab)

    def raise_error(self) -> None:
        """Raise the error of a transfer that is done, for an owner that waited for it; ``check`` comes first."""
        self.check()
        if self.error is not None:
            raise self.error

    def unreadable(self) -> CorruptionError | None:
        """Return the CorruptionError, for a reader of every byte, of a sector that gave none; None for another error.

        A reader of the tensor gets a DeviceError for it: the next try may find the bytes.
        """
        cause = None if self.error is None else self.error.__cause__
        if self.failed_piece is None or not isinstance(cause, OSError) or cause.errno not in _UNREADABLE:
            return None
        name = errno.errorcode[cause.errno]
        what = f"its bytes cannot be read: {os.strerror(cause.errno)} ({name}, errno {cause.errno})"
        corruption = self._corruption(self.failed_piece, what, errno=cause.errno)
        corruption.__cause__ = cause
        return corruption

    def _check(self, slab: int) -> CorruptionError | None:
        """Compare the slab's bytes with the digests of their blocks."""
        row, content = self.row, self._bytes_of(slab)
        first = self._block(slab)
        for start in range(0, len(content), row.block_nbytes):
            block = first + start // row.block_nbytes
            index = block - row.base_block  # in the row
            seed = block_seed(self._store_uuid, row.key_id, block, row.generation_of(index))
            expected = row.digests[index * DIGEST_NBYTES : (index + 1) * DIGEST_NBYTES]
            found = digest(content[start : start + row.block_nbytes], seed)
            if found.to_bytes(DIGEST_NBYTES, "little") != expected:
                if has_unread(row) and not any(expected):
                    learn(row, index, np.uint64(found))
                    self._progress.learned[row.name] = None
                    continue
                piece = self._place_of(index)
                return self._corruption(piece, f"block {block} does not match its digest: the device holds other bytes")
        return None

    def _place_of(self, index: int) -> Extent:
        """Return where the row's block ``index`` begins."""
        return next(pieces(self.row.extents, index * self.row.block_nbytes, 1))

    def _reaches(self, nbytes: int, piece: Extent) -> bool:
        """Return whether a file of ``nbytes`` has all of ``piece``."""
        return nbytes >= piece.offset + piece.nbytes

    def _translate(self, piece: Extent, error: Exception) -> Exception:
        """Return the error of a failed operation: a file that has lost its end is damage, all else is the device's."""
        if self.is_write or type(error) is not DeviceError:
            return error
        device = self._devices[piece.device]
        try:
            size = os.stat(device.path(piece.file)).st_size
        except OSError:  # a stand-in without a file
            size = device.files().get(piece.file, 0)
        if self._reaches(size, piece):
            return error
        corruption = self._corruption(piece, f"the file ends at {size} bytes")
        corruption.__cause__ = error
        return corruption

    def _corruption(self, piece: Extent, what: str, *, errno: int = 0) -> CorruptionError:
        path = self._devices[piece.device].path(piece.file)
        return CorruptionError(
            f"{self.row.name!r} is damaged: {what}; {path}, offset {piece.offset}, expected as written for generation "
            f"{self.row.generation}; restore the file from a copy, or delete the key and write it again",
            key=self.row.name,
            file=path,
            offset=piece.offset,
            errno=errno,
        )


def start_all(transfers: Iterable[Transfer]) -> None:
    """Start ``transfers``."""
    for transfer in transfers:
        transfer.start()


def without_frames(error: _E) -> _E:
    """Drop the frames of ``error`` and of those that led to it; return it.

    Lifetime: an error is kept until it is raised. Its frames, and through them those of a submitter to a device that
    completes at once, would keep leased tensors alive as long; a frame that is cleared keeps its closure.
    """
    left: list[BaseException] = [error]
    while left:
        link = left.pop()
        link.__traceback__ = None
        left += [each for each in (link.__cause__, link.__context__) if each is not None and each.__traceback__]
    return error

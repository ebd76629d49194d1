"""Transfer: some blocks of one record moved between a buffer and the devices, each under its digest.

It knows neither residency nor generations; what a finished transfer means is its owner's decision.
"""

from __future__ import annotations

import functools
import os
import struct
import threading
from collections.abc import Callable, Sequence

from tiered.bytes.device.base import Device, IOClass, Operation
from tiered.errors import CorruptionError, DeviceError
from tiered.store.checksum import BLOCK_NBYTES, DIGEST_NBYTES, block_seed, digest, num_blocks
from tiered.store.extents import Extent, pieces
from tiered.store.row import Row
from tiered.units import round_up

__all__ = ["Transfer"]


class Transfer:
    """Reads or writes the blocks of ``row`` from ``first_block`` on that ``memory`` has room for.

    ``memory`` is one buffer's bytes, a multiple of ``alignment``; it and the extents belong to the transfer until
    ``on_done(transfer)`` is called, once, from any thread or from inside ``start``. A write zeroes the bytes behind
    the record's end and leaves ``digests``; a read checks the row's digests. ``error`` is then None or a TieredError.
    """

    __slots__ = (
        "_blocks", "_devices", "_lock", "_num_left", "_on_done", "_pieces_left", "_store_uuid", "digests", "error",
        "first_block", "io_class", "is_done", "memory", "row",
    )  # fmt: skip

    def __init__(
        self,
        devices: Sequence[Device],
        store_uuid: bytes,
        row: Row,
        *,
        memory: memoryview,
        io_class: IOClass,
        on_done: Callable[[Transfer], None],
        first_block: int = 0,
    ) -> None:
        self.row = row
        self.memory = memory
        self.io_class = io_class
        self.first_block = first_block
        self.digests = b""
        self.error: Exception | None = None
        self.is_done = False  # for the owner, who sets it under its lock
        self._devices = devices
        self._store_uuid = store_uuid
        self._on_done = on_done
        self._lock = threading.Lock()
        last_block = min(num_blocks(row.nbytes), first_block + -(-len(memory) // BLOCK_NBYTES))
        self._blocks = range(first_block, last_block)
        self._num_left = 0
        self._pieces_left: dict[int, int] = {}

    @property
    def is_write(self) -> bool:
        return self.io_class is IOClass.WRITE

    def start(self) -> None:
        """Submit everything; never raises: what cannot be submitted is an error of the transfer."""
        by_device: dict[int, list[Operation]] = {}
        digests: list[int] = []
        for block in self._blocks:
            if self.is_write:
                digests.append(digest(self._bytes_of(block), self._seed(block)))
            for piece, memory in self._pieces(block):
                operation = Operation(
                    is_write=self.is_write,
                    file=piece.file,
                    offset=piece.offset,
                    memory=memory,
                    io_class=self.io_class,
                    on_done=functools.partial(self._piece_done, block, piece),
                )
                by_device.setdefault(piece.device, []).append(operation)
                self._pieces_left[block] = self._pieces_left.get(block, 0) + 1
        self.digests = struct.pack(f"<{len(digests)}Q", *digests)
        # Order: all counts before the first submit, because a device may complete inside submit.
        self._num_left = sum(len(operations) for operations in by_device.values())
        for device, operations in by_device.items():
            try:
                self._devices[device].submit(operations)
            except Exception as error:  # none of them was started
                for operation in operations:
                    operation.error = error
                    operation.on_done(operation)
        if not by_device:  # a row of no bytes
            self._on_done(self)

    def _pieces(self, block: int) -> list[tuple[Extent, memoryview]]:
        start = block * BLOCK_NBYTES
        base = self.first_block * BLOCK_NBYTES
        logical = min(BLOCK_NBYTES, self.row.nbytes - start)
        nbytes = round_up(logical, self._alignment())
        assert start - base + nbytes <= len(self.memory), f"{len(self.memory)} bytes of memory for {self.row}"
        if self.is_write and nbytes > logical:
            self.memory[start - base + logical : start - base + nbytes] = bytes(nbytes - logical)
        found: list[tuple[Extent, memoryview]] = []
        position = start - base
        for piece in pieces(self.row.extents, start, nbytes):
            found.append((piece, self.memory[position : position + piece.nbytes]))
            position += piece.nbytes
        return found

    def _alignment(self) -> int:
        return max(device.alignment for device in self._devices)

    def _bytes_of(self, block: int) -> memoryview:
        start = (block - self.first_block) * BLOCK_NBYTES
        return self.memory[start : start + min(BLOCK_NBYTES, self.row.nbytes - block * BLOCK_NBYTES)]

    def _seed(self, block: int) -> int:
        return block_seed(self._store_uuid, self.row.key_id, block, self.row.generation)

    def _piece_done(self, block: int, piece: Extent, operation: Operation) -> None:
        failure = None if operation.error is None else _without_frames(self._translate(piece, operation.error))
        with self._lock:
            self.error = self.error or failure
            self._pieces_left[block] -= 1
            check = not self._pieces_left[block] and self.error is None and not self.is_write
        error = self._check(block) if check else None
        with self._lock:
            self.error = self.error or error
            self._num_left -= 1
            is_last = not self._num_left
        if is_last:
            self._on_done(self)

    def _check(self, block: int) -> CorruptionError | None:
        """Compare the block's bytes with its digest; runs in the device's thread."""
        expected = int.from_bytes(self.row.digests[block * DIGEST_NBYTES : (block + 1) * DIGEST_NBYTES], "little")
        if digest(self._bytes_of(block), self._seed(block)) == expected:
            return None
        piece = next(pieces(self.row.extents, block * BLOCK_NBYTES, 1))
        return self._corruption(piece, f"block {block} does not match its digest: the device holds other bytes")

    def _translate(self, piece: Extent, error: Exception) -> Exception:
        """Return what a failed operation means: a file that has lost its end is damage, all else is the device's."""
        if self.is_write or type(error) is not DeviceError:
            return error
        device = self._devices[piece.device]
        try:
            size = os.stat(device.path(piece.file)).st_size
        except OSError:  # a stand-in without a file
            size = device.files().get(piece.file, 0)
        if size >= piece.offset + piece.nbytes:
            return error
        corruption = self._corruption(piece, f"the file ends at {size} bytes")
        corruption.__cause__ = error
        return corruption

    def _corruption(self, piece: Extent, what: str) -> CorruptionError:
        path = self._devices[piece.device].path(piece.file)
        return CorruptionError(
            f"{self.row.name!r} is damaged: {what}; {path}, offset {piece.offset}, expected as written for generation "
            f"{self.row.generation}; restore the file from a copy, or delete the key and write it again",
            key=self.row.name,
            file=path,
            offset=piece.offset,
        )


def _without_frames(error: Exception) -> Exception:
    # Lifetime: an error is kept until somebody raises it; its frames, and through them those of whoever submitted to a
    # device that completes at once, would keep leased tensors alive as long.
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error

"""Rewrite: blocks of a record written to new places, with the caller's bytes over some of those they had.

Blocks that keep some bytes are read first, into the memory that the new ones are written from.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from tiered.bytes.arena import Buffer
from tiered.bytes.device.base import IOClass
from tiered.bytes.host_tensor import copy_contiguous
from tiered.store.format.row import Row
from tiered.store.space.space import Space
from tiered.store.transfers.transfer import SLAB_NBYTES, Transfer
from tiered.store.values.part_rows import part_row
from tiered.units import divide_up

__all__ = ["RewriteJob"]


class RewriteJob:
    """The job of writing one slab of ``new``, a row of some blocks of ``old`` without digests, through a buffer."""

    __slots__ = (
        "_begin", "_content", "_kept", "_new", "_old", "_on_done", "_space", "_start", "_use", "nbytes", "slab",
    )  # fmt: skip

    def __init__(
        self,
        space: Space,
        old: Row,
        new: Row,
        slab: int,
        start: int,
        content: torch.Tensor,
        use: Callable[[RewriteJob, Transfer], object],
    ) -> None:
        """``content``, (n,) uint8 on any compute device, goes over the bytes of ``old`` from ``start`` on.

        ``use(job, transfer)`` comes after the write.
        """
        self.nbytes = min(new.nbytes, SLAB_NBYTES)
        self.slab = slab
        self._space = space
        self._old = old
        self._new = new
        self._start = start
        self._content = content
        self._use = use
        self._begin = new.base_block * new.block_nbytes + slab * SLAB_NBYTES  # of the slab in the record
        self._kept = deque(self._kept_blocks())  # that are still to be read
        self._on_done: Callable[[Transfer], None] = lambda transfer: None

    def _kept_blocks(self) -> list[range]:
        """Return the blocks of the slab that keep some bytes: before the new ones and behind them."""
        nbytes = self._new.block_nbytes
        begin = self._begin
        end = min(begin + SLAB_NBYTES, self._new.base_block * nbytes + self._new.nbytes)
        start, stop = min(max(self._start, begin), end), min(max(self._start + self._content.numel(), begin), end)
        before = range(begin // nbytes, divide_up(start, nbytes)) if start > begin else range(0)
        behind = range(stop // nbytes, divide_up(end, nbytes)) if stop < end else range(0)
        if before and behind and behind.start <= before.stop:
            return [range(before.start, behind.stop)]
        return [blocks for blocks in (before, behind) if blocks]

    def begin(self, buffer: Buffer, on_done: Callable[[Transfer], None]) -> Transfer:
        self._on_done = on_done
        return self._next(buffer)

    def finish(self, transfer: Transfer, buffer: Buffer) -> Transfer | None:
        transfer.check()
        if transfer.error is not None:
            raise transfer.error
        if not transfer.is_write:
            return self._next(buffer)
        self._use(self, transfer)
        return None

    def _next(self, buffer: Buffer) -> Transfer:
        """Return the read of the next blocks that keep some bytes, or else the write; blocks for pages."""
        nbytes = self._new.block_nbytes
        if self._kept:
            blocks = self._kept.popleft()
            row = part_row(self._old, blocks.start, len(blocks))
            at = blocks.start * nbytes - self._begin
            memory = buffer.memory[at : at + self._space.round_up(row.nbytes)]
            return self._space.transfer(row, memory, IOClass.DEMAND, self._on_done, is_checked_by_owner=True)
        begin = max(self._start, self._begin)
        content = self._content[begin - self._start : max(0, self._begin + self.nbytes - self._start)]
        copy_contiguous(buffer, content, to_buffer=True, start=begin - self._begin)
        return self._space.transfer(
            self._new, buffer.memory, IOClass.WRITE, self._on_done, first_slab=self.slab, is_checked_by_owner=True
        )

    def __str__(self) -> str:
        return f"write of a part of {self._new.name!r}, slab {self.slab}"

"""Copies between DRAM and a compute device: a store's own, and torch's of page-locked tensors, in turn.

A store's go the way that they go in a step: units are gathered through ``AcceleratorTier``, and bytes leave through its
``Copies``, with a lease for each.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

import tiered
from tiered.measure.rounds import duplex_of, median_ratio, row_line, spread
from tiered.store.lifetime.opening import MIN_DRAM_NBYTES
from tiered.tiers.accelerator import AcceleratorTier
from tiered.tiers.device_memory import DeviceBuffer, on_stream

__all__ = ["COPY_OPS", "COPY_TITLE", "CopyRow", "DevicePath", "LinkRates", "measure_copies"]

COPY_TITLE = "op         block      GB/s          range  torch  ratio"

COPY_OPS = ("copy in", "copy out", "in + out")
"""To the device, from it, and both at once."""

_NUM_BUFFERS = 4  # on the device, each way


@dataclass(frozen=True, slots=True)
class CopyRow:
    """Copies one way or both ways at once: the medians over the rounds, the store's and torch's, as many of each."""

    op: str  # of COPY_OPS
    block_bytes: int
    in_bytes: int  # to the device in a round
    out_bytes: int  # from it
    rounds: int
    gb_per_s: float  # both directions together
    gb_per_s_min: float
    gb_per_s_max: float
    torch_gb_per_s: tuple[float, ...]  # of each round
    ratio_to_torch: float  # the median over the pairs

    def __str__(self) -> str:
        rates = self.gb_per_s, self.gb_per_s_min, self.gb_per_s_max
        torchs = statistics.median_high(self.torch_gb_per_s)
        return row_line(self.op, self.block_bytes, rates, torchs, self.ratio_to_torch)


@dataclass(frozen=True, slots=True)
class LinkRates:
    """The medians of the store's copies each way alone, and how far both run beside each other."""

    in_gb_per_s: float
    out_gb_per_s: float
    duplex: float  # 0: both directions share the link, 1: neither slows the other

    @classmethod
    def of(cls, rows: Sequence[CopyRow]) -> LinkRates:
        """Return the rates of ``rows``, one for each of COPY_OPS."""
        read, write = rows[0].gb_per_s, rows[1].gb_per_s
        both = rows[2]
        seconds = (both.in_bytes + both.out_bytes) / both.gb_per_s
        return cls(read, write, duplex_of(both.in_bytes / seconds, both.out_bytes / seconds, read, write))

    def __str__(self) -> str:
        return f"copies in {self.in_gb_per_s:.2f} GB/s, out {self.out_gb_per_s:.2f} GB/s, duplex {self.duplex:.2f}"


class _Side(Protocol):
    """Copies of blocks that are numbered from 0 on, round and round. They are submitted, not waited for."""

    streams: tuple[torch.Stream, torch.Stream]

    def copy_in(self, number: int) -> None: ...
    def copy_out(self, number: int) -> None: ...
    def settle(self) -> None: ...


class DevicePath:
    """The way of keys of ``store``, all of one size, to ``device`` and back. One thread at a time.

    Units are gathered into buffers that are given back at once. Bytes leave from other buffers, as gradients do, so
    that no copy waits for one of the other direction.
    """

    def __init__(self, store: tiered.Store, device: torch.device, nbytes: int) -> None:
        """Take the memory of the device. Raises CapacityError, torch.OutOfMemoryError."""
        self.tier = AcceleratorTier(store.working_set, device, 2 * _NUM_BUFFERS * nbytes)
        self.streams = (self.tier.copies.stream_in, self.tier.copies.stream_out)
        self._out: list[DeviceBuffer] = []
        for _ in range(_NUM_BUFFERS):
            buffer = self.tier.memory.take(nbytes)
            if buffer is None:
                raise self.tier.memory.explain(nbytes)
            self._out.append(buffer)

    def copy_in(self, key: str) -> None:
        """Bring ``key`` to the device, as new bytes whatever is there; blocks on a swap in."""
        self.tier.memory.forget()
        self.tier.gather([key], "r").release(())

    def copy_out(self, key: str, number: int) -> None:
        """Make the bytes of a buffer those of ``key``, which are swapped out then; blocks where DRAM is short."""
        self.tier.copies.empty(self._out[number % _NUM_BUFFERS], self.tier.lease(key, "w"))

    def fill(self, keys: Sequence[str]) -> None:
        """Give the buffers that are copied out the bytes of ``keys``, in turn."""
        for number, buffer in enumerate(self._out):
            lease = self.tier.lease(keys[number % len(keys)], "r")
            self.tier.copies.fill(buffer, lease)
            self.tier.copies.let_go(buffer, lease)
        self.tier.copies.settle_all()

    def close(self) -> None:
        """Wait for the copies in flight, and give the memory of the device back. Idempotent."""
        while self._out:
            self.tier.memory.give(self._out.pop())
        self.tier.forget()


class _StoreSide:
    """The store's copies, of keys that stay in DRAM: nothing is swapped."""

    def __init__(self, store: tiered.Store, device: torch.device, block_nbytes: int, num_blocks: int) -> None:
        self._path = DevicePath(store, device, block_nbytes)
        self._in_keys = [f"in/{number}" for number in range(num_blocks)]
        self._out_keys = [f"out/{number}" for number in range(num_blocks)]
        self.streams = self._path.streams
        for key in (*self._in_keys, *self._out_keys):
            store.working_set.create(key, block_nbytes, scratch=True)
            store.working_set.hold([key])
            lease = store.working_set.lease(key, "w")
            lease.tensor.fill_(1)  # touched: a page that is not page-locked would be the kernel's one page of zeros
            lease.release()

    def copy_in(self, number: int) -> None:
        self._path.copy_in(self._in_keys[number % len(self._in_keys)])

    def copy_out(self, number: int) -> None:
        self._path.copy_out(self._out_keys[number % len(self._out_keys)], number)

    def settle(self) -> None:
        """Have the leases of all copies given back."""
        self._path.tier.copies.settle_all()

    def close(self) -> None:
        """Give the device's memory back."""
        self._path.close()


class _TorchSide:
    """Plain torch: page-locked tensors of its own allocator, copied on two streams, without a lease or a wait."""

    def __init__(self, device: torch.device, block_nbytes: int, num_blocks: int) -> None:
        self.streams = (torch.Stream(device=device), torch.Stream(device=device))
        self._host_in, self._host_out = (
            [torch.empty(block_nbytes, dtype=torch.uint8, device="cpu", pin_memory=True) for _ in range(num_blocks)]
            for _ in range(2)
        )
        self._device_in, self._device_out = (
            [torch.empty(block_nbytes, dtype=torch.uint8, device=device) for _ in range(_NUM_BUFFERS)] for _ in range(2)
        )
        torch.accelerator.synchronize(device)  # order: the memory was allocated on the caller's stream

    def copy_in(self, number: int) -> None:
        source = self._host_in[number % len(self._host_in)]
        with on_stream(self.streams[0]):
            self._device_in[number % _NUM_BUFFERS].copy_(source, non_blocking=True)

    def copy_out(self, number: int) -> None:
        target = self._host_out[number % len(self._host_out)]
        with on_stream(self.streams[1]):
            target.copy_(self._device_out[number % _NUM_BUFFERS], non_blocking=True)

    def settle(self) -> None:
        """A round has ended, and nothing else is kept."""


def measure_copies(
    folder: Path,
    device: torch.device,
    *,
    block_nbytes: int,
    round_nbytes: int,
    memory_nbytes: int,
    rounds: int,
    engine: str,
    check: Callable[[], object],
) -> tuple[list[CopyRow], str | None]:
    """Copy blocks each way and both ways at once, ``rounds`` times after a warm-up, beside torch's copies; blocks.

    Returns a row for each of COPY_OPS, and why the store's DRAM was pageable: None where it was page-locked.
    ``round_nbytes`` go each way in a round, through ``memory_nbytes`` of DRAM. The store is in ``folder``, and writes
    nothing. ``check`` is called between rounds and may raise. Raises TieredError, torch.OutOfMemoryError.
    """
    num_blocks, num_copies = max(1, memory_nbytes // block_nbytes), max(1, round_nbytes // block_nbytes)
    with _store_side(folder, device, block_nbytes, num_blocks, engine) as (ours, why_pageable):
        sides: list[_Side] = [ours, _TorchSide(device, block_nbytes, num_blocks)]
        found: dict[str, tuple[list[float], list[float]]] = {op: ([], []) for op in COPY_OPS}
        for turn in range(-1, rounds):
            for op in COPY_OPS:
                for number in (turn % 2, 1 - turn % 2):  # the first of a pair alternates
                    check()
                    gb_per_s = _run(sides[number], device, op, num_copies, block_nbytes)
                    if turn >= 0:
                        found[op][number].append(gb_per_s)
    nbytes = num_copies * block_nbytes
    rows = [
        CopyRow(
            op, block_nbytes, nbytes * (op != "copy out"), nbytes * (op != "copy in"),
            *spread(ours), tuple(torchs), median_ratio(ours, torchs),
        )
        for op, (ours, torchs) in found.items()
    ]  # fmt: skip
    return rows, why_pageable


@contextmanager
def _store_side(
    folder: Path, device: torch.device, block_nbytes: int, num_blocks: int, engine: str
) -> Iterator[tuple[_StoreSide, str | None]]:
    """Open a store whose DRAM holds all blocks; lend its copies, and the reason why its DRAM is pageable, if it is."""
    dram = max(MIN_DRAM_NBYTES, (2 * num_blocks + 1) * block_nbytes)
    with tiered.Store(folder, dram=dram, durable=False, engine=engine) as store:
        arena = store.working_set.residents.arena
        side = _StoreSide(store, device, block_nbytes, num_blocks)
        try:
            yield side, arena.why_pageable
        finally:
            side.close()


def _run(side: _Side, device: torch.device, op: str, num_copies: int, block_nbytes: int) -> float:
    """Run one round, from an idle device to the events behind its last copies; return 10^9 bytes a second."""
    torch.accelerator.synchronize(device)
    start = time.perf_counter()
    for number in range(num_copies):
        if op != "copy out":
            side.copy_in(number)
        if op != "copy in":
            side.copy_out(number)
    for stream in side.streams:
        stream.record_event().synchronize()
    seconds = time.perf_counter() - start
    side.settle()
    return num_copies * block_nbytes * (2 if op == "in + out" else 1) / seconds / 1e9

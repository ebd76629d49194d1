#!/usr/bin/env python3
"""The bound of the ring engine's CPU time: a compiled loop, which never takes the interpreter's lock, beside fio.

Usage: python bench/ring_loop.py DIR [--rounds 5 --seconds 1 --depth 8 --blocks 1MiB 4MiB 8MiB]

The loop keeps ``depth`` blocks in flight and does nothing else: no classes, no checks but each length, no callbacks. It
and fio, where that is installed, run in turn, on the same file, with the same blocks in huge pages; medians of the
pairs' ratios are printed, with blocks in registered memory and without. One JSON line comes last. Run nothing else.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from tiered.bytes.device.ring import READ, READ_FIXED, WRITE, WRITE_FIXED, Ring
from tiered.measure.bed import Bed
from tiered.measure.fio import HugePages
from tiered.measure.pairs import BusyThread
from tiered.measure.pattern import Pattern
from tiered.measure.rounds import cpu_seconds
from tiered.units import GiB, MiB, parse_bytes

Words = npt.NDArray[Any]

OPCODES = {("read", False): READ, ("read", True): READ_FIXED, ("write", False): WRITE, ("write", True): WRITE_FIXED}
ENTER, GETEVENTS, FIXED_FILE = 426, 1, 1 << 8  # <linux/io_uring.h>
MONOTONIC = 1

_libc = ctypes.CDLL(None)
_system_call = _libc.syscall
_system_call.argtypes = [ctypes.c_long] * 7
_system_call.restype = ctypes.c_long
_clock = _libc.clock_gettime
_clock.argtypes = [ctypes.c_int, ctypes.c_void_p]
_clock.restype = ctypes.c_int


@numba.njit(nogil=True)  # type: ignore[misc, unused-ignore]
def run_loop(
    fd: int, sq_tail: Words, sq_mask: int, sqes: Words, cq_head: Words, cq_tail: Words, cq_mask: int, cqes: Words,
    tail: int, opcode: int, address: int, block: int, file_nbytes: int, depth: int, seconds: float,
) -> tuple[int, int]:  # fmt: skip
    """Move blocks for so long; return how many, or -1 after a short one, and the ring's new tail.

    ``sqes`` is (entries, 8) uint64, ``cqes`` (entries, 2) uint64, the others are words of the ring, (1,) uint32.
    """
    head = np.int64(cq_head[0])
    clock = np.zeros(2, np.int64)
    free = np.arange(depth)
    num_free, num_done, num_pending = depth, 0, 0
    offset = np.int64(0)
    _clock(MONOTONIC, clock.ctypes.data)
    end = clock[0] + clock[1] * 1e-9 + seconds
    is_over = False
    while True:
        while num_free and not is_over:
            num_free -= 1
            tag = free[num_free]
            place = tail & sq_mask
            sqes[place, 0] = np.uint64(opcode) | np.uint64(FIXED_FILE)
            sqes[place, 1] = np.uint64(offset)
            sqes[place, 2] = np.uint64(address + tag * block)
            sqes[place, 3] = np.uint64(block)
            sqes[place, 4] = np.uint64(tag)
            sqes[place, 5] = np.uint64(0)
            tail += 1
            num_pending += 1
            offset = (offset + block) % file_nbytes
        sq_tail[0] = np.uint32(tail)
        if num_free == depth:
            return num_done, tail
        submitted = _system_call(ENTER, fd, num_pending, 1, GETEVENTS, 0, 0)
        num_pending -= max(submitted, 0)
        while head != np.int64(cq_tail[0]):
            if np.int64(cqes[head & cq_mask, 1] & np.uint64(0xFFFFFFFF)) != block:
                return -1, tail
            free[num_free] = np.int64(cqes[head & cq_mask, 0])
            num_free += 1
            num_done += 1
            head += 1
        cq_head[0] = np.uint32(head)
        _clock(MONOTONIC, clock.ctypes.data)
        is_over = clock[0] + clock[1] * 1e-9 > end


class Loop:
    """A ring of its own on the file of ``bed``, and the loop on it."""

    def __init__(self, bed: Bed, block: int, depth: int, *, is_registered: bool) -> None:
        self._block, self._depth, self._file_nbytes = block, depth, bed.file_nbytes // block * block
        self._is_registered = is_registered
        self._fd = os.open(bed.paths[0], os.O_RDWR | os.O_DIRECT)
        self._ring = ring = Ring(2 * depth)
        ring.register_files(1)
        ring.set_file(0, self._fd)
        self._memory = (ctypes.c_char * len(bed.memory)).from_buffer(bed.memory)
        self._address = ctypes.addressof(self._memory)
        if is_registered:
            ring.register_buffers([(self._address, len(bed.memory))])
        self._sq_tail, self._cq_head, self._cq_tail = map(_word, (ring._sq_tail, ring._cq_head, ring._cq_tail))
        self._sqes = np.frombuffer(ring._sqes, dtype=np.uint64).reshape(-1, 8)
        self._cqes = np.frombuffer(ring._cqes, dtype=np.uint64).reshape(-1, 2)
        self._tail = 0

    def run(self, op: str, seconds: float) -> tuple[float, float]:
        """Return GB/s and CPU-seconds per GB."""
        ring, opcode = self._ring, OPCODES[op, self._is_registered]
        cpu_s, start_s = cpu_seconds(), time.perf_counter()
        num_done, self._tail = run_loop(
            ring.fd, self._sq_tail, ring._mask, self._sqes, self._cq_head, self._cq_tail, ring._cq_mask, self._cqes,
            self._tail, opcode, self._address, self._block, self._file_nbytes, self._depth, seconds,
        )  # fmt: skip
        elapsed_s, cpu_s = time.perf_counter() - start_s, cpu_seconds() - cpu_s
        if num_done < 1:
            raise SystemExit(f"{op} of {self._block} bytes: a block fell short or failed")
        gigabytes = num_done * self._block / 1e9
        return gigabytes / elapsed_s, cpu_s / gigabytes

    def close(self) -> None:
        """Close the ring, in which nothing is in flight, and the file."""
        del self._sqes, self._cqes, self._memory
        self._ring.close()
        os.close(self._fd)


def _word(word: ctypes.c_uint32) -> Words:
    return np.ctypeslib.as_array((ctypes.c_uint32 * 1).from_address(ctypes.addressof(word)))


def measure(args: argparse.Namespace, block: int, *, is_registered: bool) -> list[dict[str, Any]]:
    """Print and return a row for each direction."""
    rows = []
    with Bed(
        [args.directory], engine="uring", memory_nbytes=args.depth * block, file_nbytes=args.file, depth=args.depth
    ) as bed:
        bed.write_file()
        fio = bed.find_fio()
        loop = Loop(bed, block, args.depth, is_registered=is_registered)
        try:
            for op in ("read", "write"):
                pattern = Pattern(op, block, args.depth, args.file, args.seconds)
                loop.run(op, args.seconds / 10)
                ours, theirs = [], []
                with HugePages(pattern, fio):
                    if fio is not None:
                        fio.calibrate(pattern, bed.paths)
                    for turn in range(args.rounds):
                        for is_ours in (turn % 2 == 0, turn % 2 == 1):
                            if is_ours:
                                ours.append(loop.run(op, args.seconds))
                            elif fio is not None:
                                found = fio.run(pattern, bed.paths)
                                theirs.append((found.gb_per_s, found.cpu_s_per_gb))
                with BusyThread():
                    beside_busy = loop.run(op, args.seconds)[0]
                gb_per_s, cpu_s_per_gb = (statistics.median(column) for column in zip(*ours, strict=True))
                rows.append({
                    "op": op, "block_bytes": block, "depth": args.depth, "is_registered": is_registered,
                    "gb_per_s": gb_per_s, "ratio_to_fio": ratio(ours, theirs, 0),
                    "cpu_s_per_gb": cpu_s_per_gb, "cpu_ratio_to_fio": ratio(ours, theirs, 1),
                    "beside_busy_thread": beside_busy / gb_per_s,
                })  # fmt: skip
                show(rows[-1])
        finally:
            loop.close()
    return rows


def ratio(ours: list[tuple[float, float]], theirs: list[tuple[float, float]], column: int) -> float | None:
    """Return the median over the pairs, None without fio."""
    if not theirs:
        return None
    return statistics.median(our[column] / their[column] for our, their in zip(ours, theirs, strict=True))


def show(row: dict[str, Any]) -> None:
    """Print ``row`` for people."""
    rate, cpu = row["ratio_to_fio"], row["cpu_ratio_to_fio"]
    beside = ", no fio" if rate is None else f", {rate:.2f} of fio's rate and {cpu:.2f} of its CPU time"
    registered = " registered" if row["is_registered"] else ""
    print(
        f"{row['op']:5s} {row['block_bytes'] // MiB} MiB x {row['depth']}{registered}: {row['gb_per_s']:.2f} GB/s, "
        f"{1e3 * row['cpu_s_per_gb']:.1f} ms of CPU time per GB{beside}; "
        f"beside a busy thread {row['beside_busy_thread']:.2f} of its own rate",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of one round")
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--blocks", type=parse_bytes, nargs="+", default=[MiB, 4 * MiB, 8 * MiB])
    parser.add_argument("--file", type=parse_bytes, default=GiB, help="size of the file that is overwritten")
    args = parser.parse_args()
    args.directory.mkdir(parents=True, exist_ok=True)
    rows = [
        row
        for block in args.blocks
        for registered in (False, True)
        for row in measure(args, block, is_registered=registered)
    ]
    print(json.dumps({"bench": "ring_loop", "rows": rows}))


if __name__ == "__main__":
    main()

"""The tensor level: a store's put and get, digests, catalog and flush included, beside raw rounds in turn.

Puts end with a commit inside the timing, into extents written before. Gets come from a store that was just opened, so
that nothing is resident; its memory was touched before, as that of a store in use and that of raw rounds was. Those
go through memory that no processor's cache holds, as tensors do.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch

import tiered
from tiered.measure.scratch_file import forget
from tiered.measure.settings import NUM_TENSOR_WARM_UPS
from tiered.units import MiB, divide_up

__all__ = ["TensorRounds", "measure_tensors", "new_source", "put_tensors"]

_SOURCE_NBYTES = 256 * MiB  # of random bytes that puts copy from: more than a processor's cache
_MIN_DRAM_NBYTES = 64 * MiB
_MOST_AHEAD = 256  # keys in one prefetch


@dataclass(frozen=True, slots=True)
class TensorRounds:
    """The rounds of one op at one tensor size, and the raw rounds between them.

    "put" ends with a commit, "get" copies into one tensor of the caller's, "lease" looks at the arena's own bytes.
    """

    op: str
    tensor_nbytes: int
    num_tensors: int
    gb_per_s: tuple[float, ...]
    raw_gb_per_s: tuple[float, ...]

    @property
    def median_gb_per_s(self) -> float:
        """The median of the store's rounds."""
        return statistics.median(self.gb_per_s)

    @property
    def ratio_to_raw(self) -> float:
        """The median over the pairs."""
        return statistics.median(ours / raw for ours, raw in zip(self.gb_per_s, self.raw_gb_per_s, strict=True))


def measure_tensors(
    directories: Sequence[Path],
    tensor_nbytes: int,
    *,
    total_nbytes: int,
    dram_nbytes: int,
    rounds: int,
    engine: str,
    raw: dict[str, Callable[[], float]],
) -> list[TensorRounds]:
    """Measure puts and gets of tensors of ``tensor_nbytes`` in a new store over ``directories``; blocks.

    ``raw`` has a "read" and a "write" round to run between, which return 10^9 bytes a second and may raise. The caller
    removes the store.
    """
    keys = [f"tensor/{number}" for number in range(max(1, divide_up(total_nbytes, tensor_nbytes)))]
    source = new_source(tensor_nbytes, len(keys))
    target = torch.ones(tensor_nbytes, dtype=torch.uint8, device="cpu")  # touched
    dram = max(dram_nbytes, _MIN_DRAM_NBYTES)
    rates: dict[str, tuple[list[float], list[float]]] = {op: ([], []) for op in ("put", "get", "lease")}

    def note(op: str, seconds: float, raw_gb_per_s: float) -> None:
        rates[op][0].append(len(keys) * tensor_nbytes / seconds / 1e9)
        rates[op][1].append(raw_gb_per_s)

    with tiered.Store(*directories, dram=dram, engine=engine) as store:
        for turn in range(-NUM_TENSOR_WARM_UPS, rounds):
            raw_gb_per_s = raw["write"]() if turn >= 0 else 0.0
            seconds = put_tensors(store, keys, source, tensor_nbytes)
            if turn >= 0:
                note("put", seconds, raw_gb_per_s)
    for op in ("get", "lease") * rounds:
        raw_gb_per_s = raw["read"]()
        for file in (file for directory in directories for file in directory.glob("data-*")):
            forget(str(file))  # engines that go through the page cache left it there
        with tiered.Store(*directories, dram=dram, engine=engine, mode="r") as store:
            _touch(store, dram)
            seconds = _get(store, keys, target if op == "get" else None, num_ahead=dram // 2 // tensor_nbytes)
        note(op, seconds, raw_gb_per_s)
    return [
        TensorRounds(op, tensor_nbytes, len(keys), tuple(ours), tuple(theirs)) for op, (ours, theirs) in rates.items()
    ]


def new_source(tensor_nbytes: int, num_tensors: int) -> torch.Tensor:
    """Return random bytes to put ``num_tensors`` from: (nbytes,) uint8 of so many that no cache holds them."""
    nbytes = max(tensor_nbytes, min(_SOURCE_NBYTES, num_tensors * tensor_nbytes))
    source = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    source.view(torch.int64).random_()
    return source


def put_tensors(store: tiered.Store, keys: Sequence[str], source: torch.Tensor, tensor_nbytes: int) -> float:
    """Put a tensor under each key and commit; return the seconds it took."""
    num_pieces = len(source) // tensor_nbytes
    pieces = source[: num_pieces * tensor_nbytes].view(num_pieces, tensor_nbytes)
    start = time.perf_counter()
    store.put_many((key, pieces[number % num_pieces]) for number, key in enumerate(keys))
    store.commit()
    return time.perf_counter() - start


def _touch(store: tiered.Store, nbytes: int) -> None:
    """Have the kernel give the store all the memory of its budget, which it zeroes at about the rate of a copy."""
    buffer = store.working_set.reserve(nbytes)
    ctypes.memset(buffer.address, 0, buffer.nbytes)
    store.working_set.unreserve(buffer)


def _get(store: tiered.Store, keys: Sequence[str], target: torch.Tensor | None, *, num_ahead: int) -> float:
    """Get every key into ``target``, or lease it; ask for about so many ahead. Return the seconds it took."""
    num_ahead = max(2, min(_MOST_AHEAD, num_ahead))
    start = time.perf_counter()
    for number, key in enumerate(keys):
        if number % max(1, num_ahead // 4) == 0:  # often enough that most of it is ahead at any time
            store.prefetch(islice(keys, number, number + num_ahead))
        if target is None:
            with store.lease(key):
                pass
        else:
            store.get(key, out=target)
    return time.perf_counter() - start

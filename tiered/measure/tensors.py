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
from tiered.measure.rounds import median_ratio, row_line, spread
from tiered.measure.scratch_file import forget
from tiered.measure.settings import NUM_TENSOR_WARM_UPS
from tiered.units import MiB, divide_up

__all__ = ["TENSOR_TITLE", "TensorRow", "measure_tensors", "new_source", "put_tensors"]

TENSOR_TITLE = "op        tensor      GB/s          range    raw  ratio"


_SOURCE_NBYTES = 256 * MiB  # of random bytes that puts copy from: more than a processor's cache
_MIN_DRAM_NBYTES = 64 * MiB
_MOST_AHEAD = 256  # keys in one prefetch


@dataclass(frozen=True, slots=True)
class TensorRow:
    """Puts, gets or leases of tensors of one size, and the raw rounds between them.

    "put" ends with a commit, "get" copies into one tensor of the caller's, "lease" looks at the arena's own bytes.
    """

    op: str
    tensor_bytes: int
    num_tensors: int
    directory: str  # several are joined by "+"
    rounds: int
    gb_per_s: float
    gb_per_s_min: float
    gb_per_s_max: float
    raw_gb_per_s: tuple[float, ...]  # of several directories: the sum of their own rates
    ratio_to_raw: float  # the median over the pairs

    def __str__(self) -> str:
        rates = self.gb_per_s, self.gb_per_s_min, self.gb_per_s_max
        return row_line(self.op, self.tensor_bytes, rates, statistics.median_high(self.raw_gb_per_s), self.ratio_to_raw)


def measure_tensors(
    folders: Sequence[Path],
    tensor_nbytes: int,
    *,
    directory: str,
    total_nbytes: int,
    dram_nbytes: int,
    rounds: int,
    engine: str,
    raw: dict[str, Callable[[], float]],
) -> list[TensorRow]:
    """Measure puts and gets of tensors of ``tensor_nbytes`` in a new store over ``folders`` of ``directory``; blocks.

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

    with tiered.Store(*folders, dram=dram, engine=engine) as store:
        for turn in range(-NUM_TENSOR_WARM_UPS, rounds):
            raw_gb_per_s = raw["write"]() if turn >= 0 else 0.0
            seconds = put_tensors(store, keys, source, tensor_nbytes)
            if turn >= 0:
                note("put", seconds, raw_gb_per_s)
    for op in ("get", "lease") * rounds:
        raw_gb_per_s = raw["read"]()
        for file in (file for folder in folders for file in folder.glob("data-*")):
            forget(str(file))  # engines that go through the page cache left it there
        with tiered.Store(*folders, dram=dram, engine=engine, mode="r") as store:
            _touch(store, dram)
            seconds = _get(store, keys, target if op == "get" else None, num_ahead=dram // 2 // tensor_nbytes)
        note(op, seconds, raw_gb_per_s)
    return [
        TensorRow(op, tensor_nbytes, len(keys), directory, *spread(ours), tuple(theirs), median_ratio(ours, theirs))
        for op, (ours, theirs) in rates.items()
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

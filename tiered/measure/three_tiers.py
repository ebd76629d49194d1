"""Swapping over all three tiers at once, as a step does: NVMe to DRAM to a compute device, and back beside it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

import tiered
from tiered.measure.copying import DevicePath, LinkRates
from tiered.measure.rounds import move_seconds, row_line, spread
from tiered.measure.settings import NUM_TIER_WARM_UPS
from tiered.measure.swapping import SwapRates
from tiered.measure.tensors import new_source, put_tensors
from tiered.tiers.schedule import Rooms, SharedSchedule

__all__ = ["BOUND_TITLE", "TierRow", "bound_gb_per_s", "measure_three_tiers"]

BOUND_TITLE = "op        tensor      GB/s          range  bound  ratio"


@dataclass(frozen=True, slots=True)
class TierRow:
    """Swapping over three tiers, in both directions at once, and the bytes of all rounds at each border."""

    directory: str  # several are joined by "+"
    tensor_bytes: int
    num_tensors: int  # each way in a round
    dram_bytes: int
    rounds: int
    gb_per_s: float  # copied in and out together
    gb_per_s_min: float
    gb_per_s_max: float
    in_bytes: int  # to the compute device
    out_bytes: int  # from it
    read_bytes: int  # from NVMe; less than went on from there, where DRAM had some still
    write_bytes: int  # to NVMe
    bound_gb_per_s: float  # min(PCIe, NVMe), of the rates measured before
    ratio_to_bound: float

    def __str__(self) -> str:
        rates = self.gb_per_s, self.gb_per_s_min, self.gb_per_s_max
        return row_line("3 tiers", self.tensor_bytes, rates, self.bound_gb_per_s, self.ratio_to_bound)


def bound_gb_per_s(
    copied: tuple[int, int], swapped: tuple[int, int], link: LinkRates, drives: Sequence[SwapRates]
) -> float:
    """Return min(PCIe, NVMe): the rate that the same bytes would have at the slower of both borders alone.

    Bytes B = in + out, those ``copied``. PCIe = B / t(in, out) with the rates of ``link``, NVMe = B / t(read, written)
    of the bytes ``swapped`` with those of ``drives`` together, and t(a, b) = max(a / rate_a, b / rate_b) +
    (1 - duplex) * min(a / rate_a, b / rate_b).
    """
    pcie_s = move_seconds(*copied, link.in_gb_per_s, link.out_gb_per_s, duplex=link.duplex)
    nvme_s = move_seconds(
        *swapped,
        sum(one.read_gb_per_s for one in drives),
        sum(one.write_gb_per_s for one in drives),
        duplex=min(one.duplex for one in drives),
    )
    return sum(copied) / max(pcie_s, nvme_s) / 1e9


def measure_three_tiers(
    folders: Sequence[Path],
    device: torch.device,
    *,
    directory: str,
    link: LinkRates,
    drives: Sequence[SwapRates],
    tensor_nbytes: int,
    total_nbytes: int,
    dram_nbytes: int,
    rounds: int,
    engine: str,
    check: Callable[[], object],
) -> TierRow:
    """Have ``total_nbytes`` pass all tiers each way in a round, ``rounds`` times after a warm-up; blocks.

    Each tensor read is one that was swapped out, unless DRAM kept it; the schedule of a training step reads ahead and
    chooses what makes way. A round ends with a commit, beside which the first reads of the next begin. ``check`` is
    called between rounds and may raise. The bound is by ``link`` and ``drives``, of the row's ``directory``. The caller
    removes the store in ``folders``. Raises TieredError, torch.OutOfMemoryError.
    """
    num_tensors = max(1, total_nbytes // tensor_nbytes)
    keys = _Keys([f"in/{n}" for n in range(num_tensors)], [f"out/{n}" for n in range(num_tensors)])
    with tiered.Store(*folders, dram=dram_nbytes, engine=engine) as store:
        source = new_source(tensor_nbytes, num_tensors)
        for names in (keys.inward, keys.outward):
            put_tensors(store, names, source, tensor_nbytes)
        with _path(store, device, tensor_nbytes, keys) as (path, schedule):
            seconds: list[float] = []
            for turn in range(-NUM_TIER_WARM_UPS, rounds):
                check()
                if turn == 0:
                    before, copied = store.statistics(), (path.tier.copies.in_bytes, path.tier.copies.out_bytes)
                taken_s = _step(store, path, schedule, keys)
                if turn >= 0:
                    seconds.append(taken_s)
            after, copies = store.statistics(), path.tier.copies
            moved = copies.in_bytes - copied[0], copies.out_bytes - copied[1]
            swapped = after.read_bytes - before.read_bytes, after.write_bytes - before.write_bytes
    rates = spread([2 * num_tensors * tensor_nbytes / one / 1e9 for one in seconds])
    bound = bound_gb_per_s(moved, swapped, link, drives)
    return TierRow(
        directory, tensor_nbytes, num_tensors, dram_nbytes, *rates, *moved, *swapped, bound, rates[1] / bound
    )


@dataclass(frozen=True, slots=True)
class _Keys:
    inward: list[str]
    outward: list[str]


@contextmanager
def _path(
    store: tiered.Store, device: torch.device, nbytes: int, keys: _Keys
) -> Iterator[tuple[DevicePath, SharedSchedule]]:
    """Lend the way to the device, and the schedule of keys that are used in order, step by step."""
    path = DevicePath(store, device, nbytes)
    rooms = Rooms()
    rooms.nbytes = dict.fromkeys(keys.outward, nbytes)
    try:
        path.fill(keys.inward)
        schedule = SharedSchedule(
            store.working_set,
            [key for pair in zip(keys.inward, keys.outward, strict=True) for key in pair],
            dict.fromkeys(keys.inward, nbytes),
            window_bytes=store.working_set.budget_bytes // 2,  # the rest is for bytes on their way out
            rooms=rooms,
        )
        path.tier.attach(schedule.distance, lambda: False)
        store.working_set.add_reclaimer(lambda _: path.tier.settle_one())
        yield path, schedule
    finally:
        path.close()


def _step(store: tiered.Store, path: DevicePath, schedule: SharedSchedule, keys: _Keys) -> float:
    """Bring all keys inward and, beside, have all outward ones come back, durably; return the seconds it took."""
    start = time.perf_counter()
    for number, (inward, outward) in enumerate(zip(keys.inward, keys.outward, strict=True)):
        path.copy_in(inward)
        schedule.use(inward, outward)  # order: until it is leased, its next use is now
        path.copy_out(outward, number)
    path.tier.copies.settle_all()
    schedule.end_step()
    store.commit()
    return time.perf_counter() - start

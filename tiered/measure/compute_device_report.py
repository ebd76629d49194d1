"""The results of a compute device, as rows and for JSON: copies to and from it, and swapping over three tiers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tiered.measure.copying import CopyRounds, LinkRates
from tiered.measure.swapping import SwapRates
from tiered.measure.three_tiers import TierRounds, bound_gb_per_s
from tiered.units import format_short

__all__ = ["BOUND_TITLE", "COPY_TITLE", "ComputeDeviceReport", "CopyRow", "TierRow"]

COPY_TITLE = "op         block      GB/s          range  torch  ratio"
BOUND_TITLE = "op        tensor      GB/s          range  bound  ratio"


@dataclass(frozen=True, slots=True)
class CopyRow:
    """Copies one way or both ways at once: the medians over the rounds, the store's and torch's."""

    op: str  # "copy in", "copy out" or "in + out"
    block_bytes: int
    in_bytes: int  # to the device in a round
    out_bytes: int  # from it
    rounds: int
    gb_per_s: float  # both directions together
    gb_per_s_min: float
    gb_per_s_max: float
    torch_gb_per_s: tuple[float, ...]  # of each round
    ratio_to_torch: float  # the median over the pairs

    @classmethod
    def of(cls, found: CopyRounds) -> CopyRow:
        """Return the row of ``found``."""
        return cls(
            op=found.op,
            block_bytes=found.block_nbytes,
            in_bytes=found.in_nbytes,
            out_bytes=found.out_nbytes,
            rounds=len(found.gb_per_s),
            gb_per_s=found.median_gb_per_s,
            gb_per_s_min=min(found.gb_per_s),
            gb_per_s_max=max(found.gb_per_s),
            torch_gb_per_s=found.torch_gb_per_s,
            ratio_to_torch=found.ratio_to_torch,
        )

    def __str__(self) -> str:
        torchs = sorted(self.torch_gb_per_s)[len(self.torch_gb_per_s) // 2]
        rates = (self.gb_per_s, self.gb_per_s_min, self.gb_per_s_max, torchs, self.ratio_to_torch)
        return _line(self.op, self.block_bytes, rates)


@dataclass(frozen=True, slots=True)
class TierRow:
    """Swapping over three tiers, in both directions at once."""

    directory: str  # several are joined by "+"
    tensor_bytes: int
    num_tensors: int  # each way in a round
    dram_bytes: int
    rounds: int
    gb_per_s: float  # copied in and out together
    gb_per_s_min: float
    gb_per_s_max: float
    in_bytes: int  # to the device, in all rounds
    out_bytes: int  # from it
    read_bytes: int  # from NVMe
    write_bytes: int  # to NVMe
    bound_gb_per_s: float  # min(PCIe, NVMe), of the rates measured before
    ratio_to_bound: float

    @classmethod
    def of(cls, found: TierRounds, link: LinkRates, drives: Sequence[SwapRates], *, directory: str) -> TierRow:
        """Return the row of ``found``, beside the bound by ``link`` and ``drives``."""
        bound = bound_gb_per_s(found, link, drives)
        return cls(
            directory=directory,
            tensor_bytes=found.tensor_nbytes,
            num_tensors=found.num_tensors,
            dram_bytes=found.dram_nbytes,
            rounds=len(found.gb_per_s),
            gb_per_s=found.median_gb_per_s,
            gb_per_s_min=min(found.gb_per_s),
            gb_per_s_max=max(found.gb_per_s),
            in_bytes=found.in_nbytes,
            out_bytes=found.out_nbytes,
            read_bytes=found.read_nbytes,
            write_bytes=found.write_nbytes,
            bound_gb_per_s=bound,
            ratio_to_bound=found.median_gb_per_s / bound,
        )

    def __str__(self) -> str:
        rates = (self.gb_per_s, self.gb_per_s_min, self.gb_per_s_max, self.bound_gb_per_s, self.ratio_to_bound)
        return _line("3 tiers", self.tensor_bytes, rates)


@dataclass(slots=True)
class ComputeDeviceReport:
    """The results of one compute device so far."""

    device: str  # with its index
    device_type: str
    why_pageable: str | None  # None: the store's DRAM was page-locked
    copies: list[CopyRow]
    link: LinkRates
    swap: TierRow | None = None


def _line(op: str, nbytes: int, rates: tuple[float, float, float, float, float]) -> str:
    median, least, most, reference, ratio = rates
    spread = f"{least:.2f}-{most:.2f}"
    return f"{op:<8} {format_short(nbytes):>7} {median:>9.2f} {spread:>14} {reference:>6.2f} {ratio:>6.2f}"

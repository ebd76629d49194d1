"""From figures to advice: the best settings, how far reads and writes share the drive, one line for people.

Pure arithmetic over the measurements of the other files.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from tiered.measure.copying import LinkRates
from tiered.measure.pairs import PointRow
from tiered.measure.rounds import duplex_of, move_seconds
from tiered.measure.swapping import SwapRates
from tiered.measure.tensors import TensorRow
from tiered.measure.three_tiers import TierRow
from tiered.units import format_bytes

__all__ = ["Best", "best_of", "compute_verdict_of", "step_seconds", "verdict_of"]

_READ_BYTES_PER_PARAM, _WRITE_BYTES_PER_PARAM = 14, 12  # a step of state="exact" with nothing held: README
_AS_GOOD_AS = 0.97  # of the best: fewer bytes in flight are worth 3 %, about the difference between rounds
_THE_SAME = 0.03


@dataclass(frozen=True, slots=True)
class Best:
    """The best settings for a drive, and their rates."""

    block_bytes: int
    read_depth: int
    write_depth: int
    read_gb_per_s: float
    write_gb_per_s: float
    duplex: float | None  # 0: reads and writes share the drive, 1: neither slows the other; None: not measured
    read_ratio_to_fio: float | None
    write_ratio_to_fio: float | None

    @property
    def seconds(self) -> float:
        """The I/O time of a training step of 1e9 parameters, reads and writes one after the other."""
        return step_seconds(1e9, self.read_gb_per_s, self.write_gb_per_s, duplex=0.0)


def best_of(figures: Sequence[PointRow]) -> Best:
    """Return the best settings: one block size, a depth for each direction, by the I/O time of a training step.

    Among those within 3 % of the best, the fewest bytes in flight. Needs a read and a write at one block size at least.
    """
    choices: list[tuple[float, int, PointRow, PointRow]] = []
    for block_bytes in sorted({figure.block_bytes for figure in figures}):
        reads = [figure for figure in figures if figure.op == "read" and figure.block_bytes == block_bytes]
        writes = [figure for figure in figures if figure.op == "write" and figure.block_bytes == block_bytes]
        if reads and writes:
            read, write = _shallowest(reads), _shallowest(writes)
            seconds = step_seconds(1e9, read.gb_per_s, write.gb_per_s, duplex=0.0)
            choices.append((seconds, block_bytes * (read.depth + write.depth), read, write))
    fastest = min(seconds for seconds, *_ in choices)
    _, _, read, write = min((choice for choice in choices if choice[0] * _AS_GOOD_AS <= fastest), key=lambda c: c[1])
    mixed = [figure for figure in figures if figure.op == "mixed"]
    mixed = [one for one in mixed if one.block_bytes == read.block_bytes] or mixed
    duplexes = [duplex_of(one.read_gb_per_s, one.write_gb_per_s, read.gb_per_s, write.gb_per_s) for one in mixed]
    return Best(
        block_bytes=read.block_bytes,
        read_depth=read.depth,
        write_depth=write.depth,
        read_gb_per_s=read.gb_per_s,
        write_gb_per_s=write.gb_per_s,
        duplex=max(duplexes, default=None),
        read_ratio_to_fio=read.ratio_to_fio,
        write_ratio_to_fio=write.ratio_to_fio,
    )


def step_seconds(num_params: float, read_gb_per_s: float, write_gb_per_s: float, *, duplex: float | None) -> float:
    """Return the I/O time of a training step: 14 bytes per parameter read, 12 written, overlapped by ``duplex``."""
    return move_seconds(
        num_params * _READ_BYTES_PER_PARAM,
        num_params * _WRITE_BYTES_PER_PARAM,
        read_gb_per_s,
        write_gb_per_s,
        duplex=duplex or 0.0,
    )


def verdict_of(
    bests: Sequence[Best],
    together: Sequence[TensorRow] = (),
    *,
    swapping: Sequence[SwapRates] = (),
    has_fio: bool = False,
) -> str:
    """Return one line for people about all drives; ``together`` has a put and a get of a store over all, if measured.

    ``swapping`` has each drive's rates for tensors, as a step moves them; else it counts with the best rates.
    ``has_fio`` says that fio is there, for bests without a ratio to it.
    """
    read = max((one.gb_per_s for one in together if one.op == "get"), default=bests[0].read_gb_per_s)
    write = max((one.gb_per_s for one in together if one.op == "put"), default=bests[0].write_gb_per_s)
    known = [best.duplex for best in bests if best.duplex is not None]
    seconds = step_seconds(1e9, read, write, duplex=min(known, default=None))
    tensors = ""
    if len(swapping) == 1 and not together:
        one = swapping[0]
        seconds = step_seconds(1e9, one.read_gb_per_s, one.write_gb_per_s, duplex=one.duplex)
        tensors = f" (tensors, which no cache holds, {one.read_gb_per_s:.1f} and {one.write_gb_per_s:.1f})"
    if together:
        tensors = " (a store over all of them)"
    drives = "this drive" if len(swapping or bests) == 1 else f"these {len(swapping or bests)} drives"
    return (
        f"read {read:.1f} GB/s, write {write:.1f} GB/s with {_settings(bests)}{tensors}: "
        f"swapping 1 B parameters in and out of {drives} takes {seconds:.1f} s a step "
        "(14 bytes of each read, 12 written: bf16 with exact AdamW, none of it held in DRAM); "
        f"{_beside_fio(bests, has_fio=has_fio)}"
    )


def compute_verdict_of(device: str, link: LinkRates, swap: TierRow | None, ratios_to_torch: Sequence[float]) -> str:
    """Return what the verdict says about a compute device; ``ratios_to_torch``: of each kind of copy."""
    said = (
        f"copies to {device} run at {link.in_gb_per_s:.1f} GB/s and from it at {link.out_gb_per_s:.1f}, "
        f"torch reaches {_beside(ratios_to_torch)}"
    )
    if swap is None:
        return said
    share = f"{swap.ratio_to_bound * 100:.0f} % of min(PCIe, NVMe)"
    return f"{said}; all three tiers at once move {swap.gb_per_s:.1f} GB/s, {share}"


def _shallowest(figures: Sequence[PointRow]) -> PointRow:
    fastest = max(figure.gb_per_s for figure in figures)
    good = [figure for figure in figures if figure.gb_per_s >= _AS_GOOD_AS * fastest]
    return min(good, key=lambda figure: figure.depth)


def _settings(bests: Sequence[Best]) -> str:
    best = bests[0]
    if any((one.block_bytes, one.read_depth, one.write_depth) != _key(best) for one in bests):
        return "each at its own best"
    depth = str(best.read_depth)
    if best.read_depth != best.write_depth:
        depth = f"{best.read_depth} reading, {best.write_depth} writing"
    return f"{format_bytes(best.block_bytes).replace('.0 ', ' ')} x {depth}"


def _key(best: Best) -> tuple[int, int, int]:
    return best.block_bytes, best.read_depth, best.write_depth


def _beside_fio(bests: Sequence[Best], *, has_fio: bool) -> str:
    said = []
    for verb in ("read", "write"):
        ratios = [ratio for best in bests if (ratio := getattr(best, f"{verb}_ratio_to_fio")) is not None]
        if not ratios:
            return f"fio {'did not work' if has_fio else 'is not installed'}, so there is no reference"
        said.append(_beside(ratios))
    if said[0] == said[1]:
        return f"fio reaches {said[0]}"
    return f"fio reads {said[0]} and writes {said[1]}"


def _beside(ratios: Sequence[float]) -> str:
    """Return how much more a reference reaches, from ratios of ours to it."""
    difference = 1 / statistics.median(ratios) - 1
    if abs(difference) <= _THE_SAME:
        return "the same"
    return f"{abs(difference) * 100:.0f} % {'more' if difference > 0 else 'less'}"

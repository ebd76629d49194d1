"""Codes keep the values of a tile in fewer bytes than fp32 has, and make them fp32 again.

Master codes keep the bits of an fp32 master that its bf16 parameter lacks, moment codes the moments of a rule. All
arithmetic is elementwise, in place on scratch, by torch operations. Codes of 8 bits are in compact_codes.py.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import torch

from tiered.units import round_up
from tiered.zero.formats.tile_scratch import Dither, TileRows
from tiered.zero.layout import CUT_NUMEL

__all__ = [
    "NO_DITHER", "Field", "MarkedRemainder", "MasterCode", "MomentCode", "RawMoment", "Remainder", "cut_like", "padded",
]  # fmt: skip

_TIE = 0x8000
_ROW_NUMEL, _MOST_ROWS = 1024, 64  # looked through for ties, mended at once

NO_DITHER = Dither(torch.empty(0, dtype=torch.float32, device="cpu"))
"""For codes that lose nothing."""


class Field(NamedTuple):
    """One array of a piece: ``dtype``, and how many elements of the parameter one entry stands for."""

    dtype: torch.dtype
    numel_per_entry: int = 1

    def length(self, numel: int) -> int:
        """Return the entries for ``numel`` elements."""
        return -(-numel // self.numel_per_entry)


class MasterCode(Protocol):
    """Keeps fp32 masters as bf16 parameters (``hi``, in the unit) and ``fields``."""

    fields: tuple[Field, ...]

    def decode(self, hi: torch.Tensor, fields: Sequence[torch.Tensor], rows: TileRows) -> torch.Tensor:
        """Return the masters, (numel,) fp32, in ``rows.master``; overwrites ``gradient`` and ``work``."""

    def encode(self, hi: torch.Tensor, fields: Sequence[torch.Tensor], rows: TileRows, dither: Dither) -> None:
        """Write ``rows.master`` to ``hi`` and ``fields``; overwrites ``master``, ``gradient`` and ``work``."""

    def attach(self, hi: torch.Tensor, fields: Sequence[torch.Tensor], rows: TileRows) -> None:
        """Write the part of ``rows.master`` that ``hi`` lacks to ``fields``, to the nearest; ``hi`` stays as it is."""

    def clear(self, fields: Sequence[torch.Tensor]) -> None:
        """Make the parameter its own master: it lacks nothing."""


class MomentCode(Protocol):
    """Keeps one moment as ``fields``; ``is_raw`` says that the field is the moment itself."""

    fields: tuple[Field, ...]
    is_raw: bool

    def decode(self, fields: Sequence[torch.Tensor], out: torch.Tensor, work: torch.Tensor) -> torch.Tensor:
        """Return the moments: (numel,), in ``out`` (or the raw field). ``out``, ``work``: whole rows of scratch."""

    def encode(
        self, values: torch.Tensor, fields: Sequence[torch.Tensor], work: torch.Tensor, dither: Dither, stream: int
    ) -> None:
        """Write the ``values`` that ``decode`` returned, updated since, to ``fields``; overwrites them."""


# -- masters of bf16 parameters ----------------------------------------------------------------------------------------


class Remainder:
    """The other 16 bits, lossless: ``hi`` is torch's rounding, lo the master's low 16 bits, read as signed.

    So master_bits = (hi << 16) + lo, because torch rounds up where lo is negative. One remainder does not fit: a tie
    above an even ``hi``, +0x8000, which reads as -0x8000. It is marked in the sign bits of the second of ``fields``, a
    moment (fp32) that is never negative. Lossless but for a NaN, whose upper half becomes the one that torch rounds to.

    Ties are as rare as one element in 65,536: the search looks at the smallest lo of each 1,024 elements.
    """

    fields: tuple[Field, ...] = (Field(torch.int16),)

    def decode(self, hi: torch.Tensor, fields: Sequence[torch.Tensor], rows: TileRows) -> torch.Tensor:
        """Return the masters; clears the marks."""
        master = _join(hi, fields[0], rows)
        _where_ties_are(_undo_marks, fields[0], master.view(torch.int32), fields[1].view(torch.int32))
        return master

    def encode(self, hi: torch.Tensor, fields: Sequence[torch.Tensor], rows: TileRows, dither: Dither) -> None:
        """Split the masters; the sign bits of the moment must be clear."""
        _split(hi, fields[0], rows)
        master = rows.master.view(torch.int32)[: hi.numel()]
        _where_ties_are(_mark, fields[0], master, fields[1].view(torch.int32))

    def decode_all(
        self, his: list[torch.Tensor], fields: Sequence[Sequence[torch.Tensor]], rows: TileRows
    ) -> list[torch.Tensor]:
        """As ``decode``, of pieces that lie one after the other in ``rows``, at multiples of CUT_NUMEL."""
        sizes = padded(his)
        end = sum(sizes)
        work = rows.work.view(torch.int32)[:end]
        masters = cut_like(his, sizes, rows.master)
        torch._foreach_copy_(masters, his)
        torch._foreach_copy_(cut_like(his, sizes, work), [each[0] for each in fields])
        rows.master.view(torch.int32)[:end].add_(work)
        for place in _pieces_at(torch.eq(work, -_TIE, out=rows.gradient.view(torch.uint8)[:end]), sizes):
            _undo_marks(masters[place].view(torch.int32), fields[place][1].view(torch.int32))
        return masters

    def encode_all(self, his: list[torch.Tensor], fields: Sequence[Sequence[torch.Tensor]], rows: TileRows) -> None:
        """As ``encode``, where ``decode_all`` returned the masters."""
        sizes = padded(his)
        end = sum(sizes)
        whole = rows.master.view(torch.int32)[:end]
        bits = cut_like(his, sizes, whole)
        torch._foreach_copy_(his, cut_like(his, sizes, rows.master))
        torch._foreach_copy_([each[0] for each in fields], bits)
        for place in _pieces_at(_is_marked(whole, out=rows.work.view(torch.int32)[:end]), sizes):
            _mark(bits[place], fields[place][1].view(torch.int32))

    def attach(self, hi: torch.Tensor, fields: Sequence[torch.Tensor], rows: TileRows) -> None:
        """As ``encode``: ``hi`` is torch's rounding of the master already."""
        self.encode(rows.gradient.view(torch.bfloat16)[: hi.numel()], fields, rows, NO_DITHER)

    def clear(self, fields: Sequence[torch.Tensor]) -> None:
        fields[0].zero_()
        fields[1].view(torch.int32).bitwise_and_(0x7FFFFFFF)


class MarkedRemainder(Remainder):
    """The other 16 bits, lossless, as ``Remainder``; the ties are marked in a bitmap, an eighth of a byte each."""

    fields: tuple[Field, ...] = (Field(torch.int16), Field(torch.uint8, 8))

    def decode(self, hi: torch.Tensor, fields: Sequence[torch.Tensor], rows: TileRows) -> torch.Tensor:
        n = hi.numel()
        bits = _join(hi, fields[0], rows).view(torch.int32)
        nonzero = rows.gradient.view(torch.uint8)[: 8 * fields[1].numel()]  # a byte per element
        words = nonzero.view(torch.int64)
        words.copy_(fields[1])
        words.mul_(0x0101010101010101).bitwise_and_(0x8040201008040201 - (1 << 64))  # byte i keeps bit i
        work = rows.work.view(torch.int32)[:n]
        work.copy_(nonzero[:n])
        bits.add_(work.clamp_(max=1), alpha=1 << 16)
        return rows.master[:n]

    def encode(self, hi: torch.Tensor, fields: Sequence[torch.Tensor], rows: TileRows, dither: Dither) -> None:
        n = hi.numel()
        _split(hi, fields[0], rows)
        marks = _is_marked(rows.master.view(torch.int32)[:n], out=rows.work.view(torch.int32)[:n])
        ones = rows.gradient.view(torch.uint8)[: 8 * fields[1].numel()]
        ones[n:].zero_()
        ones[:n].copy_(marks)
        words = ones.view(torch.int64)
        words.mul_(0x0102040810204080).bitwise_right_shift_(56)  # the lowest bit of byte i becomes bit 56 + i
        fields[1].copy_(words)

    def clear(self, fields: Sequence[torch.Tensor]) -> None:
        for field in fields:
            field.zero_()


def _join(hi: torch.Tensor, lo: torch.Tensor, rows: TileRows) -> torch.Tensor:
    """Return the fp32 whose bits are (hi << 16) + lo, in ``rows.master``; overwrites ``work``."""
    n = hi.numel()
    master, work = rows.master[:n], rows.work.view(torch.int32)[:n]
    master.copy_(hi)
    work.copy_(lo)
    master.view(torch.int32).add_(work)
    return master


def _split(hi: torch.Tensor, lo: torch.Tensor, rows: TileRows) -> None:
    """Split ``rows.master`` into torch's rounding of it and its low 16 bits."""
    master = rows.master[: hi.numel()]
    hi.copy_(master)
    lo.copy_(master.view(torch.int32))


def _is_marked(bits: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return 1 where the low 16 bits of ``bits`` (int32) are a tie above an even upper half, else 0."""
    return torch.bitwise_and(bits, 0x1FFFF, out=out).eq_(_TIE)


def _undo_marks(bits: torch.Tensor, marks: torch.Tensor) -> None:
    bits.sub_(marks >> 31, alpha=1 << 16)  # -1 where marked
    marks.bitwise_and_(0x7FFFFFFF)


def _mark(bits: torch.Tensor, marks: torch.Tensor) -> None:
    marks.bitwise_or_(_is_marked(bits) << 31)


def padded(pieces: Iterable[torch.Tensor]) -> list[int]:
    """Return the elements that each of ``pieces`` takes of a row: a multiple of CUT_NUMEL."""
    return [round_up(piece.numel(), CUT_NUMEL) for piece in pieces]


def cut_like(pieces: Sequence[torch.Tensor], sizes: Sequence[int], row: torch.Tensor) -> list[torch.Tensor]:
    """Return views of ``row`` with the elements of each of ``pieces``, one after the other, ``padded`` to ``sizes``."""
    parts = row[: sum(sizes)].split_with_sizes(sizes)
    return [part if part.numel() == p.numel() else part[: p.numel()] for part, p in zip(parts, pieces, strict=True)]


def _pieces_at(found: torch.Tensor, sizes: Sequence[int]) -> set[int]:
    """Return which pieces of ``sizes`` elements have a place in a row at which ``found`` is not 0."""
    places = found.nonzero().flatten().tolist()
    ends = list(itertools.accumulate(sizes)) if places else []
    return {bisect.bisect_right(ends, place) for place in places}


def _where_ties_are(
    change: Callable[[torch.Tensor, torch.Tensor], None], lo: torch.Tensor, bits: torch.Tensor, marks: torch.Tensor
) -> None:
    """Call ``change(bits, marks)`` for all rows of 1,024 elements in which some ``lo`` is a tie, or for all."""
    if not lo.is_cpu:  # looking for rows would wait for the device
        change(bits, marks)
        return
    whole = lo.numel() // _ROW_NUMEL * _ROW_NUMEL
    if whole < lo.numel():
        change(bits[whole:], marks[whole:])
    smallest = lo[:whole].view(-1, _ROW_NUMEL).amin(1)
    found = smallest.eq_(-_TIE).nonzero().flatten()
    for start in range(0, found.numel(), _MOST_ROWS):  # (rows, 1024) copies, changed and put back
        rows = found[start : start + _MOST_ROWS]
        bits_there, marks_there = (all_.view(-1, _ROW_NUMEL) for all_ in (bits[:whole], marks[:whole]))
        some_bits, some_marks = bits_there.index_select(0, rows), marks_there.index_select(0, rows)
        change(some_bits, some_marks)
        bits_there.index_copy_(0, rows, some_bits)
        marks_there.index_copy_(0, rows, some_marks)


# -- moments -----------------------------------------------------------------------------------------------------------


class RawMoment:
    """The moment itself, in the dtype that the rule computes in."""

    is_raw = True

    def __init__(self, dtype: torch.dtype) -> None:
        self.fields: tuple[Field, ...] = (Field(dtype),)

    def decode(self, fields: Sequence[torch.Tensor], out: torch.Tensor, work: torch.Tensor) -> torch.Tensor:
        return fields[0]

    def encode(
        self, values: torch.Tensor, fields: Sequence[torch.Tensor], work: torch.Tensor, dither: Dither, stream: int
    ) -> None:
        """Nothing is left to do where ``values`` is the field."""
        if values.data_ptr() != fields[0].data_ptr():
            fields[0].copy_(values)

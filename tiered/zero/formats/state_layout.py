"""Layouts: the values of a parameter's state that a format keeps, their bytes, and the update of one tile of them.

A format is chosen by its word (``state=``), a layout follows from it, from the rule and from the parameter's dtype:

- exact: fp32 moments and the bits of an fp32 master; fp32 and fp64 parameters keep their moments in their own dtype
- compact: 8 bits a moment and 8 bits more for the master of a bf16 parameter

fp64 parameters keep exact state under every format: a user that asks for fp64 asks for its bits.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from tiered.units import round_up
from tiered.zero.formats.codes import (
    Field,
    MarkedRemainder,
    MasterCode,
    MomentCode,
    RawMoment,
    Remainder,
    cut_like,
    padded,
)
from tiered.zero.formats.compact_codes import PositiveMoment8, Remainder8, SignedMoment8, tried_compact_kernels
from tiered.zero.formats.rules import Hyperparameters, Rule
from tiered.zero.formats.tile_scratch import TileRows, TileScratch
from tiered.zero.layout import TOGETHER_NUMEL

__all__ = ["FORMATS", "Layout", "Layouts", "Tile"]

FORMATS = ("exact", "compact")

_FIELD_ALIGNMENT = 64  # bytes


class Layouts:
    """The layouts of all parameters of one optimizer: ``word`` is the format's, one of FORMATS.

    ``sizes_only``: only sizes and places will be asked for, which compiles no kernels.
    """

    def __init__(self, word: str, rule: Rule, *, sizes_only: bool = False) -> None:
        assert word in FORMATS
        self.word = word
        self.rule = rule
        self._sizes_only = sizes_only
        self._layouts: dict[torch.dtype, Layout] = {}

    def __repr__(self) -> str:
        return f"Layouts({self.word!r}, {self.rule.name})"

    def of(self, dtype: torch.dtype) -> Layout:
        """Return the layout for parameters of ``dtype``; raises TypeError where there is none."""
        if dtype not in self._layouts:
            if dtype not in {torch.bfloat16, torch.float32, torch.float64}:
                raise TypeError(
                    f"expected bfloat16, float32 or float64, got {dtype}: shard(param_dtype=), or torch.view_as_real(x)"
                )
            self._layouts[dtype] = self._make(dtype)
        return self._layouts[dtype]

    def _make(self, dtype: torch.dtype) -> Layout:
        moments, is_bf16 = self.rule.moments, dtype == torch.bfloat16
        if self.word == "compact" and dtype != torch.float64 and (moments or is_bf16):
            kernels = None if self._sizes_only else tried_compact_kernels()
            codes = [PositiveMoment8(kernels) if moment.is_positive else SignedMoment8(kernels) for moment in moments]
            return Layout(self.rule, dtype, Remainder8(kernels) if is_bf16 else None, codes, None)
        marks = next((i for i, moment in enumerate(moments) if moment.is_positive and is_bf16), None)
        exact = MarkedRemainder() if marks is None else Remainder()
        raw = RawMoment(torch.float64 if dtype == torch.float64 else torch.float32)
        return Layout(self.rule, dtype, exact if is_bf16 else None, [raw] * len(moments), marks)


class Layout:
    """The fields of a piece, one after the other, each on 64 bytes: those of the master, then those of each moment.

    ``master`` is None where the parameter is its own master; ``marks`` is the moment in whose sign bits ties of the
    master are marked.
    """

    def __init__(
        self,
        rule: Rule,
        dtype: torch.dtype,
        master: MasterCode | None,
        moments: Sequence[MomentCode],
        marks: int | None,
    ) -> None:
        self.rule, self.dtype = rule, dtype  # the parameter's
        self.master, self.moments, self.marks = master, moments, marks
        are_raw = all(moment.is_raw for moment in moments)
        first = master.fields if master is not None else ()
        self.fields: list[Field] = [*first, *(field for moment in moments for field in moment.fields)]  # in their order
        self.is_small = dtype == torch.float64 or not are_raw  # a tile needs more scratch than a large one has
        self.is_raw = master is None and are_raw  # the fields are the moments, and the parameter is its own master

    def tile_numel(self, scratch: TileScratch) -> int:
        """Return the elements that one tile has in ``scratch``."""
        return scratch.small_numel if self.is_small else scratch.numel

    def most_together(self, gradient: torch.Tensor, factor: torch.Tensor | None, scratch: TileScratch) -> int:
        """Return how many elements of pieces ``update_all`` takes at one time; 0: each is updated tile by tile."""
        if self.is_raw and factor is None and gradient.dtype == self.dtype and not self.rule.needs_work:
            return sys.maxsize  # on the bytes as they lie
        is_exact = self.marks is not None and not self.is_small
        return min(scratch.numel, TOGETHER_NUMEL) if is_exact and gradient.is_cpu else 0

    def update_all(
        self,
        parameters: list[torch.Tensor],
        gradients: list[torch.Tensor],
        views: list[Sequence[torch.Tensor]],
        factor: torch.Tensor | None,
        hyper: Hyperparameters,
        scratch: TileScratch,
    ) -> None:
        """Do one update in place of pieces of ``most_together`` elements in all: (numel,) each, and their fields."""
        if self.is_raw:
            return self.rule.update(parameters, gradients, views, hyper)
        assert isinstance(self.master, Remainder) and self.marks is not None
        rows, moments = scratch.rows(small=False), [each[1:] for each in views]
        fields = [(each[0], each[1 + self.marks]) for each in views]
        masters = self.master.decode_all(parameters, fields, rows)
        scaled = cut_like(parameters, padded(parameters), rows.gradient)
        torch._foreach_copy_(scaled, gradients)
        if factor is not None:
            torch._foreach_mul_(scaled, factor)
        self.rule.update(masters, scaled, moments, hyper, rows.work)
        self.master.encode_all(parameters, fields, rows)

    def nbytes(self, numel: int) -> int:
        """Return the bytes of a piece of ``numel`` elements, padding included."""
        return sum(round_up(f.length(numel) * f.dtype.itemsize, _FIELD_ALIGNMENT) for f in self.fields)

    def places(self, offset: int, numel: int) -> list[tuple[int, int, torch.dtype]]:
        """Return the places in a bucket of the fields of a piece of ``numel`` elements at ``offset``: bytes, dtype."""
        places: list[tuple[int, int, torch.dtype]] = []
        for field in self.fields:
            nbytes = field.length(numel) * field.dtype.itemsize
            places.append((offset, offset + nbytes, field.dtype))
            offset += round_up(nbytes, _FIELD_ALIGNMENT)
        return places

    # -- one tile -------------------------------------------------------------------------------------------------

    def tile(self, views: Sequence[torch.Tensor], start: int, stop: int) -> Tile:
        """Return elements [start, stop) of a piece's ``views``; ``start`` is a multiple of 1,024."""
        parts = [
            view[start // field.numel_per_entry : field.length(stop)]
            for field, view in zip(self.fields, views, strict=True)
        ]
        begin = len(self.master.fields) if self.master is not None else 0
        master, moments = parts[:begin], []
        for code in self.moments:
            moments.append(parts[begin : begin + len(code.fields)])
            begin += len(code.fields)
        if self.marks is not None:
            master.append(moments[self.marks][0])
        return Tile(self, master, moments)


class Tile:
    """The state of a stretch of one parameter, in its bucket: the fields of the ``master``, and of each moment."""

    __slots__ = ("_layout", "master", "moments")

    def __init__(self, layout: Layout, master: list[torch.Tensor], moments: list[list[torch.Tensor]]) -> None:
        self._layout = layout
        self.master = master
        self.moments = moments

    def update(
        self,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        factor: torch.Tensor | None,
        hyper: Hyperparameters,
        scratch: TileScratch,
    ) -> None:
        """Do one update in place. ``parameter``, ``gradient``: (numel,); the dither must have been aimed."""
        layout = self._layout
        rows = self.rows(scratch)
        master = self.decode_master(parameter, rows)
        moments = self.decode_moments(rows)
        scaled = _scaled(gradient, factor, rows, master.dtype)
        layout.rule.update([master], [scaled], [moments], hyper, _work(rows, master))
        self.encode_moments(moments, rows, scratch)
        self.encode_master(parameter, rows, scratch)

    def decode_master(self, parameter: torch.Tensor, rows: TileRows) -> torch.Tensor:
        """Return the master: (numel,), in scratch, or ``parameter`` where it is its own."""
        code = self._layout.master
        return parameter if code is None else code.decode(parameter, self.master, rows)

    def encode_master(self, parameter: torch.Tensor, rows: TileRows, scratch: TileScratch) -> None:
        """Keep the master that lies in ``rows.master``, after the moments were kept."""
        code = self._layout.master
        if code is not None:
            code.encode(parameter, self.master, rows, scratch.dither)

    def attach_master(self, parameter: torch.Tensor, rows: TileRows) -> None:
        """Keep the part of the master in ``rows.master`` that ``parameter`` lacks; ``parameter`` stays as it is."""
        assert self._layout.master is not None
        self._layout.master.attach(parameter, self.master, rows)

    def clear_moments(self) -> None:
        """Make the moments those of a fresh parameter; the marks of the master stay."""
        for index, fields in enumerate(self.moments):
            for field in fields:
                if index == self._layout.marks:
                    field.masked_fill_(field.isnan(), 0.0)  # its sign is the processor's, and no mark
                    field.view(torch.int32).bitwise_and_(-1 << 31)
                else:
                    field.zero_()

    def clear_master(self) -> None:
        """Make the parameter its own master."""
        assert self._layout.master is not None
        self._layout.master.clear(self.master)

    def rows(self, scratch: TileScratch) -> TileRows:
        """Return the rows of ``scratch`` that a tile of this layout works in."""
        return scratch.rows(small=self._layout.is_small)

    def decode_moments(self, rows: TileRows) -> list[torch.Tensor]:
        """Return the moments: (numel,) each, in ``rows.spare`` unless they are kept as they are."""
        nothing = rows.work[:0]
        spare = (*rows.spare, nothing, nothing)
        return [
            code.decode(fields, row, rows.work)
            for code, fields, row in zip(self._layout.moments, self.moments, spare, strict=False)
        ]

    def encode_moments(self, values: Sequence[torch.Tensor], rows: TileRows, scratch: TileScratch) -> None:
        """Keep ``values``, which lie where ``decode_moments`` returns them."""
        for index, (code, fields) in enumerate(zip(self._layout.moments, self.moments, strict=True)):
            code.encode(values[index], fields, rows.work, scratch.dither, index + 1)


def _scaled(gradient: torch.Tensor, factor: torch.Tensor | None, rows: TileRows, dtype: torch.dtype) -> torch.Tensor:
    """Return ``gradient`` in ``dtype``, times ``factor``: itself, or a copy in scratch."""
    if factor is None and gradient.dtype == dtype:
        return gradient
    result = _row(rows, 0 if dtype == torch.float64 else 1, dtype)[: gradient.numel()]
    result.copy_(gradient)
    return result if factor is None else result.mul_(factor)


def _work(rows: TileRows, master: torch.Tensor) -> torch.Tensor:
    """Return a row of scratch like ``master``."""
    return _row(rows, 1 if master.dtype == torch.float64 else 2, master.dtype)[: master.numel()]


def _row(rows: TileRows, index: int, dtype: torch.dtype) -> torch.Tensor:
    """Return row ``index`` of the scratch seen as rows of ``dtype``; a row of fp64 takes two of fp32."""
    if dtype != torch.float64:
        return (rows.master, rows.gradient, rows.work)[index]
    numel = rows.master.numel()
    return rows.master.as_strided((6 * numel,), (1,)).view(torch.float64)[index * numel : (index + 1) * numel]

"""How optimizer state is laid out in bytes, and the kernel that updates one stretch of it.

A bucket is a slice of a unit's state that moves as one key; it consists of pieces, each a stretch of one parameter.
In a piece the fields lie one after the other, each on 64 bytes: bf16 parameters keep ``lo`` (int16, the master's other
16 bits), m and v (fp32): 10 bytes, 12 with the parameter; fp32 and fp64 parameters keep m and v in their own dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from tiered.units import round_up

if TYPE_CHECKING:
    from tiered.zero.unit import Segment

__all__ = [
    "PIECE_ALIGNMENT",
    "Bucket",
    "Fields",
    "Hyperparameters",
    "Piece",
    "TileScratch",
    "decode_master",
    "divide",
    "encode_master",
    "update_piece",
]

PIECE_ALIGNMENT = 1024
"""Elements; a piece and a tile start at a multiple of this from the start of their parameter, so that the vectorised
kernels meet the same lanes and tails as on the whole parameter (design.md, section 9)."""

_FIELD_ALIGNMENT = 64  # bytes


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """The frozen hyperparameters of one parameter in one step; ``step`` is its count after this update."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    maximize: bool
    step: torch.Tensor  # () float32


class Fields(NamedTuple):
    """The fields of a piece, each (numel,); ``lo`` is None where the parameter is its own master."""

    lo: torch.Tensor | None  # int16
    exp_avg: torch.Tensor  # fp32, or the parameter's dtype when it is its own master
    exp_avg_sq: torch.Tensor  # the same


class Piece:
    """Elements [start, stop) of one parameter, in memory order, and where their state lies in the bucket."""

    __slots__ = ("offset", "segment", "start", "stop")

    def __init__(self, segment: Segment, start: int, stop: int, offset: int) -> None:
        self.segment = segment
        self.start = start
        self.stop = stop
        self.offset = offset  # bytes

    def __repr__(self) -> str:
        return f"Piece({self.segment.name!r}[{self.start}:{self.stop}] at {self.offset})"

    @property
    def numel(self) -> int:
        """Elements of the parameter."""
        return self.stop - self.start

    @property
    def nbytes(self) -> int:
        """Bytes of state, padding included."""
        return sum(round_up(self.numel * dtype.itemsize, _FIELD_ALIGNMENT) for dtype in _dtypes(self.segment.dtype))

    def fields(self, bucket: torch.Tensor) -> Fields:
        """Return the fields as views of ``bucket``, the (nbytes,) uint8 of the whole bucket."""
        views: list[torch.Tensor] = []
        offset = self.offset
        for dtype in _dtypes(self.segment.dtype):
            nbytes = self.numel * dtype.itemsize
            views.append(bucket[offset : offset + nbytes].view(dtype))
            offset += round_up(nbytes, _FIELD_ALIGNMENT)
        return Fields(views[0], views[1], views[2]) if len(views) == 3 else Fields(None, views[0], views[1])


class Bucket:
    """Pieces that move together under one key."""

    __slots__ = ("key", "nbytes", "pieces")

    def __init__(self, key: str) -> None:
        self.key = key
        self.pieces: list[Piece] = []
        self.nbytes = 0

    def __repr__(self) -> str:
        return f"Bucket({self.key!r}, {len(self.pieces)} pieces, {self.nbytes} B)"


def _dtypes(parameter: torch.dtype) -> tuple[torch.dtype, ...]:
    """Return the dtypes of the fields kept for a parameter of this dtype; raises TypeError for others."""
    if parameter == torch.bfloat16:
        return (torch.int16, torch.float32, torch.float32)
    if parameter in {torch.float32, torch.float64}:
        return (parameter, parameter)
    raise TypeError(f"expected parameters of bfloat16, float32 or float64, got {parameter}: pass param_dtype= to shard")


def divide(key: str, segments: Sequence[Segment], bucket_numel: int) -> list[Bucket]:
    """Divide ``segments`` into buckets of at most ``bucket_numel`` elements (a multiple of 1,024) in their order.

    The bucket keys are ``key/0``, ``key/1``, ... A piece never crosses a parameter.
    """
    assert bucket_numel % PIECE_ALIGNMENT == 0
    buckets: list[Bucket] = []
    left = 0
    for segment in segments:
        start = 0
        while start < segment.numel:
            if left < min(PIECE_ALIGNMENT, segment.numel - start):
                buckets.append(Bucket(f"{key}/{len(buckets)}"))
                left = bucket_numel
            bucket = buckets[-1]
            room = left // PIECE_ALIGNMENT * PIECE_ALIGNMENT
            stop = segment.numel if segment.numel - start <= left else start + room
            piece = Piece(segment, start, stop, bucket.nbytes)
            bucket.pieces.append(piece)
            bucket.nbytes += piece.nbytes
            left -= piece.numel
            start = stop
    return buckets


class TileScratch:
    """Memory for one tile: master and gradient in fp32, work in int32; (numel,) each, over one buffer of the arena."""

    __slots__ = ("gradient", "master", "numel", "work")

    def __init__(self, buffer: torch.Tensor, numel: int) -> None:
        self.numel = numel
        views = buffer[: self.nbytes(numel)].view(torch.float32).view(3, numel)
        self.master = views[0]
        self.gradient = views[1]
        self.work = views[2].view(torch.int32)

    def release(self) -> None:
        """Let go of the buffer; the scratch is of no use any more."""
        self.master = self.gradient = torch.empty(0)
        self.work = torch.empty(0, dtype=torch.int32)

    @staticmethod
    def nbytes(numel: int) -> int:
        """Return the bytes that scratch for tiles of ``numel`` elements takes."""
        return 12 * numel


def decode_master(hi: torch.Tensor, fields: Fields, out: torch.Tensor, work: torch.Tensor) -> None:
    """Write the fp32 masters of ``hi`` (bf16) and ``fields.lo`` to ``out``; clears the tie marks in v's sign bits.

    master_bits = (hi << 16) + lo, and 0x10000 more where the mark says that -0x8000 stands for +0x8000
    (design.md, section 9). ``hi``, ``out``: (numel,); ``work``: (numel,) int32 scratch. A tile of 1 Mi elements holds
    about eight ties, so the marks are applied by arithmetic, without looking for them first.
    """
    assert fields.lo is not None
    bits = out.view(torch.int32)
    bits.copy_(hi.view(torch.int16))
    bits.bitwise_left_shift_(16).add_(fields.lo)
    marks = fields.exp_avg_sq.view(torch.int32)
    torch.bitwise_right_shift(marks, 31, out=work)  # -1 where marked
    bits.sub_(work, alpha=1 << 16)
    marks.bitwise_and_(0x7FFFFFFF)


def encode_master(master: torch.Tensor, hi: torch.Tensor, fields: Fields, work: torch.Tensor) -> None:
    """Split ``master`` (fp32) into ``hi`` (bf16, torch's rounding) and ``fields.lo``; marks ties in v's sign bit.

    ``work`` is (numel,) int32 scratch; the sign bits of v must be clear. Lossless but for the payload of a NaN.
    """
    assert fields.lo is not None
    hi.copy_(master)
    work.copy_(hi.view(torch.int16))
    work.bitwise_left_shift_(16)
    torch.sub(master.view(torch.int32), work, out=work)
    fields.lo.copy_(work)  # +0x8000 wraps to -0x8000
    work.clamp_(0, 0x8000).bitwise_right_shift_(15).bitwise_left_shift_(
        31
    )  # the sign bit where the remainder is 0x8000
    fields.exp_avg_sq.view(torch.int32).bitwise_or_(work)


def update_piece(
    piece: Piece,
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    bucket: torch.Tensor,
    hyper: Hyperparameters,
    factor: torch.Tensor | None,
    scratch: TileScratch,
) -> None:
    """Do one AdamW update of ``piece`` in place, tile by tile.

    ``parameter``, ``gradient``: (numel of the whole parameter,) in memory order, in the parameter's dtype; ``bucket``:
    the bucket's uint8 bytes; ``factor``: () clip factor multiplied to the gradient in fp32, or None. The arithmetic is
    ``torch._fused_adamw_`` on the fp32 master (the parameter itself for fp32 and fp64).
    """
    fields = piece.fields(bucket)
    for start in range(0, piece.numel, scratch.numel):
        stop = min(start + scratch.numel, piece.numel)
        tile = Fields(*(None if field is None else field[start:stop] for field in fields))  # type: ignore[arg-type]
        own = parameter[piece.start + start : piece.start + stop]
        grad = gradient[piece.start + start : piece.start + stop]
        if tile.lo is None:
            if factor is not None:
                grad = grad * factor if grad.dtype == torch.float64 else _scaled(grad, factor, scratch)
            _adamw(own, grad, tile, hyper)
            continue
        master = scratch.master[: stop - start]
        work = scratch.work[: stop - start]
        decode_master(own, tile, master, work)
        _adamw(master, _scaled(grad, factor, scratch), tile, hyper)
        encode_master(master, own, tile, work)


def _scaled(gradient: torch.Tensor, factor: torch.Tensor | None, scratch: TileScratch) -> torch.Tensor:
    result = scratch.gradient[: gradient.numel()]
    result.copy_(gradient)
    if factor is not None:
        result.mul_(factor)
    return result


def _adamw(parameter: torch.Tensor, gradient: torch.Tensor, state: Fields, hyper: Hyperparameters) -> None:
    torch._fused_adamw_(
        [parameter], [gradient], [state.exp_avg], [state.exp_avg_sq], [], [hyper.step],
        lr=hyper.lr, beta1=hyper.beta1, beta2=hyper.beta2, weight_decay=hyper.weight_decay, eps=hyper.eps,
        amsgrad=False, maximize=hyper.maximize,
    )  # fmt: skip
